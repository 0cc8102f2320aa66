"""One job: generate it, post its tokens while they come, hand it in.

    generating ── a chunk ──> gather ── a tenth of a second ──> post
        │                                                        │ cancelled: stop the local server, hand nothing in
        │                                                        │ too much or out of order: only signs of life
        │                                                        │ no lease any more: on in silence
        └── the end ──> the last post ──> submit

Posts go out one after the other, and what gathers meanwhile is the next one: a slow line makes posts larger, never a
queue.  While the model is silent a post without tokens says each half second that the job is alive, and hears of a
cancel; these carry seq 0 and count for nothing.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Literal

from midstream.codec.text import Mender
from midstream.errors import ProducerFailed
from midstream.records import Chunk, Finish
from midstream.worker.asking import Answer, Task
from midstream.worker.batching import Batch, Batcher
from midstream.worker.local import LocalServer, is_busy
from midstream.worker.pool import Heard, PoolAway, PoolRoutes
from midstream.worker.times import Times

_log = logging.getLogger("midstream")

_ALIVE: Final = Batch(0, "", "")

Outcome = Literal["done", "cancelled", "faulted", "refused"]


@dataclass(frozen=True, slots=True)
class Result:
    """How a job ended.  `reward` is what the pool paid for it, where it said so; `why` is for people."""

    outcome: Outcome
    tokens: int
    reward: float = 0.0
    why: str = ""


class Job:
    """One job, run once."""

    def __init__(
        self, task: Task, local: LocalServer, pool: PoolRoutes, local_model: str, times: Times | None = None
    ) -> None:
        self.task = task
        self.answer = Answer()
        self._local = local
        self._pool = pool
        self._model = local_model
        self._times = times or Times()
        self._mender = Mender()
        self._batcher = Batcher(task.max_length, self._times.gather)
        self._muted = False  # signs of life only
        self._news = asyncio.Event()
        self._failure: ProducerFailed | None = None
        self._gives_up = False
        self._generating: asyncio.Task[None] | None = None
        self._posting: asyncio.Task[Heard] | None = None

    def give_up(self) -> None:
        """The worker ends: stop at once, and let somebody else have the job.  An answer that is whole is handed in."""
        self._gives_up = True
        for task in (self._generating, self._posting):
            if task is not None:
                task.cancel()
        self._news.set()

    async def run(self) -> Result:
        """Do it.  Raises nothing but a cancellation, after which the pool offers the job again in its own time."""
        generating = self._generating = asyncio.create_task(self._generate(), name=f"generate {self.task.id}")
        generating.add_done_callback(lambda _: self._news.set())
        try:
            wanted = await self._post_all(generating) if self.task.streams else await self._silently(generating)
            if not wanted:
                await self._cut(generating)
                await self._local.idle()
                return Result("cancelled", self.answer.tokens)
            if self._gives_up and self.answer.finish is None:
                result, _ = await asyncio.gather(self._hand_in(), self._cut(generating))
                return result
            return await self._hand_in()
        finally:
            if not generating.done():
                generating.cancel()
                await asyncio.wait([generating])

    async def _cut(self, generating: asyncio.Task[None]) -> None:
        """Close the local connection, and have the server stop that goes on all the same."""
        generating.cancel()
        await asyncio.wait([generating])
        await self._local.abort(self.task)

    # --- generating -------------------------------------------------------------------------------------------------

    async def _generate(self) -> None:
        clock = asyncio.get_running_loop().time
        give_up, pause = clock() + self._times.busy, 0.05
        while not self._gives_up:
            try:
                await self._run_once()
                return
            except ProducerFailed as failure:
                if self.answer.tokens or not is_busy(failure) or clock() >= give_up:
                    self._failure = failure
                    return
            except Exception as error:  # noqa: BLE001  # a fault of ours: it must not end other jobs
                _log.exception("job %s", self.task.id)
                self._failure = ProducerFailed("producer_error", f"the worker failed: {type(error).__name__}")
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)

    async def _run_once(self) -> None:
        clock = asyncio.get_running_loop().time
        async with aclosing(self._local.generate(self.task, self._model)) as parts:
            async for part in parts:
                if isinstance(part, Finish):
                    for chunk in self._mender.rest():
                        self._take(chunk, clock())
                    self.answer.finish = part
                else:
                    for chunk in part:
                        if (mended := self._mender.mend(chunk)) is not None:
                            self._take(mended, clock())
                self._news.set()

    def _take(self, chunk: Chunk, now: float) -> None:
        content, reasoning = self.answer.add(chunk)
        if content or reasoning:
            self._batcher.add(content, reasoning, now)

    # --- posting ----------------------------------------------------------------------------------------------------

    async def _silently(self, generating: asyncio.Task[None]) -> bool:
        await asyncio.wait([generating])
        return True

    async def _post_all(self, generating: asyncio.Task[None]) -> bool:
        """Post until the generation has ended and all of it has been posted.  False: nobody wants it any more."""
        clock = asyncio.get_running_loop().time
        said = clock()
        while not self._gives_up:
            self._news.clear()
            ended = generating.done()
            if ended and self._failure is not None:
                return True  # given back: what has not been posted need not be
            due = None if self._muted else self._batcher.due(clock(), last=ended)
            if due == 0.0:
                batch = self._batcher.take()
            elif due is None and ended:
                return True
            elif (silent := said + self._times.alive - clock()) <= 0:
                batch = _ALIVE
            else:
                await self._wait(min(silent, due) if due is not None else silent)
                continue
            heard = await self._post(batch)
            said = clock()
            if heard is Heard.STOP:
                return False
            if heard is Heard.GONE:
                return await self._silently(generating)
            self._muted = self._muted or heard is Heard.MUTED
        return True

    async def _post(self, batch: Batch) -> Heard | None:
        """Post until it has been taken.  None: the worker ends, and does not wait for a pool that is away."""
        self._posting = asyncio.create_task(self._pool.progress(self.task.id, batch))
        try:
            await asyncio.wait([self._posting])
        finally:
            self._posting.cancel()
        return None if self._posting.cancelled() else self._posting.result()

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            pass

    # --- the end ----------------------------------------------------------------------------------------------------

    async def _hand_in(self) -> Result:
        tokens = self.answer.tokens
        if self.answer.finish is None:
            why = "the worker stops" if self._gives_up else str(self._failure or "the local server gave no answer")
            body = self.task.fault("generation_error")
        else:
            why, body = "", self.answer.submit(self.task)
        try:
            told = await self._pool.submit(body)
        except PoolAway as away:
            return Result("refused", tokens, why=f"the pool is away: {away}")
        if told.status != 200 and not told.was_submitted:
            return Result("refused", tokens, why=told.message)
        reward = told.body.get("reward")
        paid = float(reward) if isinstance(reward, (int, float)) else 0.0
        return Result("faulted" if why else "done", tokens, paid, why)
