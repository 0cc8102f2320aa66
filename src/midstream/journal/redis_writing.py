"""Putting batches into the store, and putting them back into one that has lost them.

A batch goes out once, and again unchanged when its reply was lost; the script knows the last batch again.  A batch of
which nothing is known, since the store did not answer for too long, is sent again before anything newer.

A store that was restored or failed over may lack the newest records.  Then the writer's number is beyond the next one,
though the store once said that all before was kept; what is missing is appended again, byte for byte, from the tail.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, NoReturn

from midstream import rules
from midstream.errors import (
    JournalError,
    MidstreamError,
    OutOfSequence,
    StaleWriter,
    StoreLost,
    StoreUnavailable,
    StreamEnded,
)
from midstream.journal.redis_dropping import Dropping
from midstream.journal.redis_keys import Numbers, Space, encode_meta
from midstream.journal.redis_lease import Lease
from midstream.journal.redis_names import Names
from midstream.journal.redis_reading import Reading
from midstream.journal.redis_scripts import APPEND, CREATE, KEEP, Code, Script, command
from midstream.journal.redis_store import Store
from midstream.journal.redis_tail import Tail, Tails
from midstream.records import Frame
from midstream.rules import Bounds
from midstream.wire import OPEN, RETAIN_CAP, SLICE_BYTES, SLICE_FRAMES, TOUCH_EVERY

logger = logging.getLogger(__name__)


def entries(first: int, frames: Sequence[Frame]) -> Iterator[int | bytes]:
    """A batch as a script takes it: per entry of the log the seq of its last record, of its first, and them all."""
    at = 0
    while at < len(frames):
        end, size = at, 0
        while end < len(frames) and end - at < SLICE_FRAMES and (end == at or size + len(frames[end]) <= SLICE_BYTES):
            size += len(frames[end])
            end += 1
        yield first + end - 1
        yield first + at
        yield b"".join(frames[at:end])
        at = end


def _digest(data: bytes) -> bytes:
    """By which a batch that was sent before is known again."""
    return blake2b(data, digest_size=16).digest()


def _number(number: int) -> bytes:
    digits = b"%d" % number
    return b"$%d\r\n%b\r\n" % (len(digits), digits)


class Writing:
    """Appends.  `clock` gives seconds since 1970; `totals` is what the streams of each tag hold."""

    def __init__(
        self,
        store: Store,
        space: Space,
        lease: Lease,
        tails: Tails,
        names: Names,
        reading: Reading,
        clock: Callable[[], float],
        bounds: Bounds,
        totals: list[int],
    ) -> None:
        self._store, self._space, self._lease = store, space, lease
        self._tails, self._names, self._reading = tails, names, reading
        self.dropping = Dropping(reading, bounds, self.call, totals)
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._totals = totals

    def _head(self, tail: Tail) -> tuple[bytes | str, ...]:
        """The arguments that every script about a stream begins with."""
        publish = b"SPUBLISH" if self._space.clustered else b"PUBLISH"
        return tail.meta.stream_id, publish, tail.channel, self._lease.process, tail.ttl

    async def call(self, script: Script, tail: Tail, *args: bytes | str | int, keys: Sequence[bytes] = ()) -> list[Any]:
        """Run a script about a stream.  Raises UnknownStream, StoreLost, StreamEnded, StaleWriter, OutOfSequence."""
        packed = script.call([*tail.keys, *keys], *self._head(tail), *args)
        reply: list[Any] = await self._store.run(tail.shard, packed)
        if Code.UNKNOWN <= reply[0] <= Code.OVER:
            await self._refuse(tail, reply)
        return reply

    async def _refuse(self, tail: Tail, reply: list[Any]) -> NoReturn:
        code = reply[0]
        if code == Code.UNKNOWN:
            raise await self._reading.missing(tail.stream_id)
        if code == Code.STALE:
            raise StaleWriter(reply[1])
        if code == Code.OVER:
            raise StreamEnded(f"the stream is {reply[1].decode()}")
        raise JournalError(f"a script answered {reply!r}")

    # --- append -----------------------------------------------------------------------------------------------------

    async def append(self, tail: Tail, frames: list[Frame], epoch: int, first: int) -> None:
        """Raises StaleWriter, StreamEnded, OutOfSequence, StoreLost, UnknownStream, StoreUnavailable."""
        if epoch <= tail.forfeited:
            raise StaleWriter(max(tail.epoch, epoch))
        if tail.doubt is not None:
            frames, first = await self._settle(tail, frames, epoch, first)
            if not frames:
                return
        await self._append(tail, frames, epoch, first)

    async def _settle(self, tail: Tail, frames: list[Frame], epoch: int, first: int) -> tuple[list[Frame], int]:
        """Send the batch in doubt again where this one begins with it; the rest of this one."""
        assert tail.doubt is not None
        began, doubtful = tail.doubt
        count = len(doubtful)
        if began != first or count >= len(frames) or frames[:count] != doubtful:
            return frames, first
        await self._append(tail, doubtful, epoch, first)
        return frames[count:], first + count

    async def _append(self, tail: Tail, frames: list[Frame], epoch: int, first: int) -> None:
        try:
            reply = await self._send(tail, frames, epoch, first)
        except (StoreUnavailable, asyncio.CancelledError):
            tail.doubt = (first, frames)
            raise
        tail.doubt = None
        if reply == Code.OK:
            await self._count_in(tail, frames, first)
        elif reply == Code.AGAIN:
            tail.extend(first, frames)
            tail.wake()
        else:
            await self._refused(tail, frames, epoch, first, reply)

    async def _send(self, tail: Tail, frames: list[Frame], epoch: int, first: int) -> Any:
        data = frames[0] if len(frames) == 1 else b"".join(frames)
        last = first + len(frames) - 1
        weight = rules.weight(frames)
        status, run_id = rules.status_after(frames[-1]), self._store.node(tail.shard).run_id
        if (
            status == OPEN
            and tail.run == run_id
            and self._loop.time() - tail.kept < TOUCH_EVERY
            and len(data) <= SLICE_BYTES
            and len(frames) <= SLICE_FRAMES
        ):
            return await self._store.append(tail.shard, self._packed(tail, epoch, first, last, weight, data))
        now, tail.kept = self._clock(), self._loop.time()
        packed = APPEND.call(
            tail.keys,
            *self._head(tail),
            epoch,
            first,
            last,
            _digest(data),
            weight,
            status,
            repr(now),
            repr(now + min(tail.meta.retain, RETAIN_CAP)),
            run_id,
            *entries(first, frames),
        )
        reply = await self._store.append(tail.shard, packed)
        if reply == Code.OK:
            tail.run = run_id
        return reply

    def _packed(self, tail: Tail, epoch: int, first: int, last: int, weight: int, data: bytes) -> bytes:
        """The append of one entry, packed by hand: packing costs by the part, and most of them are always the same."""
        if tail.packed_by != self._lease.process:
            parts = (b"EVALSHA", APPEND.sha, b"3", *tail.keys[:3], *self._head(tail))
            # The head of an array of that many parts and the six that follow (RESP2).
            tail.packed = b"*%d\r\n" % (len(parts) + 6) + command(*parts).partition(b"\r\n")[2]
            tail.packed_by = self._lease.process
        return b"%b%b%b%b$16\r\n%b\r\n%b$%d\r\n%b\r\n" % (
            tail.packed,
            _number(epoch),
            _number(first),
            _number(last),
            _digest(data),
            _number(weight),
            len(data),
            data,
        )

    async def _count_in(self, tail: Tail, frames: list[Frame], first: int) -> None:
        weight = rules.weight(frames)
        self._totals[tail.shard] += weight
        tail.size += weight
        tail.lost = False
        tail.extend(first, frames)
        tail.seen = self._loop.time()
        last = first + len(frames) - 1
        if tail.highest == last:
            tail.fresh = tail.fresh or (tail.mine > 0 and not tail.returned)
        tail.wake()
        if self.dropping.over(tail.size, last - tail.oldest + 1):
            try:
                await self.dropping.evict(tail)
            except MidstreamError as error:  # the batch stands, and the next one tries again
                logger.debug("stream %s keeps more than it may: %s", tail.stream_id, error)

    async def _refused(self, tail: Tail, frames: list[Frame], epoch: int, first: int, reply: list[Any]) -> None:
        code = reply[0]
        ours = tail.mine == epoch and tail.highest >= first - 1
        if code == Code.SEQUENCE:
            expected = reply[1]
            if tail.lost and tail.mine == epoch and expected < first:
                self._give_up(tail, expected)
            if not (ours and expected < first):
                raise OutOfSequence(expected, first)
            await self._put_back(tail, expected, first - 1)
        elif code == Code.UNKNOWN and ours and self._reading.replaced(tail):
            try:
                await self.restore(tail)
            except StoreLost:
                tail.mine = 0
                self._tails.pop(tail.stream_id)
                raise
        else:
            if code == Code.STALE and tail.mine == epoch:
                tail.mine, tail.fresh = 0, False
            await self._refuse(tail, reply)
        again = await self._send(tail, frames, epoch, first)
        if again == Code.OK:
            await self._count_in(tail, frames, first)
        elif again != Code.AGAIN:
            if again[0] == Code.SEQUENCE:
                raise OutOfSequence(again[1], first)
            await self._refuse(tail, again)

    # --- putting back -----------------------------------------------------------------------------------------------

    async def repair(self, tail: Tail) -> None:
        """The store was replaced: have it know what this process wrote, as far as it is held here.

        Raises UnknownStream, StoreLost where that is not enough.
        """
        epoch, told = tail.mine, await self._reading.ask(tail)
        if told is None:
            await self.restore(tail)
            return
        if (told.epoch, told.writer) != (epoch, self._lease.process):
            tail.forget_records()
            return
        if told.highest < tail.highest:
            await self._put_back(tail, told.highest + 1, tail.highest)
        run_id = self._store.node(tail.shard).run_id
        await self.call(KEEP, tail, epoch, run_id)
        tail.run, tail.returned, tail.fresh = run_id, False, True

    async def _put_back(self, tail: Tail, expected: int, upto: int) -> None:
        """Append records again that the store once had.  Raises StoreLost with `expected`."""
        async with tail.lock:
            records = tail.records(expected, upto)
            epoch = tail.mine
            if records is None:
                self._give_up(tail, expected)
            for at in range(0, len(records), SLICE_FRAMES):
                part = records[at : at + SLICE_FRAMES]
                reply = await self._send(tail, part, epoch, expected + at)
                if reply in (Code.OK, Code.AGAIN):
                    continue
                if reply[0] != Code.SEQUENCE or reply[1] <= expected + at:  # else an append of ours was here before
                    await self._refuse(tail, reply)
            tail.returned = False

    def _give_up(self, tail: Tail, expected: int) -> NoReturn:
        tail.forget_records()
        tail.lost = True
        raise StoreLost(
            f"the store has lost {tail.stream_id} from record {expected} on, and it is not held here any more",
            expected=expected,
        )

    async def restore(self, tail: Tail) -> None:
        """Create the stream again, as it was, where this process holds all of it.  Raises StoreLost."""
        records = tail.records(1, tail.highest)
        if records is None or tail.oldest > 1:
            raise StoreLost(f"the store has lost {tail.stream_id}, and not all of it is held here")
        names = [] if self._space.clustered else [self._space.name(name) for name in tail.names]
        epoch, body = tail.mine, records if tail.status == OPEN else records[:-1]
        await self.create(tail, body, epoch, names)
        if self._space.clustered:
            await self._names.bind(tail.names, tail.stream_id, tail.ttl)
        tail.run = self._store.node(tail.shard).run_id
        if tail.status != OPEN:
            await self._put_back(tail, len(records), len(records))
        tail.returned, tail.fresh = False, True

    async def create(self, tail: Tail, frames: list[Frame], epoch: int, keys: Sequence[bytes]) -> Numbers | str:
        """Create a stream, bound to the names that have these keys; or the stream that has one of them."""
        reply = await self.call(
            CREATE,
            tail,
            encode_meta(tail.meta, tail.names),
            tail.meta.request,
            epoch,
            self._store.node(tail.shard).run_id,
            repr(tail.meta.created_at),
            rules.weight(frames),
            1,
            len(frames),
            _digest(b"".join(frames)),
            *entries(1, frames),
            keys=keys,
        )
        if reply[0] == Code.TAKEN:
            taken: bytes = reply[1]
            return taken.decode()
        numbers = Numbers.of(reply[1])
        self._totals[tail.shard] = reply[2]
        tail.learn(numbers, self._loop.time())
        tail.extend(1, frames)
        return numbers
