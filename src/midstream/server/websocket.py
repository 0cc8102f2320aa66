"""uvicorn's WebSocket protocol, that is also the `Line` of its connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from starlette.types import Send
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Request

from midstream.errors import BadRequest, MidstreamError, TooLarge
from midstream.transports.messages import error_message
from midstream.transports.websocket import LINE
from midstream.wire import WS_CLOSE

_log = logging.getLogger("midstream")

# A connection that closes with bytes still to send is looked at again after so many seconds.
_LOSS_POLL = 0.01
# What of a peer's is no message at all, and therefore ends the connection: it is told in the usual shape first.
_BROKEN: dict[int, Callable[[str], MidstreamError]] = {
    WS_CLOSE["not_a_frame"]: BadRequest,
    WS_CLOSE["not_utf8"]: BadRequest,
    WS_CLOSE["too_large"]: TooLarge,
}


class SocketConnection(WebSocketsSansIOProtocol):
    """One connection after its upgrade."""

    _leaving: Callable[[], None] | None = None
    _pong = b""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        # What strangers send is told to them, and not to the log.
        self.logger = logging.getLogger("midstream.websocket")
        self.logger.setLevel(logging.CRITICAL)

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.close_sent:
            extensions: dict[Any, Any] = self.scope["extensions"]
            extensions[LINE] = self

    # --- the line ---------------------------------------------------------------------------------------------------

    def carries(self, send: Send) -> bool:
        return getattr(send, "__self__", None) is self

    def open(self, leaving: Callable[[], None]) -> None:
        self._leaving = leaving

    def write(self, messages: list[bytes]) -> bool:
        transport = self.transport
        # uvloop refuses a write after a failed one, and tells of the loss only in a later turn of the loop.
        if self.close_sent or transport.is_closing():
            return False
        if len(messages) == 1:
            message = messages[0]
            transport.write(_head(len(message)) + message)
        else:
            parts: list[bytes] = []
            for message in messages:
                parts += (_head(len(message)), message)
            transport.write(b"".join(parts))
        return self.writable.is_set()

    async def drain(self) -> None:
        if self.close_sent or self.transport.is_closing():
            await asyncio.sleep(_LOSS_POLL)  # the loss is about to be told: it ends the readers
        else:
            await self.writable.wait()

    def abort(self) -> None:
        self.transport.abort()

    # --- pings ------------------------------------------------------------------------------------------------------

    def handle_ping(self) -> None:
        """Answer at once, or, where there is no room, the newest ping alone (RFC 6455, section 5.5.3).

        Else who pings without end and reads nothing would be kept an answer to each.
        """
        pong = b"".join(self.conn.data_to_send())
        if self.writable.is_set():
            self.transport.write(pong)
        else:
            self._pong = pong

    def resume_writing(self) -> None:
        pong, self._pong = self._pong, b""
        super().resume_writing()
        if pong and not self.close_sent:
            self.transport.write(pong)

    # --- the ends of a connection -----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """The server ends: what is followed may end first (the server waits for it), then the socket closes."""
        if self._leaving is None or self.close_sent:
            super().shutdown()
        else:
            self._leaving()

    def handle_parser_exception(self) -> None:
        """What the peer sent is no message: say so, then close, as RFC 6455, section 7.1.7, has it."""
        closing = self.conn.close_sent
        if self.handshake_complete and closing is not None and (kind := _BROKEN.get(closing.code)) is not None:
            told = Frame(Opcode.TEXT, error_message(kind(_REASONS.get(closing.code, closing.reason)), None))
            self.transport.write(told.serialize(mask=False))
        super().handle_parser_exception()


_REASONS = {
    WS_CLOSE["not_utf8"]: "the message is not UTF-8",
    WS_CLOSE["too_large"]: "the message is over the limit of --max-body; shorten it, or raise that",
}


def _head(length: int) -> bytes:
    """A frame's head: a whole text message, unmasked (RFC 6455, section 5.2)."""
    if length < 126:
        return bytes((0x81, length))
    if length < 65536:
        return b"\x81\x7e" + length.to_bytes(2, "big")
    return b"\x81\x7f" + length.to_bytes(8, "big")
