"""Jobs and their outcomes, in SQL: the queue, who has what, what came of it, and who owes whom.

Several gateways may share one database.  What a generation's life is decided by stands in `lifecycle` (pure),
`matching` (pure) and `outcomes` (transactions); this is the port that the rest of the pool calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary
from zlib import crc32

from sqlalchemy import Connection

from midstream.clock import Clock
from midstream.pool import lifecycle, outcomes, overview, popping, queries
from midstream.pool.errors import InvalidJob, TooManyPrompts, UnknownRequest, WrongCredentials
from midstream.pool.overview import Overview
from midstream.pool.shapes import (
    Ask,
    Declaration,
    Generation,
    Popped,
    Reply,
    Request,
    Standing,
    Submitted,
)
from midstream.pool.sql import Database
from midstream.wire import POOL_REQUEST_KEPT, POOL_REQUEST_TERM

CHECK_IN = 30.0
_REMEMBERED = 10_000
_MOST_AT_ONCE = 20
_ADMITTING = 7_236_401  # any number, the same in every version

# How far `Jobs.streaming` has come: expiry and key of a request.
Position = tuple[float, int]
START: Position = (float("-inf"), 0)


class Jobs:
    """`url` is that of a `Database`; `clock` gives seconds since 1970.  Raises ValueError for a URL that is none.

    `place` names the store of this gateway's leases among the gateways that share the database: generations stream only
    where that is the request's too.  `most` is how many generations an owner may wait for by polling, over all
    gateways.

    Every verb raises PoolUnavailable while the database does not answer.
    """

    def __init__(self, url: str, clock: Callable[[], float], place: str = "", most: int = 1_000) -> None:
        self._db = Database(url)
        self._place = place
        self._most = most
        self._clock = Clock.of(clock)
        self._admitting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by owner
        self._seen: dict[str, tuple[str, float]] = {}  # worker -> its owner, and when it was last written

    async def open(self) -> None:
        """Raises PoolUnusable."""
        await self._db.open()

    async def close(self) -> None:
        await self._db.close()

    async def enqueue(self, ask: Ask) -> Request:
        """Put it into the queue; where one of the same stream stands there already, that is it.

        Raises TooManyPrompts, and ValueError for an amount below one or a feature that there is not.
        """
        if ask.amount < 1:
            raise ValueError("a request is for one generation or more")
        now = self._clock()
        request = Request(str(uuid4()), ask, "waiting", ask.amount, 0, now, now + POOL_REQUEST_TERM, place=self._place)
        work = partial(_enqueue, request=request, columns=queries.ask_row(ask), most=self._most)
        landed = partial(_found, id=request.id)
        if ask.stream_id is not None:
            return await self._db.write(work, landed)
        # Who waits in the database to be counted keeps one of its few threads from all others.
        async with self._admitting.setdefault(ask.owner, asyncio.Lock()):
            return await self._db.write(work, landed)

    async def pop(self, worker: Declaration) -> Popped:
        """The first job that fits the worker: its owner's own, else the oldest.  All generations are of one request.

        Raises WrongCredentials when the worker's name is another owner's.
        """
        now, judged = self._clock(), self._clock.believed(POOL_REQUEST_TERM)
        await self._check_in(worker, now)
        found = await self._db.read(partial(popping.look, worker=worker, now=judged))
        if isinstance(found, dict):
            return Popped([], found)
        ids = [str(uuid4()) for _ in range(max(1, min(worker.amount, _MOST_AT_ONCE)))]
        return await self._db.write(
            partial(popping.take, worker=worker, now=now, judged=judged, keys=found, ids=ids, place=self._place),
            partial(popping.taken, worker=worker, ids=ids),
        )

    async def _check_in(self, worker: Declaration, now: float) -> None:
        owner, at = self._seen.get(worker.name, ("", 0.0))
        if owner == worker.owner and at <= now < at + CHECK_IN:
            return
        values = {
            "name": worker.name,
            "owner": worker.owner,
            "declaration": queries.declaration_text(worker),
            "seen_at": now,
        }
        if not await self._db.write(partial(_check_in, values=values), _not_landed):
            raise WrongCredentials(f"the name {worker.name!r} is another owner's worker")
        self._seen.pop(worker.name, None)
        if len(self._seen) >= _REMEMBERED:
            del self._seen[next(iter(self._seen))]
        self._seen[worker.name] = (worker.owner, now)

    async def renew(self, generation: str) -> None:
        """Its lease was renewed.  Without effect on one that is not leased."""
        until = self._clock() + lifecycle.NOMINATED
        await self._db.write(partial(_renew, id=generation, until=until), _not_landed)

    async def submit(self, generation: str, owner: str, reply: Reply) -> Submitted:
        """The worker's reply: paid, and kept, unless the request has ended meanwhile.

        Raises InvalidJob, WrongCredentials, DuplicateGeneration.
        """
        work = partial(outcomes.submit, id=generation, owner=owner, reply=reply, now=self._clock())
        return await self._db.write(work, partial(_submitted, id=generation))

    async def fault(self, generation: str, owner: str | None, reason: str) -> Request:
        """It will not come: its worker says so, or (`owner` None) its lease has run out.  Offered again, twice at most.

        Returns the request after that.
        A streaming one of a cancelled request whose worker says so stays leased, for `settle`.  Raises InvalidJob,
        WrongCredentials, DuplicateGeneration.
        """
        work = partial(outcomes.fault, id=generation, owner=owner, reason=reason, now=self._clock())
        return await self._db.write(work, partial(_faulted, id=generation))

    async def cancel(self, request: str) -> list[Generation]:
        """From now on nothing of it is popped.  Returns the generations still leased.  Raises UnknownRequest."""
        return await self._db.write(partial(outcomes.cancel, id=request, now=self._clock()), _not_landed)

    async def settle(self, generation: str, chars: int) -> bool:
        """Pay a leased generation of a cancelled request for what was posted; once.  False: it has ended already.

        Raises InvalidJob where there is none of this id.
        """
        return await self._db.write(
            partial(outcomes.settle, id=generation, chars=chars, now=self._clock()), _not_landed
        )

    async def end(self, generation: str, *, reoffer: bool) -> bool:
        """Take it back, through nobody's fault and without pay.  False: it has ended already.  Raises InvalidJob."""
        return await self._db.write(
            partial(outcomes.end, id=generation, reoffer=reoffer, now=self._clock()), _not_landed
        )

    async def request(self, id: str) -> Request:
        """Raises UnknownRequest."""
        request = await self._db.read(partial(_found, id=id))
        if request is None:
            raise UnknownRequest
        return request

    async def by_stream(self, stream_id: str) -> Request | None:
        """The request whose answer that stream is."""
        return await self._db.read(partial(_by_stream, stream_id=stream_id))

    async def generation(self, id: str) -> Generation:
        """Raises InvalidJob."""
        found = await self._db.read(partial(_generations, statement=queries.GENERATION, values={"id": id}))
        if not found:
            raise InvalidJob
        return found[0]

    async def generations(self, request: str) -> list[Generation]:
        """All of the request, in the order of their pops, with replies."""
        return await self._db.read(partial(_generations, statement=queries.GENERATIONS, values={"id": request}))

    async def leased_here(self) -> list[Generation]:
        """Streaming generations that workers have, of requests of this place."""
        values = {"place": self._place}
        return await self._db.read(partial(_generations, statement=queries.LEASED_HERE, values=values))

    async def streaming(self, after: Position = START) -> tuple[list[tuple[str, str]], Position]:
        """Waiting requests of this place that are answered on a stream: (request, stream), and where to go on.

        A page of them; after the last one it begins at the `START` again.
        """
        expires_at, number = after
        values = {"place": self._place, "expires_at": expires_at, "number": number}
        rows = await self._db.read(partial(_rows, statement=queries.STREAMING, values=values))
        following = (rows[-1].expires_at, rows[-1].number) if len(rows) == queries.SWEEP else START
        return [(row.id, row.stream_id) for row in rows], following

    async def standings(self, requests: Sequence[str]) -> dict[str, Standing]:
        """How these stand, in one statement.  Those that are unknown are left out."""
        rows = await self._db.read(partial(_rows, statement=queries.STANDINGS, values={"ids": list(requests)}))
        found: dict[str, Standing] = {}
        for row in rows:
            before = found.get(row.id)
            leased = () if row.generation is None else (row.generation,)
            found[row.id] = Standing(row.status, frozenset(before.leased if before else ()).union(leased))
        return found

    async def nominees(self) -> list[Generation]:
        """Leased for longer than SQL knows of.  For streaming ones the lease store decides whether they are lost.

        Those of a place that is not this one, so that its store cannot be asked, are left to its own gateway at first.
        """
        values = {
            "now": self._clock.believed(lifecycle.NOMINATED),
            "place": self._place,
            "forsaken": self._clock.believed(lifecycle.NOMINATED + POOL_REQUEST_KEPT) - POOL_REQUEST_KEPT,
        }
        return await self._db.read(partial(_generations, statement=queries.NOMINEES, values=values))

    async def unsettled(self) -> list[Generation]:
        """Streaming generations of this place's cancelled requests that nobody has settled yet."""
        values = {"place": self._place}
        return await self._db.read(partial(_generations, statement=queries.UNSETTLED, values=values))

    async def expire(self) -> list[Request]:
        """Fail requests that waited for too long, and return them; forget what ended long ago.

        All of it, in transactions of a size that lets others have their turn.
        """
        times = outcomes.Times(
            self._clock(),
            expired=self._clock.believed(POOL_REQUEST_TERM),
            old=self._clock.believed(POOL_REQUEST_KEPT) - POOL_REQUEST_KEPT,
            forgotten=self._clock.believed(lifecycle.FORGOTTEN) - lifecycle.FORGOTTEN,
        )
        over: list[Request] = []
        more = True
        while more:
            some, more = await self._db.write(partial(outcomes.expire, times=times), _not_landed)
            over += some
        return over

    async def queue_position(self, request: str) -> int:
        """How many requests with open slots are before it.  Raises UnknownRequest."""
        position = await self._db.read(partial(_position, id=request))
        if position is None:
            raise UnknownRequest
        return position

    async def balance(self, owner: str) -> int:
        """Units; 0 before the owner's first transfer."""
        return await self._db.read(partial(_scalar, statement=queries.BALANCE, values={"owner": owner})) or 0

    async def totals(self) -> tuple[int, int]:
        """Generations that are still to be offered, and those that workers have, of requests that wait."""
        (row,) = await self._db.read(partial(_rows, statement=queries.TOTALS, values={}))
        return int(row.open_slots), int(row.leased)

    async def declarations(self, since: float) -> list[Declaration]:
        """What workers seen since then have declared."""
        rows = await self._db.read(partial(_rows, statement=queries.DECLARATIONS, values={"since": since}))
        return [queries.to_declaration(row.declaration) for row in rows]

    async def overview(self, limit: int, here: float, listed: float) -> Overview:
        """What the database knows of all, at most `limit` rows of each; see `overview.look`."""
        work = partial(overview.look, now=self._clock(), limit=limit, here=here, listed=listed)
        return await self._db.read(work)


