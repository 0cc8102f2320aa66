"""Items and parts of a response, as they are told while they are open and once they are not."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

import orjson

from midstream.codec.pieces import REASONING, REFUSAL, TEXT, json_list, text_of

_Made = TypeVar("_Made")
_dumps = orjson.dumps
_next_value = json.JSONDecoder().raw_decode
# OpenAI's own for a token of no likelihood; minus infinity is no JSON.
_UNLIKELY: Final = -9999.0


class Family(NamedTuple):
    """How a kind of text is called: its events, its field, and the parts it is in."""

    events: str
    field: str
    parts: str
    place: str
    part: str
    item: str


MESSAGE: Final = "message"
FAMILIES: Final = {
    TEXT: Family("response.output_text", "text", "response.content_part", "content_index", "output_text", MESSAGE),
    REFUSAL: Family("response.refusal", "refusal", "response.content_part", "content_index", "refusal", MESSAGE),
    REASONING: Family(
        "response.reasoning_text", "text", "response.content_part", "content_index", "reasoning_text", REASONING
    ),
}
SUMMARY: Final = Family(
    "response.reasoning_summary_text",
    "text",
    "response.reasoning_summary_part",
    "summary_index",
    "summary_text",
    REASONING,
)
SUMMARIES: Final = FAMILIES | {REASONING: SUMMARY}


@dataclass(slots=True)
class Item:
    """A message or a reasoning item that is open; `parts` are those that are not any more, as JSON.

    `summary`: its reasoning is told as a summary.
    """

    kind: str
    id: str
    at: int
    summary: bool
    parts: list[bytes] = field(default_factory=list)

    def json(self, status: str, part: OpenPart | None = None) -> bytes:
        """With the part that is still open, if any."""
        parts = [*self.parts, part.json()] if part is not None else self.parts
        said = orjson.Fragment(b"[%b]" % b",".join(parts))
        told: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == MESSAGE:
            told |= {"role": "assistant", "content": said}
        else:
            told |= {"summary": said, "content": []} if self.summary else {"summary": [], "content": said}
        return _dumps(told)


class Shared:
    """What the readers of one response hold in common: it is the same for all of them, and made by the first.

    Each has to hold what the response says, since its last events tell all of it: apart, hundreds would fill memory.
    """

    __slots__ = ("__weakref__", "_made", "_texts")

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}
        self._texts: dict[Hashable, bytearray] = {}

    def once(self, key: Hashable, make: Callable[[], _Made]) -> _Made:
        """What is made of it under this key, by whoever asks first."""
        if key not in self._made:
            self._made[key] = make()
        made: _Made = self._made[key]
        return made

    def text(self, key: Hashable) -> Text:
        """A text under this key, as one reader has it."""
        return Text(self._texts.setdefault(key, bytearray()))


@dataclass(slots=True)
class Text:
    """As much of a text that grows as one reader has been told: the first `size` bytes of what the furthest has."""

    common: bytearray
    size: int = 0

    def add(self, more: bytes) -> None:
        end, known = self.size + len(more), len(self.common)
        if end > known:
            self.common += more[known - self.size :]
        self.size = end

    def told(self) -> bytes:
        return bytes(memoryview(self.common)[: self.size])


@dataclass(slots=True)
class OpenPart:
    """The part that is open: its text as the inside of a JSON string, its logprobs as JSON, with a comma before each.

    `delta` is a template of its events.
    """

    kind: str
    family: Family
    where: dict[str, Any]
    delta: bytes
    text: Text
    logprobs: Text

    def said(self) -> dict[str, Any]:
        """Its text under the name that its family has for it, and its logprobs, for orjson."""
        said = {self.family.field: orjson.Fragment(b'"%b"' % self.text.told())}
        if self.kind == TEXT:
            said["logprobs"] = json_list(self.logprobs.told())
        return said

    def json(self) -> bytes:
        annotations: dict[str, Any] = {"annotations": []} if self.kind == TEXT else {}
        return _dumps({"type": self.family.part} | annotations | self.said())


def delta_template(kind: str, family: Family, where: dict[str, Any]) -> bytes:
    """A template of the delta's event: its number, its text as JSON, and for text its logprobs."""
    event = f"{family.events}.delta".encode()
    logprobs = b',"logprobs":%b' if kind == TEXT else b""
    return b'event: %b\ndata: {"type":"%b","sequence_number":%%d,%b,"delta":%%b%b}\n\n' % (
        event,
        event,
        _dumps(where)[1:-1],
        logprobs,
    )


def entries_of(raw: bytes | bytearray) -> Iterator[dict[str, Any]]:
    """Entries that each have a comma before them, one at a time: all at once they take twenty times the memory."""
    text, at = raw.decode(), 0
    while at < len(text):
        entry, at = _next_value(text, at + 1)
        yield entry


def logprobs_json(entries: Iterable[dict[str, Any]]) -> bytes:
    """JSON, each with a comma before it."""
    return b"".join(b"," + _dumps(_logprob(entry)) for entry in entries)


def _logprob(entry: dict[str, Any]) -> dict[str, Any]:
    top = entry.get("top_logprobs")
    likely = [_token(other) for other in top if isinstance(other, dict)] if isinstance(top, list) else []
    return {**_token(entry), "top_logprobs": likely}


def _token(entry: dict[str, Any]) -> dict[str, Any]:
    logprob, raw = entry.get("logprob"), entry.get("bytes")
    return {
        "token": text_of(entry.get("token")),
        "logprob": logprob if isinstance(logprob, int | float) else _UNLIKELY,
        "bytes": raw if isinstance(raw, list) else [],
    }
