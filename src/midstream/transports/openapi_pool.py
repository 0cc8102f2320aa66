"""The part of `/openapi.json` that describes the worker pool's routes, where a gateway has a pool."""

from __future__ import annotations

from typing import Any

from midstream.transports.openapi_pool_view import VIEW_SCHEMAS, view_path
from midstream.transports.workers_shapes import FAULTS
from midstream.wire import MAX_SEQ, POOL_FINISHES, POOL_PROGRESS_PATHS, POOL_TEXT_PATH, POOL_USER_PATH

_TEXT = {"type": "string"}
_FLAG = {"type": "boolean"}
_COUNT = {"type": "integer", "minimum": 0}
_LENGTH = {"type": "integer", "minimum": 1, "description": "Tokens"}
_TEXTS = {"type": "array", "items": _TEXT}
_OBJECTS = {"type": "array", "items": {"type": "object"}}
_ID = {"type": "string", "format": "uuid"}
# Who has the id of a request, or the lease of a generation, needs no other right.
_OPEN: list[dict[str, list[str]]] = []
_KEYED: list[dict[str, list[str]]] = [{}, {"apikey": []}, {"bearer": []}]

_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"const": "assistant"},
        "content": {"type": ["string", "null"], "description": "Null only beside tool_calls"},
        "reasoning_content": _TEXT,
        "tool_calls": _OBJECTS,
    },
}


def _schema(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties}


SCHEMAS: dict[str, Any] = {
    "PoolError": {
        **_schema(
            ["message"],
            message={"type": "string", "description": "For people"},
            rc={"type": "string", "description": "The code; absent where `errors` says what is wrong"},
            errors={"type": "object", "additionalProperties": _TEXT, "description": "Field -> complaint"},
            expected={"type": "integer", "description": "The seq that is due"},
        ),
        "additionalProperties": True,
    },
    "PoolAsk": _schema(
        ["prompt"],
        prompt={"type": "string", "minLength": 1},
        params={
            "type": "object",
            "properties": {
                "n": {"type": "integer", "minimum": 1, "maximum": 20, "default": 1},
                "max_length": {"type": "integer", "minimum": 16, "maximum": 16384, "default": 80},
                "max_context_length": {"type": "integer", "minimum": 80, "maximum": 1048576, "default": 2048},
                "stop_sequence": _TEXTS,
            },
            "additionalProperties": True,
        },
        models=_TEXTS,
        workers=_TEXTS,
        worker_blacklist=_FLAG,
        dry_run=_FLAG,
    ),
    "PoolAccepted": _schema(["kudos"], id=_ID, kudos=_COUNT, message=_TEXT),
    "PoolStatus": _schema(
        ["finished", "processing", "waiting", "done", "faulted", "generations"],
        finished=_COUNT,
        processing=_COUNT,
        restarted={**_COUNT, "description": "Generations that were lost"},
        waiting=_COUNT,
        done=_FLAG,
        faulted=_FLAG,
        wait_time={**_COUNT, "description": "Always 0: no estimate is made"},
        queue_position=_COUNT,
        kudos={**_COUNT, "description": "Charged so far"},
        is_possible=_FLAG,
        generations=_OBJECTS,
    ),
    "PoolPop": _schema(
        ["name", "models"],
        name=_TEXT,
        models=_TEXTS,
        max_length=_LENGTH,
        max_context_length=_LENGTH,
        amount={"type": "integer", "minimum": 1, "maximum": 20},
        threads={"type": "integer", "minimum": 1, "maximum": 50},
        bridge_agent=_TEXT,
        chat_jobs=_FLAG,
        prompt_jobs=_FLAG,
        model_id=_TEXT,
        chat_features=_TEXTS,
        chat_limits={"type": "object"},
        image_transports=_TEXTS,
    ),
    "PoolJob": _schema(
        ["id", "ids", "model", "payload", "softprompt", "skipped", "messages"],
        id={"type": ["string", "null"], "description": "Null: there is no job for this worker"},
        ids=_TEXTS,
        model={"type": ["string", "null"]},
        chat={"const": True, "description": "The payload has `messages`, not a `prompt`"},
        ttl={"type": "integer", "description": "Seconds until a silent worker loses the job"},
        payload={
            "type": "object",
            "properties": {"stream_progress": {"const": True, "description": "Somebody reads along"}},
        },
        softprompt={"type": "null"},
        skipped={"type": "object", "additionalProperties": _COUNT},
        messages={"type": "array"},
    ),
    "PoolProgress": _schema(
        ["id", "seq"],
        id=_ID,
        seq={"type": "integer", "minimum": 0, "maximum": MAX_SEQ, "description": "From 1; 0 only renews the lease"},
        content={"type": ["string", "null"]},
        reasoning_content={"type": ["string", "null"]},
    ),
    "PoolSubmit": _schema(
        ["id"],
        id=_ID,
        generation={"type": "string", "description": "A prompt job's reply"},
        message={**_MESSAGE, "description": "A chat job's reply"},
        state={"type": "string", "enum": ["ok", "censored", "csam", "faulted"]},
        fault_reason={"type": "string", "description": f"One of {', '.join(FAULTS)}, say"},
        finish_reason={"type": "string", "enum": list(POOL_FINISHES)},
        native_finish_reason=_TEXT,
        model_id=_TEXT,
        seed={"type": "integer"},
        gen_metadata=_OBJECTS,
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        reasoning_tokens=_COUNT,
    ),
}


