"""The queue and what comes of jobs, over both databases."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
from sqlalchemy import Connection, event, select
from sqlalchemy.exc import IntegrityError

from midstream.pool import lifecycle, outcomes, queries, tables
from midstream.pool.errors import DuplicateGeneration, InvalidJob, TooManyPrompts, UnknownRequest, WrongCredentials
from midstream.pool.jobs import CHECK_IN, START, Jobs
from midstream.pool.jobs import _add as add
from midstream.pool.jobs import _admit as admit
from midstream.pool.overview import Overview
from midstream.pool.shapes import Ask, Declaration, Generation, LedgerRow, Reply, Request
from midstream.testing.clock import ManualClock
from midstream.testing.patience import PATIENCE, soon
from midstream.wire import POOL_MOST_FAULTS, POOL_REQUEST_KEPT, POOL_REQUEST_TERM
from tests.postgres import DATABASES, database_url, lose_commit, shared

ASK = Ask("alice", ("small",), {"prompt": "Once"}, max_length=100, max_context_length=2048)
STREAMED = replace(ASK, streams=True)
WORKER = Declaration("home", "bob", ("small", "large"), max_length=512, max_context_length=4096)
REPLY = Reply("x" * 200)  # 50 tokens


class Queue(Jobs):
    """Jobs on a clock that the test moves, with the steps that most tests begin with."""

    def __init__(self, url: str, most: int = 10_000, now: float = 1_700_000_000.0) -> None:
        self.url, self.clock = url, ManualClock(now)
        super().__init__(url, self.clock, most=most)

    async def look(self, limit: int = 100) -> Overview:
        """All there is, workers that have not been seen for years among them."""
        return await self.overview(limit, 0, 1e9)

    async def leased_one(self, ask: Ask = ASK, worker: Declaration = WORKER) -> tuple[Request, Generation]:
        """A request, and the generation of it that a worker has."""
        request = await self.enqueue(ask)
        return request, await self.popped(worker)

    async def many(self, count: int, ask: Ask = ASK) -> None:
        """So many requests on streams of their own, in one transaction."""
        now = self.clock()

        def fill(connection: Connection) -> None:
            for at in range(count):
                each = replace(ask, stream_id=f"s{at}")
                request = Request(str(uuid4()), each, "waiting", 1, 0, now, now + POOL_REQUEST_TERM)
                add(connection, request, queries.ask_row(each))

        await self._db.write(fill)

    async def popped(self, worker: Declaration = WORKER) -> Generation:
        """What a pop gives, which must be something."""
        [(generation, _)] = (await self.pop(worker)).given
        return generation

    async def status(self, request: Request) -> str:
        return (await self.request(request.id)).status


@pytest.fixture(params=DATABASES)
async def jobs(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Queue]:
    queue = Queue(database_url(request.param, tmp_path))
    await queue.open()
    yield queue
    await queue.close()


@contextmanager
def statements(jobs: Jobs) -> Iterator[list[str]]:
    """What is sent to the database meanwhile."""
    sent: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        sent.append(statement)

    event.listen(jobs._db.engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(jobs._db.engine, "before_cursor_execute", note)


async def test_a_request_is_kept_as_it_was_asked(jobs: Queue) -> None:
    ask = Ask(
        "alice",
        ("small", "large"),
        {"messages": [{"role": "user", "content": "a\x00b \U0001f600"}], "temperature": 0.25},
        max_length=77,
        max_context_length=1024,
        chat=True,
        features=frozenset({"tools", "image:url"}),
        streams=True,
        stream_id="s1",
        amount=3,
        workers=("home",),
        exclude_workers=True,
    )
    request = await jobs.enqueue(ask)
    assert request.ask == ask
    assert await jobs.request(request.id) == request
    assert await jobs.by_stream("s1") == request
    assert (request.status, request.open_slots, request.expires_at) == ("waiting", 3, jobs.clock() + POOL_REQUEST_TERM)


async def test_what_is_not_there_is_said_to_be(jobs: Queue) -> None:
    assert await jobs.by_stream("none") is None
    assert await jobs.generations("none") == []
    for verb in (jobs.request, jobs.cancel, jobs.queue_position):
        with pytest.raises(UnknownRequest):
            await verb("none")
    for work in (
        jobs.generation("none"),
        jobs.submit("none", "bob", REPLY),
        jobs.fault("none", "bob", ""),
        jobs.settle("none", 5),
        jobs.end("none", reoffer=True),
    ):
        with pytest.raises(InvalidJob):
            await work
    await jobs.renew("none")


@pytest.mark.parametrize("ask", [replace(ASK, amount=0), replace(ASK, features=frozenset({"telepathy"}))])
async def test_a_request_that_makes_no_sense_is_refused(jobs: Queue, ask: Ask) -> None:
    with pytest.raises(ValueError, match=r"telepathy|one generation"):
        await jobs.enqueue(ask)
    assert (await jobs.look()).queue == []


@pytest.fixture(params=DATABASES)
async def gateways(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[list[Queue]]:
    """Three on one database, where an owner may wait for five generations."""
    url = database_url(request.param, tmp_path)
    queues = [Queue(url, most=5) for _ in range(3)]
    async with AsyncExitStack() as stack:
        for queue in queues:
            await queue.open()
            stack.push_async_callback(queue.close)
        yield queues


async def test_an_owner_waits_for_so_many_generations_however_many_ask_at_once(gateways: list[Queue]) -> None:
    """Of any two that ask at the same moment, at whichever gateways, one is counted before the other is let in."""
    for owner in ("alice", "carol", "dave"):
        asks = [replace(ASK, owner=owner, amount=1 + at % 2) for at in range(12)]
        told = await asyncio.gather(
            *(gateways[at % 3].enqueue(ask) for at, ask in enumerate(asks)), return_exceptions=True
        )
        taken = [one.ask.amount for one in told if isinstance(one, Request)]
        refused = [one for one in told if isinstance(one, TooManyPrompts)]
        assert len(taken) + len(refused) == 12
        assert sum(taken) in (4, 5)
        assert {one.facts["limit"] for one in refused} == {5}


async def test_an_owner_who_asks_for_much_at_once_leaves_the_database_to_others() -> None:
    """While another gateway counts what that owner waits for, one request waits there, and the rest wait here."""
    here = Queue(shared().url())
    there = Queue(here.url)
    counts, has_counted = threading.Event(), threading.Event()

    def count(connection: Connection) -> None:
        admit(connection, ASK, 1000)
        counts.set()
        assert has_counted.wait(PATIENCE)

    async with AsyncExitStack() as stack:
        for queue in (here, there):
            await queue.open()
            stack.push_async_callback(queue.close)
        counting = asyncio.create_task(there._db.write(count))
        try:
            assert await asyncio.to_thread(counts.wait, PATIENCE)
            asking = [asyncio.create_task(here.enqueue(ASK)) for _ in range(10)]
            await asyncio.sleep(0)
            await soon(here.enqueue(replace(ASK, owner="carol")))
        finally:
            has_counted.set()
        await counting
        assert len({request.id for request in await asyncio.gather(*asking)}) == 10


async def test_whatever_ends_a_generation_makes_room_for_another(gateways: list[Queue]) -> None:
    """What a worker has counts still, and what is offered again; of a request for several, what has come does not."""
    jobs = gateways[0]

    async def is_full() -> bool:
        try:
            await jobs.cancel((await jobs.enqueue(ASK)).id)
        except TooManyPrompts:
            return True
        return False

    request = await jobs.enqueue(replace(ASK, amount=4))
    other = await jobs.enqueue(ASK)
    assert await is_full()
    first = await jobs.popped()
    assert await is_full()
    await jobs.fault(first.id, "bob", "tired")
    assert await is_full()
    await jobs.submit((await jobs.popped()).id, "bob", REPLY)
    assert not await is_full()
    await jobs.enqueue(ASK)
    assert await is_full()
    await jobs.cancel(other.id)
    assert not await is_full()
    jobs.clock.advance(2 * POOL_REQUEST_TERM)
    await jobs.expire()
    assert await jobs.status(request) == "failed"
    await jobs.enqueue(replace(ASK, amount=5))
    assert await is_full()


async def test_those_who_read_along_and_other_owners_are_not_counted(gateways: list[Queue]) -> None:
    """An open stream counts as a stream already."""
    jobs = gateways[0]
    for at in range(6):
        await jobs.enqueue(replace(STREAMED, stream_id=f"s{at}"))
    await jobs.enqueue(replace(ASK, amount=5))
    with pytest.raises(TooManyPrompts):
        await jobs.enqueue(ASK)
    await jobs.enqueue(replace(STREAMED, stream_id="another"))
    await jobs.enqueue(replace(ASK, owner="carol", amount=5))
    with pytest.raises(TooManyPrompts):
        await jobs.enqueue(replace(ASK, owner="dave", amount=6))


async def test_a_pop_leases_a_slot_and_pushes_the_expiry_on(jobs: Queue) -> None:
    request = await jobs.enqueue(STREAMED)
    jobs.clock.advance(600)
    popped = await jobs.pop(WORKER)
    [(generation, given)] = popped.given
    assert popped.skipped == {}
    assert given == await jobs.request(request.id)
    assert (given.open_slots, given.leased, given.expires_at) == (0, 1, jobs.clock() + POOL_REQUEST_TERM)
    assert generation == await jobs.generation(generation.id)
    assert generation == Generation(
        id=generation.id,
        request=request.id,
        worker="home",
        worker_owner="bob",
        model="small",
        status="leased",
        streams=True,
        popped_at=jobs.clock(),
        expires_at=jobs.clock() + 200,  # a term and a third
    )
    assert (await jobs.pop(WORKER)).given == []


async def test_own_requests_come_first_then_the_oldest(jobs: Queue) -> None:
    first, second = await jobs.enqueue(ASK), await jobs.enqueue(ASK)
    own = await jobs.enqueue(replace(ASK, owner="bob"))
    assert [await jobs.queue_position(one.id) for one in (first, second, own)] == [0, 1, 2]
    assert [(await jobs.popped()).request for _ in range(3)] == [own.id, first.id, second.id]


async def test_a_job_offered_again_keeps_its_place(jobs: Queue) -> None:
    first, generation = await jobs.leased_one()
    await jobs.enqueue(ASK)
    await jobs.fault(generation.id, "bob", "tired")
    assert (await jobs.popped()).request == first.id


async def test_a_pop_of_several_gets_generations_of_one_request(jobs: Queue) -> None:
    request = await jobs.enqueue(replace(ASK, amount=3))
    await jobs.enqueue(ASK)
    greedy = replace(WORKER, amount=2)
    for left, count in ((1, 2), (0, 1)):
        given = (await jobs.pop(greedy)).given
        assert [(one.request, after.open_slots) for one, after in given] == [(request.id, left)] * count


async def test_a_pop_with_absurd_numbers_gets_what_others_get(jobs: Queue) -> None:
    await jobs.enqueue(replace(ASK, amount=50))
    absurd = replace(WORKER, amount=10**30, threads=10**30, max_length=10**30, max_context_length=10**30)
    assert len((await jobs.pop(absurd)).given) == 20
    assert (await jobs.pop(replace(absurd, amount=-5, max_length=-(10**30)))).given == []
    assert [row.threads for row in (await jobs.look()).workers] == [10**30]


async def test_a_miss_says_why_and_a_hit_does_not(jobs: Queue) -> None:
    await jobs.enqueue(replace(ASK, models=("other",)))
    await jobs.enqueue(replace(ASK, max_length=600))
    await jobs.enqueue(replace(ASK, max_length=700))
    assert (await jobs.pop(WORKER)).skipped == {"models": 1, "max_length": 2}
    await jobs.enqueue(ASK)
    popped = await jobs.pop(WORKER)
    assert popped.skipped == {}
    assert popped.given


async def test_a_pop_takes_as_many_statements_whatever_the_queue_holds(jobs: Queue) -> None:
    await jobs.pop(WORKER)  # it is checked in now
    counts = []
    for _ in range(2):
        for number in range(40):
            await jobs.enqueue(replace(ASK, models=(f"other{number}",), max_length=20 + number))
        with statements(jobs) as missing:
            assert (await jobs.pop(WORKER)).given == []
        await jobs.enqueue(ASK)
        with statements(jobs) as finding:
            assert (await jobs.pop(WORKER)).given
        counts.append((len(missing), len(finding)))
    assert counts[0] == counts[1]
    assert max(counts[0]) <= 8


async def test_a_pop_does_not_look_at_the_jobs_of_other_models(tmp_path: Path) -> None:
    """In steps of SQLite's machine, which are the same wherever it runs."""
    jobs = Queue(f"sqlite:///{tmp_path}/pool.db")
    await jobs.open()
    steps = Counter[str]()

    def count() -> None:
        steps["all"] += 1

    def instrument(connection: Connection) -> None:
        driver = connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        driver.set_progress_handler(count, 1)

    def fill(connection: Connection) -> None:
        """With a thousand more, in one transaction."""
        for number in range(1000):
            ask = replace(ASK, models=("other",), owner=("alice", "bob")[number % 2])
            request = Request(str(uuid4()), ask, "waiting", 1, 0, jobs.clock(), jobs.clock() + POOL_REQUEST_TERM)
            add(connection, request, queries.ask_row(ask))

    try:
        taken = []
        for _ in range(3):
            await jobs._db.write(fill)
            await jobs.enqueue(ASK)
            await jobs._db.read(instrument)
            steps.clear()
            assert (await jobs.pop(WORKER)).given
            assert (await jobs.pop(WORKER)).given == []
            taken.append(steps["all"])
            await jobs._db.read(lambda c: c.connection.driver_connection.set_progress_handler(None, 0))  # type: ignore[union-attr]
        assert taken[2] < taken[1] * 1.1
    finally:
        await jobs.close()


