"""Valid Unicode out of what JSON allows: escapes may name half a surrogate pair (RFC 8259, section 8.2).

Half a pair at the end of a delta waits for its other half in the next one; a lone half becomes U+FFFD.  So every store
and transport carries the same characters.
"""

from __future__ import annotations

from typing import Any

from midstream.records import Chunk

_FIELDS = ("reasoning", "refusal")


def whole(text: str) -> str:
    """Join escaped pairs and replace what stays alone."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class Mender:
    """Mends the texts of one stream.  `pending` while half a pair is waiting."""

    __slots__ = ("_halves",)

    def __init__(self) -> None:
        # By choice, field and index of the call: the half, and the id of the call where its delta named one.
        self._halves: dict[tuple[int, str, int], tuple[str, str]] = {}

    @property
    def pending(self) -> bool:
        """Whether half a pair is waiting."""
        return bool(self._halves)

    def mend(self, chunk: Chunk) -> Chunk | None:
        """The chunk with valid texts; None when all it said is held back."""
        more = chunk.more
        choice = more.get("choice", 0) if more else 0
        delta = self._take((choice, "delta", 0), chunk.delta)
        if more is not None:
            more = {name: self._value(choice, name, value) for name, value in more.items()}
            more = {name: value for name, value in more.items() if not (name in _FIELDS and value == "")}
        if not delta and not (more and more.keys() - {"choice"}):
            return None
        return Chunk(delta, more)

    def _value(self, choice: int, name: str, value: Any) -> Any:
        if name in _FIELDS and isinstance(value, str):
            return self._take((choice, name, 0), value)
        if name == "tool_calls" and isinstance(value, list):
            return [mended for call in value for mended in self._call(choice, call)]
        return _deep(value)

    def _call(self, choice: int, call: Any) -> list[Any]:
        """The delta, after the lost half of the call before it where both have the same index."""
        if not isinstance(call, dict):
            return [_deep(call)]
        index, call_id = call.get("index"), call.get("id")
        key = (choice, "call", index if isinstance(index, int) else 0)
        before = []
        if call_id and key in self._halves and self._halves[key][1] != call_id:
            del self._halves[key]
            before = [_lone(key[2])]
        function, mended = call.get("function"), _deep(call)
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            mended["function"]["arguments"] = self._take(key, function["arguments"], call_id)
        return [*before, mended]

    def _take(self, key: tuple[int, str, int], text: str, call_id: Any = "") -> str:
        half, half_id = self._halves.pop(key, ("", ""))
        text = half + text
        if text and "\ud800" <= text[-1] <= "\udbff":
            self._halves[key] = (text[-1], call_id or half_id)
            text = text[:-1]
        return whole(text)

    def rest(self) -> list[Chunk]:
        """At the end: halves that never met their other half."""
        chunks = []
        for choice, name, index in self._halves:
            more: dict[str, Any] = {"choice": choice} if choice else {}
            if name == "delta":
                chunks.append(Chunk("\ufffd", more or None))
            elif name in _FIELDS:
                chunks.append(Chunk("", {name: "\ufffd", **more}))
            else:
                chunks.append(Chunk("", {"tool_calls": [_lone(index)], **more}))
        self._halves.clear()
        return chunks


def _lone(index: int) -> dict[str, Any]:
    """What is left of a half pair in the arguments of the newest call at this index."""
    return {"index": index, "function": {"arguments": "\ufffd"}}


def _deep(value: Any) -> Any:
    if isinstance(value, str):
        return whole(value)
    if isinstance(value, list):
        return [_deep(item) for item in value]
    if isinstance(value, dict):
        return {whole(name): _deep(item) for name, item in value.items()}
    return value
