"""What nobody else has done: leases that ran out, cancels left half done, requests that nobody wants or takes any more.

Every gateway sweeps.  Each step is decided by a compare-and-set or by the lease store, so several that sweep at once do
it once.  A dead worker is replaced within a term and a third, plus one sweep: so long the database may take for the
lease's last renewal, and it only nominates (the lease store decides).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from midstream.errors import MidstreamError, StoreUnavailable
from midstream.pool.errors import DuplicateGeneration, InvalidJob, PoolError
from midstream.pool.jobs import START
from midstream.pool.pool import Pool
from midstream.pool.shapes import Generation, Request

_log = logging.getLogger("midstream")

# Whether a stream has ended, or is gone.  Raises StoreUnavailable.
HasEnded = Callable[[str], Awaitable[bool]]
# Whose words a stream's readers have, and how many characters: None where none were shown, or the stream is gone.
Said = Callable[[str], Awaitable[tuple[str, int] | None]]


class Sweep:
    """The sweep of one gateway."""

    def __init__(self, pool: Pool, has_ended: HasEnded) -> None:
        self._pool = pool
        self._has_ended = has_ended
        self._looked_at = START

    async def sweep(self) -> None:
        """Once.  A step that fails does not keep the others from their turn."""
        # What was cancelled before its lease ran out is paid, so that comes first.
        for step in (self._unsettled, self._run_out, self._expired, self._unwanted):
            try:
                await step()
            except (PoolError, MidstreamError) as error:
                _log.warning("the pool's sweep (%s) goes on later: %s", step.__name__.strip("_"), error)
            except Exception:  # noqa: BLE001  # one failed step must not stop the sweep for good
                _log.exception("the pool's sweep (%s) failed; it goes on", step.__name__.strip("_"))

    async def _run_out(self) -> None:
        """Leases that have run out are faults, whatever has become of their requests."""
        for generation in await self._pool.jobs.nominees():
            with suppress(InvalidJob, DuplicateGeneration):  # somebody else has ended it
                await self._nominated(generation)

    async def _nominated(self, generation: Generation) -> None:
        jobs = self._pool.jobs
        if generation.streams and not await self._pool.leases.lost(generation.id):
            await jobs.renew(generation.id)  # a renewal that did not get through
            return
        await self._pool.faulted(await jobs.fault(generation.id, None, "its worker was not heard of any more"))

    async def _unsettled(self) -> None:
        """Cancels whose process stopped between its two stores are gone through once more."""
        for request in {generation.request for generation in await self._pool.jobs.unsettled()}:
            await self._pool.cancel(request)

    async def _expired(self) -> None:
        """Requests that no worker took in time fail."""
        for request in await self._pool.jobs.expire():
            await self._pool.announce(request)

    async def _unwanted(self) -> None:
        """Requests whose stream has ended, or is gone, have nobody left who waits for them."""
        page, self._looked_at = await self._pool.jobs.streaming(self._looked_at)
        for request, stream_id in page:
            if request not in self._pool.attending and await self._has_ended(stream_id):
                await self._pool.cancel(request)


async def forget_leases(pool: Pool, request: Request, seen: tuple[str, int] | None) -> None:
    """The leases of a request are gone with the process that held them: its workers' posts are refused from now on.

    Nobody is at fault.  Where readers have seen something (whose, how many characters) the request ends and that is
    paid; else it is offered again.
    """
    generations = [one for one in await pool.jobs.generations(request.id) if one.streams and one.status == "leased"]
    if seen is not None:
        await pool.jobs.cancel(request.id)
    for generation in generations:
        if seen is None:
            await pool.jobs.end(generation.id, reoffer=True)
        else:
            await pool.settle(generation.id, seen[1] if generation.id == seen[0] else 0)


async def recover(pool: Pool, said: Said) -> None:
    """At start-up with leases in memory: end what the process before left in flight for streams that have ended.

    Those that are open have been taken over by then, and are attended.
    """
    if pool.shared:
        return
    for name in {generation.request for generation in await pool.jobs.leased_here()}:
        if name in pool.attending:
            continue
        request = await pool.jobs.request(name)
        seen = None
        with suppress(StoreUnavailable):
            seen = await said(request.ask.stream_id or "")
        await forget_leases(pool, request, seen or ("", 0))
