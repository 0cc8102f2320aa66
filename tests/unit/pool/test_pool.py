"""The pool's steps over real stores: pops and leases, posts, faults, cancels and their pay, and the sweep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from midstream.pool import lifecycle
from midstream.pool.errors import (
    DuplicateGeneration,
    InvalidJob,
    NoLease,
    PoolUnavailable,
    UnknownRequest,
    WrongCredentials,
    WrongKey,
)
from midstream.pool.jobs import Jobs
from midstream.pool.leases import Ended
from midstream.pool.leases_memory import MemoryLeases
from midstream.pool.shapes import Ask, Generation, Reply, Request
from midstream.testing.clock import ManualClock
from midstream.wire import POOL_LEASE_TERM, POOL_REQUEST_KEPT, POOL_SWEEP_EVERY, POOL_WORKER_GONE
from tests.houses import KEY, OWNER, WORKER, House, house

TERM = float(POOL_LEASE_TERM)
# Streams, but of nobody here: what is tested is the pool alone.
ASK = Ask(OWNER, ("m",), {"prompt": "Once"}, max_length=100, max_context_length=2048, streams=True)


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[House]:
    async with house(tmp_path) as running:
        yield running


@contextmanager
def statements(here: House) -> Iterator[list[str]]:
    """What is sent to the database meanwhile."""
    sent: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        sent.append(statement)

    engine = here.jobs._db.engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(engine, "before_cursor_execute", note)


async def leased(here: House, ask: Ask = ASK) -> tuple[Request, Generation]:
    """A request, and the generation of it that a worker has."""
    return await here.pool.enqueue(ask), await here.pop()


async def away(*_: object) -> Any:
    """A store that does not answer."""
    raise PoolUnavailable


async def status(here: House, request: Request) -> str:
    return (await here.jobs.request(request.id)).status


# --- pop and posts ----------------------------------------------------------------------------------------------------


async def test_pop_gives_a_lease_with_what_the_posts_will_need(here: House) -> None:
    request, generation = await leased(here)
    assert generation.streams
    [view] = await here.leases.held()
    assert (view.generation, view.request, view.worker, view.model, view.owner) == (
        generation.id,
        request.id,
        "worker",
        "m",
        "bob",
    )
    assert view.expires_at == here.clock() + TERM
    # 16 bytes for each of its tokens
    posted = await here.pool.progress(generation.id, KEY, 1, "x" * 1600, "")
    assert not posted.cancelled


async def test_request_that_does_not_stream_has_no_lease(here: House) -> None:
    _, generation = await leased(here, replace(ASK, streams=False))
    assert not generation.streams
    assert await here.leases.held() == []
    with pytest.raises(NoLease):
        await here.pool.progress(generation.id, KEY, 1, "x", "")
    assert await here.finish(generation, "x" * 120) == 30


async def test_posts_touch_the_database_once_in_a_third_of_a_term(here: House) -> None:
    _, generation = await leased(here)
    with statements(here) as sent:
        await here.post(generation, ["x"] * 20)
        await here.quiet()
        assert sent == []
        for at in range(9):
            here.clock.advance(TERM / 9 + 0.1)
            await here.post(generation, ["x", "y"], 21 + 2 * at)
            await here.quiet()
    assert len([one for one in sent if one.startswith("UPDATE")]) == 3


@pytest.mark.parametrize("silent", [False, True], ids=["steady", "silent but alive"])
async def test_long_job_runs_once(here: House, silent: bool) -> None:
    """Three lease terms long: its posts keep it, be there anything in them or not."""
    request, generation = await leased(here)
    for seq in range(1, 19):
        here.clock.advance(TERM / 6)
        await here.pool.progress(generation.id, KEY, 0 if silent else seq, "" if silent else "x", "")
        await here.quiet()
        await here.sweep()
        assert await here.look() == []
    assert await here.finish(generation, "x" * 18) == 20
    assert await status(here, request) == "done"


async def test_dead_worker_is_replaced_within_a_term_a_third_and_one_sweep(here: House) -> None:
    _, generation = await leased(here)
    await here.post(generation, ["x"])
    here.clock.advance(TERM + TERM / 3)
    await here.sweep()
    assert await here.look() == []
    here.clock.advance(POOL_SWEEP_EVERY)
    await here.sweep()
    second = await here.pop()
    assert second.id != generation.id
    with pytest.raises(NoLease):
        await here.pool.progress(generation.id, KEY, 2, "y", "")
    with pytest.raises(InvalidJob):
        await here.finish(generation, "xy")
    assert await here.finish(second, "z") == 20
    assert await here.balances() == (-20, 20)


async def test_submit_in_the_instant_of_a_sweep_does_not_keep_others_from_their_turn(
    here: House, monkeypatch: Any
) -> None:
    """One that was nominated is handed in before it is looked at; the next one's worker is dead."""
    _, first = await leased(here)
    here.clock.advance(1)
    dead, _ = await leased(here)
    here.clock.advance(TERM + TERM / 3 + 1)
    lost = here.leases.lost

    async def meanwhile(generation: str) -> bool:
        if generation == first.id:
            await here.finish(first, "x")
        return await lost(generation)

    monkeypatch.setattr(here.leases, "lost", meanwhile)
    await here.sweep()
    assert (await here.jobs.request(dead.id)).faults == 1
    assert await here.balances() == (-20, 20)


