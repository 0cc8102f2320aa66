"""A pool whose leases and progress are in a store that fails over to a replica without its newest writes.

Two gateways, workers that post to either, readers of every stream.  What only the primary knew is gone: batches,
leases, flags, faults' marks.  The database knows nothing of that, and decides.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from midstream.errors import CursorAhead, StoreUnavailable
from midstream.pool.errors import InvalidJob, PoolUnavailable, ProgressOutOfSequence
from midstream.pool.lifecycle import NOMINATED
from midstream.pool.shapes import Generation, Reply
from midstream.testing.clock import ManualClock
from midstream.testing.patience import PATIENCE, until
from midstream.wire import POOL_FLOOR_TOKENS, TERMINAL
from tests.houses import KEY, OWNER, WORKER, House
from tests.leases import redis_leases
from tests.sharing import Failover, failing_over
from tests.valkeys import QUICK, redis_journal

T = TypeVar("T")
READERS, WORKERS = 12, 6
# What has become of a request whose stream ended like this: its reply may have come before the cancel, or before it was
# found that it is not what had been shown.
ENDS = {"done": ["done"], "cancelled": ["cancelled", "done"], "failed": ["failed", "cancelled", "done"]}
# A busy machine has time to put back what the replica lacks, before readers are told that it is gone.
TERMS = replace(QUICK, mend=5.0)


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """As workers and readers do: the same again while the store is away."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await call()
            except (PoolUnavailable, StoreUnavailable):
                await asyncio.sleep(0.02)


def said(generation: str, batches: int) -> list[str]:
    """What a worker says, no batch of which is like another."""
    return [f"[{generation}]", *(f" {at}" for at in range(1, batches))]


