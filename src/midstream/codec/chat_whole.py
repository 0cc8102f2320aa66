"""A whole answer as OpenAI's `chat.completion` or `text_completion`, out of its fold and the records still retained.

Text and its logprobs, reasoning, refusal, tool calls, finish_reason and usage are in the fold and so always whole;
fields that only the upstream has a name for are there as far as their records are retained.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from midstream.codec.chat import Style, beside
from midstream.codec.pieces import as_object, choice_of, json_list
from midstream.records import Choice, Fold, Frame, Record
from midstream.wire import DONE, TOKEN

# Marks of a record that says more than the fold keeps.
_SAYS_MORE: Final = (b'"upstream":', b'"logprobs":')


class Extras:
    """What records say beside what the fold keeps: of the envelope, and per choice.  Fed in order, in steps."""

    def __init__(self) -> None:
        self.chunk: dict[str, Any] = {}
        self.choices: dict[int, dict[str, Any]] = {}
        self.deltas: dict[int, dict[str, Any]] = {}
        self.logprobs: dict[int, Any] = {}

    def add(self, frames: Iterable[Frame]) -> None:
        for frame in frames:
            if any(mark in frame for mark in _SAYS_MORE):
                self._take(Record.of(frame))

    def _take(self, record: Record) -> None:
        if record.event not in (TOKEN, DONE):
            return
        data = record.json()
        index, upstream = choice_of(data), as_object(data.get("upstream"))
        self.chunk |= as_object(upstream.get("chunk"))
        if choice := as_object(upstream.get("choice")):
            self.choices.setdefault(index, {}).update(choice)
        if delta := as_object(upstream.get("delta")):
            self.deltas[index] = joined(self.deltas.get(index), delta)
        if (logprobs := data.get("logprobs")) is not None:
            if isinstance(logprobs, dict) and isinstance(logprobs.get("content"), list):
                logprobs["content"] = []  # the fold has them, in a twentieth of the memory
            self.logprobs[index] = joined(self.logprobs.get(index), logprobs)


def completion(style: Style, fold: Fold, extras: Extras) -> dict[str, Any]:
    """The answer of a stream that is `done`, for orjson; `extras` have been fed all records that are retained."""
    choices = fold.choices or {0: Choice()}
    body = {
        **style.envelope,
        "object": style.envelope["object"].removesuffix(".chunk"),
        "choices": [_choice(style, index, choices[index], extras) for index in sorted(choices)],
    }
    if fold.usage is not None:
        body["usage"] = fold.usage
    return body | beside(extras.chunk)


def _choice(style: Style, index: int, choice: Choice, extras: Extras) -> dict[str, Any]:
    said: dict[str, Any] = {"index": index}
    if style.text:
        said["text"] = choice.text.decode()
    else:
        said["message"] = _message(choice, extras.deltas.get(index, {}))
    said["logprobs"] = _logprobs(choice, extras.logprobs.get(index))
    said["finish_reason"] = choice.finish_reason
    return {**extras.choices.get(index, {}), **said}


def _logprobs(choice: Choice, retained: Any) -> Any:
    if not choice.logprobs:
        return retained
    return {**as_object(retained), "content": json_list(choice.logprobs)}


def _message(choice: Choice, more: dict[str, Any]) -> dict[str, Any]:
    silent = not choice.text and (choice.tool_calls or choice.refusal)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if silent else choice.text.decode(),
        "refusal": choice.refusal.decode() or None,
    }
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning.decode()
    if choice.tool_calls:
        message["tool_calls"] = tool_calls(choice)
    return {**more, **message}


def tool_calls(choice: Choice) -> list[dict[str, Any]]:
    """The calls of a choice, each with what else the upstream said of it."""
    return [
        {
            **(call.more or {}),
            "id": call.id,
            "type": call.type,
            "function": {"name": call.name, "arguments": call.arguments.decode()},
        }
        for call in choice.tool_calls
    ]


def joined(before: Any, after: Any) -> Any:
    """The sum of two deltas: text and lists go on, objects field by field, anything else is what was said last.

    `before` is used up: a copy of ever longer lists for each token would be quadratic.
    """
    if isinstance(before, str) and isinstance(after, str):
        return before + after
    if isinstance(before, list) and isinstance(after, list):
        before += after
    elif isinstance(before, dict) and isinstance(after, dict):
        for name, value in after.items():
            before[name] = joined(before.get(name), value)
    else:
        return before if after is None else after
    return before
