"""A fold that was kept as JSON is the same fold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream import rules
from midstream.codec import fold as folds
from midstream.codec import native
from midstream.errors import ProducerFailed
from midstream.records import Choice, Chunk, Finish, Fold, Frame, Part, ToolCall

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
CALL = st.fixed_dictionaries(
    {"index": st.integers(0, 2)},
    optional={
        "id": TEXT,
        "type": st.just("function"),
        "function": st.fixed_dictionaries({}, optional={"name": TEXT, "arguments": TEXT}),
    },
)
MORE = st.fixed_dictionaries(
    {},
    optional={
        "reasoning": TEXT,
        "refusal": TEXT,
        "choice": st.integers(0, 3),
        "tool_calls": st.lists(CALL, max_size=3),
        "finish_reason": st.sampled_from(["stop", "length"]),
        "logprobs": st.fixed_dictionaries({"content": st.lists(st.just({"token": "a", "logprob": -0.5}), max_size=2)}),
    },
)
CHUNKS = st.lists(st.builds(Chunk, TEXT, MORE), max_size=12)


def told(chunks: list[Chunk], end: bool) -> list[Frame]:
    frames = [native.start("s", "m"), *(native.token(seq, chunk) for seq, chunk in enumerate(chunks, 2))]
    if end:
        frames.append(native.done(len(frames) + 1, Finish("stop", {"total_tokens": 3})))
    return frames


@given(CHUNKS, st.booleans(), st.integers(0, 14))
def test_a_kept_fold_goes_on_like_the_one_it_was(chunks: list[Chunk], end: bool, cut: int) -> None:
    """Kept at any record and read back, it is equal, and folds the rest to the same answer."""
    frames = told(chunks, end)
    whole, part = Fold(), Fold()
    rules.fold(whole, frames)
    rules.fold(part, frames[:cut])
    again = folds.decode(folds.encode(part))
    assert again == part
    rules.fold(again, frames)
    assert again == whole


def test_the_end_and_what_had_to_go_are_kept() -> None:
    """An error survives, and so does that the texts were let go."""
    fold = Fold()
    failure = ProducerFailed("upstream_error", "it broke", retryable=True, status=503)
    rules.fold(fold, [native.token(2, Chunk("x" * 100)), native.failed(3, failure)])
    rules.shed_fold(fold, rules.Bounds(max_stream_bytes=100))
    again = folds.decode(folds.encode(fold))
    assert again == fold
    assert not again.complete
    assert again.error == {"code": "upstream_error", "message": "it broke", "retryable": True, "status": 503}


def test_a_fold_of_an_older_version_is_read() -> None:
    """Journals outlive the version that wrote them: what that did not keep is none."""
    call = {"position": 0, "id": "c", "type": "function", "name": "f", "arguments": "{}"}
    choice = {"text": "ab", "reasoning": "", "refusal": "", "tool_calls": [call], "finish_reason": None}
    told = {"upto": 4, "complete": True, "choices": [[0, choice]], "items": [["text", 2], ["call:0", 1]]}
    fold = folds.decode(json.dumps(told | {"error": None, "usage": None}).encode())
    assert fold.choices[0] == Choice(bytearray(b"ab"), tool_calls=[ToolCall(0, "c", "function", "f", bytearray(b"{}"))])
    assert (fold.upto, fold.parts) == (4, [Part("text", 2), Part("call:0", 1)])


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"upto":1}', b"\xff", b"null"])
def test_anything_else_is_refused(data: bytes) -> None:
    """What `encode` did not write is an error, never an empty fold."""
    refusals: tuple[Any, ...] = (ValueError, KeyError, TypeError)
    with pytest.raises(refusals):
        folds.decode(data)
