"""What a reader has confirmed may go, once no connected reader needs it (R6): in steps, and later where it must."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from midstream.errors import UnknownStream
from midstream.journal.base import Journal
from midstream.records import StreamState

# Records that an ack lets go in one step: a few milliseconds of the loop.
_STEP = 1000


class Acks:
    """Takes acks.  `lowest` tells the lowest position of any reader of a stream connected here; None without one."""

    def __init__(self, journal: Journal, lowest: Callable[[str], int | None]) -> None:
        self._journal = journal
        self._lowest = lowest
        self._late: set[str] = set()
        self._steps: dict[str, asyncio.Future[None]] = {}

    async def take(self, state: StreamState, seq: int) -> StreamState:
        """Let go of what is at or below `seq` and below every connected reader.  Raises CursorAhead."""
        state = await self._trim(state, seq)
        if state.trimmed_seq < state.acked_seq:
            self._late.add(state.meta.stream_id)
        return state

    @property
    def under_way(self) -> bool:
        """Whether any ack is being taken step by step just now: where none is, nobody has to wait for it."""
        return bool(self._steps)

    async def between_steps(self, stream_id: str) -> None:
        """Return when a reader may be let in: during a step it would be measured by what is about to go."""
        while stream_id in self._steps:
            await asyncio.wait([self._steps[stream_id]])

    async def again(self) -> None:
        """Readers have moved since: what acks could not let go then may go now."""
        for stream_id in list(self._late):
            await self._again(stream_id)

    async def _again(self, stream_id: str) -> None:
        try:
            state = await self._journal.state(stream_id)
            state = await self._trim(state, state.acked_seq)
        except UnknownStream:
            self._late.discard(stream_id)
            return
        ended_above = state.ended and state.trimmed_seq >= state.highest_seq - 1
        if state.trimmed_seq >= state.acked_seq or ended_above:
            self._late.discard(stream_id)

    async def _trim(self, state: StreamState, acked: int) -> StreamState:
        """Take an ack step by step; between the steps readers come and go."""
        stream_id = state.meta.stream_id
        while True:
            await self.between_steps(stream_id)
            step, lowest = state.oldest_retained_seq + _STEP - 1, self._lowest(stream_id)
            floor = lowest if state.highest_seq <= step else min(step, lowest if lowest is not None else step)
            done = self._steps[stream_id] = asyncio.get_running_loop().create_future()
            try:
                state = await self._journal.trim(stream_id, acked, floor)
            finally:
                del self._steps[stream_id]
                done.set_result(None)
            if floor != step or state.oldest_retained_seq <= step:
                return state
            await asyncio.sleep(0)
