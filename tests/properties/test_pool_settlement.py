"""What was generated is paid once, whatever races: over both databases, with several gateways on each.

A model says what every step must answer.  After each one the books are read as they stand in the database: every
transfer sums to zero, so do all accounts, a generation has one transfer exactly when it is settled, and no slot is lost
or offered twice.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from sqlalchemy import Connection, text

from midstream.pool.errors import DuplicateGeneration, InvalidJob, PoolError, WrongCredentials
from midstream.pool.jobs import Jobs
from midstream.pool.shapes import Ask, Declaration, Reply
from midstream.testing.clock import ManualClock
from midstream.wire import POOL_MOST_FAULTS, POOL_REQUEST_KEPT, POOL_REQUEST_TERM
from tests.postgres import DATABASES, database_url

T = TypeVar("T")
MAX_LENGTH = 64
OWNERS = ("alice", "bob")


@dataclass
class Wanted:
    """What the model knows of a request."""

    owner: str
    streams: bool
    amount: int
    expires_at: float
    status: str = "waiting"
    open: int = 0
    leased: int = 0
    finished: int = 0
    faults: int = 0
    ended_at: float = 0.0

    def end(self, status: str, now: float) -> None:
        self.status, self.open, self.ended_at = status, 0, now

    def end_if_over(self, now: float) -> None:
        if self.status == "waiting" and not self.open and not self.leased:
            self.end("done" if self.finished else "failed", now)


@dataclass
class Run:
    """What the model knows of a generation."""

    request: str
    owner: str
    status: str = "leased"
    units: int | None = None


@dataclass
class Books:
    """The model: what every verb must answer, and what the database must hold then."""

    requests: dict[str, Wanted] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    paid: dict[str, tuple[str, str, int]] = field(default_factory=dict)

    def pay(self, id: str, chars: int) -> int:
        run = self.runs[id]
        run.units = min(MAX_LENGTH, max(20, (chars + 3) // 4))
        assert id not in self.paid
        self.paid[id] = (self.requests[run.request].owner, run.owner, run.units)
        return run.units

    def leave(self, id: str, status: str) -> Wanted:
        """The generation is over."""
        run = self.runs[id]
        run.status = status
        request = self.requests[run.request]
        request.leased -= 1
        return request

    def refusal(self, id: str, owner: str | None) -> type[PoolError] | None:
        run = self.runs.get(id)
        if run is None:
            return InvalidJob
        if owner not in (None, run.owner):
            return WrongCredentials
        return None if run.status == "leased" else DuplicateGeneration if run.status == "done" else InvalidJob

    def submit(self, id: str, chars: int, now: float) -> int:
        request = self.leave(id, "done")
        if request.status == "waiting":
            request.finished += 1
            request.end_if_over(now)
        return self.pay(id, chars)

    def fault(self, id: str, owner: str | None, now: float) -> None:
        run = self.runs[id]
        request = self.requests[run.request]
        if owner and request.status == "cancelled" and request.streams:
            return
        self.leave(id, "faulted")
        if request.status != "waiting":
            return
        request.faults += 1
        if request.faults == POOL_MOST_FAULTS:
            request.end("failed", now)
        else:
            request.open += 1

    def settle(self, id: str, chars: int) -> bool:
        run = self.runs[id]
        if run.status != "leased" or self.requests[run.request].status != "cancelled":
            return False
        self.leave(id, "cancelled")
        self.pay(id, chars)
        return True

    def end(self, id: str, reoffer: bool, now: float) -> bool:
        if self.runs[id].status != "leased":
            return False
        request = self.leave(id, "ended")
        if request.status == "waiting":
            request.open += reoffer
            request.end_if_over(now)
        return True

    def expire(self, now: float) -> set[str]:
        expired = set()
        gone = set()
        for name, request in self.requests.items():
            if request.status == "waiting" and not request.leased and request.expires_at <= now:
                request.end("failed", now)
                expired.add(name)
            elif request.status != "waiting" and not request.leased and request.ended_at <= now - POOL_REQUEST_KEPT:
                gone.add(name)
        self.requests = {name: request for name, request in self.requests.items() if name not in gone}
        self.runs = {name: run for name, run in self.runs.items() if run.request not in gone}
        return expired


class World:
    """Some gateways on one database, and the model beside them."""

    def __init__(self, url: str, gateways: int = 2) -> None:
        self.clock = ManualClock()
        self.gateways = [Jobs(url, self.clock) for _ in range(gateways)]
        self.books = Books()
        self._turn = 0

    @property
    def jobs(self) -> Jobs:
        """Each time the next gateway."""
        self._turn += 1
        return self.gateways[self._turn % len(self.gateways)]

    async def enqueue(self, owner: str = "alice", streams: bool = True, amount: int = 1) -> str:
        ask = Ask(owner, ("m",), {"prompt": "p"}, MAX_LENGTH, 1024, streams=streams, amount=amount)
        request = await self.jobs.enqueue(ask)
        self.books.requests[request.id] = Wanted(owner, streams, amount, request.expires_at, open=amount)
        return request.id

    async def pop(self, owner: str = "bob", amount: int = 1) -> list[str]:
        now = self.clock()
        asked = self.books.requests
        fit = [name for name, one in asked.items() if one.status == "waiting" and one.open and one.expires_at > now]
        fit.sort(key=lambda name: asked[name].owner != owner)
        popped = await self.jobs.pop(Declaration(f"{owner}'s", owner, ("m",), 512, 4096, amount=amount))
        ids = [generation.id for generation, _ in popped.given]
        assert {request.id for _, request in popped.given} == set(fit[:1])
        if fit:
            wanted = asked[fit[0]]
            assert len(ids) == min(amount, wanted.open)
            wanted.open -= len(ids)
            wanted.leased += len(ids)
            wanted.expires_at = max(wanted.expires_at, now + POOL_REQUEST_TERM)
            assert not self.books.runs.keys() & ids
            self.books.runs.update({name: Run(fit[0], owner) for name in ids})
        return ids

    async def submit(self, id: str, owner: str = "bob", chars: int = 100) -> None:
        submit = self.jobs.submit(id, owner, Reply("x" * chars))
        if refusal := self.books.refusal(id, owner):
            with pytest.raises(refusal):
                await submit
            return
        discarded = self.books.requests[self.books.runs[id].request].status != "waiting"
        submitted = await submit
        assert submitted.units == self.books.submit(id, chars, self.clock())
        assert ((await self.jobs.generation(id)).reply is None) is discarded

    async def fault(self, id: str, owner: str | None = "bob") -> None:
        fault = self.jobs.fault(id, owner, "some reason")
        if refusal := self.books.refusal(id, owner):
            with pytest.raises(refusal):
                await fault
            return
        self.books.fault(id, owner, self.clock())
        assert (await fault).open_slots == self.books.requests[self.books.runs[id].request].open

    async def cancel(self, request: str) -> None:
        wanted = self.books.requests.get(request)
        if wanted is None:
            with pytest.raises(PoolError):
                await self.jobs.cancel(request)
            return
        held = await self.jobs.cancel(request)
        if wanted.status == "waiting":
            wanted.end("cancelled", self.clock())
        leased = {name for name, run in self.books.runs.items() if (run.request, run.status) == (request, "leased")}
        assert {one.id for one in held} == leased

    async def settle(self, id: str, chars: int = 60) -> None:
        await self._told(id, self.jobs.settle(id, chars), lambda: self.books.settle(id, chars))

    async def end(self, id: str, reoffer: bool = True) -> None:
        await self._told(id, self.jobs.end(id, reoffer=reoffer), lambda: self.books.end(id, reoffer, self.clock()))

    async def _told(self, id: str, verb: Coroutine[Any, Any, bool], expected: Callable[[], bool]) -> None:
        if id not in self.books.runs:
            with pytest.raises(InvalidJob):
                await verb
            return
        assert await verb is expected()

    async def expire(self, seconds: float) -> None:
        self.clock.advance(seconds)
        expired = await self.jobs.expire()
        assert {request.id for request in expired} == self.books.expire(self.clock())

    async def check(self, *, alone: bool = True) -> None:
        """Read the books.  `alone`: everything that was done went by the model."""
        tables = await self.jobs._db.read(_tables)
        _check_sums(**tables)
        if alone:
            self._check_model(**tables)

    def _check_model(
        self, requests: list[Any], generations: list[Any], ledger: list[Any], accounts: dict[str, int]
    ) -> None:
        books = self.books
        assert {row.id: tuple(row[1:6]) for row in requests} == {
            name: (one.status, one.open, one.leased, one.finished, one.faults) for name, one in books.requests.items()
        }
        assert {row.id: row.status for row in generations} == {name: run.status for name, run in books.runs.items()}
        sums: Counter[str] = Counter()
        for payer, payee, units in self.books.paid.values():
            sums[payer] -= units
            sums[payee] += units
        assert {owner: units for owner, units in accounts.items() if units} == {o: u for o, u in sums.items() if u}
        assert {row.generation for row in ledger} == self.books.paid.keys()


def _tables(connection: Connection) -> dict[str, Any]:
    """The books, as one statement each can see them."""

    def rows(statement: str) -> list[Any]:
        return list(connection.execute(text(statement)))

    generations = "SELECT g.id, r.id AS request, g.status, g.settled, g.units FROM midstream_generation g"
    return {
        "requests": rows(
            "SELECT id, status, open_slots, leased, finished, faults, amount FROM midstream_request ORDER BY number"
        ),
        "generations": rows(f"{generations} JOIN midstream_request r ON r.number = g.request"),
        "ledger": rows("SELECT generation, side, owner, units FROM midstream_ledger"),
        "accounts": dict(map(tuple, rows("SELECT owner, balance FROM midstream_account"))),
    }


def _check_sums(requests: list[Any], generations: list[Any], ledger: list[Any], accounts: dict[str, int]) -> None:
    assert sum(accounts.values()) == 0
    transfers: dict[str, dict[str, int]] = {}
    owners: Counter[str] = Counter()
    for row in ledger:
        assert row.side not in transfers.setdefault(row.generation, {})
        transfers[row.generation][row.side] = row.units
        owners[row.owner] += row.units
    assert dict(owners) == accounts
    for sides in transfers.values():
        assert sides["debit"] == -sides["credit"] < 0
    leased: Counter[str] = Counter()
    for row in generations:
        assert bool(row.settled) is (row.id in transfers) is (row.status in ("done", "cancelled"))
        assert row.units == transfers.get(row.id, {"credit": 0})["credit"]
        leased[row.request] += row.status == "leased"
    for row in requests:
        assert row.leased == leased[row.id]
        if row.status == "waiting":
            given_up = row.amount - row.open_slots - row.leased - row.finished
            assert row.open_slots >= 0 <= given_up
            assert row.open_slots or row.leased
        else:
            assert row.open_slots == 0


@contextmanager
def world(database: str, directory: str | Path, gateways: int = 2) -> Iterator[tuple[asyncio.Runner, World]]:
    with asyncio.Runner() as runner:
        one = World(database_url(database, Path(directory)), gateways)

        async def all_of(verb: str) -> None:
            await asyncio.gather(*(getattr(jobs, verb)() for jobs in one.gateways))

        runner.run(all_of("open"))
        try:
            yield runner, one
        finally:
            runner.run(all_of("close"))


class Machine(RuleBasedStateMachine):
    """Everything that may happen, in every order that hypothesis finds."""

    database = ""
    requests = Bundle("requests")
    generations = Bundle("generations")
    chars = st.sampled_from((0, 60, 200, 5000))

    def __init__(self) -> None:
        super().__init__()
        self._directory = TemporaryDirectory()
        self._world = world(self.database, self._directory.name)
        self._runner, self.world = self._world.__enter__()

    def run(self, step: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(step)

    def teardown(self) -> None:
        self._world.__exit__(None, None, None)
        self._directory.cleanup()

    @rule(target=requests, owner=st.sampled_from(OWNERS), streams=st.booleans(), amount=st.integers(1, 3))
    def enqueue(self, owner: str, streams: bool, amount: int) -> str:
        return self.run(self.world.enqueue(owner, streams, amount))

    @rule(target=generations, owner=st.sampled_from(OWNERS), amount=st.integers(1, 3))
    def pop(self, owner: str, amount: int) -> Any:
        return multiple(*self.run(self.world.pop(owner, amount)))

    @rule(id=generations, owner=st.sampled_from(OWNERS), chars=chars)
    def submit(self, id: str, owner: str, chars: int) -> None:
        self.run(self.world.submit(id, owner, chars))

    @rule(id=generations, owner=st.sampled_from((*OWNERS, None)))
    def fault(self, id: str, owner: str | None) -> None:
        self.run(self.world.fault(id, owner))

    @rule(id=requests)
    def cancel(self, id: str) -> None:
        self.run(self.world.cancel(id))

    @rule(id=generations, chars=chars)
    def settle(self, id: str, chars: int) -> None:
        self.run(self.world.settle(id, chars))

    @rule(id=consumes(generations), reoffer=st.booleans())
    def end(self, id: str, reoffer: bool) -> None:
        self.run(self.world.end(id, reoffer))

    @rule(seconds=st.sampled_from((0, 700, 1300)))
    def expire(self, seconds: float) -> None:
        self.run(self.world.expire(seconds))

    @invariant()
    def the_books_are_right(self) -> None:
        self.run(self.world.check())


@pytest.mark.parametrize("database", DATABASES)
def test_each_generation_is_paid_once_and_no_slot_is_lost_in_any_order(database: str) -> None:
    machine = type("Machine", (Machine,), {"database": database})
    test = machine.TestCase  # type: ignore[attr-defined]
    test.settings = settings(max_examples=settings().max_examples // 8, stateful_step_count=25)
    test("runTest").runTest()


@pytest.mark.parametrize("database", DATABASES)
def test_cancel_submit_fault_and_expiry_of_the_lease_in_every_order(database: str, tmp_path: Path) -> None:
    """With a second submit, and the settlement, which comes after the cancel or too early."""
    steps: dict[str, Callable[[World, str, str], Coroutine[Any, Any, None]]] = {
        "cancel": lambda world, request, _: world.cancel(request),
        "settle": lambda world, _, run: world.settle(run),
        "submit": lambda world, _, run: world.submit(run),
        "fault": lambda world, _, run: world.fault(run),
        "run out": lambda world, _, run: world.fault(run, None),
    }

    async def play(world: World) -> None:
        for order in permutations(steps):
            request = await world.enqueue()
            [run] = await world.pop()
            for name in order:
                await steps[name](world, request, run)
            await world.submit(run)
            await world.cancel(request)  # so that the next order meets an empty queue
            await world.check()

    with world(database, tmp_path) as (runner, one):
        runner.run(play(one))


async def _race(world: World, chance: random.Random) -> None:
    """All that can happen to one request, at the same moment, at several gateways."""
    streams = chance.random() < 0.7
    request = await world.enqueue(streams=streams, amount=chance.choice((1, 2)))
    runs = await world.pop(amount=2)
    reply = Reply("x" * 100)
    contenders: list[Callable[[Jobs], Coroutine[Any, Any, Any]]] = [partial(Jobs.cancel, request=request)]
    for run in runs:
        contenders += [
            partial(Jobs.submit, generation=run, owner="bob", reply=reply),
            partial(Jobs.submit, generation=run, owner="bob", reply=reply),
            partial(Jobs.fault, generation=run, owner="bob", reason="tired"),
            partial(Jobs.fault, generation=run, owner=None, reason="its lease ran out"),
            partial(Jobs.settle, generation=run, chars=60),
            partial(Jobs.end, generation=run, reoffer=True),
        ]
    contenders = chance.sample(contenders, chance.randint(2, len(contenders)))
    outcomes = await asyncio.gather(
        *(contend(chance.choice(world.gateways)) for contend in contenders), return_exceptions=True
    )
    unexpected = [one for one in outcomes if isinstance(one, Exception) and not isinstance(one, PoolError)]
    assert not unexpected
    await world.check(alone=False)
    for held in await world.jobs.cancel(request):
        assert await world.jobs.settle(held.id, 0)
    final = {one.id: one for one in await world.jobs.generations(request)}
    assert all(final[run].status != "leased" for run in runs)
    assert (await world.jobs.pop(Declaration("bob's", "bob", ("m",), 512, 4096))).given == []


@pytest.mark.parametrize("database", DATABASES)
def test_each_generation_is_paid_once_when_all_happens_at_once(database: str, tmp_path: Path) -> None:
    chance = random.Random(6)

    async def play(world: World) -> None:
        for _ in range(60):
            await _race(world, chance)
        await world.check(alone=False)

    with world(database, tmp_path, gateways=3) as (runner, one):
        runner.run(play(one))


@pytest.mark.parametrize("database", DATABASES)
def test_workers_that_pop_at_once_never_get_the_same_slot(database: str, tmp_path: Path) -> None:
    """And each gets one, although the oldest job is held by another at that moment."""

    async def play(world: World) -> None:
        for amount in (1, 1, 3, 2, 5):
            await world.enqueue(amount=amount)
        workers = [Declaration(f"w{number}", "bob", ("m",), 512, 4096) for number in range(12)]
        popped = await asyncio.gather(
            *(world.gateways[number % 3].pop(worker) for number, worker in enumerate(workers))
        )
        given = [generation for one in popped for generation, _ in one.given]
        assert len({one.id for one in given}) == len(given)
        while more := (await world.jobs.pop(workers[0])).given:  # whoever found all of the queue held gets it now
            given += [generation for generation, _ in more]
        counts = Counter(one.request for one in given)
        assert counts == {name: wanted.amount for name, wanted in world.books.requests.items()}
        await world.check(alone=False)

    with world(database, tmp_path, gateways=3) as (runner, one):
        runner.run(play(one))
