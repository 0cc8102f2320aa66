"""What OpenAI-compatible servers say, read into chunks: no I/O, no repair by guessing.

One chunk of ours is what one chunk of theirs said about one choice.  Chunks that say nothing (a role, an empty delta,
usage alone) make none.  What we have no name for is kept as it came under `more["upstream"]`:

    chunk    fields of the envelope (id, created, model, …): on the first chunk, later only those that have changed
    choice   fields beside the delta
    delta    fields inside it

A field that says nothing (null, "", [], {}) is left out.  What came after the last chunk stands in `Finish.more`.
"""

from __future__ import annotations

import json
from typing import Any, Final, Literal

import orjson

from midstream.codec.text import whole
from midstream.codec.upstream_errors import error_in, malformed, upstream_error
from midstream.errors import ProducerFailed
from midstream.records import Chunk, Finish

Route = Literal["chat", "completions"]

_KEEP_ALIVE: Final = frozenset({"ping", "heartbeat", "keepalive", "keep-alive"})
# What the route says already; anything else in `object` is kept.
_OBJECTS: Final = frozenset({"chat.completion.chunk", "chat.completion", "text_completion"})
# Far deeper than any real chunk, and below what orjson can write again (254).
_MAX_DEPTH: Final = 64
# As many choices, or tool calls in one delta, as no request asks for: each costs time of the loop and memory.
MAX_PARTS: Final = 2048
_loads = orjson.loads


