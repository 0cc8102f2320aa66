"""What the database tells of the whole pool, over both databases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import event

from midstream.pool.jobs import Jobs
from midstream.pool.overview import AccountRow, Overview, RunningRow, Sums, WaitingRow
from midstream.pool.shapes import Ask, Declaration, LedgerRow, Reply
from midstream.testing.clock import ManualClock
from tests.postgres import DATABASES, database_url

ASK = Ask("alice", ("small",), {"prompt": "Once"}, max_length=100, max_context_length=2048)
WORKER = Declaration("home", "bob", ("small", "large"), max_length=512, max_context_length=4096)
HERE, LISTED = 300.0, 86_400.0


class Seen(Jobs):
    """Jobs on a clock that the test moves."""

    def __init__(self, url: str) -> None:
        self.clock = ManualClock()
        super().__init__(url, self.clock)

    async def look(self, limit: int = 200) -> Overview:
        return await self.overview(limit, HERE, LISTED)


@pytest.fixture(params=DATABASES)
async def jobs(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Seen]:
    jobs = Seen(database_url(request.param, tmp_path))
    await jobs.open()
    yield jobs
    await jobs.close()


async def test_an_empty_pool_is_told_as_that(jobs: Seen) -> None:
    assert await jobs.look() == Overview(jobs.clock(), Sums(0, 0, 0, 0, 0), [], [], [], [], [])


async def test_what_waits_runs_and_was_paid_is_told_with_its_sums(jobs: Seen) -> None:
    began = jobs.clock()
    await jobs.enqueue(ASK)
    [(paid, _)] = (await jobs.pop(WORKER)).given
    await jobs.submit(paid.id, "bob", Reply("x" * 200))
    running = await jobs.enqueue(replace(ASK, streams=True, models=()))
    jobs.clock.advance(2.0)
    [(generation, _)] = (await jobs.pop(WORKER)).given
    waiting = await jobs.enqueue(replace(ASK, owner="carol", amount=3, models=("huge", "larger")))
    seen = await jobs.look()
    assert seen.sums == Sums(workers=1, waiting=1, running=1, accounts=2, balance=0)
    assert [(row.name, row.owner, row.finished, row.earned) for row in seen.workers] == [("home", "bob", 1, 50)]
    assert seen.queue == [WaitingRow(waiting.id, "carol", ("huge", "larger"), 100, False, 3, 0, 0, began + 2.0)]
    assert seen.running == [
        RunningRow(
            generation.id,
            running.id,
            "alice",
            "home",
            "small",
            100,
            streams=True,
            cancelled=False,
            popped_at=began + 2.0,
            expires_at=generation.expires_at,
        )
    ]
    assert seen.ledger == [LedgerRow(paid.id, "alice", "bob", 50, "home", "small", began)]
    assert sorted(seen.accounts, key=lambda row: row.owner) == [AccountRow("alice", -50), AccountRow("bob", 50)]
    assert seen.running[0].streams is True
    await jobs.cancel(running.id)
    assert [row.cancelled for row in (await jobs.look()).running] == [True]


async def test_workers_that_left_are_listed_for_a_day(jobs: Seen) -> None:
    await jobs.pop(WORKER)
    jobs.clock.advance(HERE + 1)
    seen = await jobs.look()
    assert ([row.name for row in seen.workers], seen.sums.workers) == (["home"], 0)
    jobs.clock.advance(LISTED)
    assert (await jobs.look()).workers == []


async def test_lists_are_bounded_and_cost_the_same_statements_whatever_they_hold(jobs: Seen) -> None:
    """The sums count what the lists have no room for; the largest account comes first."""
    sent: list[str] = []
    event.listen(jobs._db.engine, "before_cursor_execute", lambda *told: sent.append(told[2]))
    await jobs.look()
    looks = len(sent)
    assert looks == 6
    for number in range(4):
        worker = replace(WORKER, name=f"w{number}")
        for owner in ("alice", "carol"):
            await jobs.enqueue(replace(ASK, owner=owner))
            [(generation, _)] = (await jobs.pop(worker)).given
            await jobs.submit(generation.id, "bob", Reply("x"))
        await jobs.enqueue(ASK)
        await jobs.pop(worker)
        await jobs.enqueue(replace(ASK, models=("huge",)))
    sent.clear()
    seen = await jobs.look(2)
    assert len(sent) == looks
    assert not any("payload" in statement for statement in sent)  # prompts are not even read
    assert [len(rows) for rows in (seen.workers, seen.queue, seen.running, seen.ledger, seen.accounts)] == [2] * 5
    assert seen.sums == Sums(workers=4, waiting=4, running=4, accounts=3, balance=0)
    assert seen.accounts[0] == AccountRow("bob", 160)
    assert [row.worker for row in seen.ledger] == ["w3", "w3"]
    assert [row.worker for row in seen.running] == ["w0", "w1"]
