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
from midstream.errors import JournalCorrupt, JournalError, JournalInUse, StoreLost
from midstream.journal.sqlite_checks import check_end, check_records, check_streams, check_tables, fold_from
from midstream.journal.sqlite_shape import APPLICATION_ID, STREAMS, UPGRADES, Found, found_from, split
from midstream.records import Fold, Frame, within
from midstream.wire import Status

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


# Said in the lock while there is a WAL; it stays there when its process is killed.
_HAS_WAL = b" wal"
_WHAT_IT_NEEDS = (
    "the gateway must be able to write it and the directory it is in, on a disk with space, and no other program may "
    "hold it"
)


def _lock(path: str, lock: str) -> int:
    """Hold the file for as long as this process lives or the descriptor is open.  Raises JournalInUse."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        told = os.pread(descriptor, 40, 0).removesuffix(_HAS_WAL)
        os.close(descriptor)
        pid = int(told) if told.isdigit() else 0
        holder = f"process {pid}" if pid else "another process"  # one that has just begun, or is no Midstream
        raise JournalInUse(
            f"{path} is in use by {holder}; stop that one or give this one another journal", path=path, pid=pid
        ) from None
    return descriptor


def _mark(descriptor: int) -> bytes:
    """What the lock says besides whose it is."""
    return _HAS_WAL if os.pread(descriptor, 40, 0).endswith(_HAS_WAL) else b""


def _say(descriptor: int, text: bytes) -> None:
    """Make this the lock's text."""
    os.pwrite(descriptor, text, 0)
    os.ftruncate(descriptor, len(text))