async def test_a_commit_without_an_answer_is_not_done_twice() -> None:
    """A connection that breaks at the COMMIT leaves no second request, no slot that nobody has, and no second pay."""
    jobs = Queue(shared().url())
    await jobs.open()
    try:
        lose_commit(jobs._db.engine)
        request = await jobs.enqueue(ASK)
        assert [row.id for row in (await jobs.look()).queue] == [request.id]
        assert await jobs.request(request.id) == request
        last = Queue(jobs.url, most=2)  # the one that was written is not counted before itself
        await last.open()
        try:
            lose_commit(last._db.engine)
            await last.cancel((await last.enqueue(ASK)).id)
        finally:
            await last.close()
        await jobs.pop(replace(WORKER, models=("none",)))  # it is checked in now
        lose_commit(jobs._db.engine)
        [(generation, given)] = (await jobs.pop(WORKER)).given
        assert [row.generation for row in (await jobs.look()).running] == [generation.id]
        assert await jobs.generations(request.id) == [generation]
        assert given == await jobs.request(request.id)
        lose_commit(jobs._db.engine)
        submitted = await jobs.submit(generation.id, "bob", REPLY)
        assert (submitted.units, submitted.request.status) == (50, "done")
        assert await jobs.balance("bob") == 50
        _, second = await jobs.leased_one()
        lose_commit(jobs._db.engine)
        assert (await jobs.fault(second.id, "bob", "tired")).open_slots == 1
        third = await jobs.popped()
        lose_commit(jobs._db.engine)
        assert await jobs.cancel(third.request) == [third]
        lose_commit(jobs._db.engine)
        await jobs.settle(third.id, 0)
        assert await jobs.balance("bob") == 70
    finally:
        await jobs.close()


