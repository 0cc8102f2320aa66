"""One HTTP/1.1 connection: uvicorn's protocol, with what it leaves unbounded bounded.

It is also the `Pipe` of the response it is sending: a stream's pages go past ASGI, straight to the socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from midstream.errors import BadRequest
from midstream.records import Page
from midstream.transports.http import error_body, json_response
from midstream.transports.sse import PIPE, Written, as_kept
from midstream.wire import MAX_HEAD_BYTES, MAX_PIPELINED

# A connection that closes with bytes still to send is looked at again after so many seconds.
_LOSS_POLL = 0.01
_NO_BODY = frozenset({204, 304})
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


# `super()` costs as much again, for each header.
_on_header, _on_body = HttpToolsProtocol.on_header, HttpToolsProtocol.on_body


class _Refused(Exception):
    """Why a request is not read any further."""


class _Outgoing:
    """The transport as a response sees it: its head waits for the first of the body, or the loop's next turn.

    uvloop sends each write at once, and a segment of its own is a twentieth of what the start of a stream costs.
    """

    __slots__ = ("_head", "_holds", "_loop", "_transport", "is_closing")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""
        self._holds = False
        self.is_closing = transport.is_closing

    def hold(self) -> None:
        """The next write is a head."""
        self._holds = True

    def write(self, data: bytes) -> None:
        if self._holds:
            self._holds = False
            self._head += data
            self._loop.call_soon(self.flush)
        else:
            self._transport.write(self.take() + data)

    def take(self) -> bytes:
        """The head, which has to go out before anything else; b"" where it has."""
        head, self._head = self._head, b""
        return head

    def flush(self) -> None:
        if self._head and not self.is_closing():
            self._transport.write(self.take())

    def close(self) -> None:
        self.flush()
        self._transport.close()


class _Cycle(RequestResponseCycle):
    """uvicorn's, that is done when its peer has left: uvloop refuses a write after a failed one, and tells of the loss
    only in a later turn of the loop."""

    transport: _Outgoing  # type: ignore[assignment]  # all of a transport that is used here

    async def send(self, message: Any) -> None:
        if self.flow.write_paused and not self.transport.is_closing():
            await self.flow.drain()
        if self.transport.is_closing():
            self.disconnected = True
            self.message_event.set()
        elif not self.response_started:
            self.transport.hold()
        await super().send(message)
        if self.response_complete:
            self.transport.flush()  # where there is no body; another protocol may be the next to write


class HttpConnection(HttpToolsProtocol):
    """Responses go out one at a time, in the order of their requests; `_running` is the one that is being made.

    (uvicorn's `cycle` is that of the newest request, which may still wait for its turn.)
    """

    _running: RequestResponseCycle | None = None
    _in_head = False
    _unheard = 0  # bytes of the message being read, since it began, its head ended or some of its body came
    _is_small = False  # what is read now: no head that begins and ends in it is too long
    _declining = False
    _gone: Callable[[], None] | None = None
    _outgoing: _Outgoing
    _opening: bytes | None = None  # of a body that has not begun
    _body: Callable[[Page], Written]
    _as_kept = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        self._outgoing = _Outgoing(transport, self.loop)
        self._expect_more()

    def connection_lost(self, exc: Exception | None) -> None:
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        self.pipeline.clear()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        if self._gone is not None:
            self._gone()

    def eof_received(self) -> None:
        self._outgoing.flush()  # the transport closes now

    # --- requests ---------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._is_small = not self._in_head and len(data) <= MAX_HEAD_BYTES
        self._unheard += len(data)  # none of it counts where it ends this message, or has some of its body
        try:
            self.parser.feed_data(data)
            if self._in_head or (self.cycle is not None and self.cycle.more_body):
                _bound_head(self._unheard)
        except httptools.HttpParserUpgrade as upgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            else:
                self._decline_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            reason = error.__context__
            self._refuse(str(reason) if isinstance(reason, _Refused) else "Invalid HTTP request received.")
            return
        except _Refused as reason:
            self._refuse(str(reason))
            return
        self._expect_more()

    def on_message_begin(self) -> None:
        if self._declining:
            return
        super().on_message_begin()
        self._in_head, self._unheard = True, 0
        extensions: dict[Any, Any] = self.scope.setdefault("extensions", {})
        extensions[PIPE] = self

    def on_url(self, url: bytes) -> None:
        if not self._declining:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # After the head it is a trailer's, which must not pass for one of the headers that a proxy has checked.
        if self._in_head:
            _on_header(self, name, value)

    def on_body(self, body: bytes) -> None:
        self._unheard = 0
        _on_body(self, body)

    def on_headers_complete(self) -> None:
        if self._declining:
            return
        self._in_head, self._unheard = False, 0
        if not self._is_small:
            # As bytes of the wire, so that it does not matter where a head is cut.
            line = len(self.parser.get_method()) + len(self.url) + len("  HTTP/1.1\r\n\r\n")
            _bound_head(line + sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers))
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _Refused(f"over {MAX_PIPELINED} requests wait on this connection")
        super().on_headers_complete()
        self.flow.resume_reading()  # paused where it has to wait for its turn, but only who reads sees a peer go
        if self.scope["http_version"] == "1.0":
            _send_without_chunks(self.cycle)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        cycle.__class__ = _Cycle  # made by a method of uvicorn's that does more than that
        cycle.transport = self._outgoing  # type: ignore[assignment]
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _decline_upgrade(self, rest: bytes) -> None:
        """Read on as if no upgrade had been offered (RFC 9110, section 7.8); `rest` follows the head.

        The parser has given up on the body: another one is told how it is framed, and goes on.
        """
        framing = [b"%b: %b\r\n" % header for header in self.headers if header[0] in _FRAMING]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.cycle.more_body = True
        self._declining = True
        try:
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(framing))
        finally:
            self._declining = False
        self.data_received(rest)

    def _refuse(self, reason: str) -> None:
        """What is no HTTP, or too much of it, is refused in the shape of every other error; then the connection ends.

        Not in the middle of another answer: its reader would take this for a part of it.
        """
        running = self._running
        if running is not None and not running.response_complete and not self._may_answer(running):
            self.transport.abort()
            return
        answer = json_response(error_body(BadRequest(reason)), 400, {"connection": "close"})
        head = [b"%b: %b\r\n" % pair for pair in answer.raw_headers]
        self._outgoing.write(b"".join((b"HTTP/1.1 400 Bad Request\r\n", *head, b"\r\n", answer.body)))
        self._outgoing.close()

    def _may_answer(self, running: RequestResponseCycle) -> bool:
        """Whether the request being answered is the one being read, and nothing of its answer is out."""
        return running is self.cycle and running.more_body and not running.response_started

    # --- silence ----------------------------------------------------------------------------------------------------

    def _expect_more(self) -> None:
        """Where a request is not whole, what is missing has to begin to come within the keep-alive time."""
        cycle = self.cycle
        missing = cycle is None or cycle.response_complete or (cycle.more_body and not self.flow.read_paused)
        if missing and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def timeout_keep_alive_handler(self) -> None:
        running = self._running
        if running is None or running.response_complete or not running.response_started:
            super().timeout_keep_alive_handler()

    def shutdown(self) -> None:
        """Finish what is being answered and then close.  A request that is not whole has begun nothing."""
        self._outgoing.flush()
        if self._running is not None and self._running is self.cycle and self._may_answer(self._running):
            self.transport.close()
        else:
            super().shutdown()

    # --- the pipe ---------------------------------------------------------------------------------------------------

    def carries(self, send: Send) -> bool:
        cycle = getattr(send, "__self__", None)
        return isinstance(cycle, RequestResponseCycle) and cycle is self._running and bool(cycle.chunked_encoding)

    def open(self, opening: bytes, body: Callable[[Page], Written], gone: Callable[[], None]) -> None:
        self._opening, self._body, self._gone = opening, body, gone
        self._as_kept = body is as_kept
        if self._running is None or self._running.disconnected:
            gone()

    def write(self, page: Page) -> bool:
        transport = self.transport
        # uvloop refuses a write after a failed one, and tells of the loss only in a later turn of the loop.
        if transport.is_closing():
            return False
        frames = page.frames
        # One record as it is kept is what is written nearly always: it costs no call.
        data = frames[0] if self._as_kept and len(frames) == 1 else self._body(page)
        if not data:  # an empty chunk would end the response
            return not self.flow.write_paused
        if self._opening is not None or isinstance(data, list):
            self._write_pieces(data if isinstance(data, list) else [data])
        else:
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))  # RFC 9112, section 7.1
        return not self.flow.write_paused

    def _write_pieces(self, pieces: list[bytes]) -> None:
        head = b""
        if self._opening is not None:
            head, pieces, self._opening = self._outgoing.take(), [self._opening, *pieces], None
        self.transport.writelines([b"%b%x\r\n" % (head, sum(map(len, pieces))), *pieces, b"\r\n"])

    async def drain(self) -> None:
        if self.transport.is_closing():
            await asyncio.sleep(_LOSS_POLL)  # the loss is about to be told: `connection_lost` ends the reader
        else:
            await self.flow.drain()

    def abort(self) -> None:
        self.transport.abort()

    def close(self) -> None:
        self._gone = None


def _bound_head(size: int) -> None:
    if size > MAX_HEAD_BYTES:
        raise _Refused(f"the request's line and headers, or its trailers, are over {MAX_HEAD_BYTES} bytes")


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """Let the end of the connection be that of a body whose length is not known (RFC 9112, section 6.3)."""
    send = cycle.send
    unframed = False

    async def plain(message: Message) -> None:
        nonlocal unframed
        if message["type"] == "http.response.start":
            framed = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            unframed = not framed and message["status"] not in _NO_BODY
            if unframed:
                cycle.chunked_encoding = False
        elif unframed:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)  # type: ignore[arg-type]  # uvicorn and Starlette type the same messages differently

    cycle.send = plain  # type: ignore[method-assign,assignment]
