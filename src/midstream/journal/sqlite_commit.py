"""From decisions to commits: what all streams have on the way, gathered into one transaction at a time.

What comes up while the writing thread is busy is the next commit.  When it has landed, by one call from that thread,
everything in it is counted in, and its readers and callers are woken.  When it fails, all that is on the way fails with
it, also what was waiting for the next one, since it was decided on top; the same batches may then be tried again.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from midstream import rules
from midstream.codec import fold as folds
from midstream.errors import StoreUnavailable
from midstream.journal.base import RoundTrips
from midstream.journal.local import Held, Log
from midstream.journal.sqlite_file import Batch, File
from midstream.journal.sqlite_shape import counters_row, cut, stream_row
from midstream.records import Fold, Frame, StreamMeta
from midstream.rules import Bounds, Counters
from midstream.wire import OPEN

logger = logging.getLogger(__name__)

# A commit costs about 0.15 ms of CPU whatever it holds.  So the next one begins this long after it for each batch that
# it held, up to a bound, in seconds: soon where few are waiting, seldom where many can share.
PACE, MAX_PACE = 0.0002, 0.008
# The log is moved into segments once it holds this much: what a start has to read, and what stays in memory of streams
# that have ended.
LOG_BYTES = 512 * 1024
# Dropped records stay in the file until they come to this much, or to the size of the fold, which is written whole.
LOOSE_BYTES = 64 * 1024
# Streams that one commit deletes: each takes some 0.1 ms for its 4,000 records, and appends are waiting.
FORGET_AT_ONCE = 64
# After a failed commit the file counts as not writable for so long, in seconds; then somebody may try.
DOUBT = 5.0


class Stored(Log):
    """One stream.  Its `Log` is what the file holds and readers see; `ahead` and `pending` are on the way there.

    Records up to `filed` are in segments; `loose` bytes of dropped ones are still in the file.  Where it is not
    `loaded` its records and its fold are in the file alone: it has ended, and all of it is in segments.
    """

    __slots__ = ("ahead", "filed", "forgotten", "loaded", "loose", "number", "pending")

    def __init__(self, number: int, meta: StreamMeta, names: Sequence[str], total: Held) -> None:
        super().__init__(meta, names, total)
        self.number = number
        self.ahead = Counters()
        self.pending: list[Frame] = []
        self.filed = 0
        self.loose = 0
        self.loaded = True
        self.forgotten = False

    @property
    def born(self) -> bool:
        return self.counters.highest > 0

    def drop(self, count: int, *, by_ack: bool) -> None:
        before = self.counters.retained_bytes
        super().drop(count, by_ack=by_ack)
        self.loose += before - self.counters.retained_bytes

    def overfull(self, bounds: Bounds) -> bool:
        held = self.counters.highest - self.counters.oldest + 1
        return (
            held > bounds.max_stream_records or self.counters.retained_bytes + self.fold_bytes > bounds.max_stream_bytes
        )

    def fit(self, bounds: Bounds) -> None:
        """Evict what is past the bounds."""
        self._evict(bounds)

    def revert(self) -> None:
        """Forget what was on the way."""
        told = self.counters
        self.ahead = Counters(told.status, told.epoch, told.highest, last_batch=told.last_batch)
        self.pending = []

    def unfiled(self) -> tuple[int, list[Frame]]:
        """Retained records that are in no segment yet, with the seq of the first."""
        first = max(self.filed + 1, self.counters.oldest)
        return first, self.frames[self.head + first - self.counters.oldest :]

    def load(self, fold: Fold, frames: list[Frame]) -> None:
        self.fold, self.frames, self.head, self.loaded = fold, frames, 0, True
        self.largest = max(map(len, frames), default=0)
        size = rules.weight(frames)
        self.total.bytes += size - self.counters.retained_bytes
        self.counters.retained_bytes = size  # whatever the file has said
        self._weigh_fold()

    def unload(self) -> None:
        self.fold, self.frames, self.head, self.loaded = Fold(), [], 0, False

    def folds_now(self, *, files: bool) -> bool:
        """Must the fold be written?  Yes where dropped records leave the log for no segment, or many are loose."""
        if files and self.counters.oldest - 1 > self.filed:
            return True
        return self.loaded and self.loose >= max(LOOSE_BYTES, self.fold_bytes)


@dataclass(slots=True)
class Flight:
    """A commit on its way, and what is true once it has landed."""

    batch: Batch
    began: float  # the loop's time
    now: float
    waiters: list[asyncio.Future[None]]
    fresh: dict[Stored, list[Frame]]
    last_batches: list[list[Frame]]
    epochs: dict[Stored, int] = field(default_factory=dict)
    filed: dict[Stored, int] = field(default_factory=dict)
    loose: dict[Stored, int] = field(default_factory=dict)


class Commits:
    """`rest` is told of each stream that has ended and is all in segments."""

    def __init__(self, file: File, clock: Callable[[], float], bounds: Bounds, rest: Callable[[Stored], None]) -> None:
        self._file = file
        self._clock = clock
        self._bounds = bounds
        self._rest = rest
        self._waiters: list[asyncio.Future[None]] = []
        self._fresh: list[Stored] = []
        self._dirty: dict[Stored, None] = {}
        self._forgotten: list[int] = []
        self._unfiled: dict[Stored, None] = {}
        self._log_bytes = 0
        self._flight: Flight | None = None
        self._armed = False
        self._not_before = 0.0
        self._failing = False
        self._failed_at = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: ThreadPoolExecutor
        self.trips = RoundTrips()

    def open(self, thread: ThreadPoolExecutor) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = thread

    async def close(self) -> None:
        """Wait for what is on the way, with the accesses not written down yet, and take nothing more."""
        loop, self._loop = self._loop, None
        if loop is not None:
            try:
                await self._landed(loop)
                while self._forgotten:
                    await self._landed(loop)
            except StoreUnavailable:  # who waited for it has been told
                pass

    def append(self, log: Stored, frames: list[Frame]) -> asyncio.Future[None]:
        """Take an admitted batch; done when it is in the file."""
        landed = self.landed()
        rules.appended(log.ahead, frames, 0.0)
        if not log.pending:
            self._fresh.append(log)
        log.pending += frames
        if log.ahead.status != OPEN:
            self._dirty[log] = None
        return landed

    def note(self, log: Stored) -> None:
        """The stream's counters have changed: write them with the next commit."""
        self._dirty[log] = None

    def writable(self) -> bool:
        """Whether the next commit can be expected to reach the file."""
        return not self._failing or asyncio.get_running_loop().time() - self._failed_at > DOUBT

    def forget(self, log: Stored) -> None:
        log.forgotten = True
        self._forgotten.append(log.number)
        self._unfiled.pop(log, None)
        self._dirty.pop(log, None)

    async def settle(self) -> None:
        """Wait until all that was decided so far is in the file, also that streams are forgotten."""
        await self.landed()
        while self._forgotten:
            await self.landed()

    def landed(self) -> asyncio.Future[None]:
        """Done when all that was decided so far is in the file, but for streams to forget.

        Raises StoreUnavailable, at once or there.
        """
        if self._loop is None:
            raise StoreUnavailable("the journal is closed")
        return self._landed(self._loop)

    def _landed(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        landed = loop.create_future()
        self._waiters.append(landed)
        if not self._armed:
            self._armed = True
            if self._flight is None:
                self._arm(loop)
        return landed

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        rest = self._not_before - loop.time()
        if rest > 0:
            loop.call_later(rest, self._depart, loop)
        else:
            loop.call_soon(self._depart, loop)

    def _depart(self, loop: asyncio.AbstractEventLoop) -> None:
        self._armed = False
        waiting = self._waiters
        with self._or_stop(waiting):
            flight = self._flight = self._gather(loop.time())
        self._not_before = flight.began + min(PACE * len(flight.waiters), MAX_PACE)
        written = loop.run_in_executor(self._thread, self._file.write, flight.batch)
        written.add_done_callback(partial(self._land, loop, flight))

    def _gather(self, began: float) -> Flight:
        fresh = {log: log.pending for log in self._fresh if not log.forgotten}
        for log in self._fresh:
            log.pending = []
        last_batches = [log.ahead.last_batch for log in fresh]
        batch = Batch(forgotten=self._forgotten[:FORGET_AT_ONCE])
        flight = Flight(batch, began, self._clock(), self._waiters, fresh, last_batches)
        self._waiters, self._fresh, self._forgotten = [], [], self._forgotten[FORGET_AT_ONCE:]
        for log, frames in fresh.items():
            batch.frames += frames
            batch.entries += (log.number, log.ahead.highest - len(frames) + 1, len(frames))
            if not log.born:
                batch.streams.append(stream_row(log.number, log.meta, log.names))
        self._log_bytes += sum(map(len, batch.frames))
        if self._log_bytes > LOG_BYTES:
            self._gather_segments(flight)
        if self._dirty:
            dirty, self._dirty = self._dirty, {}
            for log in dirty:
                self._gather_counters(flight, log)
        return flight

    def _gather_segments(self, flight: Flight) -> None:
        """Move the log, with what would have gone there now, into segments."""
        batch = flight.batch
        batch.files, batch.entries, batch.frames = True, [], []
        for log in self._unfiled | dict.fromkeys(flight.fresh):
            if log.forgotten:
                continue
            first, frames = log.unfiled()
            frames += flight.fresh.get(log, ())
            batch.segments += cut(log.number, first, frames)
            flight.filed[log] = first + len(frames) - 1
            self._dirty[log] = None

    def _gather_counters(self, flight: Flight, log: Stored) -> None:
        files = log in flight.filed
        if log.folds_now(files=files):
            flight.batch.folds.append((log.number, log.fold.upto, folds.encode(log.fold)))
            flight.loose[log] = log.loose
        flight.epochs[log] = log.ahead.epoch
        in_log = () if files or not log.loaded else log.unfiled()[1]
        added = flight.fresh.get(log, ()) if files else ()
        counters = replace(
            log.counters,
            status=log.ahead.status,
            epoch=log.ahead.epoch,
            retained_bytes=log.counters.retained_bytes - rules.weight(in_log) + rules.weight(added),
        )
        if counters.status != log.counters.status:
            counters.ended_at = counters.last_access = flight.now
        filed = flight.filed.get(log, log.filed)
        flight.batch.counters.append(counters_row(log.number, counters, filed, log.fold_bytes))

    def _land(self, loop: asyncio.AbstractEventLoop, flight: Flight, written: asyncio.Future[None]) -> None:
        self._flight = None
        self.trips.add(loop.time() - flight.began)
        error = written.exception()
        if error is not None:
            self._failed_at = loop.time()
            self._refuse(flight, error)
        else:
            self._failing = False
            with self._or_stop(flight.waiters):
                self._count_in(flight)
            for waiter in flight.waiters:
                if not waiter.done():
                    waiter.set_result(None)
        if self._armed:
            self._arm(loop)

    @contextmanager
    def _or_stop(self, waiters: list[asyncio.Future[None]]) -> Iterator[None]:
        """A fault of ours leaves memory and file apart, for all streams: say so, and take nothing more until a restart
        has read the file again.  Who waits would else wait for ever."""
        try:
            yield
        except BaseException:
            self._loop, self._failing, self._failed_at = None, True, math.inf
            for waiter in (*waiters, *self._waiters):
                if not waiter.done():
                    waiter.set_exception(StoreUnavailable("the journal has stopped; the log has the cause"))
            raise

    def _count_in(self, flight: Flight) -> None:
        for log, epoch in flight.epochs.items():
            log.counters.epoch = epoch
        for log, loose in flight.loose.items():
            log.loose -= loose
        for (log, frames), last_batch in zip(flight.fresh.items(), flight.last_batches, strict=True):
            if not log.forgotten:
                oldest = log.counters.oldest
                log.append(frames, flight.now, self._bounds)
                log.counters.last_batch = last_batch
                if log.counters.oldest != oldest:
                    self._dirty[log] = None
        if flight.batch.files:
            self._unfiled.clear()
            self._log_bytes = 0
            for log, filed in flight.filed.items():
                log.filed = filed
                if log.counters.status != OPEN and not log.forgotten:
                    self._rest(log)
        else:
            self._unfiled.update(dict.fromkeys(flight.fresh))

    def _refuse(self, flight: Flight, error: BaseException) -> None:
        if not self._failing:  # once, not at each try while the disk is full
            self._failing = True
            logger.error("the journal cannot be written: %s", error)
        self._forgotten = flight.batch.forgotten + self._forgotten
        self._dirty = {log: None for log in (*flight.epochs, *self._dirty) if log.born and not log.forgotten}
        for log in (*flight.fresh, *self._fresh, *self._dirty):
            log.revert()
        self._fresh = []
        waiters, self._waiters = flight.waiters + self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(StoreUnavailable(f"the journal cannot be written: {error}"))
