"""The pool's database: URLs, files, upgrades, and what happens while it is away."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, inspect, text
from sqlalchemy.exc import IntegrityError

from midstream.pool import sql
from midstream.pool.errors import PoolUnavailable, PoolUnusable
from midstream.pool.sql import Database
from midstream.pool.tables import UPGRADES, WORDS, metadata
from tests.postgres import DATABASES, Postgres, database_url, lose_commit, postgres, shared


@pytest.fixture(params=DATABASES)
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    database = Database(database_url(request.param, tmp_path))
    await database.open()
    yield database
    await database.close()


async def opened(url: str) -> Database:
    database = Database(url)
    await database.open()
    return database


def add(connection: Connection, owner: str = "a") -> str:
    connection.execute(text("INSERT INTO midstream_account VALUES (:owner, 0)"), {"owner": owner})
    return owner


def adding(owner: str) -> Callable[[Connection], str]:
    return partial(add, owner=owner)


def answer(statement: str) -> Callable[[Connection], Any]:
    """Rows as tuples; only a row's one value where it has no more; None where there are no rows to give."""

    def ask(connection: Connection) -> Any:
        result = connection.execute(text(statement))
        if not result.returns_rows:
            return None
        rows = [tuple(row) for row in result]
        return [row[0] for row in rows] if rows and len(rows[0]) == 1 else rows

    return ask


def owners(connection: Connection) -> list[str]:
    return list(connection.execute(text("SELECT owner FROM midstream_account ORDER BY owner")).scalars())


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite:///",
        "sqlite:///:memory:",
        "sqlite:///directory/",
        "sqlite:pool.db",
        "mysql://localhost/pool",
        "redis://localhost",
        "pool.db",
        "",
    ],
)
def test_a_url_that_names_no_database_is_refused_with_the_forms_that_do(url: str) -> None:
    with pytest.raises(ValueError, match=r"sqlite:///FILE .*postgresql://"):
        Database(url)


def test_a_refused_url_is_not_told_whole_since_it_may_hold_a_password() -> None:
    for url in ("mysql://me:secret@localhost/pool", "postgresql://me:secret@localhost:port/pool"):
        with pytest.raises(ValueError, match="database") as refused:
            Database(url)
        assert "secret" not in str(refused.value)


def test_what_follows_the_third_slash_is_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below").mkdir()
    for url, file in (("sqlite:///below/a.db", "below/a.db"), (f"sqlite:///{tmp_path}/b #%?.db", "b #%?.db")):
        database = asyncio.run(opened(url))
        asyncio.run(database.close())
        assert (tmp_path / file).is_file()


def test_without_psycopg_the_refusal_names_the_extra() -> None:
    program = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from midstream.pool.sql import Database\n"
        "try: Database('postgresql://localhost/pool')\n"
        "except ValueError as error: print(error)"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "pip install 'midstream[postgres]'" in told.stdout


async def test_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "pool.db"
    path.touch(0o644)
    database = await opened(f"sqlite:///{path}")
    try:
        await database.write(add)
        modes = {name: stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in os.listdir(tmp_path)}
        assert modes == dict.fromkeys(("pool.db", "pool.db-wal", "pool.db-shm"), 0o600)
    finally:
        await database.close()


async def test_sqlite_waits_for_the_disk(tmp_path: Path) -> None:
    database = await opened(f"sqlite:///{tmp_path}/pool.db")
    try:
        for pragma, value in (("synchronous", 2), ("journal_mode", "wal"), ("foreign_keys", 1)):
            assert await database.read(answer(f"PRAGMA {pragma}")) == [value]
    finally:
        await database.close()


async def test_the_tables_are_those_that_queries_are_written_against(database: Database) -> None:
    """What the upgrades make is what the present shape says, to the last column and index."""

    def made(connection: Connection) -> dict[str, Any]:
        found = inspect(connection)
        return {
            table: (
                [(column["name"], column["nullable"]) for column in found.get_columns(table)],
                found.get_pk_constraint(table)["constrained_columns"],
                sorted(
                    index["name"] or "" for index in found.get_indexes(table) if not index.get("duplicates_constraint")
                ),
                sorted(unique["column_names"] for unique in found.get_unique_constraints(table)),
            )
            for table in found.get_table_names()
        }

    upgraded = await database.read(made)

    def made_anew(connection: Connection) -> dict[str, Any]:
        metadata.drop_all(connection)
        metadata.create_all(connection)
        return made(connection)

    assert upgraded == await database.write(made_anew)


async def test_several_that_start_at_once_find_one_set_of_tables(tmp_path: Path) -> None:
    for url in (f"sqlite:///{tmp_path}/pool.db", shared().url()):
        databases = [Database(url) for _ in range(6)]
        await asyncio.gather(*(database.open() for database in databases))
        try:
            for number, database in enumerate(databases):
                await database.write(adding(str(number)))
            assert await databases[0].read(owners) == list("012345")
            assert await databases[0].read(answer("SELECT version FROM midstream_pool_version")) == [len(UPGRADES)]
        finally:
            for database in databases:
                await database.close()


