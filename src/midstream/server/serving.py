"""The gateway on uvicorn: its protocol, its signals, its shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from midstream.errors import BadRequest
from midstream.records import Page
from midstream.server.app import Gateway
from midstream.transports.http import error_body, json_response
from midstream.transports.sse import PIPE, body_of
from midstream.wire import SEND_STALL

_log = logging.getLogger("midstream")

# Streams make many small long-lived objects: the default of 700 runs the collector for nothing.
_GC_THRESHOLD = 50_000
# A connection that closes with bytes still to send is looked at again after so many seconds.
_LOSS_POLL = 0.01


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol, that is also the `Pipe` of the response it is sending (one at a time per connection)."""

    _gone: Callable[[], None] | None = None
    _opening = b""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions: dict[Any, Any] = self.scope.setdefault("extensions", {})
        extensions[PIPE] = self

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is refused in the shape of every other error."""
        answer = json_response(error_body(BadRequest(msg)), 400, {"connection": "close"})
        head = [b"%b: %b\r\n" % pair for pair in answer.raw_headers]
        self.transport.write(b"".join((b"HTTP/1.1 400 Bad Request\r\n", *head, b"\r\n", answer.body)))
        self.transport.close()

    def carries(self, send: Send) -> bool:
        return getattr(send, "__self__", None) is self.cycle and bool(self.cycle.chunked_encoding)

    def open(self, opening: bytes, gone: Callable[[], None]) -> None:
        self._opening, self._gone = opening, gone
        if self.cycle.disconnected:
            gone()

    def write(self, page: Page) -> bool:
        transport = self.transport
        # uvloop refuses a write after a failed one, and tells of the loss only in a later turn of the loop.
        if transport.is_closing():
            return False
        frames = page.frames
        data = frames[0] if len(frames) == 1 else body_of(page)
        if self._opening:
            data, self._opening = self._opening + data, b""
        transport.write(b"%x\r\n%b\r\n" % (len(data), data))  # RFC 9112, section 7.1
        return not self.flow.write_paused

    async def drain(self) -> None:
        if self.transport.is_closing():
            await asyncio.sleep(_LOSS_POLL)  # the loss is about to be told: `connection_lost` ends the reader
        else:
            await self.flow.drain()

    def abort(self) -> None:
        self.transport.abort()

    def close(self) -> None:
        self._gone = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._gone is not None:
            self._gone()


class Server(uvicorn.Server):
    """uvicorn's server, that drains the gateway while it waits for connections to end.

    `app` is what it serves: the gateway, unless something stands around it.
    """

    def __init__(self, gateway: Gateway, on_started: Callable[[str], None], app: ASGIApp | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                app or gateway,
                http=_Protocol,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                backlog=4096,
                timeout_keep_alive=75,
            )
        )
        self._gateway = gateway
        self._on_started = on_started
        self._draining: asyncio.Future[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._on_started(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """First signal: stop accepting, and let readers stay until their streams end or `--drain` has passed."""
        self._draining = asyncio.ensure_future(self._gateway.drain())
        await super().shutdown(sockets)
        if self.force_exit:
            self._draining.cancel()
        await asyncio.wait([self._draining])

    def handle_exit(self, sig: int, frame: Any) -> None:
        """A second signal, of whichever kind, is at once, also when no reader but only the drain is waited for."""
        self.force_exit = self.should_exit
        self.should_exit = True
        if self.force_exit and self._draining is not None:
            self._draining.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM for a clean exit, SIGHUP for the keys file."""
        loop = asyncio.get_running_loop()
        taken = {signal.SIGINT: self.handle_exit, signal.SIGTERM: self.handle_exit}
        for sig, handler in taken.items():
            loop.add_signal_handler(sig, handler, sig, None)
        loop.add_signal_handler(signal.SIGHUP, self._gateway.reload_keys)
        try:
            yield
        finally:
            for sig in (*taken, signal.SIGHUP):
                loop.remove_signal_handler(sig)


async def serve(gateway: Gateway, on_started: Callable[[str], None]) -> None:
    """Run until a signal.  `on_started` is given the address.  Raises what `Gateway.start` does, OSError (the port)."""
    with bound(gateway.settings.host, gateway.settings.port) as listener:
        await gateway.start()
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD, 20, 20)
        try:
            await Server(gateway, on_started).serve([listener])
        finally:
            await gateway.stop()


@contextlib.contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """The listening socket, bound before the journal is touched: a taken port must leave a journal alone."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP, or asyncio leaves Nagle's delay on: 40 ms for an answer of more than one write.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # accepted connections inherit it
            # A silent stream sends too little to fill a socket: only the kernel sees that nobody acknowledges it.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SEND_STALL * 1000))
        listener.bind((host, port))
        listener.set_inheritable(False)
        yield listener