async def test_a_check_in_is_written_at_most_each_thirty_seconds(jobs: Queue) -> None:
    await jobs.pop(WORKER)
    seen = jobs.clock()
    for _ in range(3):
        jobs.clock.advance(CHECK_IN / 4)
        await jobs.pop(WORKER)
    assert [row.seen_at for row in (await jobs.look()).workers] == [seen]
    jobs.clock.advance(CHECK_IN / 4)
    await jobs.pop(replace(WORKER, models=("new",), agent="home:2"))
    [row] = (await jobs.look()).workers
    assert (row.seen_at, row.models, row.agent) == (jobs.clock(), ("new",), "home:2")


async def test_a_clock_that_jumps_back_does_not_keep_workers_from_checking_in(jobs: Queue) -> None:
    await jobs.pop(WORKER)
    jobs.clock.set(jobs.clock() - 86_400)
    await jobs.pop(WORKER)
    assert [row.seen_at for row in (await jobs.look()).workers] == [jobs.clock()]


async def test_a_workers_name_is_its_owners(jobs: Queue) -> None:
    await jobs.enqueue(ASK)
    await jobs.pop(replace(WORKER, models=("none",)))
    with pytest.raises(WrongCredentials, match="'home'"):
        await jobs.pop(replace(WORKER, owner="mallory"))
    assert (await jobs.popped()).worker_owner == "bob"


