"""Records as the chunks of OpenAI's chat and text completions (PROTOCOL.md, "OpenAI").

    start              the role of the first choice (chat only; another choice's comes with its first record)
    token              one chunk
    done               the chunk with the finish_reason, the usage if asked for, [DONE]
    failed, cancelled  an error object, at which the official clients raise; no [DONE]

Only the last event of a record has an id, the record's seq: who was cut off inside a record asks for all of it again.
What is rendered is a function of the records and of what is kept of the first request, so that every replica renders
alike, whenever and from wherever: id, created and model of the envelope are the stream's, and what the upstream said in
their place stands under `upstream` in the chunk that brought it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import orjson

from midstream.codec.openai import MAX_PARTS
from midstream.codec.pieces import as_object, choice_of
from midstream.codec.vendor import cancel_object, failure_object
from midstream.records import Frame, Record, StreamMeta
from midstream.wire import CANCELLED, COMPLETIONS_PATH, DONE, FAILED, START

_dumps = orjson.dumps

# Between the two places of a token's seq, and between the second one and its text (see `codec.native`).
_TOKEN: Final = b'\nevent: token\ndata: {"seq":'
_DELTA: Final = b',"delta":"'
_AFTER_TEXT: Final = b',"done":false}\n\n'
_BEFORE: Final = len(_TOKEN) + len(_DELTA)
_AFTER: Final = len(_AFTER_TEXT)
_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*"')
_CHOICE: Final = re.compile(rb'"choice":([0-9]{1,9})')

# Fields of the envelope that are ours to fill.
_OURS: Final = frozenset({"id", "object", "created", "model", "choices", "usage", "error", "upstream"})
# A delta's field -> its field in a record, where the two differ.
_OF_RECORD: Final = {"reasoning_content": "reasoning", "refusal": "refusal", "tool_calls": "tool_calls"}
_USAGE_FROM: Final = "usage_from_seq"


class Style:
    """What is to be known of a stream beside its records: route and options of its first request.

    `envelope` begins every object of it; `choices` is how many were asked for, up to what any upstream may answer.
    """

    __slots__ = ("choices", "envelope", "text", "usage")

    def __init__(self, meta: StreamMeta) -> None:
        kept = as_object(orjson.loads(meta.request))
        body = as_object(kept.get("body"))
        asked = body.get("n")
        self.text = kept.get("route") == COMPLETIONS_PATH
        self.usage = as_object(body.get("stream_options")).get("include_usage") is True
        self.choices = min(asked, MAX_PARTS) if type(asked) is int else 1
        self.envelope: dict[str, Any] = {
            "id": ("cmpl-" if self.text else "chatcmpl-") + meta.stream_id,
            "object": "text_completion" if self.text else "chat.completion.chunk",
            "created": int(meta.created_at),
            "model": meta.model,
        }


class ChatEvents:
    """Renders one reader's records, in order.  `begun`: choices that had a record before the reader's position."""

    __slots__ = ("_after", "_before", "_begun", "_style")

    def __init__(self, style: Style, begun: Iterable[int] = ()) -> None:
        self._style = style
        self._begun = set(begun)
        # The event of a record that is text alone, but for its id line and its text: cut out of the slow way's.
        event = self._slowly(b'id: 2%bdata: {"seq":2,"delta":"","done":false}\n\n' % b"\nevent: token\n")
        before, _, after = event.rpartition(b'""')  # the last one: a model's name may end in a quote
        self._before, self._after = before.removeprefix(b"id: 2\n"), after

    def render(self, frames: Iterable[Frame]) -> bytes:
        """The events of these records."""
        parts: list[bytes] = []
        for frame in frames:
            text = plain_text(frame)
            if text is None:
                parts.append(self._slowly(frame))
            else:
                parts += (frame[: frame.index(b"\n") + 1], self._before, text, self._after)
        return b"".join(parts)

    def error(self, error: dict[str, Any]) -> bytes:
        """An error object as the last words of a connection: without an id, which would be a position."""
        return b"data: %b\n\n" % _dumps({"error": error})

    def _slowly(self, frame: Frame) -> bytes:
        record = Record.of(frame)
        events = [_dumps(event) for event in self._events(record.event, record.json())]
        if record.event == DONE:
            events.append(b"[DONE]")
        if not events:
            return b""
        return b"".join([b"data: %b\n\n" % data for data in events[:-1]]) + b"id: %d\ndata: %b\n\n" % (
            record.seq,
            events[-1],
        )

    def _events(self, event: str, data: dict[str, Any]) -> list[dict[str, Any]]:
        if event == FAILED:
            return [{"error": failure_object(as_object(data.get("error")))}]
        if event == CANCELLED:
            return [{"error": cancel_object(data.get("reason"))}]
        if event == DONE:
            return self._ending(data)
        if event == START:
            return [] if self._style.text else [self._role(0)]
        index = choice_of(data)
        return [*self._first(index), self._chunk(data, _choice(index, data, text=self._style.text))]

    def _first(self, index: int) -> list[dict[str, Any]]:
        """The role of a choice that was asked for beside the first, with its first record."""
        if self._style.text or not 0 < index < self._style.choices or index in self._begun:
            return []
        self._begun.add(index)
        return [self._role(index)]

    def _role(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return self._chunk({}, {"index": index, "delta": delta, "finish_reason": None})

    def _chunk(self, data: dict[str, Any], *choices: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._style.envelope, "choices": list(choices)}
        if self._style.usage:
            chunk["usage"] = None
        chunk |= beside(as_object(as_object(data.get("upstream")).get("chunk")))
        if (seam := data.get("seam")) is not None:
            chunk["seam"] = seam
        return chunk

    def _ending(self, data: dict[str, Any]) -> list[dict[str, Any]]:
        events = []
        upstream = as_object(data.get("upstream"))
        if data.get("finish_reason") is not None or upstream.keys() & {"choice", "delta"}:
            events.append(self._chunk(data, _choice(0, data, text=self._style.text)))
        elif upstream:
            events.append(self._chunk(data))
        usage = data.get("usage")
        if self._style.usage and usage is not None:
            asked_from = {_USAGE_FROM: data[_USAGE_FROM]} if _USAGE_FROM in data else {}
            events.append(self._chunk({}) | {"usage": usage} | asked_from)
        return events


def plain_text(frame: Frame) -> bytes | None:
    """The JSON string of a token that is text of the first choice and nothing else; None for any other record.

    Cut out, not parsed: the frame's layout is fixed, and its text ends where its only string does.
    """
    seq = frame.index(b"\n")
    if not frame.startswith(_TOKEN, seq):
        return None
    start = 2 * seq + _BEFORE - 5  # the digits of the seq stand there a second time
    end = len(frame) - _AFTER
    if not frame.startswith(_DELTA, start + 1 - len(_DELTA)) or not frame.endswith(_AFTER_TEXT):
        return None
    if frame.find(b'"', start + 1) == end - 1 or _STRING.fullmatch(frame, start, end):
        return frame[start:end]
    return None


def _choice(index: int, data: dict[str, Any], *, text: bool) -> dict[str, Any]:
    """The choice that a record speaks of, with everything the upstream said in and beside its delta."""
    upstream = as_object(data.get("upstream"))
    delta: dict[str, Any] = {}
    if data.get("delta"):
        delta["content"] = data["delta"]
    for theirs, ours in _OF_RECORD.items():
        if ours in data:
            delta[theirs] = data[ours]
    delta |= as_object(upstream.get("delta"))
    finish, done = data.get("finish_reason"), data.get("done", True)
    if not delta and finish is None and not done:
        delta["content"] = ""
    choice: dict[str, Any] = {"index": index}
    if text:
        choice |= {"text": delta.pop("content", "")} | delta
    else:
        choice["delta"] = delta
    if "logprobs" in data:
        choice["logprobs"] = data["logprobs"]
    choice["finish_reason"] = finish
    return {**as_object(upstream.get("choice")), **choice}


def beside(chunk: dict[str, Any]) -> dict[str, Any]:
    """What the upstream said in its envelope; what it said where we have words of our own, under `upstream`."""
    fields = {name: value for name, value in chunk.items() if name not in _OURS}
    theirs = {name: value for name, value in chunk.items() if name in _OURS}
    return fields | ({"upstream": theirs} if theirs else {})


def choices_in(frames: Iterable[Frame]) -> set[int]:
    """The choices, beside the first, of which these records speak."""
    found: set[int] = set()
    for frame in frames:
        # Only what names one that has not been met is parsed: there may be 100,000 records, and a field of an upstream
        # may be called the same.
        if any(int(index) not in found for index in _CHOICE.findall(frame)):
            index = Record.of(frame).json().get("choice")
            found |= {index} if type(index) is int else set()
    return found
