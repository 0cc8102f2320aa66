"""The input of a Responses request: as messages for a chat model, and as the list of items that is told back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from midstream.codec.responses_fields import given, invalid, one_of, only, refuse, typed
from midstream.errors import BadRequest

_STORED: Final = "items are not stored beyond their response; send what it refers to."
_ROLES: Final = ("user", "assistant", "system", "developer")
# Open models' templates know no developer; for those that do it is the same.
_ROLE_OF: Final = {"developer": "system"}
_DETAILS: Final = ("auto", "low", "high", "original")


def messages(given_input: Any) -> list[dict[str, Any]]:
    """The input as chat messages.  Raises BadRequest, naming the item and the field.

    Reasoning of earlier turns is left out: chat models take none.
    """
    if isinstance(given_input, str):
        return [{"role": "user", "content": given_input}]
    told: list[dict[str, Any]] = []
    known: set[str] = set()
    items = typed(given_input, "input", str, list)
    if not items:
        raise invalid("input", "expected at least one item.")
    for place, item in enumerate(items):
        param = f"input[{place}]"
        _add(told, typed(item, param, dict), param)
        if item.get("id") is not None:
            if typed(item["id"], f"{param}.id", str) in known:
                raise invalid(f"{param}.id", "another item has it too.")
            known.add(item["id"])
    return told


def _add(told: list[dict[str, Any]], item: dict[str, Any], param: str) -> None:
    kind = typed(item.get("type", "message"), f"{param}.type", str)
    if kind == "message":
        role = one_of(given(item, "role", param, str), f"{param}.role", _ROLES)
        content = _content(given(item, "content", param, str, list), f"{param}.content")
        told.append({"role": _ROLE_OF.get(role, role), "content": content})
    elif kind == "function_call":
        if not told or told[-1]["role"] != "assistant":
            told.append({"role": "assistant", "content": None})
        told[-1].setdefault("tool_calls", []).append(_call(item, param))
    elif kind == "function_call_output":
        output = _content(given(item, "output", param, str, list), f"{param}.output")
        told.append({"role": "tool", "tool_call_id": given(item, "call_id", param, str), "content": output})
    elif kind == "item_reference":
        refuse(param, _STORED)
    elif kind != "reasoning":
        refuse(f"{param}.type", f"items of type '{kind[:80]}' have no place in a chat with a model.")


def _call(item: dict[str, Any], param: str) -> dict[str, Any]:
    function = {"name": given(item, "name", param, str), "arguments": given(item, "arguments", param, str)}
    return {"id": given(item, "call_id", param, str), "type": "function", "function": function}


def _content(content: str | list[Any], param: str) -> str | list[dict[str, Any]]:
    """Text alone stays text: there are servers that take nothing else."""
    if isinstance(content, str):
        return content
    parts = [_part(typed(part, f"{param}[{at}]", dict), f"{param}[{at}]") for at, part in enumerate(content)]
    if len(parts) == 1 and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return parts


def _part(part: dict[str, Any], param: str) -> dict[str, Any]:
    kind = given(part, "type", param, str)
    if kind not in _PARTS:
        raise invalid(f"{param}.type", f"'{kind[:80]}' is none of {', '.join(map(repr, _PARTS))}.")
    return _PARTS[kind](part, param)


def _text(part: dict[str, Any], param: str) -> dict[str, Any]:
    return {"type": "text", "text": given(part, "text", param, str)}


def _refusal(part: dict[str, Any], param: str) -> dict[str, Any]:
    return {"type": "refusal", "refusal": given(part, "refusal", param, str)}


def _image(part: dict[str, Any], param: str) -> dict[str, Any]:
    if part.get("file_id") is not None:
        refuse(f"{param}.file_id", "files are not stored here; send an 'image_url', which may hold the image.")
    image = {"url": given(part, "image_url", param, str)}
    if part.get("detail") is not None:
        image["detail"] = one_of(part["detail"], f"{param}.detail", _DETAILS)
    return {"type": "image_url", "image_url": image}


def _file(part: dict[str, Any], param: str) -> dict[str, Any]:
    for name in ("file_id", "file_url"):
        if part.get(name) is not None:
            refuse(f"{param}.{name}", "files are neither stored nor fetched here; send 'file_data'.")
    file = {"file_data": given(part, "file_data", param, str)}
    if part.get("filename") is not None:
        file["filename"] = typed(part["filename"], f"{param}.filename", str)
    return {"type": "file", "file": file}


def _audio(part: dict[str, Any], param: str) -> dict[str, Any]:
    audio = given(part, "input_audio", param, dict)
    only(audio, f"{param}.input_audio", ("data", "format"))
    return {"type": "input_audio", "input_audio": audio}


_PARTS: Final[dict[str, Callable[[dict[str, Any], str], dict[str, Any]]]] = {
    "input_text": _text,
    "output_text": _text,
    "refusal": _refusal,
    "input_image": _image,
    "input_file": _file,
    "input_audio": _audio,
}


# --- the list that is told back --------------------------------------------------------------------------------------


def input_items(given_input: Any, stream_id: str) -> list[dict[str, Any]]:
    """The items of an input that was good, oldest first, each with an id: its own, or one made of its place."""
    items = [{"role": "user", "content": given_input}] if isinstance(given_input, str) else given_input
    return [_listed(item, f"{stream_id}_in{place}") for place, item in enumerate(items)]


def _listed(item: dict[str, Any], suffix: str) -> dict[str, Any]:
    kind = item.get("type", "message")
    prefix = {"message": "msg", "function_call": "fc", "reasoning": "rs"}.get(kind, "item")
    told = {"status": "completed", **item, "type": kind, "id": item.get("id") or f"{prefix}_{suffix}"}
    if kind == "message":
        told["content"] = _listed_content(item["role"], item["content"])
    return told


def _listed_content(role: str, content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    said = "output_text" if role == "assistant" else "input_text"
    parts = [{"type": said, "text": content}] if isinstance(content, str) else content
    return [_DEFAULTS.get(part["type"], {}) | part for part in parts]


_DEFAULTS: Final[dict[str, dict[str, Any]]] = {"output_text": {"annotations": []}, "input_image": {"detail": "auto"}}


def page_of(
    items: list[dict[str, Any]], after: str | None, limit: int, *, newest_first: bool
) -> tuple[list[dict[str, Any]], bool]:
    """At most `limit` items behind the one with the id `after`, and whether there are more.  Raises BadRequest."""
    ordered = items[::-1] if newest_first else items
    begin = 0
    if after is not None:
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise BadRequest(f"No item with id '{after[:80]}' found.", param="after", reason="invalid_value")
        begin = places[0] + 1
    return ordered[begin : begin + limit], len(ordered) > begin + limit
