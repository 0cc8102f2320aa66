"""The laws as tables: each row is what a journal may rely on."""

from __future__ import annotations

from typing import Any

import pytest

from midstream import rules
from midstream.codec import native
from midstream.errors import (
    CursorAhead,
    CursorExpired,
    MidstreamError,
    OutOfSequence,
    ProducerFailed,
    StaleWriter,
    StreamEnded,
)
from midstream.records import FRAME_OVERHEAD, Chunk, Finish, Fold, Frame, Part, StreamMeta
from midstream.rules import Bounds, Counters
from midstream.wire import RETAIN_CAP, TOUCH_EVERY, Status


def frames(first_seq: int, *texts: str) -> list[Frame]:
    return [native.token(seq, Chunk(text)) for seq, text in enumerate(texts, first_seq)]


FAILED = native.failed(7, ProducerFailed("upstream_error", "\nevent: token\n", retryable=False))


@pytest.mark.parametrize(
    ("frame", "event", "status"),
    [
        (native.start("abc", "m"), "start", "open"),
        (native.token(2, Chunk("\nevent: done\n")), "token", "open"),
        (native.token(2**53 - 1, Chunk("x")), "token", "open"),
        (native.done(7, Finish("\nevent: token\n")), "done", "done"),
        (FAILED, "failed", "failed"),
        (native.cancelled(2**53 - 1, "client"), "cancelled", "cancelled"),
    ],
)
def test_newest_record_decides_what_a_stream_is(frame: Frame, event: str, status: Status) -> None:
    """Only its event does: no text of a model can end a stream, or keep one open (R4)."""
    assert rules.event_of(frame) == event
    assert rules.status_after(frame) == status


LAST = frames(4, "x", "y")
ADMISSION = [
    # epoch, first seq, batch, verdict on an open stream at 5, verdict on one that ended at 5
    (3, 6, frames(6, "z"), True, StreamEnded),
    (3, 6, LAST, True, StreamEnded),
    (3, 4, LAST, False, False),
    (3, 4, frames(4, "x", "y"), False, False),
    (3, 4, frames(4, "x", "Y"), OutOfSequence, StreamEnded),
    (3, 4, frames(4, "x"), OutOfSequence, StreamEnded),
    (3, 5, frames(5, "y"), OutOfSequence, StreamEnded),
    (3, 3, frames(3, "w", "x", "y"), OutOfSequence, StreamEnded),
    (3, 7, frames(7, "z"), OutOfSequence, StreamEnded),
    (3, 0, frames(0, "z"), OutOfSequence, StreamEnded),
    (2, 6, frames(6, "z"), StaleWriter, StaleWriter),
    (4, 6, frames(6, "z"), StaleWriter, StaleWriter),
    (2, 4, LAST, StaleWriter, StaleWriter),
]


@pytest.mark.parametrize(("epoch", "first_seq", "batch", "while_open", "after_the_end"), ADMISSION)
def test_what_is_admitted(
    epoch: int,
    first_seq: int,
    batch: list[Frame],
    while_open: bool | type[MidstreamError],
    after_the_end: bool | type[MidstreamError],
) -> None:
    """Epoch before end before number; the last batch again is accepted and not written (R2, R4, R3)."""
    for status, verdict in (("open", while_open), ("done", after_the_end)):
        counters = Counters(status=status, epoch=3, highest=5, last_batch=list(LAST))  # type: ignore[arg-type]
        if isinstance(verdict, bool):
            assert rules.admit(counters, batch, epoch, first_seq) is verdict
            continue
        with pytest.raises(verdict) as refusal:
            rules.admit(counters, batch, epoch, first_seq)
        assert refusal.value.facts in ({}, {"expected": 6}, {"epoch": 3})


def test_appended_batch_is_counted() -> None:
    """Highest, bytes, and at a terminal record the end's time, from which the grace period runs."""
    counters = Counters(last_access=1.0)
    batch = [*frames(1, "a", "b"), native.done(3, Finish())]
    rules.appended(counters, batch[:2], 5.0)
    assert (counters.highest, counters.status, counters.ended_at, counters.last_access) == (2, "open", None, 1.0)
    rules.appended(counters, batch[2:], 6.0)
    assert (counters.highest, counters.status, counters.ended_at, counters.last_access) == (3, "done", 6.0, 6.0)
    assert counters.retained_bytes == sum(map(len, batch)) + 3 * FRAME_OVERHEAD


