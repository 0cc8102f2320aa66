"""The wall clock, and how far it may be believed.

Deadlines are kept by wall time, since they outlive a process and are shared by several.  But a wall clock is corrected
now and then, and a machine that slept finds it hours ahead: nobody was given the time that it jumped over.  So a
deadline is set by the wall clock and judged by `believed`, which leaves out what the clock jumped since.

A jump can only be told from time that passed by the process that saw it.  After a restart the wall clock is all there
is: what is old by it is old.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

# Seconds by which the two clocks may part between two looks: one that is slewed gains half a second in 1,000.
_SLEWED = 1.0
# Jumps that are remembered.  A clock that jumps more often than this in the term of a deadline tells no time at all.
_REMEMBERED = 100


class Clock:
    """Call it for the wall time.  `wall` gives seconds since 1970; `steady` seconds that only pass, from any start."""

    def __init__(self, wall: Callable[[], float], steady: Callable[[], float]) -> None:
        self._wall = wall
        self._steady = steady
        self._apart = wall() - steady()
        self._jumps: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)

    @staticmethod
    def of(clock: Callable[[], float]) -> Clock:
        """A Clock is one already; any other clock is taken for one that never jumps."""
        return clock if isinstance(clock, Clock) else Clock(clock, clock)

    def __call__(self) -> float:
        """Seconds since 1970."""
        return self._wall()

    def steady(self) -> float:
        """Seconds from an unknown start, which only pass: for what is timed in this process alone."""
        return self._steady()

    def believed(self, term: float) -> float:
        """The wall time by which to judge a deadline that was set at most `term` seconds ahead, or a time to which so
        many are added.

        Never ahead of the wall clock.  A jump forward counts for nothing until `term` seconds after it was seen; what
        was set since then is not over any sooner.  One back is left alone: what was set before it is over that much
        later.
        """
        wall, steady = self._wall(), self._steady()
        if abs(wall - steady - self._apart) > _SLEWED:
            self._jumps.append((steady, wall - steady - self._apart))
        self._apart = wall - steady
        jumped = sum(seconds for at, seconds in self._jumps if steady < at + term)
        return wall - max(0.0, jumped)
