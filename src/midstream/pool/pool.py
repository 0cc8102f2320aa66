"""The pool: what its routes, the requests' streams and the sweep call.

    requester ── enqueue ─► jobs (SQL) ◄── pop, submit, fault ── worker
        ▲                                                          │
        └──────── relay ◄── entries ── leases (memory or Redis) ◄──┘ progress

The order of each step is a law, since either store may be gone after any of them:
- **submit**: the lease goes first, then the transaction, then the signal.  A cancel that comes between finds no lease
  to settle, and the compare-and-set decides.
- **fault**: the `ended` entry first, then the job is offered again; so a relay hears of the end before another begins.
  Whether it or a cancel came first the lease store says, since the relay's own cancel may follow before the fault is in
  the database.
- **cancel**: the leases are flagged first, in one step that says what was posted; then nothing of the request is popped
  any more; then each is settled, once.  A post between two of these is told to stop and is not paid for twice.
What is left half done by a process that stops is done by the sweep.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from midstream.clock import Clock
from midstream.errors import MidstreamError
from midstream.pool import matching
from midstream.pool.attending import Attendance, Attending
from midstream.pool.errors import DuplicateGeneration, InvalidJob, PoolUnavailable, UnknownRequest, WrongCredentials
from midstream.pool.jobs import Jobs
from midstream.pool.leases import Ended, Leases
from midstream.pool.overview import Overview
from midstream.pool.shapes import (
    Account,
    Ask,
    Declaration,
    Entry,
    Generation,
    Lease,
    Popped,
    Posted,
    Reply,
    Request,
    RequestView,
)
from midstream.wire import POOL_BYTES_PER_TOKEN, POOL_POLL_EVERY, POOL_WORKER_GONE

_log = logging.getLogger("midstream")
T = TypeVar("T")

# How often what workers declare is read anew, in seconds.  A worker of this gateway's counts at its first pop.
_REFRESH_EVERY = 5.0
# Seconds since it was seen that a worker is shown for, so that who left can be told from who never came.
_LISTED = 86_400.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the database knows of a request.  `done` is the generation that was handed in; `leased` whoever has it."""

    request: Request
    done: Generation | None
    leased: frozenset[str]


@dataclass(slots=True)
class Totals:
    """Counts since this process started, for metrics.  The first two are by what became of them."""

    generations: dict[str, int] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)
    posts: int = 0
    units: int = 0
    waiting: int = 0
    running: int = 0

    def note(self, counts: dict[str, int], what: str) -> None:
        counts[what] = counts.get(what, 0) + 1


