"""Commands on their way to one server: in order, many to a write, over a connection that mends itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from midstream.errors import StoreUnavailable
from midstream.journal.base import RoundTrips
from midstream.journal.redis_link import Link, Lost, Tether

# What one write holds at most, in bytes: enough to amortise it, not so much that its reply is overdue.
_WRITE_BYTES = 4 * 1024 * 1024


class _Item(NamedTuple):
    payload: bytes
    replies: int
    reply: asyncio.Future[Any]


class Lane:
    """A queue of packed commands and a connection they go through.

    Everything that comes up in one turn of the loop is one write.  On a `paced` lane one write is under way at a time
    and what gathers meanwhile is the next: the busier the store, the larger its pipelines.

    While the connection is being made commands wait for it; once it has been missing for `patience` seconds they fail
    at once, until there is one again.
    """

    def __init__(
        self,
        dial: Callable[[], Awaitable[Link]],
        patience: float,
        trips: RoundTrips,
        *,
        paced: bool = False,
        up: Callable[[], None] = lambda: None,
        down: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._paced = paced
        self._trips = trips
        self._told_up, self._told_down = up, down
        self._due: list[_Item] = []
        self._armed = False
        self._flying = False
        self._link: Link | None = None
        self._absent: StoreUnavailable | None = None
        self._tether = Tether(dial, patience, self._up, self._down, self._tired)

    @property
    def open(self) -> bool:
        return self._link is not None

    @property
    def refusal(self) -> str:
        return self._tether.refusal

    def send(self, payload: bytes) -> asyncio.Future[Any]:
        """The reply to one packed command; a ReplyError is one.  The future raises Lost and StoreUnavailable."""
        return self._add(payload, 1)

    def block(self, commands: Sequence[bytes]) -> asyncio.Future[list[Any]]:
        """The replies to commands that must follow each other on one connection, as in MULTI … EXEC."""
        return self._add(b"".join(commands), len(commands))

    def _add(self, payload: bytes, count: int) -> asyncio.Future[Any]:
        reply: asyncio.Future[Any] = self._loop.create_future()
        if self._absent is not None:
            reply.set_exception(StoreUnavailable(self._absent.detail, self._absent.retry_after))
            return reply
        self._due.append(_Item(payload, count, reply))
        if not self._armed and not self._flying:
            self._armed = True
            self._loop.call_soon(self._depart)
        return reply

    def _depart(self) -> None:
        self._armed = False
        link = self._link
        if link is None or not self._due or self._flying:
            return
        going = self._due
        self._due = []
        if len(going) > 1 and sum(len(item.payload) for item in going) > _WRITE_BYTES:
            going = self._first(going)
        self._flying = self._paced
        link.send(
            b"".join([item.payload for item in going]),
            sum([item.replies for item in going]),
            partial(self._landed, going, self._loop.time()),
        )
        if self._due and not self._paced:
            self._depart()

    def _first(self, going: list[_Item]) -> list[_Item]:
        """As many as one write may hold; the others are due again."""
        size = 0
        for at, item in enumerate(going):
            size += len(item.payload)
            if size > _WRITE_BYTES and at:
                self._due = going[at:]
                return going[:at]
        return going

    def _landed(self, going: list[_Item], sent: float, replies: list[Any] | None) -> None:
        self._flying = False
        self._trips.add(self._loop.time() - sent)
        at = 0
        for item in going:
            end = at + item.replies
            if not item.reply.done():
                if replies is None:
                    item.reply.set_exception(Lost("the connection to the store was lost"))
                else:
                    item.reply.set_result(replies[at] if item.replies == 1 else replies[at:end])
            at = end
        if self._due:
            self._depart()

    def _up(self, link: Link) -> None:
        self._link, self._absent = link, None
        self._due = [item for item in self._due if not item.reply.done()]  # who gave up meanwhile is not to be served
        self._told_up()
        self._depart()

    def _down(self) -> None:
        self._link = None
        self._told_down()

    def _tired(self, absent: StoreUnavailable) -> None:
        self._absent = absent
        due, self._due = self._due, []
        for item in due:
            if not item.reply.done():
                item.reply.set_exception(StoreUnavailable(absent.detail, absent.retry_after))

    def hurry(self) -> None:
        """The server is known to be there: take commands, and connect at once."""
        if self._link is None:
            self._absent = None
            self._tether.hurry()

    def drop(self) -> None:
        self._tether.drop()

    async def close(self) -> None:
        """Let go of the connection.  What is due is lost, and nothing more is taken."""
        await self._tether.close()
        self._link = None
        self._absent = StoreUnavailable("the journal is closed")
        due, self._due = self._due, []
        for item in due:
            if not item.reply.done():
                item.reply.set_exception(Lost("the connection to the store was closed"))


class Ears:
    """A subscriber: the channels it is to hear, on a connection of its own.

    `heard` gets each message with its channel; `ready` is told once a channel's messages come in, and again after each
    reconnection, since what was published in between is lost; `deaf` is told of a lost connection.
    """

    def __init__(
        self,
        dial: Callable[[Callable[[Any], None]], Awaitable[Link]],
        patience: float,
        *,
        reply_timeout: float,
        sharded: bool,
        heard: Callable[[bytes, bytes], None],
        ready: Callable[[bytes], None],
        deaf: Callable[[], None],
    ) -> None:
        self._subscribe, self._unsubscribe = ("SSUBSCRIBE", "SUNSUBSCRIBE") if sharded else ("SUBSCRIBE", "UNSUBSCRIBE")
        self._heard, self._ready, self._deaf = heard, ready, deaf
        self._channels: set[bytes] = set()
        self._link: Link | None = None
        self._loop = asyncio.get_running_loop()
        self._reply_timeout = reply_timeout
        self._asked: float | None = None  # when a sign of life was asked for that has not come
        self._tether = Tether(partial(dial, self._message), patience, self._up, self._down, lambda _: None)

    def listen(self, channel: bytes) -> None:
        if channel not in self._channels:
            self._channels.add(channel)
            if self._link is not None:
                self._link.write(self._subscribe, channel)

    def ignore(self, channel: bytes) -> None:
        if channel in self._channels:
            self._channels.discard(channel)
            if self._link is not None:
                self._link.write(self._unsubscribe, channel)

    def hurry(self) -> None:
        """The server is known to be there: connect at once."""
        self._tether.hurry()

    def prove(self) -> None:
        """Ask for a sign of life; drop the connection when the one asked for before has not come in time."""
        if self._link is None:
            return
        now = self._loop.time()
        if self._asked is None:
            self._asked = now
            self._link.write("PING")
        elif now - self._asked > self._reply_timeout:
            self._tether.drop()

    def _message(self, reply: Any) -> None:
        kind = reply[0] if isinstance(reply, list) else reply
        if kind in (b"message", b"smessage"):
            self._heard(reply[1], reply[2])
        elif kind in (b"pong", b"PONG"):
            self._asked = None
        elif kind in (b"subscribe", b"ssubscribe"):
            if reply[1] in self._channels:
                self._ready(reply[1])
        elif isinstance(reply, Exception) or (kind == b"sunsubscribe" and reply[1] in self._channels):
            self._tether.drop()  # its slot has moved: it will be found where it is now

    def _up(self, link: Link) -> None:
        self._link, self._asked = link, None
        for channel in self._channels:
            link.write(self._subscribe, channel)

    def _down(self) -> None:
        self._link = None
        self._deaf()

    async def close(self) -> None:
        await self._tether.close()
        self._link = None
