"""Several streams over one WebSocket (RFC 6455; PROTOCOL.md, "WebSocket").

Each stream that is followed has a reader of its own, which pulls from its position when the socket has room: there is
no queue per reader, and a long replay goes out page by page, with whatever else there is to say in between.  Records go
into their envelope as they were encoded when they were appended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from starlette.routing import WebSocketRoute
from starlette.types import Message, Receive, Scope, Send

from midstream.cursor import Cursor
from midstream.errors import (
    BadRequest,
    MidstreamError,
    RequestError,
    ShuttingDown,
    TooManyStreams,
    Unauthorized,
)
from midstream.follow import Follow
from midstream.records import Page, StreamState
from midstream.streams import Streams
from midstream.transports.asking import Sources, acked, asked, open_stream
from midstream.transports.http import DIRECT, Caller, query
from midstream.transports.messages import Envelope, Where, error_message, fields_of, ref_of, stream_id_of, where_of
from midstream.transports.native import state_json
from midstream.wire import AUTH_WITHIN, SEND_STALL, WS_ASKS, WS_CLOSE, WS_PATH, WS_STREAMS

_log = logging.getLogger("midstream")

# Where a server that can do more than ASGI leaves a Line: in the scope's extensions.
LINE = "midstream.line"
# Where the guard leaves what tells whose the handshake was, and raises Unauthorized.
WHOSE = "midstream.whose"

# Fields of `generate` that are not of the request itself.
_OURS = frozenset({"type", "ref", "idempotency_key"})


class Line(Protocol):
    """The connection below ASGI, for text messages: one ASGI message per record costs more than its write."""

    def carries(self, send: Send) -> bool:
        """Whether `send` is the server's own: a wrapper around it may be changing what is sent."""

    def open(self, leaving: Callable[[], None]) -> None:
        """Begin; `leaving` is called when the server is about to end."""

    def write(self, messages: list[bytes]) -> bool:
        """Send them.  False: full, or gone."""

    async def drain(self) -> None:
        """Return when there is room again, or the peer has gone."""

    def abort(self) -> None:
        """Drop the connection with what is unsent."""


Opening = Callable[[], Awaitable[Where]]


@dataclass(frozen=True, slots=True)
class WebSocketApi:
    """The route, over the core.

    `identify` tells whose a key is and raises Unauthorized; `refused` counts errors by their code.
    """

    streams: Streams
    sources: Sources
    max_body: int
    identify: Callable[[str], Caller]
    refused: dict[str, int]

    def route(self) -> WebSocketRoute:
        return WebSocketRoute(WS_PATH, _Endpoint(self))


class _Endpoint:
    """An ASGI endpoint for the route (which takes a plain function for a handler of its own kind)."""

    def __init__(self, api: WebSocketApi) -> None:
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _Socket(self._api, scope, receive, send).serve()