class ChatReader:
    """Reads one upstream response.  `asked` is how many choices were asked for.

    `done` once `[DONE]` has come; `complete` once every choice that was asked for, or has been seen, has finished: the
    answer is whole even if the connection now ends without `[DONE]`, as it does with many servers.
    """

    __slots__ = (
        "_asked",
        "_calls",
        "_chat",
        "_envelope",
        "_envelope_news",
        "_known",
        "_last",
        "_plain_choice",
        "_plain_delta",
        "_reasons",
        "complete",
        "done",
        "usage",
    )

    def __init__(self, route: Route = "chat", asked: int = 1) -> None:
        self.done = False
        self.complete = False
        self.usage: dict[str, Any] | None = None
        self._chat = route == "chat"
        self._asked = asked
        self._reasons: dict[int, str | None] = {}  # choice -> finish_reason, None while it runs
        self._calls: set[tuple[int, int, str]] = set()  # of which choice, at which index, of which id
        self._known: dict[str, Any] = {}
        self._envelope_news: dict[str, Any] = {}  # what no chunk of ours carries yet
        self._last: dict[str, dict[str, Any]] = {}  # extras beside the only choice's finish_reason
        # How a chunk of text alone has looked, all but its text: the next one most likely looks the same.
        self._envelope: dict[str, Any] | None = None
        self._plain_choice: dict[str, Any] | None = None
        self._plain_delta: dict[str, Any] | None = None

    def read(self, data: bytes, event: str = "message") -> list[Chunk]:
        """The chunks in one event.  Raises ProducerFailed: `upstream_malformed` where skipping what cannot be read
        would be a gap nobody can see, `upstream_error` where the upstream says that it failed."""
        if event != "message" or not data.startswith(b"{"):
            if not self._worth_reading(data, event):
                return []
        elif self.done:
            return []
        chunk = _parse(data)
        choices = chunk.pop("choices", None)
        usage = chunk.pop("usage", None)
        # OpenAI's padding against traffic analysis: random, and of no use once re-framed.
        chunk.pop("obfuscation", None)
        if usage is None and chunk == self._envelope and type(choices) is list and len(choices) == 1:
            text = self._plain_text(choices[0])
            if text is not None:
                return [Chunk(text)] if text else []
        return self._read(chunk, choices, usage, data)

    def read_whole(self, body: bytes) -> list[Chunk]:
        """The chunks of an answer that is no stream: a whole completion, whatever was asked for."""
        completion = _parse(body)
        choices = completion.pop("choices", None)
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict) and isinstance(message := choice.pop("message", None), dict):
                choice["delta"] = _as_delta(message)
        chunks = self._read(completion, choices, completion.pop("usage", None), body)
        if not choices:
            raise malformed("the upstream answered with JSON that is no completion")
        self.done = True
        return chunks

    def finish(self) -> Finish:
        """The end of the response.  Raises ProducerFailed (`upstream_truncated`) where the answer is not whole."""
        if not (self.done or self.complete):
            raise ProducerFailed(
                "upstream_truncated", "the upstream's answer ended early, with neither a finish_reason nor [DONE]"
            )
        reason = next(iter(self._reasons.values()), None) if len(self._reasons) == 1 else None
        reason = whole(reason) if reason is not None else None
        upstream = ({"chunk": self._envelope_news} if self._envelope_news else {}) | self._last
        return Finish(reason, _valid(self.usage), _valid({"upstream": upstream}) if upstream else None)

    def _worth_reading(self, data: bytes, event: str) -> bool:
        text = data.strip()
        if self.done or not text or event in _KEEP_ALIVE:
            return False
        if event == "error":
            raise error_in(text)
        if text == b"[DONE]":
            self.done = True
            return False
        if not text.startswith(b"{"):
            raise malformed("the upstream sent an event that is no JSON object", text)
        return True

    def _plain_text(self, choice: Any) -> str | None:
        """The text of a choice that says nothing else and looks like the last such one; else None, nothing changed."""
        if type(choice) is not dict:
            return None
        if not self._chat:
            text = choice.pop("text", None)
            if choice == self._plain_choice and type(text) is str:
                return text
            if text is not None:  # else there is none: what it says is in a delta, as some servers have it
                choice["text"] = text
            return None
        delta = choice.pop("delta", None)
        if choice == self._plain_choice and type(delta) is dict:
            text = delta.pop("content", None)
            if delta == self._plain_delta and type(text) is str:
                return text
            delta["content"] = text
        choice["delta"] = delta
        return None

    def _read(self, chunk: dict[str, Any], choices: Any, usage: Any, data: bytes) -> list[Chunk]:
        if chunk.get("error") or chunk.get("object") == "error":
            raise upstream_error(chunk.get("error") or chunk)
        if data.count(b"[") + data.count(b"{") > _MAX_DEPTH:
            _refuse_deep([choices, chunk, usage], _MAX_DEPTH)
        if isinstance(usage, dict) and usage:
            self.usage = usage
        if choices is None:
            choices = []
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise malformed("the upstream sent 'choices' that are no list of objects")
        _refuse_many("choices", len(choices))
        self._note_envelope(chunk)
        chunks = [ours for choice in choices for ours in self._choice(choice)]
        if chunks and self._envelope_news:
            _beside(chunks[0], "chunk", self._envelope_news)
            self._envelope_news = {}
        self._envelope = None if self._envelope_news else chunk
        return chunks

    def _note_envelope(self, chunk: dict[str, Any]) -> None:
        for name, value in chunk.items():
            if _says(value) and self._known.get(name) != value and not (name == "object" and value in _OBJECTS):
                self._known[name] = self._envelope_news[name] = value

    def _choice(self, choice: dict[str, Any]) -> list[Chunk]:
        index = choice.get("index") or 0
        if type(index) is not int:
            raise malformed("the upstream sent a choice whose index is no integer")
        late = self._meet(index)
        fields = {name: value for name, value in choice.items() if name not in ("index", "delta", "text")}
        delta = choice.get("delta") or {}
        if not isinstance(delta, dict):
            raise malformed("the upstream sent a delta that is no object")
        self._learn(choice, fields, delta)
        text, more, rest = _split(delta if self._chat or "text" not in choice else {"content": choice["text"]})
        if calls := more.get("tool_calls"):
            self._count_calls(index, calls)
        reason = fields.pop("finish_reason", None)
        if _says(logprobs := fields.pop("logprobs", None)):
            more["logprobs"] = logprobs
        if isinstance(usage := fields.pop("usage", None), dict) and usage:  # Moonshot puts it here
            self.usage = usage
        extras = {"choice": {k: v for k, v in fields.items() if _says(v)}, "delta": rest}
        extras = {name: value for name, value in extras.items() if value}
        if _says(reason) and self._finished(index, str(reason), extras, bool(text or more)):
            more["finish_reason"] = reason
        if extras and extras is not self._last:
            more["upstream"] = extras
        if not text and not more:
            return late
        return [*late, Chunk(text, _of_choice(more, index) or None)]

    def _count_calls(self, choice: int, calls: list[Any]) -> None:
        for call in calls:
            if isinstance(call, dict):
                index, call_id = call.get("index"), call.get("id")
                self._calls.add(
                    (choice, index if type(index) is int else 0, call_id if isinstance(call_id, str) else "")
                )
        _refuse_many("tool calls", len(self._calls))

    def _meet(self, index: int) -> list[Chunk]:
        """A choice that was thought to be the only one turns out not to be: its finish_reason, held for `done`, is a
        chunk's after all."""
        if index in self._reasons:
            return []
        self._reasons[index] = None
        _refuse_many("choices", len(self._reasons))
        self.complete = False
        if len(self._reasons) != 2:
            return []
        first, reason = next(iter(self._reasons.items()))
        if reason is None:
            return []
        more = {"finish_reason": reason} | ({"upstream": self._last} if self._last else {})
        self._last = {}
        return [Chunk("", _of_choice(more, first))]

    def _finished(self, index: int, reason: str, extras: dict[str, dict[str, Any]], told: bool) -> bool:
        """Note the end of a choice.  Whether the chunk has to say it: not where the only choice's `done` will."""
        news = self._reasons[index] != reason
        self._reasons[index] = reason
        ended = [reason is not None for reason in self._reasons.values()]
        self.complete = all(ended) and len(ended) >= self._asked
        if len(self._reasons) > 1:
            return news
        if extras and not told and "delta" not in extras:
            self._last = extras
        return False

    def _learn(self, choice: dict[str, Any], fields: dict[str, Any], delta: dict[str, Any]) -> None:
        """Remember the shape if it is that of text alone, of choice 0."""
        if choice.get("index") or any(map(_says, fields.values())):
            return
        role = delta.get("role")
        rest = {name: value for name, value in delta.items() if name != "content"}
        if not any(_says(value) for name, value in rest.items() if name != "role" or role != "assistant"):
            self._plain_choice = {k: v for k, v in choice.items() if k not in ("delta", "text")}
            self._plain_delta = rest


