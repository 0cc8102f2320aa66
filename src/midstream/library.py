"""Midstream inside an ASGI app of your own: your async generator, our journal.

    streams = Midstream("sqlite:///streams.db")

    async def answer(request):                      # POST /ask
        stream = await streams.open(tokens(await request.json()), owner=request.user.name)
        return streams.response(stream, owner=request.user.name, location=f"/ask/{stream}")

    async def resume(request):                      # GET /ask/{stream_id}
        return streams.resume(request.path_params["stream_id"], owner=request.user.name)

Both answers are responses of Starlette's, which FastAPI and Litestar take as well.  `streams.lifespan` opens and closes
the journal with the app; `streams.asgi(owner)` is the native contract but for creating, ready to be mounted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any
from urllib.parse import quote

from starlette.datastructures import URL
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from midstream.admission import Limits
from midstream.clock import Clock
from midstream.cursor import Cursor
from midstream.errors import MidstreamError
from midstream.follow import Follow
from midstream.journal import open_journal
from midstream.records import Chunk, Finish, Producer
from midstream.rules import Bounds
from midstream.streams import Answer, Streams
from midstream.transports.http import CALLER, Caller, error_response, unrouted
from midstream.transports.native import NativeApi, in_openai_format, position
from midstream.transports.openai_chat import chat_rendering
from midstream.transports.sse import Records, Rendered, Rendering, serve_stream

# What a generator of yours may yield: text, chunks with more than text, and, last, how it ended.
Yielded = str | Chunk | Sequence[Chunk] | Finish


class Midstream:
    """Streams for one app.  `journal` is a URL as for `midstream serve`; `clock` gives seconds since 1970."""

    def __init__(
        self,
        journal: str = "memory:",
        *,
        limits: Limits | None = None,
        bounds: Bounds | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        clock = clock or Clock(time.time, time.monotonic)
        self.streams = Streams(open_journal(journal, clock, bounds or Bounds()), clock, limits)

    async def start(self) -> None:
        """Open the journal.  Raises JournalInUse, JournalCorrupt."""
        await self.streams.start()

    async def stop(self, drain: float = 30.0) -> None:
        """Let open streams finish for `drain` seconds, end the others as `cancelled` `shutdown`, close the journal."""
        await self.streams.drain(drain)
        await self.streams.close()

    async def __aenter__(self) -> Midstream:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: Any) -> AsyncIterator[None]:
        """For the `lifespan` of a Starlette or FastAPI app."""
        async with self:
            yield

    async def open(
        self,
        tokens: AsyncGenerator[Yielded, None],
        *,
        owner: str,
        model: str = "app",
        name: str | None = None,
        abandon_after: float | None = None,
    ) -> str:
        """Begin to journal what the generator yields, and return the stream's id.

        It runs to its end whether or not anyone reads (I6); it is closed when the stream is cancelled.  A generator
        that ends without a Finish is done; one that raises ends the stream `failed` `producer_error`, or as the
        ProducerFailed it raised.  With a `name` (an idempotency key, a session) of the owner's that has a stream
        already, that one is returned, and the generator is closed without having run.  Raises TooManyStreams,
        OutOfSpace, ShuttingDown.
        """
        names = [f"{owner}/name/{name}"] if name is not None else []
        opened = await self.streams.open(
            owner, model, lambda _: _batches(tokens), names=names, abandon_after=abandon_after
        )
        if opened.existed:
            await tokens.aclose()
        return opened.state.meta.stream_id

    def response(self, stream_id: str, *, owner: str, after: int = 0, location: str | URL | None = None) -> Response:
        """An answer that follows the stream: everything after seq `after`, then live.

        `location` is where your app resumes the stream, told in the header `Location`; without it there is none.
        """
        return _Following(self.streams, stream_id, owner, lambda _: Cursor(stream_id, after), location)

    def resume(self, stream_id: str, *, owner: str, location: str | URL | None = None) -> Response:
        """An answer to a request that names its position as PROTOCOL.md says: `?cursor=`, `Last-Event-ID`, `?from=`.

        With `?format=openai` it gives chat chunks.  `location` as for `response`.
        """
        return _Resuming(self.streams, stream_id, owner, lambda scope: position(scope, stream_id), location)

    async def ack(self, stream_id: str, *, owner: str, seq: int) -> None:
        """Let go of what is at or below `seq`.  Raises UnknownStream, CursorAhead."""
        await self.streams.ack(stream_id, owner, seq)

    async def cancel(self, stream_id: str, *, owner: str) -> None:
        """Stop the generator and end the stream as `cancelled`.  Raises UnknownStream."""
        await self.streams.cancel(stream_id, owner)

    async def answer(self, stream_id: str, *, owner: str) -> Answer:
        """The whole answer so far.  Raises UnknownStream."""
        return await self.streams.answer(stream_id, owner)

    def asgi(self, owner: Callable[[Scope], str]) -> ASGIApp:
        """The native contract but for creating, to be mounted.  `owner` names the caller of a request; what it raises
        from `midstream.errors` (Unauthorized, say) is answered as such."""
        api = NativeApi(self.streams, None, max_body=64 * 1024)
        router = Router(api.routes())

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            async def serve() -> None:
                scope[CALLER] = Caller(owner(scope))
                scope.setdefault("app", app)
                await router(scope, receive, send)

            await _answering(scope, receive, send, serve())

        return app


class _Following(Response):
    """A response that is a stream.  Cookies that are set on it are sent, and so are headers, in place of ours of the
    same name; its background runs after it.

    It is a Response, and no plain ASGI application, since FastAPI takes those for data.
    """

    def __init__(
        self, streams: Streams, stream_id: str, owner: str, at: Callable[[Scope], Cursor], location: str | URL | None
    ) -> None:
        super().__init__()
        self.raw_headers = []
        self._streams, self._stream_id, self._owner, self._at = streams, stream_id, owner, at
        # As Starlette's RedirectResponse has it.
        self._location = quote(str(location), safe=":/%#?=@[]!$&'()*+,;") if location is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_dressed(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name for name, _ in self.raw_headers}
                ours = [header for header in message["headers"] if header[0] not in names]
                message = {**message, "headers": [*ours, *self.raw_headers]}
            await send(message)

        async def serve() -> None:
            if scope["method"] == "HEAD":
                raise HTTPException(405, headers={"Allow": "GET"})  # it would have to follow the stream to its end
            rendered, at = self._rendered(scope), self._at(scope)
            await serve_stream(scope, receive, send_dressed, self._streams, self._stream_id, self._owner, at, rendered)

        await _answering(scope, receive, send_dressed, serve())
        if self.background is not None:
            await self.background()

    def _rendered(self, _: Scope) -> Rendered:
        async def as_kept(_: Follow) -> Rendering:
            return Records(self._location)

        return as_kept


class _Resuming(_Following):
    """One whose request says in which format it is."""

    def _rendered(self, scope: Scope) -> Rendered:
        if in_openai_format(scope):
            return chat_rendering(self._location, self._streams, self._owner)
        return super()._rendered(scope)


async def _answering(scope: Scope, receive: Receive, send: Send, serving: Any) -> None:
    """Run it; what it raises before it has answered becomes an answer of the usual shape."""
    try:
        await serving
    except MidstreamError as error:
        await error_response(error)(scope, receive, send)
    except HTTPException as error:
        await unrouted(error, error_response, "no such route")(scope, receive, send)


async def _batches(tokens: AsyncGenerator[Yielded, None]) -> Producer:
    """What the core takes from a producer, out of what a user's generator yields."""
    async with contextlib.aclosing(tokens):
        async for yielded in tokens:
            if isinstance(yielded, Finish):
                yield yielded
                return
            if isinstance(yielded, str):
                yield [Chunk(yielded)]
            elif isinstance(yielded, Chunk):
                yield [yielded]
            else:
                yield list(yielded)
    yield Finish("stop")