async def test_models_are_those_of_workers_seen_lately(jobs: Queue) -> None:
    await jobs.pop(WORKER)
    jobs.clock.advance(400)
    await jobs.pop(replace(WORKER, name="new", models=("tiny", "small")))
    assert [worker.models for worker in await jobs.declarations(jobs.clock() - 300)] == [("tiny", "small")]
    assert [worker.models for worker in await jobs.declarations(0)] == [WORKER.models, ("tiny", "small")]
    declared = replace(
        WORKER,
        name="chatter",
        chat_jobs=True,
        model_id="large",
        chat_features=frozenset({"tools", "seed"}),
        tools_max_temperature=0.5,
        image_transports=frozenset({"url"}),
    )
    await jobs.pop(declared)
    assert declared in await jobs.declarations(0)


async def test_a_worker_not_seen_for_a_month_is_forgotten_and_its_name_free(jobs: Queue) -> None:
    await jobs.pop(WORKER)
    jobs.clock.advance(31 * 86_400)
    await jobs.expire()
    assert (await jobs.look()).workers == []
    await jobs.pop(replace(WORKER, owner="carol"))
    assert [row.owner for row in (await jobs.look()).workers] == ["carol"]


async def test_a_reply_is_kept_and_paid_once(jobs: Queue) -> None:
    request, generation = await jobs.leased_one()
    reply = Reply(
        "a\x00b\r\n",
        reasoning="r" * 196,
        tool_calls=[{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
        finish_reason="stop",
        usage={"prompt_tokens": 3},
        seed=7,
        metadata=[{"type": "x", "value": "y"}],
    )
    submitted = await jobs.submit(generation.id, "bob", reply)
    assert submitted.units == 51
    assert submitted.request == await jobs.request(request.id)
    assert (submitted.request.status, submitted.request.finished, submitted.request.leased) == ("done", 1, 0)
    [kept] = await jobs.generations(request.id)
    assert kept == replace(generation, status="done", settled=True, units=51, reply=reply)
    seen = await jobs.look()
    assert seen.ledger == [LedgerRow(generation.id, "alice", "bob", 51, "home", "small", jobs.clock())]
    assert [await jobs.balance(owner) for owner in ("alice", "bob", "carol")] == [-51, 51, 0]
    [row] = seen.workers
    assert (row.finished, row.lost, row.earned) == (1, 0, 51)


async def test_the_compare_and_set_and_the_ledgers_key_each_refuse_a_second_pay(jobs: Queue) -> None:
    """By themselves: without the lock and the look at the status that come before them."""
    _, generation = await jobs.leased_one()

    def end(connection: Connection) -> None:
        outcomes._end(connection, generation, "done", 100, chars=100)

    def pay(connection: Connection) -> None:
        outcomes._pay(connection, given, generation, 25, jobs.clock())

    given = await jobs.request(generation.request)
    for step, refusal in ((end, InvalidJob), (pay, IntegrityError)):
        await jobs._db.write(step)
        with pytest.raises(refusal):
            await jobs._db.write(step)
    assert await jobs.balance("bob") == 25


async def test_who_serves_himself_is_paid_by_himself(jobs: Queue) -> None:
    _, generation = await jobs.leased_one(replace(ASK, owner="bob"))
    assert (await jobs.submit(generation.id, "bob", REPLY)).units == 50
    assert await jobs.balance("bob") == 0
    assert [(row.payer, row.payee, row.units) for row in (await jobs.look()).ledger] == [("bob", "bob", 50)]


async def test_a_second_submit_says_so_and_changes_nothing(jobs: Queue) -> None:
    request, generation = await jobs.leased_one()
    await jobs.submit(generation.id, "bob", REPLY)
    with pytest.raises(DuplicateGeneration, match="already submitted"):
        await jobs.submit(generation.id, "bob", Reply("other"))
    with pytest.raises(DuplicateGeneration):
        await jobs.fault(generation.id, "bob", "late")
    assert [one.reply for one in await jobs.generations(request.id)] == [REPLY]
    assert await jobs.balance("bob") == 50


async def test_another_owners_generation_is_nobody_elses_to_hand_in(jobs: Queue) -> None:
    _, generation = await jobs.leased_one()
    for work in (jobs.submit(generation.id, "mallory", REPLY), jobs.fault(generation.id, "mallory", "")):
        with pytest.raises(WrongCredentials):
            await work
    assert await jobs.generation(generation.id) == generation
    assert (await jobs.submit(generation.id, "bob", REPLY)).units == 50
    with pytest.raises(WrongCredentials):
        await jobs.submit(generation.id, "mallory", REPLY)


async def test_a_request_for_several_is_done_with_its_last_one(jobs: Queue) -> None:
    request = await jobs.enqueue(replace(ASK, amount=2))
    first, second = await jobs.popped(), await jobs.popped()
    assert (await jobs.submit(second.id, "bob", REPLY)).request.status == "waiting"
    assert (await jobs.submit(first.id, "bob", REPLY)).request.status == "done"
    assert len(await jobs.generations(request.id)) == 2


async def test_a_fault_offers_the_job_again_and_the_late_worker_is_told(jobs: Queue) -> None:
    request, generation = await jobs.leased_one()
    faulted = await jobs.fault(generation.id, "bob", "generation_error")
    assert faulted.open_slots == 1
    assert faulted == await jobs.request(request.id)
    for work in (jobs.submit(generation.id, "bob", REPLY), jobs.fault(generation.id, "bob", "again")):
        with pytest.raises(InvalidJob):
            await work
    second = await jobs.popped()
    assert second.id != generation.id
    assert (await jobs.submit(second.id, "bob", REPLY)).request.status == "done"
    assert [one.status for one in await jobs.generations(request.id)] == ["faulted", "done"]
    assert (await jobs.generation(generation.id)).reason == "generation_error"
    assert [(row.finished, row.lost) for row in (await jobs.look()).workers] == [(1, 1)]
    assert await jobs.balance("bob") == 50


async def test_the_third_fault_fails_the_request(jobs: Queue) -> None:
    request = await jobs.enqueue(ASK)
    told = [await jobs.fault((await jobs.popped()).id, "bob", "no memory") for _ in range(POOL_MOST_FAULTS)]
    assert [one.open_slots for one in told] == [1, 1, 0]
    failed = await jobs.request(request.id)
    assert failed == told[-1]
    assert (failed.status, failed.open_slots, failed.faults) == ("failed", 0, 3)
    assert "no memory" in failed.reason
    assert (await jobs.pop(WORKER)).given == []


async def test_what_comes_in_for_a_failed_request_is_paid_and_discarded(jobs: Queue) -> None:
    request = await jobs.enqueue(replace(ASK, amount=4))
    *lost, last = [await jobs.popped() for _ in range(4)]
    for generation in lost:
        await jobs.fault(generation.id, "bob", "")
    submitted = await jobs.submit(last.id, "bob", REPLY)
    assert (submitted.units, submitted.request.status) == (50, "failed")
    assert (await jobs.generation(last.id)).reply is None
    assert await jobs.status(request) == "failed"


async def test_a_cancelled_request_is_never_popped_again(jobs: Queue) -> None:
    request = await jobs.enqueue(replace(ASK, amount=2))
    generation = await jobs.popped()
    assert await jobs.cancel(request.id) == [generation]
    assert await jobs.cancel(request.id) == [generation]
    assert (await jobs.pop(WORKER)).given == []
    assert (await jobs.fault(generation.id, "bob", "")).open_slots == 0
    assert (await jobs.pop(WORKER)).given == []
    assert await jobs.cancel(request.id) == []
    assert await jobs.status(request) == "cancelled"


@pytest.mark.parametrize("streams", [False, True])
async def test_a_submit_after_the_cancel_is_paid_and_its_text_discarded(jobs: Queue, streams: bool) -> None:
    request, generation = await jobs.leased_one(replace(ASK, streams=streams))
    await jobs.cancel(request.id)
    submitted = await jobs.submit(generation.id, "bob", REPLY)
    assert (submitted.units, submitted.request.status) == (50, "cancelled")
    assert (await jobs.generation(generation.id)).reply is None
    assert not await jobs.settle(generation.id, 10)
    with pytest.raises(DuplicateGeneration):
        await jobs.submit(generation.id, "bob", REPLY)
    assert await jobs.balance("bob") == 50


@pytest.mark.parametrize(("chars", "units"), [(0, 20), (200, 50), (10_000, 100)])
async def test_a_cancelled_generation_is_settled_once_on_what_was_posted(jobs: Queue, chars: int, units: int) -> None:
    request, generation = await jobs.leased_one(STREAMED)
    assert not await jobs.settle(generation.id, chars)  # nobody has cancelled it
    await jobs.cancel(request.id)
    assert await jobs.unsettled() == [generation]
    assert await jobs.settle(generation.id, chars)
    assert not await jobs.settle(generation.id, chars)
    assert await jobs.unsettled() == []
    assert await jobs.generation(generation.id) == replace(generation, status="cancelled", settled=True, units=units)
    assert [await jobs.balance(owner) for owner in ("alice", "bob")] == [-units, units]
    with pytest.raises(InvalidJob):
        await jobs.submit(generation.id, "bob", REPLY)


async def test_a_worker_that_gives_up_after_the_cancel_is_paid_for_what_it_posted(jobs: Queue) -> None:
    request, generation = await jobs.leased_one(STREAMED)
    await jobs.cancel(request.id)
    assert (await jobs.fault(generation.id, "bob", "stopped")).open_slots == 0
    assert await jobs.settle(generation.id, 200)
    assert await jobs.balance("bob") == 50


async def test_a_lost_attempt_is_not_paid_when_its_request_is_cancelled_later(jobs: Queue) -> None:
    request, lost = await jobs.leased_one(STREAMED)
    await jobs.fault(lost.id, None, "its lease ran out")
    second = await jobs.popped()
    assert await jobs.cancel(request.id) == [second]
    assert not await jobs.settle(lost.id, 400)
    assert await jobs.settle(second.id, 0)
    assert await jobs.balance("bob") == 20


async def test_a_lease_that_ran_out_after_the_cancel_is_over_and_unpaid(jobs: Queue) -> None:
    request, generation = await jobs.leased_one(STREAMED)
    await jobs.cancel(request.id)
    assert (await jobs.fault(generation.id, None, "its lease ran out")).open_slots == 0
    assert not await jobs.settle(generation.id, 200)
    assert await jobs.unsettled() == []
    assert await jobs.balance("bob") == 0


async def test_a_renewed_lease_is_not_nominated(jobs: Queue) -> None:
    _, generation = await jobs.leased_one(STREAMED)
    for _ in range(6):  # 900 s, three leases and more
        jobs.clock.advance(150)
        assert await jobs.nominees() == []
        await jobs.renew(generation.id)
    jobs.clock.advance(lifecycle.NOMINATED + 1)
    assert [one.id for one in await jobs.nominees()] == [generation.id]
    assert [row.generation for row in (await jobs.look()).running] == [generation.id]
    await jobs.fault(generation.id, None, "its lease ran out")
    await jobs.renew(generation.id)
    assert await jobs.nominees() == []
    assert (await jobs.look()).running == []


@pytest.mark.parametrize("reoffer", [True, False])
async def test_what_is_taken_back_counts_no_fault_and_no_pay(jobs: Queue, reoffer: bool) -> None:
    request, generation = await jobs.leased_one(STREAMED)
    assert await jobs.end(generation.id, reoffer=reoffer)
    assert not await jobs.end(generation.id, reoffer=reoffer)
    with pytest.raises(InvalidJob):
        await jobs.submit(generation.id, "bob", REPLY)
    after = await jobs.request(request.id)
    assert (after.faults, after.leased) == (0, 0)
    assert after.status == ("waiting" if reoffer else "failed")
    assert bool((await jobs.pop(WORKER)).given) is reoffer
    assert (await jobs.look()).ledger == []


async def test_a_request_that_nobody_takes_expires_and_is_forgotten_later(jobs: Queue) -> None:
    request = await jobs.enqueue(replace(ASK, stream_id="s1"))
    jobs.clock.advance(POOL_REQUEST_TERM - 1)
    assert await jobs.expire() == []
    jobs.clock.advance(1)
    assert (await jobs.pop(WORKER)).given == []
    [expired] = await jobs.expire()
    assert expired == await jobs.request(request.id)
    assert (expired.status, expired.reason) == ("failed", "no worker took it in time")
    assert await jobs.expire() == []
    jobs.clock.advance(POOL_REQUEST_KEPT)
    await jobs.expire()
    with pytest.raises(UnknownRequest):
        await jobs.request(request.id)
    assert await jobs.by_stream("s1") is None


async def test_a_clock_that_jumps_fails_and_forgets_no_request(jobs: Queue) -> None:
    """By twenty minutes, or by a night that the machine slept: each has the time that it had left."""
    ended = await jobs.enqueue(ASK)
    await jobs.cancel(ended.id)
    request, other = await jobs.enqueue(ASK), await jobs.enqueue(replace(ASK, models=("rare",)))
    jobs.clock.advance(POOL_REQUEST_TERM / 2)
    jobs.clock.set(jobs.clock() + 30_000)
    assert await jobs.expire() == []
    assert await jobs.status(ended) == "cancelled"
    assert (await jobs.popped()).request == request.id
    jobs.clock.advance(POOL_REQUEST_TERM / 2 - 1)
    assert await jobs.expire() == []
    jobs.clock.advance(1)
    assert (await jobs.pop(replace(WORKER, models=("rare",)))).given == []
    assert [one.id for one in await jobs.expire()] == [other.id]
    with pytest.raises(UnknownRequest):
        await jobs.request(ended.id)
    jobs.clock.advance(POOL_REQUEST_KEPT - 1)
    await jobs.expire()
    assert await jobs.status(other) == "failed"
    jobs.clock.advance(1)
    await jobs.expire()
    with pytest.raises(UnknownRequest):
        await jobs.request(other.id)


async def test_a_request_made_after_the_clock_jumped_expires_on_time(jobs: Queue) -> None:
    jobs.clock.set(jobs.clock() + 30_000)
    assert await jobs.expire() == []
    request = await jobs.enqueue(ASK)
    jobs.clock.advance(POOL_REQUEST_TERM - 1)
    assert await jobs.expire() == []
    jobs.clock.advance(1)
    assert [one.id for one in await jobs.expire()] == [request.id]


async def test_what_is_old_when_a_gateway_starts_has_expired(jobs: Queue) -> None:
    """Whoever was to have it was told twenty minutes; whether the clock jumped or time passed, nobody here has seen."""
    request = await jobs.enqueue(ASK)
    again = Queue(jobs.url, now=jobs.clock() + POOL_REQUEST_TERM)
    await again.open()
    try:
        assert (await again.pop(WORKER)).given == []
        assert [one.id for one in await again.expire()] == [request.id]
    finally:
        await again.close()


async def test_a_clock_that_jumps_nominates_nobody_whose_time_has_not_passed(jobs: Queue) -> None:
    """The worker of what comes whole cannot renew its time."""
    _, generation = await jobs.leased_one()
    jobs.clock.advance(lifecycle.NOMINATED - 10)
    jobs.clock.set(jobs.clock() + 30_000)
    assert await jobs.nominees() == []
    jobs.clock.advance(11)
    assert [one.id for one in await jobs.nominees()] == [generation.id]


async def test_a_clock_that_jumps_forgets_no_worker(jobs: Queue) -> None:
    """As where a machine starts in 1970 and is told the time later: its name is not free."""
    await jobs.pop(WORKER)
    jobs.clock.set(jobs.clock() + 50 * 365 * 86_400)
    await jobs.expire()
    with pytest.raises(WrongCredentials):
        await jobs.pop(replace(WORKER, owner="carol"))


async def test_thousands_expire_and_are_forgotten_in_one_go(jobs: Queue) -> None:
    """More than one transaction takes: what comes in faster than it goes would pile up for ever."""
    count = queries.SWEEP + 5
    await jobs.many(count)
    jobs.clock.advance(POOL_REQUEST_TERM)
    assert len(await jobs.expire()) == count
    assert await jobs.totals() == (0, 0)
    jobs.clock.advance(POOL_REQUEST_KEPT)
    assert await jobs.expire() == []
    assert await jobs._db.read(lambda connection: connection.execute(select(tables.request.c.id)).all()) == []


async def test_every_request_on_a_stream_comes_into_view_however_many_there_are(jobs: Queue) -> None:
    """Page by page, each once, and then from the beginning."""
    count = queries.SWEEP + 5
    await jobs.many(count)
    seen: list[str] = []
    position = START
    for _ in range(2):
        page, position = await jobs.streaming(position)
        seen += [stream_id for _, stream_id in page]
    assert sorted(seen) == sorted(f"s{at}" for at in range(count))
    assert position == START


async def test_a_request_that_a_worker_has_does_not_expire(jobs: Queue) -> None:
    _, generation = await jobs.leased_one()
    jobs.clock.advance(POOL_REQUEST_TERM * 10)
    assert await jobs.expire() == []
    assert (await jobs.submit(generation.id, "bob", REPLY)).request.status == "done"


async def test_forgetting_takes_generations_and_replies_along_but_not_the_ledger(jobs: Queue) -> None:
    request, generation = await jobs.leased_one()
    await jobs.submit(generation.id, "bob", REPLY)
    cancelled, held = await jobs.leased_one()
    await jobs.cancel(cancelled.id)
    jobs.clock.advance(POOL_REQUEST_KEPT)
    await jobs.expire()
    assert await jobs.generations(request.id) == []
    with pytest.raises(InvalidJob):  # not DuplicateGeneration: nobody knows any more
        await jobs.submit(generation.id, "bob", REPLY)
    assert (await jobs.submit(held.id, "bob", REPLY)).units == 50  # a worker still had it
    await jobs.expire()
    with pytest.raises(UnknownRequest):
        await jobs.request(cancelled.id)
    assert [row.units for row in (await jobs.look()).ledger] == [50, 50]
    assert await jobs.balance("bob") == 100


async def test_lists_for_people_are_cut(jobs: Queue) -> None:
    requests = [await jobs.enqueue(ASK) for _ in range(3)]
    for number in range(3):
        jobs.clock.advance(1)
        generation = await jobs.popped(replace(WORKER, name=f"w{number}"))
        if number < 2:
            await jobs.submit(generation.id, "bob", REPLY)
    assert [row.request for row in (await jobs.look(5)).running] == [requests[2].id]
    assert [row.name for row in (await jobs.look(2)).workers] == ["w2", "w1"]
    assert [row.worker for row in (await jobs.look(1)).ledger] == ["w1"]


async def test_two_gateways_on_one_database_see_one_queue(jobs: Queue) -> None:
    other = Queue(jobs.url)
    await other.open()
    try:
        requests = [await queue.enqueue(ASK) for queue in (jobs, other, jobs, other)]
        popped = await asyncio.gather(*(queue.popped() for queue in (jobs, other, jobs, other)))
        assert sorted(one.request for one in popped) == sorted(one.id for one in requests)
        await other.submit(popped[0].id, "bob", REPLY)
        with pytest.raises(DuplicateGeneration):
            await jobs.submit(popped[0].id, "bob", REPLY)
    finally:
        await other.close()


async def test_what_was_written_outlives_the_process(jobs: Queue) -> None:
    request, generation = await jobs.leased_one()
    await jobs.close()
    again = Queue(jobs.url)
    await again.open()
    try:
        assert await again.generations(request.id) == [generation]
        assert (await again.submit(generation.id, "bob", REPLY)).request.id == request.id
    finally:
        await again.close()