GONE, AHEAD = CursorExpired, CursorAhead
POSITIONS = [
    # oldest, trimmed, highest, and what positions 0 … 10 are answered
    (1, 0, 0, [None] + [AHEAD] * 10),
    (1, 0, 9, [None] * 10 + [AHEAD]),
    (5, 0, 9, [GONE] * 5 + [None] * 5 + [AHEAD]),
    (5, 4, 9, [GONE] * 4 + [None] * 6 + [AHEAD]),
    (5, 3, 9, [GONE] * 5 + [None] * 5 + [AHEAD]),
    (9, 8, 9, [GONE] * 8 + [None] * 2 + [AHEAD]),
    (10, 9, 9, [GONE] * 9 + [None] + [AHEAD]),
]


@pytest.mark.parametrize(("oldest", "trimmed", "highest", "answers"), POSITIONS)
def test_which_positions_are_honoured(
    oldest: int, trimmed: int, highest: int, answers: list[type[MidstreamError] | None]
) -> None:
    """At or above the oldest, or exactly where an ack trimmed to; never above the highest (R5)."""
    counters = Counters(oldest=oldest, trimmed=trimmed, highest=highest)
    for state in (counters, counters.state(StreamMeta("abc", "ada", "m", 0.0, 600.0))):
        for position, refusal in enumerate(answers):
            if refusal is None:
                rules.honour(state, position)
                continue
            with pytest.raises(refusal) as raised:
                rules.honour(state, position)
            assert raised.value.facts == ({"oldest_available": oldest} if refusal is GONE else {"highest_seq": highest})


@pytest.mark.parametrize(("position", "oldest", "lost"), [(3, 5, True), (4, 5, False), (5, 5, False), (0, 1, False)])
def test_overtaken_is_who_misses_a_record(position: int, oldest: int, lost: bool) -> None:
    """The one just below the oldest has had everything before it (R8)."""
    assert rules.overtaken(position, oldest) is lost


@pytest.mark.parametrize(("before", "seq", "after"), [(0, 4, 4), (4, 2, 4), (4, 9, 9), (9, 0, 9)])
def test_ack_only_moves_on(before: int, seq: int, after: int) -> None:
    """An older one is a no-op (R6)."""
    counters = Counters(highest=9, acked=before)
    rules.ack(counters, seq)
    assert counters.acked == after


def test_ack_above_the_highest_is_refused_and_not_taken() -> None:
    """Nobody can have dispatched it (R6)."""
    counters = Counters(highest=9, acked=4)
    with pytest.raises(CursorAhead):
        rules.ack(counters, 10)
    assert counters.acked == 4


@pytest.mark.parametrize(
    ("status", "acked", "floor", "upto"),
    [
        ("open", 6, None, 6),
        ("open", 6, 3, 3),
        ("open", 6, 9, 6),
        ("open", 6, 0, 0),
        ("open", 9, None, 9),
        ("done", 9, None, 8),
        ("failed", 9, 9, 8),
        ("cancelled", 6, None, 6),
    ],
)
def test_ack_lets_go_below_every_reader_and_never_the_terminal(
    status: Status, acked: int, floor: int | None, upto: int
) -> None:
    """The lowest of ack and connected readers; one less than the end once there is one (R6)."""
    assert rules.trimmable(Counters(status=status, highest=9, acked=acked), floor) == upto


@pytest.mark.parametrize(
    ("max_records", "max_bytes", "extra", "gone"),
    [
        (10, 1000, 0, 0),
        (5, 500, 0, 0),
        (4, 500, 0, 1),
        (2, 500, 0, 3),
        (1, 500, 0, 4),
        (0, 500, 0, 4),
        (10, 499, 0, 1),
        (10, 400, 0, 1),
        (10, 399, 0, 2),
        (10, 0, 0, 4),
        (10, 500, 1, 1),
        (10, 500, 150, 2),
        (3, 400, 0, 2),
        (4, 200, 0, 3),
    ],
)
def test_what_is_evicted(max_records: int, max_bytes: int, extra: int, gone: int) -> None:
    """As many of five records of 100 bytes as either bound asks for, and never the newest (R7)."""
    counters = Counters(oldest=3, highest=7, retained_bytes=500)
    bounds = Bounds(max_stream_bytes=max_bytes, max_stream_records=max_records)
    assert rules.evictable(counters, bounds, [100] * 5, extra) == gone


