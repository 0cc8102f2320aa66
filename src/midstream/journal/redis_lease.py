"""The lease of this process, and whether another one's may be called lost.

A lease is a key that expires by the store's clock.  Who did not renew it in time was stopped, or cut off, and must
expect that others have taken its streams.  When it was the store that was away nobody could renew: then the lease is
taken up again, and nobody is called dead before the living have had a whole term to do the same.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from midstream.errors import StoreUnavailable
from midstream.journal.redis_keys import Space
from midstream.journal.redis_scripts import command
from midstream.journal.redis_store import Store
from midstream.journal.redis_url import Terms


class Lease:
    """`process` names this process in the store.  When its lease is lost it becomes another one, and `lost` is told."""

    def __init__(self, store: Store, space: Space, terms: Terms, lost: Callable[[], None]) -> None:
        self.process = secrets.token_hex(8)
        self.holds = False
        self._store = store
        self._space = space
        self._terms = terms
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._renewed = float("-inf")

    def _keys(self) -> list[tuple[int, bytes]]:
        return [(shard, self._space.lease(shard, self.process)) for shard in self._space.lease_shards()]

    async def take(self) -> None:
        """Have the lease from now on.  Raises StoreUnavailable."""
        started = self._loop.time()
        term = int(self._terms.lease * 1000)
        await self._store.each((shard, command("SET", key, "1", "PX", term)) for shard, key in self._keys())
        self.holds, self._renewed = True, started

    async def renew(self) -> None:
        """Have it for another term; where it is gone, find out why.  Raises StoreUnavailable."""
        if not self.holds:
            await self.take()
            return
        started = self._loop.time()
        term = int(self._terms.lease * 1000)
        try:
            keys = self._keys()
            kept = await self._store.each((shard, command("PEXPIRE", key, term)) for shard, key in keys)
        except StoreUnavailable:
            if self._loop.time() - self._renewed > self._terms.lease:
                self.holds = False
            raise
        if all(kept):
            self._renewed = started
            return
        # Without a break in our contact since the last renewal it was us who were away, not the store.
        gone = [shard for (shard, _), there in zip(keys, kept, strict=True) if not there]
        if any(self._store.node(shard).since < self._renewed for shard in gone):
            self.process = secrets.token_hex(8)
            self._lost()
        await self.take()

    async def give_up(self) -> None:
        """Let others have our streams at once.  Raises StoreUnavailable."""
        self.holds = False
        await self._store.each((shard, command("DEL", key)) for shard, key in self._keys())

    def may_judge(self, shard: int, run: str) -> bool:
        """May a process that wrote under this run id, and has no lease now, be called gone?"""
        node = self._store.node(shard)
        since = node.since if run == node.run_id else max(node.since, node.born)
        return self._loop.time() - since >= self._terms.lease
