"""Server-Sent Events: a stream as an HTTP response (WHATWG HTML, section 9.2; PROTOCOL.md, "SSE").

Connection talk (`retry:`, `: ping`) is single lines with no blank line after them, between frames only: a block of its
own makes several clients dispatch an empty event and fail on it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import orjson
from starlette.types import Message, Receive, Scope, Send

from midstream.codec.sse import ping, retry
from midstream.errors import BadCursor, CursorExpired
from midstream.follow import Follow
from midstream.streams import Streams
from midstream.transports.http import DIRECT, error_body
from midstream.wire import EXPIRED, H_HEARTBEAT, H_STREAM_ID

# Milliseconds; jittered so that the readers of a gateway that restarts do not all come back at once.
_RETRY = (1000, 3000)
_PING = ping()

# Where a server lets us reach the connection itself: `abort` drops it with what is still unsent.
ABORT = "midstream.abort"


def stream_headers(stream_id: str, heartbeat: float) -> list[tuple[bytes, bytes]]:
    """The headers of every stream, on create, resume and replay alike.

    Neither a proxy nor a browser may hold, change or compress it; `Accept-Encoding` is not looked at.
    """
    return [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-store, no-transform"),
        (b"x-accel-buffering", b"no"),
        (H_STREAM_ID.lower().encode(), stream_id.encode()),
        (H_HEARTBEAT.lower().encode(), b"%g" % heartbeat),
        (b"location", f"/v1/stream/{stream_id}".encode()),
    ]


class Connection:
    """One response that carries one stream.  Hand its `abort` to the reader it will serve."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._send_body: Send = scope.get(DIRECT, send)
        self._abort: Callable[[], None] | None = scope.get("extensions", {}).get(ABORT)
        self._task = asyncio.current_task()
        self._aborted = False

    def abort(self) -> None:
        """The peer takes nothing any more: drop the connection, and stop waiting for it."""
        self._aborted = True
        if self._abort is not None:
            self._abort()
        elif self._task is not None:
            self._task.cancel()

    async def serve(self, streams: Streams, follow: Follow, heartbeat: float) -> None:
        """Send everything the reader gives, until its stream ends, it is interrupted, or the peer has gone."""
        gone = asyncio.ensure_future(interrupt_when_gone(self._receive, follow))
        try:
            headers = stream_headers(follow.stream_id, heartbeat)
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._write(retry(random.randint(*_RETRY)))
            await self._pump(follow)
            await self._send_body({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            if not self._aborted:
                raise
        finally:
            streams.leave(follow)
            gone.cancel()

    async def _pump(self, follow: Follow) -> None:
        send = self._send_body
        message: dict[str, Any] = {"type": "http.response.body", "more_body": True}
        try:
            while (page := await follow.next()) is not None:
                frames = page.frames
                # Everything new in one write: a write costs about the same for one frame as for a hundred.
                message["body"] = (frames[0] if len(frames) == 1 else b"".join(frames)) if frames else _PING
                await send(message)
        except CursorExpired as error:
            # No id: a reader that was overtaken must not take this for a position it has reached.
            body = orjson.dumps(error_body(error))
            await self._write(b"event: %b\ndata: %b\n\n" % (EXPIRED.encode(), body))

    async def _write(self, body: bytes) -> None:
        await self._send_body({"type": "http.response.body", "body": body, "more_body": True})


async def interrupt_when_gone(receive: Receive, follow: Follow) -> None:
    """Notice that the peer has gone even while there is nothing to send."""
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            follow.interrupt()
            return


async def no_content(send: Send, stream_id: str) -> None:
    """204: everything has been read.  It also tells a browser's EventSource to stop reconnecting."""
    headers = [
        (b"cache-control", b"no-store, no-transform"),
        (H_STREAM_ID.lower().encode(), stream_id.encode()),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def only(values: list[str], name: str) -> str:
    """The one value of a query field that names a position."""
    if len(values) > 1:
        raise BadCursor(f"{name} stands {len(values)} times")
    return values[0]
