"""What the journals of one process share: streams held in this process, by id and by name.

`memory.py` adds nothing but lists of frames; `sqlite.py` writes a file before it counts a batch in.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Generic, TypeVar

from midstream import rules
from midstream.clock import Clock
from midstream.errors import OutOfSpace, UnknownStream
from midstream.journal.base import Listener, Orphan, RoundTrips
from midstream.records import FRAME_OVERHEAD, STREAM_OVERHEAD, Fold, Frame, Page, StreamMeta, StreamState, within
from midstream.rules import Bounds, Counters
from midstream.wire import OPEN, SLICE_BYTES, SLICE_FRAMES

# Dropped frames leave an empty one behind, and the list is cut when half of it is that: dropping one record from the
# front of a long list each time would move the whole list each time.
_COMPACT_AT = 64
_blank = object.__new__
# Streams looked at before the loop gets its turn.
_LOOK_AT_ONCE = 500


class Held:
    """Bytes that all streams of a journal hold together, their frames and folds, and the bounds of each."""

    __slots__ = ("bounds", "bytes")

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.bytes = 0


class Log:
    """One stream in memory: counters, the retained frames (`frames[head:]`), the fold, and who waits."""

    __slots__ = (
        "counters",
        "crowded",
        "fold",
        "fold_bytes",
        "frames",
        "head",
        "largest",
        "meta",
        "names",
        "own",
        "total",
        "waiters",
    )

    def __init__(self, meta: StreamMeta, names: Sequence[str], total: Held) -> None:
        self.meta = meta
        self.total = total
        self.crowded = total.bounds.max_stream_bytes // 2  # the fold may hold as much; below, nothing can be too much
        self.names = tuple(names)
        self.own = STREAM_OVERHEAD + len(meta.request) + sum(map(len, names))
        total.bytes += self.own
        self.fold_bytes = 0
        self.counters = Counters(last_access=meta.created_at)
        self.fold = Fold()
        self.frames: list[Frame] = []
        self.head = 0
        self.largest = 0
        self.waiters: list[Callable[[], None]] = []

    def append(self, frames: list[Frame], now: float, bounds: Bounds) -> None:
        """Add a batch that was admitted, and wake who waits."""
        self.keep(frames, rules.appended(self.counters, frames, now), bounds)

    def keep(self, frames: list[Frame], size: int, bounds: Bounds) -> None:
        """Hold a batch that is counted in, `size` bytes of memory, and wake who waits."""
        counters = self.counters
        self.frames += frames
        self.total.bytes += size
        # Of one frame `size` is the size; of several it is more than that of the largest, which `read` can live with.
        if size > self.largest:
            self.largest = size if len(frames) == 1 else max(self.largest, max(map(len, frames)))
        if counters.retained_bytes > self.crowded or counters.highest - counters.oldest >= bounds.max_stream_records:
            self._evict(bounds)
        if self.waiters:
            self.wake()

    def _evict(self, bounds: Bounds) -> None:
        # Again until it fits: the texts of what goes stay in the fold, and count.
        while count := rules.evictable(self.counters, bounds, self._sizes(), self.fold_bytes):
            self.drop(count, by_ack=False)

    def _sizes(self) -> Iterator[int]:
        return (len(self.frames[at]) + FRAME_OVERHEAD for at in range(self.head, len(self.frames)))

    def _weigh_fold(self) -> None:
        self.total.bytes -= self.fold_bytes
        self.fold_bytes = rules.fold_bytes(self.fold)
        self.total.bytes += self.fold_bytes

    def held(self) -> int:
        """Bytes of this stream in the total."""
        return self.counters.retained_bytes + self.fold_bytes + self.own

    def drop(self, count: int, *, by_ack: bool) -> None:
        """Let the `count` oldest records go, into the fold (R9)."""
        gone = self.frames[self.head : self.head + count]
        rules.fold(self.fold, gone)
        rules.shed_fold(self.fold, self.total.bounds)
        self.total.bytes -= rules.weight(gone)
        rules.dropped(self.counters, gone, by_ack=by_ack)
        self._weigh_fold()
        self.frames[self.head : self.head + count] = [b""] * count
        self.head += count
        if self.head > _COMPACT_AT and self.head * 2 > len(self.frames):
            del self.frames[: self.head]
            self.head = 0

    def read(self, after: int, limit: int, max_bytes: int) -> Page:
        counters = self.counters
        ahead = after + 1 - counters.oldest
        if ahead >= 0:
            begin = self.head + ahead
            frames = self.frames[begin : begin + limit]
            if len(frames) * self.largest > max_bytes:
                frames = within(frames, max_bytes)
        else:
            frames = []
        return Page(frames, after + len(frames), counters.highest, counters.oldest, counters.status)

    def retained(self) -> list[Frame]:
        return self.frames[self.head :]

    def state(self) -> StreamState:
        return self.counters.state(self.meta)

    def wake(self) -> None:
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter()


def _settle(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


AnyLog = TypeVar("AnyLog", bound=Log)


class Local(Generic[AnyLog]):
    """The verbs of the port that look no further than this process.  `clock` gives seconds since 1970."""

    def __init__(self, clock: Callable[[], float], bounds: Bounds | None = None) -> None:
        self._clock = Clock.of(clock)
        self._bounds = bounds or Bounds()
        self._logs: dict[str, AnyLog] = {}
        self._names: dict[str, AnyLog] = {}
        self._total = Held(self._bounds)

    def _log(self, stream_id: str) -> AnyLog:
        log = self._logs.get(stream_id)
        if log is None:
            raise UnknownStream
        return log

    def _named(self, names: Sequence[str]) -> AnyLog | None:
        """The stream that already has one of these names."""
        return next((self._names[name] for name in names if name in self._names), None)

    def _make_room(self) -> None:
        """Finished streams go first, least recently used first; open ones are never evicted for a new one.

        A little more room is made than is needed: to find who goes takes a look at all of them.
        """
        limit = self._bounds.max_bytes
        if self._total.bytes < limit:
            return
        for log in self._finished():
            self._forget(log)
            if self._total.bytes < limit - limit // 64:
                return
        if self._total.bytes >= limit:
            raise OutOfSpace(f"open streams hold {self._total.bytes} bytes; the limit is {limit}", 10)

    def _finished(self) -> list[AnyLog]:
        finished = [log for log in self._logs.values() if log.counters.status != OPEN]
        return sorted(finished, key=lambda log: log.counters.last_access)

    def _forget(self, log: AnyLog) -> None:
        del self._logs[log.meta.stream_id]
        self._total.bytes -= log.held()
        for name in log.names:
            if self._names.get(name) is log:  # a file may know an older stream of a name that is free again
                del self._names[name]
        log.wake()

    async def _forget_stale(self) -> list[str]:
        """Forget what has expired, and finished streams past the total of bytes."""
        now, gone = self._clock(), []
        async for log in self._each():
            rules.set_back(log.counters, now)
            if rules.expired(log.counters, log.meta.retain, self._clock.believed):
                gone.append(log)
                self._forget(log)
        if self._total.bytes > self._bounds.max_bytes:
            for log in self._finished():
                gone.append(log)
                self._forget(log)
                if self._total.bytes <= self._bounds.max_bytes:
                    break
        return [log.meta.stream_id for log in gone]

    async def _each(self) -> AsyncIterator[AnyLog]:
        """Every stream there is when its turn comes, a few hundred at a time."""
        for at, log in enumerate(list(self._logs.values())):
            if at % _LOOK_AT_ONCE == _LOOK_AT_ONCE - 1:
                await asyncio.sleep(0)
            if self._logs.get(log.meta.stream_id) is log:
                yield log

    def peek(self, stream_id: str, after: int) -> Page | None:
        log = self._logs.get(stream_id)
        if log is None:
            raise UnknownStream
        counters = log.counters
        highest = counters.highest
        if after == highest - 1 and highest >= counters.oldest:  # a live reader's case, by far the most frequent
            page = _blank(Page)  # by hand: a call of `__init__` would double what this costs
            page.frames = [log.frames[-1]]
            page.last_seq = page.highest_seq = highest
            page.oldest_retained_seq = counters.oldest
            page.status = counters.status
            return page
        return log.read(after, SLICE_FRAMES, SLICE_BYTES)

    async def wait(self, stream_id: str, after: int) -> None:
        woken = asyncio.get_running_loop().create_future()
        callback = partial(_settle, woken)
        if self.call_when(stream_id, after, callback):
            try:
                await woken
            except asyncio.CancelledError:
                log = self._logs.get(stream_id)
                if log is not None and callback in log.waiters:
                    log.waiters.remove(callback)
                raise

    def call_when(self, stream_id: str, after: int, callback: Callable[[], None]) -> bool:
        log = self._logs.get(stream_id)
        if log is None or log.counters.highest > after or log.counters.status != OPEN:
            return False
        log.waiters.append(callback)
        return True

    def wake(self, stream_id: str) -> None:
        if log := self._logs.get(stream_id):
            log.wake()

    async def state(self, stream_id: str) -> StreamState:
        return self._log(stream_id).state()

    async def find(self, name: str) -> str | None:
        log = self._names.get(name)
        return log.meta.stream_id if log is not None and log.meta.stream_id in self._logs else None

    async def list(self, owner: str) -> Sequence[StreamState]:
        mine = [log.state() async for log in self._each() if log.meta.owner == owner]
        return sorted(mine, key=lambda state: state.meta.created_at, reverse=True)

    def retained_bytes(self) -> int:
        return self._total.bytes

    def round_trips(self) -> RoundTrips:
        return RoundTrips()

    # No other process is there to be told, asked or outlived.

    def available(self) -> bool:
        return True

    def listen(self, listener: Listener) -> None:
        """There is nothing it would be told."""

    async def claim_orphan(self, stream_id: str) -> Orphan | None:
        return None

    async def orphans(self) -> Sequence[str]:
        return []

    async def hold(self, stream_id: str, position: int | None) -> None:
        """Every reader is known to the caller."""

    async def lowest_elsewhere(self, stream_id: str) -> int | None:
        return None
