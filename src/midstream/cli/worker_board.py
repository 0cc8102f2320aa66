"""What `midstream worker` shows: a line for each job that ended, and on a terminal one line that is always the last."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import TextIO

from midstream.cli.terminal import Console, safe
from midstream.worker.job import Job, Result
from midstream.worker.slot import Worker

_STYLES = {"done": "green", "cancelled": "yellow", "faulted": "red", "refused": "red"}
_CLEAR = "\r\x1b[K"
# Redraws a second, at most: tokens come faster than anybody reads.
_EVERY = 0.2


class Board:
    """Draws on `stream` where that is a terminal; lines go through `console`.  `clock`: seconds, monotonic."""

    def __init__(self, stream: TextIO, console: Console, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._console = console
        self._clock = clock
        self._live = console.err_is_terminal
        self._drawn_at = 0.0
        self._shown = False
        self._began: dict[str, float] = {}
        self._worker: Worker | None = None
        self.balance: int | None = None

    def watch(self, worker: Worker) -> None:
        """Whom to show."""
        self._worker = worker

    def ended(self, job: Job, result: Result) -> None:
        """A line for a job that is over."""
        took = max(1e-3, self._clock() - self._began.pop(job.task.id, self._clock()))
        paid = f"  +{result.reward:g}" if result.reward else ""
        why = f"  ({result.why})" if result.why else ""
        speed = f"{result.tokens / took:,.0f}/s" if result.tokens and took > 0.01 else ""
        self._erase()
        line = f"{result.outcome:<9}  {job.task.model}  {result.tokens:,} tokens  {speed}{paid}{why}"
        self._console.talk(line, _STYLES[result.outcome])

    def draw(self) -> None:
        """Draw the last line anew, unless that was done a moment ago or this is no terminal."""
        worker, now = self._worker, self._clock()
        if worker is None:
            return
        for job in worker.running.values():
            self._began.setdefault(job.task.id, now)
        if self._live and (not self._shown or now - self._drawn_at >= _EVERY):
            self._drawn_at, self._shown = now, True
            width = shutil.get_terminal_size().columns
            self._stream.write(_CLEAR + safe(self._line(worker))[: width - 1])
            self._stream.flush()

    def _line(self, worker: Worker) -> str:
        tally = worker.tally
        if tally.away:
            doing = "the pool does not answer; trying again"
        elif worker.running:
            jobs = [f"{job.task.model}: {job.answer.tokens:,} tokens" for job in worker.running.values()]
            doing = " · ".join(jobs)
        else:
            doing = "waiting for work"
        ended = sum(tally.jobs.values())
        balance = f" · balance {self.balance:,}" if self.balance is not None else ""
        return f"{doing} · {ended:,} jobs, {tally.tokens:,} tokens, earned {tally.earned:,.0f}{balance}"

    def _erase(self) -> None:
        if self._shown:
            self._shown = False
            self._stream.write(_CLEAR)
            self._stream.flush()

    def close(self) -> None:
        """Leave a line that stays: what was done and earned."""
        self._erase()
        if self._worker is not None:
            tally = self._worker.tally
            told = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(tally.jobs.items())) or "no jobs"
            self._console.talk(f"worked: {told}; {tally.tokens:,} tokens; earned {tally.earned:,.0f}")
