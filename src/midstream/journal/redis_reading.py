"""Taking things out of the store: a stream's numbers, pages of its records, all of it.

Numbers and records are asked for together, so that they are of one instant.  Whatever the numbers promise and the log
does not have is StoreLost, never an empty page (I4).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from midstream import rules
from midstream.codec import fold as folds
from midstream.errors import CursorAhead, JournalError, StoreLost, StoreUnavailable, UnknownStream
from midstream.journal.redis_keys import FIELDS, FIXED, Numbers, Space, decode_meta, shard_of
from midstream.journal.redis_scripts import command
from midstream.journal.redis_store import Store
from midstream.journal.redis_tail import Tail, Tails
from midstream.records import Fold, Frame, Page, within
from midstream.wire import OPEN, SLICE_FRAMES

# About what a record takes: how many are asked for where as many bytes are wanted.
_RECORD_BYTES = 160
# How often a store that lacks what it should have is asked again while its writer may be putting it back, in seconds.
_ASK_AGAIN = 0.05


class Found(NamedTuple):
    """Records after a position, without a hole, and the numbers of the same instant."""

    told: Numbers
    frames: list[Frame]


class Whole(NamedTuple):
    """A fold, records after it, and the numbers of the same instant.  Some of the records may be dropped already."""

    told: Numbers
    fold: Fold
    frames: list[Frame]


class Reading:
    """`hears` gives a number that changes when this process may have missed a change of the stream, 0 while it may."""

    def __init__(self, store: Store, space: Space, tails: Tails, hears: Callable[[Tail], int]) -> None:
        self._store = store
        self._space = space
        self._tails = tails
        self._hears = hears
        self._loop = asyncio.get_running_loop()

    async def numbers(self, stream_id: str) -> tuple[Tail, Numbers]:
        """The stream's numbers, from the store.  Raises UnknownStream, StoreLost."""
        tail = self._tails.get(stream_id)
        fields = FIELDS if tail else FIELDS + FIXED
        asked = command("HMGET", self._space.numbers(stream_id), *fields)
        told = await self._store.run(shard_of(stream_id), asked)
        numbers = await self._present(stream_id, told[: len(FIELDS)])
        if tail is None:
            meta, names = decode_meta(stream_id, *told[len(FIELDS) :])
            tail = self._tails.add(Tail(meta, names, self._space, self._store.terms))
        tail.learn(numbers, self._loop.time())
        return tail, numbers

    async def ask(self, tail: Tail) -> Numbers | None:
        """The same of a stream that may have to be brought back; None when nothing of it is there."""
        told = await self._store.run(tail.shard, command("HMGET", tail.keys.stream, *FIELDS))
        return Numbers.of(told) if any(told) else None

    async def known(self, stream_id: str) -> Tail:
        """The stream, asked for only where nothing is known of it.  Raises UnknownStream, StoreLost."""
        tail = self._tails.get(stream_id)
        if tail is None:
            tail, _ = await self.numbers(stream_id)
        else:
            self._tails.used(tail)
        return tail

    async def _present(self, stream_id: str, told: Any) -> Numbers:
        if isinstance(told, Exception):
            raise JournalError(f"the store answered: {told}")
        if told[0] is not None:
            return Numbers.of(told)
        raise await self.missing(stream_id)

    async def missing(self, stream_id: str) -> UnknownStream | StoreLost | StoreUnavailable:
        """What to say of a stream whose hash is not there: it was forgotten, or a part of it is lost.

        Where the store was replaced a moment ago neither is known: its writer may be putting it back.
        """
        shard = shard_of(stream_id)
        tail = self._tails.get(stream_id)
        if self._loop.time() - self._store.node(shard).replaced < self._store.terms.mend:
            return StoreUnavailable("the store came back without this stream; its writer may have it", 1)
        signs = await self._store.together(
            shard,
            command("EXISTS", self._space.log(stream_id)),
            command("HEXISTS", self._space.open(shard), stream_id),
        )
        if tail is None or not (tail.mine and self.replaced(tail)):  # else it is for us to bring it back
            self._tails.pop(stream_id)
        return StoreLost(f"the store has lost the numbers of {stream_id}") if any(signs) else UnknownStream()

    def replaced(self, tail: Tail) -> bool:
        """Is the store another one than when it last confirmed the stream?"""
        return tail.returned or tail.run != self._store.node(tail.shard).run_id

    @property
    def span(self) -> int:
        """How many records a tail may be expected to hold."""
        return max(SLICE_FRAMES, self._tails.allowed // _RECORD_BYTES)

    async def fetch(self, tail: Tail, after: int, span: int) -> Found:
        """Records after `after`, about `span` of them, and what they are worth to the tail.

        Raises UnknownStream; StoreLost where the next record should be there and is not.
        """
        hearing, news = self._hears(tail), tail.news
        # An entry is found by its last record, and has one record at least.
        first, last = b"%d-0" % (after + 1), b"%d-0" % (after + span + SLICE_FRAMES)
        told, entries = await self._store.together(
            tail.shard,
            command("HMGET", tail.keys.stream, *FIELDS),
            command("XRANGE", tail.keys.log, first, last, "COUNT", span),
        )
        numbers = await self._present(tail.stream_id, told)
        frames: list[Frame] = []
        if numbers.oldest <= after + 1 <= numbers.highest:
            frames = unpacked(tail.stream_id, entries, after)
            if not frames:
                raise lost(tail.stream_id, after + 1)
        self._keep(tail, after, Found(numbers, frames))
        # News that came meanwhile will be read, and waiters woken again, where somebody is at it.
        heard = hearing == self._hears(tail) and (news == tail.news or tail.stirring)
        if ((hearing and heard) or numbers.status != OPEN) and tail.highest == numbers.highest:
            tail.fresh = not tail.returned
        return Found(numbers, frames)

    def _keep(self, tail: Tail, after: int, found: Found) -> None:
        told, frames = found
        tail.learn(told, self._loop.time())
        if told.highest < tail.highest:
            return
        tail.prepend(after + 1, frames)
        if frames and after + len(frames) == told.highest:
            tail.extend(after + 1, frames)
        elif after == told.highest and not tail.frames:
            tail.stand_at(told.highest)
        if tail.highest == told.highest:
            tail.status = told.status
        tail.shrink(self._tails.allowed)

    async def page(self, tail: Tail, after: int, limit: int, max_bytes: int) -> Page:
        """A page from the store.  Raises UnknownStream, StoreLost; CursorAhead where the stream was ended, after the
        store had lost records, at a number that this process's readers already have.
        """
        span = limit
        if not tail.frames and after < tail.told_highest <= after + self.span:
            span = max(limit, self.span)  # all that is left comes along, and can be kept
        found = await self.fetch(tail, after, span)
        while self.behind(tail, found.told) and self.may_be_put_back(tail, found.told):
            await asyncio.sleep(_ASK_AGAIN)
            found = await self.fetch(tail, after, span)
        if self.behind(tail, found.told):
            self.accept(tail, found.told)
        told, frames = found.told, within(found.frames[:limit], max_bytes)
        if tail.forked >= 0:
            if told.highest > tail.forked:  # more than an end was written: the records are back
                tail.forked = -1
            elif after >= tail.forked:
                raise CursorAhead(tail.forked - 1)
        return Page(frames, after + len(frames), told.highest, told.oldest, told.status)

    def behind(self, tail: Tail, told: Numbers) -> bool:
        """Did the store come back without records that it once said were kept?"""
        return tail.returned and told.highest < tail.highest

    def may_be_put_back(self, tail: Tail, told: Numbers) -> bool:
        """May its writer still be at it?"""
        since = self._loop.time() - self._store.node(tail.shard).since
        return told.status == OPEN and since < self._store.terms.mend

    def accept(self, tail: Tail, told: Numbers) -> None:
        """They are lost.  What is there from this seq on, if anything, is the end that was written instead."""
        tail.forget_records()
        tail.forked = told.highest + (told.status == OPEN)

    async def whole(self, tail: Tail, upto: int | None = None) -> Whole:
        """The fold and the records after it: all, or at least those up to `upto`.  Raises UnknownStream, StoreLost."""
        end = b"+" if upto is None else b"%d-0" % (upto + SLICE_FRAMES)
        told, json, entries = await self._store.together(
            tail.shard,
            command("HMGET", tail.keys.stream, *FIELDS),
            command("GET", tail.keys.fold),
            command("XRANGE", tail.keys.log, "-", end),
        )
        numbers = await self._present(tail.stream_id, told)
        try:
            fold = folds.decode(json) if json else Fold()
        except (ValueError, KeyError, TypeError) as error:
            raise StoreLost(f"the fold of {tail.stream_id} cannot be read: {error}") from error
        frames = unpacked(tail.stream_id, entries, fold.upto)
        if fold.upto + len(frames) < (numbers.highest if upto is None else upto):
            raise lost(tail.stream_id, fold.upto + len(frames) + 1)
        tail.learn(numbers, self._loop.time())
        return Whole(numbers, fold, frames)

    async def snapshot(self, tail: Tail, bounds: rules.Bounds) -> Whole:
        """The fold of all before the oldest retained record, and the records from there on."""
        told, fold, frames = await self.whole(tail)
        dropped = max(told.oldest - 1 - fold.upto, 0)
        rules.fold(fold, frames[:dropped])
        rules.shed_fold(fold, bounds)
        return Whole(told, fold, frames[dropped:])


def lost(stream_id: str, seq: int) -> StoreLost:
    return StoreLost(f"the store has lost record {seq} of {stream_id}")


def unpacked(stream_id: str, entries: Sequence[Any], after: int) -> list[Frame]:
    """The records of these entries after a position.  Raises StoreLost where one is missing between them."""
    frames: list[Frame] = []
    at = after + 1
    try:
        for entry_id, (_, first_seq, _, data) in entries:
            first = int(first_seq)
            if first == at and entry_id[:-2] == first_seq:  # nearly all: one record, the next
                frames.append(data)
                at += 1
                continue
            last = int(entry_id[:-2])
            if last < at:
                continue
            part = _split(data) if first < last else [data]
            if first > at or len(part) != last - first + 1:
                raise lost(stream_id, at)
            frames += part[at - first :]
            at = last + 1
    except (ValueError, TypeError) as error:
        raise StoreLost(f"an entry of {stream_id} cannot be read: {error}") from error
    return frames


def _split(data: bytes) -> list[Frame]:
    """Frames that were joined.  A blank line stands at the end of a frame and nowhere else: JSON escapes it."""
    parts = data.split(b"\n\n")
    parts.pop()
    return [part + b"\n\n" for part in parts]
