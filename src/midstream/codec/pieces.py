"""What a token record says, taken apart in the order in which it is read: reasoning, text, refusal, tool calls.

The fold adds it up and renderings show it; both take it apart here, so that what one counts is what the other shows.
Producers put into a record what they like: nothing in it raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import orjson

from midstream.records import ToolCall

REASONING: Final = "reasoning"
TEXT: Final = "text"
REFUSAL: Final = "refusal"
CALL: Final = "call"

_FIELDS: Final = ((REASONING, "reasoning"), (TEXT, "delta"), (REFUSAL, "refusal"))
# What a tool call's delta says that the fold has a field for; the rest goes into `more`.
_CALL_FIELDS: Final = frozenset({"index", "id", "type", "function"})


class Piece(NamedTuple):
    """A delta of one kind.  `logprobs` (of text alone) are entries as the upstream sent them, `call` a raw delta."""

    kind: str
    text: str
    logprobs: list[Any] = []  # noqa: RUF012  # never changed
    call: dict[str, Any] = {}  # noqa: RUF012  # never changed


def choice_of(data: Mapping[str, Any]) -> int:
    """Which choice the record is about."""
    index = data.get("choice", 0)
    return index if type(index) is int else 0


def pieces(data: Mapping[str, Any]) -> Iterator[Piece]:
    """Its deltas that say something.

    Text that is empty does where it has logprobs: a token can be a part of a character.
    """
    for kind, field in _FIELDS:
        text = text_of(data.get(field))
        logprobs = _entries(data.get("logprobs")) if kind == TEXT else []
        if text or logprobs:
            yield Piece(kind, text, logprobs)
    calls = data.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict):
            yield Piece(CALL, _arguments(call), call=call)


def merge_call(calls: list[ToolCall], piece: Piece) -> int:
    """Merge a tool-call delta and return the call's place among the calls of its choice.

    Some servers give every parallel call index 0: a delta with an id belongs to the call of that id at its index or
    begins a new one, and one without an id belongs to the newest call at its index.
    """
    delta = piece.call
    index, call_id, function = delta.get("index"), text_of(delta.get("id")), delta.get("function")
    position = index if isinstance(index, int) else 0
    place = _place_of(calls, position, call_id)
    if place is None:
        calls.append(ToolCall(position, id=call_id))
        place = len(calls) - 1
    call = calls[place]
    if call_id and not call.id:
        call.id, call.late = call_id, True
    call.type = text_of(delta.get("type")) or call.type
    if isinstance(function, dict):
        call.name = text_of(function.get("name")) or call.name
    call.arguments += piece.text.encode()
    call.deltas += bool(piece.text)
    if more := {name: value for name, value in delta.items() if name not in _CALL_FIELDS}:
        call.more = (call.more or {}) | more
    return place


def text_of(value: Any) -> str:
    """The value if it is text, else none."""
    return value if isinstance(value, str) else ""


def as_object(value: Any) -> dict[str, Any]:
    """The value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def json_list(entries: bytes | bytearray) -> orjson.Fragment:
    """Entries that each have a comma before them, as the fold keeps logprobs, for orjson."""
    return orjson.Fragment(b"".join((b"[", entries[1:], b"]")))


def _arguments(call: dict[str, Any]) -> str:
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, dict) else None
    return orjson.dumps(arguments).decode() if isinstance(arguments, dict) else text_of(arguments)


def _entries(logprobs: Any) -> list[Any]:
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    return [entry for entry in content if isinstance(entry, dict)] if isinstance(content, list) else []


def _place_of(calls: list[ToolCall], position: int, call_id: str) -> int | None:
    """Where the call is that a delta goes on with; None when it begins one."""
    newest = True
    for place in reversed(range(len(calls))):
        call = calls[place]
        if call.position != position:
            continue
        if call.id == call_id or (newest and not (call_id and call.id)):
            return place
        newest = False
    return None
