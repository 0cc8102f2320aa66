"""The journal contract, part 2: what readers are given, and from which positions (R5, R8, R9)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from midstream import rules
from midstream.errors import CursorAhead, CursorExpired, UnknownStream
from midstream.journal.base import Journal
from midstream.records import Record
from midstream.rules import Bounds
from midstream.testing.journal_writer import (
    Clock,
    MakeJournal,
    Writer,
    meta,
    read_all,
    resumed,
    seqs,
    text_of,
    tokens,
    written,
)
from midstream.wire import OPEN

EXPIRED = "cursor_expired"


class ReadingLaws:
    """Strictly after, nothing twice, never a silent gap."""

    async def test_read_is_strictly_after(self, journal: Journal, clock: Clock) -> None:
        """From every position N a reader is given N + 1, N + 2, … once each (I3)."""
        writer = await written(journal, meta(clock), 9)
        await writer.finish()
        for position in range(11):
            assert await read_all(journal, writer.stream_id, position) == writer.frames[position:]

    async def test_page_limit_is_respected(self, journal: Journal, clock: Clock) -> None:
        """A page holds at most `limit` records, and pages join without gap or repeat."""
        writer = await Writer.begin(journal, meta(clock))
        await writer.say(*["x"] * 40)
        await writer.say_one_by_one(3)
        for limit in (1, 2, 7, 44, 500):
            assert len((await journal.read(writer.stream_id, 0, limit)).frames) <= limit
            assert await read_all(journal, writer.stream_id, 0, limit=limit) == writer.frames

    async def test_page_is_bounded_in_bytes(self, journal: Journal, clock: Clock) -> None:
        """A page holds at most `max_bytes`, wherever the batches ended."""
        writer = await Writer.begin(journal, meta(clock))
        await writer.say(*["x" * size for size in (10, 500, 30, 900, 900, 5)])
        await writer.say_one_by_one(30)
        for max_bytes in (1, 200, 1000, 1500, 10_000):
            position = 0
            while position < len(writer.frames):
                page = await journal.read(writer.stream_id, position, max_bytes=max_bytes)
                assert page.frames == writer.frames[position : page.last_seq]
                assert len(page.frames) == 1 or sum(map(len, page.frames)) <= max_bytes
                assert page.last_seq > position
                position = page.last_seq

    async def test_record_larger_than_a_page_comes_alone(self, journal: Journal, clock: Clock) -> None:
        """A reader is never stuck before a record that is over the page's bytes."""
        writer = await written(journal, meta(clock), 2)
        await writer.say("x" * 50_000)
        await writer.say("after")
        assert seqs((await journal.read(writer.stream_id, 2, max_bytes=1000)).frames) == [3]
        assert seqs((await journal.read(writer.stream_id, 0, max_bytes=1000)).frames) == [1, 2]
        assert await read_all(journal, writer.stream_id, 0, max_bytes=1000) == writer.frames

    async def test_page_tells_state_of_the_same_instant(self, journal: Journal, clock: Clock) -> None:
        """Records and status belong together, also while a stream is being written: the page that ends has the end."""
        writer = await Writer.begin(journal, meta(clock))

        async def write() -> None:
            for _ in range(20):
                await writer.say("a", "b")
                await asyncio.sleep(0)
            await writer.finish()

        task = asyncio.create_task(write())
        position = 0
        while True:
            page = await journal.read(writer.stream_id, position, 3)
            assert seqs(page.frames) == list(range(position + 1, page.last_seq + 1))
            assert page.last_seq <= page.highest_seq
            position = page.last_seq
            if page.ends:
                break
            await asyncio.sleep(0)
        await task
        assert Record.of(page.frames[-1]).event == "done"
        assert position == page.highest_seq == len(writer.frames)

    async def test_final_append_is_readable_before_the_end(self, journal: Journal, clock: Clock) -> None:
        """Once anybody is told that a stream has ended, its terminal record can be read (I7)."""
        writer = await written(journal, meta(clock), 4)
        finishing = asyncio.create_task(writer.finish())
        await journal.wait(writer.stream_id, 4)
        while True:  # as soon as it is told, not when the writer hears that it was written
            state = await journal.state(writer.stream_id)
            page = await journal.read(writer.stream_id, 4)
            if state.status != OPEN:
                break
            await asyncio.sleep(0)
        assert page.ends
        assert [Record.of(frame).event for frame in page.frames] == ["done"]
        await finishing

    async def test_nothing_new_is_an_empty_page(self, journal: Journal, clock: Clock) -> None:
        """At the newest record there is nothing to give yet; the page ends only when the stream has."""
        writer = await written(journal, meta(clock), 4)
        page = await journal.read(writer.stream_id, 4)
        assert (page.frames, page.last_seq, page.highest_seq, page.status) == ([], 4, 4, OPEN)
        assert not page.ends
        await writer.finish()
        page = await journal.read(writer.stream_id, 5)
        assert (page.frames, page.last_seq, page.highest_seq, page.status) == ([], 5, 5, "done")
        assert page.ends

    async def test_cursor_beyond_the_end_is_refused(self, journal: Journal, clock: Clock) -> None:
        """Head 15, position 480: a claim that nobody can have earned, told at once with the head (R5)."""
        writer = await written(journal, meta(clock), 15)
        for position in (16, 17, 480, 2**53 - 1):
            with pytest.raises(CursorAhead) as ahead:
                await resumed(journal, writer.stream_id, position)
            assert ahead.value.highest_seq == 15
            assert (await journal.read(writer.stream_id, position)).frames == []
        assert await resumed(journal, writer.stream_id, 15) == []

    async def test_peek_is_what_a_read_would_give(self, make_journal: MakeJournal, clock: Clock) -> None:
        """A page without suspending is the same page, or none at all; never a stale or a shorter truth."""
        journal = await make_journal(Bounds(max_stream_records=5))
        writer = await Writer.begin(journal, meta(clock))
        for _ in range(3):
            await writer.say("a", "b", "c")
            await peeks_are_reads(journal, writer)
        await journal.trim(writer.stream_id, 8, None)
        await peeks_are_reads(journal, writer)
        await writer.finish()
        await peeks_are_reads(journal, writer)
        await journal.expire(writer.stream_id)
        try:
            assert journal.peek(writer.stream_id, 0) is None
        except UnknownStream:
            pass

    async def test_evicted_five_to_nine(self, make_journal: MakeJournal, clock: Clock) -> None:
        """Retained 5..9 after an overflow: 4 has lost something, since record 4 was not given up by an ack (R5, R7)."""
        journal = await make_journal(Bounds(max_stream_records=5))
        writer = await written(journal, meta(clock), 9)
        assert await positions(journal, writer.stream_id) == {
            9: [], 8: [9], 5: [6, 7, 8, 9], 4: EXPIRED, 3: EXPIRED, 0: EXPIRED
        }  # fmt: skip

    async def test_acked_to_four(self, journal: Journal, clock: Clock) -> None:
        """Retained 5..9 after an ack of 4: whoever acked goes on from there, nobody from below (R5, R6)."""
        writer = await written(journal, meta(clock), 9)
        await journal.trim(writer.stream_id, 4, None)
        assert await positions(journal, writer.stream_id) == {
            9: [], 8: [9], 5: [6, 7, 8, 9], 4: [5, 6, 7, 8, 9], 3: EXPIRED, 0: EXPIRED
        }  # fmt: skip

    async def test_acked_then_evicted(self, make_journal: MakeJournal, clock: Clock) -> None:
        """An ack at 2 does not make the position below the oldest good once an overflow has passed it."""
        journal = await make_journal(Bounds(max_stream_records=5))
        writer = await written(journal, meta(clock), 4)
        await journal.trim(writer.stream_id, 2, None)
        assert await resumed(journal, writer.stream_id, 2) == [3, 4]
        await writer.say_one_by_one(5)
        assert await positions(journal, writer.stream_id) == {
            9: [], 8: [9], 5: [6, 7, 8, 9], 4: EXPIRED, 3: EXPIRED, 0: EXPIRED
        }  # fmt: skip

    async def test_expired_cursor_names_the_oldest(self, make_journal: MakeJournal, clock: Clock) -> None:
        """A position that is gone is an error with what is available, checked at every read, not only at connect."""
        journal = await make_journal(Bounds(max_stream_records=5))
        writer = await written(journal, meta(clock), 5)
        assert len((await journal.read(writer.stream_id, 0)).frames) == 5
        await writer.say_one_by_one(5)
        page = await journal.read(writer.stream_id, 2)
        assert (page.frames, page.oldest_retained_seq, page.highest_seq) == ([], 6, 10)
        assert rules.overtaken(2, page.oldest_retained_seq)
        with pytest.raises(CursorExpired) as expired:
            await resumed(journal, writer.stream_id, 2)
        assert expired.value.oldest_available == 6

    async def test_live_reader_just_below_the_oldest_has_lost_nothing(
        self, make_journal: MakeJournal, clock: Clock
    ) -> None:
        """Overtaken is who misses a record, one earlier than who may newly resume (R8)."""
        journal = await make_journal(Bounds(max_stream_records=5))
        writer = await written(journal, meta(clock), 9)
        assert seqs((await journal.read(writer.stream_id, 4)).frames) == [5, 6, 7, 8, 9]
        assert (await journal.read(writer.stream_id, 3)).frames == []

    async def test_unknown_stream_is_told_by_every_verb(self, journal: Journal) -> None:
        """Never an empty page for a stream that does not exist (I4)."""
        await all_verbs_refuse(journal, "never-was")

    async def test_snapshot_is_of_one_instant(self, journal: Journal, clock: Clock) -> None:
        """Fold and retained records meet without gap or overlap, whatever is appended and acked meanwhile (R9)."""
        writer = await Writer.begin(journal, meta(clock))
        task = asyncio.create_task(tell_and_ack(writer, 60))
        while not task.done():
            snapshot = await journal.snapshot(writer.stream_id)
            state = snapshot.state
            assert snapshot.fold.upto == state.oldest_retained_seq - 1
            assert seqs(snapshot.frames) == list(range(state.oldest_retained_seq, state.highest_seq + 1))
            assert snapshot.fold.complete
            assert text_of(snapshot) == "".join(f"<{seq}>" for seq in range(2, state.highest_seq + 1))
            await asyncio.sleep(0)
        await task

    async def test_snapshot_is_the_callers_own(self, journal: Journal, clock: Clock) -> None:
        """What a caller does with a snapshot changes nothing that is kept."""
        writer = await written(journal, meta(clock), 6)
        await journal.trim(writer.stream_id, 4, None)
        for _ in range(2):
            snapshot = await journal.snapshot(writer.stream_id)
            assert text_of(snapshot) == "word " * 5
            snapshot.frames.clear()
        assert len(await read_all(journal, writer.stream_id, 4)) == 2


