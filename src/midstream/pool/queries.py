"""The statements of the pool, built once, and rows as values and back.

Every transaction takes its locks in one order: the request's row, the generation's, the worker's, the accounts' by
owner.  So two of them never wait for each other.  ADMITTING comes first, in a transaction that locks nothing else.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import orjson
from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Row,
    Select,
    and_,
    bindparam,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    text,
    update,
)

from midstream.pool import matching
from midstream.pool.matching import Demand
from midstream.pool.shapes import Ask, Declaration, Generation, LedgerRow, Reply, Request, WorkerRow
from midstream.pool.tables import LEASED, OPEN, account, generation, ledger, request, selector, worker

# How far into the queue a pop that finds nothing looks for the reasons.
LOOK = 100
SWEEP = 1000

_id: BindParameter[Any] = bindparam("id")
_now: BindParameter[Any] = bindparam("now")
_number: BindParameter[Any] = bindparam("number")
_limit: BindParameter[Any] = bindparam("limit")


def _names(kind: str, values: str) -> ColumnElement[bool]:
    """The request names one of the values."""
    return exists().where(
        selector.c.request == request.c.number,
        selector.c.kind == kind,
        selector.c.value.in_(bindparam(values, expanding=True)),
    )


# matching.unmet, as SQL, over matching.bounds.
FITS_MODELS = or_(request.c.models == "[]", _names("model", "models"))
FITS_BUT_MODEL = and_(
    request.c.expires_at > _now,
    or_(request.c.workers == "[]", _names("worker", "names") != request.c.exclude_workers),
    or_(
        and_(
            request.c.needs == 0,
            request.c.max_length <= bindparam("prompt_length"),
            request.c.max_context_length <= bindparam("prompt_context"),
        ),
        and_(
            request.c.chat,
            request.c.needs.op("&")(bindparam("lacks")) == 0,
            request.c.max_length <= bindparam("chat_length"),
            request.c.max_context_length <= bindparam("chat_context"),
            request.c.tools_temperature <= bindparam("tools_temperature"),
        ),
    ),
)
# What was found to fit, if it is still to be had: what it demands never changes.
TAKE: Select[Any] = (
    select(request)
    .where(request.c.number == _number, OPEN, request.c.expires_at > _now)
    .with_for_update(skip_locked=True)
)
PICK: Select[Any] = (
    select(request)
    .where(OPEN, FITS_BUT_MODEL, FITS_MODELS)
    .order_by(request.c.number)
    .limit(1)
    .with_for_update(skip_locked=True)
)

_DEMAND = (
    request.c.models,
    request.c.max_length,
    request.c.max_context_length,
    request.c.chat,
    request.c.needs,
    request.c.tools_temperature,
    request.c.workers,
    request.c.exclude_workers,
)
_WAITING = select(*_DEMAND).where(OPEN, request.c.expires_at > _now).order_by(request.c.number).limit(LOOK).subquery()
DEMANDS = select(*_WAITING.c, func.count().label("requests")).group_by(*_WAITING.c)

# Those that poll for answers of one owner come in one at a time, so that they can be counted.  SQLite's do in any case.
ADMITTING = select(func.pg_advisory_xact_lock(bindparam("space"), bindparam("key")))
POLLED = select(func.coalesce(func.sum(request.c.open_slots + request.c.leased), 0)).where(
    text("status = 'waiting' AND stream_id IS NULL"), request.c.owner == bindparam("owner")
)
ADD = insert(request).returning(request.c.number)
ADD_SELECTORS = insert(selector)
HOLDS = select(request).where(request.c.id == _id)
BY_STREAM = select(request).where(request.c.stream_id == bindparam("stream_id"))
# Requests whose streams are written at this place, while they may still cost something: the next page of them.
_after: BindParameter[Any] = bindparam("expires_at")
STREAMING = (
    select(request.c.expires_at, request.c.number, request.c.id, request.c.stream_id)
    .where(text("status = 'waiting'"), request.c.stream_id.is_not(None), request.c.place == bindparam("place"))
    .where(or_(request.c.expires_at > _after, and_(request.c.expires_at == _after, request.c.number > _number)))
    .order_by(request.c.expires_at, request.c.number)
    .limit(SWEEP)
)
STANDINGS = (
    select(request.c.id, request.c.status, generation.c.id.label("generation"))
    .join(generation, and_(generation.c.request == request.c.number, LEASED), isouter=True)
    .where(request.c.id.in_(bindparam("ids", expanding=True)))
)
HOLD = select(request).where(request.c.id == _id).with_for_update()
HOLD_BY_GENERATION = (
    select(request)
    .where(request.c.number == select(generation.c.request).where(generation.c.id == _id).scalar_subquery())
    .with_for_update()
)
CHANGE = (
    update(request)
    .where(request.c.number == bindparam("key"))
    .values({name: bindparam(name) for name in ("status", "open_slots", "leased", "finished", "faults")})
    .values({name: bindparam(name) for name in ("expires_at", "ended_at", "reason")})
)
AHEAD = select(func.count()).select_from(request).where(OPEN, request.c.number < _number)
EXPIRED = (
    select(request)
    .where(text("status = 'waiting'"), request.c.expires_at <= _now, request.c.leased == 0)
    .order_by(request.c.expires_at)
    .limit(SWEEP)
    .with_for_update(skip_locked=True)
)
_OLD = (
    select(request.c.number)
    .where(text("status <> 'waiting'"), request.c.ended_at <= bindparam("before"), request.c.leased == 0)
    .order_by(request.c.ended_at)
    .limit(SWEEP)
)
DELETE_OLD = delete(request).where(request.c.number.in_(_OLD))
DELETE_WORKERS = delete(worker).where(worker.c.seen_at < bindparam("before"))

LEASE = insert(generation)
_WITH_REQUEST = select(generation, request.c.id.label("request_id")).join(
    request, request.c.number == generation.c.request
)
GENERATION = _WITH_REQUEST.where(generation.c.id == _id)
GENERATIONS = _WITH_REQUEST.where(request.c.id == _id).order_by(generation.c.number)
THESE = _WITH_REQUEST.where(generation.c.id.in_(bindparam("ids", expanding=True)))
STILL_LEASED = _WITH_REQUEST.where(request.c.id == _id, LEASED).order_by(generation.c.number)
_ALL_LEASED = _WITH_REQUEST.where(LEASED).order_by(generation.c.expires_at)
# What streams at another place only long after: that place's lease store is not to be asked here.
NOMINEES = _ALL_LEASED.where(
    generation.c.expires_at < _now,
    or_(
        ~generation.c.streams,
        request.c.place == bindparam("place"),
        generation.c.expires_at < bindparam("forsaken"),
    ),
).limit(SWEEP)
LEASED_HERE = _ALL_LEASED.where(generation.c.streams, request.c.place == bindparam("place"))
UNSETTLED = LEASED_HERE.where(request.c.status == "cancelled").limit(SWEEP)
# The compare-and-set by which a generation ends: whoever comes second changes nothing.
END = (
    update(generation)
    .where(generation.c.id == bindparam("key"), LEASED)
    .values({name: bindparam(name) for name in ("status", "settled", "units", "reason", "reply")})
)
RENEW = update(generation).where(generation.c.id == bindparam("key"), LEASED).values(expires_at=bindparam("until"))

# The same words in both databases, which SQLAlchemy's own constructs for them are not.
CHECK_IN = text(
    "INSERT INTO midstream_worker (name, owner, declaration, seen_at, finished, lost, earned) "
    "VALUES (:name, :owner, :declaration, :seen_at, 0, 0, 0) "
    "ON CONFLICT (name) DO UPDATE SET declaration = excluded.declaration, seen_at = excluded.seen_at "
    "WHERE midstream_worker.owner = excluded.owner"
)
CHANGE_ACCOUNT = text(
    "INSERT INTO midstream_account (owner, balance) VALUES (:owner, :units) "
    "ON CONFLICT (owner) DO UPDATE SET balance = midstream_account.balance + excluded.balance"
)
CREDIT_WORKER = (
    update(worker)
    .where(worker.c.name == bindparam("key"))
    .values(finished=worker.c.finished + bindparam("more"), earned=worker.c.earned + bindparam("units"))
)
COUNT_LOST = update(worker).where(worker.c.name == bindparam("key")).values(lost=worker.c.lost + 1)
POST = insert(ledger)
BALANCE = select(account.c.balance).where(account.c.owner == bindparam("owner"))
WORKERS = select(worker).order_by(worker.c.seen_at.desc()).limit(_limit)
DECLARATIONS = select(worker.c.declaration).where(worker.c.seen_at >= bindparam("since")).order_by(worker.c.name)
_credit, _debit = ledger.alias(), ledger.alias()
LEDGER = (
    select(_credit, _debit.c.owner.label("payer"))
    .join(_debit, and_(_debit.c.generation == _credit.c.generation, _debit.c.side == "debit"))
    .where(_credit.c.side == "credit")
    .order_by(_credit.c.number.desc())
    .limit(_limit)
)
TOTALS = select(
    func.count().label("requests"),
    func.coalesce(func.sum(request.c.open_slots), 0).label("open_slots"),
    func.coalesce(func.sum(request.c.leased), 0).label("leased"),
).where(request.c.status == "waiting")


def ask_row(ask: Ask) -> dict[str, Any]:
    """The columns of a request that say what is wanted.  Raises ValueError for an unknown feature."""
    demand = matching.demand(ask)
    hot = demand.tools_temperature
    return {
        "owner": ask.owner,
        "amount": ask.amount,
        "chat": ask.chat,
        "streams": ask.streams,
        "stream_id": ask.stream_id,
        "needs": matching.mask(ask.features),
        "max_length": ask.max_length,
        "max_context_length": ask.max_context_length,
        "tools_temperature": -1.0 if hot is None else hot,
        "model": ask.models[0] if len(ask.models) == 1 else "",
        "models": orjson.dumps(ask.models).decode(),
        "workers": orjson.dumps(ask.workers).decode(),
        "exclude_workers": ask.exclude_workers,
        "payload": orjson.dumps(ask.payload).decode(),
    }


def selectors(ask: Ask) -> list[tuple[str, str]]:
    """(kind, value) of what a worker is chosen by."""
    models = dict.fromkeys(("model", name) for name in ask.models)
    workers = dict.fromkeys(("worker", name) for name in ask.workers)
    return [*models, *workers]


def to_ask(row: Row[Any]) -> Ask:
    return Ask(
        owner=row.owner,
        models=tuple(orjson.loads(row.models)),
        payload=orjson.loads(row.payload),
        max_length=row.max_length,
        max_context_length=row.max_context_length,
        chat=row.chat,
        features=matching.unmask(row.needs),
        streams=row.streams,
        stream_id=row.stream_id,
        amount=row.amount,
        workers=tuple(orjson.loads(row.workers)),
        exclude_workers=row.exclude_workers,
    )


def to_request(row: Row[Any]) -> Request:
    return Request(
        id=row.id,
        ask=to_ask(row),
        status=row.status,
        open_slots=row.open_slots,
        faults=row.faults,
        created_at=row.created_at,
        expires_at=row.expires_at,
        leased=row.leased,
        finished=row.finished,
        ended_at=row.ended_at,
        reason=row.reason,
        place=row.place,
    )


def to_generation(row: Row[Any]) -> Generation:
    return Generation(
        id=row.id,
        request=row.request_id,
        worker=row.worker,
        worker_owner=row.worker_owner,
        model=row.model,
        status=row.status,
        streams=row.streams,
        popped_at=row.popped_at,
        expires_at=row.expires_at,
        settled=row.settled,
        reply=None if row.reply is None else Reply(**orjson.loads(row.reply)),
        units=row.units,
        reason=row.reason,
    )


def generation_row(one: Generation, number: int) -> dict[str, Any]:
    """The columns of a generation that a worker is given."""
    return {
        "id": one.id,
        "request": number,
        "worker": one.worker,
        "worker_owner": one.worker_owner,
        "model": one.model,
        "status": one.status,
        "streams": one.streams,
        "popped_at": one.popped_at,
        "expires_at": one.expires_at,
        "settled": False,
        "units": 0,
        "reason": "",
    }


def to_demand(
    models: str,
    max_length: int,
    max_context_length: int,
    chat: bool,
    needs: int,
    tools_temperature: float,
    workers: str,
    exclude_workers: bool,
) -> Demand:
    """A demand out of the columns of `DEMANDS`."""
    return Demand(
        models=tuple(orjson.loads(models)),
        max_length=max_length,
        max_context_length=max_context_length,
        chat=chat,
        features=matching.unmask(needs),
        tools_temperature=None if tools_temperature < 0 else tools_temperature,
        workers=tuple(orjson.loads(workers)),
        exclude_workers=exclude_workers,
    )


def declaration_text(worker: Declaration) -> str:
    # Not orjson, which refuses integers of more than 64 bits; a worker may say what it likes.
    return json.dumps(asdict(worker), default=sorted)


def to_declaration(text: str) -> Declaration:
    fields = json.loads(text)
    for name in ("chat_features", "image_transports"):
        fields[name] = frozenset(fields[name])
    return Declaration(**{**fields, "models": tuple(fields["models"])})


def to_worker(row: Row[Any]) -> WorkerRow:
    worker = to_declaration(row.declaration)
    return WorkerRow(
        row.name,
        row.owner,
        worker.models,
        worker.agent,
        worker.threads,
        row.seen_at,
        row.finished,
        row.lost,
        row.earned,
    )


def to_transfer(row: Row[Any]) -> LedgerRow:
    return LedgerRow(row.generation, row.payer, row.owner, row.units, row.worker, row.model, row.at)
