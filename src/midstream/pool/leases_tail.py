"""How a process reads the progress of all requests that it watches: one XREAD that waits, on a connection of its own.

On a cluster a command may only name keys of one slot, so there is one for each tag in use.  What it brings is kept
until it is asked for, so that a relay that keeps up costs the store nothing more.  A connection that breaks is made
again, and the next XREAD goes on from where the last one came to: nothing is lost that the store still has.

    watch ──► the next XREAD names the request      (one that waits is interrupted by an entry in `control`)
    entry ──► buffer, wake ──► `entries` takes it from the buffer

Only a reply that is overdue may end the connection: an XREAD may take BLOCK seconds more than any other command.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from hiredis import ReplyError

from midstream.errors import JournalError, StoreUnavailable
from midstream.journal.redis_link import Link, Lost, Tether, dial
from midstream.journal.redis_node import Greeting, Node
from midstream.journal.redis_scripts import command
from midstream.journal.redis_store import Store
from midstream.pool.leases import unpacked
from midstream.pool.leases_scripts import PoolSpace, tag_of
from midstream.pool.leases_wakes import Wakes
from midstream.pool.shapes import Entry

logger = logging.getLogger(__name__)

# Seconds that an XREAD waits: an interrupt that was lost costs no more than this.
BLOCK = 2.0
# Entries of one request that one XREAD brings at most, and characters of each request that are kept for its relay.  Who
# is further behind reads from the store.
_COUNT, _KEPT = 500, 256 * 1024
# The store looks each key up, and waits on it, at each XREAD.  So the next one is put off by this much per request, in
# seconds, and brings what came meanwhile; below the second number it is not worth a timer.
_PER_REQUEST, _AT_LEAST = 5e-6, 0.0005
# Seconds before a connection is made again after a refusal, and for which an interrupt's key outlives it.
_PAUSE, _CONTROL_TERM = 0.1, 60

Position = tuple[int, int]
START: Position = (0, 0)


def position(told: bytes | str) -> Position:
    """An entry's id, to be compared."""
    first, _, second = (told if isinstance(told, str) else told.decode()).partition("-")
    return int(first), int(second or 0)


def entry_of(fields: list[bytes]) -> Entry:
    """An entry from its fields, which are always in one order."""
    _, generation, _, seq, _, content, _, reasoning, _, worker, _, model, *ended = fields
    return Entry(
        generation.decode(),
        int(seq),
        unpacked(content),
        unpacked(reasoning),
        worker.decode(),
        model.decode(),
        ended=bool(ended),
    )


class _Watched:
    """A request that is watched: its entries after `base`, as far as `read`.  `warm` once the store has been asked."""

    __slots__ = ("base", "buffer", "kept", "key", "read", "read_id", "request", "warm")

    def __init__(self, request: str, key: bytes) -> None:
        self.request, self.key = request, key
        self.base = self.read = START
        self.read_id = b"0-0"
        self.buffer: list[tuple[Position, str, Entry]] = []
        self.kept = 0
        self.warm = False

    def take(self, told: list[Any]) -> None:
        for entry_id, fields in told:
            entry = entry_of(fields)
            self.read, self.read_id = position(entry_id), entry_id
            self.buffer.append((self.read, entry_id.decode(), entry))
            self.kept += len(entry.content) + len(entry.reasoning)
        if self.kept > _KEPT:
            self._forget(len(self.buffer))

    def after(self, after: Position) -> list[tuple[str, Entry]] | None:
        """The entries after a position, which are then forgotten up to it; None where they are not all here."""
        if not self.warm or after < self.base:
            return None
        passed = next((at for at, (where, _, _) in enumerate(self.buffer) if where > after), len(self.buffer))
        self._forget(passed)
        return [(entry_id, entry) for _, entry_id, entry in self.buffer]

    def _forget(self, count: int) -> None:
        if count:
            self.base = self.buffer[count - 1][0]
            self.kept -= sum(len(entry.content) + len(entry.reasoning) for _, _, entry in self.buffer[:count])
            del self.buffer[:count]


class Tail:
    """Reads what is watched.  `process` names this process in the store."""

    def __init__(self, store: Store, space: PoolSpace, wakes: Wakes) -> None:
        self._store, self._space, self._wakes = store, space, wakes
        self.process = secrets.token_hex(8)
        self._watched: dict[str, _Watched] = {}
        self._lines: dict[int, _Line] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._met = False

    def watch(self, request: str) -> None:
        """Read it from now on, from its oldest entry."""
        self._watched[request] = watched = _Watched(request, self._space.progress(request))
        if self._met:
            self._line(tag_of(request)).add(watched)

    def forget(self, request: str) -> None:
        watched = self._watched.pop(request, None)
        if watched is not None and (line := self._lines.get(self._of(tag_of(request)))) is not None:
            line.remove(watched)

    def entries(self, request: str, after: Position) -> list[tuple[str, Entry]] | None:
        """What is known here; None when the store is to be asked."""
        watched = self._watched.get(request)
        return watched.after(after) if watched is not None else None

    def up(self, _: Node) -> None:
        """A server was met: only now is it known whether there is one for all."""
        if not self._met:
            self._met = True
            for watched in self._watched.values():
                self._line(tag_of(watched.request)).add(watched)
        for line in self._lines.values():
            line.hurry()

    def lost(self, node: Node) -> None:
        """A server went, or is another one: who waits for it may wait in vain."""
        for tag, line in self._lines.items():
            if self._store.node(tag) is node:
                line.drop()

    def moved(self, tags: list[int]) -> None:
        for tag in tags:
            if tag in self._lines:
                self._lines[tag].drop()

    def _of(self, tag: int) -> int:
        return tag if self._store.clustered else 0

    def _line(self, tag: int) -> _Line:
        tag = self._of(tag)
        if tag not in self._lines:
            self._lines[tag] = _Line(self, self._store, self._wakes, tag, self._space.control(tag, self.process))
        return self._lines[tag]

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for line in self._lines.values():
            await line.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


