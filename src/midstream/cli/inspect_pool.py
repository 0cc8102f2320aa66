"""The tables of `midstream inspect pool`, from what `GET /v1/pool` answers.

A gateway of another version may leave out what this one tells: what is missing is shown as a dash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from midstream.cli.table import Column, age, counted, draw, size
from midstream.cli.terminal import Console
from midstream.client import UnexpectedAnswer
from midstream.wire import POOL_CHARS_PER_TOKEN

NAME = "pool"

Row = dict[str, Any]

# Of the ledger; `--json` has all that the gateway tells.
_TRANSFERS = 10
_NAMES = 24
_ENDS = {"done": "done", "faulted": "lost", "cancelled": "cancelled", "units": "units paid"}
_DOES = {"waits": "green", "gone": "dim"}

_WORKERS = (
    Column("WORKER", text=True, most=_NAMES),
    Column("OWNER", text=True, most=_NAMES, spare=2),
    Column("DOES", text=True, most=_NAMES, styles=_DOES),
    Column("OFFERS", text=True, most=32, spare=1),
    Column("SEEN", spare=5),
    Column("DONE", spare=4),
    Column("LOST", spare=3),
    Column("EARNED"),
)
_LEASES = (
    Column("JOB", text=True),
    Column("WORKER", text=True, most=_NAMES),
    Column("MODEL", text=True, most=_NAMES, spare=4),
    Column("FOR", text=True, most=_NAMES, spare=3),
    Column("RUNS", spare=5),
    Column("TOKENS"),
    Column("POSTS", spare=2),
    Column("BYTES", spare=1),
    Column("LEASE", styles={"cancelled": "yellow"}),
)
_QUEUE = (
    Column("PLACE"),
    Column("REQUEST", text=True, spare=2),
    Column("MODELS", text=True, most=32),
    Column("OWNER", text=True, most=_NAMES, spare=3),
    Column("JOBS", spare=1),
    Column("TOKENS", spare=4),
    Column("WAITS"),
    Column("LOST", spare=5),
)
_LEDGER = (
    Column("FROM", text=True, most=_NAMES),
    Column("TO", text=True, most=_NAMES),
    Column("WORKER", text=True, most=_NAMES, spare=2),
    Column("MODEL", text=True, most=_NAMES, spare=1),
    Column("UNITS"),
    Column("AGO", spare=3),
)
_ACCOUNTS = (Column("OWNER", text=True, most=64), Column("UNITS"))


def tables(console: Console, told: Row, gateway: str) -> str:
    """All of it as text.  Raises UnexpectedAnswer for an answer that is no pool's."""
    ledger = told.get("ledger")
    if not isinstance(ledger, dict) or not isinstance(told.get("workers"), list):
        raise UnexpectedAnswer("an answer without workers: is this a Midstream gateway?")
    now = _number(told.get("at")) or 0.0
    recruit = f"no worker is here; start one: midstream worker --gateway {gateway}"
    transfers = _rows(ledger, "transfers")
    parts = [
        _totals(console, told),
        _part(console, _WORKERS, _in_order(_rows(told, "workers")), lambda row: _worker(row, now), recruit),
        _part(console, _LEASES, _rows(told, "leases"), lambda row: _lease(row, now), "nothing runs"),
        _part(console, _QUEUE, _rows(told, "queue"), lambda row: _waiting(row, now), "nothing waits"),
        _part(console, _LEDGER, transfers[:_TRANSFERS], lambda row: _transfer(row, now), "nothing was paid yet"),
        _accounts(console, ledger),
    ]
    return "\n".join(parts)


def _part(
    console: Console, columns: Sequence[Column], rows: Sequence[Row], cells: Callable[[Row], Sequence[str]], none: str
) -> str:
    return draw(console, columns, [cells(row) for row in rows]) if rows else f"{console.styled(none, 'dim')}\n"


def _accounts(console: Console, ledger: Row) -> str:
    balances = [[_text(row, "owner"), counted(row, "units")] for row in _rows(ledger, "balances")]
    total = f"sum of all accounts: {counted(ledger, 'sum')}"
    return (draw(console, _ACCOUNTS, balances) if balances else "") + f"{console.styled(total, 'dim')}\n"


def _totals(console: Console, told: Row) -> str:
    found = told.get("totals")
    totals: Row = found if isinstance(found, dict) else {}
    workers = "1 worker" if totals.get("workers") == 1 else f"{counted(totals, 'workers')} workers"
    now = f"{workers} here · {counted(totals, 'running')} running · {counted(totals, 'waiting')} waiting"
    ends = ", ".join(f"{counted(totals, name)} {word}" for name, word in _ENDS.items())
    return f"{console.styled(now, 'bold')}\n{console.styled(f'since the gateway started: {ends}', 'dim')}\n"


def _in_order(workers: list[Row]) -> list[Row]:
    """By name, those that are here first: by when they were seen they would change places at each look."""
    return sorted(workers, key=lambda row: (not row.get("here"), _text(row, "name")))


def _worker(row: Row, now: float) -> list[str]:
    running = row.get("running") or []
    models = dict.fromkeys(_text(job, "model") for job in running)
    return [
        _text(row, "name"),
        _text(row, "owner"),
        ", ".join(models) or ("waits" if row.get("here") else "gone"),
        _models(row),
        _age(row, "seen_at", now),
        *(counted(row, name) for name in ("finished", "lost", "earned")),
    ]


def _lease(row: Row, now: float) -> list[str]:
    bytes_posted, left = _number(row.get("bytes")), _number(row.get("seconds_left"))
    return [
        _text(row, "generation"),
        _text(row, "worker"),
        _text(row, "model"),
        _text(row, "payer"),
        _age(row, "began_at", now),
        _tokens(row),
        counted(row, "posts"),
        "–" if bytes_posted is None else size(bytes_posted),
        "cancelled" if row.get("cancelled") else "–" if left is None else f"{left:.0f}s left",
    ]


def _tokens(row: Row) -> str:
    """Of those asked for as many as are paid for."""
    chars, most = _number(row.get("chars")), _number(row.get("max_length"))
    if chars is None:
        return "–" if row.get("streams") else "whole"
    tokens = -(-int(chars) // POOL_CHARS_PER_TOKEN)
    return f"{tokens:,}" if most is None else f"{min(tokens, int(most)):,}/{int(most):,}"


def _waiting(row: Row, now: float) -> list[str]:
    position = row.get("position")
    return [
        f"{position + 1:,}" if isinstance(position, int) else "–",
        _text(row, "request"),
        _models(row),
        _text(row, "owner"),
        counted(row, "waiting"),
        counted(row, "max_length"),
        _age(row, "created_at", now),
        counted(row, "faults"),
    ]


def _transfer(row: Row, now: float) -> list[str]:
    names = [_text(row, name) for name in ("payer", "payee", "worker", "model")]
    return [*names, counted(row, "units"), _age(row, "at", now)]


def _models(row: Row) -> str:
    named = row.get("models")
    more = row.get("more_models")
    if not isinstance(named, list) or not named:
        return "any"
    return ", ".join(map(str, named)) + (f" and {more:,} more" if isinstance(more, int) and more else "")


def _rows(told: Row, name: str) -> list[Row]:
    found = told.get(name)
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def _text(row: Row, name: str) -> str:
    value = row.get(name)
    return "–" if value is None else str(value)


def _age(row: Row, name: str, now: float) -> str:
    at = _number(row.get(name))
    return "–" if at is None else age(now - at)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
