"""A wall clock that a test moves by hand."""

from __future__ import annotations

from midstream.clock import Clock


class ManualClock(Clock):
    """Wall time in seconds as a float, standing still until it is moved.

    Call it for the time, as one calls `time.time`:

    >>> clock = ManualClock(100.0)
    >>> clock.advance(2.5)
    >>> clock()
    102.5
    """

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now, self._passed = now, 0.0
        super().__init__(lambda: self._now, lambda: self._passed)

    def __call__(self) -> float:
        """Seconds since the epoch."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass. Raises ValueError for a negative number: that is a jump, see `set`."""
        if seconds < 0:
            raise ValueError(f"time passes forwards only, not by {seconds} s; use set() for a jump")
        self._now += seconds
        self._passed += seconds

    def set(self, now: float) -> None:
        """Jump to `now`, backwards too, as a machine's wall clock does when it is corrected: no time passes by that."""
        self._now = now
