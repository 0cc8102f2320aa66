"""Streams: open · follow · ack · cancel · state.  What every transport calls, and all it calls.

The rest of this file is what keeps streams within their promises: whose they are (I9), how many (I5), who still reads
(acks, abandonment), and a pulse, once a second or so, that serves all readers at once instead of a timer per reader.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from midstream import rules
from midstream.codec import native
from midstream.errors import ShuttingDown, StoreUnavailable, TooManyStreams, UnknownStream, WrongStream
from midstream.follow import Follow, Turn
from midstream.journal.base import Journal
from midstream.orphans import Orphans, Proceed
from midstream.records import Fold, StreamMeta, StreamState
from midstream.wire import CANCELLED, OPEN, SEND_STALL, SWEEP_EVERY, CancelReason
from midstream.writer import Producer, Starts, Writer

_log = logging.getLogger("midstream")

# A fold of many records is made in steps: one step is about 2 ms of the loop.
_FOLD_STEP = 1000
# Records that an ack lets go in one step.
_TRIM_STEP = 1000


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one process.  Times in seconds."""

    max_streams: int = 10_000
    max_streams_per_owner: int = 1_000
    heartbeat: float = 15.0
    retain: float = 600.0
    abandon_after: float | None = None


class Answer(NamedTuple):
    """The whole answer so far: every record folded, and the state of that instant."""

    fold: Fold
    state: StreamState


class Opened(NamedTuple):
    """A stream that was opened, or that stood under one of its names before."""

    state: StreamState
    existed: bool


@dataclass(slots=True)
class Totals:
    """Counts since the process started, for metrics.  Plain integers: nothing is observed on the hot path."""

    opened: int = 0
    delivered: int = 0
    resumed: dict[str, int] = field(default_factory=dict)
    stalled: int = 0


