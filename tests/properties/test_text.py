"""Any split of any text gives the same text, in records of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream import rules
from midstream.codec import native
from midstream.codec.text import Mender, whole
from midstream.records import Choice, Chunk, Fold

# A bound this small lets short texts exceed it many times.
SMALL = 96

# Halves of pairs are as common as whole characters of each length in UTF-8.
characters = st.sampled_from([*"ab\n", "ü", "✓", "🧵", "\ud83e", "\ud800", "\uddf5", "\udfff"])
halves = st.text(characters, max_size=12)
texts = st.text(st.sampled_from([*"ab", "ü", "✓", "🧵"]), max_size=300)


@pytest.fixture(autouse=True, scope="module")
def _small_bound() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "MAX_FIELD_BYTES", SMALL)
        yield


def answers(chunks: Iterable[Chunk]) -> dict[int, Choice]:
    """The answer that these chunks tell, each a record of its own."""
    kept = Fold()
    rules.fold(kept, (native.token(seq, chunk) for seq, chunk in enumerate(chunks, 2)))
    return kept.choices


def journaled(chunks: Iterable[Chunk]) -> list[Chunk]:
    """Mended, bounded, and what was left at the end: what a writer makes of a producer's chunks."""
    mender = Mender()
    mended = [one for chunk in chunks if (one := mender.mend(chunk)) is not None]
    return [piece for chunk in mended + mender.rest() for piece in native.bounded(chunk)]


@given(st.lists(halves, max_size=8))
def test_any_split_of_a_text_gives_the_same_text(deltas: list[str]) -> None:
    """Halves of pairs meet across any number of chunks."""
    pieces = journaled(map(Chunk, deltas))
    assert "".join(piece.delta for piece in pieces) == whole("".join(deltas))
    assert all(piece.delta for piece in pieces)


def told(field: str, choice: int, text: str) -> Chunk:
    """A chunk that says `text` in one of the fields that hold text."""
    at = {"choice": choice} if choice else {}
    if field == "delta":
        return Chunk(text, at or None)
    if field.startswith("call"):
        return Chunk("", {**at, "tool_calls": [{"index": int(field[-1]), "function": {"arguments": text}}]})
    return Chunk("", {**at, field: text})


sayings = st.tuples(st.sampled_from(["delta", "reasoning", "refusal", "call0", "call1"]), st.integers(0, 1), halves)


@given(st.lists(sayings, max_size=16))
def test_texts_woven_together_stay_apart(woven: list[tuple[str, int, str]]) -> None:
    """Each field of each choice and the arguments of each call come out whole, whatever comes in between."""
    said: dict[tuple[str, int], str] = {}
    for field, choice, text in woven:
        said[field, choice] = said.get((field, choice), "") + text
    kept = answers(journaled(told(*saying) for saying in woven))
    for (field, choice), text in said.items():
        answer = kept.get(choice, Choice())
        if field.startswith("call"):
            calls = {tool.position: tool.arguments for tool in answer.tool_calls}
            heard = calls.get(int(field[-1]), bytearray())
        else:
            heard = getattr(answer, "text" if field == "delta" else field)
        assert heard.decode() == whole(text)


calls = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"arguments": texts}, optional={"name": st.just("f")})},
    optional={"index": st.integers(0, 1), "id": st.sampled_from("pqr")},
)
large = st.fixed_dictionaries(
    {},
    optional={
        "reasoning": texts,
        "refusal": texts,
        "tool_calls": st.lists(calls, max_size=4),
        "choice": st.integers(1, 3),
        "finish_reason": st.just("stop"),
        "logprobs": st.just([1.5]),
    },
)


@given(texts, large)
def test_chunk_in_pieces_tells_what_the_chunk_tells(delta: str, more: dict[str, Any]) -> None:
    """Text for text, call for call, and nothing twice; no text is longer than its bound."""
    pieces = [*native.bounded(Chunk(delta, more))]
    assert answers(pieces) == answers([Chunk(delta, more)])
    fields = [piece.more or {} for piece in pieces]
    for name in ("logprobs", "finish_reason"):
        assert sum(name in more for more in fields) == (name in more)
    assert all(one.get("choice") == more.get("choice") for one in fields)
    for piece in pieces:
        longest = [piece.delta, *((piece.more or {}).get(name, "") for name in ("reasoning", "refusal"))]
        longest += [call["function"]["arguments"] for call in (piece.more or {}).get("tool_calls", ())]
        assert max(len(text.encode()) for text in longest) <= SMALL
