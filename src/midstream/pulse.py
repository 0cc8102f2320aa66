"""A pulse: what is done every so often.  That of streams is for all readers at once, instead of a timer per reader."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from midstream.errors import StoreUnavailable
from midstream.follow import Follow
from midstream.wire import SEND_STALL

_log = logging.getLogger("midstream")


class Pulse:
    """Calls `beat` every `period` seconds, and tells it so, until it is stopped."""

    def __init__(self, beat: Callable[[float], Awaitable[None]], period: float) -> None:
        self._beat = beat
        self._period = period
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="pulse")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._period)
            try:
                await self._beat(self._period)
            except StoreUnavailable as away:
                _log.warning("the store does not answer: %s", away)
            except Exception:  # noqa: BLE001  # one failed beat must not stop heartbeats for everybody
                _log.exception("the pulse failed; it goes on")


def attend(readers: Iterable[Follow], elapsed: float, heartbeat: float) -> int:
    """Show life to readers that have waited for a heartbeat's time, and cut off those that take nothing.

    All times in seconds, `elapsed` since the last look.  Returns how many were cut off.
    """
    return sum(_attend(follow, elapsed, heartbeat) for follow in readers)


def _attend(follow: Follow, elapsed: float, heartbeat: float) -> bool:
    if follow.position != follow.seen:
        follow.seen, follow.still = follow.position, 0.0
        return False
    follow.still += elapsed
    if follow.waiting:
        if follow.still >= heartbeat:
            follow.still = 0.0
            follow.beat()
        return False
    if follow.still < SEND_STALL:
        return False
    follow.interrupt()
    if follow.abort is not None:
        follow.abort()
    return True
