"""The database under the pool: its URL, its threads, its transactions, and what happens while it is away.

SQLite has one thread and one connection: every statement of this process is in the order of its calls.  The file may be
shared by gateways on one machine, so a transaction takes the write lock at its first statement (BEGIN IMMEDIATE), where
waiting for it is safe, and not at its first write, where it would fail.  PostgreSQL has a few threads and connections.

A transaction that failed before its COMMIT was sent has not happened, and is tried again while the database may come
back.  One whose COMMIT got no answer may have happened: it is only tried again by those who can tell (`landed`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.pool import StaticPool

from midstream.pool.errors import PoolUnavailable, PoolUnusable
from midstream.pool.tables import UPGRADES, WORDS, version

log = logging.getLogger(__name__)
T = TypeVar("T")

FORMS = "sqlite:///FILE (relative), sqlite:////FILE (absolute) or postgresql://USER@HOST/NAME"
THREADS = 4
# Seconds: between tries of a transaction; for how long it is tried at all; that SQLite waits for another process.
PAUSES = (0.05, 0.2, 0.5, 1.0)
PATIENCE = 5.0
BUSY = 5.0
# PostgreSQL: a dead peer is noticed, and a statement that hangs ends.  The URL may say otherwise of the first.
CONNECT = {"connect_timeout": 5, "keepalives_idle": 10, "keepalives_interval": 5, "tcp_user_timeout": 15_000}
LIMITS = "SET statement_timeout = '20s'; SET lock_timeout = '10s'; SET idle_in_transaction_session_timeout = '30s'"
MIGRATION_LOCK = 7_236_401_899  # any number, the same in every version


class Database:
    """A database of the pool's, by URL: `sqlite:///FILE` or `postgresql://USER:PASSWORD@HOST:PORT/NAME`.

    What follows the third slash of the first is the path as it stands.  Raises ValueError, whose text is for the
    operator, for a URL of another form, and where psycopg is missing.
    """

    def __init__(self, url: str) -> None:
        self._path, self._url = _parse(url)
        self.dialect = "sqlite" if self._path else "postgresql"
        self.engine = _sqlite(self._path) if self._path else _postgresql(self._url)
        self._reading = self.engine.execution_options(reading=True)
        if not self._path:
            self._reading = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        self._threads: ThreadPoolExecutor | None = None
        self._away = False

    async def open(self) -> None:
        """Connect, and bring the tables to this version's shape.  Raises PoolUnusable, whose text is for operators."""
        self._threads = ThreadPoolExecutor(1 if self._path else THREADS, "midstream-pool")
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._prepare)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Let what runs come to its end, and hang up.  Without effect on one that is closed."""
        threads, self._threads = self._threads, None
        if threads is None:
            return
        if self._path:  # its one connection belongs to its one thread, and this comes after all else there
            threads.submit(self.engine.dispose)
        await asyncio.to_thread(threads.shutdown)
        self.engine.dispose()

    async def write(self, work: Callable[[Connection], T], landed: Callable[[Connection], T | None] | None = None) -> T:
        """Do `work` in one transaction.  Raises PoolUnavailable, and what `work` does, which rolls it back.

        `work` may be called more than once.  Where a COMMIT may have happened, `landed` says what `work` returned then,
        or None: it did not happen, or may happen twice.
        """
        return await self._run(self._write, work, landed)

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Do `work`, which only reads.  Raises PoolUnavailable."""
        return await self._run(self._read, work)

    async def _run(self, verb: Callable[..., T], *args: object) -> T:
        if self._threads is None:
            raise PoolUnavailable("the pool is closed")
        return await asyncio.get_running_loop().run_in_executor(self._threads, verb, *args)

    def _read(self, work: Callable[[Connection], T]) -> T:
        def attempt(_: bool) -> T:
            with self._reading.connect() as connection:
                return work(connection)

        return self._patiently(attempt)

    def _write(self, work: Callable[[Connection], T], landed: Callable[[Connection], T | None] | None) -> T:
        def attempt(doubtful: bool) -> T:
            with self.engine.connect() as connection, connection.begin() as transaction:
                done = landed(connection) if doubtful and landed else None
                result = work(connection) if done is None else done
                try:
                    transaction.commit()
                except DBAPIError as error:
                    raise _Doubtful from error
            return result

        return self._patiently(attempt, certain=landed is not None)

    def _patiently(self, attempt: Callable[[bool], T], certain: bool = True) -> T:
        """Try until it works, or the database has been away for too long.  `certain`: a lost COMMIT can be told."""
        began, doubtful = time.monotonic(), False
        for pause in (*PAUSES, None):
            try:
                result = attempt(doubtful)
                self._answered()
                return result
            except _Doubtful as doubt:
                error, doubtful = doubt.__cause__, True
            except (OperationalError, InterfaceError) as gone:
                error = gone
            assert isinstance(error, DBAPIError)
            if pause is None or not _may_pass(error) or (doubtful and not certain) or _late(began):
                self._went_away(error)
                raise PoolUnavailable from error
            time.sleep(pause)
        raise AssertionError("unreachable")

    def _went_away(self, error: DBAPIError) -> None:
        """Said once, and not at each of a thousand pops a second."""
        if not self._away:
            self._away = True
            log.warning("the pool's database does not answer: %s", _first_line(error))

    def _answered(self) -> None:
        if self._away:
            self._away = False
            log.warning("the pool's database answers again")

    def _prepare(self) -> None:
        where = self._path or self._url.render_as_string(hide_password=True)
        if self._path and os.path.exists(self._path) and not os.path.isfile(self._path):
            # Before anything is done to it: SQLite opens a device, and the mode of /dev/null would be changed for all.
            raise PoolUnusable(f"{where} cannot be opened: it is no file; name one")
        try:
            if self._path:
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
            self._migrate(where)
            if self._path:
                _keep_private(self._path)
        except OSError as error:
            raise PoolUnusable(f"{where} cannot be opened: {error.strerror}") from error
        except (OperationalError, InterfaceError) as error:
            raise PoolUnusable(f"the pool's database {where} cannot be used: {_first_line(error)}") from error
        except (DatabaseError, sqlite3.DatabaseError) as error:
            raise PoolUnusable(f"{where} is no database of the pool's, or damaged: {_first_line(error)}") from error

    def _migrate(self, where: str) -> None:
        """One transaction: of several that start at once the first one upgrades, and the others find it done."""
        with self.engine.begin() as connection:
            if self.dialect == "postgresql":
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})")
            found = _version(connection, where)
            if found > len(UPGRADES):
                raise PoolUnusable(
                    f"{where} was written by a newer Midstream (version {found} of the tables, this one knows "
                    f"{len(UPGRADES)}); run that one or give this one another database"
                )
            for step in UPGRADES[found:]:
                for statement in step.format(**WORDS[self.dialect]).split(";\n"):
                    connection.exec_driver_sql(statement)
            if found < len(UPGRADES):
                connection.execute(version.delete())
                connection.execute(version.insert().values(version=len(UPGRADES)))
                log.info("the pool's tables are at version %d, from %d", len(UPGRADES), found)


