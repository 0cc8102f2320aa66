"""The pool's tables, and how a database gets to have them.

`UPGRADES` is what databases are made by, step by step, from whatever version they have; the tables below it are the
present shape, which queries are written against (a test holds the two against each other).  An upgrade that has been
released is never changed.

Nothing but the ledger and the accounts is kept for ever.  JSON is text in both databases: PostgreSQL's own type refuses
the NUL that a reply may hold.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)

metadata = MetaData()
_Number = BigInteger().with_variant(Integer, "sqlite")

# `number` is the order of creation.  `needs` is a bit mask (matching.FEATURES).  `models` and `workers` are JSON lists;
# their members stand in `selector` too; `model` is the only one of `models`, else empty.  `tools_temperature` is below
# zero where the job has no tools.  `place`: see jobs.Jobs.
request = Table(
    "midstream_request",
    metadata,
    Column("number", _Number, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    Column("owner", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("open_slots", Integer, nullable=False),
    Column("leased", Integer, nullable=False),
    Column("finished", Integer, nullable=False),
    Column("faults", Integer, nullable=False),
    Column("amount", Integer, nullable=False),
    Column("chat", Boolean, nullable=False),
    Column("streams", Boolean, nullable=False),
    Column("stream_id", Text, unique=True),
    Column("place", Text, nullable=False),
    Column("needs", Integer, nullable=False),
    Column("max_length", Integer, nullable=False),
    Column("max_context_length", Integer, nullable=False),
    Column("tools_temperature", Float(53), nullable=False),
    Column("model", Text, nullable=False),
    Column("models", Text, nullable=False),
    Column("workers", Text, nullable=False),
    Column("exclude_workers", Boolean, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("expires_at", Float(53), nullable=False),
    Column("ended_at", Float(53)),
    Column("reason", Text, nullable=False),
    Column("payload", Text, nullable=False),
)
selector = Table(
    "midstream_selector",
    metadata,
    Column("request", _Number, ForeignKey("midstream_request.number", ondelete="CASCADE"), primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("value", Text, primary_key=True),
)
generation = Table(
    "midstream_generation",
    metadata,
    Column("number", _Number, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    Column("request", _Number, ForeignKey("midstream_request.number", ondelete="CASCADE"), nullable=False),
    Column("worker", Text, nullable=False),
    Column("worker_owner", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("streams", Boolean, nullable=False),
    Column("popped_at", Float(53), nullable=False),
    Column("expires_at", Float(53), nullable=False),
    Column("settled", Boolean, nullable=False),
    Column("units", Integer, nullable=False),
    Column("reason", Text, nullable=False),
    Column("reply", Text),
)
worker = Table(
    "midstream_worker",
    metadata,
    Column("name", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("declaration", Text, nullable=False),
    Column("seen_at", Float(53), nullable=False),
    Column("finished", BigInteger, nullable=False),
    Column("lost", BigInteger, nullable=False),
    Column("earned", BigInteger, nullable=False),
)
account = Table(
    "midstream_account",
    metadata,
    Column("owner", Text, primary_key=True),
    Column("balance", BigInteger, nullable=False),
)
# Two rows to a transfer, which sum to zero; one transfer to a generation.
ledger = Table(
    "midstream_ledger",
    metadata,
    Column("number", _Number, primary_key=True, autoincrement=True),
    Column("generation", Text, nullable=False),
    Column("side", Text, nullable=False),
    Column("owner", Text, nullable=False),
    Column("units", BigInteger, nullable=False),
    Column("worker", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("at", Float(53), nullable=False),
    UniqueConstraint("generation", "side"),
)
version = Table("midstream_pool_version", metadata, Column("version", Integer, nullable=False))

# A partial index serves a query only if the query says the same words.
OPEN = text("open_slots > 0")
LEASED = text("midstream_generation.status = 'leased'")


def _partial(name: str, where: str, *columns: Column[Any]) -> None:
    Index(name, *columns, sqlite_where=text(where), postgresql_where=text(where))


_partial("midstream_request_open", "open_slots > 0", request.c.number)
_partial("midstream_request_model", "open_slots > 0", request.c.model, request.c.number)
_partial("midstream_request_own", "open_slots > 0", request.c.owner, request.c.model, request.c.number)
_partial("midstream_request_waiting", "status = 'waiting'", request.c.expires_at)
_partial("midstream_request_polled", "status = 'waiting' AND stream_id IS NULL", request.c.owner)
_partial("midstream_request_ended", "status <> 'waiting'", request.c.ended_at)
Index("midstream_generation_request", generation.c.request)
_partial("midstream_generation_leased", "status = 'leased'", generation.c.expires_at)
Index("midstream_worker_seen", worker.c.seen_at)

_FIRST = """
CREATE TABLE midstream_request (
    number {number}, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, status TEXT NOT NULL, open_slots INTEGER NOT NULL,
    leased INTEGER NOT NULL, finished INTEGER NOT NULL, faults INTEGER NOT NULL, amount INTEGER NOT NULL,
    chat BOOLEAN NOT NULL, streams BOOLEAN NOT NULL, stream_id TEXT UNIQUE, place TEXT NOT NULL, needs INTEGER NOT NULL,
    max_length INTEGER NOT NULL, max_context_length INTEGER NOT NULL, tools_temperature DOUBLE PRECISION NOT NULL,
    model TEXT NOT NULL, models TEXT NOT NULL, workers TEXT NOT NULL, exclude_workers BOOLEAN NOT NULL,
    created_at DOUBLE PRECISION NOT NULL, expires_at DOUBLE PRECISION NOT NULL, ended_at DOUBLE PRECISION,
    reason TEXT NOT NULL, payload TEXT NOT NULL);
