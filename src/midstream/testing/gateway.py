"""A gateway in the test's own event loop: the real one, on a free loopback port, without signals.

    async with RunningGateway(Settings(journal="memory:"), puppets) as gateway:
        ...  # gateway.address is where it listens

Time stands still in it (`gateway.clock`), and a test may beat its pulse by hand: heartbeats, abandonment, expiry and
stalls then come when the test says so.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

from midstream.follow import Follow
from midstream.server.app import Gateway
from midstream.server.serving import Server, bound
from midstream.server.settings import Settings
from midstream.streams import Streams
from midstream.testing.clock import ManualClock
from midstream.testing.patience import soon, until
from midstream.testing.puppet import Puppets


class _Server(Server):
    """The gateway's server, for a loop that has other things to do than to wait for its signals."""

    async def listen(self, listener: socket.socket) -> None:
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.on_tick(0)
        await self.startup([listener])

    async def close(self, stop: Callable[[], Awaitable[None]]) -> None:
        for server in self.servers:
            server.close()
        await stop()
        for connection in list(self.server_state.connections):
            if connection.transport.get_write_buffer_size():  # its peer takes nothing: a polite end would wait
                connection.transport.abort()
            else:
                connection.shutdown()
        if tasks := list(self.server_state.tasks):
            await soon(asyncio.wait(tasks))


class RunningGateway:
    """An async context manager.  `around` wraps the application as a middleware would; `settings.port` is always 0.

    Where the settings name an upstream or a pool it is that, and not the puppets, that is asked.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        puppets: Puppets | None = None,
        *,
        clock: ManualClock | None = None,
        around: Callable[[Gateway], Any] | None = None,
    ) -> None:
        self.settings = replace(settings or Settings(journal="memory:"), port=0)
        self.puppets = puppets or Puppets()
        self.clock = clock or ManualClock()
        own = self.settings.upstream or self.settings.pool
        self.gateway = Gateway(self.settings, {}, self.clock, None if own else self.puppets)
        self.address = ""
        self.server = _Server(self.gateway, self._started, around(self.gateway) if around else None)

    @property
    def streams(self) -> Streams:
        return self.gateway.streams

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def _started(self, address: str) -> None:
        self.address = address

    async def __aenter__(self) -> RunningGateway:
        await self.gateway.start()
        with bound(self.settings.host, 0) as listener:
            await self.server.listen(listener.dup())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop at once: readers are interrupted, writers stopped, nothing is drained (call `drain` before for that)."""
        await self.server.close(self.gateway.stop)

    async def drain(self) -> None:
        """What the first SIGTERM does: accept nothing more, let streams end for `settings.drain` seconds, end them."""
        await self.server.shutdown()

    async def pulse(self, elapsed: float) -> None:
        """Let the gateway's readers live through so many seconds (the clock is not moved)."""
        await self.streams.pulse(0.0)  # where each of them stands now
        await self.streams.pulse(elapsed)
        everybody = [follow for several in self.streams.readers.values() for follow in several]
        await until(lambda: not any(follow.beat_due for follow in everybody), "every reader to beat")

    def readers(self, stream_id: str) -> list[Follow]:
        return list(self.streams.readers.get(stream_id, ()))

    async def idle(self, stream_id: str, readers: int = 1) -> None:
        """Wait until so many readers of the stream have been given all there is, and wait for more."""

        def waiting() -> bool:
            following = self.readers(stream_id)
            return len(following) == readers and all(follow.waiting for follow in following)

        await until(waiting, f"{readers} waiting readers of {stream_id}")

    async def unread(self, stream_id: str) -> None:
        """Wait until nobody reads the stream."""
        await until(lambda: not self.readers(stream_id), f"the last reader of {stream_id} to go")
