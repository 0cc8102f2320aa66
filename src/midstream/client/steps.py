"""What passes between a reader (`resume.Reader`), its shell and its user: plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from midstream.cursor import Cursor
from midstream.wire import TERMINAL


@dataclass(frozen=True, slots=True)
class Creation:
    """What a new stream is asked for: the JSON body, and the key under which asking again is safe."""

    body: bytes
    idempotency_key: str


@dataclass(frozen=True, slots=True)
class Record:
    """One record as its reader sees it.  `data` is as PROTOCOL.md, "Records", describes it for each event."""

    seq: int
    event: str
    data: dict[str, Any]

    @property
    def text(self) -> str:
        """What this record adds to the answer; empty for other events than `token`."""
        delta = self.data.get("delta")
        return delta if isinstance(delta, str) else ""

    @property
    def reasoning(self) -> str:
        """What this record adds to the model's thinking aloud."""
        reasoning = self.data.get("reasoning")
        return reasoning if isinstance(reasoning, str) else ""

    @property
    def choice(self) -> int:
        """Which of several answers to the same request this record belongs to."""
        choice = self.data.get("choice")
        return choice if isinstance(choice, int) else 0

    @property
    def terminal(self) -> bool:
        """Whether the stream ends with this record."""
        return self.event in TERMINAL


@dataclass(frozen=True, slots=True)
class Request:
    """An HTTP request, but for the caller's key: that is asked for anew at each attempt, since it may have changed.

    `of` is what it is made of, for a line that is not HTTP.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes | None = None
    of: Creation | Cursor | None = None


def stream_path(stream_id: str) -> str:
    """Where a stream is; the id may be anything that a user hands in."""
    return f"/v1/stream/{quote(stream_id, safe='')}"


@dataclass(frozen=True, slots=True)
class Connect:
    """Send this; then call `answered`, or `lost`."""

    request: Request


@dataclass(frozen=True, slots=True)
class Read:
    """Read from the open answer; then call `received`, or `lost`: also after `within` seconds without a byte."""

    within: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Let so many seconds pass."""

    seconds: float


Step = Record | Connect | Read | Wait | None


@dataclass(frozen=True, slots=True)
class Lost:
    """Told to `notify`: an attempt failed for `reason`; the next one comes in `wait` seconds."""

    reason: str
    position: Cursor | None
    failures: int
    wait: float


@dataclass(frozen=True, slots=True)
class Resumed:
    """Told to `notify`: the first record after a loss is here, `seconds` after it."""

    seconds: float
    position: Cursor
    failures: int


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to go on trying.  Times in seconds.

    The n-th attempt in a row waits `base` × 2ⁿ⁻¹, at most `cap`; up to half of it is left out at random.  After
    `attempts` failures without progress the reader gives up; after `unreached` if the gateway has never answered at
    all, since then the address is more likely to be wrong.  A `Retry-After` over `longest` is not waited for.
    """

    base: float = 0.25
    cap: float = 30.0
    attempts: int = 16
    unreached: int = 4
    longest: float = 600.0

    def wait(self, failures: int, random: Callable[[], float], at_least: float = 0.0) -> float:
        """Seconds before the next attempt, after so many failures in a row."""
        # Beyond 2^63 the doubling would leave floats; the cap has long been reached.
        delay = min(self.cap, self.base * 2.0 ** min(failures - 1, 63)) * (0.5 + 0.5 * random())
        # Not all who were told the same second should come in it.
        return max(delay, at_least * (1.0 + 0.1 * random()))
