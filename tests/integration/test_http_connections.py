"""What a connection may do to the gateway below any request: pipelining, heads without end, silence, and upgrades."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from midstream.server import serving
from midstream.server.connection import HttpConnection
from midstream.testing.patience import soon, until
from midstream.wire import MAX_HEAD_BYTES, MAX_PIPELINED
from tests.gateways import Site, Wire, site, wire


@pytest_asyncio.fixture
async def here() -> AsyncIterator[Site]:
    async with site() as running:
        yield running


def follow(stream_id: str) -> bytes:
    return f"GET /v1/stream/{stream_id}?from=start HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


JSON_IN_CHUNKS = ("Content-Type: application/json", "Transfer-Encoding: chunked")
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def answered(peer: Wire) -> tuple[int, bytes]:
    """The next answer that has a length."""
    status, headers = await peer.head()
    return status, await peer.take(int(dict(headers)["content-length"]))


async def arrive(here: Site, *pieces: bytes) -> None:
    """Give the only connection what its peer is meant to have sent, in just these pieces."""
    connections = here.gateway.server.server_state.connections
    await until(lambda: bool(connections))
    (connection,) = connections
    for piece in pieces:
        if not connection.transport.is_closing():
            connection.data_received(piece)


# --- several requests on their way ------------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", [1, 3])
async def test_reader_that_leaves_with_requests_waiting_is_noticed(here: Site, behind: int) -> None:
    """Requests that came in one packet with it do not hide that it has gone; they are not begun for nobody (I6)."""
    stream_id, puppet = await here.open_stream("a")
    async with wire(here.gateway) as peer:
        peer.send(follow(stream_id) * (1 + behind))
        await peer.head()
        await here.gateway.idle(stream_id)
        peer.drop()
        await here.gateway.unread(stream_id)
    await puppet.finish()
    await until(lambda: not here.gateway.server.server_state.tasks)


async def test_each_of_several_streams_on_their_way_is_noticed_when_it_is_left(here: Site) -> None:
    """Also the second of three, whose turn came when the first had ended."""
    ended = await here.told("a")
    stream_id, puppet = await here.open_stream("b")
    async with wire(here.gateway) as peer:
        peer.send(follow(ended) + follow(stream_id) + follow(ended))
        await peer.head()
        assert (await peer.body()).count(b"\nid: ") == 3
        await peer.head()
        await here.gateway.idle(stream_id)
        peer.drop()
        await here.gateway.unread(stream_id)
    await puppet.finish()


async def test_requests_on_their_way_are_answered_in_order(here: Site) -> None:
    stream_id = await here.told("a")
    async with wire(here.gateway) as peer:
        peer.send((HEALTH + follow(stream_id)) * 3)
        for _ in range(3):
            assert await answered(peer) == (200, b'{"status":"alive"}')
            assert (await peer.head())[0] == 200
            assert (await peer.body()).count(b"\nid: ") == 3


async def test_too_many_requests_on_their_way_end_the_connection(here: Site) -> None:
    """They would be kept in memory behind a stream that may take half an hour."""
    stream_id, puppet = await here.open_stream("a")
    async with wire(here.gateway) as peer:
        peer.send(follow(stream_id) + HEALTH * (MAX_PIPELINED + 1))
        await here.gateway.unread(stream_id)
        assert await peer.ended()
    await puppet.finish()


async def test_nonsense_behind_a_request_is_not_answered_inside_the_stream(here: Site) -> None:
    """What a reader has is records and connection talk; the connection then simply ends, which is no end (I7)."""
    stream_id, puppet = await here.open_stream("a")
    async with wire(here.gateway) as peer:
        peer.send(follow(stream_id))
        await peer.head()
        await here.gateway.idle(stream_id)
        peer.send(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        assert b"HTTP/1.1" not in await peer.everything()
        await here.gateway.unread(stream_id)
    await puppet.finish()


class Refusing:
    """uvloop's transport after a failed read or write, before it has told that the connection is lost."""

    def is_closing(self) -> bool:
        return True

    def write(self, data: bytes) -> None:
        raise RuntimeError("unable to perform operation; the handler is closed")


