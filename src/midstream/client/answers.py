"""What a gateway's answers mean to a client, and the errors that only a client meets.

MidstreamError
├── (all of midstream.errors)   what the gateway refused, as the class it was raised as there
├── Unreachable                 no usable answer to a call: refused, reset, timed out, 5xx
│   └── GaveUp                  the same for a stream, after all attempts; its cursor still resumes it
└── UnexpectedAnswer            an answer that the protocol does not allow; trying again is no help
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

import orjson

from midstream.errors import Busy, CursorAhead, CursorExpired, MidstreamError, ProducerFailed, WriterError
from midstream.wire import FAILURES, H_HEARTBEAT

# Silence is measured in heartbeats; a gateway that does not tell its own gets the protocol's default, in seconds.
DEFAULT_HEARTBEAT = 15.0
# One lost heartbeat is a hiccup, two are bad luck, three are a dead connection.
HEARTBEATS_MISSED = 3
# How much of an answer that is not a stream is read, in bytes.
MAX_ANSWER = 16 * 1024 * 1024
_QUOTED = 200  # characters of a foreign body that go into a message
_TITLE = re.compile(r"<title[^>]*>([^<]+)", re.IGNORECASE)


class Unreachable(MidstreamError):
    """No usable answer: connection refused or reset, timed out, or a 5xx that names no reason of ours."""

    code = "unreachable"
    action = "retry"


class GaveUp(Unreachable):
    """All attempts are used up and none brought a record.

    `attempts` in a row failed, the last one for `reason`.  `cursor` is the position's token, None where there is none.
    """

    code = "gave_up"

    def __init__(self, reason: str, attempts: int, cursor: str | None) -> None:
        times = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        super().__init__(f"gave up after {times} without progress: {reason}", attempts=attempts)
        self.reason = reason
        self.attempts = attempts
        self.cursor = cursor


class UnexpectedAnswer(MidstreamError):
    """Not an answer of this protocol: another server, a proxy in between, or a fault of the gateway."""

    code = "unexpected_answer"


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer's head, with header names in lower case.  `body` is empty for a stream, whole otherwise."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def is_stream(self) -> bool:
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        return self.status == 200 and kind == "text/event-stream"

    @property
    def worth_retrying(self) -> bool:
        """Whether the same request may well succeed later (RFC 9110, sections 15.5.9 and 15.6; RFC 6585, section 4)."""
        return self.status in (408, 429) or 500 <= self.status < 600


def error_of(answer: Answer) -> MidstreamError:
    """The error that an answer other than 2xx stands for: by its code, else by what can be said of its status."""
    fields = _fields(answer.body)
    code = fields.pop("error", None)
    if code == CursorExpired.code:
        oldest = fields.get("oldest_available")
        return CursorExpired(oldest if type(oldest) is int else None)
    if code == CursorAhead.code and type(highest := fields.get("highest_seq")) is int:
        return CursorAhead(highest)
    kind = _KINDS.get(code) if isinstance(code, str) else None
    detail = fields.pop("detail", "")
    if kind is None and code in FAILURES:  # the gateway could be asked; what it asked could not
        return ProducerFailed(str(code), str(detail))
    if kind is None:
        return _unnamed(answer, f"{code}: {detail}" if isinstance(code, str) else "")
    fields.pop("action", None)
    detail = detail if isinstance(detail, str) and detail else _PLAIN.get(kind.code, "")
    error = kind(detail)
    error.facts.update(fields)
    if isinstance(error, Busy):
        error.retry_after = int(retry_after(answer.headers) or 1)
    return error


def _unnamed(answer: Answer, told: str) -> MidstreamError:
    told = told or _quoted(answer)
    detail = f"status {answer.status}" + (f": {told}" if told else "")
    facts = {"status": answer.status}
    return Unreachable(detail, **facts) if answer.worth_retrying else UnexpectedAnswer(detail, **facts)


def _quoted(answer: Answer) -> str:
    """The beginning of a foreign body; of a page its title."""
    text = answer.body[: 20 * _QUOTED].decode("utf-8", "replace")
    title = _TITLE.search(text)
    return (title[1] if title is not None else text[: 4 * _QUOTED]).strip()[:_QUOTED]


def object_in(answer: Answer) -> dict[str, Any]:
    """The JSON object of a 200.  Raises UnexpectedAnswer when it holds something else, and the answer's own error."""
    if answer.status != 200:
        raise error_of(answer)
    try:
        fields = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        fields = None
    if not isinstance(fields, dict):
        raise UnexpectedAnswer("status 200 with something else than a JSON object: is this a Midstream gateway?")
    return fields


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return fields if isinstance(fields, dict) else {}


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait by `Retry-After` (RFC 9110, section 10.2.3), or None where it is absent or unreadable.

    A date counts from the answer's own `Date`, so that neither clock needs to be right; without one it tells nothing.
    """
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.isdecimal():
        return float(value[:9])
    try:
        until, now = parsedate_to_datetime(value), parsedate_to_datetime(headers.get("date", ""))
        return max(0.0, (until - now).total_seconds())
    except (ValueError, TypeError):  # TypeError: one date says its zone, the other does not
        return None


def silence(headers: Mapping[str, str]) -> float:
    """Seconds without a byte after which the connection counts as dropped."""
    try:
        heartbeat = float(headers.get(H_HEARTBEAT.lower(), ""))
    except ValueError:
        heartbeat = 0.0
    if not 0.0 < heartbeat < 86_400.0:
        heartbeat = DEFAULT_HEARTBEAT
    return HEARTBEATS_MISSED * heartbeat


def _named(kind: type[MidstreamError]) -> Iterator[type[MidstreamError]]:
    for child in kind.__subclasses__():
        # What never crosses the wire as an HTTP error, or takes other arguments.
        if not issubclass(child, (Unreachable, UnexpectedAnswer, ProducerFailed, WriterError)):
            yield child
            yield from _named(child)


_KINDS = {kind.code: kind for kind in _named(MidstreamError) if "code" in vars(kind)}
# These come as a bare code; people should be told more.
_PLAIN = {
    "unauthorized": "the gateway does not accept this key",
    "wrong_stream": "the cursor is of another stream",
    "unknown_stream": "no such stream: it never was, has expired, or belongs to another key",
}