def with_pool(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the pool's routes."""
    components = document["components"]
    return document | {
        "paths": document["paths"] | _paths() | view_path(),
        "components": components | {"schemas": components["schemas"] | SCHEMAS | VIEW_SCHEMAS},
    }


def _answer(description: str, schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": description, "content": content}


def _post(summary: str, takes: str, answers: dict[str, Any], security: list[dict[str, list[str]]]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{takes}"}}}
    return _operation(summary, answers, security, requestBody={"required": True, "content": content})


def _operation(
    summary: str, answers: dict[str, Any], security: list[dict[str, list[str]]], **more: Any
) -> dict[str, Any]:
    return {"summary": summary, "security": security, "responses": answers, **more}


def _refusals(*statuses: int) -> dict[str, Any]:
    reasons = {
        400: "What was sent is not what the route takes",
        401: "InvalidAPIKey",
        403: "WrongCredentials, or a page's origin that is not configured",
        404: "InvalidJobID, RequestNotFound",
        409: "ChatProgressOutOfSequence, with `expected`",
        413: "A body that is too large, or ChatProgressTooLarge",
        415: "A body that is not application/json",
        421: "A host that this gateway does not answer for",
        429: "TooManyPrompts: the owner waits for as many generations as one may",
        500: "The gateway failed",
        503: "The pool's store does not answer",
    }
    told = sorted({403, 421, 500, 503, *statuses})
    return {str(status): _answer(reasons[status], "PoolError") for status in told}


def _paths() -> dict[str, Any]:
    body = (400, 413, 415)
    request_id = {"name": "id", "in": "path", "required": True, "schema": _ID}
    status = {"200": _answer("How it stands", "PoolStatus")} | _refusals(404)
    progress = _post(
        "What a worker has generated since its last post, or a sign of life",
        "PoolProgress",
        {"200": _cancelled()} | _refusals(*body, 404, 409),
        _OPEN,
    )
    return {
        **{path: {"post": progress} for path in POOL_PROGRESS_PATHS},
        f"{POOL_TEXT_PATH}/async": {
            "post": _post(
                "Ask for generations, to be polled for",
                "PoolAsk",
                {"202": _answer("Queued", "PoolAccepted"), "200": _answer("With `dry_run`", "PoolAccepted")}
                | _refusals(*body, 401, 429),
                _KEYED,
            )
        },
        f"{POOL_TEXT_PATH}/status/{{id}}": {
            "parameters": [request_id],
            "get": _operation("How a request stands", status, _OPEN),
            "delete": _operation("Cancel a request", status, _OPEN),
        },
        f"{POOL_TEXT_PATH}/pop": {
            "post": _post(
                "A job that this worker can do, or none",
                "PoolPop",
                {"200": _answer("A job, or `id` null", "PoolJob")} | _refusals(*body, 401),
                _KEYED,
            )
        },
        f"{POOL_TEXT_PATH}/submit": {
            "post": _post(
                "Hand in a reply, or a fault",
                "PoolSubmit",
                {"200": _reward()} | _refusals(*body, 401, 404),
                _KEYED,
            )
        },
        POOL_USER_PATH: {
            "get": _operation("Whose key this is, and the balance", {"200": _user()} | _refusals(400, 401), _KEYED)
        },
    }


def _inline(description: str, **properties: Any) -> dict[str, Any]:
    schema = _schema(list(properties), **properties)
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _cancelled() -> dict[str, Any]:
    return _inline("Taken; `cancelled`: nobody wants the rest", cancelled=_FLAG)


def _reward() -> dict[str, Any]:
    return _inline("Taken, and paid", reward={"type": "number"})


def _user() -> dict[str, Any]:
    return _inline("The account", username=_TEXT, kudos={"type": "integer"})
