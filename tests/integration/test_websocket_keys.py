"""Whose a WebSocket is, and whom the gateway lets open one (PROTOCOL.md, sections 12 and 19; I9)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from websockets.exceptions import InvalidStatus

from midstream.testing.transport_dial import ADA, BOB
from midstream.testing.ws_dial import dialled
from midstream.transports import websocket
from midstream.wire import SESSION_COOKIE, SESSION_TERM, WS_CLOSE
from tests.gateways import Http, Site, cursor, site, wire
from tests.integration.test_http_keys import reread, session
from tests.sockets import HANDSHAKE, Peer, seqs, socket

STRANGER = WS_CLOSE["unauthorized"]
# Everything that names a stream, or could tell that there is one.
VERBS: list[tuple[str, dict[str, int]]] = [
    ("resume", {"after": 1}),
    ("resume", {"after": 480}),
    ("ack", {"seq": 1}),
    ("ack", {"seq": 480}),
    ("cancel", {}),
]


@pytest_asyncio.fixture
async def here(keys_file: Path) -> AsyncIterator[Site]:
    async with site(keys_file=str(keys_file)) as running:
        yield running


async def turned_away(peer: Peer) -> None:
    """Told that he is a stranger, and nothing else."""
    await peer.refused("unauthorized")
    assert await peer.closed() == STRANGER


def cookie(value: str) -> dict[str, Any]:
    return {"headers": {"Cookie": f"{SESSION_COOKIE}={value}"}}


# --- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Authorization", "apikey"])
async def test_key_in_a_header_is_the_owners(here: Site, ada: Http, name: str) -> None:
    stream_id = await here.told("x", http=ada)
    value = f"Bearer {ADA}" if name == "Authorization" else ADA
    async with socket(here.gateway, headers={name: value}) as peer:
        await peer.resume(stream_id, 1)
        assert seqs(await peer.hear_under("a", records=2)) == [2, 3]


async def test_key_in_the_first_message_is_the_owners(here: Site, ada: Http) -> None:
    """Nothing answers it: the next message may follow at once."""
    stream_id = await here.told("x", http=ada)
    async with socket(here.gateway) as peer:
        await peer.say("auth", key=ADA)
        await peer.resume(stream_id, 1)
        assert seqs(await peer.hear_under("a", records=2)) == [2, 3]


@pytest.mark.parametrize(
    "first",
    [
        {"type": "auth", "key": "nobodys-key"},
        {"type": "auth", "key": ""},
        {"type": "auth", "key": 7},
        {"type": "auth"},
        {"type": "generate", "ref": "a", "prompt": "x"},
        {"type": "cancel", "stream_id": "0" * 32},
        {"type": "no such type"},
        [],
    ],
    ids=str,
)
async def test_stranger_hears_only_that_he_is_one(here: Site, first: Any) -> None:
    async with socket(here.gateway) as peer:
        await peer.socket.send(json.dumps(first))
        await peer.socket.send(json.dumps({"type": "generate", "prompt": "x"}))
        said = await peer.hear()
        assert (said["type"], said["code"]) == ("error", "unauthorized")
        assert await peer.closed() == STRANGER
        assert here.puppets.begun == 0


async def test_key_that_does_not_come_in_time_is_none(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "AUTH_WITHIN", 0.01)
    async with socket(here.gateway) as peer:
        await turned_away(peer)
    async with socket(here.gateway, ADA) as peer:  # who has brought one may be silent for as long as he likes
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await peer.socket.recv()


async def test_auth_comes_first_or_not_at_all(here: Site) -> None:
    async with socket(here.gateway) as peer:
        await peer.say("auth", key=ADA)
        await peer.say("auth", key=BOB)
        await peer.refused("bad_request")
        await peer.begin(here)


async def test_gateway_without_keys_ignores_a_key() -> None:
    """Some clients insist on sending one."""
    async with site() as here, socket(here.gateway) as peer:
        await peer.say("auth", key="whatever")
        await peer.begin(here)


@pytest.mark.parametrize(
    "headers",
    [
        ["Authorization: Bearer nobodys-key"],
        ["apikey: nobodys-key"],
        ["Authorization: Basic YTpi"],
        [f"Authorization: Bearer {ADA}", f"apikey: {BOB}"],
        [f"apikey: {ADA}", f"apikey: {ADA}"],
    ],
)
async def test_wrong_key_in_a_header_opens_no_socket(here: Site, headers: list[str]) -> None:
    """401 before the handshake is done, in the shape of every other error."""
    async with wire(here.gateway) as peer:
        peer.request("GET", "/v1/ws", *HANDSHAKE, *headers)
        status, _ = await peer.head()
        assert (status, await peer.rest()) == (401, b'{"error":"unauthorized"}')


async def test_key_in_the_url_opens_no_socket(here: Site) -> None:
    """It would stand in logs; so would one sent by mistake, and therefore it is refused instead of passed over."""
    async with wire(here.gateway) as peer:
        peer.request("GET", f"/v1/ws?key={ADA}", *HANDSHAKE)
        status, _ = await peer.head()
        assert (status, json.loads(await peer.rest())["error"]) == (400, "bad_request")


async def test_stream_of_another_owner_does_not_exist(here: Site, ada: Http) -> None:
    """I9: the errors are, character for character, those about a stream that never was."""
    stream_id, puppet = await here.open_stream("x", http=ada)
    async with socket(here.gateway, BOB) as peer:
        for verb, fields in VERBS:
            heard = []
            for named in (stream_id, "0" * 32):
                given = fields if verb != "resume" else {"cursor": cursor(named, fields["after"])}
                await peer.say(verb, ref="a", stream_id=named, **given)
                heard.append(await peer.refused("unknown_stream", "a"))
            assert heard[0] == heard[1]
    await puppet.say("y")
    await puppet.finish()


async def test_key_that_is_gone_asks_for_nothing_more(here: Site, keys_file: Path) -> None:
    """As over HTTP: what is being followed is followed to its end, the next message is refused."""
    async with socket(here.gateway, ADA) as peer, socket(here.gateway) as told:
        stream_id, puppet = await peer.begin(here)
        await told.say("auth", key=ADA)
        await told.resume(stream_id, 0)
        await told.hear_under("a", records=1)
        reread(here, keys_file, f"ada:ada-key-2\nbob:{BOB}\n")
        await puppet.say("x")
        for one in (peer, told):
            await one.hear_under("a", records=1)
            await one.say("cancel", ref="a", stream_id=stream_id)
            await one.refused("unauthorized", "a")
            assert await one.closed() == STRANGER
        assert not puppet.stopped.is_set()


# --- the session cookie ----------------------------------------------------------------------------------------------


async def test_cookie_opens_a_socket(here: Site, ada: Http) -> None:
    """A page's WebSocket cannot send a header."""
    stream_id = await here.told("x", http=ada)
    async with socket(here.gateway, **cookie((await session(ada))[0])) as peer:
        await peer.resume(stream_id, 1)
        assert seqs(await peer.hear_under("a", records=2)) == [2, 3]


