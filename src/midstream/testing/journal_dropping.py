"""The journal contract, part 4: acks, eviction, and what is kept of dropped records (R6, R7, R9)."""

from __future__ import annotations

from typing import Any

import pytest

from midstream import rules
from midstream.codec import native
from midstream.errors import CursorAhead
from midstream.journal.base import Journal
from midstream.records import STREAM_OVERHEAD, Chunk, Finish, Part, Record
from midstream.rules import Bounds
from midstream.testing.journal_writer import (
    Clock,
    MakeJournal,
    Writer,
    answers,
    meta,
    read_all,
    resumed,
    seqs,
    text_of,
    written,
)

KIB = 1024


class DroppingLaws:
    """Delivery drops nothing; an ack, eviction and expiry do, and the answer stays."""

    async def test_reading_drops_nothing(self, journal: Journal, clock: Clock) -> None:
        """Only an ack lets records go, not their delivery."""
        writer = await written(journal, meta(clock), 5)
        await writer.finish()
        for _ in range(3):
            assert await read_all(journal, writer.stream_id) == writer.frames
        assert (await journal.state(writer.stream_id)).oldest_retained_seq == 1

    async def test_ack_drops_what_was_confirmed(self, journal: Journal, clock: Clock) -> None:
        """With no reader connected an ack of N leaves N + 1 the oldest, and N a good position."""
        writer = await written(journal, meta(clock), 9)
        before = (await journal.state(writer.stream_id)).retained_bytes
        state = await journal.trim(writer.stream_id, 6, None)
        assert (state.acked_seq, state.trimmed_seq, state.oldest_retained_seq) == (6, 6, 7)
        assert 0 < state.retained_bytes < before
        assert state == await journal.state(writer.stream_id)
        assert await resumed(journal, writer.stream_id, 6) == [7, 8, 9]
        state = await journal.trim(writer.stream_id, 9, None)
        assert (state.oldest_retained_seq, state.retained_bytes) == (10, 0)
        await writer.say("on")
        assert await resumed(journal, writer.stream_id, 9) == [10]

    async def test_ack_never_moves_backwards(self, journal: Journal, clock: Clock) -> None:
        """An older ack is a no-op."""
        writer = await written(journal, meta(clock), 9)
        state = await journal.trim(writer.stream_id, 6, None)
        for older in (6, 5, 1, 0):
            assert await journal.trim(writer.stream_id, older, None) == state

    async def test_ack_above_the_highest_is_refused(self, journal: Journal, clock: Clock) -> None:
        """Nobody can have dispatched what was never written; nothing is dropped for it."""
        writer = await written(journal, meta(clock), 5)
        before = await journal.state(writer.stream_id)
        with pytest.raises(CursorAhead) as ahead:
            await journal.trim(writer.stream_id, 6, None)
        assert ahead.value.highest_seq == 5
        assert await journal.state(writer.stream_id) == before

    async def test_trim_keeps_what_a_live_reader_needs(self, journal: Journal, clock: Clock) -> None:
        """An ack never trims under a slower reader; it is applied again as that reader moves on (R6)."""
        writer = await written(journal, meta(clock), 9)
        for acked, floor, oldest in [(8, 0, 1), (8, 3, 4), (8, 2, 4), (8, 6, 7), (8, 9, 9)]:
            state = await journal.trim(writer.stream_id, acked, floor)
            assert (state.acked_seq, state.oldest_retained_seq, state.trimmed_seq) == (8, oldest, oldest - 1)
            assert seqs(await read_all(journal, writer.stream_id, oldest - 1)) == list(range(oldest, 10))

    async def test_old_ack_is_applied_when_the_last_reader_leaves(self, journal: Journal, clock: Clock) -> None:
        """What is re-applied is the highest ack, whatever number the caller passes."""
        writer = await written(journal, meta(clock), 9)
        await journal.trim(writer.stream_id, 7, 2)
        state = await journal.trim(writer.stream_id, 0, None)
        assert (state.acked_seq, state.oldest_retained_seq) == (7, 8)

    async def test_ack_of_one_stream_leaves_the_others(self, journal: Journal, clock: Clock) -> None:
        """Numbers are a stream's own."""
        one, other = await written(journal, meta(clock), 5), await written(journal, meta(clock), 5)
        await journal.trim(one.stream_id, 4, None)
        assert await read_all(journal, other.stream_id) == other.frames

    async def test_terminal_record_is_never_acked_away(self, journal: Journal, clock: Clock) -> None:
        """However much is acked, who resumes below the end still gets the terminal record (R6, I7)."""
        writer = await written(journal, meta(clock), 4)
        await journal.trim(writer.stream_id, 3, None)
        await writer.finish()
        for acked in (4, 5, 5):
            state = await journal.trim(writer.stream_id, acked, None)
            assert (state.oldest_retained_seq, state.trimmed_seq) == (5, 4)
            assert await resumed(journal, writer.stream_id, 4) == [5]
            assert await resumed(journal, writer.stream_id, 5) == []

    async def test_evicted_by_count(self, make_journal: MakeJournal, clock: Clock) -> None:
        """Past its records a stream lets its oldest go, whole batches or parts of them, never the newest (R7)."""
        journal = await make_journal(Bounds(max_stream_records=10))
        writer = await Writer.begin(journal, meta(clock))
        for size in (1, 9, 4, 25, 1):
            await writer.say(*["x"] * size)
            state = await journal.state(writer.stream_id)
            assert state.oldest_retained_seq == max(1, state.highest_seq - 9)
            assert state.trimmed_seq == 0
            assert await read_all(journal, writer.stream_id, state.highest_seq - 1) == writer.frames[-1:]
        assert text_of(await journal.snapshot(writer.stream_id)) == "x" * 40

    async def test_evicted_by_bytes(self, make_journal: MakeJournal, clock: Clock) -> None:
        """A stream holds no more than its bytes, records and fold together, and keeps its newest record (R7, I5)."""
        bounds = Bounds(max_stream_bytes=64 * KIB)
        journal = await make_journal(bounds)
        writer = await Writer.begin(journal, meta(clock))
        for _ in range(60):
            await writer.say("x" * 4 * KIB)
            assert journal.retained_bytes() <= bounds.max_stream_bytes + STREAM_OVERHEAD + KIB
            assert await read_all(journal, writer.stream_id, len(writer.frames) - 1) == writer.frames[-1:]
        state = await journal.state(writer.stream_id)
        assert 2 < state.oldest_retained_seq < state.highest_seq
        assert 4 * KIB < state.retained_bytes <= bounds.max_stream_bytes

    async def test_many_small_records_are_bounded_in_memory(self, make_journal: MakeJournal, clock: Clock) -> None:
        """What a record costs beyond its bytes counts: a bound in bytes is one of memory (I5)."""
        bounds = Bounds(max_stream_bytes=64 * KIB)
        journal = await make_journal(bounds)
        writer = await Writer.begin(journal, meta(clock))
        for _ in range(20):
            await writer.say(*["x"] * 100)
        state = await journal.state(writer.stream_id)
        size = sum(map(len, writer.frames[-state.retained_records :]))
        assert size + 40 * state.retained_records <= bounds.max_stream_bytes
        assert text_of(await journal.snapshot(writer.stream_id)) == "x" * 2000

    async def test_record_over_the_bound_is_kept_alone(self, make_journal: MakeJournal, clock: Clock) -> None:
        """The newest record always stays: a reader that keeps up loses nothing."""
        journal = await make_journal(Bounds(max_stream_bytes=8 * KIB))
        writer = await written(journal, meta(clock), 3)
        for _ in range(2):
            await writer.say("x" * 20 * KIB)
            assert (await journal.state(writer.stream_id)).retained_records == 1
            assert await read_all(journal, writer.stream_id, len(writer.frames) - 1) == writer.frames[-1:]

    async def test_terminal_record_survives_eviction(self, make_journal: MakeJournal, clock: Clock) -> None:
        """The end is the newest record, and stays."""
        journal = await make_journal(Bounds(max_stream_records=2))
        writer = await written(journal, meta(clock), 6)
        await writer.finish()
        page = await journal.read(writer.stream_id, 6)
        assert page.ends
        assert Record.of(page.frames[0]).event == "done"

    async def test_fold_keeps_the_answer_after_an_ack(self, journal: Journal, clock: Clock) -> None:
        """Dropped from readers is not lost: fold and records together are the answer, at every cut (R9)."""
        for cut in range(1, 13):
            writer = await tell_everything(journal, clock)
            await journal.trim(writer.stream_id, cut, None)
            await everything_is_kept(journal, writer)

    async def test_fold_keeps_the_answer_after_eviction(self, make_journal: MakeJournal, clock: Clock) -> None:
        """The same when the records went for space."""
        for records in range(1, 13):
            journal = await make_journal(Bounds(max_stream_records=records))
            await everything_is_kept(journal, await tell_everything(journal, clock))

    async def test_fold_counts_the_deltas_of_each_part(self, journal: Journal, clock: Clock) -> None:
        """Numbers of later events depend on how many deltas the dropped parts had (R9)."""
        writer = await tell_everything(journal, clock)
        await journal.trim(writer.stream_id, 8, None)
        snapshot = await journal.snapshot(writer.stream_id)
        rules.fold(snapshot.fold, snapshot.frames)
        text, again = Part("text", 3, len("Hello ✓!".encode())), Part("text", 1, 1)
        assert snapshot.fold.parts == [Part("reasoning", 2, 12), text, Part("call"), Part("call"), again]
        assert [tool.deltas for tool in answers(snapshot)[0].tool_calls] == [2, 3]

    async def test_fold_keeps_how_a_stream_ended(self, make_journal: MakeJournal, clock: Clock) -> None:
        """Usage and finish reason stand in the terminal record, which is read with the fold."""
        journal = await make_journal(Bounds(max_stream_records=1))
        writer = await written(journal, meta(clock), 4)
        await writer.finish(Finish("length", {"total_tokens": 7}))
        snapshot = await journal.snapshot(writer.stream_id)
        answer = answers(snapshot)[0]
        assert (answer.text.decode(), answer.finish_reason) == ("word " * 3, "length")
        assert snapshot.fold.usage == {"total_tokens": 7}

    async def test_fold_too_big_to_keep_says_so(self, make_journal: MakeJournal, clock: Clock) -> None:
        """Where even the fold must go, the answer is declared incomplete, never given short (R9)."""
        bounds = Bounds(max_stream_bytes=32 * KIB)
        for acked in (False, True):
            journal = await make_journal(bounds)
            writer = await Writer.begin(journal, meta(clock))
            for _ in range(70):
                await writer.say("x" * KIB)
                if acked:
                    await journal.trim(writer.stream_id, writer.next_seq - 1, None)
                assert journal.retained_bytes() <= bounds.max_stream_bytes + STREAM_OVERHEAD + KIB
            snapshot = await journal.snapshot(writer.stream_id)
            assert not snapshot.fold.complete
            assert snapshot.fold.choices == {}
            assert snapshot.fold.upto == snapshot.state.oldest_retained_seq - 1

    async def test_fold_within_its_bytes_stays_complete(self, make_journal: MakeJournal, clock: Clock) -> None:
        """An answer is kept whole while the stream's bytes allow, however often it was acked."""
        journal = await make_journal(Bounds(max_stream_bytes=32 * KIB))
        writer = await Writer.begin(journal, meta(clock))
        for _ in range(15):
            await writer.say("x" * KIB)
            await journal.trim(writer.stream_id, writer.next_seq - 1, None)
        snapshot = await journal.snapshot(writer.stream_id)
        assert snapshot.fold.complete
        assert text_of(snapshot) == "x" * 15 * KIB


