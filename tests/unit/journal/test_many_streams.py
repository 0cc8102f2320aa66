"""Hundreds of thousands of short answers: their memory is counted, and no look at all of them holds up the loop."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import pytest
import pytest_asyncio

from midstream.codec import native
from midstream.journal.base import Journal
from midstream.records import Chunk, Finish
from midstream.rules import Bounds
from midstream.testing.clock import ManualClock
from midstream.testing.journal_writer import meta
from tests.journals import new_journal

STREAMS = 3000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest_asyncio.fixture(params=["memory", "sqlite"])
async def journal(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> AsyncIterator[Journal]:
    journal = new_journal(request.param, tmp_path, clock, Bounds())
    await journal.open()
    yield journal
    await journal.close()


async def answered(journal: Journal, clock: ManualClock, number: int) -> None:
    """A short answer, under a name, that has ended."""
    told = meta(clock, request=b'{"body":{"prompt":"%d"}}' % number)
    await journal.create(told, [native.start(told.stream_id, "m")], [f"ada/idem/{number}"])
    end = [native.token(2, Chunk("yes")), native.done(3, Finish("stop"))]
    await journal.append(told.stream_id, end, epoch=1, first_seq=2)


async def many(journal: Journal, clock: ManualClock, count: int = STREAMS) -> None:
    for at in range(0, count, 500):
        await asyncio.gather(*(answered(journal, clock, number) for number in range(at, at + 500)))


async def test_what_a_stream_costs_beside_its_records_is_counted(journal: Journal, clock: ManualClock) -> None:
    """The bound of all streams is one of memory, also where they are so short that this is most of it (I5)."""
    await answered(journal, clock, -1)
    gc.collect()
    tracemalloc.start()
    try:
        before, counted = tracemalloc.get_traced_memory()[0], journal.retained_bytes()
        await many(journal, clock)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken <= 1.1 * (journal.retained_bytes() - counted)


async def turns_during(verb: Awaitable[object]) -> int:
    """How often others had their turn while it ran."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    task = asyncio.create_task(others())
    try:
        await verb
    finally:
        task.cancel()
    return turns


async def test_looks_at_all_streams_let_others_have_their_turn(journal: Journal, clock: ManualClock) -> None:
    """The sweep and the list."""
    await many(journal, clock)
    assert await turns_during(journal.list("ada")) >= STREAMS // 500 - 1
    clock.advance(700)
    assert await turns_during(journal.sweep()) >= STREAMS // 500 - 1
    assert await journal.list("ada") == []


async def test_streams_that_come_and_go_during_a_look_do_not_confuse_it(journal: Journal, clock: ManualClock) -> None:
    """What is forgotten meanwhile is passed over, what is new is left alone, and nothing is counted twice."""
    await many(journal, clock)
    known = [state.meta.stream_id for state in await journal.list("ada")]
    clock.advance(700)
    sweeping = asyncio.create_task(journal.sweep())
    await asyncio.sleep(0)
    expired = [journal.expire(stream_id) for stream_id in (known[0], known[-1], known[len(known) // 2])]
    await asyncio.gather(*expired, answered(journal, clock, -1))
    gone = await sweeping
    assert len(set(gone)) == len(gone)
    left = await journal.list("ada")
    assert [state.meta.request for state in left] == [b'{"body":{"prompt":"-1"}}']
    await journal.expire(left[0].meta.stream_id)
    assert journal.retained_bytes() == 0