def _not_landed(_: Connection) -> None:
    """The work may be done again, whether its first COMMIT happened or not."""
    return


def _rows(connection: Connection, statement: Any, values: dict[str, Any]) -> list[Any]:
    return list(connection.execute(statement, values))


def _scalar(connection: Connection, statement: Any, values: dict[str, Any]) -> Any:
    return connection.execute(statement, values).scalar_one_or_none()


def _generations(connection: Connection, statement: Any, values: dict[str, Any]) -> list[Generation]:
    return [queries.to_generation(row) for row in connection.execute(statement, values)]


def _found(connection: Connection, id: str) -> Request | None:
    row = connection.execute(queries.HOLDS, {"id": id}).first()
    return None if row is None else queries.to_request(row)


def _by_stream(connection: Connection, stream_id: str) -> Request | None:
    row = connection.execute(queries.BY_STREAM, {"stream_id": stream_id}).first()
    return None if row is None else queries.to_request(row)


def _position(connection: Connection, id: str) -> int | None:
    row = connection.execute(queries.HOLDS, {"id": id}).first()
    return None if row is None else connection.execute(queries.AHEAD, {"number": row.number}).scalar_one()


def _enqueue(connection: Connection, request: Request, columns: dict[str, Any], most: int) -> Request:
    stream_id = request.ask.stream_id
    if stream_id is None:
        _admit(connection, request.ask, most)
    elif (known := _by_stream(connection, stream_id)) is not None:
        return known
    _add(connection, request, columns)
    return request


