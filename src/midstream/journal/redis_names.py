"""Names of streams: found, bound, kept as long as their stream, freed.

On one server names are bound by the script that creates their stream.  On a cluster they can lie elsewhere: there a
name is reserved for the new stream, the stream is created, and the name is bound.  Who meets a reservation waits, until
the stream is there, which is then bound on behalf of its creator, or until the reservation has run out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from midstream.journal.redis_keys import Space, shard_of
from midstream.journal.redis_scripts import BIND, UNBIND, Code, command
from midstream.journal.redis_store import Store
from midstream.journal.redis_url import Terms

# How often a reservation is looked at, in seconds: at first, and at last.
_FIRST_LOOK, _LAST_LOOK = 0.01, 0.25


class Names:
    """Every verb raises StoreUnavailable."""

    def __init__(self, store: Store, space: Space, terms: Terms) -> None:
        self._store = store
        self._space = space
        self._terms = terms

    def key(self, name: str) -> bytes:
        return self._space.name(name)

    async def find(self, name: str) -> str | None:
        """The stream that has the name, and still is there."""
        told = await self._get(name)
        if told is None or told.startswith("?") or not await self._stands(told):
            return None
        return told

    async def _get(self, name: str) -> str | None:
        told = await self._store.run_on(self.key(name), command("GET", self.key(name)))
        return told.decode() if told is not None else None

    async def _stands(self, stream_id: str) -> bool:
        key = self._space.numbers(stream_id)
        return bool(await self._store.run(shard_of(stream_id), command("EXISTS", key)))

    async def reserve(self, names: Sequence[str], stream_id: str) -> str | None:
        """Reserve all of them for this stream; or free them again and tell the stream that has one of them."""
        reserved: list[str] = []
        for name in sorted(set(names)):  # in one order for all, so that no two wait for each other
            taken = await self._reserve(name, stream_id)
            if taken is not None:
                await self.free(reserved, stream_id)
                return taken
            reserved.append(name)
        return None

    async def _reserve(self, name: str, stream_id: str) -> str | None:
        pause, key = _FIRST_LOOK, self.key(name)
        mark, term = "?" + stream_id, int(self._terms.reserve * 1000)
        while True:
            if await self._store.run_on(key, command("SET", key, mark, "NX", "PX", term)):
                return None
            told = await self._get(name)
            if told in (mark, stream_id):  # the reply of an earlier try was lost
                return None
            if told is not None and await self._stands(told.removeprefix("?")):
                return told.removeprefix("?")
            if told is not None and not told.startswith("?"):  # its stream is gone, and did not free it
                await self.free([name], told)
                continue
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LAST_LOOK)

    async def bind(self, names: Iterable[str], stream_id: str, ttl: bytes) -> str | None:
        """Bind them to their stream for so many milliseconds; the stream that has one of them instead, if any."""
        for name in names:
            key = self.key(name)
            told = await self._store.run_on(key, BIND.call([key], stream_id, ttl))
            if told[0] == Code.TAKEN:
                return str(told[1].decode().removeprefix("?"))
        return None

    async def free(self, names: Iterable[str], stream_id: str) -> None:
        """Free those that are still this stream's."""
        for name in names:
            key = self.key(name)
            await self._store.run_on(key, UNBIND.call([key], stream_id))
