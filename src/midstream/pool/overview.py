"""The pool at one moment, for who runs it: who works, what waits and runs, who has paid whom.

One look is the same few statements however long the lists are.  It reads no payload: whoever looks after a pool need
not see what is asked and answered in it, and a queue of large prompts is not to be read each second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson
from sqlalchemy import Connection, bindparam, func, select

from midstream.pool import queries
from midstream.pool.leases import LeaseView
from midstream.pool.shapes import LedgerRow, WorkerRow
from midstream.pool.tables import LEASED, OPEN, account, generation, request, worker


@dataclass(frozen=True, slots=True)
class WaitingRow:
    """A request that no worker has whole: `open_slots` of its generations are still to be offered."""

    id: str
    owner: str
    models: tuple[str, ...]
    max_length: int
    streams: bool
    open_slots: int
    leased: int
    faults: int
    created_at: float


@dataclass(frozen=True, slots=True)
class RunningRow:
    """A generation that a worker has.  `payer` is who asked; `expires_at` is what the database knows of its lease."""

    generation: str
    request: str
    payer: str
    worker: str
    model: str
    max_length: int
    streams: bool
    cancelled: bool
    popped_at: float
    expires_at: float


@dataclass(frozen=True, slots=True)
class AccountRow:
    """An owner's balance, in units."""

    owner: str
    balance: int


@dataclass(frozen=True, slots=True)
class Sums:
    """Over everything, the rows that no list has room for too.  `balance` is the sum of all accounts: 0.

    `workers` counts those seen lately, `waiting` requests in the queue, `running` the generations that workers have.
    """

    workers: int
    waiting: int
    running: int
    accounts: int
    balance: int


@dataclass(frozen=True, slots=True)
class Overview:
    """Everything an admin is shown.

    Workers the last seen first, the queue in the order in which it is offered, what runs the oldest first, transfers
    the newest first, accounts the largest first.  `leases` are the live ones of the lease store, by generation; `seen`
    is when workers of this gateway were seen last, which the database is told at most each half minute.
    """

    at: float
    sums: Sums
    workers: list[WorkerRow]
    queue: list[WaitingRow]
    running: list[RunningRow]
    ledger: list[LedgerRow]
    accounts: list[AccountRow]
    leases: dict[str, LeaseView] = field(default_factory=dict)
    seen: dict[str, float] = field(default_factory=dict)


_limit: Any = bindparam("limit")
_WAITING = (
    select(
        request.c.id,
        request.c.owner,
        request.c.models,
        request.c.max_length,
        request.c.streams,
        request.c.open_slots,
        request.c.leased,
        request.c.faults,
        request.c.created_at,
    )
    .where(OPEN)
    .order_by(request.c.number)
    .limit(_limit)
)
_RUNNING = (
    select(
        generation.c.id.label("generation"),
        request.c.id.label("request"),
        request.c.owner.label("payer"),
        generation.c.worker,
        generation.c.model,
        request.c.max_length,
        generation.c.streams,
        (request.c.status == "cancelled").label("cancelled"),
        generation.c.popped_at,
        generation.c.expires_at,
    )
    .join(request, request.c.number == generation.c.request)
    .where(LEASED)
    .order_by(generation.c.popped_at, generation.c.number)
    .limit(_limit)
)
_WORKERS = queries.WORKERS.where(worker.c.seen_at >= bindparam("listed"))
_ACCOUNTS = (
    select(account.c.owner, account.c.balance)
    .order_by(func.abs(account.c.balance).desc(), account.c.owner)
    .limit(_limit)
)
_ACCOUNT_SUMS = select(
    func.count().label("accounts"), func.coalesce(func.sum(account.c.balance), 0).label("balance")
).subquery()
# Counts that an index answers alone: a sum over the queue would read every request with its prompt.
_SUMS = select(
    select(func.count()).where(worker.c.seen_at >= bindparam("here")).scalar_subquery(),
    select(func.count()).select_from(request).where(OPEN).scalar_subquery(),
    select(func.count()).select_from(generation).where(LEASED).scalar_subquery(),
    _ACCOUNT_SUMS.c.accounts,
    _ACCOUNT_SUMS.c.balance,
)


def look(connection: Connection, now: float, limit: int, here: float, listed: float) -> Overview:
    """Six statements.  Workers count as here if they were seen within `here` seconds, and are listed for `listed`."""
    bounds = {"limit": limit, "here": now - here, "listed": now - listed}

    def rows(statement: Any) -> list[Any]:
        return list(connection.execute(statement, bounds))

    return Overview(
        at=now,
        sums=Sums(*map(int, rows(_SUMS)[0])),
        workers=[queries.to_worker(row) for row in rows(_WORKERS)],
        queue=[_waiting(*row) for row in rows(_WAITING)],
        running=[RunningRow(*row) for row in rows(_RUNNING)],
        ledger=[queries.to_transfer(row) for row in rows(queries.LEDGER)],
        accounts=[AccountRow(*row) for row in rows(_ACCOUNTS)],
    )


def _waiting(id: str, owner: str, models: str, *rest: Any) -> WaitingRow:
    return WaitingRow(id, owner, tuple(orjson.loads(models)), *rest)