@dataclass
class Town:
    """Gateways on the same stores; `dice` decide what is done, `posted` is how many batches each worker got through."""

    houses: list[House]
    dice: random.Random
    heard: dict[str, list[Any]] = field(default_factory=dict)
    posted: dict[str, int] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    over: bool = False

    @property
    def anywhere(self) -> House:
        return self.dice.choice(self.houses)

    async def reads(self, house: House, stream_id: str, cancels_after: int | None = None) -> None:
        """To the end, from wherever its connection was lost; or up to a cancel, and then to the end.

        A cancel may end what the replica has before the writer has put back what it lacks.  Then a reader who has more
        is told to begin again, loudly, and does.
        """
        heard = self.heard[stream_id] = []
        is_cancelled = cancels_after is not None
        while not heard or heard[-1].event not in TERMINAL:
            try:
                follow = await house.streams.follow(stream_id, OWNER, len(heard))
                assert follow is not None
                try:
                    async for page in follow:
                        heard.extend(page.records())
                        if cancels_after is not None and len(heard) > cancels_after:
                            cancels_after = None
                            await patiently(lambda: house.streams.cancel(stream_id, OWNER))
                finally:
                    house.streams.leave(follow)
            except StoreUnavailable:
                await asyncio.sleep(0.02)
            except CursorAhead:
                assert is_cancelled, "records were lost"
                heard.clear()

    async def works(self, name: str) -> None:
        worker = replace(WORKER, name=name)
        while not self.over:
            given = (await patiently(lambda: self.anywhere.pool.pop(worker, KEY))).given
            for generation, _ in given:
                self.given.add(generation.id)
                await self.does(generation)
            if not given:
                await asyncio.sleep(0.02)

    async def does(self, generation: Generation) -> None:
        """Post, and hand it in, give it back, or vanish.  A post that is refused is the last one."""
        batches = self.dice.randint(10, 60)
        texts = said(generation.id, batches)
        how = self.dice.choice(["hands in"] * 6 + ["faults", "vanishes"])
        upto = batches if how == "hands in" else batches // 2
        for seq, text in enumerate(texts[:upto], 1):
            house = self.anywhere
            try:
                told = await patiently(lambda: house.pool.progress(generation.id, KEY, seq, text, ""))  # noqa: B023
            except (InvalidJob, ProgressOutOfSequence):
                self.silent.add(generation.id)
                break
            if told.cancelled:
                break
            self.posted[generation.id] = seq
            await asyncio.sleep(self.dice.random() / 50)
        with suppress(InvalidJob):
            if how == "hands in":
                await patiently(lambda: self.anywhere.pool.submit(generation.id, "bob", Reply("".join(texts))))
            elif how == "faults":
                await patiently(lambda: self.anywhere.pool.fault(generation.id, "bob", "generation_error"))

    async def asks(self, count: int) -> list[asyncio.Task[None]]:
        """So many readers; every fourth one cancels."""
        readers = []
        for at in range(count):
            house = self.houses[at % 2]
            stream_id = await house.ask()
            cancels_after = self.dice.randint(2, 12) if at % 4 == 3 else None
            readers.append(asyncio.create_task(self.reads(house, stream_id, cancels_after)))
        return readers

    async def settles(self) -> None:
        """Time passes until nobody has anything: who vanished is replaced, and what is replaced is done."""
        house = self.houses[0]
        async with asyncio.timeout(2 * PATIENCE):
            while await house.jobs.totals() != (0, 0) or (await house.pool.overview(1000)).running:
                house.clock.advance(NOMINATED + 1)
                await asyncio.gather(*(each.sweep() for each in self.houses))
                await asyncio.sleep(0.05)

    async def judge(self) -> None:
        house = self.houses[0]
        for stream_id, heard in self.heard.items():
            assert [record.seq for record in heard] == list(range(1, len(heard) + 1))
            *tokens, end = [(record.event, record.json()) for record in heard[1:]]
            assert {event for event, _ in tokens} <= {"token"}
            text = "".join(fields["delta"] for _, fields in tokens)
            request = await house.jobs.by_stream(stream_id)
            assert request is not None
            assert request.status in ENDS[end[0]]
            voices = {fields["src"][0] for _, fields in tokens}
            assert len(voices) <= 1, "two workers' words in one stream"
            for voice in voices:
                assert "".join(said(voice, 60)).startswith(text), "a gap, or a token twice"
            if end[0] == "done":
                [done] = [one for one in await house.jobs.generations(request.id) if one.reply is not None]
                assert done.reply is not None
                assert text == done.reply.content
            for one in await house.jobs.generations(request.id):
                if one.id not in self.given:  # the store was away when it was to be granted, and another has the job
                    assert one.status in ("ended", "faulted")
                else:
                    assert one.status in ("done", "cancelled", "faulted")
                assert one.settled is (one.status in ("done", "cancelled"))
                assert one.units == 0 or POOL_FLOOR_TOKENS <= one.units <= 100
        asked, worked = await house.balances()
        ledger = (await house.pool.overview(1000)).ledger
        assert -asked == worked == sum(row.units for row in ledger)
        assert len({row.generation for row in ledger}) == len(ledger)
        assert worked > 0


async def town(directory: Path, failover: Failover, stack: AsyncExitStack, seed: int) -> Town:
    clock = ManualClock()
    began = clock()
    houses = []
    for _ in range(2):
        leases = redis_leases(failover.url, ahead=lambda: clock() - began)
        journal = redis_journal(failover.url, "", clock, terms=TERMS)
        house = House(directory / "pool.db", clock, journal, leases)
        await house.start()
        stack.push_async_callback(house.stop)
        assert await house.look() == []
        houses.append(house)
    return Town(houses, random.Random(seed))


@pytest.mark.parametrize("seed", [25, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
async def test_pool_loses_nothing_when_its_store_fails_over_without_the_newest_writes(
    tmp_path: Path, seed: int
) -> None:
    """No reader sees a gap or a token twice; each generation is paid, or lost and offered again; the ledger is zero."""
    async with failing_over() as failover, AsyncExitStack() as stack:
        here = await town(tmp_path, failover, stack, seed)
        workers = [asyncio.create_task(here.works(f"worker {at}")) for at in range(WORKERS)]
        readers = await here.asks(READERS)
        await until(lambda: sum(here.posted.values()) > 30, "posts")
        await failover.cut_off()
        readers += await here.asks(2)
        lost_from = sum(here.posted.values())
        await until(lambda: sum(here.posted.values()) > lost_from + 30, "posts that only the primary knows")
        failover.fail_over()
        await asyncio.wait(readers, timeout=2)  # what the living can do; then those are missed that vanished
        await asyncio.gather(here.settles(), *readers)
        here.over = True
        await asyncio.gather(*workers)
        assert here.silent, "nobody's batches were lost"
        await here.judge()
