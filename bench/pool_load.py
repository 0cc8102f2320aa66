"""The pool's load client: workers that post and pop over keep-alive connections, and readers of what they post.

    python -m bench.pool_load progress --port P --pid N --streams 200 --rate 5000 --warm 1 --window 4
    python -m bench.pool_load pops     --port P --pid N --workers 1000 --every 1 --warm 2 --window 4

`--rate 0` posts as fast as answers come.  Prints one line of JSON.  A worker has one request under way at a time, as
real ones do; with a rate, who is still waiting for an answer when its turn comes misses that turn, which is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
from collections.abc import Callable
from typing import Any, cast

import uvloop

from bench.machine import cpu_seconds, wait_seconds
from bench.ticker import TICK, chunk_text, now_us

MODEL = "bench"
_STAMP = re.compile(rb"@(\d{16})")
_TEXT = "/api/v2/generate/text"


class Caller(asyncio.Protocol):
    """A connection that asks and is answered, one at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._data = b""
        self._answered: Callable[[int, bytes], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    @property
    def busy(self) -> bool:
        return self._answered is not None

    def ask(self, path: str, body: bytes, answered: Callable[[int, bytes], None]) -> None:
        assert self._transport is not None
        self._answered = answered
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\napikey: bench\r\nContent-Type: application/json\r\n"
        self._transport.write(b"%bContent-Length: %d\r\n\r\n%b" % (head.encode(), len(body), body))

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        if not found:
            return
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        assert length is not None, head
        if len(body) < int(length[1]):
            return
        self._data, answered, self._answered = b"", self._answered, None
        assert answered is not None
        answered(int(head[9:12]), body)

    async def call(self, path: str, fields: dict[str, Any]) -> Any:
        """Ask, and wait for the answer.  Raises RuntimeError for one that is no 2xx."""
        done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self.ask(path, json.dumps(fields).encode(), lambda *answer: done.set_result(answer))
        status, body = await asyncio.wait_for(done, 30)
        if status // 100 != 2:
            raise RuntimeError(f"{path} was answered with {status}: {body[:200]!r}")
        return json.loads(body)


class Reader(asyncio.Protocol):
    """A connection that asks for an answer and reads it: `lags` are microseconds from post to reader."""

    def __init__(self) -> None:
        self.lags: list[int] = []
        self.opened = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        body = json.dumps({"model": MODEL, "prompt": "Hello", "max_tokens": 16384}).encode()
        head = b"POST /v1/stream HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        cast(asyncio.Transport, transport).write(b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body))

    def data_received(self, data: bytes) -> None:
        now = now_us()
        self.opened.set()
        for stamp in _STAMP.findall(data):
            self.lags.append(now - int(stamp))


class Poster:
    """A worker with a job: posts batches in order; `refused` holds what was not answered as it should be."""

    def __init__(self, caller: Caller, job: str) -> None:
        self.caller = caller
        self.done = 0
        self.refused: list[str] = []
        self._job = job.encode()
        self._seq = 0
        self._again: Callable[[Poster], None] | None = None

    def post(self) -> None:
        self._seq += 1
        body = b'{"id":"%b","seq":%d,"content":"%b"}' % (self._job, self._seq, chunk_text(now_us()).encode())
        self.caller.ask(f"{_TEXT}/progress", body, self._answered)

    def flood(self) -> None:
        """Post whenever the last one was answered."""
        self._again = Poster.post
        self.post()

    def stop(self) -> None:
        self._again = None

    def _answered(self, status: int, body: bytes) -> None:
        self.done += 1
        if status != 200 or body != b'{"cancelled":false}':
            self.refused.append(f"{status} {body[:100]!r}")
        if self._again is not None and not self.refused:
            self._again(self)


async def _connected(port: int, factory: Callable[[], Any]) -> Any:
    _, protocol = await asyncio.get_running_loop().create_connection(factory, "127.0.0.1", port)
    return protocol


def _pop(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "models": [MODEL],
        "max_length": 16_384,
        "max_context_length": 32_768,
        "bridge_agent": "bench:1:x",
        "chat_jobs": True,
    }


async def _progress(given: argparse.Namespace) -> dict[str, Any]:
    callers = [await _connected(given.port, Caller) for _ in range(given.streams)]
    await callers[0].call(f"{_TEXT}/pop", _pop("w0"))
    readers = [await _connected(given.port, Reader) for _ in range(given.streams)]
    await asyncio.wait_for(asyncio.gather(*(reader.opened.wait() for reader in readers)), 30)
    posters = []
    for at, caller in enumerate(callers):
        while (job := (await caller.call(f"{_TEXT}/pop", _pop(f"w{at}")))["id"]) is None:  # noqa: ASYNC110  # polling is its way
            await asyncio.sleep(0.01)
        posters.append(Poster(caller, job))
    missed = Missed()
    timer = asyncio.create_task(_paced([poster.post for poster in posters], callers, given.rate, missed))
    if not given.rate:
        timer.cancel()
        for poster in posters:
            poster.flood()
    seen = await _window(given, lambda: sum(poster.done for poster in posters), readers, missed)
    timer.cancel()
    for poster in posters:
        poster.stop()
    return seen | {"refused": [text for poster in posters for text in poster.refused][:3]}


async def _pops(given: argparse.Namespace) -> dict[str, Any]:
    callers = [await _connected(given.port, Caller) for _ in range(given.workers)]
    for _ in range(given.queued):
        fields = {"prompt": "Hello", "models": ["another"]}
        await callers[0].call(f"{_TEXT}/async", fields)
    answers: dict[int, int] = {}

    def answered(status: int, _: bytes) -> None:
        answers[status] = answers.get(status, 0) + 1

    def popping(at: int) -> Callable[[], None]:
        body = json.dumps(_pop(f"worker {at}")).encode()
        return lambda: callers[at].ask(f"{_TEXT}/pop", body, answered)

    missed = Missed()
    asks = [popping(at) for at in range(given.workers)]
    timer = asyncio.create_task(_paced(asks, callers, given.workers / given.every, missed))
    seen = await _window(given, lambda: answers.get(200, 0), [], missed)
    timer.cancel()
    return seen | {"refused": [f"{status}: {count}" for status, count in answers.items() if status != 200]}


class Missed:
    """Turns at which somebody was still waiting for an answer."""

    count = 0


async def _paced(asks: list[Callable[[], None]], callers: list[Caller], rate: float, missed: Missed) -> None:
    """Let everybody ask in turn, `rate` times a second in all, off a 1 ms timer."""
    if not rate:
        return
    begin, asked = now_us(), 0
    while True:
        await asyncio.sleep(TICK)
        due = int((now_us() - begin) * rate / 1e6)
        for at in range(asked, due):
            if callers[at % len(asks)].busy:
                missed.count += 1
            else:
                asks[at % len(asks)]()
        asked = due


async def _window(
    given: argparse.Namespace, done: Callable[[], int], readers: list[Reader], missed: Missed
) -> dict[str, Any]:
    await asyncio.sleep(given.warm)
    for reader in readers:
        reader.lags.clear()
    before, begin, used, late = done(), now_us(), cpu_seconds(given.pid), missed.count
    waited = wait_seconds(given.pid), wait_seconds(os.getpid())
    await asyncio.sleep(given.window)
    seconds = (now_us() - begin) / 1e6
    count, cpu = done() - before, cpu_seconds(given.pid) - used
    kept = max(wait_seconds(given.pid) - waited[0], wait_seconds(os.getpid()) - waited[1])
    lags = sorted(lag for reader in readers for lag in reader.lags)
    return {
        "rate": count / seconds,
        "core": cpu / seconds,
        "cpu_us": cpu * 1e6 / max(count, 1),
        "waited": kept / seconds,
        "missed": missed.count - late,
        "delivered": len(lags) / seconds,
        "p50_us": lags[len(lags) // 2] if lags else 0,
        "p99_us": lags[len(lags) * 99 // 100] if lags else 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("progress", "pops"))
    for name, kind, default in (
        ("port", int, None),
        ("pid", int, None),
        ("streams", int, 200),
        ("rate", float, 0.0),
        ("workers", int, 1000),
        ("every", float, 1.0),
        ("queued", int, 0),
        ("warm", float, 1.0),
        ("window", float, 4.0),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, required=default is None)
    given = parser.parse_args()
    seen = uvloop.run(_progress(given) if given.mode == "progress" else _pops(given))
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
