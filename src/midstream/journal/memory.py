"""The reference journal: a list of frames per stream, in this process.  Survives a dropped reader, nothing more."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

from midstream import rules
from midstream.codec import native
from midstream.errors import StreamEnded, UnknownStream
from midstream.journal.base import Created, Snapshot, Traits
from midstream.journal.local import Local, Log
from midstream.records import Frame, Page, StreamMeta, StreamState
from midstream.wire import OPEN, SLICE_BYTES, SLICE_FRAMES, CancelReason


class MemoryJournal(Local[Log]):
    """`memory:`.  `clock` gives seconds since 1970."""

    traits = Traits("memory", durable=False, shared=False)

    async def open(self) -> None:
        """Nothing to make ready."""

    async def close(self) -> None:
        for log in self._logs.values():
            log.wake()

    async def create(self, meta: StreamMeta, frames: list[Frame], names: Sequence[str] = ()) -> Created:
        if names and (standing := self._named(names)):
            return Created(standing.state(), existed=True)
        self._make_room()
        log = self._logs[meta.stream_id] = Log(meta, names, self._total)
        log.append(frames, self._clock(), self._bounds)
        if names:
            self._names.update(dict.fromkeys(names, log))
        return Created(log.state(), existed=False)

    async def append(self, stream_id: str, frames: list[Frame], *, epoch: int, first_seq: int) -> None:
        log = self._logs.get(stream_id)
        if log is None:
            raise UnknownStream
        if size := rules.append(log.counters, frames, epoch, first_seq, self._clock):
            log.keep(frames, size, self._bounds)

    async def read(self, stream_id: str, after: int, limit: int = SLICE_FRAMES, max_bytes: int = SLICE_BYTES) -> Page:
        return self._log(stream_id).read(after, limit, max_bytes)

    async def snapshot(self, stream_id: str) -> Snapshot:
        log = self._log(stream_id)
        return Snapshot(deepcopy(log.fold), log.retained(), log.state())

    async def trim(self, stream_id: str, acked: int, floor: int | None) -> StreamState:
        log = self._log(stream_id)
        rules.ack(log.counters, acked)
        count = rules.trimmable(log.counters, floor) - log.counters.oldest + 1
        if count >= 0:
            log.drop(count, by_ack=True)
        return log.state()

    async def claim(self, stream_id: str) -> StreamState:
        log = self._log(stream_id)
        if log.counters.status != OPEN:
            raise StreamEnded(f"the stream is {log.counters.status}")
        log.counters.epoch += 1
        return log.state()

    async def request_cancel(self, stream_id: str, reason: CancelReason) -> StreamState:
        log = self._log(stream_id)
        if log.counters.status == OPEN:
            log.counters.epoch += 1
            log.append([native.cancelled(log.counters.highest + 1, reason)], self._clock(), self._bounds)
        return log.state()

    async def touch(self, stream_id: str) -> None:
        log = self._log(stream_id)
        now = self._clock()
        if rules.touch_due(log.counters, log.meta.retain, now):
            log.counters.last_access = now

    async def expire(self, stream_id: str) -> None:
        if log := self._logs.get(stream_id):
            self._forget(log)

    async def sweep(self) -> list[str]:
        return await self._forget_stale()
