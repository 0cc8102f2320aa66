"""A shared store that is not there: nothing unjournaled is shown, nothing is lost, everybody gets an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from uuid import uuid4

from midstream.journal.redis_keys import Space
from midstream.records import Chunk
from midstream.testing.fault_proxy import FaultProxy
from midstream.testing.patience import PATIENCE, soon, until
from midstream.wire import H_STREAM_ID
from tests.gateways import client
from tests.replicas import Fleet, Replica, Visit, event_of, fleet
from tests.sharing import gateway_on, journal_of, processes
from tests.valkeys import QUICK, shared, valkey

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


async def test_store_away_for_too_long_ends_the_generation_once_it_is_back() -> None:
    """Past the writer's patience the upstream is let go; what it had said stands, and then why it ended (I1, I7)."""
    async with processes() as several, FaultProxy("127.0.0.1", several.server.port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}?prefix={several.prefix}"
        async with gateway_on(url, QUICK) as gateway, client(gateway) as http:
            gateway.streams.limits = replace(gateway.streams.limits, store_patience=0.3)
            response = await http.create()
            stream_id, puppet = response.headers[H_STREAM_ID], await gateway.puppets.next()
            await puppet.say("kept ")
            await proxy.refuse()
            proxy.reset()
            puppet.push([Chunk("owed")])
            await soon(puppet.stopped.wait())
            assert (await http.get(f"/v1/stream/{stream_id}/state")).status == 503
            await proxy.accept()
            await until(journal_of(gateway).available, "the store to be met again")
            body = (await http.get(f"/v1/stream/{stream_id}?from=start")).body
            visit = Visit(stream_id, 0)
            visit.take(body[body.index(b"id: 1\n") :])
            assert [event_of(frame) for frame in visit.frames] == ["start", "token", "token", "failed"]
            assert b'"delta":"owed"' in visit.frames[2]
            assert b'"code":"store_unavailable"' in visit.frames[3]
            assert b'"retryable":true' in visit.frames[3]


async def test_records_deleted_by_hand_are_told_as_lost() -> None:
    """Never a later record, a 404 or an end that was not one: who needs what is gone hears so, and only he (I4)."""
    url = shared().url(prefix := f"t{uuid4().hex}")
    async with fleet(url, *OPTIONS) as gateways:
        a, b = await gateways.gateways(2)
        stream_id = await gateways.create(a, "scripted-n20-r0")
        whole = await gateways.read(a, stream_id)
        log = Space(prefix).log(stream_id)
        entries = [entry_id for entry_id, _ in shared().ask("XRANGE", log, "-", "+")]
        shared().ask("XDEL", log, *entries[1:-1])
        kept = int(entries[-1].split(b"-")[0])
        for path in (f"/stream/{stream_id}?from=start", f"/stream/{stream_id}/snapshot"):
            await lost(gateways, b, path)
        assert (await gateways.read(b, stream_id, kept)).status == 204
        assert (await gateways.read(a, stream_id)).frames == whole.frames  # its writer's process still has them


async def test_stream_whose_numbers_are_deleted_is_lost_and_costs_no_more() -> None:
    """Its writer stops, whom nobody can read any more; readers are let go, and a resume says what has happened."""
    url = shared().url(prefix := f"t{uuid4().hex}")
    async with fleet(url, *OPTIONS) as gateways:
        a, b = await gateways.gateways(2)
        stream_id = await gateways.create(a, "scripted-n3000-r50")
        readers = [asyncio.create_task(gateways.read(replica, stream_id)) for replica in (a, b)]
        await gateways.read(b, stream_id, upto=5)
        shared().ask("DEL", Space(prefix).numbers(stream_id))
        for visit in await soon(asyncio.gather(*readers)):
            assert visit.seq >= 5
            assert not visit.ended
        for replica in (a, b):
            await lost(gateways, replica, f"/stream/{stream_id}?from=start")
        await until(lambda: b"could not be ended" in a.log, "the writer to stop")


async def lost(gateways: Fleet, replica: Replica, path: str) -> None:
    """500, and that it is the store that has lost it."""
    async with gateways.session.get(f"{replica.url}/v1{path}") as response:
        assert response.status == 500, await response.text()
        assert (await response.json())["error"] == "store_lost"
