"""A writer ends its stream whatever its producer or the store does, and never one that is another's (I2, I7)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from midstream import errors, wire
from midstream.codec import native
from midstream.errors import MidstreamError, ProducerFailed
from midstream.journal.memory import MemoryJournal
from midstream.records import Chunk, Finish, Frame, Producer, Record
from midstream.testing.clock import ManualClock
from midstream.testing.journal_writer import meta, read_all
from midstream.testing.patience import soon
from midstream.writer import Writer


class Store(MemoryJournal):
    """A journal that answers the next appends with these errors."""

    def __init__(self, clock: Callable[[], float], *refusals: MidstreamError) -> None:
        super().__init__(clock)
        self._refusals = list(refusals)

    async def append(self, stream_id: str, frames: list[Frame], *, epoch: int, first_seq: int) -> None:
        if self._refusals:
            raise self._refusals.pop(0)
        await super().append(stream_id, frames, epoch=epoch, first_seq=first_seq)


async def run(store: Store, producer: Producer) -> tuple[Writer, list[Record]]:
    """A stream written to its end by this producer: its writer, and what is kept."""
    clock = ManualClock()
    told = meta(clock)
    created = await store.create(told, [native.start(told.stream_id, told.model)])
    writer = Writer(store, clock, told, created.state.epoch, 2, producer)
    ended = asyncio.Event()
    writer.start(lambda _: ended.set())
    await soon(ended.wait())
    return writer, [Record.of(frame) for frame in await read_all(store, told.stream_id)]


async def says(*lines: Any) -> Producer:
    """A producer that yields these, or raises them."""
    for line in lines:
        if isinstance(line, Exception):
            raise line
        yield line


@pytest.mark.parametrize(
    "fault",
    [
        RuntimeError("a secret of the user's"),
        errors.UnknownModel("no such model"),
        errors.UnknownStream("of another stream than this one"),
        errors.StreamEnded("another stream"),
        errors.StoreUnavailable("another store"),
    ],
    ids=lambda fault: type(fault).__name__,
)
async def test_whatever_a_producer_raises_ends_its_stream(fault: Exception) -> None:
    """What came before stays; of the fault only its class is told, since its text is for the log (I7)."""
    writer, records = await run(Store(ManualClock()), says([Chunk("a")], fault))
    assert [record.event for record in records] == ["start", "token", "failed"]
    assert records[-1].json()["error"] == {
        "code": "producer_error",
        "message": f"{type(fault).__name__} in the producer",
        "retryable": False,
    }
    assert writer.outcome == "failed"


async def test_a_failure_is_told_word_for_word() -> None:
    """Code, message and facts are the producer's; whether to try again is the table's unless it says more."""
    failures = [
        ProducerFailed("upstream_timeout", "no answer"),
        ProducerFailed("upstream_malformed", "no JSON"),
        ProducerFailed("upstream_error", "busy", retryable=True, status=503),
    ]
    for failure in failures:
        _, records = await run(Store(ManualClock()), says(failure))
        error = records[-1].json()["error"]
        assert (error["code"], error["message"]) == (failure.failure, failure.detail)
        assert error["retryable"] is (failure.failure != "upstream_malformed")
        assert error.get("status") == failure.facts.get("status")


async def test_a_producer_that_just_stops_was_cut_off() -> None:
    """Only a Finish says that the answer is whole."""
    _, records = await run(Store(ManualClock()), says([Chunk("a")]))
    assert records[-1].json()["error"]["code"] == "upstream_truncated"


async def test_a_store_that_is_away_for_a_moment_is_asked_again() -> None:
    """The batch it did not confirm is repeated, and nothing is lost or told twice; the end is no less owed (R3)."""
    away = errors.StoreUnavailable("the disk is full")
    writer, records = await run(Store(ManualClock(), away), says([Chunk("a")], [Chunk("b")], Finish("stop")))
    assert [record.event for record in records] == ["start", "token", "token", "done"]
    assert (writer.outcome, writer.appended) == ("done", 3)
    writer, records = await run(Store(ManualClock(), away, away), says(Finish("stop")))
    assert [record.event for record in records] == ["start", "done"]


async def test_a_store_that_has_lost_records_fails_the_stream_by_a_code_of_the_protocol() -> None:
    """What could not be kept was never shown; the record says why."""
    lost = errors.StoreLost("a hole")
    writer, records = await run(Store(ManualClock(), lost), says([Chunk("a")], [Chunk("b")], Finish("stop")))
    assert [record.event for record in records] == ["start", "failed"]
    assert records[-1].json()["error"] == {"code": "store_lost", "message": "a hole", "retryable": True}
    assert (writer.outcome, writer.appended) == ("failed", 1)


async def test_a_store_that_has_lost_confirmed_records_is_ended_where_it_says() -> None:
    """The writer stands at 3, the store at 1: the end is its record 2, and says what happened."""

    class Forgetful(Store):
        confirmed = 0

        async def append(self, stream_id: str, frames: list[Frame], *, epoch: int, first_seq: int) -> None:
            self.confirmed += 1
            if self.confirmed == 2:
                raise errors.StoreLost("record 2 is missing", expected=2)
            if self.confirmed > 2:
                await super().append(stream_id, frames, epoch=epoch, first_seq=first_seq)

    _, records = await run(Forgetful(ManualClock()), says([Chunk("a")], [Chunk("b")]))
    assert [(record.seq, record.event) for record in records] == [(1, "start"), (2, "failed")]
    assert records[-1].json()["error"]["code"] == "store_lost"


@pytest.mark.parametrize("answer", [errors.StaleWriter(2), errors.StreamEnded(), errors.UnknownStream()])
async def test_a_writer_whose_stream_is_anothers_writes_no_end(answer: MidstreamError) -> None:
    """Its new owner says how it ended (I2); the producer is let go of."""
    closed = asyncio.Event()

    async def producer() -> Producer:
        try:
            yield [Chunk("a")]
        finally:
            closed.set()

    writer, records = await run(Store(ManualClock(), answer), producer())
    assert [record.event for record in records] == ["start"]
    assert writer.outcome is None
    assert closed.is_set()


async def test_a_store_that_will_not_take_the_end_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody is told an end that is not kept (I1)."""
    lost = errors.StoreLost("a hole")
    writer, records = await run(Store(ManualClock(), lost, lost), says([Chunk("a")]))
    assert [record.event for record in records] == ["start"]
    assert writer.outcome is None
    assert f"stream {writer.meta.stream_id} could not be ended: a hole" in caplog.text


async def test_large_batches_are_kept_in_slices() -> None:
    """However much a producer yields at once, a store is given so many records and bytes at most (PROTOCOL.md, 13)."""
    slices: list[tuple[int, int]] = []

    class Watched(Store):
        async def append(self, stream_id: str, frames: list[Frame], *, epoch: int, first_seq: int) -> None:
            slices.append((len(frames), sum(map(len, frames))))
            await super().append(stream_id, frames, epoch=epoch, first_seq=first_seq)

    many, long = [Chunk("x")] * (wire.SLICE_FRAMES + 1), [Chunk("y" * 100_000)] * 5
    _, records = await run(Watched(ManualClock()), says(many, long, Finish("stop")))
    assert [record.seq for record in records] == list(range(1, wire.SLICE_FRAMES + 9))
    assert [count for count, _ in slices] == [wire.SLICE_FRAMES, 1, 2, 2, 1, 1]
    assert all(size <= wire.SLICE_BYTES for _, size in slices)
