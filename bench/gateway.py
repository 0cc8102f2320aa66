"""The real gateway, with a producer that benchmarks can drive.

It is what `midstream serve` runs, and one route more: `POST /bench/…`, with the same commands as the floor's.
Streams opened there get their chunks from the ticker, by way of an ordinary producer: from there on the
writer, the journal, the readers and the sockets are the product's own.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

from bench.ticker import Ticker, chunk_text, now_us
from midstream.codec import native
from midstream.journal.base import Journal
from midstream.records import Chunk, Producer
from midstream.server.app import Gateway
from midstream.server.auth import OPEN_OWNER
from midstream.server.serving import serve
from midstream.server.settings import Settings
from midstream.streams import Streams
from midstream.transports.http import json_response, read_json

_MODEL = "bench"


class Feed:
    """A producer that yields what was pushed since it was last asked, as one read of an upstream would."""

    def __init__(self) -> None:
        self._chunks: list[Chunk] = []
        self._asked: asyncio.Future[None] | None = None

    def push(self, count: int = 1) -> None:
        self._chunks += [Chunk(chunk_text(now_us())) for _ in range(count)]
        if self._asked is not None and not self._asked.done():
            self._asked.set_result(None)

    async def produce(self, _: str) -> Producer:
        loop = asyncio.get_running_loop()
        while True:
            if not self._chunks:
                self._asked = loop.create_future()
                await self._asked
            chunks, self._chunks = self._chunks, []
            yield chunks


class Direct:
    """A writer of many streams at once: one task, that appends what the ticker has pushed.

    Streams are lists here: name, epoch and highest seq.  One chunk object serves all of them: what producers make is
    measured with a real upstream.
    """

    def __init__(self, journal: Journal, streams: list[list[Any]]) -> None:
        self._journal = journal
        self._streams = streams
        self._pushed: list[int] = []
        self._asked: asyncio.Future[None] | None = None
        self._task = asyncio.create_task(self._write())

    def tick(self, rate: float) -> Ticker:
        return Ticker(self._pushed.append, len(self._streams), rate, self._go_on)

    def _go_on(self) -> None:
        if self._asked is not None and not self._asked.done():
            self._asked.set_result(None)

    async def _write(self) -> None:
        append, pushed, streams, chunk = self._journal.append, self._pushed, self._streams, Chunk("")
        while True:
            for at in pushed:
                stream = streams[at]
                name, epoch, seq = stream
                stream[2] = seq = seq + 1
                chunk.delta = chunk_text(now_us())
                await append(name, [native.token(seq, chunk)], epoch=epoch, first_seq=seq)
            pushed.clear()
            self._asked = asyncio.get_running_loop().create_future()
            await self._asked


class Controls:
    """The commands below `/bench/`; everything else goes on to the gateway."""

    def __init__(self, app: ASGIApp, streams: Streams) -> None:
        self._app = app
        self._streams = streams
        self._feeds: dict[str, Feed] = {}
        self._ticker: Ticker | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/bench/"):
            fields = await read_json(scope, receive, 1 << 20)
            answer = await self._obey(scope["path"].removeprefix("/bench/"), fields)
            await json_response(answer)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _obey(self, verb: str, fields: dict[str, Any]) -> object:
        names = [name for name in fields.get("streams", "").split(",") if name]
        if verb == "streams":
            asked = fields.get("request", "{}").encode()
            made = [await self._open(asked) for _ in range(fields["count"])]
            await self._fill(made, fields["chunks"])
            return made
        if verb == "fill":
            await self._fill(names, fields["chunks"])
        elif verb == "feed":
            burst, produced = fields.get("burst", 1), fields.get("produced", False)
            self._ticker = await self._tick(names, fields["rate"], burst, produced=produced)
            self._ticker.start()
        elif verb == "fed" and self._ticker is not None:
            return self._ticker.stats()
        return {}

    async def _open(self, asked: bytes) -> str:
        feed = Feed()
        opened = await self._streams.open(OPEN_OWNER.owner, _MODEL, feed.produce, request=asked)
        self._feeds[opened.state.meta.stream_id] = feed
        return opened.state.meta.stream_id

    async def _tick(self, names: list[str], rate: float, burst: int, *, produced: bool) -> Ticker:
        """A ticker that feeds these streams, each `burst` chunks at a time.

        Straight into the journal where that never suspends, unless it is to be `produced`: the floor has no producer
        either, and what producers cost is measured with a real upstream.
        """
        journal = self._streams.journal
        if journal.traits.durable or produced:
            push = [self._feeds[name].push for name in names]
            return Ticker(lambda at: push[at](burst), len(push), rate / burst)
        states = [await journal.state(name) for name in names]
        return Direct(journal, [[state.meta.stream_id, state.epoch, state.highest_seq] for state in states]).tick(rate)

    async def _fill(self, names: list[str], chunks: int) -> None:
        """Push, and return once all of it is journaled."""
        journal = self._streams.journal
        for name in names:
            wanted = (await journal.state(name)).highest_seq + chunks
            for at in range(chunks):
                self._feeds[name].push()
                if at % 100 == 99:  # as if read in pieces, not as one giant batch
                    await asyncio.sleep(0)
            while (reached := (await journal.state(name)).highest_seq) < wanted:
                await journal.wait(name, reached)


async def _run(settings: Settings) -> None:
    gateway = Gateway(settings, {})
    gateway.app = Controls(gateway.app, gateway.streams)
    await serve(gateway, lambda address: print(address.rpartition(":")[2], flush=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="The gateway, with a producer that benchmarks can drive.")
    parser.add_argument("--journal", default="memory:")
    parser.add_argument("--upstream", action="append", default=[])
    parser.add_argument("--heartbeat", type=float, default=15.0)
    parser.add_argument("--grpc-port", type=int, default=0)
    parser.add_argument("--pool")
    given = parser.parse_args()
    uvloop.run(
        _run(
            Settings(
                port=0,
                grpc_port=given.grpc_port,
                journal=given.journal,
                upstream=tuple(given.upstream),
                pool=given.pool,
                heartbeat=given.heartbeat,
                max_streams_per_owner=20_000,
                max_jobs_per_owner=1_000_000,
                max_streams=20_000,
                drain=0.1,
            )
        )
    )


if __name__ == "__main__":
    main()
