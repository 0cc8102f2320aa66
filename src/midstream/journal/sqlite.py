"""The embedded durable journal: one SQLite file, held by one process.

Being alone on the file, this process knows every counter: its verbs are decided here, by `rules`, at once and in the
order of their calls, and what they decided goes to one writing thread.  A batch is counted in and seen by readers, and
its verb returns, only when its commit has reached the disk (I1); until then it is held against what is `ahead`.

The other way round for what only lets records go (ack, eviction, expiry) or notes an access: that holds in memory at
once and the file follows, since a crash in between brings records back, which harms nobody.

Open streams have their retained records in memory, bounded like those of the memory journal: eviction and the fold need
them.  Those of finished streams leave it, the least recently read first, and come back from the file.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import TypeVar

from midstream import rules
from midstream.codec import native
from midstream.errors import StoreLost, StoreUnavailable, StreamEnded, UnknownStream
from midstream.journal.base import WRITER_LOST, Created, Listener, Orphan, RoundTrips, Snapshot, Traits
from midstream.journal.local import Local
from midstream.journal.sqlite_commit import Commits, Stored
from midstream.journal.sqlite_file import Batch, File, Reading
from midstream.journal.sqlite_shape import Found, counters_row, cut
from midstream.records import Frame, Page, StreamMeta, StreamState
from midstream.rules import Bounds
from midstream.wire import OPEN, SLICE_BYTES, SLICE_FRAMES, CancelReason

# Records of finished streams in memory, in all; and of one stream: larger ones are read from the file page by page.
WARM_BYTES, WARM_STREAM_BYTES = 32 * 1024 * 1024, 1024 * 1024

T = TypeVar("T")


class SqliteJournal(Local[Stored]):
    """`sqlite:///FILE`.  `clock` gives seconds since 1970."""

    traits = Traits("sqlite", durable=True, shared=False)

    def __init__(self, path: str, clock: Callable[[], float], bounds: Bounds | None = None) -> None:
        super().__init__(clock, bounds)
        path = os.path.abspath(path)  # so that it stays the same file, and is never taken for one of SQLite's URIs
        self._file = File(path)
        self._reading = Reading(path)
        self._commits = Commits(self._file, clock, self._bounds, self._rest)
        self._warm: OrderedDict[Stored, int] = OrderedDict()
        self._numbers = 0
        self._listened = False
        self._orphaned: dict[str, Stored] = {}
        self._writer: ThreadPoolExecutor | None = None
        self._reader: ThreadPoolExecutor | None = None

    async def open(self) -> None:
        self._writer = ThreadPoolExecutor(1, "midstream-journal-writer")
        self._reader = ThreadPoolExecutor(1, "midstream-journal-reader")
        try:
            for log in await self._run(self._writer, self._recover):
                self._logs[log.meta.stream_id] = log
                self._names.update(dict.fromkeys(log.names, log))
                self._numbers = log.number
            self._commits.open(self._writer)
            for log in self._orphaned.values():
                await self._load_orphan(log)
            await self._evict_overfull()
        except StoreUnavailable as error:
            await self._let_go()
            raise self._file.unusable(error.detail) from error
        except BaseException:
            await self._let_go()
            raise

    async def _load_orphan(self, log: Stored) -> None:
        try:
            await self._load(log)
        except StoreLost as error:
            raise self._file.damaged(f"stream {log.number} ({log.meta.stream_id!r}): {error.detail}") from error

    async def _evict_overfull(self) -> None:
        """Keep the bounds (R7): an orphan's last record may be one too many, and they may be lower than last time."""
        for log in self._logs.values():
            if log.overfull(self._bounds):
                if log.counters.status != OPEN:
                    with suppress(StoreLost):  # its readers are told
                        await self._load(log)
                if log.loaded:
                    log.fit(self._bounds)
                    self._commits.note(log)
        await self._commits.landed()

    def _recover(self) -> list[Stored]:
        """Make the file ready, end the orphans where nobody decides about them, and move all of the log into segments:
        one commit."""
        self._file.open()
        batch, now = Batch(files=True), self._clock()
        logs = [self._adopt(found, batch, now) for found in self._file.streams()]
        try:
            self._file.write(batch)
        except sqlite3.Error as error:
            raise self._file.unusable(str(error)) from error
        return logs

    def _adopt(self, found: Found, batch: Batch, now: float) -> Stored:
        """The stream as the file has it.  One that its writer has not ended is an orphan: the file's lock says that
        its writer is gone."""
        log = Stored(found.number, found.meta, found.names, self._total)
        counters, tail, filed = found.counters, found.tail, found.filed
        log.counters = counters
        orphaned = (rules.status_after(tail[-1]) if tail else counters.status) == OPEN
        if orphaned:
            counters.epoch += 1
            if self._listened:
                self._orphaned[found.meta.stream_id] = log
            else:
                tail.append(native.failed(filed + len(tail) + 1, WRITER_LOST))
                counters.ended_at = counters.last_access = now
        if tail:
            kept = tail[max(counters.oldest - filed - 1, 0) :]
            counters.highest = filed + len(tail)
            counters.retained_bytes += rules.weight(kept)
            counters.status = rules.status_after(tail[-1])
            batch.segments += cut(found.number, filed + 1, tail)
        if tail or orphaned:
            batch.counters.append(counters_row(found.number, counters, counters.highest, found.fold_bytes))
        log.filed, log.fold_bytes = counters.highest, found.fold_bytes
        self._total.bytes += counters.retained_bytes + log.fold_bytes  # the request is counted already
        log.unload()
        log.revert()
        return log

    async def close(self) -> None:
        try:
            await self._commits.close()
        finally:
            await self._let_go()
        for log in self._logs.values():
            log.wake()

    async def _let_go(self) -> None:
        """Close the file on both sides and end the threads; they have nothing left to do, so this takes no time."""
        for thread, close in ((self._reader, self._reading.close), (self._writer, self._file.close)):
            if thread is not None:
                await self._run(thread, close)
                thread.shutdown()
        self._reader = self._writer = None

    async def _run(self, thread: ThreadPoolExecutor | None, verb: Callable[..., T], *args: object) -> T:
        """Do something with the file, in the thread it belongs to."""
        if thread is None:
            raise StoreUnavailable("the journal is closed")
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            return await loop.run_in_executor(thread, verb, *args)
        except sqlite3.OperationalError as error:
            raise StoreUnavailable(f"the journal cannot be read: {error}") from error
        except sqlite3.DatabaseError as error:
            raise StoreLost(f"the journal is damaged: {error}") from error
        finally:
            self._commits.trips.add(loop.time() - began)

    def available(self) -> bool:
        return self._commits.writable()

    def round_trips(self) -> RoundTrips:
        return self._commits.trips

    async def create(self, meta: StreamMeta, frames: list[Frame], names: Sequence[str] = ()) -> Created:
        if standing := self._named(names):
            if not standing.born:
                await self._commits.landed()
            return Created(standing.state(), existed=True)
        self._make_room()
        self._numbers += 1
        log = Stored(self._numbers, meta, names, self._total)
        landed = self._commits.append(log, frames)
        self._commits.note(log)
        self._names.update(dict.fromkeys(names, log))
        landed.add_done_callback(partial(self._settle_birth, log))
        await asyncio.shield(landed)  # the stream is born even if its creator is no longer there to hear it
        return Created(log.state(), existed=False)

    def _settle_birth(self, log: Stored, landed: asyncio.Future[None]) -> None:
        if landed.exception() is None:
            self._logs[log.meta.stream_id] = log
        else:
            self._total.bytes -= log.held()
            for name in log.names:
                del self._names[name]

    async def append(self, stream_id: str, frames: list[Frame], *, epoch: int, first_seq: int) -> None:
        log = self._log(stream_id)
        if rules.admit(log.ahead, frames, epoch, first_seq):
            await self._commits.append(log, frames)
        elif log.ahead.highest > log.counters.highest:
            await self._commits.landed()

    def peek(self, stream_id: str, after: int) -> Page | None:
        log = self._log(stream_id)
        return self._at_hand(log, after, SLICE_FRAMES, SLICE_BYTES)

    async def read(self, stream_id: str, after: int, limit: int = SLICE_FRAMES, max_bytes: int = SLICE_BYTES) -> Page:
        log = self._log(stream_id)
        if (page := self._at_hand(log, after, limit, max_bytes)) is not None:
            return page
        if log.held() > WARM_STREAM_BYTES:
            return await self._page(log, after, limit, max_bytes)
        await self._load(log)
        return log.read(after, limit, max_bytes)

    def _at_hand(self, log: Stored, after: int, limit: int, max_bytes: int) -> Page | None:
        if not log.loaded and log.counters.oldest <= after + 1 <= log.counters.highest:
            return None
        if log in self._warm:
            self._warm.move_to_end(log)
        return log.read(after, limit, max_bytes)

    async def _page(self, log: Stored, after: int, limit: int, max_bytes: int) -> Page:
        counters = log.counters
        end = counters.highest, counters.status
        frames = await self._run(self._reader, self._reading.page, log.number, after, limit, max_bytes, *end)
        if log.forgotten:
            raise UnknownStream
        if after + 1 < counters.oldest:
            frames = []
        elif not frames:
            raise StoreLost(f"record {after + 1} of {log.meta.stream_id} is missing in the file")
        return Page(frames, after + len(frames), counters.highest, counters.oldest, counters.status)

    async def _load(self, log: Stored) -> None:
        """Have the records and the fold of a stream in memory.  Raises UnknownStream, StoreLost."""
        if log.loaded:
            return
        counters = log.counters  # they may move on while the file is read
        fold, frames = await self._run(
            self._reader, self._reading.whole, log.number, counters.oldest, counters.highest, counters.status
        )
        if log.forgotten:
            raise UnknownStream
        if not log.loaded:
            gone = counters.oldest - 1 - fold.upto
            if gone < 0:
                raise StoreLost(f"{log.meta.stream_id} has lost its oldest records in the file")
            rules.fold(fold, frames[:gone])  # what an ack has dropped while the file was read
            rules.shed_fold(fold, self._bounds)
            log.load(fold, frames[gone:])
            if counters.status != OPEN:
                self._rest(log)

    def _rest(self, log: Stored) -> None:
        """Keep the records of a finished stream in memory while there is room."""
        self._warm[log] = log.held()
        while len(self._warm) > 1 and sum(self._warm.values()) > WARM_BYTES:
            coldest, _ = self._warm.popitem(last=False)
            coldest.unload()

    async def snapshot(self, stream_id: str) -> Snapshot:
        log = self._log(stream_id)
        await self._load(log)
        return Snapshot(deepcopy(log.fold), log.retained(), log.state())

    async def trim(self, stream_id: str, acked: int, floor: int | None) -> StreamState:
        log = self._log(stream_id)
        before = log.state()
        rules.ack(log.counters, acked)
        if rules.trimmable(log.counters, floor) >= log.counters.oldest:
            await self._load(log)
        count = rules.trimmable(log.counters, floor) - log.counters.oldest + 1
        if count > 0:
            log.drop(count, by_ack=True)
        elif count == 0:
            rules.dropped(log.counters, [], by_ack=True)
        if log.state() != before:
            self._commits.note(log)
            await self._commits.landed()
        return log.state()

    async def claim(self, stream_id: str) -> StreamState:
        log = self._log(stream_id)
        if log.ahead.status != OPEN:
            await self._commits.landed()
            raise StreamEnded(f"the stream is {log.counters.status}")
        log.ahead.epoch += 1
        epoch = log.ahead.epoch  # of several that claim at once each hears its own
        self._commits.note(log)
        await self._commits.landed()
        return log.state()._replace(epoch=epoch)

    async def request_cancel(self, stream_id: str, reason: CancelReason) -> StreamState:
        log = self._log(stream_id)
        if log.ahead.status == OPEN:
            log.ahead.epoch += 1
            await self._commits.append(log, [native.cancelled(log.ahead.highest + 1, reason)])
        elif log.counters.status == OPEN:
            await self._commits.landed()
        return log.state()

    def listen(self, listener: Listener) -> None:
        self._listened = True

    async def claim_orphan(self, stream_id: str) -> Orphan | None:
        # Claimed when the file was opened: no other process can be writing.
        log = self._orphaned.pop(stream_id, None)
        return None if log is None or log.counters.status != OPEN else Orphan(log.state(), intact=True)

    async def orphans(self) -> Sequence[str]:
        return list(self._orphaned)

    async def touch(self, stream_id: str) -> None:
        log = self._log(stream_id)
        now = self._clock()
        if rules.touch_due(log.counters, log.meta.retain, now):
            log.counters.last_access = now
            self._commits.note(log)

    async def expire(self, stream_id: str) -> None:
        if log := self._logs.get(stream_id):
            self._forget(log)
            await self._commits.settle()

    def _forget(self, log: Stored) -> None:
        super()._forget(log)
        self._warm.pop(log, None)
        self._commits.forget(log)

    async def sweep(self) -> list[str]:
        gone = await self._forget_stale()
        await self._commits.settle()
        await self._run(self._writer, self._file.shrink)
        return gone
