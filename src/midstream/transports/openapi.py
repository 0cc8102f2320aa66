"""`/openapi.json`: the HTTP contract for tools (OpenAPI 3.1).  PROTOCOL.md is the contract for people."""

from __future__ import annotations

from typing import Any, get_args

from midstream.wire import (
    CANCELLED,
    FAILURES,
    FROM_START,
    H_HEARTBEAT,
    H_IDEMPOTENCY,
    H_LAST_EVENT_ID,
    H_STREAM_ID,
    HTTP_STATUS,
    MAX_IDEMPOTENCY_CHARS,
    MAX_SEQ,
    Q_CURSOR,
    Q_FROM,
    Status,
)

_SEQ = {"type": "integer", "minimum": 0, "maximum": MAX_SEQ}
_TEXT = {"type": "string"}
_STATUS = {"type": "string", "enum": list(get_args(Status))}
_SECURED: list[dict[str, list[str]]] = [{}, {"bearer": []}, {"apikey": []}]

_STREAM_ID = {
    "name": "stream_id",
    "in": "path",
    "required": True,
    "schema": _TEXT,
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
            "prompt": _TEXT,
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
            "stream_id": _TEXT,
            "status": _STATUS,
            "model": _TEXT,
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
            "stream_id": _TEXT,
            "seq": _SEQ,
            "cursor": {"type": "string", "description": "Resumes after `seq`"},
            "text": _TEXT,
            "complete": {"type": "boolean", "description": "False: the start of the answer had to be let go"},
            "status": _STATUS,
            "model": _TEXT,
            "reasoning": _TEXT,
            "choices": {"type": "array", "items": {"type": "object"}},
            "finish_reason": _TEXT,
            "usage": {"type": "object"},
            "error": {"type": "object"},
        },
    },
}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _parameter(name: str, where: str, description: str, **schema: Any) -> dict[str, Any]:
    return {"name": name, "in": where, "description": description, "schema": {"type": "string", **schema}}


def _errors(*statuses: int) -> dict[str, Any]:
    """The error answers of a route, each naming the codes it may carry."""
    answers = {}
    for status in sorted({400, 401, 403, 421, 500, 503, *statuses}):
        codes = ", ".join(code for code, its in HTTP_STATUS.items() if its == status)
        answers[str(status)] = _json(codes, _ref("Error"))
    return answers


def _events() -> dict[str, Any]:
    headers = {
        H_STREAM_ID: {"schema": _TEXT},
        H_HEARTBEAT: {
            "schema": {"type": "number"},
            "description": "Seconds of silence before a sign of life",
        },
        "Location": {"schema": _TEXT, "description": "Where to resume"},
    }
    return {
        "description": "Records as server-sent events: `start`, `token` …, then `done`, `failed` or `cancelled`",
        "headers": headers,
        "content": {"text/event-stream": {"schema": _TEXT}},
    }


def _operation(summary: str, responses: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"summary": summary, "security": _SECURED, "responses": responses, **more}


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
        "paths": {**_stream_paths(), **_other_paths()},
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apikey": {"type": "apiKey", "in": "header", "name": "apikey"},
            },
        },
    }


def _stream_paths() -> dict[str, Any]:
    state = {"200": _json("The state now", _ref("State"))}
    cancelled = {"type": "object", "properties": {"stream_id": _TEXT, "status": _STATUS}}
    forgotten = {"type": "object", "properties": {"stream_id": _TEXT, "deleted": {"const": True}}}
    position = {"type": "object", "required": ["seq"], "properties": {"seq": _SEQ}}
    listing = {"type": "object", "properties": {"streams": {"type": "array", "items": _ref("State")}}}
    whole = _events()
    whole["content"]["application/json"] = {"schema": _ref("Snapshot")}
    idempotency = _parameter(
        H_IDEMPOTENCY,
        "header",
        "A retry with it attaches to the first try's stream",
        maxLength=MAX_IDEMPOTENCY_CHARS,
    )
    positions = [
        _parameter(Q_CURSOR, "query", "Everything after this cursor; wins over the header"),
        _parameter(Q_FROM, "query", f"Where to begin without a header: `{FROM_START}` or a cursor"),
        _parameter(H_LAST_EVENT_ID, "header", "What a browser's EventSource sends: a bare seq, or a cursor"),
    ]
    return {
        "/v1/stream": {
            "post": _operation(
                "Begin a generation and follow it",
                {"200": whole, "502": _json("With `stream: false`: it failed", _ref("Error"))}
                | _errors(400, 404, 409, 413, 415, 422, 429),
                requestBody=_body(_ref("Create")),
                parameters=[idempotency],
            )
        },
        "/v1/streams": {"get": _operation("Your streams, newest first", {"200": _json("Them", listing)} | _errors())},
        "/v1/stream/{stream_id}": {
            "parameters": [_STREAM_ID],
            "get": _operation(
                "Resume: everything after the position, then live",
                {"200": _events(), "204": {"description": "All has been read"}} | _errors(400, 404, 409),
                parameters=positions,
            ),
            "delete": _operation("Cancel and forget", {"200": _json("Gone", forgotten)} | _errors(404)),
        },
        "/v1/stream/{stream_id}/state": {
            "parameters": [_STREAM_ID],
            "get": _operation("Its counters", state | _errors(404)),
        },
        "/v1/stream/{stream_id}/snapshot": {
            "parameters": [_STREAM_ID],
            "get": _operation("The answer so far", {"200": _json("It", _ref("Snapshot"))} | _errors(404)),
        },
        "/v1/stream/{stream_id}/ack": {
            "parameters": [_STREAM_ID],
            "post": _operation(
                "Let go of what has been read",
                state | _errors(400, 404, 409, 413, 415),
                requestBody=_body(position),
            ),
        },
        "/v1/stream/{stream_id}/cancel": {
            "parameters": [_STREAM_ID],
            "post": _operation("Stop the generation", {"200": _json("How it ended", cancelled)} | _errors(404)),
        },
    }


def _other_paths() -> dict[str, Any]:
    def public(summary: str, kind: str, *statuses: int) -> dict[str, Any]:
        answer = {"description": summary, "content": {kind: {}}}
        return {"get": {"summary": summary, "responses": {str(status): answer for status in (200, *statuses)}}}

    return {
        "/v1/session": {
            "post": _operation(
                "A cookie for EventSource and WebSocket, which cannot send a key",
                {"204": {"description": "The cookie is set (none without keys, where none is needed)"}} | _errors(),
            )
        },
        "/healthz": public("The process is alive", "application/json"),
        "/readyz": public("The journal takes streams", "application/json", 503),
        "/metrics": public("Metrics for Prometheus", "text/plain"),
        "/openapi.json": public("This document", "application/json"),
    }
