"""Abandonment counts readers, polls and snapshots on every gateway (I6)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import NamedTuple

import pytest_asyncio

from midstream.testing.clock import ManualClock
from midstream.testing.gateway import RunningGateway
from midstream.testing.patience import eventually, until
from midstream.testing.puppet import Puppet
from tests.gateways import Http, client, cursor
from tests.sharing import gateway_on, journal_of, processes
from tests.valkeys import QUICK

LIMIT = 30.0


class Two(NamedTuple):
    """A gateway that writes the stream and one that does not, and a clock that both look at."""

    writing: RunningGateway
    other: RunningGateway
    http: Http  # of the other one
    stream_id: str
    puppet: Puppet
    clock: ManualClock

    async def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        await self.writing.streams.pulse(0.0)

    @property
    def open(self) -> bool:
        return not self.puppet.stopped.is_set()


@pytest_asyncio.fixture
async def two() -> AsyncIterator[Two]:
    async with processes() as several, AsyncExitStack() as stack:
        url, told = several.server.url(several.prefix), {"abandon_after": LIMIT, "heartbeat": 3600.0}
        gateways = [gateway_on(url, QUICK, clock=several.clock, **told) for _ in range(2)]
        writing, other = [await stack.enter_async_context(gateway) for gateway in gateways]
        here, there = [await stack.enter_async_context(client(gateway)) for gateway in (writing, other)]
        response = await here.create()
        stream_id = response.headers["Midstream-Stream-Id"]
        puppet = await writing.puppets.next()
        response.close()
        await writing.unread(stream_id)
        yield Two(writing, other, there, stream_id, puppet, several.clock)


async def test_reader_on_another_gateway_keeps_the_generation(two: Two) -> None:
    """However long it reads there; and when it has left it has the whole time to come back."""
    reader = await two.http.open("GET", f"/v1/stream/{two.stream_id}?cursor={cursor(two.stream_id, 0)}")
    await two.other.idle(two.stream_id)
    for _ in range(5):
        await two.pass_time(LIMIT - 1)
    assert two.open
    reader.close()
    await two.other.unread(two.stream_id)
    journal = two.writing.streams.journal

    async def left() -> bool:
        return await journal.lowest_elsewhere(two.stream_id) is None

    await eventually(left, "the other gateway to say that nobody reads there any more")
    await two.pass_time(LIMIT - 1)
    assert two.open
    await two.pass_time(2)
    await until(lambda: not two.open, "the generation to be stopped")


async def test_polls_and_snapshots_on_another_gateway_keep_the_generation(two: Two) -> None:
    """A client that only asks now and then is there, too."""
    for path in ("state", "snapshot") * 4:
        await two.pass_time(LIMIT / 2)
        assert two.open
        assert (await two.http.get(f"/v1/stream/{two.stream_id}/{path}")).status == 200
    await two.pass_time(LIMIT / 2)
    assert two.open
    await two.pass_time(LIMIT)
    await until(lambda: not two.open, "the generation to be stopped")


async def test_store_that_is_away_is_no_sign_that_nobody_reads(two: Two) -> None:
    """What cannot be asked is asked again; the pulse and its other work go on."""
    journal = journal_of(two.writing)
    asked = asyncio.get_running_loop().time()
    for node in journal._store.nodes():
        await node.calls.close()
    await two.pass_time(LIMIT + 1)
    assert asyncio.get_running_loop().time() - asked < 5.0
    assert two.open
