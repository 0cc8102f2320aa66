"""OpenAI's Responses API in front of any chat model (PROTOCOL.md, "Responses"): parse, call the core, encode.

Its resume contract is that API's own: `?stream=true&starting_after=N`, where N is the number of an event.  Everything
that is told is a function of what is kept with the stream (`codec.responses`), so that every replica can.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakValueDictionary

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from midstream import rules
from midstream.codec.responses import ResponseEvents, whole_response
from midstream.codec.responses_input import input_items, page_of
from midstream.codec.responses_object import asked_of, response_id, stream_of
from midstream.codec.responses_parts import Shared
from midstream.codec.responses_request import read_request
from midstream.codec.vendor import error_object
from midstream.errors import BadRequest, CursorExpired, MidstreamError, ProducerFailed, UnknownStream
from midstream.follow import Follow
from midstream.records import Page, StreamState
from midstream.streams import Answer, Kept, Streams
from midstream.transports.asking import Front, Sources, Told, abandonment
from midstream.transports.creating import create
from midstream.transports.http import Endpoint, caller, json_response, query
from midstream.transports.openai_errors import Interrupted, failed_at_once, failure_response
from midstream.transports.sse import Connection, Written, stream_headers
from midstream.transports.whole import whole_answer
from midstream.wire import H_STREAM_ID, MAX_SEQ, RESPONSES_PATH

# Seconds after which a background response is abandoned: never, as far as streams live.
_NEVER: Final = 1e9
# Records passed over before the loop gets its turn: about a millisecond.
_STEP: Final = 500
# A position is looked up again where the records behind it went while it was: each time many more have gone.
_TRIES: Final = 3
# An include is checked where a response is made; what can be there of it always is.
_INCLUDE: Final = ("include", "include[]")
_MOST_ITEMS: Final = 100
# Bytes from where on a page is not copied together: about what a socket takes at once.
_LARGE: Final = 64 * 1024


def _read(body: dict[str, Any]) -> Told:
    rest = dict(body)
    abandon_after = abandonment(rest)
    request = read_request(rest)
    return Told(request.upstream, request.model, request.stream, _NEVER if request.background else abandon_after)


RESPONSES: Final = Front(RESPONSES_PATH, "chat", _read, streams=False)


@dataclass(frozen=True, slots=True)
class ResponsesApi:
    """The routes, over the core."""

    streams: Streams
    sources: Sources
    max_body: int
    max_held: int  # bytes of an answer that a reader's rendering may hold
    # By stream, while it is read; and by epoch, since who takes over where a store has lost records tells others.
    shared: WeakValueDictionary[tuple[str, int], Shared] = field(default_factory=WeakValueDictionary)

    def routes(self) -> list[Route]:
        one = RESPONSES_PATH + "/{response_id}"
        response = Route(one, Endpoint(self.response), methods=["GET", "DELETE"])
        response.methods = {"GET", "DELETE"}  # not HEAD, which comes with GET: it would follow the stream to its end
        return [
            Route(RESPONSES_PATH, Endpoint(self.create), methods=["POST"]),
            response,
            Route(one + "/cancel", self.cancel, methods=["POST"]),
            Route(one + "/input_items", self.input_items, methods=["GET"]),
        ]

    async def create(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST: begin a response; follow it, wait for all of it, or leave it to itself in the background."""
        created = await create(scope, receive, self.streams, self.sources, self.max_body, RESPONSES)
        owner, stream_id, keyed = created.owner, created.stream_id, created.keyed
        background = created.body.get("background") is True
        if not created.asked.stream:
            if background:
                answer = await self.streams.answer(stream_id, owner)
            else:
                answer = await whole_answer(self.streams, stream_id, owner, receive)
            failed = not background and answer.state.status != "done"
            response = failure_response(answer, keyed=keyed) if failed else _whole(answer)
            await response(scope, receive, send)
            return
        if not background and (ended := await failed_at_once(self.streams, stream_id, owner)) is not None:
            await failure_response(ended, keyed=keyed)(scope, receive, send)
            return
        await self._follow(scope, receive, send, stream_id, owner, -1)

    async def response(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET: the response as it stands, or with `stream` its events; DELETE: cancel and forget."""
        called, owner = scope["path_params"]["response_id"], caller(scope).owner
        with _named(called) as stream_id:
            if scope["method"] == "DELETE":
                query(scope, ())
                await self._own(stream_id, owner)
                await self.streams.forget(stream_id, owner)
                told = json_response({"id": called, "object": "response", "deleted": True})
                await told(scope, receive, send)
                return
            fields = query(scope, ("stream", "starting_after", "include_obfuscation", *_INCLUDE))
            streamed = _choice(fields, "stream", "false", ("true", "false")) == "true"
            after = _number(fields, "starting_after", -1, 0, MAX_SEQ)
            if after >= 0 and not streamed:
                problem = "'starting_after' is a place in a stream; it needs 'stream=true'."
                raise BadRequest(problem, param="starting_after", reason="invalid_value")
            await self._own(stream_id, owner)
            if streamed:
                await self._follow(scope, receive, send, stream_id, owner, after)
            else:
                await _whole(await self.streams.answer(stream_id, owner))(scope, receive, send)

    async def cancel(self, request: Request) -> Response:
        """POST: stop it.  Told once more it changes nothing; what nobody put in the background can be over, though."""
        query(request.scope, ())
        owner = caller(request.scope).owner
        with _named(request.path_params["response_id"]) as stream_id:
            state = await self._own(stream_id, owner)
            if state.ended and asked_of(state.meta).get("background") is not True:
                raise BadRequest("Cannot cancel a synchronous response that is over.", reason="response_ended")
            await self.streams.cancel(stream_id, owner)
            return _whole(await self.streams.answer(stream_id, owner))

    async def input_items(self, request: Request) -> Response:
        """GET: what it was asked, item by item, the newest first unless told otherwise."""
        fields = query(request.scope, ("after", "limit", "order", *_INCLUDE))
        order = _choice(fields, "order", "desc", ("asc", "desc"))
        limit = _number(fields, "limit", 20, 1, _MOST_ITEMS)
        with _named(request.path_params["response_id"]) as stream_id:
            state = await self._own(stream_id, caller(request.scope).owner)
            items = input_items(asked_of(state.meta)["input"], stream_id)
        page, more = page_of(items, _only(fields, "after"), limit, newest_first=order == "desc")
        ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        return json_response({"object": "list", "data": page, **ends, "has_more": more})

    async def _own(self, stream_id: str, owner: str) -> StreamState:
        """The state of the owner's response.  Raises UnknownStream, also for a stream that was begun otherwise."""
        state = await self.streams.owned(stream_id, owner)
        if orjson.loads(state.meta.request).get("route") != RESPONSES_PATH:
            raise UnknownStream
        return state

    # --- events -----------------------------------------------------------------------------------------------------

    async def _follow(self, scope: Scope, receive: Receive, send: Send, stream_id: str, owner: str, after: int) -> None:
        """Answer with the events behind number `after`, then live.  Raises BadRequest before anything is sent."""
        connection = Connection(scope, receive, send)
        rendering, follow = await self._reader(stream_id, owner, after, connection.abort)
        heartbeat = self.streams.limits.heartbeat
        if follow is not None:
            await connection.serve(self.streams, follow, heartbeat, rendering)
            return
        headers = stream_headers(stream_id, heartbeat, rendering.location)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _reader(
        self, stream_id: str, owner: str, after: int, abort: Callable[[], None]
    ) -> tuple[ResponseRendering, Follow | None]:
        """A rendering that has passed over what its reader knows, and the reader of the rest; None: that is all."""
        for _ in range(_TRIES):
            kept = await self.streams.kept(stream_id, owner)
            shared = self.shared.setdefault((stream_id, kept.state.epoch), Shared())
            rendering = await _passed_over(kept, after, self.max_held, shared)
            try:
                return rendering, await self.streams.follow(stream_id, owner, rendering.position, abort=abort)
            except CursorExpired:
                continue
        raise _gone(after)


def _too_long() -> CursorExpired:
    """The last events of a response tell all of it, and so its readers hold all of it: up to a bound."""
    error = CursorExpired(None)
    error.detail = "this response is longer than what can be told of one; read its stream, or raise --max-stream-bytes"
    return error


class ResponseRendering:
    """A stream as Responses events, behind number `after`.  `position` is where its records are to be followed from.

    Events beyond `after` of the last records passed over are `held`; those records, up to `seen`, come again.
    """

    def __init__(self, stream_id: str, events: ResponseEvents, after: int, max_held: int) -> None:
        self.location = f"{RESPONSES_PATH}/{response_id(stream_id)}?stream=true"
        self.position = 0
        self.seen = 0
        self.held: list[bytes] = []
        self._events = events
        self._told = after
        self._max_held = max_held

    def opening(self) -> bytes:
        return b""

    def page(self, page: Page) -> Written:
        frames = page.frames
        if self.seen:  # those passed over can be more than one page
            again = self.seen - (page.last_seq - len(frames))
            frames = frames[max(again, 0) :]
            if page.last_seq >= self.seen:
                self.seen = 0
        told = self._events.take(frames)
        if self.held:
            told, self.held = self.held + told, []
        if self._events.held > self._max_held:
            raise _too_long()
        self._told = self._events.number - 1
        if len(told) == 1:
            return told[0]
        # What is large all readers of the response share, as long as it is not copied.
        return told if sum(map(len, told)) > _LARGE else b"".join(told)

    def interrupted(self, error: MidstreamError | None) -> bytes:
        # Raises in the official clients: a clean end would be taken for that of the response.  It is no event of the
        # stream, and so has no number but that of the last event, behind which its reader may go on.
        told = error_object(error or Interrupted(f"this connection was interrupted; resume at {self.location}"))
        number = {"sequence_number": self._told} if self._told >= 0 else {}
        return b"event: error\ndata: %b\n\n" % orjson.dumps({**told, "type": "error", **number, "error": told})


async def _passed_over(kept: Kept, after: int, max_held: int, shared: Shared) -> ResponseRendering:
    """Raises BadRequest where the event behind `after` is only in the fold, or `after` is beyond the last event."""
    fold, state = kept.dropped, kept.state
    events = ResponseEvents(state.meta, fold, after, shared) if fold.complete else None
    if events is None or events.number > after + 1:
        raise _gone(after, events)
    rendering = ResponseRendering(state.meta.stream_id, events, after, max_held)
    position, lowest = fold.upto, rules.honoured(state)[0]
    for at in range(0, len(kept.frames), _STEP):
        frames = kept.frames[at : at + _STEP]
        rendering.held = events.take(frames)
        if rendering.held:
            rendering.position, rendering.seen = max(position, lowest), position + len(frames)
            return rendering
        position += len(frames)
        await asyncio.sleep(0)
    if after >= events.number:
        raise BadRequest(
            f"'starting_after' is {after}, but the last event of this response so far is number {events.number - 1}.",
            param="starting_after",
            reason="cursor_ahead",
        )
    rendering.position = position
    return rendering


def _gone(after: int, events: ResponseEvents | None = None) -> BadRequest:
    known = f" The first one that is retained is number {events.number}." if events is not None else ""
    return BadRequest(
        f"The events behind number {after} of this response are no longer retained.{known}",
        param="starting_after",
        reason="cursor_expired",
    )


# --- answers and queries ---------------------------------------------------------------------------------------------


def _whole(answer: Answer) -> Response:
    """The response as it stands.  Raises ProducerFailed where a part of it had to go."""
    if not answer.fold.complete:
        longer = "the response is longer than what is kept of a stream; stream it, or raise --max-stream-bytes"
        raise ProducerFailed("upstream_too_large", longer)
    meta = answer.state.meta
    headers = {H_STREAM_ID: meta.stream_id, "location": f"{RESPONSES_PATH}/{response_id(meta.stream_id)}"}
    return json_response(orjson.Fragment(whole_response(meta, answer.fold, answer.state.status)), headers=headers)


@contextmanager
def _named(called: str) -> Iterator[str]:
    """The stream behind an id.  What is unknown is told by the name it was asked for."""
    unknown = UnknownStream(f"Response with id '{called[:80]}' not found.")
    if (stream_id := stream_of(called)) is None:
        raise unknown
    try:
        yield stream_id
    except UnknownStream:
        raise unknown from None


def _only(fields: dict[str, list[str]], name: str) -> str | None:
    values = fields.get(name)
    if values is None:
        return None
    if len(values) > 1:
        raise BadRequest(f"'{name}' stands {len(values)} times; give it once.", param=name, reason="invalid_value")
    return values[0]


def _choice(fields: dict[str, list[str]], name: str, default: str, values: tuple[str, ...]) -> str:
    value = _only(fields, name)
    if value is not None and value not in values:
        raise BadRequest(f"'{name}' must be one of {', '.join(values)}.", param=name, reason="invalid_value")
    return default if value is None else value


def _number(fields: dict[str, list[str]], name: str, default: int, least: int, most: int) -> int:
    value = _only(fields, name)
    if value is None:
        return default
    if not (value.isascii() and value.isdigit() and len(value) < 20 and least <= int(value) <= most):
        raise BadRequest(f"'{name}' must be an integer from {least} to {most}.", param=name, reason="invalid_value")
    return int(value)
