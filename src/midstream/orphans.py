"""Streams whose writer's process is gone: claimed by exactly one process, then continued or ended.  None hangs open.

The journal knows who is gone; this decides what becomes of the stream.  It is told at start-up, by the sweep, and by
the journal's own look at streams that somebody here waits on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from midstream.codec import native
from midstream.errors import MidstreamError, ProducerFailed, StoreUnavailable
from midstream.journal.base import WRITER_LOST, Journal, Orphan
from midstream.records import Producer, StreamState
from midstream.wire import MOST_TAKEOVERS

_log = logging.getLogger("midstream")

# Continues a stream: a producer that goes on after what is journaled, or None where that is not possible.
Proceed = Callable[[StreamState], Awaitable[Producer | None]]


class Orphans:
    """Takes streams over.  `adopt` is given a stream that this process now writes, and its producer."""

    def __init__(self, journal: Journal, proceed: Proceed, adopt: Callable[[StreamState, Producer], None]) -> None:
        self._journal = journal
        self._proceed = proceed
        self._adopt = adopt
        self._taking: dict[str, asyncio.Task[None]] = {}
        self.taken: dict[str, int] = {}

    def take_soon(self, stream_id: str) -> None:
        """Take the stream over, unless that is under way."""
        if stream_id not in self._taking:
            task = self._taking[stream_id] = asyncio.create_task(self._take(stream_id), name=f"take {stream_id}")
            task.add_done_callback(lambda _: self._taking.pop(stream_id))

    async def take_all(self) -> None:
        """Take over whatever the journal says is orphaned."""
        for stream_id in await self._journal.orphans():
            self.take_soon(stream_id)

    async def settle(self) -> None:
        """Wait for take-overs under way."""
        if self._taking:
            await asyncio.wait(list(self._taking.values()))

    async def _take(self, stream_id: str) -> None:
        try:
            orphan = await self._journal.claim_orphan(stream_id)
            if orphan is not None:
                await self._settle_one(stream_id, orphan)
        except StoreUnavailable as away:
            _log.warning("stream %s was not taken over, the next look tries again: %s", stream_id, away)
        except MidstreamError as error:
            _log.info("stream %s was not taken over: %s", stream_id, error)
        except Exception:  # noqa: BLE001  # a take-over that fails must not end the process's others
            _log.exception("taking over stream %s failed", stream_id)

    async def _settle_one(self, stream_id: str, orphan: Orphan) -> None:
        state = orphan.state
        producer = await self._continued(orphan)
        if producer is not None:
            self._note("continued")
            self._adopt(state, producer)
            return
        self._note("ended")
        failure = WRITER_LOST if orphan.intact else _STORE_LOST
        seq = state.highest_seq + 1
        await self._journal.append(stream_id, [native.failed(seq, failure)], epoch=state.epoch, first_seq=seq)

    async def _continued(self, orphan: Orphan) -> Producer | None:
        if not orphan.intact or orphan.state.epoch - 1 > MOST_TAKEOVERS:
            return None
        try:
            return await self._proceed(orphan.state)
        except Exception:  # noqa: BLE001  # claimed is claimed: what cannot be continued is ended, never left open
            _log.exception("stream %s cannot be continued", orphan.state.meta.stream_id)
            return None

    def _note(self, outcome: str) -> None:
        self.taken[outcome] = self.taken.get(outcome, 0) + 1


_STORE_LOST = ProducerFailed("store_lost", "the store came back without records that readers may have seen")
