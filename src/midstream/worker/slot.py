"""The worker: so many slots, each pulling one job after the other."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from midstream.worker.asking import Task
from midstream.worker.job import Job, Result
from midstream.worker.local import LocalServer
from midstream.worker.pool import PoolAway, PoolRoutes
from midstream.worker.times import Times

_log = logging.getLogger("midstream")

# So many waits, each twice the one before, then all alike.
_DOUBLINGS: Final = 10


@dataclass(frozen=True, slots=True)
class Offer:
    """What this worker offers.  `models` maps the pool's name of each model to the local server's."""

    name: str
    models: Mapping[str, str]
    max_length: int
    max_context_length: int
    threads: int
    agent: str
    features: tuple[str, ...] = ()

    def declaration(self) -> dict[str, Any]:
        """The body of a pop."""
        names = list(self.models)
        return {
            "name": self.name,
            "models": names,
            "model_id": names[0],
            "max_length": self.max_length,
            "max_context_length": self.max_context_length,
            "threads": self.threads,
            "amount": 1,
            "bridge_agent": self.agent,
            "chat_jobs": True,
            "prompt_jobs": True,
            "chat_features": sorted(self.features),
            "chat_limits": {"max_context_length": self.max_context_length, "max_length": self.max_length},
        }


@dataclass(slots=True)
class Tally:
    """What the worker has done since it started.  `lost`: jobs that it could not even give back when it ended."""

    jobs: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    earned: float = 0.0
    lost: int = 0

    def note(self, result: Result) -> None:
        self.jobs[result.outcome] = self.jobs.get(result.outcome, 0) + 1
        self.tokens += result.tokens
        self.earned += result.reward


class Worker:
    """Pulls and runs jobs until told to stop.  `on_change` is called whenever there is something new to show."""

    def __init__(
        self,
        offer: Offer,
        local: LocalServer,
        pool: PoolRoutes,
        on_end: Callable[[Job, Result], None],
        on_change: Callable[[], None] = lambda: None,
        times: Times | None = None,
    ) -> None:
        self.offer = offer
        self.tally = Tally()
        self.running: dict[int, Job] = {}
        self._local = local
        self._local_trouble = ""
        self._local_answered = -math.inf
        self._faults = 0  # in a row
        self._pool = pool
        self._times = times or Times()
        self._on_end = on_end
        self._on_change = on_change
        self._stopping = asyncio.Event()

    @property
    def trouble(self) -> str:
        """What keeps it from working, for people; nothing while nothing does."""
        if self._pool.trouble:
            return f"the pool does not answer: {self._pool.trouble}"
        if self._local_trouble:
            return f"the local server does not answer: {self._local_trouble}"
        return f"pausing: {self._faults} jobs in a row have failed here" if self._faults > 1 else ""

    def stop(self) -> None:
        """Pull nothing more and give back what is held."""
        self._stopping.set()
        for job in self.running.values():
            job.give_up()

    async def run(self) -> None:
        """Work until `stop`.  Raises PoolRefused when the pool will not have this worker."""
        slots = [asyncio.create_task(self._slot(at), name=f"slot {at}") for at in range(self.offer.threads)]
        stopping = asyncio.create_task(self._stopping.wait(), name="stop")
        try:
            done, _ = await asyncio.wait([*slots, stopping], return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
        finally:
            self.stop()
            stopping.cancel()
            await asyncio.wait(slots, timeout=self._times.give_back)
            self.tally.lost += len(self.running)
            for slot in slots:
                slot.cancel()
            await asyncio.gather(*slots, return_exceptions=True)

    async def _slot(self, at: int) -> None:
        """One job after the other.

        Where jobs fail here it takes the next one later and later: three faults are the end of a request, and a broken
        local server would be the end of all of them.
        """
        clock = asyncio.get_running_loop().time
        failures = 0
        while not self._stopping.is_set():
            if clock() - self._local_answered >= self._times.fresh and not await self._local_server():
                return
            try:
                tasks = await self._pool.pop(self.offer.declaration())
            except PoolAway as away:
                failures += 1
                self._on_change()
                await self._pause(max(away.after, self._later(failures)))
                continue
            failures = 0
            for task in tasks:
                result = await self._run(at, task)
                self._faults = self._faults + 1 if result.outcome == "faulted" else 0
                self._local_answered = -math.inf if self._faults else clock()
                if self._faults:
                    self._on_change()
                    await self._pause(self._later(self._faults))
            self._on_change()
            if not tasks:
                await self._pause(self._times.pop)

    async def _local_server(self) -> bool:
        """Wait until it answers.  False: the worker ends first."""
        looks = 0
        while not self._stopping.is_set():
            trouble = await self._local.trouble()
            if bool(trouble) != bool(self._local_trouble):
                told = f"does not answer: {trouble}; taking no jobs" if trouble else "answers again"
                _log.warning("the local server %s", told)
            self._local_trouble = trouble
            self._on_change()
            if not trouble:
                self._local_answered = asyncio.get_running_loop().time()
                return True
            looks += 1
            await self._pause(self._later(looks))
        return False

    async def _run(self, at: int, task: Task) -> Result:
        local_model = self.offer.models.get(task.model, task.model)
        job = self.running[at] = Job(task, self._local, self._pool, local_model, self._times)
        if self._stopping.is_set():
            job.give_up()
        self._on_change()
        result = await job.run()
        del self.running[at]
        self.tally.note(result)
        self._on_end(job, result)
        self._on_change()
        return result

    def _later(self, tries: int) -> float:
        return min(self._times.most, self._times.pop * 2.0 ** min(tries - 1, _DOUBLINGS))

    async def _pause(self, seconds: float) -> None:
        """About so long, lest all workers come at once; not longer than the worker works."""
        try:
            async with asyncio.timeout(seconds * random.uniform(0.75, 1.25)):
                await self._stopping.wait()
        except TimeoutError:
            pass
