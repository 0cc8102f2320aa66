"""Errors as OpenAI shapes them: `{"error": {"message", "type", "param", "code"}}`, before a stream and inside one.

One table says what each of our errors is called there; a failure of the upstream keeps the upstream's own words.
"""

from __future__ import annotations

from typing import Any, Final

from midstream.codec.pieces import as_object
from midstream.errors import BadRequest, MidstreamError, ProducerFailed, Unauthorized, UnknownModel
from midstream.wire import CANCELLED, HTTP_STATUS

_INVALID: Final = "invalid_request_error"
_SERVER: Final = "server_error"

# Our code -> OpenAI's type and code, where OpenAI has a code of its own for it.
_NAMES: Final[dict[str, tuple[str, str]]] = {
    "unauthorized": (_INVALID, "invalid_api_key"),
    "unknown_model": (_INVALID, "model_not_found"),
    "too_many_streams": ("requests", "rate_limit_exceeded"),
    "out_of_space": ("requests", "rate_limit_exceeded"),
}
# Why a generation failed -> HTTP status (RFC 9110, section 15.6), where nothing of the answer is out yet.
_FAILURE_STATUS: Final[dict[str, int]] = {
    "upstream_timeout": 504,
    "store_unavailable": 503,
    "store_lost": 500,
    "writer_lost": 500,
    "producer_error": 500,
    CANCELLED: 409,
    "shutdown": 503,
}
_BAD_GATEWAY: Final = 502
# What OpenAI calls errors of these statuses, for upstreams that give theirs no type.
_TYPES: Final[dict[int, str]] = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_object(error: MidstreamError) -> dict[str, Any]:
    """One of our errors: `message`, `type`, `param` and `code`."""
    if isinstance(error, ProducerFailed):
        return failure_object({"code": error.failure, "message": error.detail} | error.facts)
    default = _INVALID if HTTP_STATUS.get(error.code, 500) < 500 else _SERVER
    kind, code = _NAMES.get(error.code, (default, error.code))
    param = None
    if isinstance(error, BadRequest):
        param, code = error.param, error.reason or code
    elif isinstance(error, UnknownModel):
        param = "model"
    message = error.detail or ("Incorrect API key provided" if isinstance(error, Unauthorized) else str(error))
    return {"message": message, "type": kind, "param": param, "code": code}


def failure_object(error: dict[str, Any]) -> dict[str, Any]:
    """The `error` of a `failed` record; what the upstream called it, if it did."""
    theirs = as_object(error.get("upstream"))
    status = failure_status(error)
    kind = theirs.get("type") or (_SERVER if status >= 500 else _TYPES.get(status, _INVALID))
    code = theirs.get("code") if theirs else error.get("code")
    return {"message": str(error.get("message")), "type": kind, "param": theirs.get("param"), "code": code}


def cancel_object(reason: Any) -> dict[str, Any]:
    """The end of a stream that was stopped: `client`, `abandoned` or `shutdown`."""
    return {"message": f"the answer was cancelled ({reason})", "type": _SERVER, "param": None, "code": CANCELLED}


def failure_status(error: dict[str, Any]) -> int:
    """The HTTP status of a failure: the upstream's own where it is one of an error."""
    status = error.get("status")
    if error.get("code") == "upstream_error" and type(status) is int and 400 <= status <= 599:
        return status
    return _FAILURE_STATUS.get(str(error.get("code")), _BAD_GATEWAY)


def cancel_status(reason: Any) -> int:
    """The HTTP status of an answer that was stopped before anything of it was out."""
    return _FAILURE_STATUS["shutdown" if reason == "shutdown" else CANCELLED]
