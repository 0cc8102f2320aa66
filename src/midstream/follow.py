"""To follow a stream: replay after a position, then go on live, as one loop.  THE loop: there is no other.

A reader *pulls from its position*:

    read what is after N
    if there is some:            hand it over, move N
    if N is the terminal's seq:  stop
    else:                        wait until there may be something after N, and read again

Readers only ever take data from the journal; wake-ups carry none and may be lost or doubled.  So there is no window
between "read the buffer" and "subscribe", no set of what was delivered twice, no race between "ended" and the last
append, and no queue per reader: a slow reader costs its position, never the writer or another reader (I5).  Everything
new since the last read is handed over at once, which is what keeps a busy gateway up: a write costs about the same for
one frame as for a hundred.

A position moves when what was handed over has been taken, that is when the next page is asked for (a reader's position
is what its socket has been given; R6 trims by it).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from midstream.errors import CursorExpired, UnknownStream
from midstream.journal.base import Journal
from midstream.records import Page
from midstream.rules import overtaken
from midstream.wire import OPEN


class Follow:
    """One reader of one stream.  Iterate it, or call `next` until None.

    `position` is the last seq the reader has taken; `ended` tells, after None, whether the terminal record was among
    what it took (if not, the reader was interrupted and may resume).  A page without frames says that nothing has come
    for a heartbeat's time: the transport shows that it is alive.
    """

    __slots__ = (
        "_beat",
        "_handed",
        "_interrupted",
        "_journal",
        "abort",
        "ended",
        "first",
        "position",
        "seen",
        "still",
        "stream_id",
        "waiting",
    )

    def __init__(
        self, journal: Journal, stream_id: str, after: int, abort: Callable[[], None] | None = None
    ) -> None:
        self._journal = journal
        self.stream_id = stream_id
        self.first = self.position = self._handed = after
        self.ended = False
        self.waiting = False
        self._beat = False
        self._interrupted = False
        # For the pulse of `streams`: where it last saw this reader, for how many seconds, and how to cut it off.
        self.seen = after
        self.still = 0.0
        self.abort = abort

    async def next(self) -> Page | None:
        """The next records, or None at the end or when interrupted.

        Raises CursorExpired when the reader was overtaken (R8) or its stream has expired.
        """
        self.position = self._handed
        while not (self.ended or self._interrupted):
            try:
                page = await self._journal.read(self.stream_id, self._handed)
            except UnknownStream:
                raise CursorExpired(None) from None
            if page.frames:
                self._handed = page.last_seq
                self.ended = page.ends
                return page
            if overtaken(self._handed, page.oldest_retained_seq):
                raise CursorExpired(page.oldest_retained_seq)
            if page.status != OPEN:
                self.ended = True
            elif self._beat:
                self._beat = False
                return page
            else:
                self.waiting = True
                try:
                    await self._journal.wait(self.stream_id, self._handed)
                finally:
                    self.waiting = False
        return None

    def beat(self) -> None:
        """Let a waiting reader's `next` return an empty page."""
        self._beat = True
        self._journal.wake(self.stream_id)

    def interrupt(self) -> None:
        """End this reader, not its stream (I6): `next` returns None without the terminal record."""
        self._interrupted = True
        self._journal.wake(self.stream_id)

    async def __aiter__(self) -> AsyncIterator[Page]:
        while (page := await self.next()) is not None:
            yield page
