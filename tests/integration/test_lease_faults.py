"""Leases and progress in a store that loses replies, goes away, comes back without the newest, or moves its slots."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
import pytest_asyncio

from midstream.errors import JournalError
from midstream.pool.errors import NoLease, PoolUnavailable, ProgressOutOfSequence
from midstream.pool.leases import Ended, Leases, Terms
from midstream.pool.leases_redis import RedisLeases
from midstream.pool.leases_scripts import tag_of
from midstream.testing.fault_proxy import FaultProxy
from midstream.testing.lease_reading import Reader
from midstream.testing.lease_worker import Worker, posted, texts
from midstream.testing.patience import soon, until
from tests.clusters import Slots, two_nodes
from tests.leases import StoreClock, redis_leases
from tests.sharing import failing_over
from tests.valkeys import QUICK, shared, valkey

PATIENT = replace(QUICK, patience=5.0)


@pytest_asyncio.fixture
async def closing() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest_asyncio.fixture
async def proxy() -> AsyncIterator[FaultProxy]:
    async with FaultProxy("127.0.0.1", shared().port) as proxy:
        yield proxy


async def opened(closing: AsyncExitStack, leases: RedisLeases) -> RedisLeases:
    closing.push_async_callback(leases.close)
    await leases.open()
    return leases


@pytest_asyncio.fixture
async def leases(closing: AsyncExitStack, proxy: FaultProxy) -> RedisLeases:
    """Behind the proxy."""
    return await opened(closing, redis_leases(f"redis://127.0.0.1:{proxy.port}?prefix={uuid.uuid4().hex}"))


async def test_every_verb_stands_a_lost_reply(leases: RedisLeases, proxy: FaultProxy) -> None:
    """Done once and told as if nothing had been: each is sent again, and finds what it did the first time."""
    worker = Worker(leases, "request", 1000)
    proxy.lose_reply(leases._scripts.grant.sha)
    assert await leases.grant(worker.lease)
    proxy.lose_reply(leases._scripts.post.sha)
    await worker.say("a", "b")
    proxy.lose_reply(b"GET")
    leases._requests.clear()
    await worker.say("c")
    proxy.lose_reply(leases._scripts.flag.sha)
    assert await leases.flag("request") == {worker.generation: 3}
    proxy.lose_reply(b"HGETALL")
    assert [view.seq for view in await leases.held()] == [3]
    proxy.lose_reply(leases._scripts.end.sha)
    assert await leases.end(worker.generation, marker=True) is Ended.CANCELLED
    proxy.lose_reply(leases._scripts.lost.sha)
    assert await leases.lost(worker.generation)
    proxy.lose_reply(b"XRANGE")
    assert [entry.content for entry in await posted(leases, "request")] == ["a", "b", "c", ""]
    assert proxy.lost == 8


async def test_lost_lease_has_one_marker_though_the_reply_was_lost(closing: AsyncExitStack, proxy: FaultProxy) -> None:
    clock = StoreClock(shared(), prefix := uuid.uuid4().hex)
    url = f"redis://127.0.0.1:{proxy.port}?prefix={prefix}"
    leases = await opened(closing, redis_leases(url, ahead=clock.ahead))
    worker = await Worker.begin(leases)
    clock.advance(Terms().term + 1)
    proxy.lose_reply(leases._scripts.lost.sha)
    assert await leases.lost(worker.generation)
    assert proxy.lost == 1
    assert [entry.ended for entry in await posted(leases, worker.request)] == [True]


async def test_resets_lose_and_double_nothing(leases: RedisLeases, proxy: FaultProxy) -> None:
    """Of what is posted and of what is read, while connections are broken again and again."""
    workers = [await Worker.begin(leases, max_bytes=100_000) for _ in range(4)]
    readers = [Reader(leases, worker.request) for worker in workers]

    async def pull() -> None:
        while True:
            proxy.reset()
            await asyncio.sleep(0.02)

    async def speak(worker: Worker) -> None:
        while proxy.connections < 30:
            await worker.say(str(worker.seq + 1))

    pulling = asyncio.create_task(pull())
    await soon(asyncio.gather(*map(speak, workers)))
    for worker, reader in zip(workers, readers, strict=True):
        numbers = [str(n) for n in range(1, worker.seq + 1)]
        assert await reader.until(worker.seq) == numbers
        assert len(numbers) > 10
    pulling.cancel()
    for worker, reader in zip(workers, readers, strict=True):
        assert await posted(leases, worker.request) == reader.read


async def test_store_that_is_away_is_told_and_forgotten(leases: RedisLeases, proxy: FaultProxy) -> None:
    """The worker posts again with the same number.  Watching and signalling raise nothing meanwhile."""
    worker = await Worker.begin(leases)
    reader = Reader(leases, worker.request)
    await worker.say("a")
    await reader.until(1)
    await proxy.refuse()
    proxy.reset()
    verbs = [
        worker.post(2, "b"),
        leases.grant(worker.lease),
        leases.flag("another"),
        leases.end(worker.generation, marker=True),
        leases.lost(worker.generation),
        leases.held(),
        leases.entries("another", ""),
        leases.lost(str(uuid.uuid4())),
    ]
    told = await soon(asyncio.gather(*verbs, return_exceptions=True))
    assert [type(error) for error in told] == [PoolUnavailable] * len(verbs)
    late = Reader(leases, worker.request)
    await soon(leases.signal(worker.request, "done"))
    await proxy.accept()
    await until(leases._store.answers, "the store to be back")
    worker.seq = 1
    await worker.say("b")
    assert await reader.until(2) == await late.until(2) == ["a", "b"]


async def test_store_that_is_down_at_the_start_is_met_later(closing: AsyncExitStack, proxy: FaultProxy) -> None:
    await proxy.refuse()
    url = f"redis://127.0.0.1:{proxy.port}?prefix={uuid.uuid4().hex}"
    leases = await opened(closing, redis_leases(url))
    heard: list[str] = []
    leases.listen(lambda request, _: heard.append(request))
    with pytest.raises(PoolUnavailable):
        await leases.flag("request")
    worker = Worker(leases, "request", 1000)
    reader = Reader(leases, "request")
    await proxy.accept()
    await until(leases._store.answers, "the store to be met")
    assert await leases.grant(worker.lease)
    await worker.say("a")
    assert await reader.until(1) == ["a"]
    other = await opened(closing, redis_leases(url))
    async with asyncio.timeout(10):
        while "told by another" not in heard:
            await other.signal("told by another", "done")
            await asyncio.sleep(0.01)


async def test_store_that_refuses_us_says_so() -> None:
    leases = redis_leases(f"redis://nobody:wrong@127.0.0.1:{shared().port}")
    with pytest.raises(JournalError, match="will not let us in"):
        await leases.open()
    await leases.close()


async def test_restart_that_loses_nothing_is_not_noticed(closing: AsyncExitStack) -> None:
    """SIGKILL with every write on disk: worker and relay go on."""
    with valkey(appendonly="yes", appendfsync="always") as server:
        leases = await opened(closing, redis_leases(server.url(), store_terms=PATIENT))
        worker = await Worker.begin(leases)
        reader = Reader(leases, worker.request)
        await worker.say("a", "b")
        await reader.until(2)
        server.kill()
        server.start()
        await worker.say("c")
        assert not (await worker.post(3, "c")).cancelled
        with pytest.raises(ProgressOutOfSequence):  # it knows this server now: a gap is the worker's own
            await worker.post(9, "gap")
        assert await reader.until(3) == ["a", "b", "c"]


async def test_worker_goes_on_silently_when_the_store_has_lost_everything(closing: AsyncExitStack) -> None:
    """No lease any more; a new generation of the request is relayed as ever."""
    with valkey() as server:
        leases = await opened(closing, redis_leases(server.url(), store_terms=PATIENT))
        worker = await Worker.begin(leases)
        reader = Reader(leases, worker.request)
        await worker.say("a")
        await reader.until(1)
        server.kill()
        server.start()
        for seq in (2, 1, 0):
            with pytest.raises(NoLease):
                await worker.post(seq, "b" if seq else "")
        assert await leases.lost(worker.generation)
        assert await leases.flag(str(uuid.uuid4())) == {}
        again = await Worker.begin(leases, worker.request)
        await again.say("A")
        assert await reader.until(2) == ["a", "A"]


async def test_gap_that_a_fail_over_left_ends_the_lease(closing: AsyncExitStack) -> None:
    """The replica lacks the newest batches: what follows would leave a hole, so the worker is to go on silently."""
    async with failing_over() as failover:
        leases = await opened(closing, redis_leases(failover.url, store_terms=PATIENT))
        lacking, whole = await Worker.begin(leases), await Worker.begin(leases)
        await lacking.say("a")
        await whole.say("a", "b")
        reader = Reader(leases, whole.request)
        await reader.until(2)
        await failover.cut_off()
        await lacking.say("b", "c")
        failover.fail_over()
        for seq, content in ((4, "d"), (2, "b"), (0, "")):
            with pytest.raises(NoLease):
                await lacking.post(seq, content)
        assert await texts(leases, lacking.request) == ["a"]
        assert await leases.end(lacking.generation, marker=True) is Ended.NONE
        await whole.say("c")
        assert await reader.until(3) == ["a", "b", "c"]


async def test_slot_that_moves_takes_its_requests_with_it(closing: AsyncExitStack) -> None:
    """Watched, posted to and signalled while it moves: every entry once, in order, and signals heard afterwards."""
    with two_nodes() as nodes:
        slots = Slots(nodes)
        prefix = uuid.uuid4().hex
        one = await opened(closing, redis_leases(nodes[0].url(prefix), store_terms=PATIENT))
        two = await opened(closing, redis_leases(nodes[1].url(prefix), store_terms=PATIENT))
        workers = [await Worker.begin(one, max_bytes=100_000) for _ in range(8)]
        assert {slots.holder(tag_of(worker.request)) for worker in workers} == {0, 1}
        readers = [Reader(leases, worker.request) for worker in workers for leases in (one, two)]
        heard: set[str] = set()
        two.listen(lambda request, _: heard.add(request))
        mover = workers[0]
        before = slots.holder(tag_of(mover.request))
        moving = asyncio.create_task(slots.move(tag_of(mover.request)))
        while not moving.done():
            await asyncio.gather(*(worker.say("x") for worker in workers))
            await asyncio.sleep(0.002)
        await moving
        await asyncio.gather(*(worker.say("moved") for worker in workers))
        expected = ["x"] * (mover.seq - 1) + ["moved"]
        for reader in readers:
            assert await reader.until(mover.seq) == expected
        assert slots.holder(tag_of(mover.request)) != before
        assert await two.flag(mover.request) == {mover.generation: len("".join(expected))}
        assert len(await two.held()) == len(workers)
        await hears(one, heard, mover.request)


async def hears(leases: Leases, heard: set[str], request: str) -> None:
    async with asyncio.timeout(10):
        while request not in heard:
            await leases.signal(request, "done")
            await asyncio.sleep(0.01)
