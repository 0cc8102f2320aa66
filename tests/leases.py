"""The back ends that tests of leases run over."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

from midstream.journal.redis_url import Terms as StoreTerms
from midstream.journal.redis_url import parse
from midstream.pool.leases import Leases, Terms
from midstream.pool.leases_memory import MemoryLeases
from midstream.pool.leases_redis import RedisLeases
from midstream.testing.clock import ManualClock
from tests.valkeys import QUICK, Valkey, clustered, shared

BACK_ENDS = ("memory", "valkey", "valkey-cluster")


class StoreClock:
    """A clock on a server that stands still until it is moved: leases are `ahead` of the server's own by what that
    takes, and every key under a prefix grows older by as much.

    A key that would never expire fails whoever lets time pass.
    """

    def __init__(self, server: Valkey, prefix: str) -> None:
        self.server, self.prefix = server, prefix
        self._now = self._moved = time.time()

    def __call__(self) -> float:
        return self._now

    def ahead(self) -> float:
        return self._now - time.time()

    def advance(self, seconds: float) -> None:
        self._now += seconds
        now = time.time()
        older, self._moved = seconds - (now - self._moved), now  # it has grown older by itself meanwhile
        for key in self.server.keys(f"{self.prefix}:*"):
            left = self.server.ask("PTTL", key)
            assert left != -1, f"{key!r} never expires"
            if left >= 0:
                self.server.ask("PEXPIRE", key, max(left - int(older * 1000), 0))


def redis_leases(
    url: str,
    terms: Terms | None = None,
    store_terms: StoreTerms = QUICK,
    ahead: Callable[[], float] = lambda: 0.0,
) -> RedisLeases:
    """Not opened yet, with little patience."""
    return RedisLeases(parse(url), terms, store_terms, ahead)


class LeaseStore:
    """A store of its own for a test, empty, with its clock."""

    def __init__(self, back_end: str) -> None:
        self.prefix = uuid.uuid4().hex
        self.clock: ManualClock | StoreClock = ManualClock()
        if back_end != "memory":
            self.clock = StoreClock(shared() if back_end == "valkey" else clustered(), self.prefix)
        self._opened: list[Leases] = []

    async def open(self, terms: Terms | None = None) -> Leases:
        """One more gateway's leases."""
        leases = self._new(terms)
        self._opened.append(leases)
        await leases.open()
        return leases

    def _new(self, terms: Terms | None) -> Leases:
        if isinstance(self.clock, ManualClock):
            return MemoryLeases(self.clock, terms)
        return redis_leases(self.clock.server.url(self.prefix), terms, ahead=self.clock.ahead)

    async def close(self) -> None:
        for leases in self._opened:
            await leases.close()
