"""The one loop: read, hand over, wait, read again."""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio

from midstream.errors import CursorExpired
from midstream.follow import Follow
from midstream.journal.memory import MemoryJournal
from midstream.records import Page
from midstream.rules import Bounds
from midstream.testing.clock import ManualClock
from midstream.testing.journal_writer import Writer, meta, seqs
from midstream.testing.patience import soon


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def journal(clock: ManualClock) -> MemoryJournal:
    return MemoryJournal(clock, Bounds(max_stream_records=600))


@pytest_asyncio.fixture
async def writer(journal: MemoryJournal, clock: ManualClock) -> Writer:
    """A stream of three records."""
    writer = await Writer.begin(journal, meta(clock))
    await writer.say("a", "b")
    return writer


async def handed(follow: Follow) -> list[int]:
    """Seqs of the next page."""
    page = await soon(follow.next())
    assert page is not None
    return seqs(page.frames)


async def asked(follow: Follow) -> asyncio.Task[Page | None]:
    """A `next` that has begun and waits."""
    task = asyncio.create_task(follow.next())
    for _ in range(20):
        await asyncio.sleep(0)
    assert follow.waiting
    assert not task.done()
    return task


async def test_replay_goes_on_live_and_ends_with_the_terminal_record(writer: Writer) -> None:
    """One iterator: what was there, what comes, then no more (I3, I7)."""
    follow = Follow(writer.journal, writer.stream_id, 1)
    assert await handed(follow) == [2, 3]
    task = await asked(follow)
    await writer.say("c")
    page = await soon(task)
    assert page is not None
    assert seqs(page.frames) == [4]
    await writer.finish()
    assert await handed(follow) == [5]
    assert follow.ended  # known with the page: nobody reads again to find out
    assert await follow.next() is None
    assert await follow.next() is None


async def test_what_gathered_comes_at_once(writer: Writer) -> None:
    """A reader that was away for fifty appends gets them in one page."""
    follow = Follow(writer.journal, writer.stream_id, 3)
    await writer.say_one_by_one(50)
    assert await handed(follow) == list(range(4, 54))


async def test_position_moves_only_when_the_next_page_is_asked_for(writer: Writer) -> None:
    """Until then the socket may not have taken what was handed over (R6)."""
    follow = Follow(writer.journal, writer.stream_id, 0)
    assert await handed(follow) == [1, 2, 3]
    assert (follow.first, follow.position) == (0, 0)
    task = await asked(follow)
    assert follow.position == 3
    await writer.say("c")
    await soon(task)
    assert follow.position == 3


async def test_ack_by_the_lowest_position_never_takes_a_page_in_flight(writer: Writer) -> None:
    """What was handed over but not taken can be read again by who resumes (R6)."""
    follow = Follow(writer.journal, writer.stream_id, 0)
    await handed(follow)
    state = await writer.journal.trim(writer.stream_id, 3, follow.position)
    assert state.oldest_retained_seq == 1


async def test_beat_hands_a_waiting_reader_an_empty_page(writer: Writer) -> None:
    """It shows that the connection is alive, and moves no position."""
    follow = Follow(writer.journal, writer.stream_id, 3)
    for _ in range(3):
        task = await asked(follow)
        follow.beat()
        page = await soon(task)
        assert page is not None
        assert page.frames == []
        assert follow.position == 3
    await writer.say("c")
    assert await handed(follow) == [4]


async def test_beat_of_one_reader_is_not_seen_by_another(writer: Writer) -> None:
    """All are woken, the others wait on."""
    follow, other = Follow(writer.journal, writer.stream_id, 3), Follow(writer.journal, writer.stream_id, 3)
    task, waiting = await asked(follow), await asked(other)
    follow.beat()
    await soon(task)
    await asyncio.sleep(0)
    assert not waiting.done()
    await writer.say("c")
    assert await soon(waiting) is not None


async def test_beat_never_hides_records(writer: Writer) -> None:
    """A reader that is busy when it is due gets its records first."""
    follow = Follow(writer.journal, writer.stream_id, 0)
    follow.beat()
    assert await handed(follow) == [1, 2, 3]
    await writer.finish()
    assert await handed(follow) == [4]
    assert await follow.next() is None


