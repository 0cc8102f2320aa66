"""Housekeeping of a shared store: what is in it, what expires, who is gone, what the living renew."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from midstream.errors import MidstreamError, OutOfSpace, StoreLost, UnknownStream
from midstream.journal.redis_keys import SHARDS, Space
from midstream.journal.redis_lease import Lease
from midstream.journal.redis_names import Names
from midstream.journal.redis_reading import Reading
from midstream.journal.redis_scripts import EXPIRE, HOLD, KEEP, RECOUNT, Code, command
from midstream.journal.redis_store import Store
from midstream.journal.redis_tail import Tail, Tails
from midstream.journal.redis_writing import Writing
from midstream.records import StreamMeta, StreamState
from midstream.rules import Bounds
from midstream.wire import TOUCH_EVERY

# Streams forgotten, looked at or renewed at once: more would hold up what others want of the store.
_AT_ONCE = 200
# How often what a lost stream held is counted anew while streams come and go in between.
_COUNTS = 3


class Keeping:
    """`forget` expires a stream whatever it is doing; `totals` is what the streams of each tag hold."""

    def __init__(
        self,
        store: Store,
        space: Space,
        lease: Lease,
        tails: Tails,
        names: Names,
        reading: Reading,
        writing: Writing,
        clock: Callable[[], float],
        bounds: Bounds,
        totals: list[int],
    ) -> None:
        self._store, self._space, self._lease, self._tails = store, space, lease, tails
        self._names, self._reading, self._writing = names, reading, writing
        self._clock = clock
        self._bounds = bounds
        self._totals = totals
        self._held: dict[str, tuple[int, float]] = {}  # stream -> the position told, and when

    # --- space ------------------------------------------------------------------------------------------------------

    def held(self) -> int:
        return max(sum(self._totals), 0)

    async def count(self) -> None:
        """Learn what all streams of the store hold."""
        told = await self._store.each((shard, command("GET", self._space.total(shard))) for shard in range(SHARDS))
        self._totals[:] = [int(total or 0) for total in told]

    async def full(self) -> bool:
        """Is there no room for a new stream, unless finished ones go?"""
        if self.held() < self._bounds.max_bytes:
            return False
        await self.count()
        return self.held() >= self._bounds.max_bytes

    async def make_room(self) -> None:
        """Finished streams go first, least recently used first.  Raises OutOfSpace when only open ones are left."""
        limit = self._bounds.max_bytes
        await self._forget_while(lambda: self.held() >= limit)
        if self.held() >= limit:
            raise OutOfSpace(f"open streams hold {self.held()} bytes; the limit is {limit}", 10)

    async def _forget_while(self, crowded: Callable[[], bool]) -> list[str]:
        gone = []
        for stream_id in await self._ended() if crowded() else ():
            if not crowded():
                break
            if await self.forget(stream_id):
                gone.append(stream_id)
        return gone

    async def _ended(self, until: float | None = None) -> list[str]:
        """Finished streams, the first to expire first; with `until` those that expire by then."""
        most = "+inf" if until is None else repr(until)
        asked = ("-inf", most, "WITHSCORES")
        told = await self._store.each(
            (shard, command("ZRANGEBYSCORE", self._space.ended(shard), *asked)) for shard in range(SHARDS)
        )
        found = [
            (float(score), stream_id) for some in told for stream_id, score in zip(some[::2], some[1::2], strict=True)
        ]
        return [stream_id.decode() for _, stream_id in sorted(found)]

    async def forget(self, stream_id: str, due: float | None = None) -> bool:
        """Forget a stream, its names and its fold; with `due` only if it has expired by then."""
        try:
            tail = await self._reading.known(stream_id)
        except (UnknownStream, StoreLost):  # there may be parts of it left
            tail = Tail(StreamMeta(stream_id, "", "", 0, 0), (), self._space, self._store.terms)
        code, *told = await self._writing.call(EXPIRE, tail, "" if due is None else repr(due))
        if code != Code.OK:
            return False
        self._totals[tail.shard] = told[0]
        self._held.pop(stream_id, None)
        self._tails.pop(stream_id)
        await self._names.free(tail.names, stream_id)
        return True

    async def sweep(self) -> list[str]:
        """Forget what has expired, and finished streams past the total of bytes."""
        now = self._clock()
        gone = [stream_id for stream_id in await self._ended(now) if await self.forget(stream_id, now)]
        await asyncio.gather(*(self._recount(shard) for shard in range(SHARDS)))
        await self.count()
        return gone + await self._forget_while(lambda: self.held() > self._bounds.max_bytes)

    async def _recount(self, shard: int) -> None:
        """Streams whose keys ran out with nobody there to forget them are still counted: count anew."""
        for _ in range(_COUNTS):
            indexes = [self._space.open(shard), self._space.ended(shard)]
            open_now, ended = await self._store.together(
                shard, command("HKEYS", indexes[0]), command("ZRANGE", indexes[1], 0, -1)
            )
            ids = [*open_now, *ended]
            keys = [self._space.numbers(stream_id.decode()) for stream_id in ids]
            if not keys or await self._store.run(shard, command("EXISTS", *keys)) == len(keys):
                return
            asked = RECOUNT.call([self._space.total(shard), *indexes, *keys], *ids)
            if (await self._store.run(shard, asked))[0] == Code.OK:
                return

    # --- who has what -----------------------------------------------------------------------------------------------

    async def owned(self, owner: str) -> list[StreamState]:
        """The owner's streams, newest first."""
        told = await self._store.each(
            (shard, command("ZRANGE", self._space.owned(shard, owner), 0, -1)) for shard in range(SHARDS)
        )
        ids = [(shard, stream_id.decode()) for shard, some in enumerate(told) for stream_id in some]
        states = []
        for at in range(0, len(ids), _AT_ONCE):
            states += await asyncio.gather(*(self._state(owner, *one) for one in ids[at : at + _AT_ONCE]))
        there = [state for state in states if state is not None and state.meta.owner == owner]
        return sorted(there, key=lambda state: state.meta.created_at, reverse=True)

    async def _state(self, owner: str, shard: int, stream_id: str) -> StreamState | None:
        try:
            tail, told = await self._reading.numbers(stream_id)
        except StoreLost:
            return None
        except UnknownStream:  # its keys ran out
            await self._store.run(shard, command("ZREM", self._space.owned(shard, owner), stream_id))
            return None
        return told.state(tail.meta)

    # --- what the living renew --------------------------------------------------------------------------------------

    async def keep(self) -> None:
        """Put off the expiry of the streams written here, and of their names, for another while."""
        now = asyncio.get_running_loop().time()
        ours = [tail for tail in self._tails if tail.written_here]
        due = [
            tail for tail in ours if now - tail.kept >= TOUCH_EVERY or (tail.names and now - tail.bound >= TOUCH_EVERY)
        ]
        for at in range(0, len(due), _AT_ONCE):
            await asyncio.gather(*(self._keep(tail, now) for tail in due[at : at + _AT_ONCE]))

    async def _keep(self, tail: Tail, now: float) -> None:
        if now - tail.kept >= TOUCH_EVERY:  # an append does that itself
            tail.kept = now
            await _quietly(self._writing.call(KEEP, tail, tail.mine, tail.run))
        tail.bound = now
        await _quietly(self._names.bind(tail.names, tail.stream_id, tail.ttl))

    async def hold(self, tail: Tail, position: int | None) -> None:
        """Tell the other processes our lowest reader of this stream, or that there is none any more."""
        if position is None:
            self._held.pop(tail.stream_id, None)
        term = int(self._store.terms.hold * 1000)
        await self._writing.call(HOLD, tail, "" if position is None else position, term, repr(self._clock()))
        if position is not None:
            self._held[tail.stream_id] = (position, asyncio.get_running_loop().time())

    async def renew_holds(self, lowest: Callable[[str, int], int | None]) -> None:
        """Tell our lowest readers again where that was some time ago.  `lowest` knows them, given what was told."""
        now = asyncio.get_running_loop().time()
        third = self._store.terms.hold / 3
        due = [(stream_id, told) for stream_id, (told, when) in self._held.items() if now - when >= third]
        for at in range(0, len(due), _AT_ONCE):
            await asyncio.gather(*(self._hold_again(one, lowest(one, told)) for one, told in due[at : at + _AT_ONCE]))

    async def _hold_again(self, stream_id: str, position: int | None) -> None:
        try:
            await self.hold(await self._reading.known(stream_id), position)
        except UnknownStream:
            self._held.pop(stream_id, None)
        except MidstreamError:
            pass  # the next renewal is near

    async def lowest_elsewhere(self, stream_id: str) -> int | None:
        """The lowest position that another process tells of its readers."""
        tail = await self._reading.known(stream_id)
        (seconds, micros), told = await self._store.together(
            tail.shard, command("TIME"), command("HGETALL", tail.keys.holds)
        )
        now = int(seconds) * 1000 + int(micros) // 1000
        holds = zip(told[::2], (value.split() for value in told[1::2]), strict=True)
        others = [
            int(position)
            for process, (position, till) in holds
            if process.decode() != self._lease.process and int(till) > now
        ]
        return min(others, default=None)


async def _quietly(verb: Awaitable[object]) -> None:
    """Do what will be done again soon anyway."""
    try:
        await verb
    except MidstreamError:
        pass
