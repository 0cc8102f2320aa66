"""The same loop without a task switch per record: a reader that feeds a sink."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import pytest_asyncio

from midstream.errors import CursorExpired
from midstream.follow import Follow, Turn
from midstream.journal.base import Journal
from midstream.journal.memory import MemoryJournal
from midstream.records import Page
from midstream.rules import Bounds
from midstream.testing.clock import ManualClock
from midstream.testing.journal_writer import Writer, meta, seqs
from midstream.testing.patience import soon


class Bucket:
    """A sink that keeps what it was given.  It is full after every `room` pages, until it has been drained."""

    def __init__(self, room: int = 1_000_000) -> None:
        self.pages: list[Page] = []
        self.drained = 0
        self.positions: list[int] = []
        self.follow: Follow | None = None
        self._room = room
        self._arrived = asyncio.Event()

    def write(self, page: Page) -> bool:
        self.pages.append(page)
        if self.follow is not None:
            self.positions.append(self.follow.position)
        self._arrived.set()
        return len(self.pages) % self._room != 0

    async def drain(self) -> None:
        self.drained += 1
        await asyncio.sleep(0)

    async def holds(self, upto: int) -> None:
        """Return when it was given that record."""
        while not self.pages or self.pages[-1].last_seq < upto:
            self._arrived.clear()
            await soon(self._arrived.wait())

    @property
    def seqs(self) -> list[int]:
        return [seq for page in self.pages for seq in seqs(page.frames)]


@pytest.fixture
def journal() -> MemoryJournal:
    return MemoryJournal(ManualClock(), Bounds(max_stream_records=600))


@pytest_asyncio.fixture
async def writer(journal: MemoryJournal) -> Writer:
    """A stream of three records."""
    writer = await Writer.begin(journal, meta(ManualClock()))
    await writer.say("a", "b")
    return writer


async def fed(follow: Follow, bucket: Bucket) -> asyncio.Task[None]:
    """A feeding that has taken all there is, and waits."""
    task = asyncio.create_task(follow.feed(bucket))
    for _ in range(20):
        await asyncio.sleep(0)
    assert follow.waiting
    assert not task.done()
    return task


@pytest.mark.parametrize("room", [1, 2, 1000])
async def test_everything_is_handed_over_once_and_in_order(writer: Writer, room: int) -> None:
    """What was there, what comes, the end; full or not (I3, I7)."""
    follow, bucket = Follow(writer.journal, writer.stream_id, 1), Bucket(room)
    task = asyncio.create_task(follow.feed(bucket))
    for count in (1, 4, 1):
        await writer.say_one_by_one(count)
        await bucket.holds(writer.next_seq - 1)
    await writer.finish()
    await soon(task)
    assert bucket.seqs == list(range(2, 11))
    assert follow.ended
    assert (bucket.drained > 0) == (room < 1000)
    assert follow.position == 10


async def test_position_moves_with_what_the_sink_took(writer: Writer) -> None:
    """While a page is being written it does not count yet (R6)."""
    follow, bucket = Follow(writer.journal, writer.stream_id, 0), Bucket()
    bucket.follow = follow
    task = await fed(follow, bucket)
    assert follow.position == 3
    await writer.say("c")
    await bucket.holds(4)
    assert bucket.positions == [0, 3]
    await writer.finish()
    await soon(task)


async def test_what_gathered_is_one_page(writer: Writer) -> None:
    """Fifty appends within a turn of the loop are one write."""
    follow, bucket = Follow(writer.journal, writer.stream_id, 3), Bucket()
    task = await fed(follow, bucket)
    await writer.say_one_by_one(50)
    await writer.finish()
    await soon(task)
    assert [len(page.frames) for page in bucket.pages] == [51]


async def test_beat_gives_the_sink_an_empty_page(writer: Writer) -> None:
    """A sign of life that moves no position."""
    follow, bucket = Follow(writer.journal, writer.stream_id, 3), Bucket()
    task = await fed(follow, bucket)
    for beats in (1, 2):
        follow.beat()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [page.frames for page in bucket.pages] == [[]] * beats
    assert follow.position == 3
    assert follow.waiting
    await writer.finish()
    await soon(task)
    assert bucket.seqs == [4]


async def test_interrupt_ends_the_feeding_not_the_stream(writer: Writer) -> None:
    """It returns without the terminal record, and the stream goes on (I6)."""
    follow, bucket = Follow(writer.journal, writer.stream_id, 0), Bucket()
    task = await fed(follow, bucket)
    follow.interrupt()
    await soon(task)
    assert not follow.ended
    await writer.say("c")
    await asyncio.sleep(0)
    assert bucket.seqs == [1, 2, 3]


async def test_sink_that_is_full_holds_up_only_its_own_reader(writer: Writer) -> None:
    """Its position stays while the others go on, and it loses nothing (I5)."""
    gate = asyncio.Event()

    class Full(Bucket):
        async def drain(self) -> None:
            await gate.wait()

    slow, quick = Full(room=1), Bucket()
    slow_reader, reader = (Follow(writer.journal, writer.stream_id, 0) for _ in range(2))
    slow_task, task = asyncio.create_task(slow_reader.feed(slow)), asyncio.create_task(reader.feed(quick))
    await quick.holds(3)
    for _ in range(5):
        await writer.say("x")
        await quick.holds(writer.next_seq - 1)
    await writer.finish()
    await soon(task)
    assert len(slow.pages) == 1
    gate.set()
    await soon(slow_task)
    assert slow.seqs == quick.seqs == list(range(1, 10))


async def test_sink_that_is_full_is_given_nothing_before_it_has_drained(writer: Writer) -> None:
    """However much waits for it: one page beyond its bound, not two (I5)."""

    class Full(Bucket):
        full = False

        def write(self, page: Page) -> bool:
            assert not self.full
            self.full = True
            super().write(page)
            return False

        async def drain(self) -> None:
            self.full = False
            await super().drain()

    await writer.say(*["x" * 2000] * 595)
    await writer.finish()
    sink = Full()
    await soon(Follow(writer.journal, writer.stream_id, 0).feed(sink))
    assert sink.seqs == list(range(1, 600))


async def test_long_replay_lets_others_have_their_turn() -> None:
    """A socket takes megabytes before it is full: they are not written in one go."""
    journal = MemoryJournal(ManualClock())
    writer = await Writer.begin(journal, meta(ManualClock()))
    for _ in range(25):
        await writer.say(*["x" * 500] * 400)
    await writer.finish()
    bucket, most = Bucket(), 0
    task = asyncio.create_task(Follow(journal, writer.stream_id, 0).feed(bucket))
    while not task.done():
        before = len(bucket.pages)
        await asyncio.sleep(0)
        most = max(most, len(bucket.pages) - before)
    await task
    assert bucket.seqs[-1] == writer.next_seq - 1
    assert most <= 8 < len(bucket.pages)


async def test_overtaken_reader_is_told_the_oldest(writer: Writer) -> None:
    """Full for too long: what it lacks is gone (R8, I4)."""
    gate = asyncio.Event()

    class Full(Bucket):
        async def drain(self) -> None:
            await gate.wait()

    task = asyncio.create_task(Follow(writer.journal, writer.stream_id, 0).feed(Full(room=1)))
    await asyncio.sleep(0)
    await writer.say_one_by_one(700)
    gate.set()
    with pytest.raises(CursorExpired) as expired:
        await soon(task)
    assert expired.value.oldest_available == 104


async def test_reader_is_told_when_its_stream_expires(writer: Writer) -> None:
    """While it waits, and when it begins."""
    follow, bucket = Follow(writer.journal, writer.stream_id, 3), Bucket()
    task = await fed(follow, bucket)
    await writer.journal.expire(writer.stream_id)
    for feeding in (task, Follow(writer.journal, writer.stream_id, 3).feed(bucket)):
        with pytest.raises(CursorExpired) as expired:
            await soon(feeding)
        assert expired.value.oldest_available is None


async def test_error_of_the_sink_is_raised(writer: Writer) -> None:
    """To whoever feeds it, also when it happens in a callback; other readers are not touched."""

    class Broken(Bucket):
        def write(self, page: Page) -> bool:
            if len(self.pages) == 1:
                raise ConnectionResetError("the peer has gone")
            return super().write(page)

    turn, bucket = Turn(), Bucket()
    broken = await fed(Follow(writer.journal, writer.stream_id, 0, turn=turn), Broken())
    whole = await fed(Follow(writer.journal, writer.stream_id, 0, turn=turn), bucket)
    await writer.say("c")
    with pytest.raises(ConnectionResetError):
        await soon(broken)
    await writer.finish()
    await soon(whole)
    assert bucket.seqs == [1, 2, 3, 4, 5]


async def test_cancelled_feeding_leaves_nothing_behind(writer: Writer) -> None:
    """Neither the reader nor its sink stays reachable through the journal."""
    follow, bucket = Follow(writer.journal, writer.stream_id, 0), Bucket()
    task = await fed(follow, bucket)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await writer.say("c")
    await asyncio.sleep(0)
    assert bucket.seqs == [1, 2, 3]
    assert not follow.waiting
    gone = weakref.ref(bucket)
    del follow, bucket, task
    await asyncio.sleep(0)
    gc.collect()
    assert gone() is None


async def test_reader_cancelled_as_its_stream_ends_takes_nobody_with_it(writer: Writer) -> None:
    """Woken and cancelled within one turn of the loop: the readers after it are still served."""
    turn = Turn()
    buckets = [Bucket() for _ in range(3)]
    tasks = [await fed(Follow(writer.journal, writer.stream_id, 0, turn=turn), bucket) for bucket in buckets]
    await writer.finish()
    tasks[0].cancel()
    await soon(asyncio.gather(*tasks[1:]))
    assert [bucket.seqs for bucket in buckets[1:]] == [[1, 2, 3, 4]] * 2
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]


@pytest.mark.parametrize("room", [1, 3, 1000])
async def test_reader_cancelled_in_whatever_turn_takes_nobody_with_it(room: int) -> None:
    """Before it began, between two pages, full, waiting, woken, and as its stream ends; nothing of it is left."""
    for turns in range(30):
        journal, turn = MemoryJournal(ManualClock()), Turn()
        writer = await Writer.begin(journal, meta(ManualClock()))
        await writer.say("a", "b")
        follows = [Follow(journal, writer.stream_id, 0, turn=turn) for _ in range(3)]
        buckets = [Bucket(room) for _ in follows]
        tasks = [asyncio.create_task(follow.feed(bucket)) for follow, bucket in zip(follows, buckets, strict=True)]
        doomed = asyncio.create_task(_cancel_after(turns, tasks[1]))
        for _ in range(8):
            await writer.say("x")
            await asyncio.sleep(0)
        await writer.finish()
        await soon(asyncio.gather(tasks[0], tasks[2], doomed))
        await asyncio.wait([tasks[1]])
        assert buckets[0].seqs == buckets[2].seqs == list(range(1, 13))
        assert buckets[1].seqs == list(range(1, 13))[: len(buckets[1].seqs)]
        assert not journal._logs[writer.stream_id].waiters


async def _cancel_after(turns: int, task: asyncio.Task[None]) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()


class Afar:
    """A journal that has nothing at hand in this process: every look is a `read`, and counted."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.reads = 0

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._journal, verb)

    def peek(self, stream_id: str, after: int) -> Page | None:
        return None

    async def read(self, stream_id: str, after: int) -> Page:
        self.reads += 1
        return await self._journal.read(stream_id, after)