async def test_interrupt_ends_the_reader_not_the_stream(writer: Writer) -> None:
    """`next` returns None without the terminal record; the stream goes on and can be resumed (I6)."""
    follow = Follow(writer.journal, writer.stream_id, 3)
    task = await asked(follow)
    follow.interrupt()
    assert await soon(task) is None
    assert not follow.ended
    await writer.say("c")
    assert await follow.next() is None
    assert await handed(Follow(writer.journal, writer.stream_id, follow.position)) == [4]


async def test_interrupt_before_the_first_page_hands_over_nothing(writer: Writer) -> None:
    """A reader that is told to go reads no more."""
    follow = Follow(writer.journal, writer.stream_id, 0)
    follow.interrupt()
    assert await follow.next() is None
    assert (follow.position, follow.ended) == (0, False)


async def test_overtaken_reader_is_told_the_oldest(writer: Writer) -> None:
    """It has not been given something, and never will be (R8, I4)."""
    follow = Follow(writer.journal, writer.stream_id, 0)
    await handed(follow)
    await writer.say_one_by_one(700)
    with pytest.raises(CursorExpired) as expired:
        await soon(follow.next())
    assert expired.value.oldest_available == 104


async def test_reader_just_below_the_oldest_goes_on(writer: Writer) -> None:
    """It has had everything before (R8)."""
    follow = Follow(writer.journal, writer.stream_id, 3)
    await writer.say_one_by_one(600)
    assert (await writer.journal.state(writer.stream_id)).oldest_retained_seq == 4
    assert (await handed(follow))[0] == 4


async def test_overtaken_reader_of_an_ended_stream_is_told_too(writer: Writer) -> None:
    """The end does not hide the loss."""
    follow = Follow(writer.journal, writer.stream_id, 0)
    await writer.say_one_by_one(700)
    await writer.finish()
    with pytest.raises(CursorExpired):
        await soon(follow.next())
    assert not follow.ended


async def test_reader_is_told_when_its_stream_expires(writer: Writer) -> None:
    """Waiting or not: the whole stream is gone, and there is no oldest."""
    follow = Follow(writer.journal, writer.stream_id, 3)
    task = await asked(follow)
    await writer.journal.expire(writer.stream_id)
    for asking in (task, follow.next()):
        with pytest.raises(CursorExpired) as expired:
            await soon(asking)
        assert expired.value.oldest_available is None


async def test_following_from_the_end_gives_nothing(writer: Writer) -> None:
    """At the terminal record's position all is read."""
    await writer.finish()
    follow = Follow(writer.journal, writer.stream_id, 4)
    assert await soon(follow.next()) is None
    assert follow.ended


async def test_cancelled_reader_can_ask_again(writer: Writer) -> None:
    """A timeout around `next` loses nothing."""
    follow = Follow(writer.journal, writer.stream_id, 3)
    task = await asked(follow)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not follow.waiting
    await writer.say("c")
    assert await handed(follow) == [4]


async def test_iterating_is_asking_until_the_end(writer: Writer) -> None:
    """`async for` gives the same pages."""
    await writer.say_one_by_one(550)
    await writer.finish()
    follow = Follow(writer.journal, writer.stream_id, 0)
    frames = [frame async for page in follow for frame in page.frames]
    assert frames == writer.frames
    assert follow.ended
    assert follow.position == len(frames)


async def test_reader_knows_how_to_be_cut_off(writer: Writer) -> None:
    """What a transport gives for that is kept for the pulse, and never called by the loop itself."""
    cut: list[bool] = []
    follow = Follow(writer.journal, writer.stream_id, 3, abort=lambda: cut.append(True))
    follow.interrupt()
    assert await follow.next() is None
    assert cut == []
    assert follow.abort is not None
    follow.abort()
    assert cut == [True]


async def test_first_records_are_told_once(writer: Writer) -> None:
    """To whom wants to know how long they took; a sign of life is none, and the records after them are not either."""
    told: list[int] = []
    follow = Follow(writer.journal, writer.stream_id, 3, on_first=lambda: told.append(follow.position))
    task = await asked(follow)
    follow.beat()
    await soon(task)
    assert told == []
    for text in "cd":
        await writer.say(text)
        await handed(follow)
    assert told == [3]  # when they were handed over, which is before they count as taken
