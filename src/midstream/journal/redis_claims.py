"""Whose a stream is: claims, and streams whose writer is gone (R2).

The store decides a claim, in one step, and keeps who writes which open stream.  A process knows of itself which streams
it writes; one that the store calls its own and that it does not write was ended by it, and is open again because the
store has lost the end.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from midstream.errors import StreamEnded
from midstream.journal.base import Orphan
from midstream.journal.redis_keys import SHARDS, Numbers, Space
from midstream.journal.redis_lease import Lease
from midstream.journal.redis_scripts import CLAIM, Code, command
from midstream.journal.redis_store import Store
from midstream.journal.redis_tail import Tail, Tails
from midstream.journal.redis_watch import Watch
from midstream.journal.redis_writing import Writing
from midstream.records import StreamState
from midstream.wire import OPEN


class Claims:
    """Every verb raises StoreUnavailable."""

    def __init__(self, store: Store, space: Space, tails: Tails, lease: Lease, watch: Watch, writing: Writing) -> None:
        self._store, self._space, self._tails, self._lease = store, space, tails, lease
        self._watch, self._writing = watch, writing
        self._under_way: set[str] = set()

    @contextmanager
    def under_way(self, stream_id: str) -> Iterator[None]:
        """While the store may say already, and this process does not know yet, that it writes the stream."""
        self._under_way.add(stream_id)
        try:
            yield
        finally:
            self._under_way.discard(stream_id)

    async def claim(self, tail: Tail) -> StreamState:
        """Take over writing, whoever has it.  Raises StreamEnded."""
        with self.under_way(tail.stream_id):
            _, told = await self._writing.call(CLAIM, tail, "", secrets.token_hex(8))
            return self._claimed(tail, Numbers.of(told))

    async def claim_orphan(self, stream_id: str) -> Orphan | None:
        """Take over writing from a process that is gone; None where it is not, or may not be."""
        tail, told = await self._watch.reading.numbers(stream_id)
        if told.status != OPEN or not self._may_claim(tail, told):
            return None
        dead, leases = told.writer, [self._space.lease(tail.shard, told.writer)]
        if dead == self._lease.process:
            dead, leases = "", []
        try:
            with self.under_way(stream_id):
                code, *now = await self._writing.call(CLAIM, tail, dead, secrets.token_hex(8), keys=leases)
                if code != Code.OK:
                    return None
                numbers = Numbers.of(now[0])
                intact = numbers.run == self._store.node(tail.shard).run_id
                return Orphan(self._claimed(tail, numbers), intact)
        except StreamEnded:
            return None

    def _may_claim(self, tail: Tail, told: Numbers) -> bool:
        if told.writer == self._lease.process:
            return not self._writes(tail.stream_id) and not tail.returned
        return self._lease.may_judge(tail.shard, told.run)

    def _claimed(self, tail: Tail, told: Numbers) -> StreamState:
        if told.highest < tail.highest:
            self._watch.reading.accept(tail, told)
        tail.mine = max(tail.mine, told.epoch)
        self._watch.writes(tail.shard)
        tail.learn(told, asyncio.get_running_loop().time())
        tail.fresh = tail.highest == told.highest
        if tail.waiters and not tail.fresh:
            self._watch.stir(tail)
        return told.state(tail.meta)

    def _writes(self, stream_id: str) -> bool:
        """Is this process writing the stream, or about to?"""
        tail = self._tails.get(stream_id)
        return stream_id in self._under_way or (tail is not None and tail.written_here)

    async def orphans(self) -> list[str]:
        """Open streams whose writer's process is gone, as far as that can be known now."""
        told = await self._store.each((shard, command("HGETALL", self._space.open(shard))) for shard in range(SHARDS))
        found = [
            (shard, stream_id.decode(), writer.decode())
            for shard, some in enumerate(told)
            for stream_id, writer in zip(some[::2], some[1::2], strict=True)
        ]
        dead = await self._dead({(shard, writer) for shard, _, writer in found})
        return [
            stream_id
            for shard, stream_id, writer in found
            if (shard, writer) in dead or (writer == self._lease.process and not self._writes(stream_id))
        ]

    async def _dead(self, writers: Iterable[tuple[int, str]]) -> set[tuple[int, str]]:
        """Of these tags and processes those without a lease."""
        asked = [(shard, writer) for shard, writer in writers if writer != self._lease.process]
        there = await self._store.each(
            (shard, command("EXISTS", self._space.lease(shard, writer))) for shard, writer in asked
        )
        return {one for one, alive in zip(asked, there, strict=True) if not alive}
