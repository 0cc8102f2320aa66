"""A pool without a wire: real jobs on SQLite, real leases, real streams, on a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from midstream.errors import UnknownStream
from midstream.journal.base import Journal
from midstream.journal.memory import MemoryJournal
from midstream.pool.jobs import Jobs
from midstream.pool.leases import Leases
from midstream.pool.leases_memory import MemoryLeases
from midstream.pool.pool import Pool
from midstream.pool.shapes import Declaration, Generation, Reply, Request
from midstream.pool.sweep import Sweep, recover
from midstream.producers.openai import Upstreams
from midstream.producers.pool import PoolSource, shown
from midstream.producers.sources import ModelSources
from midstream.records import Page, Producer, StreamState
from midstream.server.proceed import proceed
from midstream.streams import Streams
from midstream.testing.clock import ManualClock
from midstream.testing.patience import eventually, soon, until
from midstream.transports.asking import asked, open_stream

OWNER = "ada"
KEY = b"digest of bob's key"
WORKER = Declaration(
    "worker", "bob", ("m",), max_length=4096, max_context_length=8192, chat_jobs=True, agent="Hand:1:x"
)


class House:
    """One gateway's pool and streams.  Its jobs are in a file, which several may share, like leases and journal."""

    def __init__(
        self, file: Path, clock: ManualClock, journal: Journal | None = None, leases: Leases | None = None
    ) -> None:
        self.clock = clock
        self.leases = leases or MemoryLeases(clock)
        self.jobs = Jobs(f"sqlite:///{file}", clock, "" if self.leases.shared else "here")
        self.pool = Pool(self.jobs, self.leases, clock)
        self.journal = journal or MemoryJournal(clock)
        self.streams = Streams(self.journal, clock, proceed=self._proceed)
        self.source = PoolSource(self.pool, self.has_ended)
        self.sources = ModelSources(Upstreams([]), (), self.source)
        self._sweep = Sweep(self.pool, self.has_ended)

    async def _proceed(self, state: StreamState) -> Producer | None:
        return await proceed(self.streams, self.sources, state)

    async def start(self) -> None:
        await self.pool.start()
        await self.streams.start()
        await recover(self.pool, self.said)

    async def stop(self) -> None:
        await self.streams.close()
        await self.pool.stop()
        await self.sources.close()

    async def has_ended(self, stream_id: str) -> bool:
        try:
            return (await self.journal.state(stream_id)).ended
        except UnknownStream:
            return True

    async def said(self, stream_id: str) -> tuple[str, int] | None:
        try:
            return shown((await self.streams.answer(stream_id, OWNER)).fold)
        except UnknownStream:
            return None

    async def sweep(self) -> None:
        await self._sweep.sweep()
        await self.quiet()

    async def quiet(self) -> None:
        """Wait for what the pool does in the background."""
        await until(lambda: not self.pool._tasks, "the pool's tasks")

    # --- requesters -------------------------------------------------------------------------------------------------

    async def ask(self, prompt: str = "Say something", **body: Any) -> str:
        """Begin an answer; its stream.  A worker must have been here."""
        what = asked({"model": "m", "prompt": prompt, "max_tokens": 100, **body})
        opened = await open_stream(self.streams, self.sources, OWNER, what)
        stream_id = opened.state.meta.stream_id
        await self.queued(stream_id)
        return stream_id

    async def queued(self, stream_id: str) -> Request:
        """The request of a stream, once it is in the queue and attended."""

        async def attended() -> bool:
            request = await self.jobs.by_stream(stream_id)
            return request is not None and request.id in self.pool.attending

        await eventually(attended)
        request = await self.jobs.by_stream(stream_id)
        assert request is not None
        return request

    async def records(self, stream_id: str) -> list[tuple[str, dict[str, Any]]]:
        """Event and data of all records so far, the first one left out."""
        page: Page = await self.journal.read(stream_id, 1)
        return [(record.event, record.json()) for record in page.records()]

    async def told(self, stream_id: str, count: int) -> list[tuple[str, dict[str, Any]]]:
        """So many records, once they are there."""
        await soon(self.journal.wait(stream_id, count))
        async with asyncio.timeout(10):
            while len(told := await self.records(stream_id)) < count:
                await self.journal.wait(stream_id, 1 + len(told))
        return told

    async def end(self, stream_id: str) -> tuple[str, dict[str, Any]]:
        """The terminal record."""
        async with asyncio.timeout(10):
            while not (state := await self.journal.state(stream_id)).ended:
                await self.journal.wait(stream_id, state.highest_seq)
        [last] = (await self.journal.read(stream_id, state.highest_seq - 1)).records()
        return last.event, last.json()

    async def text(self, stream_id: str) -> str:
        return "".join(fields.get("delta", "") for _, fields in await self.records(stream_id))

    async def balances(self) -> tuple[int, int]:
        """The requester's and the worker's, which is all there is."""
        return await self.jobs.balance(OWNER), await self.jobs.balance(WORKER.owner)

    # --- workers ----------------------------------------------------------------------------------------------------

    async def look(self, worker: Declaration = WORKER) -> list[tuple[Generation, Request]]:
        return (await self.pool.pop(worker, KEY)).given

    async def pop(self, worker: Declaration = WORKER) -> Generation:
        """A job, of which there must be one."""
        [(generation, _)] = await self.look(worker)
        return generation

    async def post(self, generation: Generation, texts: Sequence[str], first: int = 1) -> None:
        """Post these as batches from `first` on, all of which must be taken."""
        for seq, text in enumerate(texts, first):
            posted = await self.pool.progress(generation.id, KEY, seq, text, "")
            assert not posted.cancelled

    async def finish(self, generation: Generation, text: str, **more: Any) -> int:
        return await self.pool.submit(generation.id, WORKER.owner, Reply(text, **more))


@asynccontextmanager
async def house(directory: Path, *, look: bool = True, **parts: Any) -> AsyncIterator[House]:
    """One that runs; unless told otherwise a worker has come to it and found nothing."""
    running = House(directory / "pool.db", parts.pop("clock", None) or ManualClock(), **parts)
    await running.start()
    try:
        if look:
            assert await running.look() == []
        yield running
    finally:
        await running.stop()
