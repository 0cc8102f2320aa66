"""A Responses request as the chat request that answers it.

Every field is honoured, passed on, or refused by name; nothing that would change the answer is left out in silence.
Fields that Responses does not know (`stop`, `seed`, `top_k`, …) go on to the upstream as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from midstream.codec.responses_fields import given, invalid, number, one_of, only, refuse, typed, whole_number
from midstream.codec.responses_input import messages
from midstream.codec.responses_object import LOGPROBS
from midstream.errors import BadRequest

_Check = Callable[[Any, str], Any]


class ResponsesRequest(NamedTuple):
    """What a body asks for: `upstream` is the chat request, but for its model."""

    upstream: dict[str, Any]
    model: str | None
    stream: bool
    background: bool


def _kind(*kinds: type) -> _Check:
    return lambda value, param: typed(value, param, *kinds)


def _metadata(value: Any, param: str) -> None:
    pairs = typed(value, param, dict)
    if len(pairs) > 16:
        raise invalid(param, f"expected at most 16 pairs, but got {len(pairs)} instead.")
    for name, text in pairs.items():
        if len(name) > 64 or len(typed(text, f"{param}.{name[:64]}", str)) > 512:
            raise invalid(f"{param}.{name[:64]}", "names have at most 64 characters, values 512.")


def _includes(value: Any, param: str) -> None:
    for place, name in enumerate(typed(value, param, list)):
        one_of(name, f"{param}[{place}]", _INCLUDABLE)


# What may be included.  Most of it belongs to tools that nobody can use here, and is never there to include; reasoning
# is told in clear.
_INCLUDABLE: Final = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)

# Fields of the upstream's that have the same name and meaning.
_PASSED: Final[dict[str, _Check]] = {
    "temperature": lambda value, param: number(value, param, 0, 2),
    "top_p": lambda value, param: number(value, param, 0, 1),
    "parallel_tool_calls": _kind(bool),
    "service_tier": _kind(str),
    "user": _kind(str),
    "safety_identifier": _kind(str),
    "prompt_cache_key": _kind(str),
    "prompt_cache_retention": _kind(str),
    "prompt_cache_options": _kind(dict),
}
# Fields that are for us, or have another name there.
_TAKEN: Final[dict[str, _Check]] = {
    "model": _kind(str),
    "input": _kind(str, list),
    "instructions": _kind(str),
    "stream": _kind(bool),
    "background": _kind(bool),
    "store": _kind(bool),
    "metadata": _metadata,
    "include": _includes,
    "max_output_tokens": lambda value, param: whole_number(value, param, 1),
    "max_tool_calls": lambda value, param: whole_number(value, param, 1),
    "top_logprobs": lambda value, param: whole_number(value, param, 0, 20),
    "truncation": _kind(str),
    "text": _kind(dict),
    "reasoning": _kind(dict),
    "tools": _kind(list),
    "tool_choice": _kind(str, dict),
    "stream_options": _kind(dict),
}
_REFUSED: Final = {
    "previous_response_id": "conversations are not stored here; send the earlier items in 'input'.",
    "conversation": "conversations are not stored here; send the earlier items in 'input'.",
    "prompt": "prompt templates are not stored here; send 'input' and 'instructions'.",
    "context_management": "the input goes to the model as it is.",
    "background_options": "there is no completion window; the upstream's time limits hold.",
    "moderation": "nothing is moderated here.",
    "access_programs": "this is the vendor's own.",
    "image": "images go to the model as they are.",
}
# Names of the chat API that a request cannot use here.
_MOVED: Final = {
    "messages": "input",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "functions": "tools",
    "function_call": "tool_choice",
    "logprobs": "include",
}


def read_request(body: Mapping[str, Any]) -> ResponsesRequest:
    """Read the body of a create request.  Raises BadRequest, which names the field."""
    body = {name: value for name, value in body.items() if value is not None}
    upstream: dict[str, Any] = {}
    for name, value in body.items():
        if name in _PASSED:
            _PASSED[name](value, name)
            upstream[name] = value
        elif name in _TAKEN:
            _TAKEN[name](value, name)
        else:
            _refuse_other(name, value)
            upstream[name] = value
    only(body.get("stream_options", {}), "stream_options", ("include_obfuscation",))
    if body.get("truncation", "disabled") != "disabled":
        refuse("truncation", "the input goes to the model as it is; only 'disabled' is possible.")
    if "max_output_tokens" in body:
        upstream["max_tokens"] = body["max_output_tokens"]
    upstream |= _text(body.get("text", {})) | _reasoning(body.get("reasoning", {})) | _logprobs(body) | _tools(body)
    if "tools" not in upstream:
        upstream.pop("parallel_tool_calls", None)
    upstream["messages"] = _instructed(body) + messages(given(body, "input", "", str, list))
    model = body.get("model")
    if model == "":
        raise invalid("model", "expected the name of a model.")
    return ResponsesRequest(upstream, model, body.get("stream", False), body.get("background", False))


def _refuse_other(name: str, value: Any) -> None:
    if name in _REFUSED:
        refuse(name, _REFUSED[name])
    if name in _MOVED:
        refuse(name, f"in the Responses API this is '{_MOVED[name]}'.")
    if name == "n" and value != 1:
        refuse(name, "a response has one answer.")


def _instructed(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": body["instructions"]}] if "instructions" in body else []


def _text(text: dict[str, Any]) -> dict[str, Any]:
    only(text, "text", ("format", "verbosity"))
    told: dict[str, Any] = {}
    if text.get("verbosity") is not None:
        told["verbosity"] = one_of(text["verbosity"], "text.verbosity", ("low", "medium", "high"))
    if text.get("format") is None:
        return told
    shape = typed(text["format"], "text.format", dict)
    kind = one_of(given(shape, "type", "text.format", str), "text.format.type", ("text", "json_object", "json_schema"))
    if kind == "json_object":
        told["response_format"] = {"type": kind}
    elif kind == "json_schema":
        given(shape, "name", "text.format", str)
        given(shape, "schema", "text.format", dict)
        named = {name: value for name, value in shape.items() if name != "type" and value is not None}
        told["response_format"] = {"type": kind, kind: named}
    return told


_SUMMARIES: Final = ("auto", "concise", "detailed")


def _reasoning(reasoning: dict[str, Any]) -> dict[str, Any]:
    only(reasoning, "reasoning", ("effort", "summary", "generate_summary", "context", "mode"))
    for name in ("summary", "generate_summary"):
        if reasoning.get(name) is not None:
            one_of(reasoning[name], f"reasoning.{name}", _SUMMARIES)
    if reasoning.get("context") not in (None, "auto"):
        refuse("reasoning.context", "reasoning of earlier turns is not sent to the model.")
    if reasoning.get("mode") not in (None, "standard"):
        refuse("reasoning.mode")
    if reasoning.get("effort") is None:
        return {}
    return {"reasoning_effort": typed(reasoning["effort"], "reasoning.effort", str)}


def _logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    if LOGPROBS not in body.get("include", ()):
        if body.get("top_logprobs"):
            refuse("top_logprobs", f"it needs '{LOGPROBS}' in 'include'.")
        return {}
    top = {"top_logprobs": body["top_logprobs"]} if body.get("top_logprobs") else {}
    return {"logprobs": True, **top}


def _tools(body: Mapping[str, Any]) -> dict[str, Any]:
    tools = [_tool(tool, f"tools[{place}]") for place, tool in enumerate(body.get("tools", ()))]
    choice = body.get("tool_choice")
    told: dict[str, Any] = {}
    if isinstance(choice, dict):
        kind = one_of(given(choice, "type", "tool_choice", str), "tool_choice.type", ("function", "allowed_tools"))
        if kind == "function":
            told["tool_choice"] = {"type": kind, kind: {"name": given(choice, "name", "tool_choice", str)}}
        else:
            tools, told["tool_choice"] = _allowed(choice, tools)
    elif choice is not None:
        told["tool_choice"] = one_of(choice, "tool_choice", ("none", "auto", "required"))
    # Without tools there is nothing to choose, and servers refuse a choice, or how many may be called at once.
    return {"tools": tools, **told} if tools else {}


def _tool(tool: Any, param: str) -> dict[str, Any]:
    fields = typed(tool, param, dict)
    kind = given(fields, "type", param, str)
    if kind != "function":
        refuse(f"{param}.type", f"'{kind[:80]}' is a tool of the vendor's; only functions of your own can be called.")
    given(fields, "name", param, str)
    for name, wanted in (("description", str), ("parameters", dict), ("strict", bool)):
        if fields.get(name) is not None:
            typed(fields[name], f"{param}.{name}", wanted)
    only({name: value for name, value in fields.items() if value != ["direct"]}, param, _OF_FUNCTION)
    names = ("name", "description", "parameters", "strict")
    return {"type": kind, kind: {name: fields[name] for name in names if fields.get(name) is not None}}


_OF_FUNCTION: Final = ("type", "name", "description", "parameters", "strict", "output_schema")


def _allowed(choice: dict[str, Any], tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Only the tools that are allowed, which any server understands."""
    mode = one_of(given(choice, "mode", "tool_choice", str), "tool_choice.mode", ("auto", "required"))
    names = set()
    for place, tool in enumerate(given(choice, "tools", "tool_choice", list)):
        param = f"tool_choice.tools[{place}]"
        names.add(given(typed(tool, param, dict), "name", param, str))
    known = {tool["function"]["name"] for tool in tools}
    if unknown := names - known:
        raise BadRequest(
            f"Invalid value for 'tool_choice.tools': '{min(unknown)[:80]}' is none of 'tools'.",
            param="tool_choice.tools",
            reason="invalid_value",
        )
    return [tool for tool in tools if tool["function"]["name"] in names], mode