async def test_key_counts_more_than_a_cookie(here: Site, ada: Http) -> None:
    """In the header, and in a first message."""
    stream_id = await here.told("x", http=ada)
    bobs = cookie((await session(here.http.keyed(BOB)))[0])
    async with socket(here.gateway, ADA, **bobs) as peer:
        await peer.resume(stream_id, 2)
        await peer.hear_under("a", records=1)
    async with socket(here.gateway, **bobs) as peer:
        await peer.say("auth", key=ADA)
        await peer.resume(stream_id, 2)
        await peer.hear_under("a", records=1)
    async with socket(here.gateway, **bobs) as peer:
        await peer.resume(stream_id, 2)
        await peer.refused("unknown_stream", "a")


async def test_cookie_that_is_no_good_leaves_the_first_message(here: Site, ada: Http) -> None:
    """A page that was left over from a rotation hears why, and may still send a key."""
    value = (await session(ada))[0]
    here.gateway.clock.advance(SESSION_TERM)
    for bad in (value, "x.y"):
        async with socket(here.gateway, **cookie(bad)) as peer:
            await peer.say("generate", prompt="x")
            await turned_away(peer)
        async with socket(here.gateway, **cookie(bad)) as peer:
            await peer.say("auth", key=ADA)
            await peer.begin(here)