def call(index: int, arguments: str, call_id: str | None = None, name: str | None = None) -> dict[str, Any]:
    """A tool-call delta as upstreams send them: id and name on the first one only."""
    head = {"id": call_id, "type": "function"} if call_id else {}
    return {"index": index, **head, "function": {"arguments": arguments} | ({"name": name} if name else {})}


async def tell_everything(journal: Journal, clock: Clock) -> Writer:
    """A stream of 12 records with text, reasoning, a second choice, and two calls that both have index 0."""
    told: list[tuple[str, dict[str, Any] | None]] = [
        ("", {"reasoning": "let me "}),
        ("", {"reasoning": "think"}),
        ("Hel", None),
        ("lo ✓", None),
        ("", {"choice": 1, "refusal": "no"}),
        ("!", {"tool_calls": [call(0, '{"a"', "id-1", "first")]}),
        ("", {"tool_calls": [call(0, ":1}"), call(0, '{"b"', "id-2", "second")]}),
        ("", {"tool_calls": [call(0, ":2")]}),
        ("", {"tool_calls": [call(0, "}", "id-2")]}),
        ("", {"choice": 1, "finish_reason": "stop"}),
        ("?", None),
    ]
    writer = await Writer.begin(journal, meta(clock))
    for delta, more in told:
        await writer.append([native.token(writer.next_seq, Chunk(delta, more))])
    return writer


async def everything_is_kept(journal: Journal, writer: Writer) -> None:
    """The answer of `tell_everything` comes out of the snapshot."""
    snapshot = await journal.snapshot(writer.stream_id)
    assert snapshot.fold.complete
    answer, other = answers(snapshot)[0], answers(snapshot)[1]
    assert answer.text.decode() == "Hello ✓!?"
    assert answer.reasoning == b"let me think"
    assert other.refusal == b"no"
    assert other.finish_reason == "stop"
    calls = [(tool.id, tool.name, tool.arguments.decode()) for tool in answer.tool_calls]
    assert calls == [("id-1", "first", '{"a":1}'), ("id-2", "second", '{"b":2}')]
