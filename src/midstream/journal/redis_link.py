"""One connection to a server, and what keeps it up.

Written on `hiredis` alone: redis-py takes six times the CPU per command, sends a command again by itself when its
connection breaks, and cuts a connection that hears nothing for five seconds.  Here only a reply that is due can time
out, and what to do about a lost connection is for those who know whether their command may be repeated.  The dialect is
RESP2, which every server speaks.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from hiredis import ProtocolError, Reader, ReplyError

from midstream.errors import JournalError, StoreUnavailable
from midstream.journal.redis_scripts import command
from midstream.journal.redis_url import Access, Place

logger = logging.getLogger(__name__)

# A process that was stopped wakes up with replies in its socket that it has not read yet: an overdue one is given this
# much longer, in seconds, once the loop runs again.
_SECOND_LOOK = 0.05
# Pauses between tries to connect, in seconds: the first, and the longest.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5


class Lost(Exception):  # never leaves the journal: it becomes StoreUnavailable, or is mended
    """The connection broke.  Of the commands whose replies were due nothing is known."""


class Link(asyncio.Protocol):
    """An open connection.  Replies are matched to commands by their order.

    `heard` takes what comes when no reply is due: the messages of a subscriber.
    """

    def __init__(self, reply_timeout: float, heard: Callable[[Any], None] | None = None) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._reply_timeout = reply_timeout
        self._heard = heard
        self._reader = Reader()
        self._due: deque[tuple[int, float, Callable[[list[Any] | None], None]]] = deque()
        self._replies: list[Any] = []
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def send(self, payload: bytes, count: int, landed: Callable[[list[Any] | None], None]) -> None:
        """Write commands that will have `count` replies; `landed` gets these, or None when the connection is lost."""
        if self.closed.done():
            self._loop.call_soon(landed, None)
            return
        self._due.append((count, self._loop.time(), landed))
        if self._timer is None:
            self._timer = self._loop.call_later(self._reply_timeout, self._check, False)
        self._transport.write(payload)

    async def ask(self, *commands: Sequence[Any]) -> list[Any]:
        """The replies to a few commands.  Raises Lost."""
        replies: asyncio.Future[list[Any]] = self._loop.create_future()

        def landed(told: list[Any] | None) -> None:
            if replies.done():
                return
            if told is None:
                replies.set_exception(Lost("the connection was closed"))
            else:
                replies.set_result(told)

        self.send(b"".join(command(*parts) for parts in commands), len(commands), landed)
        return await replies

    def write(self, *parts: bytes | str | int) -> None:
        """Write a command whose answer comes as a message."""
        if not self.closed.done():
            self._transport.write(command(*parts))

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        gets = self._reader.gets
        try:
            while (reply := gets()) is not False:
                if not self._due:
                    if self._heard is not None:
                        self._heard(reply)
                    continue
                self._replies.append(reply)
                if len(self._replies) == self._due[0][0]:
                    _, _, landed = self._due.popleft()
                    replies, self._replies = self._replies, []
                    landed(replies)
        except ProtocolError as error:
            logger.error("what listens at %s is no Redis server: %s", self._transport.get_extra_info("peername"), error)
            self.abort()

    def _check(self, again: bool) -> None:
        self._timer = None
        if not self._due or self.closed.done():
            return
        rest = self._due[0][1] + self._reply_timeout - self._loop.time()
        if rest > 0:
            self._timer = self._loop.call_later(rest, self._check, False)
        elif not again:
            self._timer = self._loop.call_later(_SECOND_LOOK, self._check, True)
        else:
            logger.warning("no reply from the store within %g s", self._reply_timeout)
            self.abort()

    def abort(self) -> None:
        """Close at once; what is due is lost."""
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self.closed.done():
            self.closed.set_result(None)
        due, self._due = self._due, deque()
        for _, _, landed in due:
            landed(None)


async def dial(access: Access, place: Place, heard: Callable[[Any], None] | None = None) -> Link:
    """Connect and get in.  Raises OSError, TimeoutError, Lost; JournalError where the server will not have us."""
    loop = asyncio.get_running_loop()

    def make() -> Link:
        return Link(access.reply_timeout, heard)

    async with asyncio.timeout(access.connect_timeout):
        if place.path:
            transport, link = await loop.create_unix_connection(make, place.path)
        else:
            name = place.host if access.tls else None
            transport, link = await loop.create_connection(
                make, place.host, place.port, ssl=access.tls, server_hostname=name
            )
            # A peer that vanished without a word is noticed on a connection where nothing is due.
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            await _greet(link, access)
        except BaseException:
            link.abort()
            raise
    return link


async def _greet(link: Link, access: Access) -> None:
    commands: list[tuple[Any, ...]] = []
    if access.password:
        commands.append(("AUTH", access.username, access.password) if access.username else ("AUTH", access.password))
    if access.db:
        commands.append(("SELECT", access.db))
    commands.append(("PING",))
    for reply in await link.ask(*commands):
        if isinstance(reply, ReplyError):
            if str(reply).startswith(("LOADING", "MASTERDOWN", "BUSY")):
                raise Lost(str(reply))
            raise JournalError(f"the store will not let us in: {reply}")


class Tether:
    """Keeps one connection up: connects, and connects again when it is lost, for as long as it is held.

    `dial` makes a connection ready for use.  `up` is told of each one, `down` when it is lost; `tired` once a try has
    failed for longer than `patience` seconds, and then `down` was told before or there never was one.
    """

    def __init__(
        self,
        dial: Callable[[], Awaitable[Link]],
        patience: float,
        up: Callable[[Link], None],
        down: Callable[[], None],
        tired: Callable[[StoreUnavailable], None],
    ) -> None:
        self._dial = dial
        self._patience = patience
        self._up, self._down, self._tired = up, down, tired
        self._link: Link | None = None
        self._loop = asyncio.get_running_loop()
        self._nudge = asyncio.Event()
        self._timer = self._loop.call_later(patience, self._tire)
        self.refusal = ""  # why the server will not have us, where it is that
        self._trouble = "no connection yet"
        self._task = asyncio.create_task(self._hold(), name="store connection")

    async def _hold(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            try:
                link = await self._dial()
            except Exception as error:  # noqa: BLE001  # not to try again would be to lose the store for ever
                self._told(error)
                await self._rest(pause * random.uniform(0.7, 1.3))
                pause = min(pause * 2, _LONGEST_PAUSE)
                continue
            pause, self.refusal = _FIRST_PAUSE, ""
            self._timer.cancel()
            self._link = link
            self._up(link)
            await asyncio.wait([link.closed])  # not the future itself: to cancel this is not to close that
            self._link = None
            self._trouble = "the connection was lost"
            self._timer = self._loop.call_later(self._patience, self._tire)
            self._down()

    async def _rest(self, seconds: float) -> None:
        self._nudge.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._nudge.wait()
        except TimeoutError:
            pass

    def hurry(self) -> None:
        """Another connection to the same server was made: try at once, and be patient anew."""
        if self._link is None:
            self._nudge.set()
            self._timer.cancel()
            self._timer = self._loop.call_later(self._patience, self._tire)

    def _told(self, error: Exception) -> None:
        trouble = str(error) or type(error).__name__
        if not isinstance(error, OSError | TimeoutError | Lost | JournalError):
            logger.error("connecting to the store failed", exc_info=error)
        self.refusal = trouble if isinstance(error, JournalError) else ""
        if self.refusal and trouble != self._trouble:  # once, not at each try
            logger.error("%s", trouble)
        self._trouble = trouble

    def _tire(self) -> None:
        self._tired(StoreUnavailable(f"the store does not answer: {self._trouble}", 2))

    def drop(self) -> None:
        """Let this connection go and make a new one: the server behind the name may be another one by now."""
        if self._link is not None:
            self._link.abort()

    async def close(self) -> None:
        self._timer.cancel()
        self._task.cancel()
        await asyncio.wait([self._task])
        if self._link is not None:
            self._link.abort()
            await asyncio.wait([self._link.closed])
