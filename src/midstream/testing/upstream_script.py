"""What a misbehaving upstream says: scripts, the steps in them, and well-formed events to build them from.

A script is a list of steps, taken in order, for one request. `Event` and `Comment` are rendered in the
script's dialect of server-sent events (line ending, space after the colon); `Send` puts its bytes into the
body as they are; `Raw` puts them on the wire outside the body's framing. So a script can lie at any byte:

    Script([chat_event("Hel"), chat_event("lo"), CloseDirty()])  # cut in the middle, no chunked terminator
    Script([Head(), Pause(told), *chat_answer("late")], newline="\\r")  # headers at once, the rest when told
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile("[\ud800-\udfff]")

Headers = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Send:
    """Bytes of the body, written `times` times, each time as one write (and, if chunked, one chunk)."""

    data: bytes
    times: int = 1


@dataclass(frozen=True, slots=True)
class Event:
    """A server-sent event. Line breaks in `data` become several `data` lines (WHATWG HTML, section 9.2)."""

    data: str
    event: str | None = None

    def encode(self, newline: str = "\n", *, space: bool = True) -> bytes:
        """The event with its blank line, in UTF-8."""
        colon = ": " if space else ":"
        lines = [f"event{colon}{self.event}"] if self.event is not None else []
        lines += [f"data{colon}{line}" for line in self.data.split("\n")]
        return (newline.join(lines) + newline * 2).encode()


@dataclass(frozen=True, slots=True)
class Comment:
    """A comment block, which servers send to keep a connection alive: a colon, the text and a blank line."""

    text: str = ""


@dataclass(frozen=True, slots=True)
class Raw:
    """Bytes on the wire as they are, outside head and framing; they do not make the head go out."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Head:
    """Status line and headers now. Without this step a 200 goes out before the first byte of the body."""

    status: int = 200
    headers: Headers = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Status:
    """A whole answer with a true Content-Length, of JSON unless `headers` says otherwise. Ends the script."""

    status: int
    headers: Headers = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Pause:
    """Silence, until an event is set or for a number of seconds."""

    until: asyncio.Event | float


@dataclass(frozen=True, slots=True)
class Stall:
    """Silence with the connection open, until the client leaves or the upstream is stopped."""


@dataclass(frozen=True, slots=True)
class Reset:
    """Connection reset (RST). A client may lose what it has not read: put a Pause before if it must not."""


@dataclass(frozen=True, slots=True)
class CloseClean:
    """The answer's proper end, by its framing: terminator, full length or FIN. Implied after all steps."""


@dataclass(frozen=True, slots=True)
class CloseDirty:
    """FIN without the framing's end."""


Step = Send | Event | Comment | Raw | Head | Status | Pause | Stall | Reset | CloseClean | CloseDirty
Framing = Literal["chunked", "length", "close"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What is answered to one request.

    steps         in order; a `CloseClean` is implied after the last
    content_type  of the head; None sends no such header
    headers       further headers of every head; they may contradict those that the framing sends
    framing       `chunked`, `length` (a Content-Length over all steps) or `close` (the FIN ends the body)
    length_lie    bytes added to the true Content-Length; when not 0 the connection closes after the answer
    gzip          the body (a Status' too) is compressed and says so; each step is flushed to the client
    split         at most this many bytes per write; without Nagle's delay each is a TCP segment of its own
    newline       line ending of Event and Comment
    space         whether Event puts a space after the colon
    bom           a byte order mark before the body
    """

    steps: Sequence[Step] = field(kw_only=False)
    content_type: str | None = "text/event-stream; charset=utf-8"
    headers: Headers = field(default_factory=dict)
    framing: Framing = "chunked"
    length_lie: int = 0
    gzip: bool = False
    split: int | None = None
    newline: Literal["\n", "\r\n", "\r"] = "\n"
    space: bool = True
    bom: bool = False

    def pieces(self, step: Step) -> Iterator[bytes]:
        """The writes of the body that `step` makes, before compression and framing."""
        match step:
            case Send(data, times):
                yield from (data for _ in range(times))
            case Event():
                yield step.encode(self.newline, space=self.space)
            case Comment(text):
                yield f":{text}{self.newline * 2}".encode()

    def body(self) -> bytes:
        """All bytes of the body in one, before compression and framing: what a decoder is to be fed."""
        parts = (piece for step in self.steps for piece in self.pieces(step))
        return (BOM if self.bom else b"") + b"".join(parts)


def _json(payload: object) -> str:
    """Compact JSON in plain characters, so that they can be cut; half a surrogate pair must be escaped."""
    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def json_event(payload: object, event: str | None = None) -> Event:
    """An event with any JSON as data; infinities and NaN are written as Python (and careless servers) do."""
    return Event(_json(payload), event)


def chat_event(
    delta: str | Mapping[str, object] | None = None,
    *,
    choice: int = 0,
    finish_reason: str | None = None,
    usage: Mapping[str, object] | None = None,
    logprobs: object = None,
    **extra: object,
) -> Event:
    """A `chat.completion.chunk`. A string is its content; `extra` sets or replaces fields of the envelope
    (`choices=[]` for the chunk that only carries usage)."""
    content = {"content": delta} if isinstance(delta, str) else dict(delta or {})
    said: dict[str, object] = {"index": choice, "delta": content, "finish_reason": finish_reason}
    return _chunk("chatcmpl-1", "chat.completion.chunk", said, logprobs, usage, extra)


def completion_event(
    text: str = "",
    *,
    choice: int = 0,
    finish_reason: str | None = None,
    usage: Mapping[str, object] | None = None,
    logprobs: object = None,
    **extra: object,
) -> Event:
    """A `text_completion` chunk, as `/v1/completions` streams them; the rest as in `chat_event`."""
    said: dict[str, object] = {"index": choice, "text": text, "finish_reason": finish_reason}
    return _chunk("cmpl-1", "text_completion", said, logprobs, usage, extra)


def _chunk(
    chunk_id: str,
    kind: str,
    choice: dict[str, object],
    logprobs: object,
    usage: Mapping[str, object] | None,
    extra: Mapping[str, object],
) -> Event:
    if logprobs is not None:
        choice["logprobs"] = logprobs
    chunk: dict[str, object] = {"id": chunk_id, "object": kind, "created": 1_700_000_000, "model": "scripted"}
    chunk["choices"] = [choice]
    if usage is not None:
        chunk["usage"] = usage
    return json_event({**chunk, **extra})


DONE = Event("[DONE]")
ROLE = chat_event({"role": "assistant", "content": ""})


def chat_answer(*deltas: str, finish_reason: str = "stop") -> list[Step]:
    """A whole, well-formed chat answer: role, one chunk for each delta, finish, [DONE]."""
    return [ROLE, *map(chat_event, deltas), chat_event(finish_reason=finish_reason), DONE]


def completion_answer(*texts: str, finish_reason: str = "stop") -> list[Step]:
    """A whole, well-formed answer of `/v1/completions`."""
    return [*map(completion_event, texts), completion_event(finish_reason=finish_reason), DONE]


def redirect(location: str, status: int = 307) -> Script:
    """A script that sends the client elsewhere, where its key must not follow."""
    return Script([Status(status, {"Location": location})])


def error_body(message: str, kind: str = "invalid_request_error", code: str | int | None = None) -> bytes:
    """An OpenAI-shaped error of type `kind`, as a body for `Status`."""
    return _json({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
