"""Several processes on one store, for tests: journals that each have a lease of their own, and what they were told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from uuid import uuid4

from midstream.errors import MidstreamError
from midstream.follow import Follow
from midstream.journal.base import Journal
from midstream.journal.redis import RedisJournal
from midstream.journal.redis_url import Terms
from midstream.records import Frame
from midstream.rules import Bounds
from midstream.server.settings import Settings
from midstream.testing.clock import ManualClock
from midstream.testing.fault_proxy import FaultProxy
from midstream.testing.gateway import RunningGateway
from midstream.testing.patience import until
from tests.valkeys import QUICK, Valkey, redis_journal, shared, valkey


class Told:
    """A listener that remembers, and has readers where a test says so."""

    def __init__(self) -> None:
        self.orphans: list[str] = []
        self.gone: list[str] = []
        self.readers: dict[str, int] = {}

    def orphaned(self, stream_id: str) -> None:
        self.orphans.append(stream_id)

    def superseded(self, stream_id: str) -> None:
        self.gone.append(stream_id)

    def lowest(self, stream_id: str) -> int | None:
        return self.readers.get(stream_id)


class Processes:
    """Makes journals on one store."""

    def __init__(self, server: Valkey, stack: AsyncExitStack, clock: ManualClock) -> None:
        self.server = server
        self.clock = clock
        self.prefix = f"t{uuid4().hex}"
        self._stack = stack

    async def start(
        self,
        listener: Told | None = None,
        terms: Terms = QUICK,
        bounds: Bounds | None = None,
        url: str | None = None,
    ) -> RedisJournal:
        """Another process, with a listener or alone."""
        journal = redis_journal(url or self.server.url(self.prefix), self.prefix, self.clock, bounds, terms)
        if listener is not None:
            journal.listen(listener)
        await journal.open()
        self._stack.push_async_callback(journal.close)
        return journal

    def keys(self, part: str = "") -> list[bytes]:
        """Keys of this store that have this part in them."""
        return self.server.keys(f"{self.prefix}:*{part}*")

    def delete(self, part: str) -> None:
        for key in self.keys(part):
            self.server.ask("DEL", key)


@asynccontextmanager
async def processes(server: Valkey | None = None) -> AsyncIterator[Processes]:
    async with AsyncExitStack() as stack:
        yield Processes(server or shared(), stack, ManualClock())


class Failover:
    """A primary, a replica that has what was written until it was promoted, and one address that leads to either."""

    def __init__(self, primary: Valkey, replica: Valkey, proxy: FaultProxy, several: Processes) -> None:
        self.primary, self.replica = primary, replica
        self._proxy = proxy
        self._several = several
        self.clock = several.clock

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._proxy.port}?prefix={self._several.prefix}"

    async def start(self, listener: Told | None = None, terms: Terms = QUICK) -> RedisJournal:
        return await self._several.start(listener, url=self.url, terms=terms)

    async def cut_off(self) -> None:
        """The replica has all there is now, and gets nothing more."""
        size = self.primary.ask("DBSIZE")
        offset = self.primary.info("replication")["master_repl_offset"]
        await until(lambda: self.replica.info("replication")["slave_repl_offset"] >= offset, "the replica to catch up")
        assert self.replica.ask("DBSIZE") == size
        self.replica.ask("REPLICAOF", "NO", "ONE")

    def fail_over(self) -> None:
        """The primary is gone, its address leads to the replica."""
        self._proxy.retarget("127.0.0.1", self.replica.port)
        self.primary.kill()
        self._proxy.reset()


@asynccontextmanager
async def failing_over() -> AsyncIterator[Failover]:
    with valkey(repl_diskless_sync_delay=0) as primary, valkey(replicaof=f"127.0.0.1 {primary.port}") as replica:
        await until(lambda: replica.info("replication").get("master_link_status") == "up", "the replica to be in step")
        async with FaultProxy("127.0.0.1", primary.port) as proxy, processes(primary) as several:
            yield Failover(primary, replica, proxy, several)


@asynccontextmanager
async def gateway_on(
    url: str, terms: Terms, *, clock: ManualClock | None = None, **settings: Any
) -> AsyncIterator[RunningGateway]:
    """A gateway whose journal has these terms."""
    gateway = RunningGateway(Settings(journal=url, **settings), clock=clock)
    journal_of(gateway)._terms = terms
    async with gateway:
        yield gateway


def journal_of(gateway: RunningGateway) -> RedisJournal:
    journal = gateway.streams.journal
    assert isinstance(journal, RedisJournal)
    return journal


async def crash(journal: RedisJournal) -> None:
    """What is left of a process that was killed: its connections are gone, its lease and its streams are not."""
    lease = journal._lease
    lease.holds = False  # nothing is given up
    await journal.close()


async def reconnected(journal: RedisJournal) -> None:
    """Break the journal's connections, and return once it has new ones."""
    nodes = journal._store.nodes()
    before = [node.since for node in nodes]
    for node in nodes:
        node.drop()
    await until(lambda: all(node.since > was for node, was in zip(nodes, before, strict=True)), "new connections")
    await until(journal._store.answers, "every connection to be there")


class Reader:
    """Follows a stream as a connection does, and keeps what it is given."""

    def __init__(self, journal: Journal, stream_id: str, after: int = 0) -> None:
        self.frames: list[Frame] = []
        self.error: MidstreamError | None = None
        self.follow = Follow(journal, stream_id, after)
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            await self.follow.feed(self)
        except MidstreamError as error:
            self.error = error

    def write(self, page: object) -> bool:
        self.frames += page.frames  # type: ignore[attr-defined]  # a Page
        return True

    async def drain(self) -> None:
        pass

    async def has(self, count: int) -> None:
        await until(
            lambda: len(self.frames) >= count or self._task.done(), f"{count} records, of which {len(self.frames)}"
        )
        assert len(self.frames) == count, self.error

    async def waits(self) -> None:
        await until(lambda: self.follow.waiting, "the reader to wait")

    async def over(self) -> None:
        """Return when it was given the end, or told of an error."""
        await until(self._task.done, "the reader's end")
        await self._task

    async def leave(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


async def refusal_of(verb: object) -> str:
    """The code of the error that a verb raises."""
    try:
        await verb  # type: ignore[misc]  # a coroutine of any type
    except MidstreamError as error:
        return error.code
    return "nothing"
