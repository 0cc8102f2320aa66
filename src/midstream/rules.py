"""The laws of a stream, without I/O.  Every journal keeps them; PROTOCOL.md states them for outsiders.

R1  Sequence numbers are given out by append alone: 1, 2, 3, … with no gap.
R2  One writer, under one epoch.  A claim raises the epoch; an append under an older one is refused, not merged.
R3  An append names the number it begins at.  The last batch again, unchanged, is accepted and not written; anything
    else that is not the next number is refused, naming the expected one.
R4  Exactly one terminal record ends a stream, and nothing follows it.
R5  Position N can be honoured if N >= oldest retained, or if N is where an ack trimmed to and N + 1 is retained next.
    Above the highest nobody can have been: that is an error too.
R6  An ack never moves back.  It drops what is at or below both it and every connected reader; never the terminal.
R7  Past the bound of bytes or records the oldest are evicted.  That moves the oldest, not the trimmed position: who
    stood below has lost something and must hear it.
R8  A live reader at N is overtaken when N + 1 < oldest retained.
R9  Dropped records go into the fold; the answer stays whole as long as the stream's bytes allow.
R10 The grace period runs from the terminal record and is pushed on by access, at most RETAIN_CAP.  An open stream
    never expires.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from midstream.codec.pieces import CALL, Piece, choice_of, merge_call, pieces
from midstream.errors import CursorAhead, CursorExpired, OutOfSequence, StaleWriter, StreamEnded
from midstream.records import FRAME_OVERHEAD, Choice, Fold, Frame, Part, Record, StreamMeta, StreamState
from midstream.wire import (
    CANCELLED,
    DONE,
    FAILED,
    OPEN,
    RETAIN_CAP,
    TERMINAL,
    TOKEN,
    TOUCH_EVERY,
    Status,
)


@dataclass(slots=True)
class Counters:
    """The numbers of one stream that its laws speak of; a journal keeps one per stream."""

    status: Status = OPEN
    epoch: int = 1
    highest: int = 0
    oldest: int = 1
    acked: int = 0
    trimmed: int = 0
    retained_bytes: int = 0
    last_access: float = 0.0
    ended_at: float | None = None
    last_batch: list[Frame] = field(default_factory=list)

    def state(self, meta: StreamMeta) -> StreamState:
        return StreamState(
            meta=meta,
            status=self.status,
            epoch=self.epoch,
            highest_seq=self.highest,
            oldest_retained_seq=self.oldest,
            acked_seq=self.acked,
            trimmed_seq=self.trimmed,
            retained_bytes=self.retained_bytes,
            last_access=self.last_access,
            ended_at=self.ended_at,
        )


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a journal may hold (PROTOCOL.md, "Bounds").  Bytes are memory, overhead counted."""

    max_stream_bytes: int = 8 * 1024 * 1024
    max_stream_records: int = 100_000
    max_bytes: int = 1024 * 1024 * 1024


def event_of(frame: Frame) -> str:
    """The event of a frame, without cutting out the rest."""
    start = frame.index(b"\n") + 8
    return frame[start : frame.index(b"\n", start)].decode()


_ENDINGS: dict[str, Status] = {DONE: "done", FAILED: "failed", CANCELLED: "cancelled"}
# Stands nowhere else in a frame: the JSON behind it has no line breaks.
_TOKEN_EVENT = b"\nevent: token\n"


def status_after(frame: Frame) -> Status:
    """What a stream is once this is its newest record."""
    if frame.find(_TOKEN_EVENT) > 0:  # nearly all are
        return OPEN
    return _ENDINGS.get(event_of(frame), OPEN)


def admit(counters: Counters, frames: list[Frame], epoch: int, first_seq: int) -> bool:
    """May this batch be appended?  False: it is the last one again, already written (R3).

    Raises StaleWriter, StreamEnded, OutOfSequence (R2, R4, R3, checked in this order).
    """
    if epoch != counters.epoch:
        raise StaleWriter(counters.epoch)
    expected = counters.highest + 1
    if first_seq == expected and counters.status == OPEN:
        return True
    if frames and first_seq + len(frames) == expected and frames == counters.last_batch:
        return False
    if counters.status != OPEN:
        raise StreamEnded(f"the stream is {counters.status}")
    raise OutOfSequence(expected, first_seq)