async def test_an_older_database_is_upgraded_and_keeps_what_it_has(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await database.write(add)
    await database.close()
    monkeypatch.setattr(sql, "UPGRADES", (*UPGRADES, "ALTER TABLE midstream_account ADD COLUMN note {note}"))
    monkeypatch.setattr(sql, "WORDS", {name: words | {"note": "TEXT"} for name, words in WORDS.items()})
    await database.open()
    assert await database.read(answer("SELECT owner, balance, note FROM midstream_account")) == [("a", 0, None)]


async def test_an_upgrade_that_fails_leaves_the_database_as_it_was(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await database.write(add)
    await database.close()
    with monkeypatch.context() as patch:
        patch.setattr(sql, "UPGRADES", (*UPGRADES, "DROP TABLE midstream_ledger;\nNONSENSE"))
        with pytest.raises(PoolUnusable, match=r"(?i)syntax"):
            await database.open()
    await database.open()
    assert await database.read(owners) == ["a"]
    await database.read(answer("SELECT * FROM midstream_ledger"))


async def test_a_newer_database_is_refused(database: Database) -> None:
    await database.write(answer("UPDATE midstream_pool_version SET version = 99"))
    await database.close()
    with pytest.raises(PoolUnusable, match=r"newer Midstream \(version 99"):
        await database.open()


async def test_a_file_of_another_program_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE precious (x)")
    path.chmod(0o644)
    with pytest.raises(PoolUnusable, match="another program"):
        await opened(f"sqlite:///{path}")
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("precious",)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


async def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database at all\n" * 100)
    with pytest.raises(PoolUnusable, match="no database of the pool's, or damaged"):
        await opened(f"sqlite:///{tmp_path}/text")
    with pytest.raises(PoolUnusable, match="cannot be opened: No such file"):
        await opened(f"sqlite:///{tmp_path}/none/pool.db")


async def test_what_is_no_file_is_left_as_it_is(tmp_path: Path) -> None:
    """A device, above all: SQLite would open it, and make it ours alone."""
    device = tmp_path / "device"
    os.mkfifo(device, 0o666)
    before = device.stat()
    with pytest.raises(PoolUnusable, match="it is no file"):
        await opened(f"sqlite:///{device}")
    assert device.stat() == before


async def test_a_database_that_cannot_be_reached_is_named_without_its_password() -> None:
    with pytest.raises(PoolUnusable, match="connection") as refused:
        await opened("postgresql://me:secret@127.0.0.1:1/pool")
    assert "127.0.0.1" in str(refused.value)
    assert "secret" not in str(refused.value)


async def test_a_transaction_that_fails_has_not_happened(database: Database) -> None:
    def work(connection: Connection) -> None:
        add(connection)
        add(connection)

    with pytest.raises(IntegrityError):
        await database.write(work)
    assert await database.read(owners) == []
    await database.write(add)  # and the next one finds everything in order


async def test_a_closed_database_says_so(database: Database) -> None:
    await database.close()
    with pytest.raises(PoolUnavailable, match="closed"):
        await database.read(owners)


async def test_sqlite_that_another_process_holds_is_away_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql, "BUSY", 0.05)
    database = await opened(f"sqlite:///{tmp_path}/pool.db")
    try:
        with closing(sqlite3.connect(tmp_path / "pool.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(PoolUnavailable):
                await database.write(add)
            assert await database.read(owners) == []  # reading needs no lock
        await database.write(add)
        assert await database.read(owners) == ["a"]
    finally:
        await database.close()


async def test_a_full_disk_is_no_end_of_the_pool(tmp_path: Path) -> None:
    database = await opened(f"sqlite:///{tmp_path}/pool.db")
    try:
        await database.read(answer("PRAGMA max_page_count = 1"))  # as many as there are
        with pytest.raises(PoolUnavailable):
            await database.write(adding("much" * 100_000))
        assert await database.read(owners) == []
        await database.read(answer("PRAGMA max_page_count = 1000000"))
        await database.write(add)
        assert await database.read(owners) == ["a"]
    finally:
        await database.close()


@pytest.fixture
async def own_server() -> AsyncIterator[tuple[Postgres, Database]]:
    with postgres() as server:
        database = await opened(server.url())
        yield server, database
        await database.close()


async def test_postgresql_that_is_restarted_is_not_noticed(own_server: tuple[Postgres, Database]) -> None:
    server, database = own_server
    await asyncio.gather(*(database.write(adding(str(n))) for n in range(8)))  # all connections
    await asyncio.to_thread(server.stop)
    waiting = asyncio.ensure_future(database.write(adding("late")))
    await asyncio.to_thread(server.start)
    assert await waiting == "late"
    assert len(await database.read(owners)) == 9


async def test_postgresql_that_stays_away_is_said_to_be(
    own_server: tuple[Postgres, Database], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server, database = own_server
    monkeypatch.setattr(sql, "PAUSES", (0.01, 0.01))
    await asyncio.to_thread(server.stop)
    for work in (database.write(add), database.read(owners)):
        with pytest.raises(PoolUnavailable):
            await work
    await asyncio.to_thread(server.start)
    assert await database.write(add) == "a"
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 2  # not once for each that asked
    assert "does not answer" in said[0]
    assert "answers again" in said[1]


@pytest.mark.parametrize("done", [True, False])
async def test_a_commit_without_an_answer_is_done_once_where_that_can_be_told(done: bool) -> None:
    database = await opened(shared().url())
    try:
        lose_commit(database.engine, done=done)
        calls: list[str] = []

        def landed(connection: Connection) -> str | None:
            calls.append("landed")
            return "a" if owners(connection) else None

        assert await database.write(add, landed) == "a"
        assert await database.read(owners) == ["a"]
        assert calls == ["landed"]
    finally:
        await database.close()


async def test_a_commit_without_an_answer_is_not_repeated_where_that_cannot_be_told() -> None:
    database = await opened(shared().url())
    try:
        lose_commit(database.engine)
        with pytest.raises(PoolUnavailable):
            await database.write(add)
        assert await database.read(owners) == ["a"]
    finally:
        await database.close()
