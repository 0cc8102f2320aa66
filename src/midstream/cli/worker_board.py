"""What `midstream worker` shows: a line for each job that ended, and on a terminal one line that is always the last."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from typing import Any, Final, TextIO

from midstream.cli.terminal import Console, safe
from midstream.worker.job import Job, Result
from midstream.worker.slot import Worker

_STYLES: Final = {"done": "green", "cancelled": "yellow", "faulted": "red", "refused": "red"}
_CLEAR: Final = "\r\x1b[K"
# A line that is too long all the same, as by a wide character, is cut by the terminal: a broken one cannot be erased.
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
# Seconds between two drawings, at least: tokens come faster than anybody reads.
_EVERY: Final = 0.2
# Jobs that are shown one by one.
_SINGLY: Final = 2


class _Above:
    """A stream for the log: its lines stand above the one that is always the last."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def write(self, text: str) -> None:
        self._board.above(text)

    def flush(self) -> None:
        """Nothing is held back."""


class Board:
    """Draws on the console's stderr, which is `stream`, where that is a terminal.  `clock`: seconds, monotonic.

    There (`live`), until `close`, whatever logs to `stream` does it through the board.  `balance` is the account's.
    """

    def __init__(self, stream: TextIO, console: Console, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._console = console
        self._clock = clock
        self.live = console.err_is_terminal and os.environ.get("TERM") != "dumb"
        self._drawn_at = 0.0
        self._shown = ""
        self._began: dict[str, float] = {}
        self._worker: Worker | None = None
        self.balance: int | None = None
        self._logs = _logs_to(stream) if self.live else []
        for handler in self._logs:
            handler.setStream(_Above(self))

    def watch(self, worker: Worker) -> None:
        """Whom to show."""
        self._worker = worker

    def ended(self, job: Job, result: Result) -> None:
        """A line for a job that is over."""
        took = self._clock() - self._began.pop(job.task.id, self._clock())
        told = [f"{result.outcome:<9}", job.task.model, _some(result.tokens, "token")]
        if result.tokens and took > 0.01:
            told.append(f"{result.tokens / took:,.0f}/s")
        if result.reward:
            told.append(f"+{result.reward:g}")
        if result.why:
            told.append(result.why)
        self._erase()
        self._console.talk(" ".join("  ".join(told).split("\n")), _STYLES[result.outcome])
        self.draw()

    def draw(self) -> None:
        """Draw the last line anew, unless that was done a moment ago or this is no terminal."""
        worker, now = self._worker, self._clock()
        if worker is None:
            return
        for job in worker.running.values():
            self._began.setdefault(job.task.id, now)
        if not self.live or (self._shown and now - self._drawn_at < _EVERY):
            return
        line = self._line(worker, shutil.get_terminal_size().columns - 1)
        if line != self._shown:
            self._drawn_at, self._shown = now, line
            self._console.drawn(f"{_CLEAR}{_NO_WRAP}{line}{_WRAP}")

    def above(self, text: str) -> None:
        """Write whole lines, which may hold anything, above the last one."""
        self._erase()
        self._console.drawn(safe(text))
        self.draw()

    def _line(self, worker: Worker, width: int) -> str:
        """As much as there is room for, the least important left out first."""
        tally = worker.tally
        parts = [*_doing(worker), f"{_some(sum(tally.jobs.values()), 'job')} so far", f"earned {tally.earned:,.0f}"]
        if self.balance is not None:
            parts.append(f"balance {self.balance:,}")
        while len(parts) > 1 and len(" · ".join(parts)) > width:
            parts.pop()
        line = safe(" · ".join(parts)).replace("\n", " ")
        return line if len(line) <= width else f"{line[: width - 1]}…"

    def _erase(self) -> None:
        if self._shown:
            self._shown = ""
            self._console.drawn(_CLEAR)

    def close(self) -> None:
        """Leave a line that stays: what was done and earned."""
        self._erase()
        for handler in self._logs:
            handler.setStream(self._stream)
        worker, self._worker = self._worker, None
        if worker is not None:
            tally = worker.tally
            counts = [f"{count:,} {outcome}" for outcome, count in sorted(tally.jobs.items())]
            if tally.lost:
                counts.append(f"{tally.lost:,} not given back")
            jobs = ", ".join(counts) or "no jobs"
            self._console.talk(f"worked: {jobs}; {_some(tally.tokens, 'token')}; earned {tally.earned:,.0f}")


def _logs_to(stream: TextIO) -> list[logging.StreamHandler[Any]]:
    streams = [handler for handler in logging.root.handlers if isinstance(handler, logging.StreamHandler)]
    return [handler for handler in streams if handler.stream is stream]


def _doing(worker: Worker) -> list[str]:
    trouble = [worker.trouble.partition(":")[0]] if worker.trouble else []
    jobs = list(worker.running.values())
    if not jobs:
        return trouble or ["waiting for work"]
    if len(jobs) <= _SINGLY:
        return trouble + [f"{job.task.model}: {_some(job.answer.tokens, 'token')}" for job in jobs]
    return [*trouble, f"{len(jobs)} running: {_some(sum(job.answer.tokens for job in jobs), 'token')}"]


def _some(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
