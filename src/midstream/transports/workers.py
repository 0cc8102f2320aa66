"""The worker pool's routes (PROTOCOL.md, "Pool"): parse, call the pool, encode.

Errors are `{message, rc}` here, and wrong fields `{message, errors}`: another protocol's shapes, which existing workers
and clients act on.  A progress post is the one call that comes thousands of times a second: its lease says whose it is,
so it is answered without a key, a database or a request object.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from midstream.errors import BadRequest, Busy, MidstreamError, Unauthorized
from midstream.pool.errors import InvalidAPIKey, PoolError
from midstream.transports import workers_answers as answers
from midstream.transports import workers_shapes as shapes
from midstream.transports.http import NO_STORE, Caller, Endpoint, header, json_response, read_body
from midstream.transports.workers_fields import InvalidFields, Unparsable, parse
from midstream.wire import HTTP_STATUS, POOL_PROGRESS_PATHS, POOL_TEXT_PATH, POOL_USER_PATH

if TYPE_CHECKING:  # its database library is slow to load, and most gateways have no pool
    from midstream.pool.pool import Pool

# Everything under these answers in the shapes of this module, what does not exist too.
PREFIXES: Final = ("/api/", "/v2/")

_GO_ON, _STOP = b'{"cancelled":false}', b'{"cancelled":true}'


def _headers_of(body: bytes) -> list[tuple[bytes, bytes]]:
    response = Response(body, headers=NO_STORE, media_type="application/json")
    return response.raw_headers


_GO_ON_HEADERS, _STOP_HEADERS = _headers_of(_GO_ON), _headers_of(_STOP)
_MISSING_KEY = "Missing required parameter in the HTTP headers"

Answer = Callable[[Scope, Receive], Awaitable[Response]]
Refusal = MidstreamError | PoolError | InvalidFields | Unparsable


@dataclass(frozen=True, slots=True)
class WorkersApi:
    """The routes, over the pool.

    Of `Authorization` and `apikey`, `identify` says who is behind them, or raises Unauthorized; `digest` is what a
    lease is bound to, and never raises.
    """

    pool: Pool
    max_body: int
    identify: Callable[[str | None, str | None], Caller]
    digest: Callable[[str | None, str | None], bytes]
    refused: dict[str, int]

    def routes(self) -> list[Route]:
        """In the order in which they are tried: the one that is asked most comes first."""
        progress = [Route(path, Endpoint(self.progress), methods=["POST"]) for path in POOL_PROGRESS_PATHS]
        status = Route(f"{POOL_TEXT_PATH}/status/{{id}}", self._answered(self.status), methods=["GET", "DELETE"])
        status.methods = {"GET", "DELETE"}
        return [
            *progress,
            Route(f"{POOL_TEXT_PATH}/pop", self._answered(self.pop), methods=["POST"]),
            Route(f"{POOL_TEXT_PATH}/submit", self._answered(self.submit), methods=["POST"]),
            Route(f"{POOL_TEXT_PATH}/async", self._answered(self.enqueue), methods=["POST"]),
            status,
            Route(POOL_USER_PATH, self._answered(self.find_user), methods=["GET"]),
        ]

    # --- progress ---------------------------------------------------------------------------------------------------

    async def progress(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST …/progress: authenticated by the lease alone, answered with whether to go on."""
        try:
            raw = await read_body(scope, receive, self.max_body)
            generation, seq, content, reasoning = shapes.progress(raw)
            posted = await self.pool.progress(generation, self._digest(scope), seq, content, reasoning)
        except (PoolError, MidstreamError, InvalidFields, Unparsable) as error:
            await self.refusal(error)(scope, receive, send)
            return
        body, headers = (_STOP, _STOP_HEADERS) if posted.cancelled else (_GO_ON, _GO_ON_HEADERS)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    # --- requesters -------------------------------------------------------------------------------------------------

    async def enqueue(self, scope: Scope, receive: Receive) -> Response:
        """POST …/async: ask for generations, and poll for them."""
        owner = self._owner(scope)
        want = shapes.wanted(parse(await read_body(scope, receive, self.max_body), nul=False), owner)
        if want.dry_run:
            return json_response({"kudos": want.most})
        request = await self.pool.enqueue(want.ask)
        served = not want.ask.models or any(map(self.pool.serves, want.ask.models))
        return json_response(answers.accepted(request, want.most, served=served), 202)

    async def status(self, scope: Scope, receive: Receive) -> Response:
        """GET …/status/{id}: how it stands; DELETE: cancel it, and say the same.  Who has the id needs no key."""
        request = shapes.request_id(scope["path_params"]["id"])
        call = self.pool.cancel if scope["method"] == "DELETE" else self.pool.status
        return json_response(answers.status(await call(request)))

    async def find_user(self, scope: Scope, receive: Receive) -> Response:
        """GET …/find_user: whose key this is, and his balance."""
        return json_response(answers.account(await self.pool.account(self._owner(scope))))

    # --- workers ----------------------------------------------------------------------------------------------------

    async def pop(self, scope: Scope, receive: Receive) -> Response:
        """POST …/pop: what a worker can do, for a job that it can do; none is an answer too."""
        owner = self._owner(scope)
        agent = header(scope, b"client-agent") or ""
        body = parse(await read_body(scope, receive, self.max_body), nul=False)
        worker = shapes.declaration(body, owner, agent)
        popped = await self.pool.pop(worker, self._digest(scope))
        if popped.given and await _has_left(receive):
            await self.pool.take_back(popped)
        return json_response(answers.popped(popped))

    async def submit(self, scope: Scope, receive: Receive) -> Response:
        """POST …/submit: a reply, or a fault, for a job."""
        owner = self._owner(scope)
        given = shapes.handed(parse(await read_body(scope, receive, self.max_body)))
        if given.reply is None:
            await self.pool.fault(given.generation, owner, given.fault)
            return json_response({"reward": 0.0})
        return json_response({"reward": float(await self.pool.submit(given.generation, owner, given.reply))})

    # --- keys -------------------------------------------------------------------------------------------------------

    def _owner(self, scope: Scope) -> str:
        """Whose key came.  Raises InvalidAPIKey; InvalidFields where none came, which existing clients know as 400."""
        try:
            authorization, apikey = header(scope, b"authorization"), header(scope, b"apikey")
        except BadRequest:
            raise InvalidAPIKey from None
        try:
            return self.identify(authorization, apikey).owner
        except Unauthorized:
            if authorization is None and apikey is None:
                raise InvalidFields({"apikey": _MISSING_KEY}) from None
            raise InvalidAPIKey from None

    def _digest(self, scope: Scope) -> bytes:
        authorization = apikey = None
        for name, value in scope["headers"]:
            if name == b"apikey":
                apikey = value.strip(b" \t").decode("latin-1")
            elif name == b"authorization":
                authorization = value.strip(b" \t").decode("latin-1")
        return self.digest(authorization, apikey)

    # --- refusals ---------------------------------------------------------------------------------------------------

    def _answered(self, answer: Answer) -> Endpoint:
        """The route with its refusals as answers."""

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                response = await answer(scope, receive)
            except (PoolError, MidstreamError, InvalidFields, Unparsable) as error:
                response = self.refusal(error)
            await response(scope, receive, send)

        return Endpoint(serve)

    def refusal(self, error: Refusal) -> Response:
        """The answer to an error, which is counted."""
        code = rc_of(error)
        self.refused[code] = self.refused.get(code, 0) + 1
        return refusal(error)


