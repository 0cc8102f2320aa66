"""OpenAI's chat, completions and models routes (PROTOCOL.md, "OpenAI"): parse, call the core, encode."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from midstream.codec.chat import ChatEvents, Style, choices_in
from midstream.codec.chat_whole import Extras, completion
from midstream.codec.vendor import error_object
from midstream.cursor import Cursor
from midstream.errors import MidstreamError, ProducerFailed, UnknownModel
from midstream.follow import Follow
from midstream.records import Page, Record
from midstream.streams import Answer, Streams
from midstream.transports.asking import Front, Sources
from midstream.transports.creating import create
from midstream.transports.http import Endpoint, json_response, query
from midstream.transports.openai_asking import CHAT, COMPLETIONS
from midstream.transports.openai_errors import Interrupted, failed_at_once, failure_response
from midstream.transports.sse import Rendering, location, serve_stream
from midstream.transports.whole import whole_answer
from midstream.turns import in_steps
from midstream.wire import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    FORMAT_OPENAI,
    H_STREAM_ID,
    MODELS_PATH,
    Q_FORMAT,
)

# Records of an answer looked at before the loop gets its turn: at most 5 ms.
_STEP = 1000


@dataclass(frozen=True, slots=True)
class ChatApi:
    """The routes, over the core."""

    streams: Streams
    sources: Sources
    max_body: int

    def routes(self) -> list[Route]:
        return [
            Route(CHAT_PATH, Endpoint(partial(self._create, CHAT)), methods=["POST"]),
            Route(COMPLETIONS_PATH, Endpoint(partial(self._create, COMPLETIONS)), methods=["POST"]),
            Route(MODELS_PATH, self.models, methods=["GET"]),
            Route(MODELS_PATH + "/{model:path}", self.model, methods=["GET"]),
        ]

    async def _create(self, front: Front, scope: Scope, receive: Receive, send: Send) -> None:
        """POST: begin a generation; with `stream` follow it, else wait for the whole answer."""
        created = await create(scope, receive, self.streams, self.sources, self.max_body, front)
        owner, stream_id, keyed = created.owner, created.stream_id, created.keyed
        if not created.asked.stream:
            answer = await whole_answer(self.streams, stream_id, owner, receive)
            await (await _whole(scope, answer, keyed=keyed))(scope, receive, send)
            return
        if (failed := await failed_at_once(self.streams, stream_id, owner)) is not None:
            await failure_response(failed, keyed=keyed)(scope, receive, send)
            return
        rendered = chat_rendering(location(scope, stream_id), self.streams, owner)
        await serve_stream(scope, receive, send, self.streams, stream_id, owner, Cursor(stream_id, 0), rendered)

    async def models(self, request: Request) -> Response:
        """GET: every model that can be asked for, as its upstream describes it."""
        query(request.scope, ())
        return json_response({"object": "list", "data": [_model(model) for model in await self.sources.models()]})

    async def model(self, request: Request) -> Response:
        """GET: one of them."""
        query(request.scope, ())
        name = request.path_params["model"]
        for model in await self.sources.models():
            if model["id"] == name:
                return json_response(_model(model))
        raise UnknownModel(f"the model {name[:200]!r} does not exist here")


def _model(model: dict[str, Any]) -> dict[str, Any]:
    return {"id": model["id"], "object": "model", "created": 0, "owned_by": "upstream"} | model


async def _whole(scope: Scope, answer: Answer, *, keyed: bool) -> Response:
    state = answer.state
    if state.status != "done":
        return failure_response(answer, keyed=keyed)
    if not answer.fold.complete:
        longer = "the answer is longer than what is kept of a stream; stream it, or raise --max-stream-bytes"
        raise ProducerFailed("upstream_too_large", longer)
    headers = {H_STREAM_ID: state.meta.stream_id, "location": chunks_at(location(scope, state.meta.stream_id))}
    extras = Extras()
    async for frames in in_steps(answer.frames, _STEP):
        extras.add(frames)
    return json_response(completion(Style(state.meta), answer.fold, extras), headers=headers)


def chunks_at(url: str) -> str:
    """Where a stream is resumed in this format, of where it is resumed."""
    return f"{url}{'&' if '?' in url else '?'}{Q_FORMAT}={FORMAT_OPENAI}"


class ChatRendering:
    """A stream as chat chunks (see `codec.chat`)."""

    def __init__(self, location: str | None, events: ChatEvents) -> None:
        self.location = location
        self._events = events

    def opening(self) -> bytes:
        return b""

    def page(self, page: Page) -> bytes:
        return self._events.render(page.frames)

    def interrupted(self, error: MidstreamError | None) -> bytes:
        # A clean end would be taken for that of the answer.
        where = f" at {self.location}" if self.location is not None else ""
        left = error or Interrupted(f"this connection was interrupted; the answer goes on: resume{where}")
        return self._events.error(error_object(left))


def chat_rendering(resumed_at: str | None, streams: Streams, owner: str) -> Callable[[Follow], Awaitable[Rendering]]:
    """Makes the rendering of what a reader of the owner's is to be given.

    `resumed_at` is where its stream is resumed, in whatever format; None where nobody has said.
    """
    at = chunks_at(resumed_at) if resumed_at is not None else None

    async def rendered(follow: Follow) -> Rendering:
        stream_id = follow.stream_id
        style = Style((await streams.owned(stream_id, owner)).meta)
        begun: set[int] = set()
        if follow.first > 1 and style.choices > 1:
            dropped, frames, _ = await streams.kept(stream_id, owner)
            before = frames[: max(0, follow.first + 1 - Record.of(frames[0]).seq)]
            begun |= dropped.choices.keys() if dropped.complete else set(range(style.choices))
            async for some in in_steps(before, _STEP):
                begun |= choices_in(some)
        return ChatRendering(at, ChatEvents(style, begun))

    return rendered
