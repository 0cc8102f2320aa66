"""A shared store that is not there: nothing unjournaled is shown, nothing is lost, everybody gets an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from uuid import uuid4

from midstream.testing.fault_proxy import FaultProxy
from midstream.testing.patience import PATIENCE, soon
from tests.replicas import Fleet, Replica, event_of, fleet
from tests.valkeys import shared, valkey

OPTIONS = ("--upstream", "scripted:")


@asynccontextmanager
async def behind_proxy() -> AsyncIterator[tuple[FaultProxy, Fleet]]:
    """Gateways, none yet, that reach their store through a proxy."""
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(FaultProxy("127.0.0.1", shared().port))
        url = f"redis://127.0.0.1:{proxy.port}?prefix=t{uuid4().hex}"
        yield proxy, await stack.enter_async_context(fleet(url, *OPTIONS))


async def refused(gateways: Fleet, replica: Replica, method: str, path: str, body: object = None) -> None:
    """503, and when to come back."""
    async with gateways.session.request(method, f"{replica.url}/v1{path}", json=body) as response:
        assert response.status == 503, await response.text()
        assert int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["error"] == "store_unavailable"


async def test_store_that_comes_late_is_met_without_a_restart() -> None:
    """A gateway that starts before its store says 503, and serves once it is there: nothing failed is remembered."""
    async with behind_proxy() as (proxy, gateways):
        await proxy.refuse()
        (replica,) = await gateways.gateways(1)
        await refused(gateways, replica, "POST", "/stream", {"prompt": "Hello", "model": "scripted-n3-r0"})
        await proxy.accept()
        await ready(gateways, replica)
        stream_id = await gateways.create(replica, "scripted-n3-r0")
        assert len((await gateways.read(replica, stream_id)).frames) == 5


async def ready(gateways: Fleet, replica: Replica) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            async with gateways.session.get(f"{replica.url}/readyz") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.05)


async def test_store_away_for_seconds_costs_its_readers_a_reconnect() -> None:
    """Readers are let go without an end, resumes are 503; when it is back the answer is whole (I1, I7)."""
    async with behind_proxy() as (proxy, gateways):
        (replica,) = await gateways.gateways(1)
        stream_id = await gateways.create(replica, "scripted-n120-r40")
        reader = asyncio.create_task(gateways.read(replica, stream_id))
        await gateways.read(replica, stream_id, upto=20)
        await proxy.refuse()
        proxy.reset()
        first = await soon(reader)
        assert 20 <= first.seq < 122
        assert not first.ended
        assert not first.broken
        await refused(gateways, replica, "GET", f"/stream/{stream_id}?from=start")
        await proxy.accept()
        await ready(gateways, replica)
        second = await gateways.read(replica, stream_id, first.seq)
        assert second.seq == 122
        assert event_of(second.frames[-1]) == "done"


async def test_store_out_of_memory_is_waited_for() -> None:
    """Nothing new is begun, nothing is shown that was not written; with room again the answer goes on and is whole."""
    with valkey(maxmemory_policy="noeviction") as server:
        async with fleet(server.url(), *OPTIONS) as gateways:
            (replica,) = await gateways.gateways(1)
            stream_id = await gateways.create(replica, "scripted-n80-r40")
            reader = asyncio.create_task(gateways.read(replica, stream_id))
            await gateways.read(replica, stream_id, upto=20)
            server.ask("CONFIG", "SET", "maxmemory", "1")
            await refused(gateways, replica, "POST", "/stream", {"prompt": "Hello", "model": "scripted"})
            await refused(gateways, replica, "GET", f"/stream/{stream_id}?from=start")
            server.ask("CONFIG", "SET", "maxmemory", "0")
            visit = await soon(reader)
            assert (visit.seq, event_of(visit.frames[-1])) == (82, "done")
