"""What leases in memory promise beyond the contract: they stay bounded."""

from __future__ import annotations

from midstream.pool.leases import Terms
from midstream.pool.leases_memory import MemoryLeases
from midstream.testing.clock import ManualClock
from midstream.testing.lease_worker import Worker, new_id, texts

TERMS = Terms(term=10.0, retain=60.0, linger=600.0)


async def test_what_is_over_is_forgotten() -> None:
    """However a request went; one that is watched or alive is kept."""
    clock = ManualClock()
    leases = MemoryLeases(clock, TERMS)
    workers = [await Worker.begin(leases) for _ in range(50)]
    for worker in workers:
        await worker.say("a")
    for worker in workers[:20]:
        await leases.end(worker.generation, marker=True)
    for worker in workers[20:30]:
        await leases.flag(worker.request)
    await leases.flag(new_id())
    stop = leases.watch(workers[0].request, lambda: None)
    alive = workers[-1]
    for _ in range(90):
        clock.advance(9)
        await alive.live()
    await Worker.begin(leases)
    assert len(leases._asked) == 3
    assert len(leases._index) == 3
    stop()
    clock.advance(700)
    await Worker.begin(leases)
    assert len(leases._asked) == len(leases._index) == 1


async def test_entries_are_forgotten_before_the_request() -> None:
    """Text is what weighs: it goes after its retention, while its generation still has its lease."""
    clock = ManualClock()
    leases = MemoryLeases(clock, TERMS)
    worker = await Worker.begin(leases)
    await worker.say("a")
    for _ in range(8):
        clock.advance(9)
        await worker.live()
    await leases.held()
    assert not leases._asked[worker.request].entries
    await worker.say("b")
    assert await texts(leases, worker.request) == ["b"]


async def test_text_goes_with_the_relay_of_a_request_that_is_over() -> None:
    """And not before: a worker that is still at it may have another reader yet."""
    leases = MemoryLeases(ManualClock(), TERMS)
    worker = await Worker.begin(leases)
    await worker.say("a")
    leases.watch(worker.request, lambda: None)()
    assert await texts(leases, worker.request) == ["a"]
    first, second = (leases.watch(worker.request, lambda: None) for _ in range(2))
    await leases.end(worker.generation, marker=False)
    first()
    assert await texts(leases, worker.request) == ["a"]
    second()
    assert await texts(leases, worker.request) == []


async def test_clock_that_is_set_back_forgets_nothing() -> None:
    """A lease then lasts longer; none is lost for it."""
    clock = ManualClock()
    leases = MemoryLeases(clock, TERMS)
    worker = await Worker.begin(leases)
    await worker.say("a")
    clock.set(clock() - 3600)
    assert not await leases.lost(worker.generation)
    await worker.say("b")
    clock.advance(9)
    assert not await leases.lost(worker.generation)
    assert await texts(leases, worker.request) == ["a", "b"]
