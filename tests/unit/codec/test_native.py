"""Records as they stand on the wire, and chunks too big for one of them."""

from __future__ import annotations

from typing import Any

import pytest

from midstream import rules
from midstream.codec import native
from midstream.cursor import decode
from midstream.errors import ProducerFailed
from midstream.records import Choice, Chunk, Finish, Fold, Record
from midstream.wire import MAX_FIELD_BYTES


@pytest.mark.parametrize(
    ("frame", "wire"),
    [
        (native.token(151, Chunk(" production")), b'{"seq":151,"delta":" production","done":false}'),
        (
            native.token(2, Chunk("", {"reasoning": "hm", "choice": 1})),
            b'{"seq":2,"delta":"","reasoning":"hm","choice":1,"done":false}',
        ),
        (native.done(9, Finish("stop")), b'{"seq":9,"done":true,"finish_reason":"stop"}'),
        (
            native.done(9, Finish("length", {"total_tokens": 3}, {"x": 1})),
            b'{"seq":9,"done":true,"finish_reason":"length","usage":{"total_tokens":3},"x":1}',
        ),
        (
            native.failed(9, ProducerFailed("upstream_error", "busy", retryable=True, status=503)),
            b'{"seq":9,"done":true,"error":{"code":"upstream_error","message":"busy","retryable":true,"status":503}}',
        ),
        (native.cancelled(9, "abandoned"), b'{"seq":9,"done":true,"reason":"abandoned"}'),
    ],
)
def test_records_are_compact_json_with_their_seq(frame: bytes, wire: bytes) -> None:
    """Exactly these bytes: they are the contract with clients."""
    record = Record.of(frame)
    assert record.data == wire
    assert frame == b"id: %d\nevent: %b\ndata: %b\n\n" % (record.seq, record.event.encode(), wire)


def test_start_lets_a_reader_resume_before_any_token() -> None:
    """It is seq 1, and its cursor points at itself."""
    record = Record.of(native.start("abc", "m"))
    fields = record.json()
    assert (record.seq, record.event) == (1, "start")
    assert {name: fields[name] for name in ("seq", "stream_id", "model")} == {
        "seq": 1,
        "stream_id": "abc",
        "model": "m",
    }
    assert decode(fields["cursor"]) == ("abc", 1)


def test_two_ways_to_a_token_make_the_same_bytes() -> None:
    """The template of the common case is the dictionary of the other."""
    for text in ("x", "", '"\\\n', "ü🧵\u2028", "\x00"):
        assert native.token(7, Chunk(text)) == native.token(7, Chunk(text, {}))


def put_together(chunks: list[Chunk]) -> dict[int, Choice]:
    """The answer that these chunks tell, each a record of its own."""
    kept = Fold()
    rules.fold(kept, (native.token(seq, chunk) for seq, chunk in enumerate(chunks, 2)))
    return kept.choices


def call(arguments: Any, **fields: Any) -> dict[str, Any]:
    return {**fields, "function": {"name": "f", "arguments": arguments}}


