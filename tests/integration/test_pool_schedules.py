"""Random schedules through the real routes: whatever happens, units add up, and readers hear one voice at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio
from sqlalchemy import text

from midstream.testing.patience import PATIENCE
from midstream.wire import POOL_FLOOR_TOKENS, TERMINAL
from tests import postgres, valkeys
from tests.pools import BOB, CAT, TEXT, Job, PoolSite, Reading, asked, pool_site

LONGEST = 100
# Of the accounts and of the ledger, at one moment.
SUMS = text(
    "SELECT (SELECT coalesce(sum(balance), 0) FROM midstream_account),"
    " (SELECT coalesce(sum(units), 0) FROM midstream_ledger)"
)
TEXTS = ("The ", "cat ", "sat\r\n", "\U0001f600", "é" * 40, "\ud83d", "\ude00 ", "")


@dataclass
class Town:
    """One gateway or several on the same stores, who asks, and who works; `dice` decides what they do."""

    sites: list[PoolSite]
    dice: random.Random
    readings: list[Reading] = field(default_factory=list)
    over: bool = False

    @property
    def anywhere(self) -> PoolSite:
        return self.dice.choice(self.sites)

    # --- who asks -----------------------------------------------------------------------------------------------------

    async def reads(self) -> None:
        """To the end, up to a cancel from whichever gateway, or up to where it leaves for good."""
        await asyncio.sleep(self.dice.random() / 2)
        reading = await self.anywhere.read(max_tokens=self.dice.choice([16, LONGEST]))
        how, records = self.dice.choice(["reads", "reads", "cancels", "leaves"]), self.dice.randint(1, 5)
        while not reading.heard or reading.heard[-1][0] not in TERMINAL:
            await reading.next()
            if how == "cancels" and len(reading.heard) == records:
                answer = await self.anywhere.ada.post(f"/v1/stream/{reading.stream_id}/cancel")
                assert answer.status == 200
            if how == "leaves" and len(reading.heard) == records:
                reading.leave()
                return
        self.readings.append(reading)

    async def polls(self) -> None:
        """For several generations, and maybe gives up on them."""
        params = {"n": self.dice.randint(1, 3), "max_length": LONGEST}
        answer = await self.anywhere.ada.post(f"{TEXT}/async", asked(params=params))
        assert answer.status == 202
        await asyncio.sleep(self.dice.random())
        if self.dice.random() < 0.5:
            status = await self.anywhere.http.ask("DELETE", f"{TEXT}/status/{answer.json['id']}")
            assert (status.status, status.json["done"]) == (200, True)

    # --- who works ----------------------------------------------------------------------------------------------------

    async def works(self, name: str, key: str) -> None:
        while not self.over:
            job = await self.anywhere.hand(name, key, amount=self.dice.randint(1, 2)).look()
            if job is None:
                await asyncio.sleep(0.01)
                continue
            for generation in job.body["ids"]:
                await self.does(Job(job.http, job.body | {"id": generation}), key)

    async def does(self, job: Job, key: str) -> None:
        """A job, well or badly: posts doubled and skipped, faults, other texts, doubled submits, or nothing more."""
        said = f"[{job.id}]"
        pieces = (
            [said, *self.dice.choices(TEXTS, k=self.dice.randint(0, 6))] if "stream_progress" in job.payload else []
        )
        for piece in pieces:
            answer = await job.send(piece, http=self.anywhere.keyed(key))
            if answer.status != 200 or answer.json["cancelled"]:
                break
            said += piece if job.seq else ""
            job.seq += 1
            if self.dice.random() < 0.1:
                assert (await job.send(piece, job.seq, self.anywhere.keyed(key))).status in (200, 404)
            await asyncio.sleep(self.dice.random() / 50)
        # A lease in Redis runs out by its server's clock, which no test moves.
        ways = ["hands in"] * 5 + ["faults", "another text", "twice"] + ["vanishes"] * (len(self.sites) == 1)
        how = self.dice.choice(ways)
        bodies: list[dict[str, Any]] = [{"generation": said}]
        if how == "faults":
            bodies = [{"state": "faulted"}]
        elif how == "another text":
            bodies = [{"generation": "Well, " + said}]
        elif how == "twice":
            bodies *= 2
        elif how == "vanishes":
            bodies = []
        calls = [job.submit(http=self.anywhere.keyed(key), **body) for body in bodies]
        for submitted in await asyncio.gather(*calls):
            assert submitted.status in (200, 400, 404)
            assert submitted.status != 400 or "already submitted" in submitted.json["message"]

    # --- what is watched ----------------------------------------------------------------------------------------------

    async def looks(self) -> None:
        """Time passes, every gateway sweeps, and the ledger is in order at every moment."""
        while not self.over:
            await self.beat(self.dice.choice([1, 10, 30]))
            await asyncio.sleep(0.05)

    async def beat(self, seconds: float) -> None:
        for here in self.sites:
            here.clock.advance(seconds)
            await here.sweep()
            await here.site.gateway.streams.pulse(0.0)
        [sums] = await self.anywhere.pool.jobs._db.read(lambda connection: connection.execute(SUMS).all())
        assert tuple(sums) == (0, 0)
        await self.ledger()

    async def ledger(self) -> int:
        """What has been paid, each generation once and within its bounds."""
        rows = (await self.anywhere.pool.overview(10_000)).ledger
        assert len({row.generation for row in rows}) == len(rows)
        assert all(min(POOL_FLOOR_TOKENS, 16) <= row.units <= LONGEST for row in rows)
        return sum(row.units for row in rows)

    async def run(self, *parts: Coroutine[Any, Any, None]) -> None:
        """Until all of these have come to their end; then until nothing waits and nobody has anything."""
        async with asyncio.timeout(4 * PATIENCE), asyncio.TaskGroup() as others:
            others.create_task(self.looks())
            for at in range(4):
                others.create_task(self.works(f"worker {at}", (BOB, CAT)[at % 2]))
            await asyncio.gather(*parts)
            self.over = True
        async with asyncio.timeout(PATIENCE):
            while (await self.anywhere.pool.overview()).running or await self.anywhere.pool.jobs.totals() != (0, 0):
                await self.beat(100)


@pytest_asyncio.fixture(params=["one gateway", "two gateways"])
async def sites(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[list[PoolSite]]:
    """On SQLite and in memory; on PostgreSQL and Valkey."""
    stores = {}
    if request.param == "two gateways":
        stores = {"pool": postgres.shared().url(), "journal": valkeys.shared().url(f"t{uuid4().hex}")}
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(pool_site(tmp_path, **stores)) for _ in range(1 + bool(stores))]
        for here in found:
            assert await here.hand().look() is None
        yield found


@pytest.mark.parametrize("seed", range(2))
async def test_whatever_happens_units_add_up_and_readers_hear_one_voice(sites: list[PoolSite], seed: int) -> None:
    """Posts, submits, faults, cancels, readers and workers that leave, at once and from everywhere."""
    town = Town(sites, random.Random(seed))
    await town.run(*(town.reads() for _ in range(12)), *(town.polls() for _ in range(6)))
    assert town.readings
    for reading in town.readings:
        assert [event for event, _ in reading.heard].index(reading.heard[-1][0]) == len(reading.heard) - 1
        assert [fields["seq"] for _, fields in reading.heard] == list(range(1, len(reading.heard) + 1))
        assert len({fields["src"][0] for fields in reading.tokens if "src" in fields}) <= 1
        assert reading.text.count("[") <= 1
    ada, bob, cat = await town.anywhere.balances()
    assert -ada == bob + cat == await town.ledger()
    for here in sites:
        assert len(here.pool.attending) == 0
