"""What this process knows of a stream in the store: what it is, its numbers, and the newest of its records.

Readers at the live end are served from here, so that one read per process is enough for all of them, and none for what
the process wrote itself.  Only what the store has said is ever put here.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial

from midstream.journal.redis_keys import Numbers, Space, shard_of
from midstream.journal.redis_url import Terms
from midstream.records import FRAME_OVERHEAD, Fold, Frame, Page, StreamMeta, within
from midstream.rules import status_after, weight
from midstream.wire import OPEN, RETAIN_CAP, Status

# Records kept in this process, in bytes: in all; and of one stream at most, at least.  With many streams each may keep
# its share of the whole.
TAILS_BYTES, MOST_BYTES, LEAST_BYTES = 128 * 1024 * 1024, 1024 * 1024, 16 * 1024
# Streams known without a reason to (nobody waits, this process does not write), and bytes of each besides its records.
IDLE_STREAMS, KNOWN_BYTES = 10_000, 2000
_COMPACT_AT = 64


class Tail:
    """One stream.  `frames[head:]` are its newest records, `first` to `highest` without a hole; there may be none.

    `fresh`: whatever changes in the store is told to this process, or done by it; only then may anything be answered
    from here.  `mine` is the epoch under which this process writes it, or wrote it to its end, 0 when it does not.
    Times are the loop's.
    """

    __slots__ = (
        "_loop",
        "awaited",
        "bound",
        "channel",
        "doubt",
        "dropped",
        "epoch",
        "first",
        "forfeited",
        "forked",
        "frames",
        "fresh",
        "front",
        "head",
        "held",
        "highest",
        "kept",
        "keys",
        "lock",
        "loose",
        "lost",
        "meta",
        "mine",
        "names",
        "news",
        "noted",
        "oldest",
        "packed",
        "packed_by",
        "returned",
        "run",
        "seen",
        "shard",
        "size",
        "status",
        "stirring",
        "told_highest",
        "told_status",
        "ttl",
        "waiters",
        "writer",
    )

    def __init__(self, meta: StreamMeta, names: tuple[str, ...], space: Space, terms: Terms) -> None:
        self.meta = meta
        self.names = names
        self.shard = shard_of(meta.stream_id)
        self.keys = space.of_stream(meta.stream_id, meta.owner)
        self.channel = space.channel(self.shard)
        self.packed, self.packed_by = b"", ""  # the first half of an append, and the process that sends it
        self.ttl = b"%d" % ((min(meta.retain, RETAIN_CAP) + terms.spare) * 1000)
        self.frames: list[Frame] = []
        self.head = 0
        self.held = 0
        self.first = 1
        self.highest = 0
        self.oldest = 1
        self.told_highest, self.told_status = 0, OPEN  # what the store last said, of which not all need be here
        self.size = (
            0  # of all its records and its fold in the store, or more than that where other processes dropped some
        )
        self.status: Status = OPEN
        self.epoch = 0
        self.writer = ""
        self.run = ""
        self.fresh = False
        self.mine = self.forfeited = 0  # appends under `forfeited` or an older epoch are refused: its lease was lost
        self.news = 0  # changes that this process was told of
        self.stirring = False  # it is being read for everybody, again and again until there is no more news
        self.returned = False  # the store was away and is another one now: it may lack what is known here
        self.lost = False  # the store lacks records that its writer appended, and that are not held here any more
        self.forked = -1  # from this seq on the store has lost what this process has given its readers
        self.seen = self.kept = self.bound = float("-inf")  # when confirmed; when its expiry and its names' was put off
        self.noted = float("-inf")  # the last access that the store was told of, in seconds since 1970
        self.doubt: tuple[int, list[Frame]] | None = None  # a batch of which nobody knows whether it was written
        self.dropped: Fold | None = None  # the fold of everything before `oldest`, where it was made here
        self.loose = 0  # bytes of dropped records that are still in the log
        self.front: tuple[int, list[Frame]] = (1, [])  # the oldest records from a seq on, where some had to go
        self.waiters: list[Callable[[], None]] = []
        self.awaited = float("-inf")  # when somebody last waited
        self._loop = asyncio.get_running_loop()
        self.lock = asyncio.Lock()  # held by who drops records or mends: one at a time

    @property
    def stream_id(self) -> str:
        return self.meta.stream_id

    @property
    def written_here(self) -> bool:
        """Is this process writing it now?"""
        return self.mine > 0 and self.status == OPEN

    def learn(self, told: Numbers, now: float) -> None:
        """Take what the store says of it, unless it is older than what is known already.

        Where there is more than is known here, the tail is no longer `fresh`.
        """
        if told.highest < self.highest or told.epoch < self.epoch:
            return
        self.seen = now
        self.epoch, self.writer, self.run = told.epoch, told.writer, told.run
        self.told_highest, self.told_status = told.highest, told.status
        self.size = told.held + told.fold
        if told.highest > self.highest:
            self.fresh = False
        elif told.status != OPEN:
            self.status = told.status
        self.let_go(told.oldest)

    def extend(self, first: int, frames: list[Frame]) -> None:
        """Add records that stand in the store, the last of which was its newest a moment ago."""
        last = first + len(frames) - 1
        if last <= self.highest:
            return
        if first > self.highest + 1 or not self.frames:
            self.frames, self.head, self.first, self.held = [], 0, max(first, self.oldest), 0
            self.highest = self.first - 1
        new = frames[self.highest + 1 - first :]
        self.frames += new
        self.held += weight(new)
        self.highest = last
        if (status := status_after(frames[-1])) != OPEN:
            self.status = status

    def prepend(self, first: int, frames: list[Frame]) -> None:
        """Add records that stand before the first one here and join it."""
        if self.frames and self.oldest <= first < self.first <= first + len(frames):
            new = frames[: self.first - first]
            self.frames = new + self.frames[self.head :]
            self.held += weight(new)
            self.head, self.first = 0, first

    def stand_at(self, highest: int) -> None:
        """Hold no records, and know that this is the newest."""
        self.frames, self.head, self.held = [], 0, 0
        self.first, self.highest = highest + 1, highest

    def let_go(self, oldest: int) -> None:
        """Records before `oldest` are not to be read any more."""
        if oldest > self.oldest:
            self.oldest = oldest
            if oldest > self.first:
                self._cut(oldest - self.first)

    def shrink(self, allowed: int) -> None:
        """Keep no more than so many bytes, but the newest record."""
        count = 0
        excess = self.held - allowed
        while excess > 0 and self.head + count < len(self.frames) - 1:
            excess -= len(self.frames[self.head + count]) + FRAME_OVERHEAD
            count += 1
        if count:
            self._cut(count)

    def _cut(self, count: int) -> None:
        count = min(count, len(self.frames) - self.head)
        gone = self.frames[self.head : self.head + count]
        self.held -= weight(gone)
        self.frames[self.head : self.head + count] = [b""] * count
        self.head += count
        self.first += count
        if self.head > _COMPACT_AT and self.head * 2 > len(self.frames):
            del self.frames[: self.head]
            self.head = 0

    def forget_records(self) -> None:
        """Start anew from what the store will say, also if that is less than what was known."""
        self.frames, self.head, self.held = [], 0, 0
        self.first, self.highest, self.oldest, self.epoch, self.status = 1, 0, 1, 0, OPEN
        self.fresh = self.returned = False
        self.dropped, self.front = None, (1, [])

    def records(self, first: int, last: int) -> list[Frame] | None:
        """These records; None where one of them is not here."""
        if not self.first <= first or last > self.highest:
            return None
        begin = self.head + first - self.first
        return self.frames[begin : begin + last - first + 1]

    def page(self, after: int, limit: int, max_bytes: int) -> Page | None:
        """What a read would give; None where the records are not here."""
        frames: list[Frame] = []
        if self.oldest <= after + 1 <= self.highest:
            ahead = after + 1 - self.first
            if ahead < 0:
                return None
            frames = self.frames[self.head + ahead : self.head + ahead + limit]
            if len(frames) > 1:
                frames = within(frames, max_bytes)
        return Page(frames, after + len(frames), self.highest, self.oldest, self.status)

    def wake(self) -> None:
        if self.waiters:
            self.awaited = self._loop.time()
            waiters, self.waiters = self.waiters, []
            for waiter in waiters:
                waiter()

    def call_when(self, after: int, callback: Callable[[], None]) -> bool:
        if self.highest > after or self.status != OPEN:
            return False
        self.waiters.append(callback)
        return True

    async def wait(self, after: int) -> None:
        woken = asyncio.get_running_loop().create_future()
        callback = partial(_settle, woken)
        if self.call_when(after, callback):
            try:
                await woken
            except asyncio.CancelledError:
                if callback in self.waiters:
                    self.waiters.remove(callback)
                raise


def _settle(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


class Tails:
    """All streams this process knows, within TAILS_BYTES; the ones nobody has asked for the longest go first."""

    def __init__(self) -> None:
        self._tails: OrderedDict[str, Tail] = OrderedDict()

    def __iter__(self) -> Iterator[Tail]:
        return iter(list(self._tails.values()))

    def get(self, stream_id: str) -> Tail | None:
        return self._tails.get(stream_id)

    def add(self, tail: Tail) -> Tail:
        """Know it; the one that is known already where there is one."""
        return self._tails.setdefault(tail.stream_id, tail)

    def pop(self, stream_id: str) -> None:
        """Know it no longer, and let its readers hear that from the store."""
        if tail := self._tails.pop(stream_id, None):
            tail.fresh = False
            tail.wake()

    def used(self, tail: Tail) -> None:
        if tail.stream_id in self._tails:
            self._tails.move_to_end(tail.stream_id)

    @property
    def allowed(self) -> int:
        """Bytes of records that one stream may keep here."""
        return max(LEAST_BYTES, min(MOST_BYTES, TAILS_BYTES // (len(self._tails) or 1)))

    def tidy(self) -> None:
        """Keep the bounds: called once a second."""
        allowed = self.allowed
        idle = []
        held = 0
        for tail in self._tails.values():
            if tail.held > allowed:
                tail.shrink(allowed)
            held += tail.held + len(tail.meta.request) + KNOWN_BYTES
            if not tail.waiters and not tail.written_here and not tail.lock.locked():
                idle.append(tail)
        many = len(idle) - IDLE_STREAMS
        for tail in idle:
            if many <= 0 and held <= TAILS_BYTES:
                break
            many -= 1
            held -= tail.held + len(tail.meta.request) + KNOWN_BYTES
            self.pop(tail.stream_id)
