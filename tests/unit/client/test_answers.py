"""Answers read by a client: every error of the gateway comes out as the class it was raised as there."""

from __future__ import annotations

import pytest

from midstream.client.answers import Answer, UnexpectedAnswer, Unreachable, error_of, object_in, silence
from midstream.errors import Busy, MidstreamError, TooManyStreams, Unauthorized
from midstream.wire import HTTP_STATUS

# Codes that a client reads as "try again later", whatever their class was.
NAMELESS = {"internal_error"}


@pytest.mark.parametrize(("code", "status"), sorted(HTTP_STATUS.items()))
def test_every_code_of_the_wire_comes_back_as_its_own_class(code: str, status: int) -> None:
    body = b'{"error":"%b","detail":"what happened","oldest_available":3,"highest_seq":9}' % code.encode()
    error = error_of(Answer(status, {}, body))
    if code in NAMELESS:
        assert isinstance(error, Unreachable)
        assert "what happened" in str(error)
    else:
        assert error.code == code
        assert type(error).__module__ == "midstream.errors"


def test_facts_and_detail_are_kept_whatever_their_names() -> None:
    error = error_of(Answer(400, {}, b'{"error":"bad_request","detail":"no","self":1,"detail2":2}'))
    assert (error.detail, error.facts) == ("no", {"self": 1, "detail2": 2})


def test_a_bare_code_is_explained_to_people() -> None:
    error = error_of(Answer(401, {}, b'{"error":"unauthorized"}'))
    assert isinstance(error, Unauthorized)
    assert str(error) == "the gateway does not accept this key"


@pytest.mark.parametrize("told", [b'"x"', b"7", b"null", b'["a"]'])
def test_a_detail_that_is_no_text_does_no_harm(told: bytes) -> None:
    error = error_of(Answer(400, {}, b'{"error":"bad_request","detail":' + told + b"}"))
    assert isinstance(error, MidstreamError)
    assert str(error)


def test_how_long_to_wait_comes_from_the_header() -> None:
    error = error_of(Answer(429, {"retry-after": "12"}, b'{"error":"too_many_streams","detail":"limit"}'))
    assert isinstance(error, TooManyStreams)
    assert isinstance(error, Busy)
    assert error.retry_after == 12


@pytest.mark.parametrize(("status", "kind"), [(404, UnexpectedAnswer), (302, UnexpectedAnswer), (502, Unreachable)])
def test_an_answer_of_something_else_is_quoted_in_part(status: int, kind: type[MidstreamError]) -> None:
    error = error_of(Answer(status, {}, b"<html>" + b"x" * 5000))
    assert type(error) is kind
    assert str(error).startswith(f"status {status}: <html>xx")
    assert len(str(error)) < 300


@pytest.mark.parametrize("body", [b"", b"[]", b"<html>", b'"text"'])
def test_a_200_that_is_no_object_is_not_a_gateways(body: bytes) -> None:
    with pytest.raises(UnexpectedAnswer, match="Midstream gateway"):
        object_in(Answer(200, {}, body))


@pytest.mark.parametrize(
    ("heartbeat", "seconds"),
    [("15", 45.0), ("0.5", 1.5), (None, 45.0), ("", 45.0), ("0", 45.0), ("-3", 45.0), ("nan", 45.0), ("1e9", 45.0)],
)
def test_silence_is_three_heartbeats_and_nonsense_is_the_default(heartbeat: str | None, seconds: float) -> None:
    assert silence({} if heartbeat is None else {"midstream-heartbeat": heartbeat}) == seconds
