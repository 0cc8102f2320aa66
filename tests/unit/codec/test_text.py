"""Half a surrogate pair waits for its other half, in its own field and call; a lone one becomes U+FFFD."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from midstream import rules
from midstream.codec import native
from midstream.codec.text import Mender, whole
from midstream.records import Choice, Chunk, Fold

HIGH, LOW = "\ud83e", "\uddf5"
PAIR = "🧵"


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("plain", "plain"),
        (PAIR, PAIR),
        (HIGH + LOW, PAIR),
        (HIGH, "\ufffd"),
        (LOW, "\ufffd"),
        (LOW + HIGH, "\ufffd\ufffd"),
        (HIGH + "a" + LOW, "\ufffda\ufffd"),
        (HIGH + HIGH + LOW, "\ufffd" + PAIR),
        ("\u2028\x00\ufeff", "\u2028\x00\ufeff"),
    ],
)
def test_text_becomes_valid_unicode(text: str, valid: str) -> None:
    """Pairs are joined, lone halves replaced one by one, all else is left."""
    assert whole(text) == valid
    assert whole(text).encode()


def mended(*chunks: Chunk) -> tuple[list[Chunk], list[Chunk]]:
    """What came out for these chunks, and what was left at the end."""
    mender = Mender()
    out = [chunk for chunk in map(mender.mend, chunks) if chunk is not None]
    return out, mender.rest()


def answer_of(*chunks: Chunk) -> dict[int, Choice]:
    """The answer that these chunks tell once mended."""
    out, rest = mended(*chunks)
    kept = Fold()
    rules.fold(kept, (native.token(seq, chunk) for seq, chunk in enumerate(out + rest, 2)))
    return kept.choices


def test_half_a_pair_waits_for_the_other() -> None:
    """Nothing is said for a delta that is half a character; then the whole character comes."""
    out, rest = mended(Chunk("a" + HIGH), Chunk(LOW + "b"), Chunk(HIGH), Chunk(LOW))
    assert [chunk.delta for chunk in out] == ["a", PAIR + "b", PAIR]
    assert rest == []


def test_half_a_pair_that_is_never_completed_is_replaced() -> None:
    """By what follows, or at the end of the stream."""
    assert [chunk.delta for chunk in mended(Chunk(HIGH), Chunk("b"))[0]] == ["\ufffdb"]
    out, rest = mended(Chunk("a" + HIGH))
    assert [chunk.delta for chunk in out + rest] == ["a", "\ufffd"]


def test_pending_tells_whether_something_waits() -> None:
    """A writer that knows there is nothing may pass plain text on unread."""
    mender = Mender()
    assert not mender.pending
    mender.mend(Chunk(HIGH))
    assert mender.pending
    mender.mend(Chunk(LOW))
    assert not mender.pending
    mender.mend(Chunk(HIGH))
    assert mender.rest()
    assert not mender.pending


def test_fields_and_choices_do_not_complete_each_other() -> None:
    """Each text of each choice has halves of its own."""
    answers = answer_of(
        Chunk(HIGH, {"reasoning": HIGH}),
        Chunk(LOW, {"choice": 1, "reasoning": HIGH}),
        Chunk("", {"reasoning": LOW}),
        Chunk("", {"choice": 1, "reasoning": LOW, "refusal": LOW}),
        Chunk(LOW),
    )
    assert (answers[0].text.decode(), answers[0].reasoning.decode()) == (PAIR, PAIR)
    assert (answers[1].text.decode(), answers[1].reasoning.decode()) == ("\ufffd", PAIR)
    assert answers[1].refusal.decode() == "\ufffd"


def test_chunk_with_other_fields_is_not_held_back() -> None:
    """Only its half is."""
    out, rest = mended(Chunk(HIGH, {"finish_reason": "stop", "choice": 1}), Chunk("", {"choice": 1, "reasoning": HIGH}))
    assert out == [Chunk("", {"finish_reason": "stop", "choice": 1})]
    assert rest == [Chunk("\ufffd", {"choice": 1}), Chunk("", {"reasoning": "\ufffd", "choice": 1})]


def test_empty_chunk_says_nothing() -> None:
    """Role-only and empty deltas make no record."""
    assert mended(Chunk(""), Chunk("", {}), Chunk("", {"choice": 3}), Chunk("", {"reasoning": ""})) == ([], [])


def call(arguments: object, **fields: Any) -> Chunk:
    return Chunk("", {"tool_calls": [{**fields, "function": {"arguments": arguments}}]})


def test_arguments_are_mended_by_call() -> None:
    """Two calls streamed in turn, each with half a character under way."""
    answers = answer_of(
        call('"' + HIGH, index=0, id="a"),
        call("[" + HIGH, index=1, id="b"),
        call(LOW + '"', index=0),
        call("]", index=1),
    )
    assert [tool.arguments.decode() for tool in answers[0].tool_calls] == [f'"{PAIR}"', "[\ufffd]"]


def test_half_of_a_call_never_reaches_the_next_one_at_its_index() -> None:
    """Some servers give every call index 0: a new id means that the half before stays alone, where it was."""
    answers = answer_of(call('"' + HIGH, index=0, id="a"), call(LOW + '"', index=0, id="b"))
    assert [tool.arguments.decode() for tool in answers[0].tool_calls] == ['"\ufffd', '\ufffd"']


def test_id_repeated_on_each_delta_is_the_same_call() -> None:
    """Its halves meet."""
    answers = answer_of(call('"' + HIGH, index=0, id="a"), call(LOW + '"', index=0, id="a"))
    assert [tool.arguments.decode() for tool in answers[0].tool_calls] == [f'"{PAIR}"']


@pytest.mark.parametrize("index", [{}, {"index": None}, {"index": "0"}, {"index": {}}])
def test_call_without_a_usable_index_keeps_its_half(index: dict[str, Any]) -> None:
    """It is one call then, here as in the fold."""
    answers = answer_of(call("x" + HIGH, **index), call(LOW + HIGH, **index))
    assert [tool.arguments.decode() for tool in answers[0].tool_calls] == ["x" + PAIR + "\ufffd"]


@pytest.mark.parametrize(
    "calls", [5, [5, None, "x" + HIGH], [{"function": HIGH}], {HIGH: LOW}, [{"function": {HIGH: 1}}]]
)
def test_whatever_an_upstream_calls_tool_calls_can_be_journaled(calls: Any) -> None:
    """What has no text of a known kind is made valid as it stands."""
    out, rest = mended(Chunk("a", {"tool_calls": calls, "logprobs": {"bytes": [HIGH, {"t": HIGH + LOW}]}}))
    assert rest == []
    assert orjson.dumps((out[0].more or {})["tool_calls"])
    assert (out[0].more or {})["logprobs"] == {"bytes": ["\ufffd", {"t": PAIR}]}
