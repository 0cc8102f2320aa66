"""The journal contract, part 6: grace periods, space for all streams, forgetting, and what survives (R10, I1, I5)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from midstream.codec import native
from midstream.errors import OutOfSpace, StaleWriter, StreamEnded, UnknownStream
from midstream.follow import Follow
from midstream.journal.base import Journal, Snapshot
from midstream.records import Finish, Frame, Record, StreamState
from midstream.rules import Bounds
from midstream.testing.journal_reading import all_verbs_refuse
from midstream.testing.journal_writer import (
    Clock,
    MakeJournal,
    Reopen,
    Writer,
    meta,
    read_all,
    text_of,
    tokens,
    written,
)
from midstream.testing.patience import soon
from midstream.wire import RETAIN_CAP

KIB = 1024
HOUR = 3600.0


class LivingLaws:
    """An open stream never expires; a finished one is forgotten whole, when its grace period is over."""

    async def test_ttl_expiry_looks_like_unknown_stream(self, journal: Journal, clock: Clock) -> None:
        """Kept for the grace period after its end, then as if it had never been (R10)."""
        writer = await finished(journal, clock, retain=600.0)
        clock.advance(590)
        assert await journal.sweep() == []
        assert await read_all(journal, writer.stream_id) == writer.frames
        clock.advance(11)
        assert await journal.sweep() == [writer.stream_id]
        assert await journal.sweep() == []
        await all_verbs_refuse(journal, writer.stream_id)

    async def test_grace_period_runs_from_the_end(self, journal: Journal, clock: Clock) -> None:
        """However long the answer took, and whichever way it ended."""
        writer, cancelled = await written(journal, meta(clock), 2), await written(journal, meta(clock), 2)
        clock.advance(2000)
        await writer.finish()
        await journal.request_cancel(cancelled.stream_id, "client")
        clock.advance(590)
        assert await journal.sweep() == []
        clock.advance(11)
        assert set(await journal.sweep()) == {writer.stream_id, cancelled.stream_id}

    async def test_open_stream_never_expires(self, journal: Journal, clock: Clock) -> None:
        """Silent for two days, with no reader: its writer may still speak."""
        writer = await written(journal, meta(clock, retain=1.0), 2)
        for _ in range(4):
            clock.advance(12 * HOUR)
            assert await journal.sweep() == []
        await writer.say("at last")
        assert await read_all(journal, writer.stream_id) == writer.frames

    async def test_access_pushes_the_grace_period_on(self, journal: Journal, clock: Clock) -> None:
        """Each access counts, but for the last minute's: being noted once a minute is enough (R10)."""
        writer = await finished(journal, clock, retain=600.0)
        for _ in range(5):
            clock.advance(550)
            await journal.touch(writer.stream_id)
            assert await journal.sweep() == []
        assert (await journal.state(writer.stream_id)).last_access == pytest.approx(clock(), abs=1)
        clock.advance(59)
        await journal.touch(writer.stream_id)
        clock.advance(530)
        assert await journal.sweep() == []
        clock.advance(80)
        assert await journal.sweep() == [writer.stream_id]

    async def test_short_grace_period_is_pushed_on_too(self, journal: Journal, clock: Clock) -> None:
        """A grace period of seconds is no use if only one access a minute counts."""
        writer = await finished(journal, clock, retain=10.0)
        for _ in range(10):
            clock.advance(5)
            await journal.touch(writer.stream_id)
            assert await journal.sweep() == []
        clock.advance(11)
        assert await journal.sweep() == [writer.stream_id]

    async def test_grace_period_has_an_absolute_cap(self, journal: Journal, clock: Clock) -> None:
        """A day after its end a stream goes, whatever its readers do (R10)."""
        writer = await finished(journal, clock, retain=2 * HOUR)
        for _ in range(int(RETAIN_CAP / HOUR) - 1):
            clock.advance(HOUR)
            await journal.touch(writer.stream_id)
            assert await journal.sweep() == []
        clock.advance(HOUR + 1)
        assert await journal.sweep() == [writer.stream_id]

    async def test_everything_of_a_stream_is_gone_after_expire(self, journal: Journal, clock: Clock) -> None:
        """Records, names, fold, listing, bytes, waits; and forgetting it again is no error."""
        empty = journal.retained_bytes()
        writer = await Writer.begin(journal, meta(clock), ["ada/idem/K"])
        await writer.say_one_by_one(5)
        await journal.trim(writer.stream_id, 3, None)
        assert journal.retained_bytes() > empty
        for _ in range(2):
            await journal.expire(writer.stream_id)
            await all_verbs_refuse(journal, writer.stream_id)
            assert await journal.find("ada/idem/K") is None
            assert list(await journal.list("ada")) == []
            assert journal.retained_bytes() == empty
            await soon(journal.wait(writer.stream_id, 6))
        assert await journal.sweep() == []

    async def test_total_of_bytes_lets_finished_streams_go_first(self, make_journal: MakeJournal, clock: Clock) -> None:
        """Three fit, four run, one finishes: it goes, with all its parts; running ones never do (I5)."""
        journal = await make_journal(Bounds(max_bytes=40 * KIB))
        running = [await heavy(journal, clock, f"name/{number}") for number in range(4)]
        await refused_for_space(journal, clock)
        assert await journal.sweep() == []
        await running[1].finish()
        assert await journal.sweep() == [running[1].stream_id]
        await all_verbs_refuse(journal, running[1].stream_id)
        assert await journal.find("name/1") is None
        for number in (0, 2, 3):
            assert await read_all(journal, running[number].stream_id) == running[number].frames
            assert await journal.find(f"name/{number}") == running[number].stream_id

    async def test_new_stream_takes_the_space_of_finished_ones(self, make_journal: MakeJournal, clock: Clock) -> None:
        """Least recently used first, and hardly more than needed; the sweep need not have come by."""
        journal = await make_journal(Bounds(max_bytes=40 * KIB))
        writers = []
        for _ in range(4):
            writers.append(await heavy(journal, clock))
            await writers[-1].finish()
            clock.advance(90)
        await journal.touch(writers[0].stream_id)
        new = await Writer.begin(journal, meta(clock))
        kept = {state.meta.stream_id for state in await journal.list("ada")}
        assert kept == {writers[0].stream_id, writers[2].stream_id, writers[3].stream_id, new.stream_id}
        assert journal.retained_bytes() <= 40 * KIB

    async def test_no_space_beside_running_streams_is_said(self, make_journal: MakeJournal, clock: Clock) -> None:
        """A new stream is refused with a time to retry, and accepted once one has ended."""
        journal = await make_journal(Bounds(max_bytes=25 * KIB))
        running = [await heavy(journal, clock) for _ in range(3)]
        await refused_for_space(journal, clock)
        await running[0].say("goes on")
        await running[2].finish()
        await Writer.begin(journal, meta(clock))
        for writer in running[:2]:
            assert await read_all(journal, writer.stream_id) == writer.frames

    async def test_folds_count_in_the_total(self, make_journal: MakeJournal, clock: Clock) -> None:
        """An acked answer still takes its text's bytes."""
        journal = await make_journal(Bounds(max_bytes=35 * KIB))
        for _ in range(4):
            writer = await heavy(journal, clock)
            await journal.trim(writer.stream_id, writer.next_seq - 1, None)
        await refused_for_space(journal, clock)

    async def test_round_trips_are_counted_where_there_is_a_store(self, journal: Journal, clock: Clock) -> None:
        """Some for what is kept, with the time they took; none where records are in this process alone."""
        before = replace(journal.round_trips())
        await written(journal, meta(clock), 3)
        after = journal.round_trips()
        if journal.traits.durable or journal.traits.shared:
            assert after.count > before.count
            assert after.seconds > before.seconds
        else:
            assert (after.count, after.seconds) == (0, 0.0)

    async def test_survives_reopen(self, journal: Journal, reopen: Reopen, clock: Clock) -> None:
        """A durable journal comes back with every finished stream as it was; one that is not durable has nothing."""
        writer = await Writer.begin(journal, meta(clock, request=b'{"x":"\xc3\xbc"}'), ["ada/idem/K"])
        await writer.say("one ", "two ")
        await writer.say("three ", "four")
        await journal.trim(writer.stream_id, 3, None)
        await writer.finish(Finish("stop", {"total_tokens": 4}))
        await journal.trim(writer.stream_id, 4, 3)
        clock.advance(300)
        await journal.touch(writer.stream_id)
        state = await journal.state(writer.stream_id)
        assert (state.acked_seq, state.trimmed_seq) == (4, 3)
        again = await reopen(journal)
        assert again.traits == journal.traits
        if not again.traits.durable:
            return await nothing_is_left(again, writer)
        assert await again.state(writer.stream_id) == state
        assert await read_all(again, writer.stream_id, 3) == writer.frames[3:]
        assert text_of(await again.snapshot(writer.stream_id)) == "one two three four"
        assert await again.find("ada/idem/K") == writer.stream_id
        assert list(await again.list("ada")) == [state]
        assert again.retained_bytes() > 0
        clock.advance(601)
        assert await again.sweep() == [writer.stream_id]
        assert again.retained_bytes() == 0
        return None

    async def test_evicted_stream_survives_reopen(
        self, make_journal: MakeJournal, reopen: Reopen, clock: Clock
    ) -> None:
        """What was evicted stays evicted, and its answer whole."""
        journal = await make_journal(Bounds(max_stream_records=3))
        writer = await written(journal, meta(clock), 8)
        await writer.finish()
        again = await reopen(journal)
        if not again.traits.durable:
            return await nothing_is_left(again, writer)
        assert (await again.read(writer.stream_id, 0)).oldest_retained_seq == 7
        assert await read_all(again, writer.stream_id, 6) == writer.frames[6:]
        assert text_of(await again.snapshot(writer.stream_id)) == "word " * 7
        return None

    async def test_ack_survives_reopen(self, journal: Journal, reopen: Reopen, clock: Clock) -> None:
        """With what it let go of, when it was the last thing that happened."""
        writer = await finished(journal, clock, 600.0)
        state = await journal.trim(writer.stream_id, 2, 1)
        again = await reopen(journal)
        if not again.traits.durable:
            return await nothing_is_left(again, writer)
        assert await again.state(writer.stream_id) == state
        assert (state.acked_seq, state.trimmed_seq, state.oldest_retained_seq) == (2, 1, 2)
        return None

    async def test_reopened_stream_is_used_like_any_other(self, journal: Journal, reopen: Reopen, clock: Clock) -> None:
        """Acked while it is read for the first time, from several sides at once, and acked again."""
        writer = await written(journal, meta(clock), 9)
        await writer.finish()
        journal = await reopen(journal)
        if not journal.traits.durable:
            return await nothing_is_left(journal, writer)
        snapshots = await soon(
            asyncio.gather(
                journal.snapshot(writer.stream_id),
                journal.trim(writer.stream_id, 4, None),
                journal.snapshot(writer.stream_id),
                journal.trim(writer.stream_id, 6, None),
                journal.snapshot(writer.stream_id),
            )
        )
        for snapshot in snapshots[::2]:
            assert isinstance(snapshot, Snapshot)
            assert text_of(snapshot) == "word " * 8
        assert text_of(await journal.snapshot(writer.stream_id)) == "word " * 8
        assert await read_all(journal, writer.stream_id, 6) == writer.frames[6:]
        with pytest.raises(StreamEnded):
            await journal.claim(writer.stream_id)
        return None

    async def test_forgotten_stream_does_not_come_back(self, journal: Journal, reopen: Reopen, clock: Clock) -> None:
        """Deleted or expired is gone from the store too, with its names; what was not stays."""
        kept, deleted = await finished(journal, clock, 5000.0), await Writer.begin(journal, meta(clock), ["ada/idem/K"])
        expired = await finished(journal, clock, 600.0)
        clock.advance(601)
        assert await journal.sweep() == [expired.stream_id]
        await journal.expire(deleted.stream_id)
        journal = await reopen(journal)
        for writer in (deleted, expired):
            await all_verbs_refuse(journal, writer.stream_id)
        assert await journal.find("ada/idem/K") is None
        durable = [kept.stream_id] if journal.traits.durable else []
        assert [state.meta.stream_id for state in await journal.list("ada")] == durable

    async def test_open_stream_after_reopen_does_not_hang(self, journal: Journal, reopen: Reopen, clock: Clock) -> None:
        """Its records are all there.  Its writer is gone: it ends `failed`, and nobody may write it on (I2, I7)."""
        writer = await written(journal, meta(clock), 4)
        again = await reopen(journal)
        if not again.traits.durable:
            return await nothing_is_left(again, writer)
        frames = await soon(followed(again, writer.stream_id))
        assert frames[:4] == writer.frames
        assert len(frames) == 5
        end = Record.of(frames[4])
        assert (end.event, end.json()["error"]["code"]) == ("failed", "writer_lost")
        with pytest.raises(StaleWriter):
            await again.append(writer.stream_id, tokens(5, ["late"]), epoch=1, first_seq=5)
        clock.advance(601)
        assert await again.sweep() == [writer.stream_id]
        return None

    async def test_closing_keeps_what_was_appended(self, journal: Journal, reopen: Reopen, clock: Clock) -> None:
        """An append that has returned is kept: on a durable journal through any number of reopenings (I1)."""
        kept: dict[str, list[Frame]] = {}
        for turn in range(3):
            writer = await written(journal, meta(clock), 3 + turn)
            await writer.finish()
            kept[writer.stream_id] = writer.frames
            journal = await reopen(journal)
            expected = kept if journal.traits.durable else {}
            listed = await journal.list("ada")
            assert {state.meta.stream_id for state in listed} == set(expected)
            for stream_id, frames in expected.items():
                assert await read_all(journal, stream_id) == frames


