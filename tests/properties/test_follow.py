"""First half and second half are the whole, byte for byte, whatever happens between (I3)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable
from itertools import combinations_with_replacement, cycle
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.errors import CursorExpired
from midstream.follow import Follow
from midstream.journal.base import Journal
from midstream.records import Frame, Page, Record
from midstream.rules import Bounds
from midstream.testing.clock import ManualClock
from midstream.testing.journal_writer import Writer, meta, read_all, seqs
from midstream.testing.patience import soon
from midstream.wire import SLICE_FRAMES, TERMINAL
from tests.journals import BACK_ENDS, running

clock = ManualClock()
back_ends = pytest.mark.parametrize("back_end", BACK_ENDS)


class Restless:
    """A journal whose waits return early, late, or more than once: `moods` says how, one after the other.

    A wake-up may be lost only where the level still wakes, since `wait` is level-triggered: never for ever.
    """

    def __init__(self, journal: Journal, moods: Iterable[int]) -> None:
        self._journal = journal
        self._moods = cycle(moods)

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._journal, verb)

    def peek(self, stream_id: str, after: int) -> Page | None:
        return self._journal.peek(stream_id, after) if next(self._moods) else None

    def call_when(self, stream_id: str, after: int, callback: Callable[[], None]) -> bool:
        mood, call_soon = next(self._moods), asyncio.get_running_loop().call_soon

        def late() -> None:
            call_soon(callback)

        if mood < 2:  # for no reason; at mood 1 as well as when there is one
            late()
        return mood == 0 or self._journal.call_when(stream_id, after, late)

    async def wait(self, stream_id: str, after: int) -> None:
        mood = next(self._moods)
        if mood == 0:  # for no reason
            await asyncio.sleep(0)
        elif mood == 1:  # twice
            await asyncio.gather(self._journal.wait(stream_id, after), self._journal.wait(stream_id, after))
        elif mood == 2:  # woken, and by then there is nothing to wait for
            self._journal.wake(stream_id)
            await asyncio.sleep(0)
        else:  # late: other wake-ups have passed meanwhile
            await self._journal.wait(stream_id, after)
            for _ in range(mood):
                await asyncio.sleep(0)


moods = st.lists(st.integers(0, 6), min_size=1, max_size=6)


class Stepped:
    """A journal that does something at a moment of a reader: before or after a read, or before or within a wait.

    `at` maps moments, counted from 0, to what is done then.  Within a wait something is always done, as nobody else
    would end it: the next of the things that are left.
    """

    def __init__(self, journal: Journal, steps: Iterable[tuple[int, Callable[[], Awaitable[None]]]]) -> None:
        self._journal = journal
        self._steps = list(steps)
        self._moment = 0

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._journal, verb)

    async def _pass(self) -> None:
        while self._steps and self._steps[0][0] == self._moment:
            await self._steps.pop(0)[1]()
        self._moment += 1

    async def read(self, stream_id: str, after: int) -> Page:
        await self._pass()
        page = await self._journal.read(stream_id, after)
        await self._pass()
        return page

    async def wait(self, stream_id: str, after: int) -> None:
        await self._pass()
        waiting = asyncio.create_task(self._journal.wait(stream_id, after))
        await asyncio.sleep(0)
        if not waiting.done() and self._steps:
            await self._steps.pop(0)[1]()
        await soon(waiting)


class Bucket:
    """A sink that is full every so often, and takes some turns of the loop to drain."""

    def __init__(self, moods: Iterable[int], enough: int) -> None:
        self.frames: list[Frame] = []
        self.enough = asyncio.Event()
        self._enough = enough
        self._moods = cycle(moods)

    def write(self, page: Page) -> bool:
        self.frames += page.frames
        if len(self.frames) >= self._enough:
            self.enough.set()
        return next(self._moods) > 2

    async def drain(self) -> None:
        for _ in range(next(self._moods)):
            await asyncio.sleep(0)


Way = Callable[[object, str, int, int], Awaitable[list[Frame]]]


async def by_asking(journal: object, stream_id: str, after: int, enough: int) -> list[Frame]:
    """What a reader that asks for page after page is given, until it has enough or the stream ends."""
    frames: list[Frame] = []
    follow = Follow(cast(Journal, journal), stream_id, after)
    while len(frames) < enough and (page := await follow.next()) is not None:
        frames += page.frames
    assert follow.ended or len(frames) >= enough
    return frames


def by_feeding(moods: Iterable[int]) -> Way:
    """The same for a reader that feeds a sink; cut off by cancelling it."""

    async def way(journal: object, stream_id: str, after: int, enough: int) -> list[Frame]:
        follow, bucket = Follow(cast(Journal, journal), stream_id, after), Bucket(moods, enough)
        feeding = asyncio.create_task(follow.feed(bucket))
        waiting = asyncio.create_task(bucket.enough.wait())
        await asyncio.wait([feeding, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not feeding.done():
            feeding.cancel()
            await asyncio.wait([feeding])
        else:
            await feeding
            assert follow.ended
        return bucket.frames

    return way


async def followed(journal: object, stream_id: str, after: int, way: Way = by_asking) -> list[Frame]:
    """All that a reader of this journal is given, up to the terminal record."""
    return await way(journal, stream_id, after, sys.maxsize)


async def first(journal: object, stream_id: str, count: int, way: Way) -> list[Frame]:
    """What a reader from the start has dispatched when its connection is cut after `count` records."""
    return (await way(journal, stream_id, 0, count))[:count] if count else []


async def write_all(writer: Writer, sizes: Iterable[int], pauses: Iterable[int]) -> None:
    """Append batches of these sizes, so many turns of the loop apart, and finish."""
    for size, pause in zip(sizes, cycle(pauses)):
        for _ in range(pause):
            await asyncio.sleep(0)
        await writer.say(*(f"{writer.next_seq + at} ü🧵\n" for at in range(size)))
    await writer.finish()


async def cut_at(journal: Journal, position: int, sizes: list[int], pauses: list[int], told: list[int]) -> None:
    """A reader is cut at a position while the stream is being written; another one goes on from there."""
    for way, other in [(by_asking, by_feeding(told)), (by_feeding(told), by_asking)]:
        writer = await Writer.begin(journal, meta(clock))
        restless = Restless(journal, told)
        writing = asyncio.create_task(write_all(writer, sizes, pauses))
        head = await soon(first(restless, writer.stream_id, position, way))
        tail = await soon(followed(restless, writer.stream_id, position, other))
        await writing
        assert head + tail == writer.frames
        assert await soon(followed(restless, writer.stream_id, position, way)) == writer.frames[position:]


@back_ends
def test_every_position_joins(back_end: str, tmp_path: Path) -> None:
    """From 0 to the terminal record, with the writer running meanwhile and wake-ups early, late and doubled."""
    sizes = [1, 2, 1, 3, 1]
    with running(back_end, tmp_path) as (run, journal):
        for position in range(sum(sizes) + 3):
            for told in ([1], [0, 3], [2, 4, 0], [5]):
                run(cut_at(journal, position, sizes, [0, 2, 1], told))


@back_ends
def test_any_position_of_any_stream_joins(back_end: str, tmp_path: Path) -> None:
    """Any batches at any pace, cut anywhere."""
    with running(back_end, tmp_path) as (run, journal):

        @settings(max_examples=40)
        @given(
            st.lists(st.integers(1, 9), max_size=8),
            st.lists(st.integers(0, 9), min_size=1, max_size=4),
            moods,
            st.data(),
        )
        def check(sizes: list[int], pauses: list[int], told: list[int], data: st.DataObject) -> None:
            position = data.draw(st.integers(0, sum(sizes) + 2), label="position")
            run(cut_at(journal, position, sizes, pauses, told))

        check()


@back_ends
def test_replay_meets_live_at_every_boundary(back_end: str, tmp_path: Path) -> None:
    """Two appends and the end, each at every moment of the loop: before and after a read, before and in a wait."""
    with running(back_end, tmp_path) as (run, journal):
        for moments in combinations_with_replacement(range(8), 3):
            run(meets_live(journal, moments))


async def meets_live(journal: Journal, moments: Iterable[int]) -> None:
    writer = await Writer.begin(journal, meta(clock))
    await writer.say("replayed")
    things = [lambda: writer.say("one"), lambda: writer.say("two", "three"), writer.finish]
    stepped = Stepped(journal, zip(moments, things, strict=True))
    assert await soon(followed(stepped, writer.stream_id, 1)) == writer.frames[1:]
    assert len(writer.frames) == 6


@back_ends
def test_token_between_read_and_wait_is_not_lost(back_end: str, tmp_path: Path) -> None:
    """Read through 7; 8 and 9 come before the wait, 10 during it: the reader has 6 to 10, once each."""

    async def scenario(journal: Journal) -> None:
        writer = await Writer.begin(journal, meta(clock))
        await writer.say_one_by_one(6)
        steps = [(1, lambda: writer.say("8")), (1, lambda: writer.say("9")), (9, lambda: writer.say("10"))]
        assert seqs(await soon(by_asking(Stepped(journal, steps), writer.stream_id, 5, 5))) == [6, 7, 8, 9, 10]

    with running(back_end, tmp_path) as (run, journal):
        run(scenario(journal))


@back_ends
@pytest.mark.parametrize("moment", range(4))
def test_stream_that_ends_between_two_looks_ends_its_reader(back_end: str, moment: int, tmp_path: Path) -> None:
    """The end comes after the read that found nothing and before the wait, or anywhere near: told once, no hanging."""

    async def scenario(journal: Journal) -> None:
        writer = await Writer.begin(journal, meta(clock))
        stepped = Stepped(journal, [(moment, writer.finish)])
        frames = await asyncio.wait_for(followed(stepped, writer.stream_id, 1), 1.0)
        assert [Record.of(frame).event for frame in frames] == ["done"]

    with running(back_end, tmp_path) as (run, journal):
        run(scenario(journal))


@back_ends
def test_long_replay_meets_a_growing_stream(back_end: str, tmp_path: Path) -> None:
    """20,000 records are replayed while 20,000 more are appended: each once, in order, in bounded memory (I5)."""

    async def scenario(journal: Journal) -> None:
        writer = await Writer.begin(journal, meta(clock))
        for _ in range(39):
            await writer.say(*["x"] * SLICE_FRAMES)
        writing = asyncio.create_task(write_all(writer, [SLICE_FRAMES] * 39, [1]))
        follow = Follow(journal, writer.stream_id, 0)
        expected = 1
        met_live = False
        async for page in follow:
            assert seqs(page.frames) == list(range(expected, page.last_seq + 1))
            assert len(page.frames) <= SLICE_FRAMES
            expected = page.last_seq + 1
            met_live = met_live or expected < page.highest_seq != len(writer.frames)
            await asyncio.sleep(0)
        await writing
        assert expected - 1 == len(writer.frames) > 39_900
        kept = [getattr(follow, name) for name in Follow.__slots__ if name != "_journal"]
        assert sum(map(sys.getsizeof, kept)) < 1000

    with running(back_end, tmp_path) as (run, journal):
        run(scenario(journal))


@back_ends
def test_slow_reader_is_told_or_loses_nothing(back_end: str, tmp_path: Path) -> None:
    """While old records are evicted under it, a reader has every record up to where it is told that it lost some."""
    with running(back_end, tmp_path, Bounds(max_stream_records=12)) as (run, journal):

        @settings(max_examples=40)
        @given(
            st.lists(st.integers(1, 7), max_size=8),
            st.lists(st.integers(0, 3), min_size=1, max_size=4),
            st.lists(st.integers(0, 9), min_size=1, max_size=4),
        )
        def check(sizes: list[int], pauses: list[int], naps: list[int]) -> None:
            run(read_slowly(journal, sizes, pauses, naps))

        check()


async def read_slowly(journal: Journal, sizes: list[int], pauses: list[int], naps: list[int]) -> None:
    writer = await Writer.begin(journal, meta(clock))
    writing = asyncio.create_task(write_all(writer, sizes, pauses))
    follow, bucket = Follow(journal, writer.stream_id, 0), Bucket(naps, sys.maxsize)
    oldest: int | None = 0
    try:
        await soon(follow.feed(bucket))
    except CursorExpired as expired:
        oldest = expired.oldest_available
    await writing
    given = bucket.frames
    assert given == writer.frames[: len(given)]
    if oldest:
        assert oldest > len(given) + 1
        assert await read_all(journal, writer.stream_id, len(given)) == []
    else:
        assert Record.of(given[-1]).event in TERMINAL