class _Socket:
    """One connection: its client's messages, one after the other, and the streams it follows, each under its `ref`."""

    def __init__(self, api: WebSocketApi, scope: Scope, receive: Receive, send: Send) -> None:
        self.streams = api.streams
        # Whose page goes out next where there is room for one only.
        self.turn = asyncio.Lock()
        line: Line | None = scope.get("extensions", {}).get(LINE)
        self.line = line if line is not None and line.carries(scope.get(DIRECT, send)) else None
        self._api = api
        self._whose: Callable[[], Caller] = scope[WHOSE]
        self._scope, self._receive, self._send = scope, receive, send
        self._followed: dict[str | None, _Followed] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._task = asyncio.current_task()
        self._leaving = self._closed = self._aborted = False

    # --- life -------------------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Until the peer has gone or the gateway closes.  The generations of its streams do not notice (I6).

        Raises BadRequest before anything is said: the path takes no query, and never a key.
        """
        query(self._scope, ())
        await self._receive()  # `websocket.connect`
        await self._send({"type": "websocket.accept"})
        if self.line is not None:
            self.line.open(self._server_leaves)
        try:
            await self._listen()
        except asyncio.CancelledError:
            if not self._aborted:
                raise
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def abort(self) -> None:
        """The peer takes nothing any more: drop the connection, and stop waiting for it."""
        self._aborted = True
        if self.line is not None:
            self.line.abort()
        elif self._task is not None:
            self._task.cancel()

    def _server_leaves(self) -> None:
        self._leaving = True
        self.close_when_idle()

    def close_when_idle(self) -> None:
        if self._leaving and not self._followed:
            self._start(self._close("shutting_down"))

    async def _close(self, reason: str) -> None:
        if not self._closed:
            self._closed = True
            await self._send({"type": "websocket.close", "code": WS_CLOSE[reason], "reason": reason})

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- what the client says ---------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        message, first = await self._first(), True
        while message["type"] != "websocket.disconnect":
            if not self._closed:
                await self._take(message, first)
            first = False
            message = await self._receive()

    async def _first(self) -> Message:
        """The first message: where the handshake brought no key, at the latest when one must have come."""
        try:
            self._whose()
        except Unauthorized:
            try:
                return await asyncio.wait_for(self._receive(), AUTH_WITHIN)
            except TimeoutError:
                return {"type": "websocket.receive", "text": "no key came in time"}
        return await self._receive()

    async def _take(self, message: Message, first: bool) -> None:
        """Do what a message asks for, or say why not."""
        ref: str | None = None
        try:
            try:
                fields = fields_of(message, self._api.max_body)
                ref = ref_of(fields)
                if fields.get("type") == "auth":
                    self._auth(fields, first)
                    return
            except RequestError:
                self._whose()  # a stranger hears only that he is one
                raise
            await self._do(self._whose().owner, ref, fields)
        except Exception as error:  # noqa: BLE001  # whatever went wrong, the peer hears of it in the usual shape
            await self.refuse(error, ref)

    def _auth(self, fields: dict[str, Any], first: bool) -> None:
        key = fields.get("key")
        if not first:
            raise BadRequest("'auth' must be the first message")
        if not isinstance(key, str):
            raise Unauthorized
        # Asked anew for each message, as for each request over HTTP: the key may be gone by then.
        self._whose = lambda: self._api.identify(key)
        self._whose()

    async def _do(self, owner: str, ref: str | None, fields: dict[str, Any]) -> None:
        match fields.get("type"):
            case "generate":
                self._follow(owner, ref, self._generation(owner, fields))
            case "resume":
                self._follow(owner, ref, _known(where_of(fields)))
            case "leave":
                if (followed := self._followed.get(ref)) is None:
                    raise BadRequest("nothing is followed under this 'ref'")
                followed.leave()
            case "ack":
                await self.tell_state(ref, await self.streams.ack(stream_id_of(fields), owner, acked(fields)))
            case "cancel":
                await self.tell_state(ref, await self.streams.cancel(stream_id_of(fields), owner))
            case _:
                raise BadRequest(f"'type' must be one of {', '.join(WS_ASKS)}")

    def _generation(self, owner: str, fields: dict[str, Any]) -> Opening:
        """Raises BadRequest; what it gives back opens the stream."""
        key = fields.get("idempotency_key")
        what = asked({name: value for name, value in fields.items() if name not in _OURS})
        if not what.stream:
            raise BadRequest("there are no whole replies here; ask for them over HTTP")
        if key is not None and not isinstance(key, str):
            raise BadRequest("'idempotency_key' must be text")

        async def opening() -> Where:
            opened = await open_stream(self.streams, self._api.sources, owner, what, idempotency_key=key)
            stream_id = opened.state.meta.stream_id
            return Where(stream_id, Cursor(stream_id, 0))

        return opening

    def _follow(self, owner: str, ref: str | None, opening: Opening) -> None:
        if ref in self._followed:
            raise BadRequest(f"under the 'ref' {ref!r} a stream is being followed; choose another")
        if len(self._followed) >= WS_STREAMS:
            raise TooManyStreams(f"{WS_STREAMS} streams are followed on this socket; open another")
        followed = self._followed[ref] = _Followed(self, ref)
        self._start(followed.run(owner, opening))

    def over(self, ref: str | None) -> None:
        """What was followed under this `ref` is not any more; the client may use it again."""
        del self._followed[ref]

    # --- what the client is told ------------------------------------------------------------------------------------

    async def refuse(self, error: Exception, ref: str | None) -> None:
        """Tell an error; one that ends the socket also does that."""
        if not isinstance(error, MidstreamError):
            _log.error("a message on a WebSocket failed", exc_info=error)
            error = MidstreamError("an internal error; the log has the cause")
        self._api.refused[error.code] = self._api.refused.get(error.code, 0) + 1
        await self.send([error_message(error, ref)])
        if isinstance(error, Unauthorized):
            await self._close(error.code)

    async def tell_state(self, ref: str | None, state: StreamState) -> None:
        told = {"type": "journal_state"} | ({} if ref is None else {"ref": ref}) | state_json(self.streams, state)
        await self.send([orjson.dumps(told)])

    async def send(self, messages: list[bytes]) -> bool:
        """Send them, and return when there is room for more: whoever asks must also listen.  False: nobody is there."""
        try:
            async with asyncio.timeout(SEND_STALL):
                if self.line is None:
                    for message in messages:
                        await self._send({"type": "websocket.send", "text": message.decode()})
                elif not self.line.write(messages):
                    await self.line.drain()
        except TimeoutError:
            self.abort()
            return False
        except OSError:  # the peer has gone, and that is about to be received
            return False
        return True


class _Followed:
    """One stream under its client's `ref`; also the sink of its reader."""

    def __init__(self, socket: _Socket, ref: str | None) -> None:
        self._socket = socket
        self._ref = ref
        self._reader: Follow | None = None
        self._left = False
        self._envelope = Envelope(ref)

    def leave(self) -> None:
        """The client has read enough of it."""
        self._left = True
        if self._reader is not None:
            self._reader.interrupt()

    async def run(self, owner: str, opening: Opening) -> None:
        """To the end of the stream, or of the reading of it.  The last thing said under the `ref` is how it ended."""
        socket = self._socket
        try:
            where = await opening()
            await self._read(owner, where)
            state = await socket.streams.state(where.stream_id, owner)
        except Exception as error:  # noqa: BLE001  # told to the peer
            socket.over(self._ref)
            await socket.refuse(error, self._ref)
        else:
            socket.over(self._ref)
            await socket.tell_state(self._ref, state)
        socket.close_when_idle()

    async def _read(self, owner: str, where: Where) -> None:
        streams, stream_id = self._socket.streams, where.stream_id
        reader = await streams.follow(stream_id, owner, where.at.seq, of=where.at.stream_id, abort=self._socket.abort)
        if reader is None:  # all is read
            return
        self._reader = reader
        try:
            if self._left:
                reader.interrupt()
            self._envelope.address(stream_id, streams.limits.heartbeat)
            if reader.caught_up:
                await self._socket.send([self._envelope.alive])
            await self._carry(reader)
        finally:
            streams.leave(reader)
        if not (reader.ended or self._left):
            raise ShuttingDown("this reader was interrupted; resume its stream", stream_id=stream_id)

    async def _carry(self, reader: Follow) -> None:
        """Past ASGI where the server lets us, else through it."""
        if self._socket.line is not None:
            await reader.feed(self)
            return
        while (page := await reader.next()) is not None:
            if not await self._socket.send(self._envelope.messages(page)):
                return

    # --- the sink ---------------------------------------------------------------------------------------------------

    def write(self, page: Page) -> bool:
        assert self._socket.line is not None
        return self._socket.line.write(self._envelope.messages(page))

    async def drain(self) -> None:
        """Wait for room, each in his turn: else whoever was served first would be so again, and others never."""
        assert self._socket.line is not None
        async with self._socket.turn:
            await self._socket.line.drain()


def _known(where: Where) -> Opening:
    async def opening() -> Where:
        return where

    return opening