async def positions(journal: Journal, stream_id: str) -> dict[int, list[int] | str]:
    """What each position is answered: the seqs after it, or the code of the refusal, which names 5 as the oldest."""
    answers: dict[int, list[int] | str] = {}
    for position in (9, 8, 5, 4, 3, 0):
        try:
            answers[position] = await resumed(journal, stream_id, position)
        except CursorExpired as expired:
            answers[position] = expired.code if expired.oldest_available == 5 else f"wrong: {expired.facts}"
    return answers


async def peeks_are_reads(journal: Journal, writer: Writer) -> None:
    """At every position what is at hand is what a read gives."""
    for position in range(writer.next_seq + 1):
        peeked, page = journal.peek(writer.stream_id, position), await journal.read(writer.stream_id, position)
        if peeked is not None:
            assert peeked.frames == page.frames
            assert (peeked.last_seq, peeked.highest_seq) == (page.last_seq, page.highest_seq)
            assert (peeked.oldest_retained_seq, peeked.status) == (page.oldest_retained_seq, page.status)


async def all_verbs_refuse(journal: Journal, stream_id: str) -> None:
    """Every verb that needs the stream raises UnknownStream."""
    verbs: list[Callable[[], Awaitable[Any]]] = [
        lambda: journal.read(stream_id, 0),
        lambda: journal.state(stream_id),
        lambda: journal.snapshot(stream_id),
        lambda: journal.append(stream_id, tokens(1, ["x"]), epoch=1, first_seq=1),
        lambda: journal.trim(stream_id, 0, None),
        lambda: journal.claim(stream_id),
        lambda: journal.request_cancel(stream_id, "client"),
        lambda: journal.touch(stream_id),
    ]
    for verb in verbs:
        with pytest.raises(UnknownStream):
            await verb()


async def tell_and_ack(writer: Writer, count: int) -> None:
    """Write records that say their own number, and ack behind."""
    for _ in range(count):
        await writer.say(f"<{writer.next_seq}>")
        await asyncio.sleep(0)
        await writer.journal.trim(writer.stream_id, max(0, writer.next_seq - 4), None)
