"""Server-Sent Events: a stream as an HTTP response (WHATWG HTML, section 9.2; PROTOCOL.md, "SSE").

Connection talk (`retry:`, `: ping`) is single lines with no blank line after them, between frames only: a block of its
own makes several clients dispatch an empty event and fail on it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Protocol
from urllib.parse import quote

import orjson
from starlette.types import Message, Receive, Scope, Send

from midstream.codec.sse import ping, retry
from midstream.cursor import Cursor
from midstream.errors import MidstreamError, PositionError, StoreLost, StoreUnavailable
from midstream.follow import Follow, Sink
from midstream.records import Page
from midstream.streams import Streams
from midstream.transports.http import DIRECT, error_body
from midstream.wire import EXPIRED, H_HEARTBEAT, H_STREAM_ID

_log = logging.getLogger("midstream")

# Milliseconds; jittered so that the readers of a gateway that restarts do not all come back at once.
_RETRY = (1000, 3000)
_PING = ping()

# No proxy or browser may keep a stream, nor compress it (RFC 9111, section 5.2.2.6).
_NO_STORE = (b"cache-control", b"no-store, no-transform")
_STREAM_ID, _HEARTBEAT = H_STREAM_ID.lower().encode(), H_HEARTBEAT.lower().encode()

# Where a server that can do more than ASGI leaves a Pipe: in the scope's extensions.
PIPE = "midstream.pipe"


# A write; in pieces where it is so large that it must not be copied for each reader.
Written = bytes | list[bytes]


class Pipe(Sink, Protocol):
    """The connection below ASGI: a sink that sends each page as one chunk of HTTP's chunked coding.

    One ASGI message per record costs a task switch, a dict and two coroutines beside the write itself.
    """

    def carries(self, send: Send) -> bool:
        """Whether `send` is the server's own, its response has begun, and its body is sent in chunks.

        A wrapper around it may be changing the body; then nothing may go past it.
        """

    def open(self, opening: bytes, body: Callable[[Page], Written], gone: Callable[[], None]) -> None:
        """Begin: `opening` goes out with the first page, `body` makes bytes of each (b"": nothing is sent for it), and
        `gone` is called back when the peer has gone."""

    def close(self) -> None:
        """End: the peer's going concerns nobody any more."""

    def abort(self) -> None:
        """Drop the connection with what is unsent; closing politely waits for a peer that has stopped reading."""


class Rendering(Protocol):
    """How the records of one stream look to one reader.  The loop, the heartbeats and the pipe are the connection's."""

    @property
    def location(self) -> str | None:
        """Where the stream is resumed to look like this; None where nobody has said."""

    def opening(self) -> bytes:
        """What goes out before the first record, with it: lines without a blank line after them."""

    def page(self, page: Page) -> Written:
        """Everything new as one write; nothing where nothing of it is shown.  Not asked about pages without frames."""

    def interrupted(self, error: MidstreamError | None) -> bytes:
        """The last words to a reader that is let go without the terminal record; None: it may resume at once.

        They have no id: a reader must not take them for a position it has reached.
        """


Rendered = Callable[[Follow], Awaitable[Rendering]]


class Records:
    """The native rendering: records as they are kept."""

    def __init__(self, location: str | None) -> None:
        self.location = location

    def opening(self) -> bytes:
        least, most = _RETRY
        return retry(least + int(random.random() * (most - least)))

    def page(self, page: Page) -> bytes:
        return as_kept(page)

    def interrupted(self, error: MidstreamError | None) -> bytes:
        if not isinstance(error, PositionError):
            return b""  # no terminal record can be read, and none be made up: whoever misses it resumes
        return b"event: %b\ndata: %b\n\n" % (EXPIRED.encode(), orjson.dumps(error_body(error)))


def location(scope: Scope, stream_id: str) -> str:
    """Where a stream is resumed: at our own route, below the path at which our routes are mounted."""
    root = scope.get("root_path", "")
    return f"{quote(root.rstrip('/')) if root else ''}/v1/stream/{stream_id}"


