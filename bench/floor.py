"""The floor: the least that a Python server can do to get these frames onto these wires.

An `asyncio.Protocol` with HTTP written by hand, one list of frames per stream, a position per reader, and a
pump that joins what is new into one write per reader and loop iteration.  No framework, no checks, no journal
and no limits: nobody should run it.  It is what the gateway's figures are divided by.

Routes: `GET /v1/stream/NAME?after=N`, `POST /v1/stream` (a silent stream of its own), and under `/bench/` the
same controls as the gateway's launcher.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import signal
from typing import Any, cast
from urllib.parse import urlsplit

import orjson
import uvloop

from bench.ticker import Ticker, chunk_text, now_us

SLICE = 512
HIGH_WATER = 256 * 1024

_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    b"Cache-Control: no-store\r\nTransfer-Encoding: chunked\r\n\r\n"
)


class Stream:
    __slots__ = ("frames", "readers")

    def __init__(self) -> None:
        self.frames: list[bytes] = [b'id: 1\nevent: start\ndata: {"seq":1}\n\n']
        self.readers: list[Reader] = []


class Floor:
    """The streams, and who has something to write when this iteration of the loop is over."""

    def __init__(self) -> None:
        self.streams: dict[str, Stream] = {}
        self._names = itertools.count()
        self._dirty: set[Reader] = set()
        self._ticker: Ticker | None = None

    def create(self) -> tuple[str, Stream]:
        name = f"s{next(self._names)}"
        stream = self.streams[name] = Stream()
        return name, stream

    def append(self, stream: Stream) -> None:
        seq = len(stream.frames) + 1
        delta = orjson.dumps(chunk_text(now_us()))
        stream.frames.append(b'id: %d\nevent: token\ndata: {"seq":%d,"delta":%b,"done":false}\n\n' % (seq, seq, delta))
        if stream.readers:
            if not self._dirty:
                asyncio.get_running_loop().call_soon(self._flush)
            self._dirty.update(stream.readers)

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, set()
        for reader in dirty:
            reader.pump()

    def control(self, verb: str, fields: dict[str, Any]) -> object:
        """`/bench/…`: make streams, fill them, begin to feed them, tell what was fed."""
        streams = [self.streams[name] for name in fields.get("streams", "").split(",") if name]
        if verb == "streams":
            made = [self.create() for _ in range(int(fields["count"]))]
            self._fill([stream for _, stream in made], int(fields["chunks"]))
            return [name for name, _ in made]
        if verb == "fill":
            self._fill(streams, int(fields["chunks"]))
        elif verb == "feed":
            append = self.append
            self._ticker = Ticker(lambda i: append(streams[i]), len(streams), float(fields["rate"]))
            self._ticker.start()
        elif verb == "fed" and self._ticker is not None:
            return self._ticker.stats()
        return {}

    def _fill(self, streams: list[Stream], chunks: int) -> None:
        for stream in streams:
            for _ in range(chunks):
                self.append(stream)


class Reader(asyncio.Protocol):
    """One connection: a request, then the pump."""

    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self._received = b""
        self._stream: Stream | None = None
        self._position = 0
        self._paused = False
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class, not a subclass
        self._transport.set_write_buffer_limits(high=HIGH_WATER)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._stream is not None:
            self._stream.readers.remove(self)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self.pump()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found or len(body) < _content_length(head):
            return
        self._received = b""
        method, target, _ = head[: head.index(b"\r\n")].decode().split(" ")
        url = urlsplit(target)
        if url.path.startswith("/bench/"):
            self._answer(self._floor.control(url.path.removeprefix("/bench/"), orjson.loads(body)))
        elif method == "POST":
            self._follow(self._floor.create()[1], 0)
        else:
            name = url.path.rpartition("/")[2]
            self._follow(self._floor.streams[name], int(url.query.removeprefix("after=")))

    def _answer(self, value: object) -> None:
        body = orjson.dumps(value)
        self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    def _follow(self, stream: Stream, after: int) -> None:
        self._transport.write(_HEAD)
        self._stream = stream
        self._position = after
        stream.readers.append(self)
        self.pump()

    def pump(self) -> None:
        # uvloop refuses a write after a failed one, and tells of the loss only in the next iteration.
        if self._stream is None or self._transport.is_closing():
            return
        frames = self._stream.frames
        while self._position < len(frames) and not self._paused:
            new = frames[self._position : self._position + SLICE]
            data = new[0] if len(new) == 1 else b"".join(new)
            self._position += len(new)
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def _content_length(head: bytes) -> int:
    _, found, rest = head.lower().partition(b"\r\ncontent-length:")
    return int(rest.partition(b"\r\n")[0]) if found else 0


async def serve(port: int) -> None:
    floor = Floor()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Reader(floor), "127.0.0.1", port, backlog=4096)
    stopped = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    gc.collect()
    gc.freeze()
    print(server.sockets[0].getsockname()[1], flush=True)
    await stopped.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="The bare-protocol server that figures are divided by.")
    parser.add_argument("--port", type=int, default=0)
    uvloop.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
