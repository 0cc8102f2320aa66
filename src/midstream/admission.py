"""How many streams may be open at once: in this process, and of one owner (I5)."""

from __future__ import annotations

from dataclasses import dataclass

from midstream.errors import ShuttingDown, TooManyStreams
from midstream.wire import STORE_PATIENCE


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one process.  Times in seconds."""

    max_streams: int = 10_000
    max_streams_per_owner: int = 1_000
    heartbeat: float = 15.0
    retain: float = 600.0
    abandon_after: float | None = None
    store_patience: float = STORE_PATIENCE


class Admission:
    """Counts the streams that this process writes.  Once `closed` it lets in no more."""

    def __init__(self, limits: Limits) -> None:
        self.closed = False
        self._limits = limits
        self._open = 0
        self._of: dict[str, int] = {}

    def check(self, owner: str) -> None:
        """May the owner open one more?  Raises ShuttingDown, TooManyStreams."""
        if self.closed:
            raise ShuttingDown("this process is shutting down; try again")
        if self._open >= self._limits.max_streams:
            raise TooManyStreams(f"{self._open} streams are open here; the limit is {self._limits.max_streams}", 5)
        mine, limit = self._of.get(owner, 0), self._limits.max_streams_per_owner
        if mine >= limit:
            raise TooManyStreams(f"{mine} of your streams are open here; the limit is {limit}", 5)

    def enter(self, owner: str) -> None:
        """Count one in, whatever the limits: one that is taken over was let in once."""
        self._open += 1
        self._of[owner] = self._of.get(owner, 0) + 1

    def leave(self, owner: str) -> None:
        """Count one out."""
        self._open -= 1
        self._of[owner] -= 1
        if not self._of[owner]:
            del self._of[owner]