class _Doubtful(Exception):
    """A COMMIT without an answer: it may have happened."""


def _parse(url: str) -> tuple[str, URL]:
    """The path of an SQLite file, or "" and the URL of a PostgreSQL."""
    path = url.removeprefix("sqlite:///")
    if path != url and path not in ("", ":memory:") and not path.endswith("/"):
        return os.path.abspath(path), make_url("sqlite://")
    scheme, separator, _ = url.partition("://")
    if separator and scheme in ("postgresql", "postgres"):
        try:
            return "", make_url(url).set(drivername="postgresql+psycopg")
        except (ArgumentError, ValueError) as error:
            raise ValueError(f"the URL of the pool's database is malformed; use {FORMS}") from error
    raise ValueError(f"{scheme}:… is no database that a pool can use; write {FORMS}")


def _sqlite(path: str) -> Engine:
    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(path, timeout=BUSY, isolation_level=None)
        try:
            _enter_wal(connection, path)
            # FULL: a commit returns when the disk has it.  What has been paid stays paid.
            connection.executescript("PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON")
        except BaseException:
            connection.close()
            raise
        return connection

    def begin(connection: Connection) -> None:
        if not connection.get_execution_options().get("reading"):
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    engine = create_engine("sqlite://", creator=connect, poolclass=StaticPool)
    event.listen(engine, "begin", begin)
    return engine


def _keep_private(path: str) -> None:
    """A file that was there before may have been open to others, and SQLite has made -wal and -shm like it."""
    for name in (path, f"{path}-wal", f"{path}-shm"):
        if os.path.exists(name) and os.stat(name).st_mode & 0o077:
            os.chmod(name, 0o600)


def _enter_wal(connection: sqlite3.Connection, path: str) -> None:
    """Another process that does the same at this moment makes this fail at once, busy timeout or not."""
    until = time.monotonic() + BUSY
    while True:
        try:
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            break
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.01)
    if mode != "wal":
        raise PoolUnusable(f"{path} is on a file system that cannot hold a WAL")


def _postgresql(url: URL) -> Engine:
    defaults = {name: value for name, value in CONNECT.items() if name not in url.query}
    try:
        engine = create_engine(url, connect_args=defaults, pool_size=THREADS, max_overflow=0, pool_use_lifo=True)
    except ImportError as error:  # psycopg, or the libpq it needs
        raise ValueError(f"a pool on PostgreSQL needs psycopg ({error}): pip install 'midstream[postgres]'") from error

    def limit(connection: Any, _: object) -> None:
        connection.execute(LIMITS)
        connection.commit()

    event.listen(engine, "connect", limit)
    return engine


def _version(connection: Connection, where: str) -> int:
    """The version of the tables, 0 where there are none.  Nothing is written to a file that is not ours."""
    inspector = inspect(connection)
    if inspector.has_table(version.name):
        return int(connection.execute(version.select()).scalar_one())
    if connection.dialect.name == "sqlite" and inspector.get_table_names():
        raise PoolUnusable(f"{where} is a database of another program; give the pool one of its own")
    version.create(connection)
    return 0


def _may_pass(error: DBAPIError) -> bool:
    """Whether another try may find things better.  SQLite has waited for its lock already."""
    return not isinstance(error.orig, sqlite3.Error)


def _late(began: float) -> bool:
    return time.monotonic() - began > PATIENCE


def _first_line(error: BaseException) -> str:
    text = str(error.orig if isinstance(error, DBAPIError) else error).strip()
    return text.splitlines()[0] if text else type(error).__name__
