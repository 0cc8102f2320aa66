"""The journal contract, part 1: what is appended, by whom, and what is refused (R1 to R4)."""

from __future__ import annotations

import asyncio
import json

import pytest

from midstream.codec import native
from midstream.errors import OutOfSequence, ProducerFailed, StaleWriter, StreamEnded, UnknownStream, WriterError
from midstream.follow import Follow
from midstream.journal.base import Journal
from midstream.records import Chunk, Finish, Frame, Record
from midstream.testing.journal_writer import Clock, Writer, meta, read_all, seqs, tokens, written
from midstream.testing.patience import soon
from midstream.wire import SLICE_FRAMES

AWKWARD = ["\r\n\r\nid: 9\r\n\r\n", "\x00\x1f\x7f", "\u2028\u2029\ufeff", "𝄞🧵", '"\\', "", " ", "e\u0301"]


class AppendingLaws:
    """One writer, one order, one end."""

    async def test_first_entry_has_seq_one(self, journal: Journal, clock: Clock) -> None:
        """A new stream holds its `start` record as seq 1, under epoch 1, and nothing has been dropped."""
        writer = await Writer.begin(journal, meta(clock))
        assert await read_all(journal, writer.stream_id) == writer.frames
        state = await journal.state(writer.stream_id)
        assert (state.status, state.epoch, state.highest_seq) == ("open", 1, 1)
        assert (state.oldest_retained_seq, state.acked_seq, state.trimmed_seq) == (1, 0, 0)

    async def test_seqs_are_contiguous(self, journal: Journal, clock: Clock) -> None:
        """Whatever the size of its batches, a stream is 1, 2, 3, … with no gap (R1)."""
        writer = await Writer.begin(journal, meta(clock))
        for size in (1, 2, 7, SLICE_FRAMES, 1):
            await writer.say(*["x"] * size)
        await writer.finish()
        assert await read_all(journal, writer.stream_id) == writer.frames
        assert seqs(writer.frames) == list(range(1, len(writer.frames) + 1))

    async def test_bytes_come_back_as_they_were_appended(self, journal: Journal, clock: Clock) -> None:
        """A store changes no byte of a frame: every reader sends the same ones."""
        writer = await Writer.begin(journal, meta(clock, request=json.dumps(AWKWARD).encode()))
        await writer.say(*AWKWARD, "long" * 100_000)
        await writer.append([native.token(writer.next_seq, Chunk(text, {"reasoning": text})) for text in ("ü",)])
        assert await read_all(journal, writer.stream_id) == writer.frames
        assert (await journal.state(writer.stream_id)).meta.request == json.dumps(AWKWARD).encode()

    async def test_two_writers_never_share_a_seq(self, journal: Journal, clock: Clock) -> None:
        """Of several batches that begin at one number exactly one is written; the others hear the expected one."""
        writer = await Writer.begin(journal, meta(clock))
        batches = [tokens(2, [f"{name}1", f"{name}2"]) for name in "abcdefgh"]
        outcomes = await asyncio.gather(
            *(journal.append(writer.stream_id, batch, epoch=1, first_seq=2) for batch in batches),
            return_exceptions=True,
        )
        refusals = [outcome for outcome in outcomes if outcome is not None]
        assert len(refusals) == len(batches) - 1
        assert all(isinstance(refusal, OutOfSequence) and refusal.expected == 4 for refusal in refusals)
        assert await read_all(journal, writer.stream_id, 1) == batches[outcomes.index(None)]

    async def test_live_order_is_replay_order(self, journal: Journal, clock: Clock) -> None:
        """While two writers push batches in turn, what a live reader is given is what a replay gives (I2, I3)."""
        writer = await Writer.begin(journal, meta(clock))
        live: list[Frame] = []

        async def follow() -> None:
            async for page in Follow(journal, writer.stream_id, 0):
                live.extend(page.frames)

        reader = asyncio.create_task(follow())
        await asyncio.gather(*(push(journal, writer.stream_id, name, 60) for name in "ab"))
        highest = (await journal.state(writer.stream_id)).highest_seq
        await journal.append(writer.stream_id, [native.done(highest + 1, Finish())], epoch=1, first_seq=highest + 1)
        await soon(reader)
        assert live == await read_all(journal, writer.stream_id)
        assert seqs(live) == list(range(1, 1 + 120 * 2 + 2))
        said = [Record.of(frame).json()["delta"] for frame in live[1:-1]]
        for name in "ab":
            assert [text for text in said if text[0] == name] == [f"{name}{n}" for n in range(120)]

    async def test_repeat_of_last_append_is_acknowledged_once(self, journal: Journal, clock: Clock) -> None:
        """A writer whose reply was lost sends the batch again, unchanged: accepted, and not written twice (R3)."""
        writer = await Writer.begin(journal, meta(clock))
        await journal.append(writer.stream_id, writer.frames, epoch=1, first_seq=1)
        for texts in (["one"], ["two", "three"]):
            await writer.say(*texts)
            for _ in range(2):
                batch = tokens(writer.next_seq - len(texts), texts)
                await journal.append(writer.stream_id, batch, epoch=1, first_seq=writer.next_seq - len(texts))
        await writer.say("four")
        assert await read_all(journal, writer.stream_id) == writer.frames

    async def test_one_batch_sent_twice_at_once_is_written_once(self, journal: Journal, clock: Clock) -> None:
        """The repeat may overtake the reply of the first try."""
        writer = await Writer.begin(journal, meta(clock))
        batch = tokens(2, ["one", "two"])
        await asyncio.gather(*(journal.append(writer.stream_id, list(batch), epoch=1, first_seq=2) for _ in range(3)))
        assert await read_all(journal, writer.stream_id, 1) == batch

    async def test_abandoned_append_is_written_once_or_not_at_all(self, journal: Journal, clock: Clock) -> None:
        """A writer that stopped waiting does not know what became of its batch: it repeats it, and it stands once."""
        writer = await Writer.begin(journal, meta(clock))
        for turns in range(6):
            batch = tokens(writer.next_seq, [f"a{turns}", f"b{turns}"])
            verb = journal.append(writer.stream_id, batch, epoch=1, first_seq=writer.next_seq)
            appending = asyncio.create_task(verb)
            for _ in range(turns):
                await asyncio.sleep(0)
            appending.cancel()
            await asyncio.wait([appending])
            await writer.append(list(batch))
        assert await read_all(journal, writer.stream_id) == writer.frames

    async def test_repeat_with_other_content_is_refused(self, journal: Journal, clock: Clock) -> None:
        """Same numbers, other records, or only some of them: that is no repeat, and nothing is written (R3)."""
        writer = await Writer.begin(journal, meta(clock))
        await writer.say("one", "two")
        for first_seq, texts in [(2, ["one", "TWO"]), (2, ["one"]), (3, ["two"]), (2, ["one", "two", "three"])]:
            await refused(writer, tokens(first_seq, texts), first_seq, expected=4)

    async def test_repeat_of_an_older_append_is_refused(self, journal: Journal, clock: Clock) -> None:
        """Only the last batch may come again: an older one means that the writer has lost count."""
        writer = await Writer.begin(journal, meta(clock))
        await writer.say("one")
        await writer.say("two")
        await refused(writer, tokens(2, ["one"]), 2, expected=4)
        await refused(writer, writer.frames[:1], 1, expected=4)

    async def test_gap_is_refused_and_names_the_expected_seq(self, journal: Journal, clock: Clock) -> None:
        """A batch beyond the next number is refused whole (R3)."""
        writer = await Writer.begin(journal, meta(clock))
        await writer.say("one")
        for first_seq in (4, 5, 1000):
            await refused(writer, tokens(first_seq, ["two"]), first_seq, expected=3)
        await writer.say("two")

    async def test_append_after_close_is_refused(self, journal: Journal, clock: Clock) -> None:
        """Nothing follows a terminal record (R4), whichever of the three it is."""
        lost = ProducerFailed("upstream_timeout", "no answer", retryable=True)
        for ending in (native.done(3, Finish("stop")), native.failed(3, lost), native.cancelled(3, "client")):
            writer = await written(journal, meta(clock), 2)
            await writer.append([ending])
            with pytest.raises(StreamEnded):
                await writer.say("more")
            with pytest.raises(StreamEnded):
                await journal.append(writer.stream_id, tokens(9, ["gap"]), epoch=1, first_seq=9)
            assert await read_all(journal, writer.stream_id) == writer.frames
            assert (await journal.state(writer.stream_id)).status == Record.of(ending).event

    async def test_close_is_idempotent_and_keeps_the_first_outcome(self, journal: Journal, clock: Clock) -> None:
        """The terminal record may be repeated like any last batch; another one is refused and changes nothing (I7)."""
        writer = await written(journal, meta(clock), 3)
        await writer.finish(Finish("length"))
        await journal.append(writer.stream_id, writer.frames[-1:], epoch=1, first_seq=4)
        for other in (native.done(4, Finish("stop")), native.cancelled(4, "client")):
            with pytest.raises(WriterError):
                await journal.append(writer.stream_id, [other], epoch=1, first_seq=4)
        state = await journal.request_cancel(writer.stream_id, "client")
        assert (state.status, state.highest_seq, state.epoch) == ("done", 4, 1)
        assert await read_all(journal, writer.stream_id) == writer.frames

    async def test_tokens_and_the_end_may_share_a_batch(self, journal: Journal, clock: Clock) -> None:
        """The last tokens and the terminal record often come together."""
        writer = await written(journal, meta(clock), 2)
        await writer.append([*tokens(3, ["a", "b"]), native.done(5, Finish("stop"))])
        state = await journal.state(writer.stream_id)
        assert (state.status, state.highest_seq) == ("done", 5)
        assert state.ended_at == pytest.approx(clock(), abs=1)

    async def test_claim_refuses_the_old_epoch(self, journal: Journal, clock: Clock) -> None:
        """After a claim the writer before is refused, a repeat too, and the new one goes on at the next number (R2)."""
        old = await written(journal, meta(clock), 3)
        state = await journal.claim(old.stream_id)
        assert (state.epoch, state.highest_seq, state.status) == (2, 3, "open")
        for first_seq, batch in [(4, tokens(4, ["more"])), (3, old.frames[-1:])]:
            with pytest.raises(StaleWriter) as stale:
                await journal.append(old.stream_id, batch, epoch=1, first_seq=first_seq)
            assert stale.value.epoch == 2
        new = Writer(journal, old.stream_id, old.frames, state.epoch)
        await new.say("on")
        assert await read_all(journal, old.stream_id) == new.frames

    async def test_epoch_from_the_future_is_refused(self, journal: Journal, clock: Clock) -> None:
        """Only a claim gives out an epoch."""
        writer = await written(journal, meta(clock), 2)
        with pytest.raises(StaleWriter):
            await journal.append(writer.stream_id, tokens(3, ["x"]), epoch=2, first_seq=3)

    async def test_racing_claims_get_epochs_of_their_own(self, journal: Journal, clock: Clock) -> None:
        """Of several that claim at once each gets another epoch, and only the highest may write."""
        writer = await written(journal, meta(clock), 2)
        states = await asyncio.gather(*(journal.claim(writer.stream_id) for _ in range(5)))
        assert sorted(state.epoch for state in states) == [2, 3, 4, 5, 6]
        for epoch in range(1, 6):
            with pytest.raises(StaleWriter):
                await journal.append(writer.stream_id, tokens(3, ["x"]), epoch=epoch, first_seq=3)
        await journal.append(writer.stream_id, tokens(3, ["x"]), epoch=6, first_seq=3)

    async def test_an_ended_stream_cannot_be_claimed(self, journal: Journal, clock: Clock) -> None:
        """There is nothing left to write."""
        writer = await written(journal, meta(clock), 2)
        await writer.finish()
        with pytest.raises(StreamEnded):
            await journal.claim(writer.stream_id)
        assert (await journal.state(writer.stream_id)).epoch == 1

    async def test_cancel_is_one_step_and_idempotent(self, journal: Journal, clock: Clock) -> None:
        """A cancel ends the stream with one `cancelled` record and refuses its writer; a second one is a no-op."""
        writer = await written(journal, meta(clock), 2)
        first = await journal.request_cancel(writer.stream_id, "abandoned")
        again = await journal.request_cancel(writer.stream_id, "client")
        assert first == again
        assert (first.status, first.highest_seq, first.epoch) == ("cancelled", 3, 2)
        with pytest.raises(StaleWriter):
            await writer.say("more")
        frames = await read_all(journal, writer.stream_id)
        assert frames == [*writer.frames, native.cancelled(3, "abandoned")]

    async def test_cancel_racing_with_the_end_leaves_one_end(self, journal: Journal, clock: Clock) -> None:
        """Whoever comes first, there is exactly one terminal record, and everybody is told of that one (I7)."""
        for turn in range(6):
            writer = await written(journal, meta(clock), 2)
            cancels = [journal.request_cancel(writer.stream_id, "client") for _ in range(3)]
            verbs = [*cancels[: turn % 4], writer.finish(), *cancels[turn % 4 :]]
            outcomes = await asyncio.gather(*verbs, return_exceptions=True)
            states = [outcome for outcome in outcomes if outcome is not None and not isinstance(outcome, WriterError)]
            assert len(states) == 3
            assert all(state == states[0] for state in states)
            events = [Record.of(frame).event for frame in await read_all(journal, writer.stream_id)]
            assert events in (["start", "token", "done"], ["start", "token", "cancelled"])
            assert events[-1] == (await journal.state(writer.stream_id)).status

    async def test_recreated_stream_rejects_the_old_writer(self, journal: Journal, clock: Clock) -> None:
        """A name can lead to a new stream once the old one is forgotten; the old writer never reaches that one."""
        old = await Writer.begin(journal, meta(clock), ["ada/session/S"])
        await old.say("old")
        await journal.expire(old.stream_id)
        new = await Writer.begin(journal, meta(clock), ["ada/session/S"])
        with pytest.raises(UnknownStream):
            await old.say("late")
        assert await read_all(journal, new.stream_id) == new.frames


async def push(journal: Journal, stream_id: str, name: str, batches: int) -> None:
    """Append batches of two, each where the store says that the next number is."""
    expected = 2
    for number in range(batches):
        while True:
            await asyncio.sleep(0)
            batch = tokens(expected, [f"{name}{2 * number}", f"{name}{2 * number + 1}"])
            try:
                await journal.append(stream_id, batch, epoch=1, first_seq=expected)
                expected += len(batch)
                break
            except OutOfSequence as refusal:
                expected = refusal.expected


async def refused(writer: Writer, batch: list[Frame], first_seq: int, expected: int) -> None:
    """The batch is out of sequence, and the stream is as if it had never been sent."""
    before = await writer.journal.state(writer.stream_id)
    with pytest.raises(OutOfSequence) as refusal:
        await writer.journal.append(writer.stream_id, batch, epoch=writer.epoch, first_seq=first_seq)
    assert refusal.value.expected == expected
    assert await writer.journal.state(writer.stream_id) == before
    assert await read_all(writer.journal, writer.stream_id) == writer.frames
