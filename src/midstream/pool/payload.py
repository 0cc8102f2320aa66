"""What the pool is asked for an OpenAI request.  Pure.

    chat        messages, max_length, max_context_length, temperature, top_p, frequency_penalty, presence_penalty,
                rep_pen, top_k, min_p; if asked for: tools, tool_choice, parallel_tool_calls, response_format,
                stop_sequence, seed, reasoning_effort
    completion  prompt, and the same without what only a chat has

A request that goes beyond what a chat worker takes is refused, and told by which field (`BadRequest.param`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import orjson

from midstream.codec.openai import Route
from midstream.errors import BadRequest
from midstream.pool.matching import needs
from midstream.pool.shapes import Ask, Reply
from midstream.wire import POOL_CONTEXTS, POOL_LENGTHS

# Tokens of an answer, where the request does not say.
DEFAULT_LENGTH: Final = 512
_MOST_STOPS: Final = 4
_MOST_TOOLS: Final = 128
_MOST_TOOL_BYTES: Final = 256 * 1024
_MOST_TEXT_BYTES: Final = 2**20
_DEEPEST_SCHEMA: Final = 10
# A context is asked for by estimate, on the safe side: bytes to a token, and tokens for what stands around a message
# and for an image.
_BYTES_PER_TOKEN: Final = 3
_PER_MESSAGE: Final = 16
_PER_IMAGE: Final = 1024

_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
# A stop string of every prompt rendered from messages: a model may go on with the other side's lines by itself.
TURN: Final = "\nUser:"

# Sampling: our name, OpenAI's and other servers', the bounds, and what holds where nothing is said.
_SAMPLING: Final[tuple[tuple[str, tuple[str, ...], float, float, float], ...]] = (
    ("temperature", ("temperature",), 0, 2, 1),
    ("top_p", ("top_p",), 0, 1, 1),
    ("frequency_penalty", ("frequency_penalty",), -2, 2, 0),
    ("presence_penalty", ("presence_penalty",), -2, 2, 0),
    ("rep_pen", ("rep_pen", "repetition_penalty"), 1, 3, 1),
    ("top_k", ("top_k",), 0, 200, 0),
    ("min_p", ("min_p",), 0, 1, 0),
)
# What no worker can be asked for: silence about it would be another answer than the one asked for.
_NOT_HERE: Final = (
    "logprobs",
    "top_logprobs",
    "functions",
    "function_call",
    "audio",
    "logit_bias",
    "best_of",
    "suffix",
)


def ask_for(owner: str, model: str, body: Mapping[str, Any], route: Route) -> Ask:
    """What an OpenAI request asks of the pool.  Raises BadRequest, with `param`.

    It is relayed live, but for one with tools or a response format, which comes whole.
    """
    _refuse(body)
    payload: dict[str, Any] = {"max_length": _length(body), "max_context_length": 0, **_sampling(body)}
    chat = route == "chat"
    if chat:
        messages = _messages(body.get("messages"))
        payload |= {"messages": messages, **_chat_only(body)}
        size = sum(map(_message_tokens, messages)) + _tool_bytes(payload) // _BYTES_PER_TOKEN
    else:
        payload["prompt"] = _prompt(body.get("prompt"))
        size = len(payload["prompt"].encode()) // _BYTES_PER_TOKEN
    payload["max_context_length"] = _context(body, size + payload["max_length"])
    features = needs(payload, strict=_strict(body)) if chat else frozenset()
    return Ask(
        owner=owner,
        models=(model,),
        payload=payload,
        max_length=payload["max_length"],
        max_context_length=payload["max_context_length"],
        chat=chat,
        features=frozenset(features),
        streams=not payload.get("tools") and "response_format" not in payload,
    )


def on_stream(ask: Ask, stream_id: str) -> Ask:
    """The same, answered on this stream."""
    return replace(ask, stream_id=stream_id)


def stops(ask: Ask) -> list[str]:
    """The request's stop strings, which a worker may trim from its reply."""
    return [*ask.payload.get("stop_sequence", ()), *([TURN] if ask.chat else [])]


