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
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from midstream.server.app import Gateway
from midstream.transports.sse import ABORT

_log = logging.getLogger("midstream")

# Streams make many small long-lived objects: the default of 700 runs the collector for nothing.
_GC_THRESHOLD = 50_000


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol, that also tells the application how to drop the connection.

    ASGI has no word for it, and closing politely waits for a peer that has stopped reading.
    """

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions: dict[Any, Any] = self.scope.setdefault("extensions", {})  # type: ignore[assignment]
        extensions[ABORT] = self.transport.abort


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
                backlog=4096,
                timeout_keep_alive=75,
            )
        )
        self._gateway = gateway
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._on_started(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """First signal: stop accepting, and let readers stay until their streams end or `--drain` has passed."""
        draining = asyncio.ensure_future(self._gateway.drain())
        await super().shutdown(sockets)
        if self.force_exit:
            draining.cancel()
        await asyncio.wait([draining])

    def handle_exit(self, sig: int, frame: Any) -> None:
        """A second signal, of whichever kind, is at once."""
        self.force_exit = self.should_exit
        self.should_exit = True

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
    """Run until a signal.  `on_started` is given the address.  Raises what `Gateway.start` does, OSError for the port."""
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
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.set_inheritable(False)
        yield listener
