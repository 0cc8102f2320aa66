"""A cluster of two servers, for tests of what happens when slots move."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis.crc import key_slot

from tests.valkeys import Valkey, cluster_node


@contextmanager
def two_nodes(**config: Any) -> Iterator[list[Valkey]]:
    """Two servers that have found each other: that takes them two seconds."""
    made = [cluster_node((0, 8191), **config), cluster_node((8192, 16383), **config)]
    try:
        for epoch, node in enumerate(made, 1):
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", epoch)
        made[0].ask("CLUSTER", "MEET", "127.0.0.1", made[1].port, made[1].bus)
        while not all(serves(node) for node in made):
            time.sleep(0.01)
        yield made
    finally:
        for node in made:
            node.close()


def serves(node: Valkey) -> bool:
    """Whether it takes part in the cluster, and knows the other one."""
    told = node.ask("CLUSTER", "INFO")
    return b"cluster_state:ok" in told and b"cluster_slots_ok:16384" in told


class Slots:
    """Which of two servers has the slot of a tag, and how it is moved."""

    def __init__(self, nodes: list[Valkey]) -> None:
        self.nodes = nodes
        self.ids = [node.ask("CLUSTER", "MYID").decode() for node in nodes]

    def holder(self, shard: int) -> int:
        """Which of the two has this tag's slot now."""
        slot = key_slot(b"%d" % shard)
        for first, last, (_, port, *_), *_ in self.nodes[0].ask("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return [node.port for node in self.nodes].index(port)
        raise AssertionError(f"nobody has slot {slot}")

    async def move(self, shard: int) -> None:
        """Move the slot of a tag to the other server, as an operator would, key by key."""
        slot, old = key_slot(b"%d" % shard), self.holder(shard)
        source, target = self.nodes[old], self.nodes[1 - old]
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", self.ids[old])
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", self.ids[1 - old])
        while keys := source.ask("CLUSTER", "GETKEYSINSLOT", slot, 3):
            source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
            await asyncio.sleep(0.02)  # gateways meet the slot half moved
        for node in (target, source):
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", self.ids[1 - old])