@pytest.mark.parametrize("jump", [1200.0, 30_000.0, -30_000.0])
async def test_clock_that_jumps_costs_no_worker_its_job(here: House, jump: float) -> None:
    """Nor does its model vanish meanwhile; and one that falls silent loses its lease when it always did."""
    request, generation = await leased(here)
    _, reply = await leased(here, replace(ASK, streams=False))
    await here.post(generation, ["x"])
    here.clock.set(here.clock() + jump)
    assert here.pool.serves("m")
    assert here.pool.freshest() == "m"
    await here.sweep()
    await here.post(generation, ["y"], 2)
    [view] = await here.leases.held()
    assert view.expires_at == pytest.approx(here.clock() + TERM)
    assert await here.look() == []
    assert await here.finish(reply, "x") == 20
    assert await status(here, request) == "waiting"
    here.clock.advance(TERM + 1)
    with pytest.raises(NoLease):
        await here.pool.progress(generation.id, KEY, 3, "z", "")


async def test_renewal_that_did_not_get_through_costs_nobody_the_job(here: House) -> None:
    """SQL only nominates: the lease is alive, so it is SQL that is set right."""
    request, generation = await leased(here)
    for seq in range(1, 4):
        here.clock.advance(TERM - 1)
        await here.leases.post(generation.id, KEY, seq, "x", "")  # and nobody tells the database
    await here.sweep()
    assert (await here.jobs.generation(generation.id)).expires_at > here.clock()
    assert await status(here, request) == "waiting"
    assert await here.look() == []


async def test_lease_store_that_is_away_at_pop_leaves_the_job_to_others(here: House, monkeypatch: Any) -> None:
    request = await here.pool.enqueue(ASK)

    async def away(_: object) -> bool:
        raise PoolUnavailable

    with monkeypatch.context() as patched:
        patched.setattr(here.leases, "grant", away)
        with pytest.raises(PoolUnavailable):
            await here.pop()
    generation = await here.pop()
    assert generation.request == request.id
    assert (await here.jobs.request(request.id)).faults == 0


@pytest.mark.parametrize("streams", [True, False])
async def test_pop_that_nobody_waits_for_any_more_leaves_the_job_to_others(here: House, streams: bool) -> None:
    """Its caller is cancelled when the database has just given it the job: no fault is counted, no lease left."""
    request = await here.pool.enqueue(replace(ASK, streams=streams))
    popping = asyncio.create_task(here.pop())
    loop, engine = asyncio.get_running_loop(), here.jobs._db.engine
    event.listen(engine, "commit", lambda _: loop.call_soon_threadsafe(popping.cancel), once=True)
    with pytest.raises(asyncio.CancelledError):
        await popping
    await here.quiet()
    assert await here.leases.held() == []
    generation = await here.pop()
    assert generation.request == request.id
    assert (await here.jobs.request(request.id)).faults == 0


async def test_pop_that_is_cancelled_without_a_job_leaves_nothing(here: House, caplog: Any) -> None:
    """Nor one whose worker's name is another owner's."""
    for worker in (WORKER, replace(WORKER, owner="eve")):
        popping = asyncio.create_task(here.pool.pop(worker, KEY))
        await asyncio.sleep(0)
        popping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await popping
    await here.quiet()
    assert not caplog.records