def test_only_an_ack_moves_the_trimmed_position() -> None:
    """Who stands below what was evicted has lost something, and must hear it (R7)."""
    batch = frames(1, "a", "b", "c")
    counters = Counters()
    rules.appended(counters, batch, 0.0)
    rules.dropped(counters, batch[:1], by_ack=False)
    assert (counters.oldest, counters.trimmed) == (2, 0)
    rules.dropped(counters, batch[1:2], by_ack=True)
    assert (counters.oldest, counters.trimmed) == (3, 2)
    assert counters.retained_bytes == rules.weight(batch[2:])


@pytest.mark.parametrize(
    ("retain", "passed", "due"),
    [
        (600.0, 59.0, False),
        (600.0, 60.0, True),
        (86400.0, TOUCH_EVERY - 1, False),
        (86400.0, TOUCH_EVERY, True),
        (10.0, 0.5, False),
        (10.0, 1.0, True),
        (0.0, 0.0, True),
    ],
)
def test_access_is_noted_at_most_once_a_minute(retain: float, passed: float, due: bool) -> None:
    """More often where the grace period itself is short (R10)."""
    assert rules.touch_due(Counters(last_access=1000.0), retain, 1000.0 + passed) is due


@pytest.mark.parametrize(
    ("ended_at", "last_access", "retain", "end"),
    [
        (None, 5000.0, 600.0, None),
        (1000.0, 1000.0, 600.0, 1600.0),
        (1000.0, 1500.0, 600.0, 2100.0),
        (1000.0, 1000.0 + RETAIN_CAP - 1, 600.0, 1000.0 + RETAIN_CAP),
        (1000.0, 1000.0, 2 * RETAIN_CAP, 1000.0 + RETAIN_CAP),
    ],
)
def test_when_a_stream_is_forgotten(
    ended_at: float | None, last_access: float, retain: float, end: float | None
) -> None:
    """The grace period after the last access, capped from the end; never while it is open (R10)."""
    counters = Counters(ended_at=ended_at, last_access=last_access)
    over = end if end is not None else 10 * RETAIN_CAP
    assert not rules.expired(counters, retain, lambda _: over - 0.001)
    assert rules.expired(counters, retain, lambda _: over) is (end is not None)


@pytest.mark.parametrize(
    ("retained", "capped", "over"),
    [(2599.0, 999.0 + RETAIN_CAP, False), (2600.0, 999.0 + RETAIN_CAP, True), (2599.0, 1000.0 + RETAIN_CAP, True)],
)
def test_each_term_of_grace_is_judged_by_a_time_of_its_own(retained: float, capped: float, over: bool) -> None:
    """What the clock jumped over is left out for longer where the term is long (see `Clock.believed`)."""
    counters = Counters(ended_at=1000.0, last_access=2000.0)
    assert rules.expired(counters, 600.0, {600.0: retained, RETAIN_CAP: capped}.__getitem__) is over


# --- the fold --------------------------------------------------------------------------------------------------------


def folded(*tokens: dict[str, Any]) -> Fold:
    kept = Fold()
    for seq, fields in enumerate(tokens, 2):
        fields = dict(fields)
        rules.fold(kept, [native.token(seq, Chunk(fields.pop("delta", ""), fields or None))])
    return kept


def call(arguments: object = None, **fields: Any) -> dict[str, Any]:
    return {"tool_calls": [{**fields, "function": {"arguments": arguments}}]}


def calls_of(kept: Fold) -> list[tuple[str, str]]:
    return [(tool.id, tool.arguments.decode()) for tool in kept.choices[0].tool_calls]


def test_records_are_folded_once() -> None:
    """A record that comes again is passed over, so that fold and records may overlap (R9)."""
    kept, batch = Fold(), frames(2, "a", "b", "c")
    rules.fold(kept, batch[:2])
    rules.fold(kept, batch)
    assert (kept.choices[0].text.decode(), kept.upto, kept.parts) == ("abc", 4, [Part("text", 3, 3)])


