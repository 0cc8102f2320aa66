"""Reading one upstream body from its socket, under time limits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from midstream.errors import ProducerFailed
from midstream.producers.body import Body
from midstream.producers.upstream import UpstreamLimits

# Once every choice has finished, usage and [DONE] come at once or not at all.
_AFTER_FINISH: Final = 5.0
# A timer that fires so late, in seconds, was held up with the whole process: stopped, or on a machine that was.
_HELD: Final = 0.25
# So little compressed data at a time that what it inflates to, a thousandfold at most, does not hold up the loop.
_COMPRESSED_READ: Final = 4 * 1024


class Intake:
    """Reads for `body` what `response` brings; `started` is the loop's time at the request.

    One timer serves all limits, and no chunk moves it: when it fires it looks how long ago the last bytes came, and is
    set again.  Time that the consumer takes between two reads is not the upstream's.
    """

    __slots__ = (
        "_body",
        "_broken",
        "_closed",
        "_content",
        "_end",
        "_first",
        "_heard",
        "_idle",
        "_limits",
        "_loop",
        "_read",
        "_since",
        "_timer",
        "_waiting",
    )

    def __init__(self, response: aiohttp.ClientResponse, body: Body, limits: UpstreamLimits, started: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._content = content = response.content
        self._body = body
        self._limits = limits
        self._first = started + limits.first_token
        self._end = started + limits.total
        self._idle = limits.idle
        self._since = started
        self._heard = self._broken = self._waiting = False
        self._read: Callable[[], Awaitable[bytes]] = (
            partial(content.read, _COMPRESSED_READ) if body.compressed else content.readany
        )
        self._timer = self._armed()
        self._closed = _closing(response)
        if self._closed is not None:
            self._closed.add_done_callback(self._lost)

    async def read(self) -> bytes:
        """The next bytes; b"" when no more will come, whether the body ended properly or was cut off.

        Raises ProducerFailed (`upstream_timeout`), but not when all that is missing is the end of the connection.
        """
        if self._broken:
            return b""
        self._since = self._loop.time()
        self._waiting = True
        try:
            if self._since >= self._end:
                raise overdue("did not finish within", self._limits.total)
            data = await self._read()
        except ProducerFailed:
            if self._body.complete:
                return b""
            raise
        except (aiohttp.ClientError, HttpProcessingError, OSError):
            self._broken = True
            data = _leftover(self._content)
        finally:
            self._waiting = False
        if not self._heard:
            self._heard = True
            self._rearm()
        return data

    def finishing(self) -> None:
        """All choices have finished: what is still to come gets less time."""
        if self._idle > _AFTER_FINISH:
            self._idle = _AFTER_FINISH
            self._rearm()

    def stop(self) -> None:
        self._timer.cancel()
        if self._closed is not None:
            self._closed.remove_done_callback(self._lost)

    def _lost(self, _: asyncio.Future[None]) -> None:
        # Where the framing of the body breaks, aiohttp closes the connection and tells the reader nothing.
        if not self._content.is_eof() and self._content.exception() is None:
            self._content.set_exception(aiohttp.ClientPayloadError("the connection was closed"))

    def _due(self) -> tuple[float, str, float]:
        """When the next limit runs out, if nothing comes before; what it is called, and how many seconds it is."""
        due = self._end, "did not finish within", self._limits.total
        if not self._body.spoken:
            due = min(due, (self._first, "sent no first token within", self._limits.first_token))
        if self._heard:
            due = min(due, (self._since + self._idle, "was silent for", self._idle))
        return due

    def _armed(self) -> asyncio.TimerHandle:
        return self._loop.call_at(self._due()[0], self._fire)

    def _rearm(self) -> None:
        self._timer.cancel()
        self._timer = self._armed()

    def _fire(self) -> None:
        when, what, seconds = self._due()
        now = self._loop.time()
        if now - self._timer.when() > _HELD:  # what has come meanwhile is to be read first
            self._timer = self._loop.call_at(now + _HELD, self._fire)
        elif self._waiting and now >= when:
            self._content.set_exception(overdue(what, seconds))
        elif now >= when:  # the consumer is busy: no fault of the upstream's, look again after as long
            self._timer = self._loop.call_at(now + min(seconds, 1.0), self._fire)
        else:
            self._timer = self._armed()


def overdue(what: str, seconds: float) -> ProducerFailed:
    """A limit has run out: what the upstream did, or failed to do, for so long."""
    return ProducerFailed("upstream_timeout", f"the upstream {what} {seconds:g} s")


def _leftover(content: aiohttp.StreamReader) -> bytes:
    """What had come before the connection broke.  aiohttp raises the break first and offers no way back to it, though
    it may hold `[DONE]`."""
    content._exception = None
    return content.read_nowait()


def _closing(response: aiohttp.ClientResponse) -> asyncio.Future[None] | None:
    """What is done when the connection is lost; None where the whole body has come already."""
    protocol = response.connection.protocol if response.connection is not None else None
    closed = protocol.closed if protocol is not None else None
    if closed is not None:
        # It belongs to the connection, which may outlive this answer: one callback on it looks at its exception.
        closed.remove_done_callback(_retrieve)
        closed.add_done_callback(_retrieve)
    return closed


def _retrieve(closed: asyncio.Future[None]) -> None:
    if not closed.cancelled():
        closed.exception()