CREATE INDEX midstream_request_open ON midstream_request (number) WHERE open_slots > 0;
CREATE INDEX midstream_request_model ON midstream_request (model, number) WHERE open_slots > 0;
CREATE INDEX midstream_request_own ON midstream_request (owner, model, number) WHERE open_slots > 0;
CREATE INDEX midstream_request_waiting ON midstream_request (expires_at) WHERE status = 'waiting';
CREATE INDEX midstream_request_polled ON midstream_request (owner) WHERE status = 'waiting' AND stream_id IS NULL;
CREATE INDEX midstream_request_ended ON midstream_request (ended_at) WHERE status <> 'waiting';
CREATE TABLE midstream_selector (
    request BIGINT NOT NULL REFERENCES midstream_request (number) ON DELETE CASCADE, kind TEXT NOT NULL,
    value TEXT NOT NULL, PRIMARY KEY (request, kind, value)){clustered};
CREATE TABLE midstream_generation (
    number {number}, id TEXT NOT NULL UNIQUE,
    request BIGINT NOT NULL REFERENCES midstream_request (number) ON DELETE CASCADE,
    worker TEXT NOT NULL, worker_owner TEXT NOT NULL, model TEXT NOT NULL, status TEXT NOT NULL,
    streams BOOLEAN NOT NULL, popped_at DOUBLE PRECISION NOT NULL, expires_at DOUBLE PRECISION NOT NULL,
    settled BOOLEAN NOT NULL, units INTEGER NOT NULL, reason TEXT NOT NULL, reply TEXT);
CREATE INDEX midstream_generation_request ON midstream_generation (request);
CREATE INDEX midstream_generation_leased ON midstream_generation (expires_at) WHERE status = 'leased';
CREATE TABLE midstream_worker (
    name TEXT NOT NULL PRIMARY KEY, owner TEXT NOT NULL, declaration TEXT NOT NULL, seen_at DOUBLE PRECISION NOT NULL,
    finished BIGINT NOT NULL, lost BIGINT NOT NULL, earned BIGINT NOT NULL);
CREATE INDEX midstream_worker_seen ON midstream_worker (seen_at);
CREATE TABLE midstream_account (owner TEXT NOT NULL PRIMARY KEY, balance BIGINT NOT NULL);
CREATE TABLE midstream_ledger (
    number {number}, generation TEXT NOT NULL, side TEXT NOT NULL, owner TEXT NOT NULL, units BIGINT NOT NULL,
    worker TEXT NOT NULL, model TEXT NOT NULL, at DOUBLE PRECISION NOT NULL, UNIQUE (generation, side))
"""

UPGRADES: tuple[str, ...] = (_FIRST,)
WORDS = {
    "sqlite": {"number": "INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT", "clustered": " WITHOUT ROWID"},
    "postgresql": {"number": "BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY", "clustered": ""},
}
