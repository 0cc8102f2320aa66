"""Every back end against a naive model of a stream: lists, and the laws read out word for word."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from midstream import rules
from midstream.codec import native
from midstream.errors import MidstreamError
from midstream.journal.base import Journal
from midstream.records import FRAME_OVERHEAD, Chunk, Finish, Frame, Record, StreamState
from midstream.rules import Bounds
from midstream.testing.clock import ManualClock
from midstream.testing.journal_writer import meta, read_all, seqs, text_of
from tests.journals import BACK_ENDS, running

RECORDS = 7
BOUNDS = Bounds(max_stream_records=RECORDS)
clock = ManualClock()


class Model:
    """A stream as PROTOCOL.md tells it: all records ever, and which of them can still be read."""

    def __init__(self, start: Frame) -> None:
        self.written = [start]
        self.retained = [1]
        self.status = "open"
        self.epoch, self.acked, self.trimmed = 1, 0, 0
        self.last = (1, [start])

    @property
    def highest(self) -> int:
        return len(self.written)

    @property
    def oldest(self) -> int:
        return self.retained[0] if self.retained else self.highest + 1

    def append(self, batch: list[Frame], epoch: int, first_seq: int) -> str:
        if epoch != self.epoch:
            return "stale_writer"
        repeated = (first_seq, batch) == self.last
        if repeated:
            return "ok"
        if self.status != "open":
            return "stream_ended"
        if first_seq != self.highest + 1:
            return "out_of_sequence"
        self.last = (first_seq, batch)
        for frame in batch:
            self.written.append(frame)
            self.retained.append(self.highest)
            event = Record.of(frame).event
            self.status = event if event in ("done", "cancelled") else self.status
        while len(self.retained) > RECORDS:
            self.retained.pop(0)
        return "ok"

    def claim(self) -> str:
        if self.status != "open":
            return "stream_ended"
        self.epoch += 1
        return "ok"

    def cancel(self) -> str:
        if self.status == "open":
            self.epoch += 1
            self.append([native.cancelled(self.highest + 1, "client")], self.epoch, self.highest + 1)
        return "ok"

    def trim(self, acked: int, floor: int | None) -> str:
        if acked > self.highest:
            return "cursor_ahead"
        self.acked = max(self.acked, acked)
        upto = self.acked
        if floor is not None and floor < upto:
            upto = floor
        if self.status != "open" and upto == self.highest:
            upto -= 1
        if all(seq <= upto for seq in range(1, self.oldest)):  # what is gone already, the ack lets go too
            self.retained = [seq for seq in self.retained if seq > upto]
            self.trimmed = upto
        return "ok"

    def after(self, position: int) -> list[Frame]:
        """What a live reader can be given: nothing once the next record is gone."""
        if position + 1 not in self.retained:
            return []
        return self.written[position:]

    def resume(self, position: int) -> str:
        if any(seq not in self.retained for seq in range(position + 1, self.highest + 1)):
            return "cursor_expired"
        if position > self.highest:
            return "cursor_ahead"
        return "ok" if position in self.retained or position == self.trimmed else "cursor_expired"


class StreamMachine(RuleBasedStateMachine):
    """One stream of a journal beside its model.  `run` and `journal` are set for a back end."""

    run: Callable[[Any], Any]
    journal: Journal

    @initialize()
    def create(self) -> None:
        told = meta(clock)
        start = native.start(told.stream_id, told.model)
        self.id, self.model = told.stream_id, Model(start)
        self.run(self.journal.create(told, [start]))

    def outcome(self, verb: Any) -> str:
        """`ok`, or the code of the refusal."""

        async def tried() -> str:
            try:
                await verb
            except MidstreamError as refusal:
                return refusal.code
            return "ok"

        told: str = self.run(tried())
        return told

    def append(self, batch: list[Frame], epoch: int, first_seq: int) -> None:
        told = self.outcome(self.journal.append(self.id, batch, epoch=epoch, first_seq=first_seq))
        assert told == self.model.append(batch, epoch, first_seq)

    def batch(self, first_seq: int, size: int, text: str) -> list[Frame]:
        return [native.token(first_seq + at, Chunk(f"{text}{first_seq + at} ")) for at in range(size)]

    @rule(size=st.integers(1, 4))
    def append_next(self, size: int) -> None:
        self.append(self.batch(self.model.highest + 1, size, "t"), self.model.epoch, self.model.highest + 1)

    @rule(size=st.integers(1, 9), back=st.integers(-3, 6), text=st.sampled_from("tu"))
    def append_elsewhere(self, size: int, back: int, text: str) -> None:
        """Repeats of the last batch or of a part of it, older ones, other content, gaps."""
        first_seq = self.model.highest + 1 - back
        self.append(self.batch(first_seq, size, text), self.model.epoch, first_seq)

    @rule(part=st.integers(0, 2))
    def append_last_again(self, part: int) -> None:
        first_seq, batch = self.model.last
        self.append(list(batch[part:]) or list(batch), self.model.epoch, first_seq)

    @rule(epoch=st.integers(-1, 1))
    def append_under_another_epoch(self, epoch: int) -> None:
        self.append(self.batch(self.model.highest + 1, 1, "t"), self.model.epoch + epoch, self.model.highest + 1)

    @rule(size=st.integers(0, 2))
    def finish(self, size: int) -> None:
        first_seq = self.model.highest + 1
        batch = [*self.batch(first_seq, size, "t"), native.done(first_seq + size, Finish("stop"))]
        self.append(batch, self.model.epoch, first_seq)

    @rule()
    def claim(self) -> None:
        assert self.outcome(self.journal.claim(self.id)) == self.model.claim()

    @rule()
    def cancel(self) -> None:
        assert self.outcome(self.journal.request_cancel(self.id, "client")) == self.model.cancel()

    @rule(below=st.integers(-2, 8), floor=st.none() | st.integers(-1, 8))
    def trim(self, below: int, floor: int | None) -> None:
        acked = max(0, self.model.highest - below)
        lowest = None if floor is None else max(0, self.model.highest - floor)
        assert self.outcome(self.journal.trim(self.id, acked, lowest)) == self.model.trim(acked, lowest)

    @rule()
    def start_anew(self) -> None:
        self.run(self.journal.expire(self.id))
        assert self.outcome(self.journal.state(self.id)) == "unknown_stream"
        self.create()

    @rule(position=st.integers(0, 40), limit=st.integers(1, 9))
    def read(self, position: int, limit: int) -> None:
        page = self.run(self.journal.read(self.id, position, limit))
        expected = self.model.after(position)
        assert page.frames == expected[: len(page.frames)]
        assert bool(page.frames) == bool(expected)
        assert len(page.frames) <= limit
        assert page.last_seq == position + len(page.frames)
        assert (page.highest_seq, page.oldest_retained_seq) == (self.model.highest, self.model.oldest)
        assert page.status == self.model.status
        assert page.ends == (self.model.status != "open" and page.last_seq == self.model.highest)

    @invariant()
    def state_is_the_models(self) -> None:
        state, model = self.run(self.journal.state(self.id)), self.model
        assert (state.status, state.epoch, state.highest_seq) == (model.status, model.epoch, model.highest)
        assert (state.oldest_retained_seq, state.acked_seq, state.trimmed_seq) == (
            model.oldest,
            model.acked,
            model.trimmed,
        )
        assert state.retained_records == len(model.retained)
        assert state.retained_bytes == sum(len(model.written[seq - 1]) + FRAME_OVERHEAD for seq in model.retained)

    @invariant()
    def records_are_the_models(self) -> None:
        frames = self.run(read_all(self.journal, self.id, self.model.oldest - 1))
        assert frames == [self.model.written[seq - 1] for seq in self.model.retained]
        assert seqs(frames) == self.model.retained

    @invariant()
    def positions_are_the_models(self) -> None:
        state = self.run(self.journal.state(self.id))
        for position in range(self.model.highest + 3):
            try:
                rules.honour(state, position)
                told = "ok"
            except MidstreamError as refusal:
                told = refusal.code
            assert told == self.model.resume(position)

    @invariant()
    def answer_is_whole(self) -> None:
        texts = [Record.of(frame).json().get("delta", "") for frame in self.model.written]
        assert text_of(self.run(self.journal.snapshot(self.id))) == "".join(texts)


def compare(run: Callable[[Any], Any], journal: Journal, phases: Collection[Phase] = tuple(Phase)) -> None:
    machine = type("Machine", (StreamMachine,), {"run": staticmethod(run), "journal": journal})
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=25, phases=phases))


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_stream_is_the_naive_models(back_end: str, tmp_path: Path) -> None:
    """Any order of verbs gives the same answers, the same state and the same records (R1 to R9)."""
    with running(back_end, tmp_path, BOUNDS) as (run, journal):
        compare(run, journal)


def test_machine_finds_a_wrong_law(tmp_path: Path) -> None:
    """It notices within its few examples when the position just below an eviction is called good (R7)."""
    right = rules.honour

    def lenient(state: StreamState, position: int) -> None:
        right(state, position + 1 if position + 1 == state.oldest_retained_seq else position)

    with pytest.MonkeyPatch.context() as patch, running("memory", tmp_path, BOUNDS) as (run, journal):
        patch.setattr(rules, "honour", lenient)
        with pytest.raises(AssertionError):
            compare(run, journal, [Phase.generate])
