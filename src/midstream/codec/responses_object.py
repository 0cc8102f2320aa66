"""The `response` object: what was asked, told again, and how it ended.  A pure function of what a stream has kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import orjson

from midstream.codec.pieces import as_object
from midstream.records import StreamMeta
from midstream.wire import CANCELLED, DONE, FAILED

_PREFIX: Final = "resp_"
LOGPROBS: Final = "message.output_text.logprobs"

# Fields of a request that come back as they were, and what they are where it does not name them.
_ECHOED: Final[dict[str, Any]] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "service_tier": None,
    "store": True,
    "temperature": None,
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
# Why an answer that ended by itself is not a whole one.
_INCOMPLETE: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}
_ERROR_CODES: Final = {400: "invalid_prompt", 413: "invalid_prompt", 422: "invalid_prompt", 429: "rate_limit_exceeded"}


def response_id(stream_id: str) -> str:
    """What a stream is called as a response: its own id is in it, so that any replica finds it."""
    return _PREFIX + stream_id


def stream_of(called: str) -> str | None:
    """The stream behind the id of a response; None for what is no such id."""
    return called.removeprefix(_PREFIX) if called.startswith(_PREFIX) else None


class Ending(NamedTuple):
    """How a response stands: `event` ends its stream (None while it is open), `item` is the status of open items."""

    status: str
    event: str | None
    item: str
    error: dict[str, Any] | None = None
    incomplete: str | None = None
    usage: dict[str, Any] | None = None


OPEN_ENDED: Final = Ending("in_progress", None, "in_progress")


def ending(event: str, data: Mapping[str, Any], finish_reason: Any) -> Ending:
    """What a terminal record says, in the words of Responses.  `finish_reason` is the first choice's."""
    if event == DONE:
        usage = usage_of(data.get("usage"))
        reason = _INCOMPLETE.get(finish_reason) if isinstance(finish_reason, str) else None
        if reason is not None:
            return Ending("incomplete", "response.incomplete", "incomplete", incomplete=reason, usage=usage)
        return Ending("completed", "response.completed", "completed", usage=usage)
    if event == CANCELLED:
        return Ending("cancelled", "response.incomplete", "incomplete")
    assert event == FAILED
    return Ending("failed", "response.failed", "incomplete", error=_error_of(data.get("error")))


def _error_of(error: Any) -> dict[str, Any]:
    """Codes are the vendor's few; our own, which says more, stands in `type`."""
    fields = as_object(error)
    status = fields.get("status")
    code = _ERROR_CODES.get(status if type(status) is int else 0, "server_error")
    kind = str(fields.get("code", "producer_error"))
    return {"code": code, "message": str(fields.get("message") or kind), "type": kind, "param": None}


def usage_of(usage: Any) -> dict[str, Any] | None:
    """The upstream's count of tokens under the names of Responses; None where it gave none."""
    if not isinstance(usage, dict):
        return None
    into, out = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    read, made = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    return {
        "input_tokens": into,
        "input_tokens_details": {
            "cached_tokens": _count(read, "cached_tokens"),
            "cache_write_tokens": _count(read, "cache_write_tokens"),
        },
        "output_tokens": out,
        "output_tokens_details": {"reasoning_tokens": _count(made, "reasoning_tokens")},
        "total_tokens": _count(usage, "total_tokens") or into + out,
    }


def _count(fields: Any, name: str) -> int:
    value = fields.get(name) if isinstance(fields, dict) else None
    return value if type(value) is int else 0


def asked_of(meta: StreamMeta) -> dict[str, Any]:
    """The body of the request that the stream was opened with."""
    return as_object(orjson.loads(meta.request).get("body"))


class ResponseObject:
    """A response without its output and its end, which `told` adds.

    `summary` is the kind of summary of the reasoning that was asked for, if any; `logprobs`, whether they were.
    """

    def __init__(self, meta: StreamMeta) -> None:
        body = asked_of(meta)
        told: dict[str, Any] = dict(_ECHOED)
        told |= {name: body[name] for name in _ECHOED if body.get(name) is not None}
        told["tools"] = [_tool(tool) for tool in told["tools"]]
        reasoning, text = body.get("reasoning") or {}, body.get("text") or {}
        self.summary: str | None = reasoning.get("summary") or reasoning.get("generate_summary")
        self.logprobs = LOGPROBS in (body.get("include") or ())
        self._head = {
            "id": response_id(meta.stream_id),
            "object": "response",
            "created_at": int(meta.created_at),
            "model": meta.model,
            **told,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.get("effort"), "summary": self.summary},
            "text": {"format": {"type": "text"}} | {name: value for name, value in text.items() if value is not None},
        }

    def told(self, output: bytes, how: Ending = OPEN_ENDED) -> dict[str, Any]:
        """With this output (a JSON array) and end, as values for orjson."""
        return {
            **self._head,
            "status": how.status,
            "error": how.error,
            "incomplete_details": {"reason": how.incomplete} if how.incomplete else None,
            "output": orjson.Fragment(output),
            "usage": how.usage,
        }


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"description": None, "parameters": None, "strict": None} | tool
