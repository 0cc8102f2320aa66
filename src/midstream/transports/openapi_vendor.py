"""The description of the routes that OpenAI's clients ask."""

from __future__ import annotations

from typing import Any, Final

from midstream.transports.openapi_parts import TEXT, body_of, events, json_of, operation, parameter, ref
from midstream.wire import CHAT_PATH, COMPLETIONS_PATH, H_IDEMPOTENCY, MAX_IDEMPOTENCY_CHARS, MODELS_PATH

_CHUNKS: Final = "With `stream`: chunks as server-sent events, at last `[DONE]`, or an error object instead"
# What is asked for beside these goes on to the upstream.
_OPTIONS: Final[dict[str, Any]] = {
    "model": {"type": "string", "minLength": 1},
    "stream": {"type": ["boolean", "null"], "default": False},
    "stream_options": {"type": ["object", "null"], "properties": {"include_usage": {"type": "boolean"}}},
    "n": {"type": ["integer", "null"], "minimum": 1},
    "abandon_after": {
        "type": "number",
        "exclusiveMinimum": 0,
        "description": "Cancel once nobody has read or asked for so many seconds",
    },
}

VENDOR_SCHEMAS: Final[dict[str, Any]] = {
    "VendorError": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": TEXT,
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "integer", "null"]},
                },
            }
        },
    },
    "ChatRequest": {
        "type": "object",
        "required": ["messages"],
        "properties": {"messages": {"type": "array", "minItems": 1, "items": {"type": "object"}}, **_OPTIONS},
        "additionalProperties": True,
    },
    "CompletionRequest": {
        "type": "object",
        "required": ["prompt"],
        "properties": {"prompt": {"type": ["string", "array"]}, **_OPTIONS},
        "additionalProperties": True,
    },
    "Completion": {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices"],
        "properties": {
            "id": TEXT,
            "object": {"type": "string", "enum": ["chat.completion", "text_completion"]},
            "created": {"type": "integer", "description": "Seconds since 1970"},
            "model": TEXT,
            "choices": {"type": "array", "items": {"type": "object"}},
            "usage": {"type": "object"},
        },
        "additionalProperties": True,
    },
    "Model": {
        "type": "object",
        "required": ["id", "object", "created", "owned_by"],
        "properties": {
            "id": TEXT,
            "object": {"type": "string", "enum": ["model"]},
            "created": {"type": "integer"},
            "owned_by": TEXT,
        },
        "additionalProperties": True,
    },
}


def vendor_errors(*statuses: int) -> dict[str, Any]:
    """The errors of a route, in the vendor's shape."""
    answers = {str(status): "Refused" for status in sorted({400, 401, 403, 421, 500, 503, *statuses})}
    return {status: json_of(description, ref("VendorError")) for status, description in answers.items()}


def _completing(summary: str, request: str) -> dict[str, Any]:
    whole = events(_CHUNKS)
    whole["content"]["application/json"] = {"schema": ref("Completion")}
    failed = json_of("What the upstream refused the request with, or why the answer failed", ref("VendorError"))
    key = parameter(
        H_IDEMPOTENCY, "header", "A retry with it attaches to the first try's stream", maxLength=MAX_IDEMPOTENCY_CHARS
    )
    return {
        "post": operation(
            summary,
            {"200": whole, "default": failed} | vendor_errors(404, 409, 413, 415, 422, 429, 502, 504),
            requestBody=body_of(ref(request)),
            parameters=[key],
        )
    }


def vendor_paths() -> dict[str, Any]:
    """The routes and what they answer."""
    listed = {"type": "object", "properties": {"object": {"const": "list"}, "data": {"type": "array"}}}
    name = {"name": "model", "in": "path", "required": True, "schema": TEXT, "description": "It may have slashes"}
    return {
        CHAT_PATH: _completing("A chat completion, streamed or whole", "ChatRequest"),
        COMPLETIONS_PATH: _completing("A text completion, streamed or whole", "CompletionRequest"),
        MODELS_PATH: {
            "get": operation("Every model", {"200": json_of("Them", listed)} | vendor_errors()),
        },
        MODELS_PATH + "/{model}": {
            "parameters": [name],
            "get": operation("One model", {"200": json_of("It", ref("Model"))} | vendor_errors(404)),
        },
    }
