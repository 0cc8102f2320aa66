"""The description of the Responses routes."""

from __future__ import annotations

from typing import Any, Final

from midstream.transports.openapi_parts import TEXT, body_of, events, json_of, operation, parameter, ref
from midstream.transports.openapi_vendor import vendor_errors
from midstream.wire import H_IDEMPOTENCY, MAX_IDEMPOTENCY_CHARS, MAX_SEQ, RESPONSES_PATH

_EVENTS: Final = "With `stream`: events of the Responses API, numbered from 0, the last of which ends the response"
_FLAG: Final = {"type": ["boolean", "null"], "default": False}
_ITEMS: Final = {"type": "array", "items": {"type": "object"}}

RESPONSES_SCHEMAS: Final[dict[str, Any]] = {
    "ResponseRequest": {
        "type": "object",
        "required": ["input"],
        "description": "Fields that the Responses API does not know go on to the upstream",
        "properties": {
            "input": {"type": ["string", "array"], "items": {"type": "object"}},
            "instructions": {"type": ["string", "null"]},
            "model": {"type": ["string", "null"], "minLength": 1},
            "stream": _FLAG,
            "background": {**_FLAG, "description": "Answer at once, and never abandon it"},
            "tools": _ITEMS,
            "metadata": {"type": ["object", "null"], "additionalProperties": TEXT, "maxProperties": 16},
            "max_output_tokens": {"type": ["integer", "null"], "minimum": 1},
            "abandon_after": {
                "type": "number",
                "exclusiveMinimum": 0,
                "description": "Cancel once nobody has read or asked for so many seconds",
            },
        },
        "additionalProperties": True,
    },
    "Response": {
        "type": "object",
        "required": ["id", "object", "created_at", "status", "model", "output"],
        "properties": {
            "id": {"type": "string", "pattern": "^resp_"},
            "object": {"type": "string", "enum": ["response"]},
            "created_at": {"type": "integer", "description": "Seconds since 1970"},
            "status": {
                "type": "string",
                "enum": ["in_progress", "completed", "incomplete", "failed", "cancelled"],
            },
            "model": TEXT,
            "output": _ITEMS,
            "error": {"type": ["object", "null"]},
            "incomplete_details": {"type": ["object", "null"]},
            "usage": {"type": ["object", "null"]},
        },
        "additionalProperties": True,
    },
}


def responses_paths() -> dict[str, Any]:
    """The routes and what they answer."""
    name = {
        "name": "response_id",
        "in": "path",
        "required": True,
        "schema": TEXT,
        "description": "`resp_` and the id of its stream",
    }
    one = RESPONSES_PATH + "/{response_id}"
    told = json_of("It, as it stands", ref("Response"))
    deleted = {
        "type": "object",
        "properties": {"id": TEXT, "object": {"type": "string"}, "deleted": {"const": True}},
    }
    return {
        RESPONSES_PATH: {"post": _creating()},
        one: {"parameters": [name], "get": _retrieving(), "delete": _asked("Cancel and forget", deleted)},
        one + "/cancel": {
            "parameters": [name],
            "post": operation("Stop it", {"200": told} | vendor_errors(404, 502)),
        },
        one + "/input_items": {"parameters": [name], "get": _listing()},
    }


def _streamed() -> dict[str, Any]:
    either = events(_EVENTS)
    either["content"]["application/json"] = {"schema": ref("Response")}
    return either


def _creating() -> dict[str, Any]:
    failed = json_of("What the upstream refused the request with, or why the response failed", ref("VendorError"))
    key = parameter(
        H_IDEMPOTENCY, "header", "A retry with it attaches to the first try's stream", maxLength=MAX_IDEMPOTENCY_CHARS
    )
    return operation(
        "Begin a response: follow it, wait for it, or leave it in the background",
        {"200": _streamed(), "default": failed} | vendor_errors(404, 409, 413, 415, 422, 429, 502, 504),
        requestBody=body_of(ref("ResponseRequest")),
        parameters=[key],
    )


def _retrieving() -> dict[str, Any]:
    after = {"type": "integer", "minimum": 0, "maximum": MAX_SEQ}
    return operation(
        "The response as it stands, or its events after a number and then live",
        {"200": _streamed()} | vendor_errors(404, 502),
        parameters=[
            parameter("stream", "query", "Its events instead", enum=["true", "false"]),
            parameter("starting_after", "query", "Number of the last event that was seen; without it all", **after),
        ],
    )


def _listing() -> dict[str, Any]:
    listed = {
        "type": "object",
        "properties": {"object": {"const": "list"}, "data": _ITEMS, "has_more": {"type": "boolean"}},
    }
    return operation(
        "What it was asked, item by item",
        {"200": json_of("Them", listed)} | vendor_errors(404),
        parameters=[
            parameter("after", "query", "The items behind the one with this id"),
            parameter("limit", "query", "At most so many", type="integer", minimum=1, maximum=100),
            parameter("order", "query", "`desc`: the newest first", enum=["asc", "desc"]),
        ],
    )


def _asked(summary: str, schema: dict[str, Any]) -> dict[str, Any]:
    return operation(summary, {"200": json_of("Done", schema)} | vendor_errors(404))
