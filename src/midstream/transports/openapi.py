"""`/openapi.json`: the HTTP contract for tools (OpenAPI 3.1).  PROTOCOL.md is the contract for people."""

from __future__ import annotations

from typing import Any, get_args

from midstream.transports.openapi_parts import TEXT, body_of, errors, events, json_of, operation, parameter, ref
from midstream.transports.openapi_responses import RESPONSES_SCHEMAS, responses_paths
from midstream.transports.openapi_vendor import VENDOR_SCHEMAS, vendor_paths
from midstream.wire import (
    CANCELLED,
    FAILURES,
    FORMAT_OPENAI,
    FROM_START,
    H_IDEMPOTENCY,
    H_LAST_EVENT_ID,
    HTTP_STATUS,
    MAX_IDEMPOTENCY_CHARS,
    MAX_SEQ,
    Q_CURSOR,
    Q_FORMAT,
    Q_FROM,
    Status,
)

_SEQ = {"type": "integer", "minimum": 0, "maximum": MAX_SEQ}
_STATUS = {"type": "string", "enum": list(get_args(Status))}

_STREAM_ID = {
    "name": "stream_id",
    "in": "path",
    "required": True,
    "schema": TEXT,
    "description": "As given in Midstream-Stream-Id and in the `start` record",
}

_SCHEMAS: dict[str, Any] = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {"type": "string", "enum": sorted({*HTTP_STATUS, *FAILURES, CANCELLED})},
            "detail": {"type": "string", "description": "For people: what happened and what to do"},
            "oldest_available": {"type": ["integer", "null"]},
            "highest_seq": _SEQ,
            "action": {"type": "string", "enum": ["restart"]},
            "stream_id": {"type": "string", "description": "Of the stream that failed, with `stream: false`"},
        },
    },
    "Create": {
        "type": "object",
        "description": "`prompt` or `messages`; every field not named here goes on to the upstream",
        "properties": {
            "prompt": TEXT,
            "messages": {"type": "array", "minItems": 1, "items": {"type": "object"}},
            "model": {"type": "string", "minLength": 1},
            "stream": {"type": "boolean", "default": True},
            "abandon_after": {
                "type": "number",
                "exclusiveMinimum": 0,
                "description": "Cancel once nobody has read or asked for so many seconds",
            },
        },
        "additionalProperties": True,
        "oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}],
    },
    "State": {
        "type": "object",
        "required": ["stream_id", "status", "model", "highest_seq", "oldest_retained_seq"],
        "properties": {
            "stream_id": TEXT,
            "status": _STATUS,
            "model": TEXT,
            "highest_seq": _SEQ,
            "oldest_retained_seq": _SEQ,
            "acked_seq": _SEQ,
            "trimmed_seq": _SEQ,
            "retained_records": {"type": "integer", "minimum": 0},
            "retained_bytes": {"type": "integer", "minimum": 0},
            "readers": {"type": "integer", "minimum": 0},
            "lowest_reader_seq": {"type": ["integer", "null"]},
            "created_at": {"type": "number", "description": "Seconds since 1970"},
            "last_access": {"type": "number", "description": "Seconds since 1970"},
        },
    },
    "Snapshot": {
        "type": "object",
        "required": ["stream_id", "seq", "cursor", "text", "complete", "status"],
        "properties": {
            "stream_id": TEXT,
            "seq": _SEQ,
            "cursor": {"type": "string", "description": "Resumes after `seq`"},
            "text": TEXT,
            "complete": {"type": "boolean", "description": "False: the start of the answer had to be let go"},
            "status": _STATUS,
            "model": TEXT,
            "reasoning": TEXT,
            "choices": {"type": "array", "items": {"type": "object"}},
            "finish_reason": TEXT,
            "usage": {"type": "object"},
            "error": {"type": "object"},
        },
    },
}


_RECORDS = "Records as server-sent events: `start`, `token` …, then `done`, `failed` or `cancelled`"