async def test_answer_to_a_peer_that_has_just_left_is_no_error(here: Site) -> None:
    """The log has nothing to say about it, and the answer ends as for a peer whose loss was told."""
    stream_id, puppet = await here.open_stream("a")
    async with wire(here.gateway) as peer:
        peer.send(follow(stream_id))
        await peer.head()
        (connection,) = here.gateway.server.server_state.connections
        assert isinstance(connection, HttpConnection)
        answer = connection._running
        assert answer is not None
        answer.transport = Refusing()  # type: ignore[assignment]
        await answer.send({"type": "http.response.body", "body": b"a", "more_body": True})
        assert await soon(answer.receive()) == {"type": "http.disconnect"}
    await puppet.finish()


# --- writes -----------------------------------------------------------------------------------------------------------


async def test_first_record_comes_with_the_head(here: Site) -> None:
    stream_id, puppet = await here.open_stream("a")
    async with wire(here.gateway) as peer:
        peer.send(follow(stream_id))
        assert (await peer.head())[0] == 200
        assert b"event: start" in await peer.chunk()
        assert peer.segments() == 1
    await puppet.finish()


async def test_head_does_not_wait_for_a_record(here: Site) -> None:
    """Of a reader that has had all there is, while the model says nothing."""
    stream_id, puppet = await here.open_stream()
    async with wire(here.gateway) as peer:
        peer.request("GET", f"/v1/stream/{stream_id}", "Last-Event-ID: 1")
        assert (await peer.head())[0] == 200
        await here.gateway.idle(stream_id)
        await puppet.say("a")
        assert b"event: token" in await peer.chunk()
    await puppet.finish()


@pytest.mark.parametrize("path", ["/healthz", "/v1/streams", "/v1/stream/unknown"])
async def test_answer_comes_in_one_piece(here: Site, path: str) -> None:
    async with wire(here.gateway) as peer:
        peer.request("GET", path)
        assert (await answered(peer))[1]
        assert peer.segments() == 1


async def test_head_without_a_body_comes_by_itself(here: Site) -> None:
    """And before the answer to what was asked behind it."""
    async with wire(here.gateway) as peer:
        peer.send(HEALTH.replace(b"GET", b"HEAD"))
        assert (await peer.head())[0] == 200
        peer.send(HEALTH.replace(b"GET", b"HEAD") + HEALTH)
        assert (await peer.head())[0] == 200
        assert await answered(peer) == (200, b'{"status":"alive"}')


async def test_head_is_sent_to_who_sends_no_more(here: Site) -> None:
    """Half-closed behind its request, in one packet."""
    async with wire(here.gateway) as peer:
        peer.send(HEALTH.replace(b"GET", b"HEAD"))
        peer.send_no_more()
        assert (await peer.head())[0] == 200


