"""Streams: open · follow · ack · cancel · state.  What every transport calls, and all it calls.

Beside it stands what keeps streams within their promises: how many there are (`admission`), what acks let go (`acks`),
whose writer is gone (`orphans`), which nobody asks for any more (`abandonment`), and the `pulse`.
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
from midstream.abandonment import Abandonment
from midstream.acks import Acks
from midstream.admission import Admission, Limits
from midstream.codec import native
from midstream.errors import StoreUnavailable, UnknownStream, WrongStream
from midstream.follow import Follow, Turn
from midstream.journal.base import Journal
from midstream.orphans import Orphans, Proceed
from midstream.pulse import Pulse, attend
from midstream.records import Fold, Frame, Producer, StreamMeta, StreamState
from midstream.turns import in_steps
from midstream.wire import CANCELLED, OPEN, SWEEP_EVERY, CancelReason
from midstream.writer import Starts, Writer

_log = logging.getLogger("midstream")

# A fold of many records is made in steps: one step is about 2 ms of the loop.
_FOLD_STEP = 1000


class Kept(NamedTuple):
    """All that is kept of a stream at one instant: the fold of what was dropped, and the records after it."""

    dropped: Fold
    frames: list[Frame]
    state: StreamState


class Answer(NamedTuple):
    """The whole answer so far: every record folded, the state of that instant, and the records that are retained."""

    fold: Fold
    state: StreamState
    frames: Sequence[Frame] = ()


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
        self._admission = Admission(self.limits)
        self._acks = Acks(journal, self.lowest)
        self._abandonment = Abandonment(journal, clock, self.readers.__contains__, self._cancel)
        self._turn = Turn()
        self._starts = Starts()
        self._opening: set[asyncio.Future[Opened]] = set()
        self._pulse = Pulse(self.pulse, min(1.0, self.limits.heartbeat / 4))
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
        self._pulse.start()

    async def drain(self, seconds: float) -> None:
        """Open nothing more, let what is open end by itself for so long, then end it as `cancelled` `shutdown`."""
        self._admission.closed = True
        await self._settle()
        if self.journal.traits.shared:
            # Others serve the same streams: readers go there at once, while what runs here runs on.
            self._interrupt_readers()
            for writer in self.writers.values():
                writer.heard.set()  # who waits for an upstream's status is answered now, and told where to go on
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
        self._admission.closed = True
        await self._settle()
        await self._pulse.stop()
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
        produce: Callable[[str], Producer],
        *,
        request: bytes = b"{}",
        names: Sequence[str] = (),
        abandon_after: float | None = None,
    ) -> Opened:
        """Begin a generation, or find the stream that has one of the names already.

        `produce` is given the stream's id.  Its reader or the lack of one does not matter to the stream (I6), nor that
        the caller is cancelled meanwhile: a stream that was created has its writer.  Raises TooManyStreams, OutOfSpace,
        ShuttingDown.
        """
        begun = self._open(owner, model, produce, request, names, abandon_after)
        if not self.journal.traits.durable:
            return await begun  # nothing in it suspends: nobody can be cancelled meanwhile
        opening = asyncio.ensure_future(begun)
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        return await asyncio.shield(opening)

    async def _open(
        self,
        owner: str,
        model: str,
        produce: Callable[[str], Producer],
        request: bytes,
        names: Sequence[str],
        abandon_after: float | None,
    ) -> Opened:
        for name in names:  # A retry finds its stream even where a new one would be one too many.
            if (known := await self.journal.find(name)) is not None:
                return Opened(await self.journal.state(known), existed=True)
        self._admission.check(owner)
        meta = StreamMeta(
            stream_id=secrets.token_hex(16),
            owner=owner,
            model=model,
            created_at=self._clock(),
            retain=self.limits.retain,
            abandon_after=abandon_after if abandon_after is not None else self.limits.abandon_after,
            request=request,
        )
        self._admission.enter(owner)
        try:
            created = await self.journal.create(meta, [native.start(meta.stream_id, model)], names)
        except BaseException:
            self._admission.leave(owner)
            raise
        if created.existed:
            self._admission.leave(owner)
            return Opened(created.state, existed=True)
        self.totals.opened += 1
        self._start(created.state, produce(meta.stream_id))
        return Opened(created.state, existed=False)

    def _start(self, state: StreamState, producer: Producer) -> None:
        """Write the stream here from now on.  The caller has counted it."""
        patience = self.limits.store_patience
        writer = Writer(self.journal, self._clock, state.meta, state.epoch, state.highest_seq + 1, producer, patience)
        self.writers[state.meta.stream_id] = writer
        self._starts.add(partial(writer.start, self._ended))

    def _adopt(self, state: StreamState, producer: Producer) -> None:
        """Go on with a stream of a process that is gone, beyond the limits: it was let in once."""
        self._admission.enter(state.meta.owner)
        self._start(state, producer)
        # Its readers have lost their gateway, and have yet to come.
        self.writers[state.meta.stream_id].last_seen = self._clock()

    def _ended(self, writer: Writer) -> None:
        del self.writers[writer.meta.stream_id]
        self._admission.leave(writer.meta.owner)
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
        CursorExpired, CursorAhead (R5); then StoreLost where what follows the position is not there.  The caller calls
        `leave` when its reader has gone.
        """
        if of is not None and of != stream_id:
            raise WrongStream
        began = asyncio.get_running_loop().time()
        if self.journal.traits.shared:
            # First: an ack elsewhere must not trim what was found here a moment ago.
            lowest = self.lowest(stream_id)
            await self.journal.hold(stream_id, after if lowest is None else min(after, lowest))
        if self._acks.under_way:
            await self._acks.between_steps(stream_id)
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
            if after < state.highest_seq:
                await follow.look_ahead()
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
        state = await self._acks.take(await self.owned(stream_id, owner), seq)
        await self._seen(stream_id)
        return state

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

    async def kept(self, stream_id: str, owner: str) -> Kept:
        """What is left of dropped records, and the others as they are."""
        await self.owned(stream_id, owner)
        fold, frames, state = await self.journal.snapshot(stream_id)
        await self._seen(stream_id)
        return Kept(fold, frames, state)

    async def answer(self, stream_id: str, owner: str) -> Answer:
        """The whole answer so far, taken at one instant."""
        fold, frames, state = await self.kept(stream_id, owner)
        async for some in in_steps(frames, _FOLD_STEP):
            rules.fold(fold, some)
        return Answer(fold, state, frames)

    async def heard(self, stream_id: str, seconds: float) -> None:
        """Wait until the stream's source has accepted the request, or has said or ended something; at most so long.

        Where another process writes it, only what is journaled can be known.
        """
        writer = self.writers.get(stream_id)
        try:
            async with asyncio.timeout(seconds):
                await (writer.heard.wait() if writer is not None else self.journal.wait(stream_id, 1))
        except TimeoutError:
            pass

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
        if not self._admission.closed:
            self.orphans.take_soon(stream_id)

    def superseded(self, stream_id: str) -> None:
        """The stream was claimed, cancelled or forgotten elsewhere, or our lease was lost: stop paying for it."""
        if writer := self.writers.get(stream_id):
            writer.stop()

    # --- the pulse --------------------------------------------------------------------------------------------------

    async def pulse(self, elapsed: float) -> None:
        """One beat, `elapsed` seconds after the one before: heartbeats, stalls, late trims, abandonment, the sweep."""
        for readers in list(self.readers.values()):
            self.totals.stalled += attend(list(readers), elapsed, self.limits.heartbeat)
        await self._acks.again()
        await self._abandonment.look(list(self.writers.values()))
        now = self._clock()
        if not 0 <= now - self._swept_at < SWEEP_EVERY:  # below 0: the clock was set back
            self._swept_at = now
            await self.orphans.take_all()
            if gone := await self.journal.sweep():
                _log.debug("%d streams expired", len(gone))


async def _never(_: StreamState) -> None:
    """Without a way to continue, an orphan is ended."""
