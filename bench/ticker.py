"""The clockwork that both servers under measurement share: what is due, what it says, how late the loop was.

Floor and gateway must be offered the same chunks at the same instants, or their figures could not be
compared.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

TICK = 0.001
# With a seq of five digits a native frame around this text is 105 bytes long.
_PADDING = " of the same length"
# A tick never offers more than this many ticks' worth: past saturation it would otherwise owe ever more, and
# each tick would last longer than the one before.  What it leaves out is counted.
_MOST_TICKS = 20


def now_us() -> int:
    """CLOCK_MONOTONIC in microseconds: the clock the load client reads."""
    return time.monotonic_ns() // 1000


def chunk_text(at_us: int) -> str:
    """The text of one chunk: `@` and the 16 digits of the time it was offered, then padding."""
    return f" @{at_us:016d}{_PADDING}"


class Ticker:
    """Calls `feed(i)` for streams 0 … `streams` - 1 in turn, `rate` times a second in all, off a 1 ms timer.

    `fed` is called after the ticks that had something to feed.

    The timer is also the probe of the loop's lag: `lags` holds (when, how late), both in microseconds.
    """

    def __init__(
        self, feed: Callable[[int], None], streams: int, rate: float, fed: Callable[[], None] = lambda: None
    ) -> None:
        self._feed = feed
        self._fed = fed
        self._streams = streams
        self._rate = rate
        self._next = 0
        self._begin = self._armed = now_us()
        self._handle: asyncio.TimerHandle | None = None
        self.offered = 0
        self.left_out = 0
        self.lags: list[tuple[int, int]] = []

    def start(self) -> None:
        self._begin = now_us()
        self._arm()

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _arm(self) -> None:
        self._armed = now_us()
        self._handle = asyncio.get_running_loop().call_later(TICK, self._tick)

    def _tick(self) -> None:
        now = now_us()
        self.lags.append((now, now - self._armed - int(TICK * 1e6)))
        due = int((now - self._begin) * self._rate / 1e6) - self.offered - self.left_out
        most = max(1, int(self._rate * TICK * _MOST_TICKS))
        if due > most:
            self.left_out += due - most
            due = most
        feed, streams, at = self._feed, self._streams, self._next
        for _ in range(due):
            feed(at)
            at += 1
            if at == streams:
                at = 0
        self._next = at
        self.offered += due
        if due:
            self._fed()
        self._arm()

    def stats(self) -> dict[str, object]:
        return {"offered": self.offered, "left_out": self.left_out, "lags": self.lags}
