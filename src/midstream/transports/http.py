"""What the HTTP transports share: the caller, bodies, query fields, errors as JSON."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from midstream.errors import (
    BadRequest,
    Busy,
    MethodNotAllowed,
    MidstreamError,
    NotFound,
    ProducerFailed,
    TooLarge,
    UnsupportedMediaType,
)
from midstream.wire import BARE_ERRORS, HTTP_STATUS, POSITION_ERRORS

# Keys of a scope: who asks, and the server's own `send`, which a wrapper that only looks at the first message of an
# answer leaves for the rest.
CALLER, DIRECT = "midstream.caller", "midstream.send"
_BY_NAME = "midstream.headers"

# No route takes more than two; every one is looked at.
_MAX_QUERY_FIELDS = 100

NO_STORE = {"cache-control": "no-store"}


class Caller(NamedTuple):
    """Whose request this is."""

    owner: str
    admin: bool = False


class Endpoint:
    """An ASGI endpoint for a Route (which takes a plain function for a request handler)."""

    def __init__(self, serve: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._serve = serve

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return self._serve(scope, receive, send)


def caller(scope: Scope) -> Caller:
    """The caller, whom the guard has put into the scope."""
    found: Caller = scope[CALLER]
    return found


def header(scope: Scope, name: bytes) -> str | None:
    """The only value of a header.  Raises BadRequest when it stands twice: which one is meant cannot be known."""
    headers = scope["headers"]
    made = scope.get(_BY_NAME)
    if made is None or made[0] is not headers:
        made = scope[_BY_NAME] = (headers, _by_name(headers))
    value: bytes | int | None = made[1].get(name)
    if value is None:
        return None
    if isinstance(value, int):
        raise BadRequest(f"the header {name.decode()} stands {value} times; send it once")
    # Blanks around a value are no part of it (RFC 9110, section 5.5); parsers leave those after it.
    return value.strip(b" \t").decode("latin-1")


def _by_name(headers: list[tuple[bytes, bytes]]) -> dict[bytes, bytes | int]:
    """Each header's only value, or how often it stands: made once for a request, which is asked for many."""
    fields: dict[bytes, bytes | int] = {}
    for name, value in headers:
        if name in fields:
            other = fields[name]
            fields[name] = other + 1 if isinstance(other, int) else 2
        else:
            fields[name] = value
    return fields


def query(scope: Scope, allowed: Iterable[str]) -> dict[str, list[str]]:
    """The query's fields, each with all its values.  Raises BadRequest for a field the route does not take."""
    fields: dict[str, list[str]] = {}
    text = scope["query_string"].decode("latin-1")
    if not text:
        return fields
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=_MAX_QUERY_FIELDS)
    except ValueError:
        raise BadRequest(f"more than {_MAX_QUERY_FIELDS} query fields") from None
    for name, value in pairs:
        fields.setdefault(name, []).append(value)
    known = set(allowed)
    for name in fields:
        if name not in known:
            takes = ", ".join(sorted(known)) or "none"
            raise BadRequest(f"unknown query field {name[:80]!r}; this route takes {takes}")
    return fields


async def read_body(scope: Scope, receive: Receive, max_body: int) -> bytes:
    """The whole body.  Raises UnsupportedMediaType, TooLarge; BadRequest when the client left in the middle."""
    kind = (header(scope, b"content-type") or "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise UnsupportedMediaType(f"the body must be application/json, not {kind or 'untyped'}")
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdecimal() and int(declared) > max_body:
        raise _too_large(max_body)
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise BadRequest("the client left before its request was whole")
        part = message.get("body", b"")
        size += len(part)
        if size > max_body:
            raise _too_large(max_body)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(max_body: int) -> TooLarge:
    return TooLarge(f"the body is over {max_body} bytes; shorten it, or raise --max-body")


async def read_json(scope: Scope, receive: Receive, max_body: int) -> dict[str, Any]:
    """The body as a JSON object.  Raises what `read_body` does, and BadRequest."""
    body = await read_body(scope, receive, max_body)
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadRequest("the body must be a JSON object")
    return fields


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer that nothing between us and the caller may keep."""
    return Response(orjson.dumps(content), status, headers=NO_STORE | (headers or {}), media_type="application/json")


def error_response(error: MidstreamError) -> Response:
    """The answer to an error: its status, its body (PROTOCOL.md, "Errors"), and `Retry-After` where waiting helps."""
    if isinstance(error, ProducerFailed):  # before there is a stream that could say so itself
        return json_response({"error": error.failure, "detail": error.detail}, 502)
    headers = {"retry-after": str(error.retry_after)} if isinstance(error, Busy) else None
    return json_response(error_body(error), HTTP_STATUS.get(error.code, 500), headers)


def unrouted(error: HTTPException, respond: Callable[[MidstreamError], Response], missing: str) -> Response:
    """The answer where the router has no route, or none for the method: a 405 names those there are."""
    if error.status_code != 405:
        return respond(NotFound(missing))
    allow = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
    response = respond(MethodNotAllowed(f"this route takes {allow}"))
    response.headers["allow"] = allow
    return response


def error_body(error: MidstreamError) -> dict[str, Any]:
    """Code and facts; some bodies are exact, the others have a text for people (PROTOCOL.md, "Errors")."""
    body: dict[str, Any] = {"error": error.code, **error.facts}
    if error.code in POSITION_ERRORS:
        body["action"] = error.action
    elif error.code not in BARE_ERRORS and error.detail:
        body["detail"] = error.detail
    return body