def appended(counters: Counters, frames: list[Frame], now: float) -> int:
    """Count an admitted batch in, and return its bytes of memory."""
    last, count = frames[-1], len(frames)
    size = len(last) + FRAME_OVERHEAD if count == 1 else weight(frames)
    counters.highest += count
    counters.retained_bytes += size
    counters.last_batch = frames
    if (status := status_after(last)) != OPEN:
        counters.status = status
        counters.ended_at = counters.last_access = now
    return size


def append(counters: Counters, frames: list[Frame], epoch: int, first_seq: int, clock: Callable[[], float]) -> int:
    """`admit`, and then `appended`: returns the bytes of memory, 0 where the batch is already written."""
    # What nearly every batch is, one token and the next one, is told here: the calls saved are a third of its cost.
    in_turn = first_seq == counters.highest + 1 and epoch == counters.epoch and counters.status == OPEN
    if not (in_turn or admit(counters, frames, epoch, first_seq)):
        return 0
    if len(frames) > 1 or frames[0].find(_TOKEN_EVENT) < 0:
        return appended(counters, frames, clock())
    size = len(frames[0]) + FRAME_OVERHEAD
    counters.highest = first_seq
    counters.retained_bytes += size
    counters.last_batch = frames
    return size


def weight(frames: Sequence[Frame]) -> int:
    """Bytes of memory these frames hold."""
    return sum(map(len, frames)) + FRAME_OVERHEAD * len(frames)


def honour(state: StreamState | Counters, position: int) -> None:
    """May a reader go on from here (R5)?  Raises CursorExpired, then CursorAhead."""
    if isinstance(state, StreamState):
        oldest, trimmed, highest = state.oldest_retained_seq, state.trimmed_seq, state.highest_seq
    else:
        oldest, trimmed, highest = state.oldest, state.trimmed, state.highest
    if position < oldest and not (position == trimmed and oldest == position + 1):
        raise CursorExpired(oldest)
    if position > highest:
        raise CursorAhead(highest)


def honoured(state: StreamState) -> tuple[int, int]:
    """The lowest and the highest position that `honour` lets pass."""
    by_ack = state.oldest_retained_seq == state.trimmed_seq + 1
    return state.trimmed_seq if by_ack else state.oldest_retained_seq, state.highest_seq


def overtaken(position: int, oldest: int) -> bool:
    """Has a live reader lost a record it has not been given (R8)?"""
    return position + 1 < oldest


def ack(counters: Counters, seq: int) -> None:
    """Take a reader's confirmation (R6).  Raises CursorAhead above the highest seq."""
    if seq > counters.highest:
        raise CursorAhead(counters.highest)
    counters.acked = max(counters.acked, seq)


def trimmable(counters: Counters, floor: int | None) -> int:
    """Up to which seq an ack lets records go, given the lowest position of any connected reader (R6).

    The caller drops records up to there and then calls `dropped`; below `oldest` there is nothing to drop.
    """
    upto = counters.acked if floor is None else min(counters.acked, floor)
    return min(upto, counters.highest - 1) if counters.status != OPEN else upto


def evictable(counters: Counters, bounds: Bounds, sizes: Iterable[int], extra: int = 0) -> int:
    """How many of the oldest records must go (R7).  `sizes` are their bytes, oldest first; the newest always stays.

    `extra` is what the stream holds besides records: its fold.
    """
    held = counters.highest - counters.oldest + 1
    excess_records = held - bounds.max_stream_records
    excess_bytes = counters.retained_bytes + extra - bounds.max_stream_bytes
    gone = 0
    for size in sizes:
        if (gone >= excess_records and excess_bytes <= 0) or gone >= held - 1:
            break
        gone += 1
        excess_bytes -= size
    return gone


