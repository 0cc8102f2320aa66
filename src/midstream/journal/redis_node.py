"""One server of a store: what it says of itself, and the connections we have to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from hiredis import ReplyError

from midstream.errors import JournalError
from midstream.journal.base import RoundTrips
from midstream.journal.redis_lane import Ears, Lane
from midstream.journal.redis_link import Link, Lost, dial
from midstream.journal.redis_scripts import Script, command
from midstream.journal.redis_url import Access, Place, Terms

logger = logging.getLogger(__name__)


class Told(Protocol):
    """Who is told of what becomes of a server, and knows how to reach it."""

    access: Access
    terms: Terms
    trips: RoundTrips
    scripts: Sequence[Script]
    clustered: bool
    on_message: Callable[[bytes, bytes], None]
    on_ready: Callable[[bytes], None]
    on_deaf: Callable[[Node], None]
    on_up: Callable[[Node], None]
    on_down: Callable[[Node], None]
    on_restart: Callable[[Node], None]

    def greeted(self, node: Node) -> None: ...


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a server says of itself.  `run_id` changes when it is restarted, and is another on another server."""

    run_id: str
    version: tuple[int, ...]
    clustered: bool
    policy: str
    uptime: float

    @classmethod
    def of(cls, told: bytes | ReplyError) -> Greeting:
        """Raises JournalError for a server too old, Lost for one that takes no writes now."""
        if isinstance(told, ReplyError):
            raise JournalError(f"the store does not let us ask who it is: {told}")
        said = dict(line.split(":", 1) for line in told.decode().splitlines() if ":" in line)
        version = tuple(int(part) for part in said.get("redis_version", "0").split(".") if part.isdigit())
        if version < (7,):
            raise JournalError(f"the store is version {said.get('redis_version')}; Redis 7 or Valkey is needed")
        if said.get("role", "master") != "master" and said.get("cluster_enabled") != "1":
            raise Lost("the server is a replica, which takes no writes")
        return cls(
            run_id=said.get("run_id", ""),
            version=version,
            clustered=said.get("cluster_enabled") == "1",
            policy=said.get("maxmemory_policy", "noeviction"),
            uptime=float(said.get("uptime_in_seconds", 0)),
        )


class Node:
    """One server: a lane for appends, one for everything else, and ears.

    `since` is the loop's time from which on we have had it without a break, `born` when it was started, and `replaced`
    when we last met another one in its place.
    """

    def __init__(self, store: Told, place: Place) -> None:
        self.place = place
        self.run_id = ""
        self.policy = "noeviction"
        self.clustered = False
        self.born = self.since = self.replaced = float("-inf")
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._met = asyncio.Event()
        self._tried = False
        patience = store.terms.patience
        self.appends = Lane(self._dial, patience, store.trips, paced=True)
        self.calls = Lane(self._dial, patience, store.trips, up=self._up, down=self._down)
        self._ears: Ears | None = None

    @property
    def ears(self) -> Ears:
        """Opened with the first channel: a process that reads only what it writes itself needs none."""
        if self._ears is None:
            self._ears = Ears(
                partial(dial, self._store.access, self.place),
                self._store.terms.patience,
                reply_timeout=self._store.access.reply_timeout,
                sharded=self._store.clustered,  # ours is not known yet where we have not met
                heard=self._store.on_message,
                ready=self._store.on_ready,
                deaf=lambda: self._store.on_deaf(self),
            )
        return self._ears

    async def _dial(self) -> Link:
        link = await dial(self._store.access, self.place)
        try:
            async with asyncio.timeout(self._store.access.connect_timeout):
                loads = [("SCRIPT", "LOAD", script.text) for script in self._store.scripts]
                told, *loaded = await link.ask(("INFO",), *loads)
            self._meet(Greeting.of(told))
            if refusal := next((reply for reply in loaded if isinstance(reply, ReplyError)), None):
                raise Lost(str(refusal))
        except BaseException:
            link.abort()
            raise
        return link

    def _meet(self, greeting: Greeting) -> None:
        before, self.run_id = self.run_id, greeting.run_id
        self.clustered, self.policy = greeting.clustered, greeting.policy
        self.born = self._loop.time() - greeting.uptime
        if before and before != self.run_id:
            self.replaced = self._loop.time()
            logger.warning("the store at %s was restarted or replaced", self.place)
            self._store.on_restart(self)

    def _up(self) -> None:
        if self._tried:
            self.since = self._loop.time()
        self._tried = True
        self._met.set()
        self.appends.hurry()
        if self._ears is not None:
            self._ears.hurry()
        self._store.greeted(self)
        self._store.on_up(self)

    def _down(self) -> None:
        self._met.clear()
        self._store.on_down(self)

    def ignore(self, channel: bytes) -> None:
        """Hear no more of a channel: who listens where it no longer is has its connection broken again and again."""
        if self._ears is not None:
            self._ears.ignore(channel)

    async def met(self) -> None:
        """Return once there is a connection."""
        await self._met.wait()

    def prove(self) -> None:
        """Ask every connection for a sign of life."""
        if self._ears is not None:
            self._ears.prove()
        if self.appends.open:
            self.appends.send(command("PING")).add_done_callback(_forget)

    def drop(self) -> None:
        self.appends.drop()
        self.calls.drop()

    async def close(self) -> None:
        if self._ears is not None:
            await self._ears.close()
        await self.appends.close()
        await self.calls.close()


def _forget(reply: asyncio.Future[Any]) -> None:
    if not reply.cancelled():
        reply.exception()