async def test_journal_with_nothing_at_hand_is_waited_for(writer: Writer) -> None:
    """Not asked again and again while nothing comes."""
    afar = Afar(writer.journal)
    follow, bucket = Follow(cast(Journal, afar), writer.stream_id, 0), Bucket()
    task = await fed(follow, bucket)
    assert afar.reads <= 3
    follow.beat()
    await writer.say("c")
    await bucket.holds(4)
    await writer.finish()
    await soon(task)
    assert bucket.seqs == [1, 2, 3, 4, 5]
    assert afar.reads <= 10


async def test_turn_goes_on_after_one_that_fails() -> None:
    """It is told to the loop; the others are served."""
    turn, served = Turn(), 0
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))

    def serve() -> None:
        nonlocal served
        served += 1
        if served % 2:
            raise ZeroDivisionError

    for _ in range(10):
        turn.add(serve)
    await asyncio.sleep(0)
    assert served == 10
    assert [type(fault["exception"]) for fault in faults] == [ZeroDivisionError] * 5


async def test_turn_serves_everybody_and_lets_the_loop_go_on() -> None:
    """Thousands that are due do not hold up the loop in one go, nor does any wait for more than its turns."""
    turn, served, log = Turn(), 0, []

    def serve() -> None:
        nonlocal served
        served += 1

    def due(count: int, then: Callable[[], None]) -> None:
        for _ in range(count):
            turn.add(then)

    due(1000, serve)
    while served < 1000:
        before = served
        await asyncio.sleep(0)
        log.append(served - before)
    assert sum(log) == 1000
    assert max(log) < 1000
    due(1, lambda: due(1, serve))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert served == 1001


@pytest.mark.parametrize("room", [1, 1000])
async def test_first_records_are_told_once(writer: Writer, room: int) -> None:
    """After they went into the sink, and never again."""
    told: list[int] = []
    bucket = Bucket(room)
    follow = Follow(writer.journal, writer.stream_id, 1, on_first=lambda: told.append(len(bucket.pages)))
    task = asyncio.create_task(follow.feed(bucket))
    await bucket.holds(3)
    await writer.say("c")
    await writer.finish()
    await soon(task)
    assert bucket.seqs == [2, 3, 4, 5]
    assert told == [1]
