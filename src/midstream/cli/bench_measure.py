"""How `midstream bench` measures: a reader is cut off, and comes back by a retry or by a resume.  Blocking."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from midstream.cli.bench_figures import RESUME, RETRY, Attempt
from midstream.cli.bench_relay import Written
from midstream.client import Client, Cursor, Record
from midstream.wire import DONE, TOKEN

# Seconds for an upstream to hear that its reader has gone.
_NOTICED: Final = 10.0
# Records of a stream that are no chunks: its start and its end.
_ENDS: Final = 2


class BenchFailed(Exception):
    """It cannot be measured; the text says why."""


class Answer(Protocol):
    """One answer as its reader has it; a `client.Stream`."""

    @property
    def stream_id(self) -> str: ...

    def __iter__(self) -> Iterator[Record]: ...

    def close(self) -> None:
        """Close the connection."""


class Counter(Protocol):
    """Counts what the upstream writes."""

    def mark(self) -> Any:
        """Now."""

    def since(self, mark: Any) -> list[int]:
        """Tokens of each answer that was asked of the upstream after `mark`, in the order in which they were asked."""

    def stopped(self) -> None:
        """Wait until the upstream has noticed that the answer asked for last is no longer wanted."""


class AtTheUpstream:
    """Counts what went over the wire between gateway and upstream."""

    def __init__(self, written: Sequence[Written]) -> None:
        self._written = written

    def mark(self) -> int:
        return len(self._written)

    def since(self, mark: int) -> list[int]:
        return [answer.chunks for answer in self._written[mark:]]

    def stopped(self) -> None:
        if not self._written[-1].ended.wait(_NOTICED):
            raise BenchFailed(f"the upstream went on for more than {_NOTICED:g} s after its answer was cancelled")


class InTheJournal:
    """Counts what a gateway took from a producer of its own, which cannot be watched from outside."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def mark(self) -> set[str]:
        return {state["stream_id"] for state in self._streams()}

    def since(self, mark: set[str]) -> list[int]:
        new = [state for state in self._streams() if state["stream_id"] not in mark]
        new.sort(key=lambda state: str(state["created_at"]))
        return [state["highest_seq"] - _ENDS for state in new]

    def stopped(self) -> None:
        """By the answer to the cancel nothing is taken any more."""

    def _streams(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._client.streams()["streams"]
        return found


@dataclass(slots=True)
class Reading:
    """What one reader has: the texts of its tokens, when they came, and where it stands."""

    tokens: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    seq: int = 0
    stream_id: str = ""
    end: float | None = None

    @property
    def text(self) -> str:
        return "".join(self.tokens)

    def take(self, record: Record) -> None:
        """Raises BenchFailed for an end that is none."""
        self.seq = record.seq
        if record.event == TOKEN:
            self.tokens.append(record.text)
            self.times.append(time.perf_counter())
        elif record.terminal:
            if record.event != DONE:
                raise BenchFailed(f"the answer ended {record.event}: {_why(record.data)}")
            self.end = time.perf_counter()


def _why(data: dict[str, Any]) -> str:
    error = data.get("error") or {}
    return str(error.get("message") or error.get("code") or data.get("reason"))


def read(answer: Answer, upto: int | None = None) -> Reading:
    """Read to the end, or until `upto` tokens are there; the connection is closed."""
    reading = Reading()
    try:
        for record in answer:
            reading.take(record)
            if len(reading.tokens) == upto:
                break
        reading.stream_id = answer.stream_id
    finally:
        answer.close()
    if upto is None and reading.end is None:
        raise BenchFailed("the connection ended before the answer")
    return reading


@dataclass(frozen=True, slots=True)
class Bench:
    """What is measured.

    reader   the client that is cut off and comes back, over the transport that is measured
    desk     the same gateway over HTTP, for what is not measured
    gap      seconds between the cut and the return
    """

    reader: Client
    desk: Client
    counter: Counter
    prompt: str
    model: str | None
    gap: float
    sleep: Callable[[float], None] = time.sleep

    def whole(self) -> Reading:
        """An answer that nobody interrupts."""
        return read(self._ask())

    def retry(self, drop: int, answer: str) -> Attempt:
        """Cut off after `drop` tokens; the generation is stopped, as without a journal; then ask again."""
        mark = self.counter.mark()
        cut = self._cut(drop)
        self.desk.cancel(cut.stream_id)
        self.counter.stopped()
        self.sleep(self.gap)
        began = time.perf_counter()
        again = read(self._ask())
        first, *later = self.counter.since(mark)
        return Attempt(
            drop,
            RETRY,
            first=_first(again) - began,
            unseen=_unseen(again, drop) - began,
            end=_end(again) - began,
            inferred=drop + sum(later),
            length=len(again.tokens),
            requests=len(later),
            identical=again.text == answer,
            overshoot=first - drop,
        )

    def resume(self, drop: int, answer: str | None) -> Attempt:
        """Cut off after `drop` tokens; the generation goes on; then resume.  `answer`: None, where each is another."""
        mark = self.counter.mark()
        cut = self._cut(drop)
        self.sleep(self.gap)
        began = time.perf_counter()
        rest = read(self.reader.resume(Cursor(cut.stream_id, cut.seq)))
        inferred = self.counter.since(mark)
        kept = self.desk.snapshot(cut.stream_id)["text"] if answer is None else answer
        return Attempt(
            drop,
            RESUME,
            first=_first(rest) - began,
            unseen=_first(rest) - began,
            end=_end(rest) - began,
            inferred=sum(inferred),
            length=drop + len(rest.tokens),
            requests=len(inferred) - 1,
            identical=cut.text + rest.text == kept,
        )

    def _ask(self) -> Answer:
        return self.reader.generate(self.prompt, model=self.model)

    def _cut(self, drop: int) -> Reading:
        reading = read(self._ask(), drop)
        if len(reading.tokens) < drop:
            raise BenchFailed(f"an answer ended after {len(reading.tokens)} tokens, before the cut at {drop}")
        return reading


def _first(reading: Reading) -> float:
    return reading.times[0] if reading.times else _end(reading)


def _unseen(reading: Reading, drop: int) -> float:
    return reading.times[drop] if drop < len(reading.times) else _end(reading)


def _end(reading: Reading) -> float:
    assert reading.end is not None
    return reading.end