def test_chunk_that_fits_is_passed_on_as_it_is() -> None:
    """Not copied, not rewritten."""
    for chunk in (Chunk("x"), Chunk("", {"reasoning": "x"}), Chunk("x" * (MAX_FIELD_BYTES // 4))):
        assert [*native.bounded(chunk)] == [chunk]


@pytest.mark.parametrize("char", ["x", "ü", "✓", "🧵"])
@pytest.mark.parametrize("field", ["delta", "reasoning", "refusal"])
def test_text_is_cut_only_above_the_bound_and_between_characters(char: str, field: str) -> None:
    """A text of exactly the bound is one record; one more character makes a second."""
    fits = char * (MAX_FIELD_BYTES // len(char.encode()))
    for text, records in ((fits, 1), (fits + char, 2), (fits * 3, None)):
        chunk = Chunk(text) if field == "delta" else Chunk("", {field: text})
        pieces = [piece.delta if field == "delta" else (piece.more or {})[field] for piece in native.bounded(chunk)]
        assert "".join(pieces) == text
        assert all(len(piece.encode()) <= MAX_FIELD_BYTES for piece in pieces)
        assert len(pieces) == (records or len(pieces))


def test_long_arguments_stay_with_their_call() -> None:
    """Calls that all have index 0 are told apart by order alone: a call's pieces stand together."""
    first, second = "[" + "1," * MAX_FIELD_BYTES + "1]", '{"x":"' + "y" * MAX_FIELD_BYTES + '"}'
    chunk = Chunk(
        "so", {"tool_calls": [call(first, index=0, id="a"), call(second, index=0, id="b"), call("{}", index=1)]}
    )
    pieces = [*native.bounded(chunk)]
    calls = put_together(pieces)[0].tool_calls
    assert [(one.position, one.id, one.arguments.decode()) for one in calls] == [
        (0, "a", first),
        (0, "b", second),
        (1, "", "{}"),
    ]
    assert put_together(pieces)[0].text == b"so"
    assert len(pieces) >= 4


def test_pieces_come_in_the_order_in_which_they_are_read() -> None:
    """Reasoning before text before calls, and the finish reason last, whatever is cut."""
    long = "z" * MAX_FIELD_BYTES
    more = {"choice": 2, "reasoning": "r" + long, "tool_calls": [call(long)], "finish_reason": "stop", "logprobs": [1]}
    pieces = [*native.bounded(Chunk("t" + long, more))]
    fields = [{*(piece.more or {}), *(["delta"] if piece.delta else [])} for piece in pieces]
    assert all("choice" in names for names in fields)
    places = {name: [at for at, names in enumerate(fields) if name in names] for name in (*more, "delta")}
    assert places["logprobs"] == [0]
    assert places["reasoning"][0] < places["delta"][0] < places["tool_calls"][0] < len(pieces)
    assert places["reasoning"][-1] <= places["delta"][0]
    assert places["delta"][-1] <= places["tool_calls"][0]
    assert places["finish_reason"] == [len(pieces) - 1]
    answer = put_together(pieces)[2]
    assert (answer.reasoning.decode(), answer.text.decode()) == ("r" + long, "t" + long)
    assert answer.finish_reason == "stop"


def test_a_record_holds_about_one_field_of_the_bound() -> None:
    """Several fields, each within its bound, do not add up to a record of many times that."""
    long = "z" * (MAX_FIELD_BYTES - 10)
    more = {"reasoning": long, "refusal": long, "tool_calls": [call(long, index=n) for n in range(5)]}
    pieces = [*native.bounded(Chunk(long, more))]
    assert len(pieces) == 8
    assert max(len(native.token(2, piece)) for piece in pieces) < MAX_FIELD_BYTES + 1000


@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": ["x" * MAX_FIELD_BYTES]},
        {"upstream": {"chunk": {"x": "y" * MAX_FIELD_BYTES}}},
        {"finish_reason": "x" * MAX_FIELD_BYTES},
        {"tool_calls": [{"index": 0, "function": {"name": "x" * MAX_FIELD_BYTES, "arguments": "{}"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": {"x": "y" * MAX_FIELD_BYTES}}}]},
        {"tool_calls": ["x" * MAX_FIELD_BYTES]},
        {"tool_calls": {"x": "y" * MAX_FIELD_BYTES}},
        {"reasoning": ["x" * MAX_FIELD_BYTES]},
    ],
    ids=range(8),
)
def test_another_field_that_big_fails_the_stream(more: dict[str, Any]) -> None:
    """It cannot be cut without changing its meaning."""
    with pytest.raises(ProducerFailed) as failure:
        [*native.bounded(Chunk("x", more))]
    assert failure.value.failure == "upstream_too_large"
    assert next(iter(more)) in failure.value.detail
    assert not failure.value.retryable


def test_another_field_just_within_the_bound_passes() -> None:
    """Beside a text that must be cut, too."""
    more = {"logprobs": "x" * (MAX_FIELD_BYTES - 2)}
    pieces = [*native.bounded(Chunk("t" * 2 * MAX_FIELD_BYTES, more))]
    assert (pieces[0].more or {})["logprobs"] == more["logprobs"]
    assert "".join(piece.delta for piece in pieces) == "t" * 2 * MAX_FIELD_BYTES