def _split(delta: dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A delta's text, the fields we have names for, and what else it says."""
    more: dict[str, Any] = {}
    rest = {name: value for name, value in delta.items() if _says(value)}
    if rest.get("role") == "assistant":
        del rest["role"]
    text = rest.get("content", "")
    if isinstance(text, str):
        rest.pop("content", None)
    else:
        text = _text_of(text)
    if isinstance(reasoning := rest.get("reasoning_content", rest.get("reasoning")), str):
        more["reasoning"] = reasoning
        rest.pop("reasoning_content", None)
        if rest.get("reasoning") == reasoning:
            del rest["reasoning"]
    if isinstance(rest.get("refusal"), str):
        more["refusal"] = rest.pop("refusal")
    if isinstance(calls := rest.get("tool_calls"), list):
        _refuse_many("tool calls", len(calls))
        more["tool_calls"] = rest.pop("tool_calls")
    return text, more, rest


def _text_of(content: Any) -> str:
    """The text in a list of parts, as Mistral streams it; the parts themselves are kept beside it."""
    if not isinstance(content, list):
        raise malformed("the upstream sent a content that is neither text nor a list of parts")
    parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    return "".join(part for part in parts if isinstance(part, str))


def _of_choice(more: dict[str, Any], index: int) -> dict[str, Any]:
    if index:
        more["choice"] = index
    return more


def _beside(chunk: Chunk, place: str, fields: dict[str, Any]) -> None:
    more = chunk.more if chunk.more is not None else {}
    more["upstream"] = {place: fields} | more.get("upstream", {})
    chunk.more = more


def _as_delta(message: dict[str, Any]) -> dict[str, Any]:
    """A whole message as the one delta that says it: tool calls get the index that only deltas have."""
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [
            {"index": place, **call} if isinstance(call, dict) else call for place, call in enumerate(calls)
        ]
    return message


def _valid(value: Any) -> Any:
    """The value with valid Unicode: in a terminal record no other half of a surrogate pair will come."""
    return json.loads(whole(json.dumps(value, ensure_ascii=False)))


def _says(value: Any) -> bool:
    return value is not None and not (not value and isinstance(value, str | list | dict))


def _refuse_deep(value: Any, left: int) -> None:
    if left == 0:
        raise malformed(f"the upstream sent JSON nested over {_MAX_DEPTH} deep")
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict | list):
            _refuse_deep(item, left - 1)


def _refuse_many(what: str, count: int) -> None:
    if count > MAX_PARTS:
        raise malformed(f"the upstream sent over {MAX_PARTS} {what}")


def _parse(data: bytes) -> dict[str, Any]:
    try:
        value = _loads(data)
    except orjson.JSONDecodeError:
        value = _parse_lenient(data)
    if type(value) is not dict:
        raise malformed("the upstream sent JSON that is no object", data)
    return value


def _parse_lenient(data: bytes) -> Any:
    """What real servers send and strict JSON forbids: NaN and infinities (as null), half a surrogate pair (for the
    writer to mend), bytes that are not UTF-8."""
    try:
        return json.loads(
            data.decode("utf-8", "replace"),
            parse_constant=lambda _: None,
            parse_float=_finite,
            parse_int=lambda digits: int(digits) if len(digits) < 19 else _finite(digits),
        )
    except (ValueError, RecursionError):
        raise malformed("the upstream sent an event that is no JSON", data) from None


def _finite(digits: str) -> float | None:
    number = float(digits)
    return number if abs(number) != float("inf") else None
