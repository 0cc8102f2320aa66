"""An upstream's errors, in whatever shape they come: its own words, its fields, and whether to try again."""

from __future__ import annotations

import pytest

from midstream.codec.upstream_errors import error_in, upstream_error


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"no such model","type":"x","param":"model","code":"y"}}', "no such model"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b'{"detail":[{"loc":["body"]}]}', '{"detail": [{"loc": ["body"]}]}'),
        (b'"words"', "words"),
        (b"<h1>502</h1>", "<h1>502</h1>"),
        (b"", "the upstream failed without a message (status 502)"),
        (b"x" * 100_000, "x" * 2000),
        (b"\xff", "\ufffd"),
    ],
)
def test_the_body_of_a_refusal_is_its_message(body: bytes, message: str) -> None:
    """In any of the shapes that servers and the proxies before them use."""
    failure = error_in(body, 502)
    assert (failure.failure, failure.detail, failure.retryable) == ("upstream_error", message, True)
    assert failure.facts["status"] == 502


@pytest.mark.parametrize(
    ("status", "retryable"), [(400, False), (401, False), (408, True), (429, True), (500, True), (599, True)]
)
def test_the_status_says_whether_to_try_again(status: int, retryable: bool) -> None:
    """Time-outs, rate limits and faults of the server's own."""
    assert upstream_error({"message": "m"}, status).retryable is retryable


def test_the_fields_of_an_error_are_kept() -> None:
    """So that a front can answer as the upstream did."""
    failure = upstream_error({"message": "m", "type": "t", "param": None, "code": "c" * 5000}, 400)
    assert failure.facts == {"status": 400, "upstream": {"type": "t", "code": "c" * 2000}}