def describe(version: str) -> dict[str, Any]:
    """The whole document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Midstream",
            "version": version,
            "description": "Resumable token streams: every record has a number, every reader a position.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {**_stream_paths(), **vendor_paths(), **responses_paths(), **_other_paths()},
        "components": {
            "schemas": _SCHEMAS | VENDOR_SCHEMAS | RESPONSES_SCHEMAS,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apikey": {"type": "apiKey", "in": "header", "name": "apikey"},
            },
        },
    }


def _stream_paths() -> dict[str, Any]:
    state = {"200": json_of("The state now", ref("State"))}
    cancelled = {"type": "object", "properties": {"stream_id": TEXT, "status": _STATUS}}
    forgotten = {"type": "object", "properties": {"stream_id": TEXT, "deleted": {"const": True}}}
    position = {"type": "object", "required": ["seq"], "properties": {"seq": _SEQ}}
    listing = {"type": "object", "properties": {"streams": {"type": "array", "items": ref("State")}}}
    whole = events(_RECORDS)
    whole["content"]["application/json"] = {"schema": ref("Snapshot")}
    idempotency = parameter(
        H_IDEMPOTENCY,
        "header",
        "A retry with it attaches to the first try's stream",
        maxLength=MAX_IDEMPOTENCY_CHARS,
    )
    positions = [
        parameter(Q_CURSOR, "query", "Everything after this cursor; wins over the header"),
        parameter(Q_FROM, "query", f"Where to begin without a header: `{FROM_START}` or a cursor"),
        parameter(H_LAST_EVENT_ID, "header", "What a browser's EventSource sends: a bare seq, or a cursor"),
        parameter(Q_FORMAT, "query", "As chunks of chat or text completions instead of records", enum=[FORMAT_OPENAI]),
    ]
    return {
        "/v1/stream": {
            "post": operation(
                "Begin a generation and follow it",
                {"200": whole, "502": json_of("With `stream: false`: it failed", ref("Error"))}
                | errors(400, 404, 409, 413, 415, 422, 429),
                requestBody=body_of(ref("Create")),
                parameters=[idempotency],
            )
        },
        "/v1/streams": {"get": operation("Your streams, newest first", {"200": json_of("Them", listing)} | errors())},
        "/v1/stream/{stream_id}": {
            "parameters": [_STREAM_ID],
            "get": operation(
                "Resume: everything after the position, then live",
                {"200": events(_RECORDS), "204": {"description": "All has been read"}} | errors(400, 404, 409),
                parameters=positions,
            ),
            "delete": operation("Cancel and forget", {"200": json_of("Gone", forgotten)} | errors(404)),
        },
        "/v1/stream/{stream_id}/state": {
            "parameters": [_STREAM_ID],
            "get": operation("Its counters", state | errors(404)),
        },
        "/v1/stream/{stream_id}/snapshot": {
            "parameters": [_STREAM_ID],
            "get": operation("The answer so far", {"200": json_of("It", ref("Snapshot"))} | errors(404)),
        },
        "/v1/stream/{stream_id}/ack": {
            "parameters": [_STREAM_ID],
            "post": operation(
                "Let go of what has been read",
                state | errors(400, 404, 409, 413, 415),
                requestBody=body_of(position),
            ),
        },
        "/v1/stream/{stream_id}/cancel": {
            "parameters": [_STREAM_ID],
            "post": operation("Stop the generation", {"200": json_of("How it ended", cancelled)} | errors(404)),
        },
    }


def _other_paths() -> dict[str, Any]:
    def public(summary: str, kind: str, *statuses: int) -> dict[str, Any]:
        answer = {"description": summary, "content": {kind: {}}}
        return {"get": {"summary": summary, "responses": {str(status): answer for status in (200, *statuses)}}}

    return {
        "/v1/session": {
            "post": operation(
                "A cookie for EventSource and WebSocket, which cannot send a key",
                {"204": {"description": "The cookie is set (none without keys, where none is needed)"}} | errors(),
            )
        },
        "/healthz": public("The process is alive", "application/json"),
        "/readyz": public("The journal takes streams", "application/json", 503),
        "/metrics": public("Metrics for Prometheus", "text/plain"),
        "/openapi.json": public("This document", "application/json"),
    }
