"""The shared journal: Redis or Valkey, one server or a cluster.  It survives a killed gateway; any serves any stream.

A stream is decided about in the store, by one script at a time (`lua/`).  A process keeps the newest records of the
streams it reads or writes (`redis_tail`), hears of what others did (`redis_watch`), and proves that it is alive
(`redis_lease`).  Times of streams are the clock's that is passed in; terms of leases, holds and keys are the store's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeGuard

from midstream.codec import native
from midstream.errors import JournalError, MidstreamError, StoreLost, StoreUnavailable, UnknownStream
from midstream.journal.base import WRITER_LOST, Created, Listener, Orphan, RoundTrips, Snapshot, Traits
from midstream.journal.redis_claims import Claims
from midstream.journal.redis_keeping import Keeping
from midstream.journal.redis_keys import SHARDS, Numbers, Space
from midstream.journal.redis_lease import Lease
from midstream.journal.redis_names import Names
from midstream.journal.redis_scripts import CANCEL, TOUCH
from midstream.journal.redis_store import Store
from midstream.journal.redis_tail import Tail, Tails
from midstream.journal.redis_url import Access, Terms
from midstream.journal.redis_watch import Watch
from midstream.journal.redis_writing import Writing
from midstream.records import FRAME_OVERHEAD, Frame, Page, StreamMeta, StreamState
from midstream.rules import Bounds
from midstream.wire import MAX_SEQ, OPEN, RETAIN_CAP, SLICE_BYTES, SLICE_FRAMES, TOUCH_EVERY, CancelReason

logger = logging.getLogger(__name__)


class RedisJournal:
    """`redis://…`.  `clock` gives seconds since 1970."""

    traits = Traits("redis", durable=True, shared=True)

    def __init__(
        self, access: Access, clock: Callable[[], float], bounds: Bounds | None = None, terms: Terms | None = None
    ) -> None:
        self._access = access
        self._clock = clock
        self._bounds = bounds or Bounds()
        self._terms = terms or access.terms
        self._listener: Listener | None = None
        self._space = Space(access.prefix)
        self._tails = Tails()
        self._totals = [0] * SHARDS
        self._trips = RoundTrips()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = False
        self._store: Store
        self._lease: Lease
        self._names: Names
        self._writing: Writing
        self._watch: Watch
        self._claims: Claims
        self._keeping: Keeping
        self._hurry: asyncio.Event

    # --- life -------------------------------------------------------------------------------------------------------

    def listen(self, listener: Listener) -> None:
        self._listener = listener

    async def open(self) -> None:
        terms, space, tails = self._terms, self._space, self._tails
        store = self._store = Store(self._access, space, terms, self._trips)
        self._lease = Lease(store, space, terms, self._forfeit)
        self._names = Names(store, space, terms)
        self._hurry = asyncio.Event()
        self._watch = Watch(store, space, tails, self._lease, self._orphaned, self._superseded, self._repair)
        self._watch.on_return = self._hurry.set
        self._watch.on_restart = lambda: self._start(self._tell(self._find_lost_ends()))
        reading = self._watch.reading
        self._writing = Writing(
            store, space, self._lease, tails, self._names, reading, self._clock, self._bounds, self._totals
        )
        self._keeping = Keeping(
            store,
            space,
            self._lease,
            tails,
            self._names,
            reading,
            self._writing,
            self._clock,
            self._bounds,
            self._totals,
        )
        self._claims = Claims(store, space, tails, self._lease, self._watch, self._writing)
        self._running = True
        try:
            await self._begin()
        except BaseException:
            self._running = False
            await store.close()
            raise
        self._start(self._renew_for_ever())
        self._start(self._look_for_ever())

    async def _begin(self) -> None:
        """Take the lease and end what nobody writes any more.  A store that is away is met by the first renewal."""
        if not await self._store.open():
            if refusal := self._store.refusal():
                raise JournalError(refusal)
            logger.error("the store at %s does not answer; it is tried again and again", self._access.place)
            return
        if (policy := self._store.policy()) != "noeviction":
            logger.warning(
                "the store's maxmemory-policy is %s: when memory is full it deletes parts of streams; set noeviction",
                policy,
            )
        try:
            await self._lease.take()
            await self._keeping.count()
            if self._listener is None:
                await self._end_orphans()
        except StoreUnavailable as error:
            logger.error("the store at %s does not do what it should: %s", self._access.place, error)

    async def close(self) -> None:
        if not self._running:
            return
        self._running = False
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._watch.close()
        try:
            await self._store.settle()
            if self._lease.holds:
                await self._lease.give_up()
        except MidstreamError as error:
            logger.warning("the lease was not given up, it runs out by itself: %s", error)
        await self._store.close()
        for tail in self._tails:
            tail.fresh = False
            tail.wake()

    def available(self) -> bool:
        return self._running and self._lease.holds and self._store.answers()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _renew_for_ever(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._terms.renew):
                    await self._hurry.wait()
            except TimeoutError:
                pass
            self._hurry.clear()
            await self._tell(self._renew())

    async def _renew(self) -> None:
        await self._lease.renew()
        for node in self._store.nodes():
            node.prove()
        await self._keeping.count()
        await self._keeping.keep()

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._terms.look)
            await self._tell(self._watch.look())
            await self._tell(self._keeping.renew_holds(self._lowest))

    async def _tell(self, work: Awaitable[None]) -> None:
        """Do what is done again and again: no failure ends it."""
        try:
            await work
        except StoreUnavailable as error:
            logger.debug("%s", error)
        except Exception:
            logger.exception("the journal's housekeeping failed; it goes on")

    # --- what this process is told, and loses -----------------------------------------------------------------------

    def _orphaned(self, stream_id: str) -> None:
        if self._listener is not None:
            self._listener.orphaned(stream_id)
        else:
            self._start(self._tell(self._end_orphan(stream_id)))

    def _superseded(self, tail: Tail) -> None:
        tail.mine = 0
        if tail.status == OPEN:
            tail.fresh = False
        if self._listener is not None:
            self._listener.superseded(tail.stream_id)

    def _lowest(self, stream_id: str, told: int) -> int | None:
        return told if self._listener is None else self._listener.lowest(stream_id)

    async def _repair(self, tail: Tail) -> None:
        await self._writing.repair(tail)

    def _forfeit(self) -> None:
        """Our lease ran out: others may have our streams.  Nothing that is kept here counts any more."""
        logger.error("this process was stopped for longer than its lease: it gives up the streams it wrote")
        for tail in self._tails:
            if tail.written_here:
                tail.forfeited = tail.mine
                self._superseded(tail)
            tail.mine = 0
            tail.forget_records()
            tail.wake()

    async def _find_lost_ends(self) -> None:
        """A store that was replaced may have lost ends that nobody holds any more: streams that are open, written by a
        process that lives and knows nothing of them.  Once the living have put back what they have, these are orphans.
        """
        await asyncio.sleep(self._terms.mend)
        for stream_id in await self.orphans():
            self._orphaned(stream_id)

    async def _end_orphans(self) -> None:
        for stream_id in await self.orphans():
            await self._end_orphan(stream_id)

    async def _end_orphan(self, stream_id: str) -> None:
        try:
            if orphan := await self.claim_orphan(stream_id):
                seq = orphan.state.highest_seq + 1
                frames = [native.failed(seq, WRITER_LOST)]
                await self.append(stream_id, frames, epoch=orphan.state.epoch, first_seq=seq)
        except (UnknownStream, StoreLost) as error:
            logger.warning("stream %s, whose writer is gone, cannot be ended: %s", stream_id, error)

    # --- writing ----------------------------------------------------------------------------------------------------

    async def create(self, meta: StreamMeta, frames: list[Frame], names: Sequence[str] = ()) -> Created:
        if await self._keeping.full():
            for name in names:
                if (known := await self.find(name)) is not None:
                    return Created(await self.state(known), existed=True)
            await self._keeping.make_room()
        tail = Tail(meta, tuple(names), self._space, self._terms)
        while True:
            with self._claims.under_way(meta.stream_id):
                taken = await self._create(tail, frames)
                if isinstance(taken, Numbers):
                    return Created(self._born(tail, taken), existed=False)
            try:
                state = await self.state(taken)
            except UnknownStream:  # it ran out and left its name behind
                await self._names.free(names, taken)
                continue
            if self._space.clustered:  # its creator may not have come to it
                await self._names.bind(self._own_names(taken, names), taken, tail.ttl)
            return Created(state, existed=True)

    async def _create(self, tail: Tail, frames: list[Frame]) -> Numbers | str:
        """Its numbers, or the stream that has one of its names."""
        if not self._space.clustered:
            return await self._writing.create(tail, frames, 1, [self._names.key(name) for name in tail.names])
        if taken := await self._names.reserve(tail.names, tail.stream_id):
            return taken
        numbers = await self._writing.create(tail, frames, 1, [])
        if taken := await self._names.bind(tail.names, tail.stream_id, tail.ttl):
            await self.expire(tail.stream_id)  # it took longer than a reservation holds
            return taken
        return numbers

    def _own_names(self, stream_id: str, names: Sequence[str]) -> list[str]:
        known = self._tails.get(stream_id)
        return [name for name in names if known is not None and name in known.names]

    def _born(self, tail: Tail, told: Numbers) -> StreamState:
        self._tails.pop(tail.stream_id)
        self._tails.add(tail)
        tail.mine, tail.fresh = told.epoch, True
        self._watch.writes(tail.shard)
        tail.kept = tail.bound = asyncio.get_running_loop().time()
        return told.state(tail.meta)

    async def append(self, stream_id: str, frames: list[Frame], *, epoch: int, first_seq: int) -> None:
        tail = self._tails.get(stream_id) or await self._watch.reading.known(stream_id)
        await self._writing.append(tail, frames, epoch, first_seq)

    async def claim(self, stream_id: str) -> StreamState:
        return await self._claims.claim(await self._watch.reading.known(stream_id))

    async def claim_orphan(self, stream_id: str) -> Orphan | None:
        return await self._claims.claim_orphan(stream_id)

    async def orphans(self) -> Sequence[str]:
        return await self._claims.orphans()

    async def request_cancel(self, stream_id: str, reason: CancelReason) -> StreamState:
        tail = await self._watch.reading.known(stream_id)
        now = self._clock()
        _, told, total = await self._writing.call(
            CANCEL,
            tail,
            native.cancelled(MAX_SEQ, reason),
            MAX_SEQ,
            FRAME_OVERHEAD,
            repr(now),
            repr(now + min(tail.meta.retain, RETAIN_CAP)),
        )
        numbers = Numbers.of(told)
        self._totals[tail.shard] = total
        tail.mine = 0
        tail.learn(numbers, asyncio.get_running_loop().time())
        tail.news += 1
        self._watch.stir(tail)
        return numbers.state(tail.meta)

    # --- reading ----------------------------------------------------------------------------------------------------

    def peek(self, stream_id: str, after: int) -> Page | None:
        tail = self._tails.get(stream_id)
        return tail.page(after, SLICE_FRAMES, SLICE_BYTES) if self._at_hand(tail) else None

    def _at_hand(self, tail: Tail | None) -> TypeGuard[Tail]:
        """May readers be answered from this process?  What `peek` and `call_when` say must not differ."""
        return tail is not None and tail.fresh and tail.forked < 0 and self._running

    async def read(self, stream_id: str, after: int, limit: int = SLICE_FRAMES, max_bytes: int = SLICE_BYTES) -> Page:
        tail = await self._watch.reading.known(stream_id)
        if not tail.fresh and tail.highest and after >= tail.first - 1:
            await self._watch.stirred(tail)
        if self._at_hand(tail) and (page := tail.page(after, limit, max_bytes)) is not None:
            return page
        if not tail.fresh and tail.told_status == OPEN and not tail.returned:
            await self._watch.hear(tail)  # who reads it will wait for more: what is read now can be kept
        return await self._watch.reading.page(tail, after, limit, max_bytes)

    async def wait(self, stream_id: str, after: int) -> None:
        tail = self._tails.get(stream_id)
        while tail is None or not tail.fresh:
            try:
                tail = await self._watch.attended(stream_id)
            except MidstreamError:
                return  # the read that follows will say it
            if tail.returned or tail.highest > after:
                return
        if self._running and not 0 <= tail.forked <= after:
            await tail.wait(after)

    def call_when(self, stream_id: str, after: int, callback: Callable[[], None]) -> bool:
        tail = self._tails.get(stream_id)
        return self._at_hand(tail) and tail.call_when(after, callback)

    def wake(self, stream_id: str) -> None:
        if tail := self._tails.get(stream_id):
            tail.wake()

    async def state(self, stream_id: str) -> StreamState:
        tail, told = await self._watch.reading.numbers(stream_id)
        return told.state(tail.meta)

    async def snapshot(self, stream_id: str) -> Snapshot:
        tail = await self._watch.reading.known(stream_id)
        told, fold, frames = await self._watch.reading.snapshot(tail, self._bounds)
        return Snapshot(fold, frames, told.state(tail.meta))

    async def find(self, name: str) -> str | None:
        return await self._names.find(name)

    # --- letting go -------------------------------------------------------------------------------------------------

    async def trim(self, stream_id: str, acked: int, floor: int | None) -> StreamState:
        tail = await self._watch.reading.known(stream_id)
        told = await self._writing.dropping.ack(tail, acked, floor)
        tail.learn(told, asyncio.get_running_loop().time())
        return told.state(tail.meta)

    async def hold(self, stream_id: str, position: int | None) -> None:
        await self._keeping.hold(await self._watch.reading.known(stream_id), position)

    async def lowest_elsewhere(self, stream_id: str) -> int | None:
        return await self._keeping.lowest_elsewhere(stream_id)

    async def touch(self, stream_id: str) -> None:
        tail = await self._watch.reading.known(stream_id)
        # Who writes the stream sees by it that somebody asks for it, before it is abandoned.
        abandoned = tail.meta.abandon_after or TOUCH_EVERY
        now, interval = self._clock(), min(TOUCH_EVERY, tail.meta.retain / 10, abandoned / 4)
        if now - tail.noted < interval:
            return
        _, noted = await self._writing.call(
            TOUCH, tail, repr(now), repr(interval), repr(tail.meta.retain), repr(RETAIN_CAP)
        )
        tail.noted = float(noted)
        if tail.noted == now:
            await self._names.bind(tail.names, stream_id, tail.ttl)

    async def expire(self, stream_id: str) -> None:
        await self._keeping.forget(stream_id)

    async def sweep(self) -> list[str]:
        gone = await self._keeping.sweep()
        if self._listener is None:
            await self._end_orphans()
        return gone

    def retained_bytes(self) -> int:
        return self._keeping.held() if self._running else 0

    def round_trips(self) -> RoundTrips:
        return self._trips

    async def list(self, owner: str) -> Sequence[StreamState]:
        return await self._keeping.owned(owner)
