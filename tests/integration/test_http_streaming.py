"""A stream as bytes on a connection: framing, signs of life, headers, middleware around the gateway, slow peers."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response

from midstream.codec.sse import Decoder
from midstream.records import STREAM_OVERHEAD, Chunk
from midstream.testing.patience import soon, until
from midstream.testing.puppet import Puppet
from midstream.wire import H_STREAM_ID, SEND_STALL
from tests.gateways import Site, cursor, site, wire

_log = logging.getLogger("around")
FRAME = rb"id: \d+\nevent: [a-z]+\ndata: [^\n]+\n\n"
TALK = rb"retry: \d+\n|: ping\n"


@pytest_asyncio.fixture
async def here() -> AsyncIterator[Site]:
    async with site() as running:
        yield running


async def beat(here: Site, stream_id: str) -> None:
    """One heartbeat's time of silence."""
    await here.gateway.idle(stream_id)
    await here.gateway.pulse(here.gateway.settings.heartbeat)
    await here.gateway.idle(stream_id)


async def test_connection_talk_is_bare_lines_between_frames(here: Site) -> None:
    """`retry` once, `: ping` after each silence; no blank line after either, no id, nowhere inside a frame."""
    stream_id, puppet = await here.open_stream()
    async with wire(here.gateway) as peer:
        peer.request("GET", f"/v1/stream/{stream_id}?from=start")
        assert (await peer.head())[0] == 200
        for text in ("a", "b\n\n: ping\n"):
            for _ in range(2):
                await beat(here, stream_id)
            await puppet.say(text, text)
        await here.gateway.idle(stream_id)
        await puppet.finish()
        body = await peer.body()
    assert re.fullmatch(rb"retry: \d+\n(?:%b|: ping\n)+" % FRAME, body)
    assert body.count(b": ping\nid: 2\n") == 1
    assert len(re.findall(rb"^: ping$", body, re.MULTILINE)) == 4
    assert [int(seq) for seq in re.findall(rb"^id: (\d+)$", body, re.MULTILINE)] == [1, 2, 3, 4, 5, 6]
    without_talk = re.sub(rb"^(?:%b)" % TALK, b"", body, flags=re.MULTILINE)
    whole = await here.http.get(f"/v1/stream/{stream_id}?from=start")
    assert re.sub(rb"^(?:%b)" % TALK, b"", whole.body, flags=re.MULTILINE) == without_talk


async def test_retry_is_drawn_anew_for_each_connection(here: Site) -> None:
    """Readers of a gateway that restarts do not all come back in the same millisecond."""
    stream_id = await here.told("a")
    drawn = set()
    for _ in range(20):
        answer = await here.http.get(f"/v1/stream/{stream_id}?from=start")
        match = re.match(rb"retry: (\d+)\nid: 1\n", answer.body)
        assert match is not None
        drawn.add(int(match[1]))
    assert len(drawn) > 10
    assert all(1000 <= milliseconds <= 3000 for milliseconds in drawn)


async def test_no_ping_where_there_is_no_silence(here: Site) -> None:
    """Whoever is being sent records knows that the gateway is alive."""
    stream_id, puppet, reader = await here.begin()
    for _ in range(5):
        await puppet.say("a")
        await here.gateway.idle(stream_id)
        await here.gateway.streams.pulse(here.gateway.settings.heartbeat * 0.9)
    await puppet.finish()
    assert b": ping" not in await reader.read()


async def test_heartbeat_header_and_ping_follow_the_setting() -> None:
    async with site(heartbeat=2.5) as here:
        stream_id, puppet, reader = await here.begin()
        assert reader.headers["Midstream-Heartbeat"] == "2.5"
        await beat(here, stream_id)
        await puppet.finish()
        assert (await reader.read()).count(b": ping\n") == 1


async def test_headers_are_the_same_on_create_resume_and_replay(here: Site) -> None:
    """Whichever way a stream is reached, no proxy may hold it back, change it or know its length."""
    stream_id, puppet, created = await here.begin()
    path = f"/v1/stream/{stream_id}?from=start"
    resumed = await here.http.open("GET", path, {"Accept-Encoding": "gzip, br, deflate"})
    await puppet.finish()
    replayed = await here.http.open("GET", path, {"Accept-Encoding": "gzip"})
    idle_end = await here.http.open("GET", f"/v1/stream/{stream_id}?cursor={cursor(stream_id, 2)}")
    for response in (created, resumed, replayed, idle_end):
        assert response.headers["Cache-Control"] == "no-store, no-transform"
        assert response.headers[H_STREAM_ID] == stream_id
        assert "Content-Length" not in response.headers
        assert "Content-Encoding" not in response.headers
        assert "Server" not in response.headers
    for response in (created, resumed, replayed):
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert response.headers["Location"] == f"/v1/stream/{stream_id}"
        assert response.headers["Midstream-Heartbeat"] == "15"
        assert (await response.read()).endswith(b'{"seq":2,"done":true,"finish_reason":"stop"}\n\n')
    assert idle_end.status == 204


