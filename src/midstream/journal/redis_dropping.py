"""Letting records go: acks and eviction, and the fold that keeps their sum (R6, R7, R9).

The store counts a record out at once; its entry stays in the log until enough has come together, and then goes in the
same step in which the fold that has it is written.  So nothing is ever in neither, and an answer of thousands of tokens
is not written anew for each ack.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple, Protocol

from midstream import rules
from midstream.codec import fold as folds
from midstream.errors import CursorAhead
from midstream.journal.redis_keys import Numbers
from midstream.journal.redis_reading import Reading
from midstream.journal.redis_scripts import ACK, DROP, Code, Script
from midstream.journal.redis_tail import Tail
from midstream.records import FRAME_OVERHEAD, Fold, Frame
from midstream.rules import Bounds, Counters
from midstream.wire import SLICE_FRAMES

# Dropped records stay in the log until they come to this much, or to the size of the fold, which is written whole.
LOOSE_BYTES = 64 * 1024


class Call(Protocol):
    """Runs a script about a stream; its reply, if that is no refusal that every script may give."""

    async def __call__(self, script: Script, tail: Tail, *args: bytes | str | int) -> list[Any]: ...


class _Front(NamedTuple):
    """The fold of everything before `told.oldest`, and the records from there on, some of them."""

    told: Numbers
    fold: Fold
    frames: list[Frame]


class Dropping:
    """One stream's records are dropped by one at a time in this process; other processes are met in the store."""

    def __init__(self, reading: Reading, bounds: Bounds, call: Call, totals: list[int]) -> None:
        self._reading = reading
        self._bounds = bounds
        self._call = call
        self._totals = totals

    async def ack(self, tail: Tail, acked: int, floor: int | None) -> Numbers:
        """Take an ack, and drop what it lets go.  Raises CursorAhead."""
        async with tail.lock:
            while True:
                code, told, *more = await self._call(ACK, tail, acked, "" if floor is None else floor)
                if code == Code.AHEAD:
                    raise CursorAhead(told)
                numbers, upto = Numbers.of(told), int(more[0])
                if upto < numbers.oldest:
                    return numbers
                front = await self._front(tail, numbers, upto)
                frames = front.frames[: max(upto - front.told.oldest + 1, 0)]
                if frames:
                    rules.fold(front.fold, frames)
                    rules.shed_fold(front.fold, self._bounds)
                    dropped = await self._drop(tail, front, frames, by_ack=True)
                    if dropped and dropped.oldest > upto:
                        return dropped

    async def evict(self, tail: Tail) -> None:
        """Drop the oldest records, as many as are over the stream's bounds."""
        async with tail.lock:
            _, told = await self._reading.numbers(tail.stream_id)
            while self.over(told.held + told.fold, told.highest - told.oldest + 1):
                upto = min(told.oldest + SLICE_FRAMES - 1, told.highest)
                front = await self._front(tail, told, upto)
                frames = self._excess(front)
                if not frames:
                    return
                dropped = await self._drop(tail, front, frames, by_ack=False)
                told = dropped or (await self._reading.numbers(tail.stream_id))[1]

    def over(self, size: int, records: int) -> bool:
        """Is a stream with so many bytes, in records and fold, past its bounds?"""
        return size > self._bounds.max_stream_bytes or records > self._bounds.max_stream_records

    def _excess(self, front: _Front) -> list[Frame]:
        """The records that must go, already in the fold.  Again until it fits: their texts stay there, and count."""
        told, fold, frames = front
        counters = Counters(highest=told.highest, oldest=told.oldest, retained_bytes=told.held)
        gone = 0
        while True:
            sizes = (len(frame) + FRAME_OVERHEAD for frame in frames[gone:])
            count = rules.evictable(counters, self._bounds, sizes, rules.fold_bytes(fold))
            if not count:
                return frames[:gone]
            part = frames[gone : gone + count]
            rules.fold(fold, part)
            rules.shed_fold(fold, self._bounds)
            rules.dropped(counters, part, by_ack=False)
            gone += count

    async def _front(self, tail: Tail, told: Numbers, upto: int) -> _Front:
        """What is before the oldest record, folded, and the records from there to `upto`."""
        fold = tail.dropped
        if fold is not None and fold.upto == told.oldest - 1:
            if frames := tail.records(told.oldest, upto):
                return _Front(told, fold, frames)
            first, read = tail.front
            if first <= told.oldest and (frames := read[told.oldest - first : upto + 1 - first]):
                tail.front = (told.oldest, read[told.oldest - first :])
                return _Front(told, fold, frames)
        return await self._read_front(tail, upto)

    async def _read_front(self, tail: Tail, upto: int) -> _Front:
        told, fold, frames = await self._reading.whole(tail, upto)
        loose = frames[: max(told.oldest - 1 - fold.upto, 0)]
        frames = frames[len(loose) :]
        tail.loose = rules.weight(loose)
        rules.fold(fold, loose)
        rules.shed_fold(fold, self._bounds)
        fold.upto = told.oldest - 1
        tail.dropped, tail.front = fold, (told.oldest, frames)
        return _Front(told, fold, frames)

    async def _drop(self, tail: Tail, front: _Front, frames: list[Frame], *, by_ack: bool) -> Numbers | None:
        """Count these records out, whose sum is in the fold.  None: somebody else has dropped some, look again."""
        told, fold, _ = front
        tail.dropped = None  # until the store has said that it is as we think
        weight, size = rules.weight(frames), rules.fold_bytes(fold)
        loose = tail.loose + weight
        whole = loose >= max(LOOSE_BYTES, size)
        code, now, *more = await self._call(
            DROP,
            tail,
            told.oldest,
            told.oldest + len(frames),
            int(by_ack),
            weight,
            size,
            folds.encode(fold) if whole else b"",
        )
        if code == Code.CHANGED:
            return None
        numbers = Numbers.of(now)
        self._totals[tail.shard] = more[0]
        tail.dropped, tail.loose = fold, 0 if whole else loose
        tail.learn(numbers, asyncio.get_running_loop().time())
        return numbers
