"""How generations end, each in one transaction: handed in, lost, settled after a cancel, or given up.

Whatever races, the request's row is locked first, and the generation changes by compare-and-set from `leased`; so it
ends once, and is paid at most once.  The ledger's key says so a second time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson
from sqlalchemy import Connection, Row

from midstream.pool import lifecycle, queries, settlement
from midstream.pool.errors import DuplicateGeneration, InvalidJob, UnknownRequest, WrongCredentials
from midstream.pool.shapes import Generation, GenerationStatus, Reply, Request, Submitted

REASON_CHARS = 200


def hold(connection: Connection, id: str) -> tuple[int, Request]:
    """A request by its id, locked: its key and what it is.  Raises UnknownRequest."""
    return _held(connection.execute(queries.HOLD, {"id": id}).first(), UnknownRequest())


def hold_generation(connection: Connection, id: str) -> tuple[int, Request, Generation]:
    """A generation and its request, locked.  Raises InvalidJob."""
    key, request = _held(connection.execute(queries.HOLD_BY_GENERATION, {"id": id}).first(), InvalidJob())
    return key, request, queries.to_generation(connection.execute(queries.GENERATION, {"id": id}).one())


def _held(row: Row[Any] | None, missing: Exception) -> tuple[int, Request]:
    if row is None:
        raise missing
    return row.number, queries.to_request(row)


def change(connection: Connection, key: int, before: Request, after: Request) -> None:
    """Write what has become of a request that is locked."""
    if after != before:
        names = ("status", "open_slots", "leased", "finished", "faults", "expires_at", "ended_at", "reason")
        connection.execute(queries.CHANGE, {"key": key} | {name: getattr(after, name) for name in names})


def submit(connection: Connection, id: str, owner: str, reply: Reply, now: float) -> Submitted:
    """Raises InvalidJob, WrongCredentials, DuplicateGeneration."""
    key, request, generation = hold_generation(connection, id)
    _require_leased(generation, owner)
    # A reply that nobody wants any more is paid all the same, and not kept.
    text = orjson.dumps(reply).decode() if request.status == "waiting" else None
    units = _end(connection, generation, "done", request.ask.max_length, chars=reply.chars, reply=text)
    after = lifecycle.handed_in(request, now)
    change(connection, key, request, after)
    _pay(connection, request, generation, units, now, finished=1)
    return Submitted(units, after)


def fault(connection: Connection, id: str, owner: str | None, reason: str, now: float) -> Request:
    """Raises InvalidJob, WrongCredentials, DuplicateGeneration.

    Where the worker of a streaming generation reports it after its request was cancelled, it is left as it is: what its
    requester was shown until then is settled.  `owner` None: its lease has run out, and nothing is.
    """
    key, request, generation = hold_generation(connection, id)
    _require_leased(generation, owner)
    if owner is not None and request.status == "cancelled" and generation.streams:
        return request
    reason = reason[:REASON_CHARS].replace("\0", "\ufffd")  # PostgreSQL has no NUL
    _end(connection, generation, "faulted", reason=reason)
    after = lifecycle.lost(request, now, reason)
    change(connection, key, request, after)
    connection.execute(queries.COUNT_LOST, {"key": generation.worker})
    return after


def settle(connection: Connection, id: str, chars: int, now: float) -> bool:
    """Raises InvalidJob."""
    key, request, generation = hold_generation(connection, id)
    if generation.status != "leased" or request.status != "cancelled":
        return False
    units = _end(connection, generation, "cancelled", request.ask.max_length, chars=chars)
    change(connection, key, request, lifecycle.handed_in(request, now))
    _pay(connection, request, generation, units, now)
    return True


def end(connection: Connection, id: str, reoffer: bool, now: float) -> bool:
    """Raises InvalidJob."""
    key, request, generation = hold_generation(connection, id)
    if generation.status != "leased":
        return False
    _end(connection, generation, "ended", reason="given up")
    change(connection, key, request, lifecycle.released(request, now, reoffer=reoffer))
    return True


def cancel(connection: Connection, id: str, now: float) -> list[Generation]:
    """Raises UnknownRequest."""
    key, request = hold(connection, id)
    change(connection, key, request, lifecycle.cancelled(request, now))
    return [queries.to_generation(row) for row in connection.execute(queries.STILL_LEASED, {"id": id})]


class Times(NamedTuple):
    """What time it is; and up to when requests that waited, that have ended, and workers that were seen are too old."""

    now: float
    expired: float
    old: float
    forgotten: float


def expire(connection: Connection, times: Times) -> tuple[list[Request], bool]:
    """Fail what has waited for too long, and forget what ended long ago; whether there may be more of either."""
    over = []
    for row in connection.execute(queries.EXPIRED, {"now": times.expired}).all():
        request = queries.to_request(row)
        over.append(lifecycle.expired(request, times.now))
        change(connection, row.number, request, over[-1])
    gone = connection.execute(queries.DELETE_OLD, {"before": times.old}).rowcount
    connection.execute(queries.DELETE_WORKERS, {"before": times.forgotten})
    return over, queries.SWEEP in (gone, len(over))


def _require_leased(generation: Generation, owner: str | None) -> None:
    if owner is not None and generation.worker_owner != owner:
        raise WrongCredentials
    if generation.status == "done":
        raise DuplicateGeneration
    if generation.status != "leased":
        raise InvalidJob


def _end(
    connection: Connection,
    generation: Generation,
    status: GenerationStatus,
    max_length: int = 0,
    *,
    chars: int | None = None,
    reason: str = "",
    reply: str | None = None,
) -> int:
    """Compare and set; the units it is to be paid, 0 where `chars` is None.  Raises InvalidJob if it lost a race."""
    units = 0 if chars is None else settlement.tokens(chars, max_length)
    values = {"status": status, "settled": chars is not None, "units": units, "reason": reason, "reply": reply}
    if connection.execute(queries.END, {"key": generation.id, **values}).rowcount != 1:
        raise InvalidJob
    return units


def _pay(
    connection: Connection, request: Request, generation: Generation, units: int, now: float, finished: int = 0
) -> None:
    postings = settlement.transfer(generation.id, request.ask.owner, generation.worker_owner, units)
    about = {"worker": generation.worker, "model": generation.model, "at": now}
    connection.execute(
        queries.POST,
        [{"generation": p.generation, "side": p.side, "owner": p.owner, "units": p.units, **about} for p in postings],
    )
    connection.execute(queries.CREDIT_WORKER, {"key": generation.worker, "more": finished, "units": units})
    for owner, change_ in settlement.changes(postings):
        connection.execute(queries.CHANGE_ACCOUNT, {"owner": owner, "units": change_})