class Pool:
    """`clock` gives seconds since 1970.  Verbs raise PoolUnavailable while a store they need does not answer."""

    def __init__(self, jobs: Jobs, leases: Leases, clock: Callable[[], float]) -> None:
        self.jobs = jobs
        self.leases = leases
        self.totals = Totals()
        self.attending = Attending(leases)
        self._clock = Clock.of(clock)
        self._popped: dict[str, tuple[Declaration, float]] = {}
        self._declared: list[Declaration] = []
        self._refreshed_at = float("-inf")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._polling: asyncio.Task[None] | None = None

    @property
    def shared(self) -> bool:
        """Whether leases outlive this process."""
        return self.leases.shared

    async def start(self) -> None:
        """Open both stores.  Raises PoolUnusable, JournalError where one will never let us in."""
        await self.jobs.open()
        try:
            await self.leases.open()
        except BaseException:
            await self.jobs.close()
            raise
        self.leases.listen(self.attending.heard)
        await self._guarded(self.refresh())
        self._polling = asyncio.create_task(self._poll(), name="pool poll")

    async def stop(self) -> None:
        """Finish what is under way, and let go of both stores."""
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.wait([self._polling])
        while self._tasks:
            await asyncio.wait(list(self._tasks))
        await self.leases.close()
        await self.jobs.close()

    # --- requesters -------------------------------------------------------------------------------------------------

    async def enqueue(self, ask: Ask) -> Request:
        """Put it into the queue.  Raises TooManyPrompts, and ValueError for what no worker can be asked."""
        return await self.jobs.enqueue(ask)

    async def status(self, request: str) -> RequestView:
        """Raises UnknownRequest."""
        found = await self.jobs.request(request)
        generations = await self.jobs.generations(request)
        position = await self.jobs.queue_position(request) if found.open_slots else 0
        demand = matching.demand(found.ask)
        possible = any(matching.unmet(demand, worker) is None for worker in self.workers())
        return RequestView(found, generations, position, sum(one.units for one in generations), possible)

    async def cancel(self, request: str) -> RequestView:
        """Stop it: nothing of it is popped, workers that stream are told to stop and paid for what they posted.

        Also where it was cancelled before, and somebody has left that half done.  Raises UnknownRequest.
        """
        found = await self.jobs.request(request)
        if found.status in ("waiting", "cancelled"):
            posted = await self.leases.flag(request) if found.ask.streams else {}
            leased = await self.jobs.cancel(request)
            for generation in leased:
                if generation.id in posted:
                    await self._close(generation.id, posted[generation.id])
            if found.status == "waiting":
                self.totals.note(self.totals.requests, "cancelled")
                await self.leases.signal(request, "cancelled")
        return await self.status(request)

    async def _close(self, generation: str, chars: int | None) -> None:
        """End a cancelled request's generation as the lease store says: see `Leases.flag`."""
        if chars is not None:
            await self.settle(generation, chars)
            return
        with suppress(InvalidJob, DuplicateGeneration):  # the fault itself was quicker, or a submit
            await self.faulted(await self.jobs.fault(generation, None, "its worker gave it back"))

    async def settle(self, generation: str, chars: int) -> None:
        """Pay a cancelled request's generation for so many characters, unless it has ended in another way."""
        if await self.jobs.settle(generation, chars):
            self.totals.note(self.totals.generations, "cancelled")
            self.totals.units += (await self.jobs.generation(generation)).units

    async def account(self, owner: str) -> Account:
        return Account(owner, await self.jobs.balance(owner))

    # --- workers ----------------------------------------------------------------------------------------------------

    async def pop(self, worker: Declaration, key_digest: bytes) -> Popped:
        """A job for the worker, or none.  `key_digest` is of the key that its posts must come with.

        Where the caller is cancelled meanwhile, nobody has got it.  Raises WrongCredentials where the worker's name is
        another owner's.
        """
        popping = self._hold(asyncio.create_task(self._pop(worker, key_digest)))
        try:
            return await asyncio.shield(popping)
        except asyncio.CancelledError:
            self.later(self._withdraw(popping))
            raise

    async def _withdraw(self, popping: asyncio.Task[Popped]) -> None:
        with suppress(WrongCredentials):
            await self.take_back(await popping)

    async def take_back(self, popped: Popped) -> None:
        """What a pop gave did not reach its worker: others may have it at once, and it is nobody's fault."""
        for generation, _ in popped.given:
            await self.jobs.end(generation.id, reoffer=True)
            if generation.streams:
                await self.leases.end(generation.id, marker=False)

    async def _pop(self, worker: Declaration, key_digest: bytes) -> Popped:
        popped = await self.jobs.pop(worker)
        self._popped.pop(worker.name, None)
        self._popped[worker.name] = worker, self._clock()
        given = [one for one in popped.given if not one[0].streams or await self._granted(*one, key_digest)]
        return replace(popped, given=given)

    async def _granted(self, generation: Generation, request: Request, key_digest: bytes) -> bool:
        """Give out the lease.  A request that was cancelled between the two stores is one that nobody got."""
        lease = Lease(
            generation=generation.id,
            request=request.id,
            worker=generation.worker,
            model=generation.model,
            owner=generation.worker_owner,
            key_digest=key_digest,
            max_bytes=POOL_BYTES_PER_TOKEN * request.ask.max_length,
        )
        try:
            if await self.leases.grant(lease):
                return True
        except (PoolUnavailable, MidstreamError):  # it is away, or takes nothing
            await self.jobs.end(generation.id, reoffer=True)
            raise
        await self.jobs.cancel(request.id)
        await self.jobs.end(generation.id, reoffer=False)
        return False

    async def progress(self, generation: str, key_digest: bytes, seq: int, content: str, reasoning: str) -> Posted:
        """Take a batch.  Raises NoLease, WrongKey, ProgressOutOfSequence, ProgressTooLarge (see `Leases.post`)."""
        posted = await self.leases.post(generation, key_digest, seq, content, reasoning)
        self.totals.posts += 1
        if posted.renew:
            # Not waited for: a worker's posts do not depend on the database.
            self.later(self.jobs.renew(generation))
        return posted

    async def submit(self, generation: str, owner: str, reply: Reply) -> int:
        """Take the reply; returns the reward.  Raises InvalidJob, WrongCredentials, DuplicateGeneration."""
        found = await self.jobs.generation(generation)
        await self._release(found, owner, marker=False)
        submitted = await self.jobs.submit(generation, owner, reply)
        self.totals.note(self.totals.generations, "done")
        self.totals.units += submitted.units
        await self.announce(submitted.request)
        return submitted.units

    async def fault(self, generation: str, owner: str, reason: str) -> None:
        """The worker gives the job back.  Raises InvalidJob, WrongCredentials, DuplicateGeneration."""
        found = await self.jobs.generation(generation)
        if _holds(found, owner) and (await self.jobs.request(found.request)).status == "cancelled":
            await self.leases.flag(found.request)  # it may have been at a gateway that knows no lease of ours
        ended = await self._release(found, owner, marker=True)
        if ended is Ended.CANCELLED:  # what its requester was shown until then is paid
            await self.cancel(found.request)
            return
        try:
            after = await self.jobs.fault(generation, owner, reason)
        except InvalidJob:
            if ended is Ended.NONE:
                raise
            return  # a cancel that came after has taken it down
        if found.streams and after.status == "cancelled":  # in between
            await self.cancel(after.id)
            await self.settle(generation, 0)  # where the lease store has forgotten what was posted
        else:
            await self.faulted(after)

    async def faulted(self, request: Request) -> None:
        """A generation of it was lost: count that, and tell of what it made of the request."""
        self.totals.note(self.totals.generations, "faulted")
        await self.announce(request)

    async def _release(self, generation: Generation, owner: str, *, marker: bool) -> Ended:
        """Take the lease of a generation that its own worker ends.

        Without its store the database decides alone: the lease runs out by itself, and posts change nothing more.
        """
        if not _holds(generation, owner):
            return Ended.NONE
        try:
            return await self.leases.end(generation.id, marker=marker)
        except PoolUnavailable as away:
            _log.warning("the lease of generation %s was left to run out: %s", generation.id, away)
            return Ended.NONE

    async def announce(self, request: Request) -> None:
        """Tell every gateway, if it has ended."""
        if request.status == "done" or request.status == "failed":
            self.totals.note(self.totals.requests, request.status)
            await self.leases.signal(request.id, request.status)

    # --- what relays ask --------------------------------------------------------------------------------------------

    def attend(self, request: str) -> Attendance:
        """Be woken for a request, until the attendance is closed."""
        return self.attending.attend(request)

    async def entries(self, request: str, after: str) -> list[tuple[str, Entry]]:
        """The progress of a request after a position ("": all there is)."""
        return await self.leases.entries(request, after)

    async def outcome(self, request: str) -> Outcome:
        """What has become of it so far.  Raises UnknownRequest."""
        found = await self.jobs.request(request)
        generations = await self.jobs.generations(request)
        done = next((one for one in generations if one.reply is not None), None)
        return Outcome(found, done, frozenset(one.id for one in generations if one.status == "leased"))

    def later(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[None]:
        """Do it in a task that this pool holds, and waits for when it stops; what it raises is logged."""
        return self._hold(asyncio.create_task(self._guarded(work)))

    def _hold(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, work: Coroutine[Any, Any, Any]) -> None:
        try:
            await work
        except (PoolUnavailable, UnknownRequest) as error:
            _log.warning("the pool: %s", error)
        except Exception:  # noqa: BLE001  # nobody waits for it who could tell of it
            _log.exception("the pool: work in the background failed")

    # --- what is known without asking -------------------------------------------------------------------------------

    def _here_since(self) -> float:
        """A worker that was seen later than this is here."""
        return self._clock.believed(POOL_WORKER_GONE) - POOL_WORKER_GONE

    def workers(self) -> Iterable[Declaration]:
        """What workers that are here have declared."""
        since = self._here_since()
        own = [worker for worker, at in self._popped.values() if at > since]
        names = {worker.name for worker in own}
        return [*own, *(worker for worker in self._declared if worker.name not in names)]

    def models(self) -> list[str]:
        """The models that workers offer now, sorted."""
        return sorted({model for worker in self.workers() for model in worker.models})

    def freshest(self) -> str | None:
        """A model of the worker that was here last: one seen minutes ago may have gone without a word."""
        seen = max(self._popped.values(), key=lambda known: known[1], default=None)
        if seen is not None and seen[1] > self._here_since():
            return seen[0].models[0]
        return next(iter(self.models()), None)

    def serves(self, model: str) -> bool:
        """Whether a worker offers it now."""
        return any(model in worker.models for worker in self.workers())

    async def overview(self, limit: int = 200) -> Overview:
        """Everything an admin is shown, at most `limit` rows of each list."""
        known = await self.jobs.overview(limit, POOL_WORKER_GONE, _LISTED)
        leases = {lease.generation: lease for lease in await self.leases.held()}
        seen = {name: at for name, (_, at) in self._popped.items()}
        return replace(known, leases=leases, seen=seen)

    async def refresh(self) -> None:
        """Read anew what workers of other gateways have declared, and how long the queue is."""
        self._refreshed_at = self._clock()
        since = self._here_since()
        self._popped = {name: known for name, known in self._popped.items() if known[1] > since}
        self._declared = await self.jobs.declarations(since)
        self.totals.waiting, self.totals.running = await self.jobs.totals()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POOL_POLL_EVERY)
            await self._guarded(self.poll())

    async def poll(self) -> None:
        """One look at the database for all who wait here: what a lost signal would have told."""
        if not 0 <= self._clock() - self._refreshed_at < _REFRESH_EVERY:
            await self.refresh()
        if waiting := self.attending.requests():
            self.attending.compare(await self.jobs.standings(waiting))


def _holds(generation: Generation, owner: str) -> bool:
    """Whether it may have a lease, and that is this owner's."""
    return generation.streams and generation.status == "leased" and generation.worker_owner == owner