def _admit(connection: Connection, ask: Ask, most: int) -> None:
    """Raises TooManyPrompts."""
    if connection.dialect.name == "postgresql":
        connection.execute(queries.ADMITTING, {"space": _ADMITTING, "key": crc32(ask.owner.encode()) - 2**31})
    waiting = connection.execute(queries.POLLED, {"owner": ask.owner}).scalar_one()
    if waiting + ask.amount > most:
        raise TooManyPrompts(f"you wait for {waiting} generations already; the limit is {most}", limit=most)


def _add(connection: Connection, request: Request, columns: dict[str, Any]) -> None:
    names = ("id", "status", "open_slots", "leased", "finished", "faults", "created_at", "expires_at", "reason")
    values = columns | {"place": request.place} | {name: getattr(request, name) for name in names}
    number = connection.execute(queries.ADD, values).scalar_one()
    chosen = queries.selectors(request.ask)
    if chosen:
        rows = [{"request": number, "kind": kind, "value": value} for kind, value in chosen]
        connection.execute(queries.ADD_SELECTORS, rows)


def _check_in(connection: Connection, values: dict[str, Any]) -> bool:
    return connection.execute(queries.CHECK_IN, values).rowcount == 1


def _renew(connection: Connection, id: str, until: float) -> None:
    connection.execute(queries.RENEW, {"key": id, "until": until})


def _submitted(connection: Connection, id: str) -> Submitted | None:
    _, request, generation = outcomes.hold_generation(connection, id)
    return Submitted(generation.units, request) if generation.status == "done" else None


def _faulted(connection: Connection, id: str) -> Request | None:
    _, request, generation = outcomes.hold_generation(connection, id)
    return request if generation.status == "faulted" else None