class Streams:
    """All streams of one process.

    `clock` gives seconds since 1970; `on_end` hears of each writer that stopped; `proceed` continues a stream whose
    writer's process is gone (without it such a stream is ended); `on_resume` hears how many seconds a resume took to
    its first record.
    """

    def __init__(
        self,
        journal: Journal,
        clock: Callable[[], float],
        limits: Limits | None = None,
        on_end: Callable[[Writer], None] | None = None,
        proceed: Proceed | None = None,
        on_resume: Callable[[float], None] | None = None,
    ) -> None:
        self.journal = journal
        self.orphans = Orphans(journal, proceed or _never, self._adopt)
        self.limits = limits or Limits()
        self.totals = Totals()
        self.writers: dict[str, Writer] = {}
        self.readers: dict[str, set[Follow]] = {}
        self._clock = clock
        self._on_end = on_end
        self._on_resume = on_resume
        self._open_now = 0
        self._owned: dict[str, int] = {}
        self._retrim: set[str] = set()
        self._trims: dict[str, asyncio.Future[None]] = {}
        self._turn = Turn()
        self._starts = Starts()
        self._opening: set[asyncio.Future[Opened]] = set()
        self._draining = False
        self._pulse: asyncio.Task[None] | None = None
        self._swept_at = 0.0

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the journal and begin the pulse.  Raises JournalInUse, JournalCorrupt."""
        self.journal.listen(self)
        await self.journal.open()
        try:
            await self.orphans.take_all()
        except StoreUnavailable as away:
            _log.warning("the store does not answer yet: %s", away)
        await self.orphans.settle()
        self._swept_at = self._clock()
        self._pulse = asyncio.create_task(self._beat_for_ever(), name="pulse")

    async def drain(self, seconds: float) -> None:
        """Open nothing more, let what is open end by itself for so long, then end it as `cancelled` `shutdown`."""
        self._draining = True
        await self._settle()
        if self.journal.traits.shared:
            # Others serve the same streams: readers go there at once, while what runs here runs on.
            self._interrupt_readers()
        writers = [writer.join() for writer in self.writers.values()]
        if writers:
            await asyncio.wait([asyncio.ensure_future(join) for join in writers], timeout=seconds)
        if self.journal.traits.shared:
            return  # another process takes over what is still open, once this one has given up its lease
        # All at once: one after the other each would wait for a commit of its own.
        cancels = (self._cancel(stream_id, "shutdown") for stream_id in list(self.writers))
        for error in await asyncio.gather(*cancels, return_exceptions=True):
            if isinstance(error, BaseException) and not isinstance(error, UnknownStream):
                _log.error("a stream was not ended for the shutdown", exc_info=error)

    async def _settle(self) -> None:
        """Wait for streams that are just being created or taken over: they have, or will have, a writer."""
        if self._opening:
            await asyncio.wait(list(self._opening))
        await self.orphans.settle()

    async def close(self) -> None:
        """Stop writers and readers and let go of the journal.  Streams that were not drained stay open in it."""
        self._draining = True
        await self._settle()
        if self._pulse is not None:
            self._pulse.cancel()
            await asyncio.wait([self._pulse])
        writers = list(self.writers.values())
        for writer in writers:
            writer.stop()
        for writer in writers:
            await writer.join()
        self._interrupt_readers()
        await self.journal.close()

    def _interrupt_readers(self) -> None:
        for follow in [follow for readers in self.readers.values() for follow in readers]:
            follow.interrupt()

    # --- verbs ------------------------------------------------------------------------------------------------------

    async def open(
        self,
        owner: str,
        model: str,
        produce: Callable[[], Producer],
        *,
        request: bytes = b"{}",
        names: Sequence[str] = (),
        abandon_after: float | None = None,
    ) -> Opened:
        """Begin a generation, or find the stream that has one of the names already.

        Its reader or the lack of one does not matter to it (I6), nor that the caller is cancelled meanwhile: a stream
        that was created has its writer.  Raises TooManyStreams, OutOfSpace, ShuttingDown.
        """
        opening = asyncio.ensure_future(self._open(owner, model, produce, request, names, abandon_after))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        return await asyncio.shield(opening)

    async def _open(
        self,
        owner: str,
        model: str,
        produce: Callable[[], Producer],
        request: bytes,
        names: Sequence[str],
        abandon_after: float | None,
    ) -> Opened:
        for name in names:  # A retry finds its stream even where a new one would be one too many.
            if (known := await self.journal.find(name)) is not None:
                return Opened(await self.journal.state(known), existed=True)
        self._admit(owner)
        meta = StreamMeta(
            stream_id=secrets.token_hex(16),
            owner=owner,
            model=model,
            created_at=self._clock(),
            retain=self.limits.retain,
            abandon_after=abandon_after if abandon_after is not None else self.limits.abandon_after,
            request=request,
        )
        self._count(owner, 1)
        try:
            created = await self.journal.create(meta, [native.start(meta.stream_id, model)], names)
        except BaseException:
            self._count(owner, -1)
            raise
        if created.existed:
            self._count(owner, -1)
            return Opened(created.state, existed=True)
        self.totals.opened += 1
        self._start(created.state, produce())
        return Opened(created.state, existed=False)

    def _start(self, state: StreamState, producer: Producer) -> None:
        """Write the stream here from now on.  The caller has counted it."""
        writer = Writer(self.journal, self._clock, state.meta, state.epoch, state.highest_seq + 1, producer)
        self.writers[state.meta.stream_id] = writer
        writer.start(self._ended, self._starts.wait())

    def _adopt(self, state: StreamState, producer: Producer) -> None:
        """Go on with a stream of a process that is gone, beyond the limits: it was let in once."""
        self._count(state.meta.owner, 1)
        self._start(state, producer)

    def _admit(self, owner: str) -> None:
        if self._draining:
            raise ShuttingDown("this process is shutting down; try again")
        open_now = self._open_now
        if open_now >= self.limits.max_streams:
            raise TooManyStreams(f"{open_now} streams are open here; the limit is {self.limits.max_streams}", 5)
        mine = self._owned.get(owner, 0)
        if mine >= self.limits.max_streams_per_owner:
            limit = self.limits.max_streams_per_owner
            raise TooManyStreams(f"{mine} of your streams are open here; the limit is {limit}", 5)

    def _count(self, owner: str, change: int) -> None:
        self._open_now += change
        count = self._owned.get(owner, 0) + change
        if count:
            self._owned[owner] = count
        else:
            del self._owned[owner]

    def _ended(self, writer: Writer) -> None:
        del self.writers[writer.meta.stream_id]
        self._count(writer.meta.owner, -1)
        if self._on_end is not None:
            self._on_end(writer)

    async def find(self, name: str) -> str | None:
        """The stream that has this name, if any."""
        return await self.journal.find(name)

    async def owned(self, stream_id: str, owner: str) -> StreamState:
        """The state of the owner's stream.  Raises UnknownStream for another's too (I9)."""
        state = await self.journal.state(stream_id)
        if state.meta.owner != owner:
            raise UnknownStream
        return state

    async def follow(
        self,
        stream_id: str,
        owner: str,
        after: int,
        *,
        of: str | None = None,
        abort: Callable[[], None] | None = None,
    ) -> Follow | None:
        """A reader of everything after `after`; None when that is the terminal record's position: all is read.

        `of` is the stream the position was given out for.  Checked in this order: WrongStream, UnknownStream,
        CursorExpired, CursorAhead (R5).  The caller calls `leave` when its reader has gone.
        """
        if of is not None and of != stream_id:
            raise WrongStream
        began = asyncio.get_running_loop().time()
        if self.journal.traits.shared:
            # First: an ack elsewhere must not trim what was found here a moment ago.
            lowest = self.lowest(stream_id)
            await self.journal.hold(stream_id, after if lowest is None else min(after, lowest))
        while stream_id in self._trims:
            await asyncio.wait([self._trims[stream_id]])
        state = await self.owned(stream_id, owner)
        rules.honour(state, after)
        if state.ended and after == state.highest_seq:
            self._resumed("at the end")
            return None
        if after:
            self._resumed("live" if state.status == OPEN else "replay")
        # Where it has had all there is, the first record is the model's to give, and says nothing about us.
        behind = 0 < after < state.highest_seq
        on_first = partial(self._resume_took, began) if behind and self._on_resume is not None else None
        follow = Follow(self.journal, stream_id, after, abort, self._turn, on_first)
        follow.caught_up = after == state.highest_seq
        self.readers.setdefault(stream_id, set()).add(follow)
        try:
            await self._seen(stream_id)
        except BaseException:
            self.leave(follow)
            raise
        return follow

    def _resume_took(self, began: float) -> None:
        if self._on_resume is not None:
            self._on_resume(asyncio.get_running_loop().time() - began)

    def _resumed(self, outcome: str) -> None:
        self.totals.resumed[outcome] = self.totals.resumed.get(outcome, 0) + 1

    def leave(self, follow: Follow) -> None:
        """A reader has gone; its stream goes on."""
        self.totals.delivered += follow.position - follow.first
        readers = self.readers.get(follow.stream_id)
        if readers is not None:
            readers.discard(follow)
            if not readers:
                del self.readers[follow.stream_id]
        if writer := self.writers.get(follow.stream_id):
            writer.last_seen = self._clock()

    async def ack(self, stream_id: str, owner: str, seq: int) -> StreamState:
        """Let go of what is at or below `seq` and below every connected reader (R6).  Raises CursorAhead."""
        state = await self._trim(await self.owned(stream_id, owner), seq)
        if state.trimmed_seq < state.acked_seq:
            self._retrim.add(stream_id)
        await self._seen(stream_id)
        return state

    async def _trim(self, state: StreamState, acked: int) -> StreamState:
        """Take an ack, a few milliseconds of the loop at a time; between the steps readers come and go.

        During a step none is let in: it would be measured by what is about to go.
        """
        stream_id = state.meta.stream_id
        while True:
            while stream_id in self._trims:
                await asyncio.wait([self._trims[stream_id]])
            step, lowest = state.oldest_retained_seq + _TRIM_STEP - 1, self.lowest(stream_id)
            floor = lowest if state.highest_seq <= step else min(step, lowest if lowest is not None else step)
            done = self._trims[stream_id] = asyncio.get_running_loop().create_future()
            try:
                state = await self.journal.trim(stream_id, acked, floor)
            finally:
                del self._trims[stream_id]
                done.set_result(None)
            if floor != step or state.oldest_retained_seq <= step:
                return state
            await asyncio.sleep(0)

    def lowest(self, stream_id: str) -> int | None:
        """The lowest position of any reader connected here; None without one."""
        return min((follow.position for follow in self.readers.get(stream_id, ())), default=None)

    async def cancel(self, stream_id: str, owner: str) -> StreamState:
        """End the generation as `cancelled` `client`; after the end it changes nothing."""
        await self.owned(stream_id, owner)
        return await self._cancel(stream_id, "client")

    async def _cancel(self, stream_id: str, reason: CancelReason) -> StreamState:
        writer = self.writers.get(stream_id)
        if writer is not None and writer.outcome is None:
            # Its next append is refused, and so ends it, maybe before this verb returns; it should know why.
            writer.outcome = CANCELLED
        state = await self.journal.request_cancel(stream_id, reason)
        if writer is not None:
            writer.outcome = state.status
            writer.stop()
        return state

    async def state(self, stream_id: str, owner: str) -> StreamState:
        """The state now; asking for it counts as a sign of life of the reader."""
        state = await self.owned(stream_id, owner)
        await self._seen(stream_id)
        return state

    async def answer(self, stream_id: str, owner: str) -> Answer:
        """The whole answer so far, taken at one instant."""
        await self.owned(stream_id, owner)
        fold, frames, state = await self.journal.snapshot(stream_id)
        await self._seen(stream_id)
        for at in range(0, len(frames), _FOLD_STEP):
            rules.fold(fold, frames[at : at + _FOLD_STEP])
            await asyncio.sleep(0)
        return Answer(fold, state)

    async def list(self, owner: str) -> Sequence[StreamState]:
        """The owner's streams, newest first."""
        return await self.journal.list(owner)

    async def forget(self, stream_id: str, owner: str) -> None:
        """Cancel, and drop all there is of it."""
        await self.owned(stream_id, owner)
        await self._cancel(stream_id, "client")
        await self.journal.expire(stream_id)

    async def _seen(self, stream_id: str) -> None:
        if writer := self.writers.get(stream_id):
            writer.last_seen = self._clock()
        await self.journal.touch(stream_id)

    # --- what a shared journal notices by itself (journal.base.Listener) ---------------------------------------------

    def orphaned(self, stream_id: str) -> None:
        """Somebody here waits on a stream that nobody writes any more."""
        if not self._draining:
            self.orphans.take_soon(stream_id)

    def superseded(self, stream_id: str) -> None:
        """The stream was claimed, cancelled or forgotten elsewhere, or our lease was lost: stop paying for it."""
        if writer := self.writers.get(stream_id):
            writer.stop()

    # --- the pulse --------------------------------------------------------------------------------------------------

    async def _beat_for_ever(self) -> None:
        period = min(1.0, self.limits.heartbeat / 4)
        while True:
            await asyncio.sleep(period)
            try:
                await self.pulse(period)
            except Exception:  # noqa: BLE001  # one failed beat must not stop heartbeats for everybody
                _log.exception("the pulse failed; it goes on")

    async def pulse(self, elapsed: float) -> None:
        """One beat, `elapsed` seconds after the one before: heartbeats, stalls, late trims, abandonment, the sweep."""
        for readers in list(self.readers.values()):
            for follow in list(readers):
                self._attend(follow, elapsed)
        for stream_id in list(self._retrim):
            await self._trim_again(stream_id)
        now = self._clock()
        for writer in list(self.writers.values()):
            await self._abandon(writer, now)
        if not 0 <= now - self._swept_at < SWEEP_EVERY:  # below 0: the clock was set back
            self._swept_at = now
            await self.orphans.take_all()
            gone = await self.journal.sweep()
            if gone:
                _log.debug("%d streams expired", len(gone))

    def _attend(self, follow: Follow, elapsed: float) -> None:
        if follow.position != follow.seen:
            follow.seen, follow.still = follow.position, 0.0
            return
        follow.still += elapsed
        if follow.waiting:
            if follow.still >= self.limits.heartbeat:
                follow.still = 0.0
                follow.beat()
        elif follow.still >= SEND_STALL:
            self.totals.stalled += 1
            follow.interrupt()
            if follow.abort is not None:
                follow.abort()

    async def _trim_again(self, stream_id: str) -> None:
        """Readers have moved since an ack: what it could not let go then may go now."""
        try:
            state = await self.journal.state(stream_id)
            state = await self._trim(state, state.acked_seq)
        except UnknownStream:
            self._retrim.discard(stream_id)
            return
        ended_above = state.ended and state.trimmed_seq >= state.highest_seq - 1
        if state.trimmed_seq >= state.acked_seq or ended_above:
            self._retrim.discard(stream_id)

    async def _abandon(self, writer: Writer, now: float) -> None:
        """Nobody has read, polled or asked for too long: stop paying for it (I6)."""
        stream_id, limit = writer.meta.stream_id, writer.meta.abandon_after
        if stream_id in self.readers or writer.last_seen > now:  # in the future: the clock was set back
            writer.last_seen = now
        elif limit is not None and now - writer.last_seen >= limit:
            try:
                await self._cancel(stream_id, "abandoned")
            except UnknownStream:  # forgotten meanwhile, which has stopped its writer too
                pass


async def _never(_: StreamState) -> None:
    """Without a way to continue, an orphan is ended."""
