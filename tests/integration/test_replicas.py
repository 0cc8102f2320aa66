"""Several gateways, processes of their own on one Valkey: any serves any stream, and any of them may go at any time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Any
from uuid import uuid4

import aiohttp
import pytest
import pytest_asyncio

from midstream.cursor import Cursor
from midstream.producers.scripted import tokens
from midstream.testing.patience import soon, until
from midstream.testing.upstream import MisbehavingUpstream, Script, Stall
from midstream.wire import H_STREAM_ID
from tests.replicas import Fleet, Replica, Visit, event_of, fleet
from tests.valkeys import shared, valkey

LEASE = 2.0
# A reader that waits looks once a second; the rest is for a machine that has other things to do.
MARGIN = 1.0 + 1.0


@pytest.fixture(scope="module")
def running() -> Iterator[Fleet]:
    """Gateways with a simulated model, which the tests share; who needs more, or has killed some, starts others."""
    gateways = Fleet(shared().url(f"t{uuid4().hex}", lease=LEASE), "--upstream", "scripted:")
    yield gateways
    gateways.close()


@pytest_asyncio.fixture
async def gateways(running: Fleet) -> AsyncIterator[Fleet]:
    async with running.connected():
        yield running


def text_of(frames: list[bytes]) -> str:
    return "".join(json.loads(frame.split(b"\ndata: ")[1]).get("delta", "") for frame in frames)


def told(visit: Visit) -> dict[str, Any]:
    """What the last record says."""
    data: dict[str, Any] = json.loads(visit.frames[-1].split(b"\ndata: ")[1])
    return data


def whole(count: int, prompt: str = "Hello") -> str:
    return "".join(islice(tokens(prompt), count))


async def test_any_gateway_serves_any_stream(gateways: Fleet) -> None:
    """Created on one; read, acked, listed, summed up and cancelled on others, as if there were one (I3)."""
    a, b, c = await gateways.gateways(3)
    stream_id = await gateways.create(a, "scripted-n60-r100")
    here = asyncio.create_task(gateways.read(a, stream_id))
    position, halves = 0, list[bytes]()
    for turn in range(30):  # round robin, two records at a time
        visit = await gateways.read((a, b, c)[turn % 3], stream_id, position, upto=position + 2)
        halves += visit.frames
        position = visit.seq
        if visit.ended:
            break
    rest = await gateways.read(b, stream_id, position) if not visit.ended else Visit(stream_id, position)
    assert halves + rest.frames == (await here).frames
    assert text_of(halves + rest.frames) == whole(60)
    state = await gateways.ask("POST", b, f"/stream/{stream_id}/ack", {"seq": 30})
    assert (state["acked_seq"], state["trimmed_seq"]) == (30, 30)
    snapshot = await gateways.ask("GET", c, f"/stream/{stream_id}/snapshot")
    assert (snapshot["text"], snapshot["status"], snapshot["complete"]) == (whole(60), "done", True)
    for replica in (a, b, c):
        listed = await gateways.ask("GET", replica, "/streams")
        assert listed["streams"][0]["stream_id"] == stream_id
        late = await gateways.read(replica, stream_id, 10)
        assert late.status == 409
        assert json.loads(late.rest)["oldest_available"] == 31
        assert (await gateways.read(replica, stream_id, 30)).frames == (halves + rest.frames)[30:]
    await gateways.ask("DELETE", c, f"/stream/{stream_id}")
    assert [(await gateways.read(replica, stream_id)).status for replica in (a, b, c)] == [404] * 3


async def test_resume_elsewhere_attaches_before_the_first_token(gateways: Fleet) -> None:
    """A reader that comes to another gateway the moment the head has left the first one waits there (never 404)."""
    a, b = await gateways.gateways(2)

    async def one(number: int) -> None:
        asked = {"prompt": f"{number}", "model": "scripted-n2-r40"}
        async with gateways.session.post(f"{a.url}/v1/stream", json=asked) as response:
            visit = await gateways.read(b, response.headers[H_STREAM_ID])
        assert (visit.status, visit.ended) == (200, True), visit
        assert text_of(visit.frames) == whole(2)

    for first in range(0, 500, 20):
        await asyncio.gather(*(one(number) for number in range(first, first + 20)))


async def test_cancel_elsewhere_closes_the_upstream_before_its_first_token() -> None:
    """Stop reaches a gateway that does not write the stream, while the upstream has not even answered (under 2 s)."""
    loop = asyncio.get_running_loop()
    async with (
        MisbehavingUpstream({"silent": Script([Stall()])}) as upstream,
        fleet(shared().url(f"t{uuid4().hex}"), "--upstream", upstream.url) as gateways,
    ):
        a, b, c = await gateways.gateways(3)
        stream_id = await gateways.create(a, "silent")
        await upstream.requested(1)
        readers = [asyncio.create_task(gateways.read(replica, stream_id)) for replica in (a, b)]
        await until(lambda: upstream.open_connections == 1)
        began = loop.time()
        state = await gateways.ask("POST", c, f"/stream/{stream_id}/cancel")
        assert state["status"] == "cancelled"
        await upstream.disconnected(1, within=2.0)
        visits = await asyncio.gather(*readers)
        assert loop.time() - began < 2.0
        for visit in visits:
            assert [event_of(frame) for frame in visit.frames] == ["start", "cancelled"]
            assert told(visit)["reason"] == "client"


async def test_killed_gateway_ends_its_streams_for_readers_elsewhere(gateways: Fleet) -> None:
    """SIGKILL: within lease and look a reader on another gateway is told, after every token that was kept (I7)."""
    loop = asyncio.get_running_loop()
    a, b, c = await gateways.gateways(3)
    stream_id = await gateways.create(a, "scripted-n3000-r50")
    seen = await gateways.read(a, stream_id, upto=6)
    await asyncio.gather(b.settled(LEASE), c.settled(LEASE))
    waiting = [asyncio.create_task(gateways.read(replica, stream_id, 3)) for replica in (b, c)]
    a.kill()
    killed = loop.time()
    visits = await asyncio.gather(*waiting)
    assert loop.time() - killed < LEASE + MARGIN
    for visit in visits:
        assert told(visit)["error"]["code"] == "writer_lost"
        assert visit.frames == visits[0].frames
        assert visit.frames[: len(seen.frames) - 3] == seen.frames[3:]
        assert whole(3000).startswith(text_of(seen.frames[:3] + visit.frames))


async def test_stream_that_nobody_waits_for_ends_when_somebody_comes(gateways: Fleet) -> None:
    """Killed unseen: who resumes later, at any gateway, is told within the same time, and keeps the text."""
    a, b = await gateways.gateways(2)
    stream_id = await gateways.create(a, "scripted-n3000-r50")
    seen = await gateways.read(a, stream_id, upto=7)
    a.kill()
    await b.settled(LEASE)
    async with asyncio.timeout(LEASE + MARGIN):
        visit = await gateways.read(b, stream_id, 3)
    assert told(visit)["error"]["code"] == "writer_lost"
    assert visit.frames[:4] == seen.frames[3:7]
    snapshot = await gateways.ask("GET", b, f"/stream/{stream_id}/snapshot")
    assert (snapshot["text"], snapshot["status"]) == (text_of(seen.frames[:3] + visit.frames), "failed")


async def test_paused_gateway_is_superseded_and_told_so(gateways: Fleet) -> None:
    """SIGSTOP past its lease: others end its stream; awake it writes no more, and its own readers read what they do."""
    a, b = await gateways.gateways(2)
    stream_id = await gateways.create(a, "scripted-n3000-r50")
    await b.settled(LEASE)
    here = asyncio.create_task(gateways.read(a, stream_id))
    there = await paused_until_taken(gateways, a, b, stream_id)
    assert told(there)["error"]["code"] == "writer_lost"
    visit = await soon(here)
    assert visit.frames == there.frames, "the paused gateway's reader was given something that is not in the store"
    again = await gateways.create(a, "scripted-n3-r0")  # it is a gateway like any other again
    assert text_of((await gateways.read(b, again)).frames) == whole(3)
    await until(lambda: b"longer than its lease" in a.log, "the paused gateway's log")


async def paused_until_taken(gateways: Fleet, paused: Replica, other: Replica, stream_id: str) -> Visit:
    """Stop a gateway until another one has ended its stream; what a reader there was given."""
    there = asyncio.create_task(gateways.read(other, stream_id))
    paused.pause()
    try:
        return await asyncio.wait_for(there, LEASE + MARGIN)
    finally:
        paused.go_on()


async def test_rolling_restart_is_a_reconnect(gateways: Fleet) -> None:
    """SIGTERM: readers are let go at once without an end, the generation goes on, and they read the rest elsewhere."""
    loop = asyncio.get_running_loop()
    old, other = await gateways.gateways(2)
    stream_id = await gateways.create(old, "scripted-n150-r50")
    readers = [asyncio.create_task(gateways.read(old, stream_id)) for _ in range(5)]
    await gateways.read(old, stream_id, upto=20)
    old.terminate()
    began = loop.time()
    first = await asyncio.gather(*readers)
    assert loop.time() - began < 2.0, "readers had to wait for the drain"
    assert not any(visit.ended or visit.broken or visit.rest.strip().startswith(b"event") for visit in first)
    with pytest.raises(aiohttp.ClientError):
        await gateways.create(old, "scripted")
    second = await asyncio.gather(*(gateways.read(other, stream_id, visit.seq) for visit in first))
    for one, two in zip(first, second, strict=True):
        assert text_of(one.frames + two.frames) == whole(150)
        assert event_of(two.frames[-1]) == "done"
    assert await old.ended() == 0


async def test_drain_that_runs_out_hands_the_stream_over(gateways: Fleet) -> None:
    """What is open when `--drain` has passed belongs to nobody: no lease is waited for, it ends at once."""
    loop = asyncio.get_running_loop()
    (old,) = await gateways.grow(1, "--drain", "1")
    (other,) = await gateways.gateways(1)
    stream_id = await gateways.create(old, "scripted-n3000-r50")
    reader = asyncio.create_task(gateways.read(other, stream_id))
    await gateways.read(other, stream_id, upto=20)
    await other.settled(LEASE)
    old.terminate()
    assert await old.ended() == 0
    gone = loop.time()
    visit = await soon(reader)
    assert loop.time() - gone < MARGIN
    assert told(visit)["error"]["code"] == "writer_lost"
    assert whole(3000).startswith(text_of(visit.frames))


async def test_two_first_tries_on_two_gateways_start_one_generation(gateways: Fleet) -> None:
    """The same Idempotency-Key at the same moment: every answer is the one stream from its start."""
    a, b, c = await gateways.gateways(3)
    made = set()
    for _ in range(20):
        headers = {"Idempotency-Key": f"{uuid4()}"}
        tries = (gateways.create(replica, "scripted-n3-r0", headers) for replica in (a, b, c, a, b, c))
        (winner,) = set(await asyncio.gather(*tries))
        made.add(winner)
    listed = await gateways.ask("GET", a, "/streams")
    assert {one["stream_id"] for one in listed["streams"][:20]} == made
    other = {"prompt": "another", "model": "scripted-n3-r0"}
    async with gateways.session.post(f"{b.url}/v1/stream", json=other, headers=headers) as response:
        assert response.status == 422


async def test_ack_on_one_gateway_leaves_a_slow_reader_on_another_what_it_needs(gateways: Fleet) -> None:
    """A reader that has not taken everything yet reads on, whatever was acked elsewhere meanwhile (R6)."""
    a, b = await gateways.gateways(2)
    stream_id = await gateways.create(a, "scripted-n30000-r0")
    path = f"{b.url}/v1/stream/{stream_id}?cursor={Cursor(stream_id, 0).encode()}"
    async with gateways.session.get(path) as slow:  # megabytes behind it, and nobody reads
        slow.content._high_water = 1
        visit = Visit(stream_id, 0, slow.status)
        visit.take(await slow.content.readany())
        await gateways.read(a, stream_id)
        state = await gateways.ask("POST", a, f"/stream/{stream_id}/ack", {"seq": 30_002})
        assert state["acked_seq"] == 30_002
        assert state["trimmed_seq"] < 30_000
        while data := await slow.content.readany():
            visit.take(data)
    assert visit.ended
    assert text_of(visit.frames) == whole(30_000)


async def test_every_gateway_says_what_store_it_is_on(gateways: Fleet) -> None:
    """Ready means that the store answers and that this process has its lease."""
    (a,) = await gateways.gateways(1)
    async with gateways.session.get(f"{a.url}/readyz") as response:
        assert await response.json() == {"status": "ready", "journal": "redis"}


async def test_password_of_the_store_is_in_no_log() -> None:
    """It gets in with it, and says of the journal's URL only the rest."""
    with valkey(maxmemory_policy="noeviction") as server:
        server.ask("CONFIG", "SET", "requirepass", "s3cret")
        url = server.url().replace("redis://", "redis://:s3cret@")
        async with fleet(url, "--verbose", "--upstream", "scripted:") as gateways:
            (replica,) = await gateways.gateways(1)
            stream_id = await gateways.create(replica, "scripted-n3-r0")
            assert len((await gateways.read(replica, stream_id)).frames) == 5
            assert b"journal   redis://" in replica.log
            assert b"s3cret" not in replica.log