def stream_headers(stream_id: str, heartbeat: float, resumed_at: str | None) -> list[tuple[bytes, bytes]]:
    """The headers of every stream, on create, resume and replay alike.

    Neither a proxy nor a browser may hold, change or compress it; `Accept-Encoding` is not looked at.
    """
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        _NO_STORE,
        (b"x-accel-buffering", b"no"),
        (_STREAM_ID, stream_id.encode()),
        (_HEARTBEAT, b"%g" % heartbeat),
    ]
    if resumed_at is not None:
        headers.append((b"location", resumed_at.encode()))
    return headers


class Connection:
    """One response that carries one stream.  Hand its `abort` to the reader it will serve."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._send_body: Send = scope.get(DIRECT, send)
        self._pipe: Pipe | None = scope.get("extensions", {}).get(PIPE)
        self._task = asyncio.current_task() if self._pipe is None else None
        self._aborted = False

    def abort(self) -> None:
        """The peer takes nothing any more: drop the connection, and stop waiting for it."""
        self._aborted = True
        if self._pipe is not None:
            self._pipe.abort()
        elif self._task is not None:
            self._task.cancel()

    async def serve(self, streams: Streams, follow: Follow, heartbeat: float, rendering: Rendering) -> None:
        """Send everything the reader gives, until its stream ends, it is interrupted, or the peer has gone."""
        try:
            headers = stream_headers(follow.stream_id, heartbeat, rendering.location)
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            last = b""
            try:
                await self._carry(follow, rendering)
                if not follow.ended:
                    last = rendering.interrupted(None)
            except (StoreUnavailable, StoreLost) as away:
                _log.warning("a reader of stream %s was let go: %s", follow.stream_id, away)
                last = rendering.interrupted(away)
            except PositionError as error:
                last = rendering.interrupted(error)
            if last:
                await self._write(last)
            await self._send_body({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            if not self._aborted:
                raise
        finally:
            streams.leave(follow)

    async def _carry(self, follow: Follow, rendering: Rendering) -> None:
        """Past ASGI where the server lets us, else through it.  The opening goes out with the first page."""
        opening, body = rendering.opening(), _body(rendering)
        if self._pipe is not None and self._pipe.carries(self._send_body):
            self._pipe.open(opening, body, follow.interrupt)
            try:
                await follow.feed(self._pipe)
            finally:
                self._pipe.close()
            return
        gone = asyncio.ensure_future(interrupt_when_gone(self._receive, follow))
        try:
            while (page := await follow.next()) is not None:
                if said := body(page):
                    await self._write(b"".join((opening, *(said if isinstance(said, list) else (said,)))))
                    opening = b""
        finally:
            gone.cancel()

    async def _write(self, body: bytes) -> None:
        await self._send_body({"type": "http.response.body", "body": body, "more_body": True})


def as_kept(page: Page) -> bytes:
    """The body of native pages: their frames."""
    frames = page.frames
    return frames[0] if len(frames) == 1 else b"".join(frames) or _PING


def _body(rendering: Rendering) -> Callable[[Page], Written]:
    """Everything new in one write: a write costs about the same for one frame as for a hundred."""
    if isinstance(rendering, Records):
        return as_kept
    rendered = rendering.page

    def body(page: Page) -> Written:
        return rendered(page) if page.frames else _PING

    return body


async def interrupt_when_gone(receive: Receive, follow: Follow) -> None:
    """Notice that the peer has gone even while there is nothing to send."""
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            follow.interrupt()
            return


async def serve_stream(
    scope: Scope,
    receive: Receive,
    send: Send,
    streams: Streams,
    stream_id: str,
    owner: str,
    position: Cursor,
    rendered: Rendered | None = None,
) -> None:
    """Answer with everything after the position, then live.  Raises, before anything is sent, what `follow` does.

    `rendered` is asked for the rendering once the position is honoured; without it records are sent as they are.
    """
    connection = Connection(scope, receive, send)
    follow = await streams.follow(stream_id, owner, position.seq, of=position.stream_id, abort=connection.abort)
    if follow is None:
        await no_content(send, stream_id)
        return
    if rendered is None:
        rendering: Rendering = Records(location(scope, stream_id))
    else:
        try:
            rendering = await rendered(follow)
        except BaseException:
            streams.leave(follow)
            raise
    await connection.serve(streams, follow, streams.limits.heartbeat, rendering)


async def no_content(send: Send, stream_id: str) -> None:
    """204: everything has been read.  It also tells a browser's EventSource to stop reconnecting."""
    headers = [_NO_STORE, (_STREAM_ID, stream_id.encode())]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