async def finished(journal: Journal, clock: Clock, retain: float) -> Writer:
    """A stream of three records that has just ended."""
    writer = await written(journal, meta(clock, retain=retain), 2)
    await writer.finish()
    return writer


async def heavy(journal: Journal, clock: Clock, *names: str) -> Writer:
    """An open stream of about 10 KiB."""
    writer = await Writer.begin(journal, meta(clock), names)
    await writer.say(*["x" * KIB] * 9)
    return writer


async def refused_for_space(journal: Journal, clock: Clock) -> None:
    """A new stream is refused, and nothing of it is there."""
    told = meta(clock)
    with pytest.raises(OutOfSpace) as refusal:
        await journal.create(told, [native.start(told.stream_id, "m")], ["name/refused"])
    assert refusal.value.retry_after >= 1
    assert await journal.find("name/refused") is None
    with pytest.raises(UnknownStream):
        await journal.state(told.stream_id)


async def nothing_is_left(journal: Journal, writer: Writer) -> None:
    """What a journal that is not durable has of the one before."""
    await all_verbs_refuse(journal, writer.stream_id)
    owners: list[StreamState] = list(await journal.list("ada"))
    assert owners == []
    assert await journal.find("ada/idem/K") is None
    assert journal.retained_bytes() == 0


async def followed(journal: Journal, stream_id: str) -> list[Frame]:
    """All frames up to the terminal record."""
    frames: list[Frame] = []
    async for page in Follow(journal, stream_id, 0):
        frames += page.frames
    return frames
