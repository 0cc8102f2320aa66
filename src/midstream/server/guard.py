"""What stands before every route: host, origin, preflight, key; and after it: errors as JSON, CORS headers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from midstream.errors import BadRequest, MidstreamError, NotFound, Unauthorized
from midstream.server.auth import OPEN_OWNER, Gate, Keys
from midstream.transports.connect import REFUSED
from midstream.transports.http import CALLER, DIRECT, Caller, error_response, header, unrouted
from midstream.transports.openai_errors import speaks, vendor_response
from midstream.transports.websocket import WHOSE
from midstream.transports.workers import PREFIXES, refusal
from midstream.wire import CORS_ALLOW, CORS_EXPOSE, CORS_METHODS, GRPC_SERVICE, SESSION_COOKIE, WS_PATH

_log = logging.getLogger("midstream")

# No key needed: the pages and their parts, what a probe or a scraper asks, and the description of the rest.
_PUBLIC = frozenset({"/", "/pool", "/healthz", "/readyz", "/metrics", "/openapi.json", "/favicon.ico"})
_PUBLIC_PREFIX = "/web/"


class Guard:
    """Wraps the router.  `keys` is asked anew for each request, so that a re-read file counts at once."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Callable[[], Keys],
        gate: Gate,
        clock: Callable[[], float],
        refused: dict[str, int],
    ) -> None:
        self._refused = refused
        self._app = app
        self._keys = keys
        self._gate = gate
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        cors: list[tuple[bytes, bytes]] = []

        async def watched(message: Message) -> None:
            nonlocal started
            if message["type"] == "websocket.accept":
                started = True
            elif message["type"] == "http.response.start":
                started = True
                if cors:
                    message["headers"] = [*message.get("headers", ()), *cors]
            await send(message)

        try:
            origin = header(scope, b"origin")
            cross = self._gate.check(header(scope, b"host"), origin)
            if cross and origin is not None:
                cors = cors_headers(origin)
            elif self._gate.cors_origins:
                cors = [(b"vary", b"Origin")]
            if scope["type"] == "websocket":
                self._admit_socket(scope)
            elif scope["method"] == "OPTIONS" and cross:
                await preflight(scope, receive, watched)
                return
            else:
                self._admit(scope)
            # A stream's many writes go straight to the server: only the first message of an answer is looked at here.
            scope[DIRECT] = send
            scope["app"] = self._app  # makes the router raise for what it does not know, instead of answering text
            await self._app(scope, receive, watched)
        except Exception as error:  # whatever went wrong, the caller gets an answer of the usual shape
            if started:
                raise
            await self._answer(error, shape_of(scope["path"]))(scope, receive, watched)

    def _admit(self, scope: Scope) -> None:
        try:
            if not scope["path"].startswith(PREFIXES):  # the pool's routes ask by themselves, where they want a key
                scope[CALLER] = self._identify(scope)
        except Unauthorized as error:
            if not scope["path"].startswith(f"/{GRPC_SERVICE}/"):
                raise
            scope[REFUSED] = error  # its client wants a status of the call, not of HTTP

    def _admit_socket(self, scope: Scope) -> None:
        """A key in a header must be good; without one, the first message may bring it."""
        if scope["path"] != WS_PATH:
            raise NotFound("there is no WebSocket here; see /openapi.json")
        scope[WHOSE] = partial(self._identify, scope)
        if any(name in (b"authorization", b"apikey") for name, _ in scope["headers"]):
            self._identify(scope)

    def _identify(self, scope: Scope) -> Caller:
        path: str = scope["path"]
        if path in _PUBLIC or path.startswith(_PUBLIC_PREFIX):
            return OPEN_OWNER
        try:
            authorization, apikey = header(scope, b"authorization"), header(scope, b"apikey")
        except BadRequest:
            raise Unauthorized from None
        keys = self._keys()
        no_key = authorization is None and apikey is None
        if no_key and not keys.open and takes_cookie(scope) and (cookie := session_cookie(scope)):
            return keys.of_session(cookie, self._clock())
        return keys.identify(authorization, apikey)

    def _answer(self, error: Exception, respond: Callable[[MidstreamError], Response]) -> Response:
        if isinstance(error, MidstreamError):
            self._refused[error.code] = self._refused.get(error.code, 0) + 1
            return respond(error)
        if isinstance(error, HTTPException):
            return unrouted(error, respond, "no such route; see /openapi.json")
        _log.error("a request failed", exc_info=error)
        return respond(MidstreamError("an internal error; the log has the cause"))


def shape_of(path: str) -> Callable[[MidstreamError], Response]:
    """How an error is told under this path: other protocols have bodies of their own."""
    if path.startswith(PREFIXES):
        return refusal
    return vendor_response if speaks(path) else error_response


def takes_cookie(scope: Scope) -> bool:
    """The session cookie counts only where a page cannot send a header: for an EventSource and a WebSocket."""
    if scope["type"] == "websocket":
        return True
    parts = scope["path"].split("/")
    return scope["method"] == "GET" and len(parts) == 4 and parts[:3] == ["", "v1", "stream"]


def session_cookie(scope: Scope) -> str | None:
    """The value of our cookie, if the request has one.

    Cut out by hand (RFC 6265, section 5.4): the ports of a host share their cookies, and `http.cookies` gives up at the
    first one that another program has set in a shape it does not like.
    """
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    for name, value in headers:
        if name == b"cookie":
            for pair in value.decode("latin-1").split(";"):
                key, _, text = pair.partition("=")
                if key.strip() == SESSION_COOKIE:
                    return text.strip()
    return None


def cors_headers(origin: str) -> list[tuple[bytes, bytes]]:
    """On every answer to a configured origin, errors included: without them a page sees a 409 as a network failure."""
    return [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-allow-credentials", b"true"),
        (b"access-control-expose-headers", CORS_EXPOSE.encode()),
        (b"vary", b"Origin"),
    ]


async def preflight(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a CORS preflight (Fetch, section 3.2) of a configured origin."""
    headers = {
        "access-control-allow-methods": CORS_METHODS,
        "access-control-allow-headers": CORS_ALLOW,
        "access-control-max-age": "600",
    }
    await Response(status_code=204, headers=headers)(scope, receive, send)