async def _has_left(receive: Receive) -> bool:
    """Whether the caller, whose request has been read, is known to have hung up."""
    told = asyncio.ensure_future(receive())
    await asyncio.sleep(0)  # what is known is told at once
    if told.done():
        return bool(told.result()["type"] == "http.disconnect")
    told.cancel()
    return False


# --- refusals ---------------------------------------------------------------------------------------------------------


def refusal(error: Refusal) -> Response:
    """The answer to an error: its status and body, and `Retry-After` where waiting helps."""
    if isinstance(error, MidstreamError):
        headers = {"retry-after": str(error.retry_after)} if isinstance(error, Busy) else None
        body = {"message": error.detail or error.code, "rc": rc_of(error), **error.facts}
        return json_response(body, HTTP_STATUS.get(error.code, 500), headers)
    wait = error.retry_after if isinstance(error, PoolError) else None
    return json_response(error.body(), error.status, {"retry-after": str(wait)} if wait is not None else None)


def rc_of(error: Refusal) -> str:
    """What an error is called here: the gateway's own codes in the spelling of the pool's."""
    if isinstance(error, PoolError):
        return error.rc
    if isinstance(error, MidstreamError):
        return "".join(map(str.capitalize, error.code.split("_")))
    return "ValidationFailed" if isinstance(error, InvalidFields) else "Unparsable"
