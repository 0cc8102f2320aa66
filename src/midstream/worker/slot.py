"""The worker: so many slots, each pulling one job after the other."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from midstream.errors import MidstreamError
from midstream.worker.asking import Task
from midstream.worker.job import Job, Result
from midstream.worker.local import LocalServer
from midstream.worker.pool import PoolAway, PoolRoutes

_log = logging.getLogger("midstream")

# Seconds between two pops that found nothing, and at most between two that failed.
POP_EVERY: Final = 1.0
_MOST_WAIT: Final = 30.0
# Seconds that jobs have to be given back when the worker ends.
_GIVE_BACK: Final = 5.0


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
    """What the worker has done since it started."""

    jobs: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    earned: float = 0.0
    away: str = ""

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
    ) -> None:
        self.offer = offer
        self.tally = Tally()
        self.running: dict[int, Job] = {}
        self._local = local
        self._pool = pool
        self._on_end = on_end
        self._on_change = on_change
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Pull nothing more and give back what is held."""
        self._stopping.set()
        for job in self.running.values():
            job.give_up()

    async def run(self) -> None:
        """Work until `stop`.  Raises PoolRefused when the pool will not have this worker."""
        slots = [asyncio.create_task(self._slot(at), name=f"slot {at}") for at in range(self.offer.threads)]
        try:
            done, _ = await asyncio.wait(slots, return_when=asyncio.FIRST_EXCEPTION)
            for slot in done:
                slot.result()
        finally:
            self.stop()
            await asyncio.wait(slots, timeout=_GIVE_BACK)
            for slot in slots:
                slot.cancel()
            await asyncio.gather(*slots, return_exceptions=True)

    async def _slot(self, at: int) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                tasks = await self._pool.pop(self.offer.declaration())
            except PoolAway as away:
                failures += 1
                self._note_away(str(away))
                wait = max(away.after, min(_MOST_WAIT, POP_EVERY * 2.0 ** min(failures - 1, 10)))
                await self._pause(wait * random.uniform(0.75, 1.25))
                continue
            failures = 0
            self._note_away("")
            for task in tasks:
                await self._run(at, task)
            if not tasks:
                await self._pause(POP_EVERY * random.uniform(0.75, 1.25))

    async def _run(self, at: int, task: Task) -> None:
        local_model = self.offer.models.get(task.model, task.model)
        job = Job(task, self._local, self._pool, local_model)
        self.running[at] = job
        if self._stopping.is_set():
            job.give_up()
        self._on_change()
        try:
            result = await job.run()
        except MidstreamError as error:
            result = Result("faulted", job.answer.tokens, why=str(error))
        finally:
            del self.running[at]
        self.tally.note(result)
        self._on_end(job, result)
        self._on_change()

    def _note_away(self, reason: str) -> None:
        if bool(reason) != bool(self.tally.away):
            _log.warning("the pool does not answer: %s", reason) if reason else _log.warning("the pool answers again")
        self.tally.away = reason
        self._on_change()

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass
