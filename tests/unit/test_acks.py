"""What an ack lets go, when it meets readers that are just arriving, and how long it takes the loop for itself (R6)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import pytest_asyncio

from midstream.errors import CursorExpired
from midstream.journal.memory import MemoryJournal
from midstream.records import Chunk, Finish, Producer, StreamState
from midstream.streams import Streams
from midstream.testing.clock import ManualClock
from midstream.testing.patience import soon, until


class Deliberate(MemoryJournal):
    """A journal that takes its time over a trim, as one does that has to look into a file first."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.asked = asyncio.Event()
        self.may = asyncio.Event()
        self.may.set()

    async def trim(self, stream_id: str, acked: int, floor: int | None) -> StreamState:
        self.asked.set()
        await self.may.wait()
        return await super().trim(stream_id, acked, floor)


async def said(count: int) -> Producer:
    for at in range(0, count, 500):
        yield [Chunk("x")] * min(500, count - at)
    yield Finish("stop")


@pytest_asyncio.fixture
async def streams() -> AsyncIterator[Streams]:
    clock = ManualClock()
    streams = Streams(Deliberate(clock), clock)
    await streams.start()
    yield streams
    await streams.close()


async def told(streams: Streams, count: int) -> str:
    """A stream of so many tokens that has ended."""
    opened = await streams.open("ada", "m", lambda _: said(count))
    await until(lambda: not streams.writers, "the stream to end")
    return opened.state.meta.stream_id


def journal_of(streams: Streams) -> Deliberate:
    assert isinstance(streams.journal, Deliberate)
    return streams.journal


async def test_reader_that_arrives_during_an_ack_is_refused_or_gets_everything(streams: Streams) -> None:
    """Never let in and then overtaken by it: what it was promised is not let go under it."""
    journal = journal_of(streams)
    for position in (0, 5, 10, 11):
        stream_id = await told(streams, 20)
        journal.may.clear()
        journal.asked.clear()
        acking = asyncio.create_task(streams.ack(stream_id, "ada", 10))
        await soon(journal.asked.wait())
        arriving = asyncio.create_task(streams.follow(stream_id, "ada", position))
        for _ in range(5):
            await asyncio.sleep(0)
        journal.may.set()
        await soon(acking)
        if position < 10 and isinstance(
            arrived := (await asyncio.gather(arriving, return_exceptions=True))[0], CursorExpired
        ):
            assert arrived.oldest_available == 11
            continue
        follow = await soon(arriving)
        assert follow is not None
        page = await soon(follow.next())
        assert page is not None
        assert page.frames[0].startswith(b"id: %d\n" % (position + 1))
        streams.leave(follow)


async def test_ack_of_a_long_answer_lets_others_have_their_turn(streams: Streams) -> None:
    """What it lets go is folded, record by record: tens of thousands in one go would hold up everybody."""
    stream_id = await told(streams, 20_000)
    longest = since = 0

    async def others(looks: Iterable[int]) -> None:
        nonlocal longest, since
        for _ in looks:
            await asyncio.sleep(0)
            longest = max(longest, (await streams.journal.state(stream_id)).oldest_retained_seq - since)
            since = (await streams.journal.state(stream_id)).oldest_retained_seq

    since = 1
    watching = asyncio.create_task(others(range(100_000)))
    state = await soon(streams.ack(stream_id, "ada", 20_001))
    watching.cancel()
    assert (state.acked_seq, state.trimmed_seq, state.oldest_retained_seq) == (20_001, 20_001, 20_002)
    assert longest <= 2000


async def test_ack_in_steps_respects_who_comes_between_them(streams: Streams) -> None:
    """A reader that was let in at a position keeps what follows it, though the ack is beyond."""
    stream_id = await told(streams, 20_000)
    acking = asyncio.create_task(streams.ack(stream_id, "ada", 20_001))
    while (await streams.journal.state(stream_id)).oldest_retained_seq < 3000:  # noqa: ASYNC110
        await asyncio.sleep(0)
    follow = await soon(streams.follow(stream_id, "ada", 15_000))
    assert follow is not None
    state = await soon(acking)
    assert (state.acked_seq, state.trimmed_seq) == (20_001, 15_000)
    page = await soon(follow.next())
    assert page is not None
    assert page.frames[0].startswith(b"id: 15001\n")
    streams.leave(follow)
    await streams.pulse(0.0)
    assert (await streams.journal.state(stream_id)).trimmed_seq == 20_001
