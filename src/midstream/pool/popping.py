"""How a worker gets a job: a look without a lock, which most pops end with, and then the taking.

The look costs the same few index look-ups however many jobs wait for other models: the oldest job is sought among those
that ask for one model alone, for each model that the worker has, and among those that ask for several or any; each
time among its owner's own first.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Select, bindparam, exists, select
from sqlalchemy.sql.elements import ColumnElement

from midstream.pool import lifecycle, matching, outcomes, queries
from midstream.pool.matching import Demand
from midstream.pool.queries import FITS_BUT_MODEL, FITS_MODELS
from midstream.pool.shapes import Declaration, Generation, Popped, Request
from midstream.pool.tables import OPEN, request

# More models than this are not sought one by one.
MANY_MODELS = 16


def look(connection: Connection, worker: Declaration, now: float) -> list[int] | dict[str, int]:
    """The keys of the jobs to try, the best first; where there is none, why."""
    models = [model for model in dict.fromkeys(worker.models) if model]  # the empty one is another kind below
    values = matching.bounds(worker) | {"now": now, "owner": worker.owner}
    values |= {f"model{number}": model for number, model in enumerate(models[:MANY_MODELS])}
    waiting, *found = connection.execute(_oldest(min(len(models), MANY_MODELS + 1)), values).one()
    half = len(found) // 2
    sides = ([key for key in keys if key is not None] for keys in (found[:half], found[half:]))
    best = dict.fromkeys(min(keys) for keys in sides if keys)
    if best:
        return list(best)
    return _why_not(connection, worker, now) if waiting else {}


@lru_cache(MANY_MODELS + 2)
def _oldest(models: int) -> Select[Any]:
    """Whether anything waits, then the oldest that fits of each kind: twice, first among the owner's own."""
    kinds: list[ColumnElement[bool]] = [(request.c.model == "") & FITS_MODELS]
    if models > MANY_MODELS:
        kinds = [FITS_MODELS]
    else:
        kinds += [request.c.model == bindparam(f"model{number}") for number in range(models)]
    own = request.c.owner == bindparam("owner")
    base = select(request.c.number).where(OPEN, FITS_BUT_MODEL).order_by(request.c.number).limit(1)
    chosen = [base.where(own, kind) for kind in kinds] + [base.where(kind) for kind in kinds]
    waiting = exists(select(request.c.number).where(OPEN))
    return select(waiting, *(one.scalar_subquery() for one in chosen))


def _why_not(connection: Connection, worker: Declaration, now: float) -> dict[str, int]:
    skipped: Counter[str] = Counter()
    for *columns, requests in connection.execute(queries.DEMANDS, {"now": now}):
        reason = matching.unmet(_demand(*columns), worker)
        if reason is not None:
            skipped[reason] += requests
    return dict(skipped)


@lru_cache(4096)
def _demand(*columns: Any) -> Demand:
    return queries.to_demand(*columns)


def take(
    connection: Connection,
    worker: Declaration,
    now: float,
    judged: float,
    keys: list[int],
    ids: list[str],
    place: str,
) -> Popped:
    """Lease what was found to the worker, as generations with these ids; if others were quicker, whatever else fits.

    `judged` is the time by which requests expire.
    """
    row = None
    for key in keys:
        row = row or connection.execute(queries.TAKE, {"number": key, "now": judged}).first()
    if row is None:
        row = connection.execute(queries.PICK, matching.bounds(worker) | {"now": judged}).first()
    if row is None:
        return Popped([], {})
    before = queries.to_request(row)
    count = min(len(ids), before.open_slots)
    after = lifecycle.taken(before, count, now)
    outcomes.change(connection, row.number, before, after)
    given = [_leased(name, after, worker, now, place) for name in ids[:count]]
    connection.execute(queries.LEASE, [queries.generation_row(one, row.number) for one in given])
    return Popped([(one, after) for one in given], {}, matching.as_chat(after.ask, worker))


def _leased(id: str, request: Request, worker: Declaration, now: float, place: str) -> Generation:
    return Generation(
        id=id,
        request=request.id,
        worker=worker.name,
        worker_owner=worker.owner,
        model=matching.choose_model(request.ask, worker),
        status="leased",
        streams=request.ask.streams and request.place == place,
        popped_at=now,
        expires_at=now + lifecycle.NOMINATED,
    )


def taken(connection: Connection, worker: Declaration, ids: list[str]) -> Popped | None:
    """What `take` has given whose COMMIT got no answer."""
    given = [queries.to_generation(row) for row in connection.execute(queries.THESE, {"ids": ids})]
    if not given:
        return None
    row = connection.execute(queries.HOLDS, {"id": given[0].request}).one()
    found = queries.to_request(row)
    return Popped([(one, found) for one in given], {}, matching.as_chat(found.ask, worker))