def without_turn(reply: Reply) -> Reply:
    """The reply to a chat, should it have been rendered to a prompt and the worker have left our stop string in."""
    return replace(reply, content=reply.content.removesuffix(TURN)) if reply.content else reply


# --- reading a request ------------------------------------------------------------------------------------------------


def _bad(param: str, complaint: str) -> BadRequest:
    return BadRequest(f"{param!r} {complaint}", param=param)


def _refuse(body: Mapping[str, Any]) -> None:
    if body.get("n") not in (None, 1):
        raise _bad("n", "can only be 1: a worker gives one answer")
    for name in _NOT_HERE:
        if body.get(name):
            raise _bad(name, "is nothing that a worker of this pool can be asked for")


def _within(body: Mapping[str, Any], name: str, least: float, most: float, kinds: tuple[type, ...]) -> Any:
    """The value, None where there is none.  A flag is no number."""
    value = body.get(name)
    if value is None:
        return None
    if type(value) not in kinds or not least <= value <= most:
        what = "a whole number" if kinds == (int,) else "a number"
        raise _bad(name, f"must be {what} from {least:g} to {most:g}")
    return value


def _length(body: Mapping[str, Any]) -> int:
    for name in ("max_completion_tokens", "max_tokens"):
        if (value := _within(body, name, *POOL_LENGTHS, (int,))) is not None:
            return int(value)
    return DEFAULT_LENGTH


def _context(body: Mapping[str, Any], estimate: int) -> int:
    asked = _within(body, "max_context_length", *POOL_CONTEXTS, (int,))
    if asked is None and estimate > POOL_CONTEXTS[1]:
        raise _bad("messages", "are longer than any worker's context")
    return int(asked or max(estimate, POOL_CONTEXTS[0]))


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    sampling: dict[str, Any] = {}
    for ours, names, least, most, default in _SAMPLING:
        kinds = (int,) if ours == "top_k" else (int, float)
        given = (_within(body, name, least, most, kinds) for name in names)
        sampling[ours] = next((value for value in given if value is not None), default)
    if (stop := _stop(body.get("stop"))) is not None:
        sampling["stop_sequence"] = stop
    if (seed := _within(body, "seed", -(2**63), 2**63 - 1, (int,))) is not None:
        sampling["seed"] = seed
    return sampling


def _stop(stop: Any) -> list[str] | None:
    if stop is None or stop == []:
        return None
    listed = [stop] if isinstance(stop, str) else stop
    if not isinstance(listed, list) or len(listed) > _MOST_STOPS or not all(isinstance(one, str) for one in listed):
        raise _bad("stop", f"must be text, or at most {_MOST_STOPS} of them")
    return [_no_nul("stop", one) for one in listed if one] or None


def _strict(body: Mapping[str, Any]) -> bool:
    wish = body.get("horde")
    return isinstance(wish, dict) and wish.get("conformance") == "strict"


def _prompt(prompt: Any) -> str:
    if not isinstance(prompt, str) or not prompt:
        raise _bad("prompt", "must be text, and one alone")
    return _bounded("prompt", prompt)


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise _bad("messages", "must be a list of messages, at least one")
    for at, message in enumerate(messages):
        _check_message(f"messages[{at}]", message)
    return messages


