"""Whether what stands in the SQLite journal's file fits together.

What its counters and its log say is told at start; what the records of ended streams say, when they are read.  Nothing
here makes up for what is missing: a reader would take that for the answer (I4).
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, get_args

import orjson

from midstream import rules
from midstream.codec import fold as folds
from midstream.journal.sqlite_shape import Found
from midstream.records import Fold, Frame
from midstream.wire import MAX_SEQ, OPEN, Status

_STATUSES = get_args(Status)
# What a count of bytes in memory may be of the same in the file: a record costs 41 bytes more than its 58 at least, a
# part of a fold 128 for some 14.
_RECORD_FACTOR, _FOLD_FACTOR = 2, 16
_COLUMNS = """
    SELECT tables.name, columns.name, columns.type, columns."notnull", columns.pk
    FROM sqlite_master AS tables, pragma_table_info(tables.name) AS columns
    WHERE tables.type = 'table' ORDER BY tables.name, columns.cid
"""
_STRAYS = """
    SELECT stream FROM (SELECT stream FROM counters UNION SELECT stream FROM fold UNION SELECT stream FROM segment)
    WHERE stream NOT IN (SELECT number FROM stream) LIMIT 1
"""


def check_tables(connection: sqlite3.Connection, upgrades: Iterable[str]) -> None:
    """Raises ValueError naming a table that is not as these upgrades make it."""
    model = sqlite3.connect(":memory:")
    try:
        model.executescript("".join(upgrades))
        expected, there = _columns(model), _columns(connection)
    finally:
        model.close()
    for name, columns in expected.items():
        if there.get(name) != columns:
            raise ValueError(f"its table {name!r} is not as this version makes it")


def _columns(connection: sqlite3.Connection) -> dict[str, list[Any]]:
    tables: dict[str, list[Any]] = {}
    for name, *column in connection.execute(_COLUMNS):
        tables.setdefault(name, []).append(column)
    return tables


def check_streams(connection: sqlite3.Connection, found: Sequence[Found]) -> None:
    """Raises ValueError where rows belong to no stream, or streams are told wrongly.  Their tails must be attached."""
    if stray := connection.execute(_STRAYS).fetchone():
        raise ValueError(f"stream {stray[0]} has rows, but none that says whose it is")
    (pages,), (page_size,) = (connection.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size"))
    ids = set()
    for stream in found:
        what = _fault(stream, pages * page_size)
        if what is None and stream.meta.stream_id in ids:
            what = "its id is that of another one too"
        if what is not None:
            raise ValueError(f"stream {stream.number} ({stream.meta.stream_id!r}): {what}")
        ids.add(stream.meta.stream_id)


def _fault(stream: Found, room: int) -> str | None:
    """What of a stream cannot be, in a file of so many bytes."""
    meta, counters = stream.meta, stream.counters
    texts = (meta.stream_id, meta.owner, meta.model, *stream.names)
    times = (meta.created_at, meta.retain, counters.last_access)
    seqs = (stream.filed, counters.oldest, counters.acked, counters.trimmed)
    numbers = (stream.number, counters.epoch, *seqs, counters.retained_bytes, stream.fold_bytes)
    if not all(isinstance(text, str) for text in texts) or not meta.stream_id:
        return "its id, owner, names or model is no text"
    if not all(map(_is_time, times)) or not all(
        at is None or _is_time(at) for at in (meta.abandon_after, counters.ended_at)
    ):
        return "a time of it is no number"
    if not _is_object(meta.request):
        return "its request is no JSON object"
    if counters.status not in _STATUSES or (counters.status == OPEN) != (counters.ended_at is None):
        return f"its status is {counters.status!r}, its end {counters.ended_at!r}"
    if not all(type(number) is int and 0 <= number <= MAX_SEQ for number in numbers):
        return f"a counter of it is no count: {numbers}"
    highest = stream.filed + len(stream.tail)
    if not (counters.trimmed < counters.oldest <= highest + 1 and counters.acked <= highest and highest > 0):
        return f"its counters contradict each other: {seqs}, and {len(stream.tail)} records behind them"
    held = max(counters.retained_bytes // _RECORD_FACTOR, stream.fold_bytes // _FOLD_FACTOR)
    if max(held, stream.filed - counters.oldest) > room:
        return "its counters speak of more than is in the file"
    if stream.tail and rules.status_after(stream.tail[-1]) != counters.status:
        return f"its status is {counters.status!r}, and its last record says otherwise"
    return None


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _is_object(text: object) -> bool:
    try:
        return isinstance(text, bytes) and isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


def check_records(frames: Iterable[Frame], first: int) -> None:
    """Raises ValueError naming the first of these that is not the record of its place."""
    for seq, frame in enumerate(frames, first):
        if not frame.startswith(b"id: %d\nevent: " % seq) or not (b"\ndata: {" in frame and frame.endswith(b"}\n\n")):
            raise ValueError(f"record {seq} is not what stands in its place")


def check_end(frames: Sequence[Frame], last: int, highest: int, status: Status) -> None:
    """Raises ValueError where a stream's records, up to `last`, are more or fewer than its counters say, or the newest
    one is of another status."""
    if last != highest:
        raise ValueError(f"its records go up to {last}, and should up to {highest}")
    if frames and rules.status_after(frames[-1]) != status:
        raise ValueError(f"its status is {status!r}, and its last record says otherwise")


def fold_from(row: tuple[Any, ...] | None) -> Fold:
    """The fold that a row holds.  Raises ValueError for what is none."""
    if row is None:
        return Fold()
    try:
        fold = folds.decode(row[0])
        rules.fold_bytes(fold)  # looks at all that is in it
        known = type(fold.upto) is int and 0 <= fold.upto <= MAX_SEQ
    except (ValueError, KeyError, TypeError, AttributeError):
        known = False
    if not known:
        raise ValueError("what is kept of its dropped records cannot be read")
    return fold