async def test_answers_are_never_compressed_and_never_stored(here: Site) -> None:
    stream_id = await here.told("a" * 5000)
    paths = [f"/v1/stream/{stream_id}{rest}" for rest in ("?from=start", "/state", "/snapshot", "?cursor=x")]
    for path in (*paths, "/v1/streams", "/v1/stream/x/state", "/openapi.json", "/healthz"):
        answer = await here.http.get(path, {"Accept-Encoding": "gzip, br, zstd"})
        assert "content-encoding" not in answer.headers
        assert answer.headers["cache-control"].startswith("no-store")


async def test_headers_come_before_the_model_has_said_anything(here: Site) -> None:
    """With the first record, so that a page knows its stream's id and a proxy sees bytes."""
    stream_id, puppet, reader = await here.begin()
    assert reader.status == 200
    first = await soon(reader.content.readany())
    assert f'"stream_id":"{stream_id}"'.encode() in first
    assert not puppet.stopped.is_set()
    await puppet.finish()


async def test_http_1_0_client_is_served(here: Site) -> None:
    """Old proxies ask so; the end of the body is then the end of the connection."""
    stream_id = await here.told("a")
    async with wire(here.gateway) as peer:
        peer.send(f"GET /v1/stream/{stream_id}?from=start HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
        status, headers = await peer.head()
        assert (status, dict(headers)["connection"]) == (200, "close")
        assert b'{"seq":3,"done":true,"finish_reason":"stop"}' in await peer.rest()


async def test_connection_serves_one_request_after_the_other(here: Site) -> None:
    """Keep-alive across streams, 204s and errors, also when the second request came before the first was answered."""
    stream_id = await here.told("a")
    async with wire(here.gateway) as peer:
        for _ in range(2):
            peer.request("GET", f"/v1/stream/{stream_id}?from=start")
            peer.request("GET", f"/v1/stream/{stream_id}?cursor={cursor(stream_id, 3)}")
            peer.request("GET", f"/v1/stream/{stream_id}?cursor={cursor(stream_id, 1)}")
        for _ in range(2):
            assert (await peer.head())[0] == 200
            assert (await peer.body()).count(b"\nid: ") == 3
            assert (await peer.head())[0] == 204
            assert (await peer.head())[0] == 200
            assert (await peer.body()).count(b"\nid: ") == 2


async def test_peer_that_leaves_in_silence_is_noticed(here: Site) -> None:
    """No write is needed to see that it has gone; the generation does not mind (I6)."""
    stream_id, puppet = await here.open_stream()
    async with wire(here.gateway) as peer:
        peer.request("GET", f"/v1/stream/{stream_id}?from=start")
        await peer.head()
        await here.gateway.idle(stream_id)
    await here.gateway.unread(stream_id)
    await puppet.say("a")
    await puppet.finish()


# --- around the gateway ----------------------------------------------------------------------------------------------


async def logged(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
    """What applications mount without thinking of streams."""
    response = await go_on(request)
    _log.info("%s %s %d", request.method, request.url.path, response.status_code)
    return response


AROUND: dict[str, Callable[[Any], Any]] = {
    "gzip": lambda app: GZipMiddleware(app, minimum_size=0),
    "logging": lambda app: BaseHTTPMiddleware(app, dispatch=logged),
    "both": lambda app: GZipMiddleware(BaseHTTPMiddleware(app, dispatch=logged), minimum_size=0),
}


@pytest.fixture(params=AROUND)
def around(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return AROUND[request.param]


async def test_middleware_around_holds_nothing_back(around: Callable[[Any], Any]) -> None:
    """Headers before the first token, each event before the next one is said, none of it compressed."""
    async with site(around=around) as here:
        response = await here.http.create({"Accept-Encoding": "gzip"})
        stream_id, puppet = response.headers[H_STREAM_ID], await here.puppets.next()
        assert "Content-Encoding" not in response.headers
        assert response.headers["Cache-Control"] == "no-store, no-transform"
        assert b"event: start\n" in await soon(response.content.readany())
        for seq in range(2, 6):
            await puppet.say("word")
            frame = await soon(response.content.readany())
            assert frame == b'id: %d\nevent: token\ndata: {"seq":%d,"delta":"word","done":false}\n\n' % (seq, seq)
        await beat(here, stream_id)
        assert await soon(response.content.readany()) == b": ping\n"
        await puppet.finish()
        assert (await response.read()).startswith(b"id: 6\nevent: done\n")


async def test_middleware_around_hides_no_departure(around: Callable[[Any], Any]) -> None:
    """A reader that leaves in a silent phase is gone within a heartbeat; the generation goes on."""
    async with site(around=around) as here:
        stream_id, puppet, response = await here.begin()
        await here.gateway.idle(stream_id)
        response.close()
        await here.gateway.pulse(here.gateway.settings.heartbeat)
        await here.gateway.unread(stream_id)
        await puppet.say("a")
        await puppet.finish()
        assert (await here.gateway.streams.journal.state(stream_id)).status == "done"


async def test_stalled_reader_is_cut_off_behind_a_middleware(around: Callable[[Any], Any]) -> None:
    async with site(around=around) as here:
        await stall(here)


# --- peers that take nothing -----------------------------------------------------------------------------------------

PIECE = "x" * 128 * 1024


async def stall(here: Site) -> tuple[str, Puppet]:
    """A reader that takes nothing is full; after a minute without progress it is cut off, its stream is not."""
    stream_id, puppet = await here.open_stream()
    async with wire(here.gateway) as peer:
        peer.request("GET", f"/v1/stream/{stream_id}?from=start")
        await peer.head()
        await fill(here, puppet, stream_id)
        await here.gateway.pulse(SEND_STALL - 1)
        assert len(here.gateway.readers(stream_id)) == 1
        await here.gateway.streams.pulse(1)
        await here.gateway.unread(stream_id)
        assert not puppet.stopped.is_set()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await peer.body()
    return stream_id, puppet


async def fill(here: Site, puppet: Puppet, stream_id: str) -> None:
    """Say so much that a reader that takes nothing is stuck."""
    [follow] = here.gateway.readers(stream_id)
    for _ in range(500):
        await puppet.say(PIECE)
        if (
            not follow.waiting
            and follow.position < (await here.gateway.streams.journal.state(stream_id)).highest_seq - 3
        ):
            return
    raise AssertionError("500 pieces did not fill the sockets")


async def test_peer_that_vanished_is_cut_off_after_the_stall_limit(here: Site) -> None:
    """It neither reads nor says that it has gone; generation and other readers are unaffected, and it is counted."""
    stream_id, puppet = await stall(here)
    await puppet.say("on")
    await puppet.finish()
    assert b"midstream_readers_stalled_total 1.0\n" in (await here.http.get("/metrics")).body
    highest = (await here.http.get(f"/v1/stream/{stream_id}/state")).json["highest_seq"]
    answer = await here.http.get(f"/v1/stream/{stream_id}", {"Last-Event-ID": str(highest - 2)})
    assert answer.body.count(b"\nid: ") == 2


@pytest.mark.parametrize(
    ("batch", "times"), [(["x"] * 1000, 100), (["x" * 2 * 2**20], 20)], ids=["small tokens", "large tokens"]
)
async def test_reader_that_takes_nothing_costs_bounded_bytes(batch: list[str], times: int) -> None:
    """I5: the bound is in bytes, whatever the size of a token; the writer is not slowed, the other reader gets all."""
    bound = 4 * 2**20
    async with site(max_stream_bytes=bound) as here:
        stream_id, puppet, fast = await here.begin()
        async with wire(here.gateway) as stuck:
            stuck.request("GET", f"/v1/stream/{stream_id}?from=start")
            await stuck.head()
            await here.gateway.idle(stream_id, readers=2)
            decoder, ids = Decoder(), [0]
            for _ in range(times):
                await puppet.say(*batch)
                state = await here.gateway.streams.journal.state(stream_id)
                while ids[-1] < state.highest_seq:
                    part = await soon(fast.content.readany())
                    assert part, "the reader that keeps up was dropped"
                    ids += [int(event.id or 0) for event in decoder.feed(part)]
                assert (
                    here.gateway.streams.journal.retained_bytes() <= bound + STREAM_OVERHEAD + 1000
                )  # the request is kept, too
            assert state.oldest_retained_seq > 1
        assert ids == list(range(state.highest_seq + 1))
        await puppet.finish()
        await soon(fast.read())


async def test_reader_that_takes_a_little_is_not_cut_off(here: Site) -> None:
    """Slow is not dead: progress, however small, begins the limit anew."""
    stream_id, puppet = await here.open_stream()
    async with wire(here.gateway) as peer:
        peer.request("GET", f"/v1/stream/{stream_id}?from=start")
        await peer.head()
        [follow] = here.gateway.readers(stream_id)
        await fill(here, puppet, stream_id)
        for _ in range(3):
            await here.gateway.pulse(SEND_STALL - 1)
            stuck_at = follow.position
            while follow.position == stuck_at:
                await peer.chunk()
                await puppet.say(PIECE)
        assert here.gateway.readers(stream_id) == [follow]


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this kernel cannot be told (no TCP_USER_TIMEOUT)")
async def test_kernel_ends_what_nobody_acknowledges(here: Site) -> None:
    """A silent stream sends too little to fill a socket: pings that stay unacknowledged for a minute end it."""
    async with wire(here.gateway) as peer:
        peer.request("GET", "/healthz")
        await peer.head()
        [connection] = here.gateway.server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == SEND_STALL * 1000


# --- positions that go while they are read ---------------------------------------------------------------------------


def last_word(body: bytes) -> tuple[bytes, Any]:
    """The lines before the data of the last event, and its data."""
    head, _, data = body.rstrip(b"\n").rpartition(b"\n\n")[2].partition(b"\ndata: ")
    return head, json.loads(data)


async def test_overtaken_reader_is_told_and_has_lost_nothing_before() -> None:
    """R8: a last event without an id, with the body a resume would get; what was sent before is consecutive."""
    async with site(max_stream_records=3) as here:
        stream_id, puppet, reader = await here.begin()
        await puppet.say("a", "b")
        await here.gateway.idle(stream_id)
        await puppet.say(*"cdefgh")  # one append: 3 records up to 9 are retained before any reader runs
        body = await soon(reader.read())
        assert re.findall(rb"^id: (\d+)$", body, re.MULTILINE) == [b"1", b"2", b"3"]
        head, told = last_word(body)
        assert head == b"event: expired"
        refused = await here.http.get(f"/v1/stream/{stream_id}", {"Last-Event-ID": "3"})
        assert told == refused.json == {"error": "cursor_expired", "oldest_available": 7, "action": "restart"}
        await puppet.finish()


async def test_reader_of_a_deleted_stream_is_told(here: Site) -> None:
    """All of it is gone: there is no oldest."""
    stream_id, puppet, reader = await here.begin()
    await puppet.say("a")
    await here.gateway.idle(stream_id)
    await here.http.ask("DELETE", f"/v1/stream/{stream_id}")
    head, told = last_word(await soon(reader.read()))
    assert head == b"event: expired"
    assert told == {"error": "cursor_expired", "oldest_available": None, "action": "restart"}


async def test_burst_overruns_no_healthy_reader(here: Site) -> None:
    """4,000 tokens at once, as from a backlog: all arrive, in writes of a bounded size, nobody is dropped."""
    _, puppet, reader = await here.begin()
    puppet.push([Chunk("word ")] * 4000)
    finishing = asyncio.create_task(puppet.finish())
    body = await soon(reader.read())
    await finishing
    assert re.findall(rb"^id: (\d+)$", body, re.MULTILINE) == [b"%d" % seq for seq in range(1, 4003)]


async def test_large_line_reaches_its_reader(here: Site) -> None:
    """6 MiB of text in one chunk of the model."""
    text = "x" * (6 * 2**20)
    _, puppet, reader = await here.begin()
    puppet.push([Chunk(text)])
    finishing = asyncio.create_task(puppet.finish())
    body = await soon(reader.read())
    await finishing
    deltas = re.findall(rb'"delta":"(x+)"', body)
    assert b"".join(deltas).decode() == text


async def test_hundred_idle_readers_hold_up_nobody(tmp_path: Path) -> None:
    """On a journal with threads of its own: health is answered at once, and no thread belongs to a reader."""
    async with site(journal=f"sqlite:///{tmp_path}/journal.db") as here:
        stream_id, puppet = await here.open_stream("a")
        threads = threading.active_count()
        readers = [await here.http.open("GET", f"/v1/stream/{stream_id}?from=start") for _ in range(100)]
        await here.gateway.idle(stream_id, readers=100)
        assert threading.active_count() == threads
        took = []
        for _ in range(5):
            began = time.perf_counter()
            assert (await here.http.get("/healthz")).status == 200
            took.append(time.perf_counter() - began)
        assert min(took) < 0.1
        await puppet.finish()
        for reader in readers:
            assert (await soon(reader.read())).count(b"\nid: ") == 3


async def test_reader_of_many_streams_on_one_wire_ends_each(here: Site) -> None:
    """A connection that is used again carries over nothing from the stream before, not its departure either."""
    first, _ = await here.open_stream("a")
    async with wire(here.gateway) as peer:
        stream_id = await here.told("b")
        peer.request("GET", f"/v1/stream/{stream_id}?from=start")
        await peer.head()
        await peer.body()
        peer.request("GET", f"/v1/stream/{first}?from=start")
        await peer.head()
        await here.gateway.idle(first)
        peer.drop()
        await here.gateway.unread(first)
        await until(lambda: not here.gateway.streams.readers)
