"""What OpenAI's completion routes can be asked for (PROTOCOL.md, "OpenAI").

Everything goes on to the upstream, which knows best what it takes.  Checked here is what the gateway itself acts on,
and the types of what every server takes, so that a slip is told before a stream is opened, with the field's name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from midstream.errors import BadRequest
from midstream.transports.asking import Front, Told, abandonment
from midstream.wire import CHAT_PATH, COMPLETIONS_PATH


class _Kind(NamedTuple):
    """What a field has to be, in words and as a test."""

    name: str
    holds: Callable[[Any], bool]


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _tokens(value: Any) -> bool:
    return isinstance(value, list) and all(map(_integer, value))


def _prompt(value: Any) -> bool:
    several = isinstance(value, list) and bool(value) and all(_tokens(item) and item for item in value)
    return _text(value) or (bool(value) and (_texts(value) or _tokens(value))) or several


_BOOLEAN: Final = _Kind("true or false", lambda value: isinstance(value, bool))
_INTEGER: Final = _Kind("an integer", _integer)
_POSITIVE: Final = _Kind("an integer above 0", lambda value: _integer(value) and value > 0)
_NUMBER: Final = _Kind("a number", _number)
_OBJECT: Final = _Kind("an object", lambda value: isinstance(value, dict))
_OBJECTS: Final = _Kind("a list of objects", _objects)

_SHARED: Final[dict[str, _Kind]] = {
    "model": _Kind("text", lambda value: _text(value) and value != ""),
    "stream": _BOOLEAN,
    "stream_options": _OBJECT,
    "n": _POSITIVE,
    "max_tokens": _INTEGER,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "seed": _INTEGER,
    "stop": _Kind("text or a list of texts", lambda value: _text(value) or _texts(value)),
    "logit_bias": _OBJECT,
    "user": _Kind("text", _text),
}
_CHAT: Final[dict[str, _Kind]] = _SHARED | {
    "messages": _Kind("a list of objects, at least one", lambda value: _objects(value) and value != []),
    "max_completion_tokens": _INTEGER,
    "tools": _OBJECTS,
    "tool_choice": _Kind("text or an object", lambda value: isinstance(value, str | dict)),
    "parallel_tool_calls": _BOOLEAN,
    "functions": _OBJECTS,
    "response_format": _OBJECT,
    "logprobs": _BOOLEAN,
    "top_logprobs": _INTEGER,
    "metadata": _OBJECT,
}
_COMPLETIONS: Final[dict[str, _Kind]] = _SHARED | {
    "prompt": _Kind("text, a list of texts, or lists of token numbers", _prompt),
    "logprobs": _INTEGER,
    "echo": _BOOLEAN,
    "suffix": _Kind("text", _text),
    "best_of": _POSITIVE,
}


def check_fields(body: dict[str, Any], kinds: dict[str, _Kind], needed: str) -> None:
    """Raises BadRequest that names the field; null stands for a field that is left out."""
    if body.get(needed) is None:
        raise BadRequest(f"'{needed}' is missing", param=needed, reason="missing_required_parameter")
    for name, kind in kinds.items():
        value = body.get(name)
        if value is not None and not kind.holds(value):
            raise BadRequest(f"'{name}' must be {kind.name}", param=name, reason="invalid_type")
    options = body.get("stream_options") or {}
    if not isinstance(options.get("include_usage", False), bool | None):
        raise BadRequest(
            "'stream_options.include_usage' must be true or false",
            param="stream_options.include_usage",
            reason="invalid_type",
        )


def _told(body: dict[str, Any], kinds: dict[str, _Kind], needed: str) -> Told:
    check_fields(body, kinds, needed)
    rest = dict(body)
    model, stream = rest.pop("model", None), rest.pop("stream", None)
    return Told(rest, model, bool(stream), abandonment(rest))


CHAT: Final = Front(CHAT_PATH, "chat", lambda body: _told(body, _CHAT, "messages"), streams=False)
COMPLETIONS: Final = Front(
    COMPLETIONS_PATH, "completions", lambda body: _told(body, _COMPLETIONS, "prompt"), streams=False
)