async def test_head_comes_before_what_another_protocol_writes(here: Site) -> None:
    """A WebSocket that is asked for in the same packet."""
    upgrade = (
        b"GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    async with wire(here.gateway) as peer:
        peer.send(HEALTH.replace(b"GET", b"HEAD") + upgrade)
        assert [(await peer.head())[0] for _ in range(2)] == [200, 101]


async def test_leave_to_send_a_body_comes_before_the_head(here: Site) -> None:
    """RFC 9110, section 10.1.1."""
    body = b'{"prompt":"a"}'
    async with wire(here.gateway) as peer:
        peer.request(
            "POST", "/v1/stream", "Content-Type: application/json", "Content-Length: 14", "Expect: 100-continue"
        )
        assert await peer.head() == (100, [])
        peer.send(body)
        assert (await peer.head())[0] == 200
        assert b"event: start" in await peer.chunk()
    await (await here.gateway.puppets.next()).finish()


# --- heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", [b"X-%d: %b\r\n", b"X-%d%b"], ids=["many headers", "one header"])
async def test_head_without_end_is_refused(here: Site, line: bytes) -> None:
    """I5: what a request may take before it has said what it wants is bounded."""
    async with wire(here.gateway) as peer:
        peer.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n")
        for at in range(MAX_HEAD_BYTES // 1000 + 2):
            peer.send(line % (at, b"a" * 1000))
            await peer.sent()
            await asyncio.sleep(0)
        status, body = await answered(peer)
        assert (status, json.loads(body)["error"]) == (400, "bad_request")


@pytest.mark.parametrize(("size", "status"), [(MAX_HEAD_BYTES - 200, 200), (MAX_HEAD_BYTES, 400)])
async def test_head_is_bounded_wherever_it_is_cut(here: Site, size: int, status: int) -> None:
    """In one packet or in many: the same head has the same answer."""
    head = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * size + b"\r\n\r\n"
    for step in (len(head), 5000):
        async with wire(here.gateway) as peer:
            for at in range(0, len(head), step):
                peer.send(head[at : at + step])
                await peer.sent()
            assert (await peer.head())[0] == status


@pytest.mark.parametrize(("size", "status"), [(MAX_HEAD_BYTES, 200), (MAX_HEAD_BYTES + 1, 400)])
async def test_bound_of_a_head_is_exact(here: Site, size: int, status: int) -> None:
    """Line, separators and all, whichever byte the head is cut behind."""
    begun = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: "
    head = begun + b"a" * (size - len(begun) - 4) + b"\r\n\r\n"
    for cut in (0, 1, len(begun), size // 2, size - 3, size - 1):
        async with wire(here.gateway) as peer:
            await arrive(here, head[:cut], head[cut:])
            assert (await peer.head())[0] == status, f"cut behind byte {cut}"
        await until(lambda: not here.gateway.server.server_state.connections)


async def test_body_before_a_head_does_not_count_as_the_head(here: Site) -> None:
    """A request whose head came in two pieces, the second with its body and the begin of the next request's head."""
    body = b'{"seq":"' + b"a" * 60_000 + b'"}'
    async with wire(here.gateway) as peer:
        fields = b"host\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        begun = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: "
        await arrive(here, b"POST /v1/stream/x/ack HTTP/1.1\r\nHost: local", fields + body + begun)
        assert (await answered(peer))[0] == 400
        await arrive(here, b"a" * 30_000, b"\r\n\r\n")
        assert await answered(peer) == (200, b'{"status":"alive"}')


@pytest.mark.parametrize("offer", [(), ("Connection: Upgrade", "Upgrade: h2c")], ids=["plain", "behind an offer"])
async def test_trailer_without_end_is_refused(here: Site, offer: tuple[str, ...]) -> None:
    """I5: what follows a body is bounded like what comes before it, since the parser keeps it until it is whole."""
    async with wire(here.gateway) as peer:
        lines = ("POST /v1/stream HTTP/1.1", "Host: localhost", *JSON_IN_CHUNKS, *offer)
        pieces = [b"a" * 1000] * (MAX_HEAD_BYTES // 1000 + 1)
        await arrive(here, "\r\n".join([*lines, "", ""]).encode(), b'e\r\n{"prompt":"x"}\r\n0\r\nX: ', *pieces)
        status, body = await answered(peer)
        assert (status, json.loads(body)["error"]) == (400, "bad_request")
    assert here.puppets.begun == 0


async def test_trailer_is_no_header(here: Site) -> None:
    """RFC 9110, section 6.5.1: what follows a body is not merged into what a proxy before us has checked."""
    async with wire(here.gateway) as peer:
        peer.request("POST", "/v1/stream", "Content-Type: application/json", "Transfer-Encoding: chunked")
        peer.send(b'd\r\n{"prompt":"x"\r\n1\r\n}\r\n0\r\nHost: evil.example\r\nIdempotency-Key: a\r\n\r\n')
        assert (await peer.head())[0] == 200
        await (await here.puppets.next()).finish()
        await peer.body()
    assert await here.gateway.streams.find("open/idem/a") is None


# --- silence ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET /healthz HT",
        b"POST /v1/stream HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
        HEALTH + b"GET",
    ],
    ids=["nothing", "half a head", "half a body", "half a second head"],
)
async def test_connection_on_which_nothing_comes_is_closed(here: Site, begun: bytes) -> None:
    """A peer that vanished before its request was whole is not kept for ever."""
    here.gateway.server.config.timeout_keep_alive = 0.05  # type: ignore[assignment]  # seconds; a float will do
    async with wire(here.gateway) as peer:
        peer.send(begun)
        await peer.everything()
        await until(lambda: not here.gateway.server.server_state.connections)
    assert here.puppets.begun == 0


async def test_reader_that_says_nothing_is_not_silent(here: Site) -> None:
    """The limit is for requests that are not whole: who follows a stream has nothing to say, whatever it announced."""
    stream_id, puppet = await here.open_stream("a")
    async with wire(here.gateway) as peer:
        peer.send(follow(stream_id).replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n"))
        await peer.head()
        await here.gateway.idle(stream_id)
        for connection in here.gateway.server.server_state.connections:
            assert isinstance(connection, HttpConnection)
            connection.timeout_keep_alive_handler()
        await puppet.say("b")
        await puppet.finish()
        assert (await peer.body()).count(b"\nid: ") == 4


# --- shutdown ---------------------------------------------------------------------------------------------------------


async def test_request_that_is_not_whole_holds_up_no_shutdown() -> None:
    """Nothing has begun that could be drained."""
    async with site(drain=0.05) as here, wire(here.gateway) as peer:
        peer.request("POST", "/v1/stream", "Content-Type: application/json", "Content-Length: 9", body=b"{")
        await until(lambda: here.gateway.server.server_state.tasks, "the request")
        await soon(here.gateway.drain())
        assert await peer.everything() == b""


async def test_reader_that_takes_nothing_holds_up_no_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream's end is kept for it; it has some seconds to take it, and the process does not wait for longer."""
    monkeypatch.setattr(serving, "_READ_OUT", 0.1)
    async with site(drain=0.05) as here, wire(here.gateway) as peer:
        stream_id, puppet = await here.open_stream("a")
        peer.send(follow(stream_id))
        await peer.head()
        [reader] = here.gateway.readers(stream_id)
        while reader.waiting or reader.position < 2:
            await puppet.say("x" * 200_000)
        await soon(here.gateway.drain())
        assert (await here.gateway.streams.journal.state(stream_id)).status == "cancelled"


# --- upgrades that are not taken, and old clients ---------------------------------------------------------------------


async def test_request_that_offers_http2_is_answered_in_http1(here: Site) -> None:
    """RFC 9110, section 7.8: curl and Java's client offer `h2c` with their first request, its body included."""
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQ")
    async with wire(here.gateway) as peer:
        for framing, body in [
            ("Content-Length: 14", b'{"prompt":"x"}'),
            ("Transfer-Encoding: chunked", b'e\r\n{"prompt":"x"}\r\n0\r\n\r\n'),
        ]:
            peer.request("POST", "/v1/stream", "Content-Type: application/json", framing, *offer, body=body)
            assert (await peer.head())[0] == 200
            puppet = await here.puppets.next()
            assert puppet.body["messages"] == [{"role": "user", "content": "x"}]
            await puppet.finish()
            await peer.body()
        peer.request("GET", "/healthz", *offer)
        peer.send(HEALTH)
        for _ in range(2):
            assert await answered(peer) == (200, b'{"status":"alive"}')


async def test_body_of_an_offer_may_come_later(here: Site) -> None:
    head = b"POST /v1/stream HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: 14\r\n\r\n"
    async with wire(here.gateway) as peer:
        for part in (head, b'{"prompt":', b'"x"}'):
            peer.send(part)
            await peer.sent()
            await asyncio.sleep(0)
        assert (await peer.head())[0] == 200
        await (await here.puppets.next()).finish()
        await peer.body()


async def test_http_1_0_client_gets_no_chunks(here: Site) -> None:
    """RFC 9112, section 6.1: it does not know the chunked coding; its body ends with the connection."""
    stream_id, puppet = await here.open_stream("a")
    async with wire(here.gateway) as peer:
        peer.send(follow(stream_id).replace(b"HTTP/1.1", b"HTTP/1.0"))
        status, headers = await peer.head()
        assert (status, dict(headers)["connection"]) == (200, "close")
        assert "transfer-encoding" not in dict(headers)
        await here.gateway.idle(stream_id)
        await puppet.say("b", "c")
        await puppet.finish()
        body = await peer.rest()
        assert [line for line in body.split(b"\n") if line.startswith(b"id:")] == [b"id: %d" % n for n in range(1, 6)]
        assert body.endswith(b"\n\n")
    for path in ("/healthz", "/nothing"):
        async with wire(here.gateway) as peer:
            peer.send(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
            length = int(dict((await peer.head())[1])["content-length"])
            assert len(await peer.rest()) == length


async def test_file_of_the_page_is_sent_whole(here: Site) -> None:
    """Whatever range is asked for: a bad one would be the one error that is not JSON."""
    for asked in ("bytes=9-1,abc", "bytes=99999999-", "bytes=0-1"):
        answer = await soon(here.http.get("/web/app.js", {"Range": asked}))
        assert answer.status == 200