async def test_cookie_ends_in_mid_socket(here: Site, ada: Http) -> None:
    """The next message is refused; what is followed goes on."""
    async with socket(here.gateway, **cookie((await session(ada))[0])) as peer:
        stream_id, puppet = await peer.begin(here)
        here.gateway.clock.advance(SESSION_TERM)
        await puppet.say("x")
        await peer.hear_under("a", records=1)
        await peer.say("ack", stream_id=stream_id, seq=1)
        await turned_away(peer)


# --- pages, hosts, paths ---------------------------------------------------------------------------------------------


async def refusal(here: Site, *headers: str, path: str = "/v1/ws") -> tuple[int, str]:
    """Status and code of a handshake with these header lines that opens no socket."""
    async with wire(here.gateway) as peer:
        peer.send("\r\n".join([f"GET {path} HTTP/1.1", *HANDSHAKE, *headers, "", ""]).encode())
        status, _ = await peer.head()
        return status, "" if status == 101 else json.loads(await peer.rest())["error"]


async def test_page_of_another_origin_opens_no_socket(here: Site) -> None:
    """Before any key is looked at: a browser sends its user's cookies along."""
    key = f"apikey: {ADA}"
    assert await refusal(here, "Host: gw.example", "Origin: https://gw.example", key) == (101, "")
    for origin in ("https://evil.example", "null", "https://gw.example.evil.example", "https://gw.example:444"):
        assert await refusal(here, "Host: gw.example", f"Origin: {origin}", key) == (403, "forbidden_origin")
        assert await refusal(here, "Host: gw.example", f"Origin: {origin}") == (403, "forbidden_origin")


async def test_configured_origin_opens_a_socket(keys_file: Path) -> None:
    app = "https://app.example"
    async with site(keys_file=str(keys_file), cors_origin=(app,)) as here:
        assert await refusal(here, "Host: gw.example", f"Origin: {app}") == (101, "")


async def test_open_gateway_answers_for_its_own_host_alone() -> None:
    """No page can point a name of its own at it."""
    async with site() as here:
        assert await refusal(here, "Host: localhost") == (101, "")
        assert await refusal(here, "Host: evil.example", "Origin: http://evil.example") == (421, "wrong_host")


@pytest.mark.parametrize("path", ["/", "/v1/stream", "/v1/ws/", "/v1/ws/x", "/web/app.js", "/no/such"])
async def test_there_is_one_path_for_sockets(here: Site, path: str) -> None:
    assert await refusal(here, "Host: localhost", f"apikey: {ADA}", path=path) == (404, "not_found")


async def test_path_of_sockets_is_no_page(here: Site, ada: Http) -> None:
    """Without the handshake it is a route like any other that is not there."""
    assert (await ada.get("/v1/ws")).status == 404


async def test_messages_are_not_compressed(here: Site) -> None:
    """What was offered is declined: one token a message gains nothing and costs megabytes."""
    async with await dialled(here.gateway, ADA) as plain:
        assert plain.protocol.extensions == []
    async with wire(here.gateway) as peer:
        peer.request("GET", "/v1/ws", *HANDSHAKE, f"apikey: {ADA}", "Sec-WebSocket-Extensions: permessage-deflate")
        status, headers = await peer.head()
        assert status == 101
        assert "sec-websocket-extensions" not in dict(headers)


async def test_refusal_is_seen_by_a_client(here: Site) -> None:
    with pytest.raises(InvalidStatus) as refused:
        await dialled(here.gateway, "nobodys-key")
    assert refused.value.response.status_code == 401
