"""What the lease contract works with: a worker that posts, and shapes of the fixtures."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Protocol

from midstream.pool.leases import Leases, Terms
from midstream.pool.shapes import Entry, Lease, Posted
from midstream.testing.journal_writer import Clock
from midstream.wire import POOL_BYTES_PER_TOKEN

__all__ = ["Another", "Clock", "MakeLeases", "Worker", "new_id", "posted", "texts"]

MakeLeases = Callable[[Terms], Awaitable[Leases]]
KEY, OTHER_KEY = sha256(b"the worker's key").digest(), sha256(b"somebody else's").digest()


class Another(Protocol):
    """Gives an opened back end on the same store, as another gateway has it."""

    async def __call__(self, leases: Leases) -> Leases: ...


def new_id() -> str:
    return str(uuid.uuid4())


class Worker:
    """A generation and its lease.  `seq` is the last batch that was taken."""

    def __init__(self, leases: Leases, request: str, max_bytes: int) -> None:
        self.leases = leases
        self.seq = 0
        self.lease = Lease(
            generation=new_id(),
            request=request,
            worker="a worker ☂",
            model="koboldcpp/ünicode",
            owner="owner",
            key_digest=KEY,
            max_bytes=max_bytes,
        )

    @classmethod
    async def begin(
        cls, leases: Leases, request: str | None = None, max_bytes: int = 100 * POOL_BYTES_PER_TOKEN
    ) -> Worker:
        """With its lease granted."""
        worker = cls(leases, request or new_id(), max_bytes)
        assert await leases.grant(worker.lease)
        return worker

    @property
    def generation(self) -> str:
        return self.lease.generation

    @property
    def request(self) -> str:
        return self.lease.request

    async def post(self, seq: int, content: str = "", reasoning: str = "", key: bytes = KEY) -> Posted:
        return await self.leases.post(self.generation, key, seq, content, reasoning)

    async def say(self, *contents: str) -> None:
        """Post each as the next batch."""
        for content in contents:
            assert not (await self.post(self.seq + 1, content)).cancelled
            self.seq += 1

    async def live(self) -> Posted:
        """Post nothing but a sign of life."""
        return await self.post(0)


async def posted(leases: Leases, request: str) -> list[Entry]:
    """All entries of a request that is not watched."""
    return [entry for _, entry in await leases.entries(request, "")]


async def texts(leases: Leases, request: str) -> list[str]:
    return [entry.content for entry in await posted(leases, request)]
