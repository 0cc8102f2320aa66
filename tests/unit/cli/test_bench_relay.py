"""What the relay counts, however the bytes are cut."""

from __future__ import annotations

import pytest

from midstream.cli.bench_relay import Written

ANSWER = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"One"}}]}\n\n'
    b": a comment\n\n"
    b'data: {"choices":[{"text":" two"}]}\r\n\r\n'
    b'data:{"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
    b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\n'
    b"data: [DONE]\n\n"
)


@pytest.mark.parametrize("size", [1, 7, len(ANSWER)])
def test_only_text_counts_and_the_cut_of_the_bytes_does_not_matter(size: int) -> None:
    written = Written()
    for at in range(0, len(ANSWER), size):
        written.take(ANSWER[at : at + size])
    assert (written.chunks, written.usage) == (2, 3)


def test_what_is_no_event_of_an_answer_is_passed_over() -> None:
    written = Written()
    written.take(b'data: not json\ndata: [1]\n{"error":"a whole body"}\ndata: {"error":{"message":"no"}}\n')
    assert (written.chunks, written.usage) == (0, None)
