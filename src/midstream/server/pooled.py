"""The pool of a gateway, put together.  Imported only where there is one: its database library is slow to load."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

from midstream.errors import JournalError, UnknownStream
from midstream.pool.errors import PoolUnavailable, PoolUnusable
from midstream.pool.jobs import Jobs
from midstream.pool.leases import open_leases
from midstream.pool.pool import Pool
from midstream.pool.sweep import Sweep, recover
from midstream.producers.pool import PoolSource, shown
from midstream.pulse import Pulse
from midstream.server.settings import Settings
from midstream.streams import Streams
from midstream.wire import POOL_SWEEP_EVERY


class Pooled:
    """The pool and its sweep.  `start` before the streams are, `begin` after; `rest` before they are closed, `stop`
    after.  Raises ValueError for a database that is none, or the journal's own file.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        assert settings.pool is not None
        if (file := _file(settings.pool)) and file == _file(settings.journal):
            raise ValueError(f"--pool and --journal both name {file}: give each a file of its own")
        leases = open_leases(settings.journal, clock)
        place = "" if leases.shared else _place(settings)
        self.pool = Pool(Jobs(settings.pool, clock, place, settings.max_jobs_per_owner), leases, clock)
        self.source = PoolSource(self.pool, self._has_ended)
        self._sweep = Sweep(self.pool, self._has_ended)
        self._pulse = Pulse(lambda _: self._sweep.sweep(), POOL_SWEEP_EVERY)
        self._streams: Streams | None = None

    def watch(self, streams: Streams) -> None:
        """These are the streams whose requests the pool answers."""
        self._streams = streams

    async def start(self) -> None:
        """Open its stores.  Raises JournalError."""
        try:
            await self.pool.start()
        except PoolUnusable as error:
            raise JournalError(error.message) from error

    async def begin(self) -> None:
        """Settle what the process before left in flight, and sweep from now on.  Raises JournalError."""
        try:
            await recover(self.pool, self._said)
        except PoolUnavailable as error:
            raise JournalError(error.message) from error
        self._pulse.start()

    async def sweep(self) -> None:
        """Sweep once, now."""
        await self._sweep.sweep()

    async def rest(self) -> None:
        """Sweep no more."""
        await self._pulse.stop()

    async def stop(self) -> None:
        """Let go of the stores."""
        await self.pool.stop()

    async def _has_ended(self, stream_id: str) -> bool:
        assert self._streams is not None
        try:
            return (await self._streams.journal.state(stream_id)).ended
        except UnknownStream:
            return True

    async def _said(self, stream_id: str) -> tuple[str, int] | None:
        assert self._streams is not None
        try:
            owner = (await self._streams.journal.state(stream_id)).meta.owner
            return shown((await self._streams.answer(stream_id, owner)).fold)
        except UnknownStream:
            return None


def _file(url: str) -> str:
    """The SQLite file of a URL, "" where it has none."""
    path = url.removeprefix("sqlite:///")
    return os.path.realpath(path) if path != url else ""


def _place(settings: Settings) -> str:
    """What this gateway's memory is called among those that share its pool's database, the same after a restart.

    A journal file has one gateway; without one, a port has.
    """
    host = socket.gethostname()
    if path := settings.journal.removeprefix("memory:").removeprefix("sqlite:///"):
        return f"{host} {Path(path).absolute()}"
    return f"{host} {settings.host}:{settings.port or os.getpid()}"