class _Line:
    """One XREAD after the other over the requests of one tag, or of all on a single server.

    `asked` are those that the one under way names; None while none is.
    """

    def __init__(self, tail: Tail, store: Store, wakes: Wakes, tag: int, control: bytes) -> None:
        self._tail, self._store, self._wakes, self._tag, self._control = tail, store, wakes, tag, control
        self._control_id = b"0-0"
        self._loop = asyncio.get_running_loop()
        self._members: dict[bytes, _Watched] = {}
        self._asked: dict[bytes, _Watched] | None = None
        self._interrupting = self._mending = False
        self._later: asyncio.TimerHandle | None = None
        self._link: Link | None = None
        self._tether = Tether(self._dial, store.terms.patience, self._up, self._down, lambda _: None)

    def add(self, watched: _Watched) -> None:
        self._members[watched.key] = watched
        if self._asked is None:
            self._ask_soon()
        elif not self._interrupting:
            self._interrupting = True
            self._tail.start(self._interrupt())

    def remove(self, watched: _Watched) -> None:
        self._members.pop(watched.key, None)

    # --- the connection ---------------------------------------------------------------------------------------------

    async def _dial(self) -> Link:
        access = self._store.access
        patient = replace(access, reply_timeout=access.reply_timeout + BLOCK)
        link = await dial(patient, self._store.node(self._tag).place)
        try:
            async with asyncio.timeout(access.connect_timeout):
                Greeting.of((await link.ask(("INFO",)))[0])
        except BaseException:
            link.abort()
            raise
        return link

    def _up(self, link: Link) -> None:
        self._link = link
        self._ask_soon()

    def _down(self) -> None:
        self._link = self._asked = None

    def hurry(self) -> None:
        self._tether.hurry()

    def drop(self) -> None:
        self._tether.drop()

    async def close(self) -> None:
        if self._later is not None:
            self._later.cancel()
        self._members.clear()
        await self._tether.close()

    # --- reading ----------------------------------------------------------------------------------------------------

    def _ask_soon(self) -> None:
        """Ask in the next turn of the loop, which may bring more to ask for; or later, where it is much."""
        if self._later is None:
            pause = _PER_REQUEST * len(self._members)
            self._later = self._loop.call_later(pause if pause >= _AT_LEAST else 0, self._ask)

    def _ask(self) -> None:
        self._later = None
        if self._link is None or self._asked is not None or not self._members:
            return
        asked = self._asked = dict(self._members)
        keys = [self._control, *asked]
        ids = [self._control_id, *[watched.read_id for watched in asked.values()]]
        xread = command("XREAD", "COUNT", _COUNT, "BLOCK", int(BLOCK * 1000), "STREAMS", *keys, *ids)
        self._link.send(xread, 1, self._landed)

    def _landed(self, replies: list[Any] | None) -> None:
        asked, self._asked = self._asked, None
        if replies is None or asked is None:
            return
        if isinstance(replies[0], ReplyError):
            if not self._mending:
                self._mending = True
                self._tail.start(self._mend(replies[0]))
            return
        for watched in asked.values():
            watched.warm = True
        for key, told in replies[0] or ():
            if key == self._control:
                self._control_id = told[-1][0]
            elif self._members.get(key) is asked[key]:  # else it is watched no more, or anew and from its beginning
                asked[key].take(told)
                self._wakes.wake(asked[key].request)
        self._ask_soon()

    async def _interrupt(self) -> None:
        """End the wait of the XREAD under way, so that the next one names all."""
        try:
            await self._store.together(
                self._tag,
                command("XADD", self._control, "MAXLEN", 1, "*", "watch", 1),
                command("EXPIRE", self._control, _CONTROL_TERM),
            )
        except (StoreUnavailable, JournalError) as error:
            logger.debug("no interrupt: %s", error)  # the XREAD ends by itself
        finally:
            self._interrupting = False

    async def _mend(self, refusal: ReplyError) -> None:
        """Find the server that has the tag now, and ask that one."""
        logger.info("progress is not to be read: %s", refusal)
        try:
            await asyncio.sleep(_PAUSE)
            await self._store.run(self._tag, command("EXISTS", self._control))
        except (StoreUnavailable, JournalError, Lost) as error:
            logger.debug("the store is away: %s", error)
        finally:
            self._mending = False
            self._tether.drop()
