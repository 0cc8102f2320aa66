"""What the description of an HTTP contract is put together from (OpenAPI 3.1)."""

from __future__ import annotations

from typing import Any

from midstream.wire import H_HEARTBEAT, H_STREAM_ID, HTTP_STATUS

SECURED: list[dict[str, list[str]]] = [{}, {"bearer": []}, {"apikey": []}]
TEXT = {"type": "string"}


def ref(name: str) -> dict[str, Any]:
    """A schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def json_of(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    """An answer that is JSON."""
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def body_of(schema: dict[str, Any]) -> dict[str, Any]:
    """A request's body."""
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def parameter(name: str, where: str, description: str, **schema: Any) -> dict[str, Any]:
    """A parameter in the query or a header."""
    return {"name": name, "in": where, "description": description, "schema": {"type": "string", **schema}}


def errors(*statuses: int) -> dict[str, Any]:
    """The error answers of a route, each naming the codes it may carry."""
    answers = {}
    for status in sorted({400, 401, 403, 421, 500, 503, *statuses}):
        codes = ", ".join(code for code, its in HTTP_STATUS.items() if its == status)
        answers[str(status)] = json_of(codes, ref("Error"))
    return answers


def operation(summary: str, responses: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What one method of a path does."""
    return {"summary": summary, "security": SECURED, "responses": responses, **more}


def events(description: str) -> dict[str, Any]:
    """An answer that is a stream, and its headers."""
    headers = {
        H_STREAM_ID: {"schema": TEXT},
        H_HEARTBEAT: {
            "schema": {"type": "number"},
            "description": "Seconds of silence before a sign of life",
        },
        "Location": {"schema": TEXT, "description": "Where to resume"},
    }
    return {
        "description": description,
        "headers": headers,
        "content": {"text/event-stream": {"schema": TEXT}},
    }
