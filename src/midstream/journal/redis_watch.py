"""How a process hears of what others did to streams that it reads or writes.

A change is published under the stream's tag.  A process listens where somebody waits for a stream that it does not
write itself, and what it hears makes it read, once for all its readers.  What others do to a stream that it writes
(they cancel, claim or forget it) is told to it besides, on a channel of its own: a writer that waits for its model does
not ask the store.  Messages can be lost, so once a second one look over all streams that somebody waits for, or that
are written here and silent, finds what has changed, and whose writer is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable

from midstream.errors import MidstreamError, StoreLost, StoreUnavailable, UnknownStream
from midstream.journal.redis_keys import SHARDS, Space
from midstream.journal.redis_lease import Lease
from midstream.journal.redis_node import Node
from midstream.journal.redis_reading import Reading
from midstream.journal.redis_scripts import LOOK
from midstream.journal.redis_store import Store
from midstream.journal.redis_tail import Tail, Tails
from midstream.wire import OPEN, SLICE_FRAMES

logger = logging.getLogger(__name__)

# A channel is listened to for so long after the last stream of its tag was waited for, in seconds.
_LINGER = 10.0
# Readers that were woken are back within this time, in seconds, or are slow and read for themselves.
_BACK = 1.0
# Tags whose streams are looked at together: with ten thousand streams about a millisecond for the loop and the store.
_TAGS_AT_ONCE = 8


class Watch:
    """`orphaned` and `superseded` are a Listener's; `repair` puts right a stream of ours after the store came back."""

    def __init__(
        self,
        store: Store,
        space: Space,
        tails: Tails,
        lease: Lease,
        orphaned: Callable[[str], None],
        superseded: Callable[[Tail], None],
        repair: Callable[[Tail], Awaitable[None]],
    ) -> None:
        self._store, self._space, self._tails, self._lease = store, space, tails, lease
        self._orphaned, self._superseded, self._repair = orphaned, superseded, repair
        self._loop = asyncio.get_running_loop()
        self.reading = Reading(store, space, tails, self._hears)
        self._hearing = [0] * SHARDS  # a number of its own for each time a channel began to be heard; 0 while it is not
        self._begun = 0
        self._ready: dict[int, asyncio.Future[None]] = {}
        self._wanted: dict[int, float] = {}  # tag -> when somebody last waited under it
        self._mailboxes: dict[int, bytes] = {}  # tag -> where this process hears of what it writes under it
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._away: dict[Node, float] = {}
        self._attending: dict[str, asyncio.Task[None]] = {}
        self.on_return: Callable[[], None] = lambda: None  # told that a server is there again
        self.on_restart: Callable[[], None] = lambda: None  # told that a server is another one than before
        store.on_message, store.on_ready, store.on_deaf = self._message, self._heard_again, self._deaf
        store.on_up, store.on_down, store.on_restart = self._up, self._down, self._restarted
        store.on_moved = self._moved

    async def close(self) -> None:
        tasks = [*self._attending.values(), *self._reading.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # --- messages ---------------------------------------------------------------------------------------------------

    def _hears(self, tail: Tail) -> int:
        """A number that changes whenever this process may have missed a change of the stream; 0 while it may."""
        return -1 if tail.mine or tail.status != OPEN else self._hearing[tail.shard]

    async def attended(self, stream_id: str) -> Tail:
        """The stream, attended to: one task does it, however many wait."""
        tail = await self.reading.known(stream_id)
        tail.awaited = self._loop.time()
        task = self._attending.get(stream_id)
        if task is None:
            task = self._attending[stream_id] = asyncio.create_task(self.attend(tail))
            task.add_done_callback(lambda done: self._attended(stream_id, done))
        await asyncio.shield(task)
        return tail

    def _attended(self, stream_id: str, task: asyncio.Task[None]) -> None:
        del self._attending[stream_id]
        if not task.cancelled():
            task.exception()  # who still waits has been told

    async def attend(self, tail: Tail) -> None:
        """Hear of every change of the stream from now on, and know it as it is now.  Raises UnknownStream, StoreLost,
        StoreUnavailable.
        """
        await self.hear(tail)
        await self.read(tail)

    async def hear(self, tail: Tail) -> None:
        """Hear of every change of the stream from now on.  Raises StoreUnavailable."""
        if self._hears(tail):
            return
        self._want(tail.shard)
        ready = self._ready.setdefault(tail.shard, self._loop.create_future())
        try:
            async with asyncio.timeout(self._store.terms.patience):
                await asyncio.shield(ready)
        except TimeoutError:
            raise StoreUnavailable("the store does not let us hear of changes", 2) from None

    def _want(self, shard: int) -> None:
        self._wanted[shard] = self._loop.time()
        self._store.listen(shard)

    def writes(self, shard: int) -> None:
        """This process writes a stream of this tag: hear what others do to it."""
        mailbox = self._space.mailbox(shard, self._lease.process)
        before = self._mailboxes.get(shard)
        if before != mailbox:
            if before is not None:
                self._store.ignore(before)
            self._mailboxes[shard] = mailbox
            self._store.listen(shard, mailbox)

    def _heard_again(self, channel: bytes) -> None:
        shard = self._space.shard_of_channel(channel)
        if channel == self._mailboxes.get(shard):  # what was said before is found by the look that comes next
            for tail in self._tails:
                if tail.shard == shard and tail.written_here:
                    tail.seen = float("-inf")
            return
        self._begun += 1
        self._hearing[shard] = self._begun
        if ready := self._ready.pop(shard, None):
            ready.set_result(None)
        for tail in self._tails:
            if tail.shard == shard and tail.waiters:
                self.stir(tail)

    def _deaf(self, node: Node) -> None:
        self._unheard(self._store.shards_of(node))

    def _unheard(self, shards: Iterable[int]) -> None:
        for shard in shards:
            self._hearing[shard] = 0
        for tail in self._tails:
            if not self._hears(tail):
                tail.fresh = False

    def _moved(self, shards: list[int]) -> None:
        self._unheard(shards)
        for shard in shards:
            if shard in self._wanted:
                self._store.listen(shard)
            if mailbox := self._mailboxes.get(shard):
                self._store.listen(shard, mailbox)

    def _message(self, channel: bytes, message: bytes) -> None:
        process, _, stream_id = message.decode(errors="replace").partition(" ")
        tail = self._tails.get(stream_id)
        if tail is None or process == self._lease.process:
            return
        tail.news += 1
        # Readers that were just woken are not all back yet; each for itself would ask the store.
        if tail.waiters or tail.mine or self._loop.time() - tail.awaited < _BACK:
            self.stir(tail)
        else:
            tail.fresh = False

    # --- reading for everybody --------------------------------------------------------------------------------------

    def stir(self, tail: Tail) -> None:
        """Read what is new, and wake who waits for it."""
        if not tail.stirring:
            tail.stirring = True
            self._reading[tail.stream_id] = asyncio.create_task(self._stirred(tail))

    async def stirred(self, tail: Tail) -> None:
        """Have the news read, once for all who ask for it, where that is enough to know the stream as it is now."""
        if self._hears(tail):
            self.stir(tail)
            await asyncio.wait([self._reading[tail.stream_id]])

    async def _stirred(self, tail: Tail) -> None:
        try:
            await self.read(tail)
        except (UnknownStream, StoreLost) as error:
            tail.fresh = False
            tail.wake()  # its readers will hear it from the store, and its writer at its next append
            if tail.written_here and isinstance(error, UnknownStream):
                self._superseded(tail)
        except StoreUnavailable:
            pass
        except MidstreamError as error:
            logger.warning("stream %s cannot be read: %s", tail.stream_id, error)
        finally:
            tail.stirring = False
            del self._reading[tail.stream_id]

    async def read(self, tail: Tail) -> None:
        """Bring the tail up to date, for as long as there is news, and wake who waits."""
        while True:
            news = tail.news
            if tail.returned:
                await self._verify(tail)
            else:
                await self.reading.fetch(tail, tail.highest, self.reading.span)
            if tail.mine and (tail.epoch != tail.mine or tail.writer != self._lease.process):
                self._superseded(tail)
            tail.wake()
            if news == tail.news:
                return

    async def _verify(self, tail: Tail) -> None:
        """The store was replaced: does it still have what this process has given its readers?"""
        if tail.mine:
            await self._repair(tail)
            return
        after = max(tail.highest - 1, 0)
        last = tail.records(tail.highest, tail.highest)
        found = await self.reading.fetch(tail, after, SLICE_FRAMES)
        behind = self.reading.behind(tail, found.told)
        if behind and self.reading.may_be_put_back(tail, found.told):
            return
        if behind or (last and found.frames and found.frames[0] != last[0]):
            self.reading.accept(tail, found.told)
        tail.returned = False
        await self.reading.fetch(tail, found.told.highest, SLICE_FRAMES)

    # --- the store comes and goes -----------------------------------------------------------------------------------

    def _up(self, node: Node) -> None:
        if self._away.pop(node, None) is not None:
            self.on_return()

    def _down(self, node: Node) -> None:
        self._away[node] = self._loop.time()

    def _restarted(self, node: Node) -> None:
        shards = set(self._store.shards_of(node))
        for tail in self._tails:
            if tail.shard in shards and (tail.status == OPEN or tail.waiters or tail.mine):
                tail.returned = True
                if tail.mine:
                    self.stir(tail)
                else:
                    tail.fresh = False
        self.on_restart()

    def _outages(self, now: float) -> None:
        """Where the store has been away too long, let readers hear that from the read that comes next."""
        for node, since in list(self._away.items()):
            if now - since > self._store.terms.outage:
                shards = set(self._store.shards_of(node))
                for tail in self._tails:
                    if tail.shard in shards and tail.status == OPEN:
                        tail.fresh = False
                        tail.wake()

    # --- the look ---------------------------------------------------------------------------------------------------

    async def look(self) -> None:
        """One look: what has changed unheard, and whose writer is gone."""
        now = self._loop.time()
        self._tails.tidy()
        self._outages(now)
        due: defaultdict[int, list[Tail]] = defaultdict(list)
        for tail in self._tails:
            if tail.status != OPEN or not (tail.waiters or tail.mine):
                continue
            if tail.waiters and not tail.mine:
                self._want(tail.shard)
            if now - tail.seen >= self._store.terms.look * 0.4 or (tail.waiters and not tail.fresh):
                due[tail.shard].append(tail)
        self._leave(now)
        looks = list(due.items())
        for at in range(0, len(looks), _TAGS_AT_ONCE):
            await asyncio.gather(*(self._look_at(*look) for look in looks[at : at + _TAGS_AT_ONCE]))

    def _leave(self, now: float) -> None:
        """Listen no longer where nobody waits any more."""
        gone = [shard for shard, wanted in self._wanted.items() if now - wanted > _LINGER]
        for shard in gone:
            del self._wanted[shard]
            self._store.ignore(self._space.channel(shard))
        if gone:
            self._unheard(gone)

    async def _look_at(self, shard: int, tails: list[Tail]) -> None:
        writers = sorted({tail.writer for tail in tails if not tail.mine and tail.writer})
        leases = [self._space.lease(shard, writer) for writer in writers]
        known = [f"{tail.highest} {tail.epoch} {tail.status}" for tail in tails]
        try:
            gone, changed = await self._store.run(
                shard, LOOK.call([*leases, *(tail.keys.stream for tail in tails)], len(leases), *known)
            )
        except MidstreamError:
            return  # the outage is counted elsewhere, and the next look is near
        now = self._loop.time()
        dead = {writers[at] for at in gone}
        for at, tail in enumerate(tails):
            if at in changed or tail.returned or not tail.fresh:
                self.stir(tail)
            else:
                tail.seen = now
            if tail.writer in dead and not tail.mine and self._lease.may_judge(shard, tail.run):
                self._orphaned(tail.stream_id)