class File:
    """The writing side.  After `open` every method belongs to one thread."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._real = os.path.realpath(path)  # two names of one file must meet at one lock
        self._lock = -1
        self._connection: sqlite3.Connection

    def open(self) -> None:
        """Take the lock and make the file ready.  Raises JournalInUse, JournalCorrupt, JournalError."""
        if os.path.exists(self._path) and not os.path.isfile(self._path):
            # Before anything is done to it: SQLite opens a device, and the mode of /dev/null would be changed for all.
            raise JournalError(f"{self._path} cannot be opened: it is no file; name one", path=self._path)
        try:
            self._lock = _lock(self._path, self._real + ".lock")
            mark = _mark(self._lock)
            if mark:
                self._miss_nothing()
            _say(self._lock, b"%d%b" % (os.getpid(), mark))
            # SQLite gives its -wal and -shm the mode of the file.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
            self._connection = sqlite3.connect(self._path, isolation_level=None)
            self._prepare()
            _say(self._lock, b"%d%b" % (os.getpid(), _HAS_WAL))
        except OSError as error:
            raise self.unusable(error.strerror or str(error)) from error
        except sqlite3.OperationalError as error:
            raise self.unusable(str(error)) from error
        except sqlite3.DatabaseError as error:
            raise JournalCorrupt(
                f"{self._path} is not a journal, or damaged: {error}; name another file, or put a copy in its place",
                path=self._path,
            ) from error

    def _miss_nothing(self) -> None:
        """Whoever takes a killed gateway's WAL away takes the newest records, and SQLite says nothing."""
        if not os.path.exists(self._path):
            return
        if os.path.exists(self._real + "-wal") and os.path.getsize(self._path):
            return
        os.close(self._lock)  # its text stays
        self._lock = -1
        raise JournalCorrupt(
            f"{self._path} is not whole: its gateway was killed, and {self._real}-wal with the newest records is gone, "
            "or has nothing to belong to; put both back, or, where another program has moved it into the file or there "
            f"is none to put back, delete {self._real}.lock to go on with what there is",
            path=self._path,
        )

    def unusable(self, reason: str) -> JournalError:
        return JournalError(f"{self._path} cannot be opened: {reason}; {_WHAT_IT_NEEDS}", path=self._path)

    def damaged(self, what: str) -> JournalCorrupt:
        return JournalCorrupt(
            f"{self._path} is damaged: {what}; put a copy in its place, or move it and its -wal away to begin anew",
            path=self._path,
        )

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
        try:
            check_tables(connection, UPGRADES)
        except ValueError as error:
            raise self.damaged(str(error)) from error

    def _check(self) -> None:
        if os.path.getsize(self._path) <= CHECK_BYTES:
            (verdict,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise self.damaged(verdict)

    def _version(self) -> int:
        """The version of the file, 0 for an empty one.  Nothing is written to a file that is not ours."""
        (application,) = self._connection.execute("PRAGMA application_id").fetchone()
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        (tables,) = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables and application != APPLICATION_ID:
            raise JournalCorrupt(f"{self._path} is a database of another program; name another file", path=self._path)
        if version > len(UPGRADES):
            raise JournalCorrupt(
                f"{self._path} was written by a newer Midstream (version {version} of the file, this one knows "
                f"{len(UPGRADES)}); run that one or give this one another journal",
                path=self._path,
                version=version,
            )
        if tables and version < 1:
            raise self.damaged(f"its version is {version}")
        return int(version) if tables else 0

    def streams(self) -> list[Found]:
        """Every stream in the file.  Raises JournalCorrupt where its parts do not fit together."""
        try:
            found = {row[0]: found_from(row) for row in self._connection.execute(STREAMS)}
            for entries, frames in self._connection.execute("SELECT entries, frames FROM log ORDER BY rowid"):
                _attach(found, orjson.loads(entries), split(frames))
            streams = list(found.values())
            check_streams(self._connection, streams)
        except (sqlite3.DatabaseError, ValueError) as error:
            raise self.damaged(str(error)) from error
        return streams

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
        moved = False
        if hasattr(self, "_connection"):
            with suppress(sqlite3.Error):  # what is not moved now is moved by the next one that opens the file
                ((busy, *_),) = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                moved = not busy
            self._connection.close()
        if self._lock >= 0:
            with suppress(OSError):
                _say(self._lock, b"" if moved else _mark(self._lock))
            os.close(self._lock)
            self._lock = -1


def _attach(found: dict[int, Found], entries: object, frames: list[Frame]) -> None:
    """Give each stream its records of a row of the log.  Raises ValueError."""
    if not isinstance(entries, list) or not all(type(number) is int and number >= 0 for number in entries):
        raise ValueError("a row of its log does not tell whose its records are")
    if sum(entries[2::3]) != len(frames):
        raise ValueError("a row of its log is not whole")
    at = 0
    for number, first, count in zip(*[iter(entries)] * 3, strict=True):
        if stream := found.get(number):  # a row of the log may also hold records of a stream forgotten since
            expected = stream.filed + len(stream.tail) + 1
            if first != expected:
                raise ValueError(f"{stream.meta.stream_id} lacks {expected}")
            mine = frames[at : at + count]
            check_records(mine, first)
            stream.tail += mine
        at += count


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

    def page(self, number: int, after: int, limit: int, max_bytes: int, highest: int, status: Status) -> list[Frame]:
        """Records after `after`, at most `limit` and, past the first, at most `max_bytes`.

        Raises StoreLost where one is missing, is none, or does not fit `highest` and `status`, and sqlite3.Error.
        """
        try:
            frames = self._page(number, after, limit, max_bytes)
            if after + len(frames) >= highest:
                check_end(frames, after + len(frames), highest, status)
            return frames
        except (ValueError, TypeError) as error:
            raise StoreLost(str(error)) from error

    def _page(self, number: int, after: int, limit: int, max_bytes: int) -> list[Frame]:
        frames: list[Frame] = []
        size = 0
        # Closed at once: a statement left in the middle would keep the WAL from being emptied.
        with closing(self._connected().execute(_PAGE, (number, after + 1))) as rows:
            for first, blob in rows:
                part = split(blob)
                check_records(part, first)
                begin = after + 1 + len(frames) - first
                if begin < 0 or (frames and begin):
                    raise ValueError(f"record {after + 1 + len(frames)} is missing")
                frames += part[begin:]
                size += len(blob) - sum(map(len, part[:begin]))
                if len(frames) >= limit or size >= max_bytes:
                    break
        return within(frames[:limit], max_bytes)

    def whole(self, number: int, oldest: int, highest: int, status: Status) -> tuple[Fold, list[Frame]]:
        """The fold of all before `oldest`, and the records from there on, of one instant.

        Raises StoreLost where these are not all up to `highest`, or the last is not of this status, and sqlite3.Error.
        """
        connection = self._connected()
        connection.execute("BEGIN")
        try:
            row = connection.execute("SELECT json FROM fold WHERE stream = ?", (number,)).fetchone()
            fold = fold_from(row)
            after = fold.upto
            frames = self._page(number, after, _ALL, _ALL)
            check_end(frames, after + len(frames), highest, status)
            gone = max(oldest - 1 - after, 0)
            rules.fold(fold, frames[:gone])
        except (ValueError, TypeError) as error:
            raise StoreLost(str(error)) from error
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        return fold, frames[gone:]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


_ALL = 1 << 62