async def test_submit_counts_though_the_lease_store_is_away(here: House, monkeypatch: Any) -> None:
    """The worker is paid for what it made; the lease runs out by itself."""
    request, generation = await leased(here)

    async def away(*_: object, **__: object) -> bool:
        raise PoolUnavailable

    monkeypatch.setattr(here.leases, "end", away)
    assert await here.finish(generation, "x" * 200) == 50
    assert await status(here, request) == "done"


# --- submit and fault -------------------------------------------------------------------------------------------------


async def test_submit_ends_the_lease_and_is_taken_once(here: House) -> None:
    request, generation = await leased(here)
    await here.post(generation, ["x"])
    assert await here.finish(generation, "x" * 200) == 50
    assert await here.leases.held() == []
    assert [entry.ended for _, entry in await here.leases.entries(request.id, "")] == [False]
    with pytest.raises(DuplicateGeneration, match="already submitted"):
        await here.finish(generation, "x" * 200)
    with pytest.raises(NoLease):
        await here.pool.progress(generation.id, KEY, 2, "y", "")
    assert await here.balances() == (-50, 50)


async def test_another_worker_can_neither_submit_nor_fault_nor_post(here: House) -> None:
    """And its trying changes nothing for the one whose job it is."""
    request, generation = await leased(here)
    with pytest.raises(WrongCredentials):
        await here.pool.submit(generation.id, "eve", Reply("x"))
    with pytest.raises(WrongCredentials):
        await here.pool.fault(generation.id, "eve", "because")
    with pytest.raises(WrongKey):
        await here.pool.progress(generation.id, b"eve's", 1, "x", "")
    assert await here.leases.entries(request.id, "") == []
    await here.post(generation, ["x"])
    assert await here.finish(generation, "x") == 20


@pytest.mark.parametrize("verb", ["submit", "fault", "progress"])
async def test_unknown_generation_is_no_job(here: House, verb: str) -> None:
    verbs: dict[str, Any] = {
        "submit": lambda: here.pool.submit("nothing", "bob", Reply("x")),
        "fault": lambda: here.pool.fault("nothing", "bob", ""),
        "progress": lambda: here.pool.progress("nothing", KEY, 1, "x", ""),
    }
    with pytest.raises(InvalidJob):
        await verbs[verb]()


async def test_fault_tells_relays_before_the_job_is_offered_again(here: House, monkeypatch: Any) -> None:
    request, generation = await leased(here)
    await here.post(generation, ["x"])
    entries: list[bool] = []
    fault = here.jobs.fault

    async def late(*given: Any) -> Any:
        entries.extend(entry.ended for _, entry in await here.leases.entries(request.id, ""))
        return await fault(*given)

    monkeypatch.setattr(here.jobs, "fault", late)
    await here.pool.fault(generation.id, "bob", "generation_error")
    assert entries == [False, True]
    assert (await here.pop()).id != generation.id


async def test_third_fault_fails_the_request(here: House) -> None:
    heard: list[tuple[str, str]] = []
    here.leases.listen(lambda request, kind: heard.append((request, kind)))
    request = await here.pool.enqueue(ASK)
    for _ in range(3):
        assert await status(here, request) == "waiting"
        await here.pool.fault((await here.pop()).id, "bob", "prompt_overflow")
    assert await status(here, request) == "failed"
    assert heard == [(request.id, "failed")]
    assert await here.look() == []
    assert await here.balances() == (0, 0)


async def test_request_that_nobody_takes_expires(here: House) -> None:
    heard: list[tuple[str, str]] = []
    here.leases.listen(lambda request, kind: heard.append((request, kind)))
    request = await here.pool.enqueue(ASK)
    here.clock.advance(1201)
    await here.sweep()
    assert await status(here, request) == "failed"
    assert heard == [(request.id, "failed")]


