"""To follow a stream: replay after a position, then go on live, as one loop.  THE loop: there is no other.

A reader *pulls from its position*:

    take what is after N
    if there is some:            hand it over, move N
    if N is the terminal's seq:  stop
    else:                        wait until there may be something after N, and take again

Readers only ever take data from the journal; wake-ups carry none and may be lost or doubled.  So there is no window
between "read the buffer" and "subscribe", no set of what was delivered twice, no race between "ended" and the last
append, and no queue per reader: a slow reader costs its position, never the writer or another reader (I5).  Everything
new since the last time is handed over at once, which is what keeps a busy gateway up: a write costs about the same for
one frame as for a hundred.

A position moves when what was handed over has been taken, that is when the next page is asked for (a reader's position
is what its socket has been given; R6 trims by it).

Two ways to run the loop share every line that decides anything (`_take`): `next`, for a task that awaits, and `feed`,
which hands pages to a sink from a callback.  The second exists because a task switch, a future and an ASGI message per
record cost as much as the write itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Protocol

from midstream.errors import CursorExpired, UnknownStream
from midstream.journal.base import Journal
from midstream.records import Page
from midstream.rules import overtaken
from midstream.wire import OPEN

# Readers served in one go before the loop gets its turn: about 2 ms.
_TURN = 256
# Pages of a replay that one reader is written before: a socket takes megabytes before it is full.
_PAGES = 8


class Turn:
    """Runs what was woken, once per turn of the event loop.

    Under load a turn takes longer: more is there for each reader when its turn comes, and fewer writes are made.
    """

    __slots__ = ("_due",)

    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []

    def add(self, run: Callable[[], None]) -> None:
        if not self._due:
            asyncio.get_running_loop().call_soon(self._run)
        self._due.append(run)

    def _run(self) -> None:
        due, self._due = self._due[:_TURN], self._due[_TURN:]
        loop = asyncio.get_running_loop()
        if self._due:
            loop.call_soon(self._run)
        for run in due:
            try:
                run()
            except Exception as error:  # noqa: BLE001  # one that fails must not take the turn of those behind it
                loop.call_exception_handler({"message": "what was due has failed", "exception": error})


class Sink(Protocol):
    """Where `feed` hands pages: a connection that takes bytes without suspending until it is full."""

    def write(self, page: Page) -> bool:
        """Take a page (one without frames: show life).  False: full, or gone."""

    async def drain(self) -> None:
        """Return when there is room again, or the peer has gone."""


class Follow:
    """One reader of one stream.  Iterate it, call `next` until None, or let it `feed` a sink.

    `position` is the last seq the reader has taken; `over` that nothing more will be handed over, and `ended` that the
    terminal record has been (if not, the reader was interrupted and may resume).  A page without frames says that
    nothing has come for a heartbeat's time: the transport shows that it is alive.
    """

    __slots__ = (
        "_ahead",
        "_fed",
        "_handed",
        "_journal",
        "_on_first",
        "_turn",
        "_woken",
        "_write",
        "abort",
        "beat_due",
        "caught_up",
        "ended",
        "first",
        "over",
        "position",
        "seen",
        "still",
        "stream_id",
        "waiting",
    )

    def __init__(
        self,
        journal: Journal,
        stream_id: str,
        after: int,
        abort: Callable[[], None] | None = None,
        turn: Turn | None = None,
        on_first: Callable[[], None] | None = None,
    ) -> None:
        self._journal = journal
        self._ahead: Page | None = None
        self._turn = turn or Turn()
        # Called once, when the first records have been handed over.
        self._on_first = on_first
        self.stream_id = stream_id
        self.first = self.position = self._handed = after
        self.caught_up = False  # it began with nothing left to give it but what would come
        self.ended = False
        self.over = False
        self.waiting = False
        self.beat_due = False
        # While it feeds a sink: the sink, what the journal calls, and the future that `feed` awaits.
        self._write: Callable[[Page], bool] | None = None
        self._woken: Callable[[], None] | None = None
        self._fed: asyncio.Future[None] | None = None
        # For the pulse of `streams`: where it last saw this reader, for how many seconds, and how to cut it off.
        self.seen = after
        self.still = 0.0
        self.abort = abort

    def _take(self, page: Page) -> Page | None:
        """Decide about a page of the journal: hand it over, or None, when there is nothing (yet, or any more).

        Raises CursorExpired when the reader was overtaken (R8).
        """
        if page.frames:
            self._handed = page.last_seq
            if page.status != OPEN and page.ends:
                self.ended = self.over = True
            return page
        if overtaken(self._handed, page.oldest_retained_seq):
            raise CursorExpired(page.oldest_retained_seq)
        if page.status != OPEN:
            self.ended = self.over = True
        elif self.beat_due:
            self.beat_due = False
            return page
        return None

    async def next(self) -> Page | None:
        """The next records, or None at the end or when interrupted.

        Raises CursorExpired when the reader was overtaken or its stream has expired.
        """
        self.position = self._handed
        while not self.over:
            if page := self._take(await self._read()):
                self._note_first()
                return page
            await self._wait()
        return None

    def _note_first(self) -> None:
        if self._on_first is not None and self._handed != self.first:
            told, self._on_first = self._on_first, None
            told()

    async def _wait(self) -> None:
        if not self.over:
            self.waiting = True
            try:
                await self._journal.wait(self.stream_id, self._handed)
            finally:
                self.waiting = False

    async def look_ahead(self) -> None:
        """Have what comes first fetched: what is lost of it is then known before the reader is told anything.

        Raises CursorExpired, CursorAhead, StoreLost, StoreUnavailable, UnknownStream.
        """
        if self._journal.peek(self.stream_id, self._handed) is None:
            self._ahead = await self._read()

    async def _read(self) -> Page:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.frames and ahead.last_seq - len(ahead.frames) == self._handed:
            return ahead
        try:
            return await self._journal.read(self.stream_id, self._handed)
        except UnknownStream:
            raise CursorExpired(None) from None

    async def feed(self, sink: Sink) -> None:
        """Hand everything to the sink, and return where `next` would return None.  Raises what `next` does."""
        self._write = sink.write
        self._woken = partial(self._turn.add, self._pump)
        try:
            while True:
                fed = self._fed = asyncio.get_running_loop().create_future()
                self._pump()
                self._note_first()  # here, once for all that was at hand, and not at each of its records
                await fed
                if self.over:
                    return
                # Either the sink is full, or what comes next is not at hand in this process.
                await sink.drain()
                while not self.over and (page := self._take(await self._read())):
                    room = sink.write(page)
                    self.position = self._handed
                    if room:
                        break
                    await sink.drain()
                else:  # a journal that never has anything at hand must not be asked again and again
                    await self._wait()
        finally:
            self._fed = self._write = self._woken = None
            if self.waiting:  # cancelled: do not leave a callback behind that holds this reader
                self.waiting = False
                self._journal.wake(self.stream_id)

    def _pump(self) -> None:
        """Take what is at hand until there is nothing left, then be called again when there is."""
        fed, write, woken = self._fed, self._write, self._woken
        if fed is None or write is None or woken is None or fed.done():  # done: cancelled, and has not run since
            return
        journal, stream_id = self._journal, self.stream_id
        self.waiting = False
        pages = 0
        try:
            while not self.over:
                found = journal.peek(stream_id, self._handed)
                if found is None:
                    break
                if found.frames:  # as `_take` has it; a call saved for each record of each reader
                    handed = self._handed = found.last_seq
                    if found.status != OPEN and found.ends:
                        self.ended = self.over = True
                    room = write(found)
                    self.position = handed
                    if not room or self.over:
                        break
                    if handed != found.highest_seq:
                        pages += 1
                        if pages < _PAGES:
                            continue
                        woken()
                        return
                elif self._take(found) is not None:
                    if not write(found):
                        break
                elif self.over:
                    break
                if journal.call_when(stream_id, self._handed, woken):
                    self.waiting = True
                    return
            self._fed = None
            fed.set_result(None)
        except UnknownStream:
            fed.set_exception(CursorExpired(None))
        except Exception as error:  # noqa: BLE001  # told to the task that awaits `feed`, like any error of its own
            fed.set_exception(error)

    def beat(self) -> None:
        """Let a waiting reader's `next` return an empty page."""
        self.beat_due = True
        self._journal.wake(self.stream_id)

    def interrupt(self) -> None:
        """End this reader, not its stream (I6): `next` returns None without the terminal record."""
        self.over = True
        self._journal.wake(self.stream_id)

    async def __aiter__(self) -> AsyncIterator[Page]:
        while (page := await self.next()) is not None:
            yield page