@pytest.mark.parametrize(
    ("deltas", "calls"),
    [
        # By index, as the API documents it.
        ([call("{", index=0, id="a"), call("[", index=1, id="b"), call("}", index=0)], [("a", "{}"), ("b", "[")]),
        # All at index 0: a new id begins a new call, and what has no id belongs to the newest.
        ([call("1", index=0, id="a"), call("2", index=0, id="b"), call("3", index=0)], [("a", "1"), ("b", "23")]),
        # The id repeated on every delta, and a call that comes back after another.
        ([call("1", index=0, id="a"), call("2", index=0, id="a")], [("a", "12")]),
        (
            [call("1", index=0, id="a"), call("2", index=0, id="b"), call("3", index=0, id="a")],
            [("a", "13"), ("b", "2")],
        ),
        # The id late, or never; the index missing or null.
        ([call("1", index=0), call("2", index=0, id="a")], [("a", "12")]),
        ([call("1"), call("2", index=None)], [("", "12")]),
        ([call("1", id="a"), call("2", id="b")], [("a", "1"), ("b", "2")]),
        # Arguments as an object, as some servers give them.
        ([call({"x": 1}, index=0, id="a")], [("a", '{"x":1}')]),
        ([call(None, index=0, id="a")], [("a", "")]),
    ],
)
def test_tool_calls_are_put_together(deltas: list[dict[str, Any]], calls: list[tuple[str, str]]) -> None:
    """Whatever servers do with index and id."""
    assert calls_of(folded(*deltas)) == calls


@pytest.mark.parametrize(
    "garbage",
    [
        {"tool_calls": value}
        for value in (
            None, 5, "x", {}, {"index": 0}, [None], [5, "x", []], [{"index": "x"}], [{"index": 0, "function": 7}],
            [{"id": 5, "type": [], "function": {"name": {}, "arguments": 5}}], [{"function": {"arguments": ["x"]}}],
        )
    ],
)  # fmt: skip
def test_no_delta_of_an_upstream_stops_the_fold(garbage: dict[str, Any]) -> None:
    """It runs inside appends and acks: what it cannot read it passes over."""
    kept = folded({"delta": "a", **garbage}, {"delta": "b"}, call("{}", index=7, id="z"))
    assert kept.choices[0].text == b"ab"
    assert calls_of(kept)[-1] == ("z", "{}")
    assert kept.upto == 4


def test_parts_are_told_in_the_order_in_which_they_were_said() -> None:
    """A record may hold reasoning, text and calls at once; another kind of text begins a part, a call goes on with its
    own; only the first choice has parts (R9)."""
    kept = folded(
        {"delta": "a", "reasoning": "r"},
        {"delta": "b", "choice": 1},
        {"refusal": "no"},
        {"delta": "ç", **call("x", index=0, id="1")},
        {"delta": "d", **call("y", index=0)},
        {"delta": "e", **call("", index=0)},
    )
    kinds = [(part.kind, part.deltas, part.size) for part in kept.parts]
    assert kinds == [
        ("reasoning", 1, 1),
        ("text", 1, 1),
        ("refusal", 1, 2),
        ("text", 1, 2),
        ("call", 0, 0),
        ("text", 2, 2),
    ]
    assert [tool.deltas for tool in kept.choices[0].tool_calls] == [2]
    assert {choice: answer.text.decode() for choice, answer in kept.choices.items()} == {0: "açde", 1: "b"}


def test_parts_count_as_bytes_of_the_fold() -> None:
    """An answer that changes its kind with every record is bounded like any other (R9)."""
    kept = folded(*({"delta": "x"} if turn % 2 else {"reasoning": "y"} for turn in range(200)))
    assert len(kept.parts) == 200
    assert rules.fold_bytes(kept) >= 200 * 128
    rules.shed_fold(kept, Bounds(max_stream_bytes=200 * 128))
    assert (kept.complete, kept.parts) == (False, [])


def test_terminal_record_folds_into_outcome() -> None:
    """Usage, finish reason of the only choice, or the error."""
    kept = folded({"delta": "a"})
    rules.fold(kept, [native.done(3, Finish("stop", {"total_tokens": 2}))])
    assert (kept.choices[0].finish_reason, kept.usage, kept.error) == ("stop", {"total_tokens": 2}, None)
    broken = folded()
    rules.fold(broken, [FAILED])
    assert broken.error is not None
    assert broken.error["code"] == "upstream_error"


def test_fold_is_shed_at_half_of_the_streams_bytes() -> None:
    """Beyond, `complete` is false for good, and nothing more is collected (R9)."""
    kept = folded({"delta": "x" * 300}, call("y" * 200, index=0, id="a"))
    weight = rules.fold_bytes(kept)
    assert weight >= 300 + 200 + 2 * 256
    rules.shed_fold(kept, Bounds(max_stream_bytes=2 * weight))
    assert kept.complete
    rules.shed_fold(kept, Bounds(max_stream_bytes=2 * weight - 1))
    assert (kept.complete, kept.choices, kept.parts, rules.fold_bytes(kept)) == (False, {}, [], 0)
    rules.fold(kept, frames(9, "more"))
    assert (kept.upto, kept.choices, kept.complete) == (9, {}, False)
