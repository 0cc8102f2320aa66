"""The gateway on uvicorn: its signals, its shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from midstream.server.app import Gateway
from midstream.server.connection import HttpConnection
from midstream.server.websocket import SocketConnection
from midstream.transports.grpc import GrpcServer, tls
from midstream.wire import SEND_STALL

_log = logging.getLogger("midstream")

# Seconds that calls have to end in order once there is nothing more to wait for.
_LAST_WORDS = 1.0
# Seconds that readers have to take what is left of their streams, once all of these have ended.
_READ_OUT = 5.0
# Connections accepted in one turn of the loop: uvloop takes one a turn from each listener.  Twenty requests that come
# together go through each stage together then, which takes a third less time than all stages for one after the other.
# Each listener costs a look for a connection that comes alone: a microsecond or two.
_AT_ONCE = 24
# Streams make many small long-lived objects: the default of 700 runs the collector for nothing.
_GC_THRESHOLD = 50_000


class Server(uvicorn.Server):
    """uvicorn's server, that drains the gateway while it waits for connections to end.

    `app` is what it serves: the gateway, unless something stands around it.  `calls` is the gateway over gRPC, running,
    and drained with it.
    """

    def __init__(
        self,
        gateway: Gateway,
        on_started: Callable[[str], None],
        app: ASGIApp | None = None,
        calls: GrpcServer | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app or gateway.app,
                http=HttpConnection,
                ws=SocketConnection,
                ws_max_size=gateway.settings.max_body,
                # A connection that takes nothing is cut off by the pulse; a slow one, whose answer to a ping stands
                # behind megabytes, must not be.
                ws_ping_timeout=None,
                ws_per_message_deflate=False,
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
        self._calls = calls
        self._draining: asyncio.Future[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._on_started(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """First signal: stop accepting, and let readers stay until their streams end or `--drain` has passed."""
        self._draining = asyncio.ensure_future(self._drain())
        if self._gateway.is_fed:  # who feeds the streams comes over new connections too
            await asyncio.wait([self._draining])
        cutting = asyncio.ensure_future(self._cut_off(self._draining))
        await super().shutdown(sockets)
        cutting.cancel()
        if self.force_exit:
            self._draining.cancel()
        await asyncio.wait([self._draining])

    async def _cut_off(self, drained: asyncio.Future[None]) -> None:
        """Wait no longer for who takes nothing than for everybody else."""
        await asyncio.wait([drained])
        await asyncio.sleep(_READ_OUT)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _drain(self) -> None:
        if self._calls is not None:
            await self._calls.drain()
        await self._gateway.drain()
        if self._calls is not None:
            await self._calls.stop(_LAST_WORDS)

    def leave(self) -> None:
        """What the first signal does, and nothing more where there was one."""
        if not self.should_exit:
            self.handle_exit(signal.SIGTERM, None)

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


async def serve(
    gateway: Gateway,
    on_started: Callable[[str], None],
    *,
    shared: bool = False,
    attend: Callable[[Server], None] = lambda server: None,
) -> None:
    """Run until a signal.  `on_started` is given the address; `attend` gets the server before it begins.

    With `shared` other processes of the same user may take the same ports, and get their part of what comes.
    Raises what `Gateway.start` does, OSError (a port, a file of TLS), ValueError (TLS with one half missing).
    """
    settings = gateway.settings
    with bound(settings.host, settings.port, shared=shared) as listener:
        calls = bound_calls(gateway, shared=shared) if settings.grpc_port else None
        await gateway.start()
        if calls is not None:
            await calls.start()
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD, 20, 20)
        try:
            server = Server(gateway, on_started, calls=calls)
            attend(server)
            with doubled(listener) as sockets:
                await server.serve(sockets)
        finally:
            await gateway.stop()
            if calls is not None:
                await calls.stop(_LAST_WORDS)


@contextlib.contextmanager
def doubled(listener: socket.socket) -> Iterator[list[socket.socket]]:
    """The socket several times, for a loop that accepts one connection from each in a turn."""
    with contextlib.ExitStack() as more:
        yield [listener, *(more.enter_context(listener.dup()) for _ in range(_AT_ONCE - 1))]


def bound_calls(gateway: Gateway, *, shared: bool = False) -> GrpcServer:
    """The gateway over gRPC, on the port of its settings, not yet started.  Raises OSError, ValueError."""
    settings = gateway.settings
    credentials = None
    if settings.grpc_tls_cert is not None and settings.grpc_tls_key is not None:
        credentials = tls(Path(settings.grpc_tls_cert).read_bytes(), Path(settings.grpc_tls_key).read_bytes())
    elif settings.grpc_tls_cert is not None or settings.grpc_tls_key is not None:
        raise ValueError("--grpc-tls-cert and --grpc-tls-key need each other")
    calls = gateway.grpc_server([("grpc.so_reuseport", int(shared))])
    calls.bind(settings.host, settings.grpc_port, credentials)
    return calls


@contextlib.contextmanager
def bound(host: str, port: int, *, shared: bool = False) -> Iterator[socket.socket]:
    """The listening socket, bound before the journal is touched: a taken port must leave a journal alone."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP, or asyncio leaves Nagle's delay on: 40 ms for an answer of more than one write.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # accepted connections inherit it
            # A silent stream sends too little to fill a socket: only the kernel sees that nobody acknowledges it.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SEND_STALL * 1000))
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.set_inheritable(False)
        yield listener
