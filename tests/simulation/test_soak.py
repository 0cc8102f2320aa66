"""Readers come and go at random while streams grow, shrink, end and vanish: nobody is ever told anything wrong.

A failure names its seed; the same seed draws the same actions, though not the same turns of the loop.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from midstream.journal.local import Local
from midstream.server.settings import Settings
from midstream.testing.gateway import RunningGateway
from midstream.testing.patience import until
from tests.simulation.soak import Shape, World, judge_all


async def soak(directory: Path, back_end: str, shape: Shape, seed: int) -> None:
    """Live through one world, then hold everything it was told against what was appended, and look for what is left."""
    journal = {"memory": "memory:", "sqlite": f"sqlite:///{directory}/{seed}.db"}[back_end]
    settings = Settings(journal=journal, heartbeat=10.0, max_stream_records=60 if shape.evicts else 100_000)
    async with RunningGateway(settings) as gateway:
        tasks, files = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
        world = World(gateway, shape, seed)
        async with asyncio.timeout(100):
            await world.run()
        judge_all(world)
        await until(lambda: not gateway.server.server_state.connections, "the last connection to close")
        assert len(asyncio.all_tasks()) == tasks
        assert len(os.listdir("/proc/self/fd")) <= files
        journal_now = gateway.streams.journal
        assert isinstance(journal_now, Local)
        assert journal_now.retained_bytes() == sum(log.held() for log in journal_now._logs.values())
        print(seed, Counter((visit.status, visit.how) for visit in world.visits))


back_ends = pytest.mark.parametrize("back_end", ["memory", "sqlite"])
kinds = pytest.mark.parametrize("evicts", [False, True], ids=["kept", "evicted"])


@kinds
@back_ends
async def test_readers_are_told_nothing_wrong_whatever_happens(tmp_path: Path, back_end: str, evicts: bool) -> None:
    """Some hundreds of connections to a dozen streams."""
    await soak(tmp_path, back_end, Shape(evicts=evicts), seed=1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 8))
@kinds
@back_ends
async def test_readers_are_told_nothing_wrong_for_long(tmp_path: Path, back_end: str, evicts: bool, seed: int) -> None:
    """Thousands of connections, to streams of other lengths, with more readers or fewer."""
    draw = Random(seed)
    shape = Shape(
        streams=draw.choice([6, 12, 30]),
        readers=draw.choice([2, 6, 15]),
        visits=draw.choice([5, 20]),
        batches=draw.choice([10, 60, 120]),
        evicts=evicts,
    )
    await soak(tmp_path, back_end, shape, seed)