def dropped(counters: Counters, frames: list[Frame], *, by_ack: bool) -> None:
    """Count the oldest records out."""
    counters.oldest += len(frames)
    counters.retained_bytes -= weight(frames)
    if by_ack:
        counters.trimmed = counters.oldest - 1


def touch_due(counters: Counters, retain: float, now: float) -> bool:
    """Should this access be written down (R10)?  Short grace periods are pushed on more often than once a minute."""
    return now - counters.last_access >= min(TOUCH_EVERY, retain / 10)


def set_back(counters: Counters, now: float) -> None:
    """Times in the future are of a clock that was set back since: what is kept until then would be kept too long."""
    counters.last_access = min(counters.last_access, now)
    if counters.ended_at is not None:
        counters.ended_at = min(counters.ended_at, now)


def expired(counters: Counters, retain: float, believed: Callable[[float], float]) -> bool:
    """Is an ended stream to be forgotten (R10)?  `believed` gives the time by which to judge a term (see `Clock`)."""
    if counters.ended_at is None:
        return False
    unread = counters.last_access + retain <= believed(retain)
    return unread or counters.ended_at + RETAIN_CAP <= believed(RETAIN_CAP)


# --- the fold (R9) ---------------------------------------------------------------------------------------------------


def fold(into: Fold, frames: Iterable[Frame]) -> None:
    """Add records, in order, to what is kept of the dropped ones.  Records folded before are passed over."""
    for frame in frames:
        record = Record.of(frame)
        if record.seq <= into.upto:
            continue
        if record.event == TOKEN and into.complete:
            _fold_token(into, record.json())
        elif record.event in TERMINAL:
            _fold_end(into, record)
        into.upto = record.seq


def _fold_token(into: Fold, data: dict[str, Any]) -> None:
    index = choice_of(data)
    choice = into.choices.get(index)
    if choice is None:
        choice = into.choices[index] = Choice()
    for piece in pieces(data):
        _fold_piece(into.parts if index == 0 else None, choice, piece)
    if finish := data.get("finish_reason"):
        choice.finish_reason = finish
    if src := data.get("src"):
        into.src = src


def _fold_piece(parts: list[Part] | None, choice: Choice, piece: Piece) -> None:
    """`parts` are the first choice's; those of others are not told apart: Responses, which needs it, has none."""
    if piece.kind == CALL:
        known = len(choice.tool_calls)
        if merge_call(choice.tool_calls, piece) == known and parts is not None:
            parts.append(Part(CALL))
        return
    text = piece.text.encode()
    logprobs = b"".join(b"," + orjson.dumps(entry) for entry in piece.logprobs)
    getattr(choice, piece.kind).extend(text)
    choice.logprobs += logprobs
    if parts is not None:
        if not parts or parts[-1].kind != piece.kind:
            parts.append(Part(piece.kind))
        part = parts[-1]
        part.deltas += 1
        part.size += len(text)
        part.logprobs += len(logprobs)


def _fold_end(into: Fold, record: Record) -> None:
    data = record.json()
    into.error, into.usage = data.get("error"), data.get("usage")
    if finish := data.get("finish_reason"):
        into.choices.setdefault(0, Choice()).finish_reason = finish


def fold_bytes(kept: Fold) -> int:
    """Bytes of memory the fold holds, about: texts exactly, 256 per choice and per tool call, 128 per part."""
    total = 128 * len(kept.parts)
    for choice in kept.choices.values():
        total += 256 + len(choice.text) + len(choice.reasoning) + len(choice.refusal) + len(choice.logprobs)
        total += sum(256 + len(call.arguments) + len(call.name) + len(call.id) for call in choice.tool_calls)
        total += sum(len(orjson.dumps(call.more)) for call in choice.tool_calls if call.more)
    return total


def shed_fold(kept: Fold, bounds: Bounds) -> None:
    """Let the fold's texts go when they alone take half of the stream's bytes; `complete` then says so."""
    if kept.complete and fold_bytes(kept) > bounds.max_stream_bytes // 2:
        kept.complete = False
        kept.choices.clear()
        kept.parts.clear()