def _check_message(param: str, message: Any) -> None:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise _bad(f"{param}.role", f"must be one of {', '.join(_ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        for at, part in enumerate(content):
            _check_part(f"{param}.content[{at}]", part)
    elif isinstance(content, str):
        _bounded(f"{param}.content", content)
    elif content is not None or not (message.get("tool_calls") or message["role"] == "assistant"):
        raise _bad(f"{param}.content", "must be text or a list of parts")


def _check_part(param: str, part: Any) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        _bounded(f"{param}.text", part["text"])
    elif kind != "image_url":
        raise _bad(f"{param}.type", "must be 'text' or 'image_url'")
    elif not (isinstance(part.get("image_url"), dict) and isinstance(part["image_url"].get("url"), str)):
        raise _bad(f"{param}.image_url.url", "must be text")


def _bounded(param: str, text: str) -> str:
    if len(text) > _MOST_TEXT_BYTES or len(text.encode()) > _MOST_TEXT_BYTES:
        raise _bad(param, f"must have at most {_MOST_TEXT_BYTES} bytes")
    return _no_nul(param, text)


def _no_nul(param: str, text: str) -> str:
    if "\0" in text:
        raise _bad(param, "holds a NUL character, which cannot be kept")
    return text


def _chat_only(body: Mapping[str, Any]) -> dict[str, Any]:
    """Tools, a response format and the effort, as far as they are asked for."""
    found: dict[str, Any] = {}
    if tools := _checked(body, "tools", _are_tools):
        found["tools"] = tools
        found["parallel_tool_calls"] = body.get("parallel_tool_calls") is not False
        if body.get("tool_choice") is not None:
            found["tool_choice"] = body["tool_choice"]
    shape = _checked(body, "response_format", lambda value: isinstance(value, dict))
    if shape and shape.get("type") != "text":
        if shape.get("type") not in ("json_object", "json_schema"):
            raise _bad("response_format.type", "must be text, json_object or json_schema")
        found["response_format"] = shape
    if effort := _checked(body, "reasoning_effort", lambda value: isinstance(value, str)):
        found["reasoning_effort"] = effort
    if _tool_bytes(found) > _MOST_TOOL_BYTES:
        raise _bad("tools", f"and response_format have more than {_MOST_TOOL_BYTES} bytes of JSON")
    if _too_deep(found):
        raise _bad("tools" if "tools" in found else "response_format", f"are nested more than {_DEEPEST_SCHEMA} deep")
    return found


def _are_tools(tools: Any) -> bool:
    return (
        isinstance(tools, list)
        and len(tools) <= _MOST_TOOLS
        and all(isinstance(tool, dict) and isinstance(tool.get("function"), dict) for tool in tools)
    )


def _checked(body: Mapping[str, Any], name: str, good: Callable[[Any], bool]) -> Any:
    value = body.get(name)
    if value is not None and not good(value):
        raise _bad(name, "is not what it should be: see OpenAI's reference")
    return value


def _tool_bytes(payload: Mapping[str, Any]) -> int:
    told = [payload[name] for name in ("tools", "tool_choice", "response_format") if name in payload]
    return len(orjson.dumps(told)) if told else 0


def _too_deep(found: Mapping[str, Any]) -> bool:
    """Whether a schema in it is nested too deep; the objects around a schema do not count."""
    schemas = [tool["function"].get("parameters") for tool in found.get("tools", ())]
    shape = found.get("response_format", {}).get("json_schema")
    schemas.append(shape.get("schema") if isinstance(shape, dict) else None)
    return any(_depth(schema) > _DEEPEST_SCHEMA for schema in schemas)


def _depth(schema: Any) -> int:
    """Levels of schemas within schemas, looked at no deeper than needed."""
    level, depth = [schema], 0
    while (level := [one for one in level if isinstance(one, (dict, list))]) and depth <= 4 * _DEEPEST_SCHEMA:
        if any(isinstance(one, dict) and ("type" in one or "$ref" in one or "anyOf" in one) for one in level):
            depth += 1
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return depth


def _message_tokens(message: dict[str, Any]) -> int:
    content = message.get("content")
    images = sum(part.get("type") == "image_url" for part in content) if isinstance(content, list) else 0
    return _PER_MESSAGE + len(text_of(content).encode()) // _BYTES_PER_TOKEN + images * _PER_IMAGE


def text_of(content: Any) -> str:
    """The text of a message's content, which may come in parts."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if part.get("type") == "text")
    return content or ""
