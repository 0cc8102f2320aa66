"""Which tokens go into which post (PROTOCOL.md, "Pool"), without I/O or a clock of its own.

A post takes what has gathered in a tenth of a second.  A pool takes a thousand posts for a job: where an answer may
have more tokens than that, a post waits until it holds its share of what may still come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from midstream.wire import POOL_MAX_BATCHES

# Bytes that go at once, however young they are.
FULL: Final = 4096
# Posts kept back for what comes after an answer has been longer than it was allowed to be.
_RESERVE: Final = 8


@dataclass(frozen=True, slots=True)
class Batch:
    """What one post carries."""

    seq: int
    content: str
    reasoning: str


class Batcher:
    """The tokens of one job.

    `max_length` is the most that the answer may have; they gather for `gather` seconds.  Times are of any clock.
    """

    def __init__(self, max_length: int, gather: float) -> None:
        self._gather = gather
        self._left = max_length
        self._posts = POOL_MAX_BATCHES - _RESERVE
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._tokens = 0
        self._bytes = 0
        self._since = 0.0
        self._seq = 0

    def add(self, content: str, reasoning: str, now: float) -> None:
        """A token has come."""
        if not self._tokens:
            self._since = now
        self._tokens += 1
        self._bytes += len(content.encode()) + len(reasoning.encode())
        self._content.append(content)
        self._reasoning.append(reasoning)

    @property
    def share(self) -> int:
        """Tokens that a post has to hold so that those still allowed last for what may still come."""
        return max(1, -(-self._left // max(1, self._posts)))

    def due(self, now: float, *, last: bool = False) -> float | None:
        """Seconds until there is something to post: 0 for at once, None where more tokens have to come first."""
        if not self._tokens:
            return None
        if last or self._bytes >= FULL:
            return 0.0
        if self._tokens < self.share:
            return None
        return max(0.0, self._since + self._gather - now)

    def take(self) -> Batch:
        """Everything that has gathered, under the next number."""
        self._seq += 1
        batch = Batch(self._seq, "".join(self._content), "".join(self._reasoning))
        self._left = max(0, self._left - self._tokens)
        self._posts -= 1
        self._tokens = self._bytes = 0
        self._content, self._reasoning = [], []
        return batch
