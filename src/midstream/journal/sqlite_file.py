"""The file of the SQLite journal: its lock, and what is written and read in one step.

`sqlite_shape` says what is in it.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import orjson

from midstream import rules
from midstream.codec import fold as folds
from midstream.errors import JournalCorrupt, JournalError, JournalInUse, StoreLost
from midstream.journal.sqlite_shape import APPLICATION_ID, STREAMS, UPGRADES, Found, found_from, split
from midstream.records import Fold, Frame, within

# A file up to this size is checked page by page at start; that takes about 0.1 s.
CHECK_BYTES = 32 * 1024 * 1024
# Free pages that stay in the file, since the log soon uses them again, and how many go back to the disk in one step.
SPARE_PAGES, SHRINK_PAGES = 4096, 1024
# sqlite3 lets go of the interpreter around each statement, and under load takes long to get it back.  So rows go in
# many to a statement.
_ROWS_PER_INSERT = 32


@dataclass(slots=True)
class Batch:
    """What one commit writes.

    `entries` says whose the `frames` are: number, first seq and count for each stream in turn.  `folds` are number, the
    fold's `upto` and its JSON.  `files` empties the log: all that it holds is in the `segments` given here.
    """

    entries: list[int] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)
    streams: list[tuple[Any, ...]] = field(default_factory=list)
    counters: list[tuple[Any, ...]] = field(default_factory=list)
    folds: list[tuple[int, int, bytes]] = field(default_factory=list)
    segments: list[tuple[int, int, bytes]] = field(default_factory=list)
    files: bool = False

    def only_appends(self) -> bool:
        return not (self.forgotten or self.streams or self.counters or self.folds or self.files)


def _lock(path: str) -> int:
    """Hold the file for as long as this process lives or the descriptor is open.  Raises JournalInUse."""
    # Two names of one file must meet at one lock.
    descriptor = os.open(os.path.realpath(path) + ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        told = os.read(descriptor, 20)
        os.close(descriptor)
        pid = int(told) if told.isdigit() else 0
        holder = f"process {pid}" if pid else "another process"  # one that has just begun, or is no Midstream
        raise JournalInUse(
            f"{path} is in use by {holder}; stop that one or give this one another journal", path=path, pid=pid
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, b"%d" % os.getpid())
    return descriptor


class File:
    """The writing side.  After `open` every method belongs to one thread."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = -1
        self._connection: sqlite3.Connection

    def open(self) -> None:
        """Take the lock and make the file ready.  Raises JournalInUse, JournalCorrupt, JournalError."""
        try:
            self._lock = _lock(self._path)
            # SQLite gives its -wal and -shm the mode of the file.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
            self._connection = sqlite3.connect(self._path, isolation_level=None)
            self._prepare()
        except OSError as error:
            raise JournalError(f"{self._path} cannot be opened: {error.strerror}", path=self._path) from error
        except sqlite3.DatabaseError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: sqlite3.DatabaseError) -> JournalError:
        if isinstance(error, sqlite3.OperationalError):
            return JournalError(f"{self._path} cannot be opened: {error}", path=self._path)
        return JournalCorrupt(f"{self._path} is not a journal, or damaged: {error}", path=self._path)

    def _prepare(self) -> None:
        connection = self._connection
        version = self._version()
        if os.stat(self._path).st_mode & 0o077:
            os.chmod(self._path, 0o600)
        if version == 0:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise JournalError(f"{self._path} is on a file system that cannot hold a WAL", path=self._path)
        # FULL: a commit returns when the disk has it (I1).  The WAL is moved into the file each 1,000 pages, which is
        # SQLite's default; this is what it keeps of the space that a larger transaction took.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA secure_delete = FAST")
        connection.execute("PRAGMA journal_size_limit = 8388608")
        self._check()
        if version < len(UPGRADES):
            steps = "".join(UPGRADES[version:])
            connection.executescript(
                f"BEGIN IMMEDIATE; {steps} PRAGMA application_id = {APPLICATION_ID}; "
                f"PRAGMA user_version = {len(UPGRADES)}; COMMIT"
            )

    def _check(self) -> None:
        if os.path.getsize(self._path) <= CHECK_BYTES:
            (verdict,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise JournalCorrupt(f"{self._path} is damaged: {verdict}", path=self._path)

    def _version(self) -> int:
        """The version of the file, 0 for an empty one.  Nothing is written to a file that is not ours."""
        (application,) = self._connection.execute("PRAGMA application_id").fetchone()
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        (tables,) = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables and application != APPLICATION_ID:
            raise JournalCorrupt(f"{self._path} is a database of another program", path=self._path)
        if version > len(UPGRADES):
            raise JournalCorrupt(
                f"{self._path} was written by a newer Midstream (version {version} of the file, this one knows "
                f"{len(UPGRADES)}); run that one or give this one another journal",
                path=self._path,
                version=version,
            )
        return int(version) if tables else 0

    def streams(self) -> list[Found]:
        """Every stream in the file.  Raises JournalCorrupt where its parts do not fit together."""
        try:
            found = {row[0]: found_from(row) for row in self._connection.execute(STREAMS)}
            for entries, frames in self._connection.execute("SELECT entries, frames FROM log ORDER BY rowid"):
                self._attach(found, orjson.loads(entries), split(frames))
        except (sqlite3.DatabaseError, ValueError, TypeError) as error:
            raise JournalCorrupt(f"{self._path} is damaged: {error}", path=self._path) from error
        return list(found.values())

    def _attach(self, found: dict[int, Found], entries: list[int], frames: list[Frame]) -> None:
        if sum(entries[2::3]) != len(frames):
            raise JournalCorrupt(f"{self._path} is damaged: a row of its log is not whole", path=self._path)
        at = 0
        for number, first, count in zip(*[iter(entries)] * 3, strict=True):
            if stream := found.get(number):  # a row of the log may also hold records of a stream forgotten since
                expected = stream.filed + len(stream.tail) + 1
                if first != expected:
                    raise JournalCorrupt(
                        f"{self._path} is damaged: {stream.meta.stream_id} lacks {expected}", path=self._path
                    )
                stream.tail += frames[at : at + count]
            at += count

    def write(self, batch: Batch) -> None:
        """Commit the batch, all of it or nothing.  Raises sqlite3.Error."""
        if batch.only_appends():
            if batch.entries:
                self._append(batch)
            return
        with self._transaction():
            if batch.files:
                self._connection.execute("DELETE FROM log")
            if batch.entries:
                self._append(batch)
            self._insert("INSERT INTO stream VALUES ", batch.streams)
            self._insert("REPLACE INTO counters VALUES ", batch.counters)
            self._insert("INSERT INTO segment VALUES ", batch.segments)
            for number, upto, fold in batch.folds:
                self._fold(number, upto, fold)
            for number in batch.forgotten:
                for statement in _FORGET:
                    self._connection.execute(statement, (number,))

    def _append(self, batch: Batch) -> None:
        self._connection.execute(
            "INSERT INTO log VALUES (?, ?)", (orjson.dumps(batch.entries).decode(), b"".join(batch.frames))
        )

    def _insert(self, head: str, rows: Sequence[tuple[Any, ...]]) -> None:
        for at in range(0, len(rows), _ROWS_PER_INSERT):
            some = rows[at : at + _ROWS_PER_INSERT]
            row = "(" + ",".join("?" * len(some[0])) + ")"
            self._connection.execute(head + ",".join([row] * len(some)), list(chain.from_iterable(some)))

    def _fold(self, number: int, upto: int, fold: bytes) -> None:
        """Keep the fold, and let go of the segments that lie wholly in it."""
        self._connection.execute("REPLACE INTO fold VALUES (?, ?)", (number, fold))
        self._connection.execute(
            "DELETE FROM segment WHERE stream = ?1 AND first < "
            "(SELECT max(first) FROM segment WHERE stream = ?1 AND first <= ?2)",
            (number, upto + 1),
        )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # some errors have rolled back already; the first one is what matters
                self._connection.execute("ROLLBACK")
            raise

    def shrink(self) -> None:
        """Give some of the free pages back to the disk."""
        (free,) = self._connection.execute("PRAGMA freelist_count").fetchone()
        if free > SPARE_PAGES:
            pages = min(free - SPARE_PAGES, SHRINK_PAGES)
            self._connection.executescript(f"PRAGMA incremental_vacuum({pages})")  # execute() stops after one page

    def close(self) -> None:
        """Empty the WAL into the file, and let go of both.  Also after an `open` that failed."""
        if hasattr(self, "_connection"):
            with suppress(sqlite3.Error):  # what is not moved now is moved by the next one that opens the file
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            self._connection.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


_FORGET = (
    "DELETE FROM stream WHERE number = ?",
    "DELETE FROM counters WHERE stream = ?",
    "DELETE FROM fold WHERE stream = ?",
    "DELETE FROM segment WHERE stream = ?",
)
_PAGE = """
    SELECT first, frames FROM segment WHERE stream = ?1 AND first >=
        coalesce((SELECT max(first) FROM segment WHERE stream = ?1 AND first <= ?2), 0) ORDER BY first
"""


class Reading:
    """The reading side: its own connection and snapshots, in a thread of its own, beside the writing one."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = sqlite3.connect(self._path, isolation_level=None)
            self._connection.execute("PRAGMA query_only = ON")
        return self._connection

    def page(self, number: int, after: int, limit: int, max_bytes: int) -> list[Frame]:
        """Records after `after`, at most `limit` and, past the first, at most `max_bytes`.

        Raises StoreLost where one is missing between them, and sqlite3.Error.
        """
        frames: list[Frame] = []
        size = 0
        # Closed at once: a statement left in the middle would keep the WAL from being emptied.
        with closing(self._connected().execute(_PAGE, (number, after + 1))) as rows:
            for first, blob in rows:
                part = split(blob)
                begin = after + 1 + len(frames) - first
                if begin < 0 or (frames and begin):
                    raise StoreLost(f"record {after + 1 + len(frames)} is missing in {self._path}")
                frames += part[begin:]
                size += len(blob) - sum(map(len, part[:begin]))
                if len(frames) >= limit or size >= max_bytes:
                    break
        return within(frames[:limit], max_bytes)

    def whole(self, number: int, oldest: int) -> tuple[Fold, list[Frame]]:
        """The fold of all before `oldest`, and the records from there on, of one instant.

        Raises StoreLost where one is missing, and sqlite3.Error.
        """
        connection = self._connected()
        connection.execute("BEGIN")
        try:
            row = connection.execute("SELECT json FROM fold WHERE stream = ?", (number,)).fetchone()
            fold = folds.decode(row[0]) if row else Fold()
            after = fold.upto
            frames = self.page(number, after, _ALL, _ALL)
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        gone = max(oldest - 1 - after, 0)
        rules.fold(fold, frames[:gone])
        return fold, frames[gone:]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


_ALL = 1 << 62
