"""`GET /v1/pool`: the whole pool at one moment, for keys marked `:admin` (PROTOCOL.md, "Pool").

Ids are told by their first characters alone, enough to tell them apart: who has the whole id of a request may read its
replies and cancel it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from midstream.errors import Forbidden, StoreUnavailable
from midstream.pool.errors import PoolUnavailable
from midstream.transports.http import caller, json_response, query
from midstream.wire import POOL_LEASE_TERM, POOL_WORKER_GONE

if TYPE_CHECKING:  # its database library is slow to load, and most gateways have no pool
    from midstream.pool.leases import LeaseView
    from midstream.pool.overview import Overview, RunningRow
    from midstream.pool.pool import Pool, Totals

PATH: Final = "/v1/pool"

_ROWS = 200  # of each list
_ID_CHARS = 8
_UNHEARD = 5.0  # seconds; a worker that works posts several times in it
# Of what a worker offers or a request asks for: both may name a thousand.
_MODELS = 20


@dataclass(frozen=True, slots=True)
class PoolView:
    """The route, over the pool."""

    pool: Pool

    def routes(self) -> list[Route]:
        return [Route(PATH, self.overview, methods=["GET"])]

    async def overview(self, request: Request) -> Response:
        """GET: workers, queue, leases and ledger.  Raises Forbidden, StoreUnavailable."""
        query(request.scope, ())
        if not caller(request.scope).admin:
            raise Forbidden("the pool is shown to keys marked `:admin` in the keys file")
        try:
            overview = await self.pool.overview(_ROWS)
        except PoolUnavailable as away:
            raise StoreUnavailable(away.message) from away
        return json_response(shown(overview, self.pool.totals))


def shown(pool: Overview, totals: Totals) -> dict[str, Any]:
    """What is answered.  Times are seconds since 1970; compare them with `at`, the gateway's own clock."""
    return {
        "at": pool.at,
        "totals": _totals(pool, totals),
        "workers": _workers(pool),
        "queue": _queue(pool),
        "leases": list(islice(chain(_leases(pool), _unheard(pool)), _ROWS)),
        "ledger": _ledger(pool),
    }


def _totals(pool: Overview, totals: Totals) -> dict[str, Any]:
    """What stands in the database, then what this gateway has seen since it started."""
    sums, ends = pool.sums, totals.generations
    return {
        "workers": sums.workers,
        "waiting": sums.waiting,
        "running": sums.running,
        "posts": totals.posts,
        "units": totals.units,
        "done": ends.get("done", 0),
        "faulted": ends.get("faulted", 0),
        "cancelled": ends.get("cancelled", 0),
    }


def _workers(pool: Overview) -> list[dict[str, Any]]:
    busy: dict[str, list[RunningRow]] = {}
    for row in pool.running:
        busy.setdefault(row.worker, []).append(row)
    posted = _posted(pool.leases)
    shown_workers = []
    for worker in pool.workers:
        running = busy.get(worker.name, [])
        seen_at = max(worker.seen_at, pool.seen.get(worker.name, 0.0), posted.get(worker.name, 0.0))
        shown_workers.append(
            {
                "name": worker.name,
                "owner": worker.owner,
                **_models(worker.models),
                "agent": worker.agent,
                "threads": worker.threads,
                "seen_at": seen_at,
                "here": bool(running) or pool.at - seen_at < POOL_WORKER_GONE,
                "finished": worker.finished,
                "lost": worker.lost,
                "earned": worker.earned,
                "running": [{"generation": row.generation[:_ID_CHARS], "model": row.model} for row in running],
            }
        )
    return shown_workers


def _posted(leases: Mapping[str, LeaseView]) -> dict[str, float]:
    """When each worker posted last: a busy one does not look for jobs, and that alone is in the database."""
    posted: dict[str, float] = {}
    for lease in leases.values():
        posted[lease.worker] = max(posted.get(lease.worker, 0.0), lease.expires_at - POOL_LEASE_TERM)
    return posted


def _queue(pool: Overview) -> list[dict[str, Any]]:
    return [
        {
            "request": row.id[:_ID_CHARS],
            "position": position,
            "owner": row.owner,
            **_models(row.models),
            "max_length": row.max_length,
            "streams": row.streams,
            "waiting": row.open_slots,
            "running": row.leased,
            "faults": row.faults,
            "created_at": row.created_at,
        }
        for position, row in enumerate(pool.queue)
    ]


def _leases(pool: Overview) -> Iterator[dict[str, Any]]:
    """What workers have, the oldest first; what is posted is known of those that stream to a store we see."""
    for row in pool.running:
        lease = pool.leases.get(row.generation)
        yield {
            "generation": row.generation[:_ID_CHARS],
            "request": row.request[:_ID_CHARS],
            "payer": row.payer,
            "worker": row.worker,
            "model": row.model,
            "max_length": row.max_length,
            "streams": row.streams,
            "began_at": row.popped_at,
            "cancelled": row.cancelled,
            **_progress(lease, pool.at, row.expires_at),
        }


def _unheard(pool: Overview) -> Iterator[dict[str, Any]]:
    """Cancelled and settled, and their workers may not have heard of it yet.

    Whether they have is not known: their leases stand until the term is over, and are shown while posts are young.
    """
    known = {row.generation for row in pool.running}
    for lease in pool.leases.values():
        young = lease.expires_at - pool.at > POOL_LEASE_TERM - _UNHEARD
        if lease.cancelled and young and lease.generation not in known:
            yield {
                "generation": lease.generation[:_ID_CHARS],
                "request": lease.request[:_ID_CHARS],
                "payer": None,
                "worker": lease.worker,
                "model": lease.model,
                "max_length": None,
                "streams": True,
                "began_at": None,
                "cancelled": True,
                **_progress(lease, pool.at, lease.expires_at),
            }


def _progress(lease: LeaseView | None, now: float, expires_at: float) -> dict[str, Any]:
    left = max(0.0, (expires_at if lease is None else lease.expires_at) - now)
    if lease is None:
        return {"posts": None, "bytes": None, "chars": None, "seconds_left": left}
    return {"posts": lease.seq, "bytes": lease.bytes, "chars": lease.chars, "seconds_left": left}


def _ledger(pool: Overview) -> dict[str, Any]:
    return {
        "sum": pool.sums.balance,
        "accounts": pool.sums.accounts,
        "balances": [{"owner": row.owner, "units": row.balance} for row in pool.accounts],
        "transfers": [
            {
                "generation": row.generation[:_ID_CHARS],
                "payer": row.payer,
                "payee": row.payee,
                "units": row.units,
                "worker": row.worker,
                "model": row.model,
                "at": row.at,
            }
            for row in pool.ledger
        ],
    }


def _models(models: Sequence[str]) -> dict[str, Any]:
    return {"models": list(models[:_MODELS]), "more_models": max(0, len(models) - _MODELS)}
