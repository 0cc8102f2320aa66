"""What went wrong at an upstream: its own errors, whatever shape they come in, and what of it could not be read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import orjson

from midstream.codec.text import whole
from midstream.errors import ProducerFailed
from midstream.wire import UPSTREAM_RETRYABLE

_MESSAGE_CHARS: Final = 2000
_SHOWN_BYTES: Final = 80


def malformed(message: str, data: bytes | None = None) -> ProducerFailed:
    """What the upstream sent cannot be read, and to skip it would leave a gap nobody can see.

    The message ends with the beginning of `data`, for people.
    """
    return ProducerFailed("upstream_malformed", message if data is None else f"{message}: {_shown(data)}")


def upstream_error(error: Any, status: int | None = None) -> ProducerFailed:
    """The upstream's own word that it failed: an error object or a text, with the HTTP `status` it came with, if any.

    Facts: `status` (that, or the one in the object), and `upstream` with the error's other fields as they were.
    """
    fields = error if isinstance(error, dict) else {}
    message = error if isinstance(error, str) else _message_of(fields)
    facts: dict[str, Any] = {}
    if status is None:
        status = _status_in(fields)
    if status is not None:
        facts["status"] = status
    kept = {name: fields.get(name) for name in ("type", "code", "param")}
    if kept := {name: _short(said) for name, said in kept.items() if said not in (None, "", [], {})}:
        facts["upstream"] = kept
    retryable = status in UPSTREAM_RETRYABLE
    return ProducerFailed("upstream_error", _short(message) or _no_message(status), retryable=retryable, **facts)


def error_in(text: bytes, status: int | None = None) -> ProducerFailed:
    """The error that an answer tells whose `status` is not 200, or an event of that name.

    In OpenAI's shape, as FastAPI's `detail`, or whatever text it is.
    """
    text = text.strip()
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = None
    if isinstance(value, dict):
        return upstream_error(value.get("error") or value, status)
    return upstream_error(value if isinstance(value, str) else text.decode("utf-8", "replace"), status)


def _message_of(fields: dict[str, Any]) -> str:
    for name in ("message", "msg", "detail", "error"):
        if isinstance(said := fields.get(name), str) and said:
            return said
    return _written(json.dumps, fields) if fields else ""


def _no_message(status: int | None) -> str:
    return "the upstream failed without a message" + (f" (status {status})" if status else "")


def _short(said: Any) -> Any:
    """A number as it is; anything else as valid text of a bounded length."""
    return said if type(said) is int and abs(said) < 2**53 else whole(_written(str, said)[:_MESSAGE_CHARS])


def _written(how: Callable[[Any], str], said: Any) -> str:
    """orjson reads deeper nesting than Python writes."""
    try:
        return how(said)
    except RecursionError:
        return "(nested too deep to be told)"


def _status_in(fields: dict[str, Any]) -> int | None:
    for name in ("code", "status", "status_code"):
        said = fields.get(name)
        if isinstance(said, str) and said.isascii() and said.isdigit() and len(said) == 3:
            said = int(said)
        if type(said) is int and 400 <= said <= 599:
            return said
    return None


def _shown(data: bytes) -> str:
    return repr(data[:_SHOWN_BYTES].decode("utf-8", "replace")) + ("…" if len(data) > _SHOWN_BYTES else "")
