"""Three gateways on one store, and everything that can happen to them: every reader ends with exactly the bytes of its
stream, or with a loud error.

A failure names its seed; the same seed draws the same deeds, though they meet other moments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from itertools import cycle
from uuid import uuid4

import pytest

from midstream.journal.redis_keys import SHARDS
from midstream.testing.fault_proxy import FaultProxy
from midstream.testing.patience import until
from tests.clusters import Slots, serves, two_nodes
from tests.replicas import fleet
from tests.simulation.havoc import HEARTBEAT, LEASE, Havoc, Shape, Store
from tests.valkeys import Valkey, valkey


class Restarting:
    """A server that is killed and started again on what it has written to its file."""

    loses = False

    def __init__(self, server: Valkey) -> None:
        self._server = server

    async def strike(self) -> None:
        self._server.kill()
        await asyncio.sleep(0.3)
        await asyncio.to_thread(self._server.start)


class FailingOver:
    """A primary with a replica that lags behind it.  The primary dies, and what the replica lacks is gone."""

    loses = True

    def __init__(self, stack: ExitStack, proxy: FaultProxy, primary: Valkey) -> None:
        self._stack, self._proxy, self._primary = stack, proxy, primary
        self._replica = self._follower()

    def _follower(self) -> Valkey:
        replica = self._stack.enter_context(valkey(maxmemory_policy="noeviction"))
        replica.ask("REPLICAOF", "127.0.0.1", self._primary.port)
        return replica

    async def strike(self) -> None:
        await until(lambda: self._replica.info("replication").get("master_link_status") == "up", "the replica")
        self._replica.ask("REPLICAOF", "NO", "ONE")
        await asyncio.sleep(0.2)  # what is written now is lost
        self._primary.kill()
        self._proxy.turn_to("127.0.0.1", self._replica.port)
        self._proxy.reset()
        self._primary = self._replica
        self._replica = await asyncio.to_thread(self._follower)


class Clustered:
    """Two servers that share the slots.  One is killed and started again on its file; next time a tag's slot moves."""

    loses = False

    def __init__(self, nodes: list[Valkey]) -> None:
        self._nodes, self._slots, self._one = cycle(nodes), Slots(nodes), asyncio.Lock()
        self._tags, self._deeds = cycle(range(SHARDS)), cycle((self._restart, self._move))

    async def strike(self) -> None:
        async with self._one:
            await next(self._deeds)()

    async def _restart(self) -> None:
        node = next(self._nodes)
        node.kill()
        await asyncio.sleep(0.3)
        await asyncio.to_thread(node.start)

    async def _move(self) -> None:
        await until(lambda: all(map(serves, self._slots.nodes)), "both servers")
        await self._slots.move(next(self._tags))


async def havoc(url: str, store: Store, shape: Shape, seed: int) -> None:
    options = ("--upstream", "scripted:", "--heartbeat", str(HEARTBEAT), "--drain", "3")
    async with fleet(url, *options) as gateways:
        world = Havoc(gateways, await gateways.grow(3), store, shape, seed)
        try:
            await world.run()
            world.judge()
        finally:
            print(seed, dict(world.seen))


async def restarts(shape: Shape, seed: int) -> None:
    """On one server that writes all it does to a file."""
    with valkey(appendonly="yes", maxmemory_policy="noeviction") as server:
        await havoc(server.url(f"t{uuid4().hex}", lease=LEASE), Restarting(server), shape, seed)


async def clustered(shape: Shape, seed: int) -> None:
    """On a cluster of two servers that write all they do to a file; gateways are told one of them."""
    with two_nodes(appendonly="yes", maxmemory_policy="noeviction") as nodes:
        await havoc(nodes[0].url(f"t{uuid4().hex}", lease=LEASE), Clustered(nodes), shape, seed)


async def fails_over(shape: Shape, seed: int) -> None:
    """On a primary and a replica, behind an address that moves."""
    with ExitStack() as stack:
        primary = stack.enter_context(valkey(maxmemory_policy="noeviction"))
        async with FaultProxy("127.0.0.1", primary.port) as proxy:
            url = f"redis://127.0.0.1:{proxy.port}?lease={LEASE}"
            await havoc(url, FailingOver(stack, proxy, primary), shape, seed)


Kind = Callable[[Shape, int], Awaitable[None]]


async def test_readers_lose_nothing_in_ten_seconds_of_havoc() -> None:
    """Thirty readers of six streams, while gateways and the store are killed, paused and replaced (I2, I3, I4, I7)."""
    await restarts(Shape(seconds=10, readers=30, slots=6, rate=25), seed=1)


@pytest.mark.long
async def test_readers_lose_nothing_while_servers_of_a_cluster_come_and_go() -> None:
    """A short life on a cluster: a dozen readers of three streams (I2, I3, I4, I7)."""
    await clustered(Shape(seconds=5, readers=12, slots=3, rate=25), seed=3)


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("store", [restarts, fails_over, clustered])
async def test_readers_lose_nothing_in_a_minute_of_havoc(store: Kind) -> None:
    """The same for a minute with two hundred readers; and where the store fails over to a replica that lags."""
    await store(Shape(seconds=60, readers=200, slots=20, rate=15), 2)
