"""Generations that nobody has asked for too long are cancelled: what nobody reads, nobody should pay for (I6)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from midstream.clock import Clock
from midstream.errors import StoreUnavailable, UnknownStream
from midstream.journal.base import Journal
from midstream.records import StreamState
from midstream.wire import CancelReason
from midstream.writer import Writer

_log = logging.getLogger("midstream")


class Abandonment:
    """`clock` gives seconds since 1970; `is_read` tells whether a reader of a stream is connected here."""

    def __init__(
        self,
        journal: Journal,
        clock: Callable[[], float],
        is_read: Callable[[str], bool],
        cancel: Callable[[str, CancelReason], Awaitable[StreamState]],
    ) -> None:
        self._journal = journal
        self._clock = Clock.of(clock)
        self._is_read = is_read
        self._cancel = cancel

    async def look(self, writers: Iterable[Writer]) -> None:
        """Cancel what has been left, all at once: one after the other each would wait for a commit of its own."""
        now = self._clock()
        await asyncio.gather(*(self._abandon(writer) for writer in writers if self._unread(writer, now)))

    def _unread(self, writer: Writer, now: float) -> bool:
        """Has nobody here read, polled or asked for longer than the stream's limit?

        What the clock jumped over is no time in which somebody could have.
        """
        limit = writer.meta.abandon_after
        if self._is_read(writer.meta.stream_id) or writer.last_seen > now:  # in the future: the clock was set back
            writer.last_seen = now
        return limit is not None and self._clock.believed(limit) - writer.last_seen >= limit

    async def _abandon(self, writer: Writer) -> None:
        """Nobody here has asked for too long: if nobody elsewhere has either, stop."""
        stream_id = writer.meta.stream_id
        try:
            if self._journal.traits.shared:
                writer.last_seen = max(writer.last_seen, await self._seen_elsewhere(stream_id))
            if self._unread(writer, self._clock()):
                await self._cancel(stream_id, "abandoned")
        except UnknownStream:  # forgotten meanwhile, which has stopped its writer too
            pass
        except StoreUnavailable as away:
            _log.debug("stream %s is not abandoned now: %s", stream_id, away)

    async def _seen_elsewhere(self, stream_id: str) -> float:
        """When any process last had a reader of it, or was asked for it, as far as the store was told."""
        if await self._journal.lowest_elsewhere(stream_id) is not None:
            return self._clock()
        return (await self._journal.state(stream_id)).last_access
