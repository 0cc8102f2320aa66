"""A client of gRPC for benchmarks: HTTP/2 by hand, because one that does all of it would be the bottleneck.

It calls Generate on a connection of its own per stream, counts and times the messages in its window, and prints one
line of JSON with the names that the C client uses.  What it does not understand it passes over; nobody should read with
it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, cast

import uvloop

from bench.machine import cpu_seconds
from bench.ticker import now_us
from midstream.codec.pb import inference_pb2 as pb
from midstream.wire import GRPC_SERVICE

# RFC 9113: preface, SETTINGS with the largest window (6.5.2), WINDOW_UPDATE of the connection (6.9).
_OPENING = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\x06\x04\0\0\0\0\0\0\x04\x7f\xff\xff\xff\0\0\x04\x08\0\0\0\0\0\x7f\xff\0\0"
)
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7


def _literal(name: bytes, value: bytes) -> bytes:
    """A header field that no table knows (RFC 7541, section 6.2.2)."""
    return b"\0%c%b%c%b" % (len(name), name, len(value), value)


_HEAD = b"\x83\x86" + b"".join(
    _literal(name, value)
    for name, value in (
        (b":path", f"/{GRPC_SERVICE}/Generate".encode()),
        (b":authority", b"127.0.0.1"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    )
)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


class Seen:
    """What all readers saw."""

    def __init__(self) -> None:
        self.counting = False
        self.frames = self.reads = self.gaps = self.errors = 0
        self.latencies: list[int] = []


class Reader(asyncio.Protocol):
    """One connection that follows streams, one call at a time."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._received = b""
        self._messages = b""
        self._call = -1
        self._next = 0
        self.first: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(_OPENING)

    def call(self, session: str, wanted: int) -> None:
        """Leave the call before, if there is one, and follow."""
        leaving = _frame(_RESET, 0, self._call, (8).to_bytes(4, "big")) if self._call > 0 else b""
        self._call += 2
        self._next, self._messages = wanted, b""
        request = pb.GenerateRequest(session_id=session, resume_from_token=wanted).SerializeToString()
        body = b"\0" + len(request).to_bytes(4, "big") + request
        head = _frame(_HEADERS, 4, self._call, _HEAD)
        self._transport.write(leaving + head + _frame(_DATA, 1, self._call, body))

    def data_received(self, data: bytes) -> None:
        received = self._received + data
        at, end = 0, len(received)
        if self._seen.counting:
            self._seen.reads += 1
        while end - at >= 9:
            size = int.from_bytes(received[at : at + 3], "big")
            if end - at < 9 + size:
                break
            kind, flags = received[at + 3], received[at + 4]
            stream = int.from_bytes(received[at + 5 : at + 9], "big")
            self._take(kind, flags, stream, received[at + 9 : at + 9 + size])
            at += 9 + size
        self._received = received[at:]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _DATA and stream == self._call:
            self._hear(self._messages + payload)
        elif kind in (_SETTINGS, _PING) and not flags & 1:
            self._transport.write(_frame(kind, 1, 0, payload if kind == _PING else b""))
        elif (kind in (_RESET, _GOAWAY) or (kind == _HEADERS and flags & 1)) and stream in (0, self._call):
            self._seen.errors += 1  # nothing that is measured ends

    def _hear(self, data: bytes) -> None:
        at = 0
        while len(data) - at >= 5:
            size = int.from_bytes(data[at + 1 : at + 5], "big")
            if len(data) - at < 5 + size:
                break
            self._count(data[at + 5 : at + 5 + size])
            at += 5 + size
        self._messages = data[at:]

    def _count(self, data: bytes) -> None:
        told = pb.GenerateResponse.FromString(data)
        seen = self._seen
        if seen.counting:
            seen.frames += 1
            seen.latencies.append(now_us() - int(told.token[2:18]))
        if told.token_index != self._next:
            seen.gaps += 1
        self._next = told.token_index + 1
        if self.first is not None and not self.first.done():
            self.first.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._seen.errors += exc is not None


def _quantiles(values: list[int]) -> dict[str, int]:
    ranked = sorted(values)
    return {f"p{percent}": ranked[len(ranked) * percent // 100] for percent in (50, 90, 99)} | {"max": ranked[-1]}


def _waited(pid: int) -> float:
    """Seconds that this process could have run and another had its core."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


async def _connect(port: int, seen: Seen) -> Reader:
    _, reader = await asyncio.get_running_loop().create_connection(lambda: Reader(seen), "127.0.0.1", port)
    return reader


async def _live(given: argparse.Namespace, seen: Seen) -> dict[str, Any]:
    """Follow every stream, each on a connection of its own."""
    for session in given.sessions:
        (await _connect(given.port, seen)).call(session, given.wanted)
    await asyncio.sleep(given.warm)
    begin = now_us(), cpu_seconds(given.pid), _waited(given.pid), _waited(os.getpid())
    seen.counting = True
    await asyncio.sleep(given.window)
    seen.counting = False
    end = now_us(), cpu_seconds(given.pid), _waited(given.pid), _waited(os.getpid())
    told = {
        "from_us": begin[0],
        "to_us": end[0],
        "window_s": (end[0] - begin[0]) / 1e6,
        "server_cpu_s": end[1] - begin[1],
        "server_wait_s": end[2] - begin[2],
        "client_wait_s": end[3] - begin[3],
        "latency_us": _quantiles(seen.latencies or [0]),
    }
    return told | {"frames": seen.frames, "reads": seen.reads}


async def _resume(given: argparse.Namespace, seen: Seen) -> dict[str, Any]:
    """Call again and again on one connection, a stream after the other, and time the first message of each."""
    reader, took = await _connect(given.port, seen), []
    ends = time.monotonic() + given.warm + given.window
    begin = now_us(), _waited(given.pid)
    while time.monotonic() < ends:
        for session in given.sessions:
            reader.first = asyncio.get_running_loop().create_future()
            since = now_us()
            reader.call(session, given.wanted)
            await reader.first
            took.append(now_us() - since)
            await asyncio.sleep(0.003)
    seconds = (now_us() - begin[0]) / 1e6
    waited = _waited(given.pid) - begin[1]
    return {"first_frame_us": _quantiles(took), "window_s": seconds, "server_wait_s": waited, "client_wait_s": 0.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["live", "resume"])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--wanted", type=int, default=0, help="the token wanted first")
    parser.add_argument("--warm", type=float, required=True)
    parser.add_argument("--window", type=float, required=True)
    given = parser.parse_args()
    given.sessions = sys.stdin.read().split()
    seen = Seen()
    told = uvloop.run((_live if given.mode == "live" else _resume)(given, seen))
    print(json.dumps(told | {"gaps": seen.gaps, "errors": seen.errors}))


if __name__ == "__main__":
    main()