# --- cancel -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chars", "units"), [(200, 50), (199, 50), (81, 21), (80, 20), (1, 20), (0, 20), (1600, 100)])
async def test_cancel_pays_for_what_was_posted_and_a_floor(here: House, chars: int, units: int) -> None:
    """And never for more than was asked for."""
    request, generation = await leased(here)
    if chars:
        await here.post(generation, ["x" * (chars // 2), "x" * (chars - chars // 2)])
    view = await here.pool.cancel(request.id)
    assert (view.request.status, view.kudos) == ("cancelled", units)
    assert await here.balances() == (-units, units)
    posted = await here.pool.progress(generation.id, KEY, 3, "late", "")
    assert posted.cancelled
    assert await here.leases.entries(request.id, "") != [] or not chars
    with pytest.raises(InvalidJob):
        await here.finish(generation, "x" * 400)
    assert await here.balances() == (-units, units)


async def test_cancel_twice_pays_once(here: House) -> None:
    request, generation = await leased(here)
    await here.post(generation, ["x" * 120])
    await asyncio.gather(here.pool.cancel(request.id), here.pool.cancel(request.id))
    await here.pool.cancel(request.id)
    await here.sweep()
    assert await here.balances() == (-30, 30)


async def test_cancel_after_a_lost_attempt_pays_only_the_one_that_runs(here: House) -> None:
    request, first = await leased(here)
    await here.post(first, ["x" * 400])
    await here.pool.fault(first.id, "bob", "generation_error")
    second = await here.pop()
    await here.post(second, ["y" * 100])
    await here.pool.cancel(request.id)
    assert await here.balances() == (-25, 25)
    with pytest.raises(NoLease):
        await here.pool.progress(first.id, KEY, 2, "x", "")
    assert (await here.pool.progress(second.id, KEY, 2, "y", "")).cancelled


async def test_cancelled_request_is_neither_popped_nor_offered_again(here: House) -> None:
    request, generation = await leased(here)
    await here.pool.cancel(request.id)
    with pytest.raises(InvalidJob):
        await here.pool.fault(generation.id, "bob", "generation_error")
    assert await here.look() == []
    queued = await here.pool.enqueue(ASK)
    await here.pool.cancel(queued.id)
    assert await here.look() == []
    assert await here.balances() == (-20, 20)


async def test_cancel_of_what_cannot_hear_it_is_settled_at_submit(here: House) -> None:
    """The worker was not asked to post: it is paid for its reply, which nobody gets."""
    request, generation = await leased(here, replace(ASK, streams=False))
    await here.pool.cancel(request.id)
    assert await here.balances() == (0, 0)
    assert await here.finish(generation, "x" * 160) == 40
    view = await here.pool.status(request.id)
    assert view.request.status == "cancelled"
    assert [one.reply for one in view.generations] == [None]
    assert await here.balances() == (-40, 40)


async def test_cancel_after_the_end_changes_nothing(here: House) -> None:
    request, generation = await leased(here)
    await here.finish(generation, "x" * 160)
    assert (await here.pool.cancel(request.id)).request.status == "done"
    assert await here.balances() == (-40, 40)


async def test_cancel_of_nothing_leaves_nothing_behind(here: House) -> None:
    """Who knows no id must not be able to fill the lease store."""
    with pytest.raises(UnknownRequest):
        await here.pool.cancel("nothing")
    assert isinstance(here.leases, MemoryLeases)
    assert here.leases._asked == {}


async def test_pop_between_the_two_steps_of_a_cancel_gets_nothing(here: House) -> None:
    """The request is flagged, and its slot still open: the cancel is completed, and nobody is paid."""
    request = await here.pool.enqueue(ASK)
    await here.leases.flag(request.id)
    assert await here.look() == []
    assert await status(here, request) == "cancelled"
    assert await here.balances() == (0, 0)
    assert [one.status for one in await here.jobs.generations(request.id)] == ["ended"]


async def test_cancel_left_half_done_is_settled_by_the_sweep(here: House) -> None:
    """The process stopped between flag and settlement."""
    request, generation = await leased(here)
    await here.post(generation, ["x" * 100])
    await here.leases.flag(request.id)
    await here.jobs.cancel(request.id)
    assert await here.balances() == (0, 0)
    await here.sweep()
    assert await here.balances() == (-25, 25)


async def test_lease_that_ran_out_before_the_cancel_is_a_lost_attempt(here: House) -> None:
    """Its worker was gone by then: nothing is paid, though nobody had noticed yet."""
    request, generation = await leased(here)
    await here.post(generation, ["x" * 100])
    here.clock.advance(TERM + 1)
    await here.pool.cancel(request.id)
    here.clock.advance(TERM / 3)
    await here.sweep()
    assert [one.status for one in await here.jobs.generations(request.id)] == ["faulted"]
    assert await here.balances() == (0, 0)
    assert await here.look() == []


async def test_fault_of_a_cancelled_generation_is_paid_as_the_cancel_says(here: House) -> None:
    """The cancel is half done when the worker gives up: it ends there, and nothing is offered."""
    request, generation = await leased(here)
    await here.post(generation, ["x" * 100])
    await here.leases.flag(request.id)
    await here.jobs.cancel(request.id)
    await here.pool.fault(generation.id, "bob", "generation_error")
    assert await here.balances() == (-25, 25)
    assert await here.look() == []


@pytest.mark.parametrize("how_far", ["its lease is flagged", "the request is cancelled too"])
@pytest.mark.parametrize("stops", [False, True])
async def test_fault_that_comes_after_a_cancel_is_paid_what_was_posted(
    here: House, monkeypatch: Any, how_far: str, stops: bool
) -> None:
    """Also where the worker's gateway stops when the lease has gone."""
    request, generation = await leased(here)
    await here.post(generation, ["x" * 100])
    await here.leases.flag(request.id)
    if how_far.endswith("too"):
        await here.jobs.cancel(request.id)
    with monkeypatch.context() as patched, suppress(PoolUnavailable):
        if stops:
            patched.setattr(here.pool, "cancel", away)
        await here.pool.fault(generation.id, "bob", "generation_error")
    await here.pool.cancel(request.id)
    assert [one.status for one in await here.jobs.generations(request.id)] == ["cancelled"]
    assert await here.balances() == (-25, 25)
    assert here.pool.totals.generations == {"cancelled": 1}
    assert await here.look() == []


@pytest.mark.parametrize("how_far", ["its lease is gone", "it is in the database", "its gateway stopped"])
async def test_fault_that_comes_before_a_cancel_is_a_fault(here: House, monkeypatch: Any, how_far: str) -> None:
    """A relay cancels when it hears of the fault, and may be quicker: no worker is paid for it, and none is refused."""
    request, generation = await leased(here)
    await here.post(generation, ["x" * 100])
    fault = here.jobs.fault

    async def overtaken(*given: Any) -> Request:
        if how_far.startswith("its lease"):
            monkeypatch.setattr(here.jobs, "fault", fault)
            await here.pool.cancel(request.id)
            return await fault(*given)
        after = await fault(*given)
        await here.pool.cancel(request.id)
        return after

    with monkeypatch.context() as patched, suppress(PoolUnavailable):
        patched.setattr(here.jobs, "fault", away if how_far.endswith("stopped") else overtaken)
        await here.pool.fault(generation.id, "bob", "generation_error")
    await here.pool.cancel(request.id)
    assert [one.status for one in await here.jobs.generations(request.id)] == ["faulted"]
    assert await here.balances() == (0, 0)
    assert here.pool.totals.generations == {"faulted": 1}
    assert await here.look() == []


async def test_fault_that_is_repeated_while_a_cancel_is_half_done_is_paid_all_the_same(
    here: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker had no answer to the first; the database still calls the request one that waits."""
    request, generation = await leased(here)
    await here.post(generation, ["x" * 100])
    cancelled, go_on = here.jobs.cancel, asyncio.Event()

    async def slow(id: str) -> list[Generation]:
        await go_on.wait()
        return await cancelled(id)

    monkeypatch.setattr(here.jobs, "cancel", slow)
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(here.pool.cancel(request.id))]
    for _ in range(2):
        await asyncio.wait(tasks, timeout=0.05)
        tasks.append(asyncio.create_task(here.pool.fault(generation.id, "bob", "generation_error")))
    await asyncio.wait(tasks, timeout=0.05)
    go_on.set()
    await asyncio.gather(*tasks)
    assert [one.status for one in await here.jobs.generations(request.id)] == ["cancelled"]
    assert await here.balances() == (-25, 25)
    assert here.pool.totals.generations == {"cancelled": 1}


async def test_cancel_at_a_gateway_that_knows_no_lease_of_ours_came_before_the_fault(
    here: House, tmp_path: Path
) -> None:
    """Gateways with leases in their memory, on one database."""
    request, generation = await leased(here)
    await here.post(generation, ["x" * 100])
    elsewhere = Jobs(f"sqlite:///{tmp_path / 'pool.db'}", here.clock, "there")
    await elsewhere.open()
    await elsewhere.cancel(request.id)
    await elsewhere.close()
    await here.pool.fault(generation.id, "bob", "generation_error")
    assert [one.status for one in await here.jobs.generations(request.id)] == ["cancelled"]
    assert await here.balances() == (-25, 25)


async def test_lease_that_was_found_lost_is_a_fault_though_a_cancel_comes_to_the_database_first(
    here: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database was away when the sweep found it."""
    request, generation = await leased(here)
    await here.post(generation, ["x" * 100])
    here.clock.advance(TERM + TERM / 3 + 1)
    with monkeypatch.context() as patched:
        patched.setattr(here.jobs, "fault", away)
        await here.sweep()
    await here.pool.cancel(request.id)
    assert [one.status for one in await here.jobs.generations(request.id)] == ["faulted"]
    assert await here.balances() == (0, 0)
    assert here.pool.totals.generations == {"faulted": 1}


@pytest.mark.parametrize("who", ["the sweep", "its worker, too late"])
async def test_lease_that_ran_out_after_the_cancel_is_paid(here: House, who: str) -> None:
    """The process that cancelled it stopped between its two stores, and nobody came by for a while."""
    request, generation = await leased(here)
    await here.post(generation, ["x" * 100])
    await here.leases.flag(request.id)
    await here.jobs.cancel(request.id)
    here.clock.advance(TERM + TERM / 3 + 1)
    if who == "the sweep":
        await here.sweep()
    else:
        await here.pool.fault(generation.id, "bob", "generation_error")
    assert [one.status for one in await here.jobs.generations(request.id)] == ["cancelled"]
    assert await here.balances() == (-25, 25)


async def test_fault_that_races_a_cancel_is_paid_the_floor_where_its_lease_is_forgotten(
    here: House, monkeypatch: Any
) -> None:
    """The store came back without it."""
    request, generation = await leased(here)
    await here.post(generation, ["x" * 100])

    async def forgotten(*_: object, **__: object) -> Ended:
        assert isinstance(here.leases, MemoryLeases)
        here.leases._asked.clear()
        await here.jobs.cancel(request.id)
        return Ended.NONE

    monkeypatch.setattr(here.leases, "end", forgotten)
    await here.pool.fault(generation.id, "bob", "generation_error")
    assert await here.balances() == (-20, 20)


@pytest.mark.parametrize("other", ["submit", "fault", "lost"])
async def test_cancel_that_races_leaves_one_outcome_and_a_sum_of_zero(here: House, other: str) -> None:
    for _ in range(5):
        request, generation = await leased(here)
        await here.post(generation, ["x" * 100])

        async def race(generation: Generation = generation) -> None:
            if other == "submit":
                await here.finish(generation, "x" * 400)
            elif other == "fault":
                await here.pool.fault(generation.id, "bob", "generation_error")
            else:
                here.clock.advance(TERM + TERM / 3 + 1)
                await here.sweep()

        await asyncio.gather(here.pool.cancel(request.id), race(), return_exceptions=True)
        here.clock.advance(TERM + TERM / 3 + 1)
        await here.sweep()
        [one] = await here.jobs.generations(request.id)
        assert one.status in ("done", "cancelled", "faulted")
        assert await here.look() == []
    requester, worker = await here.balances()
    assert requester + worker == 0
    assert len((await here.pool.overview()).ledger) <= 5


# --- what is known without asking -------------------------------------------------------------------------------------


async def test_model_is_served_from_a_worker_s_first_pop_until_it_is_gone(here: House) -> None:
    other = replace(WORKER, name="other", models=("n", "a"))
    assert not here.pool.serves("n")
    await here.look(other)
    assert here.pool.serves("n")
    assert here.pool.models() == ["a", "m", "n"]
    here.clock.advance(POOL_WORKER_GONE - 1)
    await here.look()
    await here.pool.refresh()
    assert here.pool.models() == ["a", "m", "n"]
    here.clock.advance(2)
    await here.pool.refresh()
    assert here.pool.models() == ["m"]


async def test_workers_of_other_gateways_count_too(here: House, tmp_path: Path) -> None:
    async with house(tmp_path, clock=here.clock) as there:
        await there.look(replace(WORKER, name="other", models=("n",)))
        assert not here.pool.serves("n")
        here.clock.advance(6)
        await here.pool.poll()
        assert here.pool.serves("n")


async def test_status_says_where_a_request_stands_and_whether_anybody_can_take_it(here: House) -> None:
    first, second = await here.pool.enqueue(ASK), await here.pool.enqueue(replace(ASK, max_length=5000))
    assert (await here.pool.status(first.id)).possible
    view = await here.pool.status(second.id)
    assert (view.queue_position, view.possible) == (1, False)
    generation = await here.pop()
    await here.finish(generation, "x" * 100)
    view = await here.pool.status(first.id)
    assert (view.request.status, view.kudos, view.queue_position) == ("done", 25, 0)
    assert [one.reply for one in view.generations] == [Reply("x" * 100)]
    assert (await here.pool.account("ada")).kudos == -25
    with pytest.raises(UnknownRequest):
        await here.pool.status("nothing")


async def test_overview_shows_who_works_what_runs_and_who_was_paid(here: House) -> None:
    _, generation = await leased(here)
    await here.finish(generation, "x" * 100)
    request, generation = await leased(here)
    waiting = await here.pool.enqueue(ASK)
    here.clock.advance(1.0)
    assert (await here.pool.pop(replace(WORKER, models=("other",)), KEY)).given == []
    seen = await here.pool.overview()
    assert [worker.name for worker in seen.workers] == ["worker"]
    assert seen.seen == {"worker": here.clock()}
    assert [one.id for one in seen.queue] == [waiting.id]
    assert [(one.request, one.generation) for one in seen.running] == [(request.id, generation.id)]
    assert [lease.generation for lease in seen.leases.values()] == [generation.id]
    assert [(row.payer, row.payee, row.units) for row in seen.ledger] == [("ada", "bob", 25)]
    await here.pool.refresh()
    assert (here.pool.totals.waiting, here.pool.totals.running, here.pool.totals.units) == (1, 1, 25)


async def test_only_its_own_gateway_says_that_a_lease_in_memory_has_run_out(tmp_path: Path) -> None:
    """The database was away for long, and has heard of no renewal; a gateway that never comes back is given up."""
    clock = ManualClock()
    async with house(tmp_path, clock=clock) as here, house(tmp_path, clock=clock) as there:
        there.jobs._place = "there"
        request, generation = await leased(here)
        for seq in range(1, 4):
            clock.advance(TERM - 1)
            await here.leases.post(generation.id, KEY, seq, "x", "")  # and nobody tells the database
        await there.sweep()
        assert (await here.jobs.generation(generation.id)).status == "leased"
        await here.sweep()
        assert (await here.jobs.generation(generation.id)).expires_at > clock()
        clock.advance(lifecycle.NOMINATED + POOL_REQUEST_KEPT + 1)
        await there.sweep()
        assert (await here.jobs.request(request.id)).faults == 1


async def test_clock_that_jumps_gives_up_no_gateway_before_its_time(tmp_path: Path) -> None:
    """Another one's leases are asked of that one for as long after a jump as ever."""
    clock = ManualClock()
    async with house(tmp_path, clock=clock) as here, house(tmp_path, clock=clock) as there:
        there.jobs._place = "there"
        request, generation = await leased(here)
        clock.set(clock() + 30_000)
        for seconds in (0, lifecycle.NOMINATED + 1, POOL_REQUEST_KEPT - 2):
            clock.advance(seconds)
            await there.sweep()
            assert (await here.jobs.generation(generation.id)).status == "leased"
        clock.advance(2)
        await there.sweep()
        assert (await here.jobs.request(request.id)).faults == 1


async def test_generation_streams_only_where_its_lease_can_be(tmp_path: Path) -> None:
    """Two gateways with leases in memory share the jobs: one does not see what workers post to the other."""
    clock = ManualClock()
    async with house(tmp_path, clock=clock) as here, house(tmp_path, clock=clock) as there:
        there.jobs._place = "there"
        request = await here.pool.enqueue(ASK)
        generation = await there.pop()
        assert generation.request == request.id
        assert not generation.streams
        assert await there.finish(generation, "x" * 100) == 25
        assert await status(here, request) == "done"
