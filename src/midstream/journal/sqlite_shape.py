"""What stands in the SQLite journal's file, and how streams and records become rows and come back.

    stream    what never changes of a stream
    counters  its numbers, rewritten when they change otherwise than by an append
    fold      what is left of dropped records, and up to where
    segment   records, joined, some hundreds to a row
    log       records not yet in a segment: one row per commit, for all streams together

A commit so costs one row at the end of one table, however many streams wrote something.  The log is kept short, by
moving what it holds into segments, and is read only at start.  A stream's records are those of its segments in order,
then those of the log; the first of them may have been dropped already: the fold's `upto` and the counters tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from midstream.records import Frame, StreamMeta
from midstream.rules import Counters
from midstream.wire import SLICE_FRAMES

APPLICATION_ID = 0x4D494453  # "MIDS": marks the file as ours (https://sqlite.org/pragma.html#pragma_application_id)

# UPGRADES[n] brings a file of version n to n + 1; user_version is the version.
UPGRADES: tuple[str, ...] = (
    """
    CREATE TABLE stream (
        number INTEGER PRIMARY KEY,
        id TEXT NOT NULL,
        owner TEXT NOT NULL,
        names TEXT NOT NULL,
        model TEXT NOT NULL,
        created_at REAL NOT NULL,
        retain REAL NOT NULL,
        abandon_after REAL,
        request BLOB NOT NULL
    );
    CREATE TABLE counters (
        stream INTEGER PRIMARY KEY,
        status TEXT NOT NULL,
        epoch INTEGER NOT NULL,
        filed INTEGER NOT NULL,
        oldest INTEGER NOT NULL,
        acked INTEGER NOT NULL,
        trimmed INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        fold_bytes INTEGER NOT NULL,
        last_access REAL NOT NULL,
        ended_at REAL
    );
    CREATE TABLE fold (stream INTEGER PRIMARY KEY, json BLOB NOT NULL);
    CREATE TABLE segment (
        stream INTEGER NOT NULL,
        first INTEGER NOT NULL,
        frames BLOB NOT NULL,
        PRIMARY KEY (stream, first)
    );
    CREATE TABLE log (entries TEXT NOT NULL, frames BLOB NOT NULL);
    """,
)

STREAMS = """
    SELECT number, id, owner, names, model, created_at, retain, abandon_after, request,
           status, epoch, filed, oldest, acked, trimmed, bytes, fold_bytes, last_access, ended_at
    FROM stream LEFT JOIN counters ON counters.stream = stream.number ORDER BY number
"""


@dataclass(slots=True)
class Found:
    """A stream as it stands in the file: `tail` is what the log holds of it, after seq `filed`.

    The counters are of before the tail.
    """

    number: int
    meta: StreamMeta
    names: tuple[str, ...]
    counters: Counters
    filed: int
    fold_bytes: int
    tail: list[Frame] = field(default_factory=list)


def split(blob: bytes) -> list[Frame]:
    """Frames that were joined.  A blank line stands at the end of a frame and nowhere else: JSON escapes it.

    Raises ValueError for what is no such thing.
    """
    parts = blob.split(b"\n\n") if isinstance(blob, bytes) else [b"?"]
    if parts.pop():
        raise ValueError("records of it are cut off")
    return [part + b"\n\n" for part in parts]


def cut(number: int, first: int, frames: list[Frame]) -> Iterator[tuple[int, int, bytes]]:
    """The segments that hold these consecutive records."""
    for at in range(0, len(frames), SLICE_FRAMES):
        yield number, first + at, b"".join(frames[at : at + SLICE_FRAMES])


def stream_row(number: int, meta: StreamMeta, names: Iterable[str]) -> tuple[Any, ...]:
    return (
        number,
        meta.stream_id,
        meta.owner,
        orjson.dumps(list(names)).decode(),
        meta.model,
        meta.created_at,
        meta.retain,
        meta.abandon_after,
        meta.request,
    )


def counters_row(number: int, counters: Counters, filed: int, fold_bytes: int) -> tuple[Any, ...]:
    """A stream's numbers.  `retained_bytes` must be those of records up to `filed`: what the log holds is added when it
    is read.
    """
    return (
        number,
        counters.status,
        counters.epoch,
        filed,
        counters.oldest,
        counters.acked,
        counters.trimmed,
        counters.retained_bytes,
        fold_bytes,
        counters.last_access,
        counters.ended_at,
    )


def found_from(row: tuple[Any, ...]) -> Found:
    """What a row of STREAMS tells.  Raises ValueError where it cannot even be taken apart."""
    number, stream_id, owner, names, model, created_at, retain, abandon_after, request = row[:9]
    status, epoch, filed, oldest, acked, trimmed, retained_bytes, fold_bytes, last_access, ended_at = row[9:]
    if not isinstance(filed, int):
        raise ValueError(f"stream {number}: its counters are missing, or are no counts")
    try:
        listed = orjson.loads(names)
    except orjson.JSONDecodeError:
        listed = None
    if not isinstance(listed, list):
        raise ValueError(f"stream {number}: its names are no list")
    return Found(
        number=number,
        meta=StreamMeta(stream_id, owner, model, created_at, retain, abandon_after, request),
        names=tuple(listed),
        counters=Counters(
            status=status,
            epoch=epoch,
            highest=filed,
            oldest=oldest,
            acked=acked,
            trimmed=trimmed,
            retained_bytes=retained_bytes,
            last_access=last_access,
            ended_at=ended_at,
        ),
        filed=filed,
        fold_bytes=fold_bytes,
    )
