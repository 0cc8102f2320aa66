"""Errors in the shape that OpenAI's clients know."""

from __future__ import annotations

from typing import Any

import pytest

from midstream.codec.vendor import cancel_status, error_object, failure_object, failure_status
from midstream.errors import (
    BadRequest,
    CursorExpired,
    MidstreamError,
    ProducerFailed,
    ShuttingDown,
    TooManyStreams,
    Unauthorized,
    UnknownModel,
)
from midstream.wire import FAILURES


@pytest.mark.parametrize(
    ("error", "kind", "param", "code"),
    [
        (Unauthorized(), "invalid_request_error", None, "invalid_api_key"),
        (UnknownModel("no"), "invalid_request_error", "model", "model_not_found"),
        (BadRequest("no"), "invalid_request_error", None, "bad_request"),
        (BadRequest("no", param="n", reason="invalid_type"), "invalid_request_error", "n", "invalid_type"),
        (TooManyStreams("no"), "requests", None, "rate_limit_exceeded"),
        (ShuttingDown("no"), "server_error", None, "shutting_down"),
        (CursorExpired(7), "invalid_request_error", None, "cursor_expired"),
        (MidstreamError("no"), "server_error", None, "internal_error"),
        (ProducerFailed("upstream_unreachable", "no"), "server_error", None, "upstream_unreachable"),
    ],
)
def test_our_errors(error: MidstreamError, kind: str, param: str | None, code: str) -> None:
    """All four fields, always, and something for people to read."""
    said = error_object(error)
    assert list(said) == ["message", "type", "param", "code"]
    assert (said["type"], said["param"], said["code"]) == (kind, param, code)
    assert said["message"]


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (
            {"status": 400, "upstream": {"type": "invalid_request_error", "param": "messages", "code": "too_long"}},
            400,
            {"type": "invalid_request_error", "param": "messages", "code": "too_long"},
        ),
        (
            {"status": 400, "upstream": {"type": "BadRequestError"}},
            400,
            {"type": "BadRequestError", "param": None, "code": None},
        ),
        ({"status": 429}, 429, {"type": "rate_limit_error", "param": None, "code": "upstream_error"}),
        ({"status": 401}, 401, {"type": "authentication_error", "param": None, "code": "upstream_error"}),
        ({"status": 307}, 502, {"type": "server_error", "param": None, "code": "upstream_error"}),
        ({"status": "400"}, 502, {"type": "server_error", "param": None, "code": "upstream_error"}),
        ({"upstream": "odd"}, 502, {"type": "server_error", "param": None, "code": "upstream_error"}),
    ],
)
def test_the_upstreams_own_words(error: dict[str, Any], status: int, said: dict[str, Any]) -> None:
    """Its status where it is one of an error, its type, param and code where it had them."""
    whole = {"code": "upstream_error", "message": "its words"} | error
    assert failure_status(whole) == status
    assert failure_object(whole) == {"message": "its words"} | said


@pytest.mark.parametrize("code", FAILURES)
def test_every_failure_is_an_error_of_the_server(code: str) -> None:
    """A status of 4xx would say that the request was at fault."""
    assert 500 <= failure_status({"code": code, "status": 400 if code != "upstream_error" else None}) < 600


def test_a_cancelled_answer_is_repeated_only_after_a_shutdown() -> None:
    assert (cancel_status("client"), cancel_status("abandoned"), cancel_status("shutdown")) == (409, 409, 503)
