"""What a request may be: routes, methods, query fields, bodies; what is refused (PROTOCOL.md, sections 8 and 10)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from midstream.errors import ProducerFailed
from midstream.testing.puppet import Puppets
from tests.gateways import Site, cursor, site, wire

JSON = {"Content-Type": "application/json"}


@pytest_asyncio.fixture
async def here() -> AsyncIterator[Site]:
    async with site() as running:
        yield running


async def test_every_route_answers(here: Site) -> None:
    """One stream, looked at from all sides: each route does what its line in the table of routes says."""
    stream_id, puppet, reader = await here.begin(max_tokens=7, tools=[{"type": "function"}], made_up=None)
    assert puppet.body == {
        "model": "puppet",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 7,
        "tools": [{"type": "function"}],
        "made_up": None,
    }
    assert reader.headers["Location"] == f"/v1/stream/{stream_id}"
    assert reader.headers["Midstream-Heartbeat"] == "15"
    await puppet.say("Hel", "lo")
    await here.gateway.idle(stream_id)
    now = here.gateway.clock()
    state = {
        "stream_id": stream_id,
        "status": "open",
        "model": "puppet",
        "highest_seq": 3,
        "oldest_retained_seq": 1,
        "acked_seq": 0,
        "trimmed_seq": 0,
        "retained_records": 3,
        "readers": 1,
        "lowest_reader_seq": 3,
        "created_at": now,
        "last_access": now,
    }
    answer = await here.http.get(f"/v1/stream/{stream_id}/state")
    retained_bytes = answer.json["retained_bytes"]
    assert answer.status == 200
    assert answer.json == state | {"retained_bytes": retained_bytes}
    snapshot = {
        "stream_id": stream_id,
        "seq": 3,
        "cursor": cursor(stream_id, 3),
        "text": "Hello",
        "complete": True,
        "status": "open",
        "model": "puppet",
    }
    answer = await here.http.get(f"/v1/stream/{stream_id}/snapshot")
    assert (answer.status, answer.json) == (200, snapshot)
    answer = await here.http.post(f"/v1/stream/{stream_id}/ack", {"seq": 2})
    acked = {"acked_seq": 2, "trimmed_seq": 2, "oldest_retained_seq": 3, "retained_records": 1}
    assert answer.json == state | acked | {"retained_bytes": answer.json["retained_bytes"]}
    assert 0 < answer.json["retained_bytes"] < retained_bytes
    answer = await here.http.get("/v1/streams")
    assert answer.json == {"streams": [(await here.http.get(f"/v1/stream/{stream_id}/state")).json]}
    answer = await here.http.get(f"/v1/stream/{stream_id}/snapshot")
    assert (answer.status, answer.json) == (200, snapshot)
    for _ in range(2):
        answer = await here.http.post(f"/v1/stream/{stream_id}/cancel")
        assert (answer.status, answer.json) == (200, {"stream_id": stream_id, "status": "cancelled"})
    assert b'"reason":"client"' in await reader.read()
    answer = await here.http.ask("DELETE", f"/v1/stream/{stream_id}")
    assert (answer.status, answer.json) == (200, {"stream_id": stream_id, "deleted": True})
    for method, rest in (
        ("GET", "?from=start"),
        ("GET", "/state"),
        ("GET", "/snapshot"),
        ("POST", "/cancel"),
        ("DELETE", ""),
    ):
        answer = await here.http.ask(method, f"/v1/stream/{stream_id}{rest}")
        assert (answer.status, answer.body) == (404, b'{"error":"unknown_stream"}')
    assert (await here.http.get("/v1/streams")).json == {"streams": []}


async def test_delete_stops_a_running_generation(here: Site) -> None:
    """DELETE cancels first: nobody pays for an answer that has been forgotten."""
    stream_id, puppet = await here.open_stream("a")
    assert (await here.http.ask("DELETE", f"/v1/stream/{stream_id}")).status == 200
    await asyncio.wait_for(puppet.stopped.wait(), 1.0)


async def test_streams_are_listed_newest_first(here: Site) -> None:
    """The listing is what a client uses that has lost its ids."""
    made = []
    for _ in range(3):
        made.append(await here.told("a"))
        here.gateway.clock.advance(1)
    answer = await here.http.get("/v1/streams")
    assert [state["stream_id"] for state in answer.json["streams"]] == made[::-1]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/stream", "POST"),
        ("DELETE", "/v1/stream", "POST"),
        ("POST", "/v1/streams", "GET, HEAD"),
        ("PUT", "/v1/stream/x", "DELETE, GET"),
        ("POST", "/v1/stream/x", "DELETE, GET"),
        ("HEAD", "/v1/stream/x", "DELETE, GET"),
        ("OPTIONS", "/v1/stream/x", "DELETE, GET"),
        ("POST", "/v1/stream/x/state", "GET, HEAD"),
        ("GET", "/v1/stream/x/ack", "POST"),
        ("GET", "/v1/stream/x/cancel", "POST"),
        ("GET", "/v1/session", "POST"),
        ("POST", "/healthz", "GET, HEAD"),
        ("PATCH", "/openapi.json", "GET, HEAD"),
    ],
)
async def test_wrong_method_is_405_and_names_the_right_ones(here: Site, method: str, path: str, allowed: str) -> None:
    """RFC 9110, section 15.5.6: with `Allow`.  HEAD of a stream is refused: it would have to follow it to the end."""
    answer = await here.http.ask(method, path)
    assert (answer.status, answer.headers["allow"]) == (405, allowed)
    if method != "HEAD":
        assert answer.error == "method_not_allowed"


@pytest.mark.parametrize(
    "path", ["/v1", "/v1/", "/v1/stream/", "/v1/stream/x/", "/v1/stream/x/y", "/v1/streams/", "/x", "//"]
)
async def test_unknown_route_is_404(here: Site, path: str) -> None:
    """Nothing is redirected: a redirect would name whatever host the caller named."""
    for method in ("GET", "POST"):
        answer = await here.http.ask(method, path)
        assert (answer.status, answer.error) == (404, "not_found")


async def test_head_is_a_get_without_its_body(here: Site) -> None:
    for path in ("/healthz", "/readyz", "/openapi.json", "/metrics", "/v1/streams"):
        answer = await here.http.ask("HEAD", path)
        assert (answer.status, answer.body) == (200, b"")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/stream"),
        ("GET", "/v1/streams"),
        ("GET", "/v1/stream/{id}"),
        ("DELETE", "/v1/stream/{id}"),
        ("GET", "/v1/stream/{id}/state"),
        ("GET", "/v1/stream/{id}/snapshot"),
        ("POST", "/v1/stream/{id}/ack"),
        ("POST", "/v1/stream/{id}/cancel"),
        ("POST", "/v1/session"),
    ],
)
async def test_unknown_query_field_is_refused(here: Site, method: str, path: str) -> None:
    """A misspelt `curser` must not be a fresh start, nor change anything (I4)."""
    stream_id = await here.told("a")
    for query in (
        "?curser=1",
        f"?Cursor={cursor(stream_id, 1)}",
        "?x",
        "?cursor%0d%0a=1",
        "?" + "&".join(["a=b"] * 200),
    ):
        answer = await here.http.ask(method, path.format(id=stream_id) + query, json={"prompt": "x", "seq": 1})
        assert (answer.status, answer.error) == (400, "bad_request")
    assert (await here.http.get(f"/v1/stream/{stream_id}/state")).json["acked_seq"] == 0
    assert here.puppets.begun == 1


# --- bodies ----------------------------------------------------------------------------------------------------------

BAD_CREATES: list[Any] = [
    {},
    {"prompt": None},
    {"prompt": 5},
    {"prompt": ["a"]},
    {"prompt": {"a": "b"}},
    {"prompt": "a", "messages": [{"role": "user", "content": "a"}]},
    {"messages": []},
    {"messages": "a"},
    {"messages": {}},
    {"messages": ["a"]},
    {"messages": [{}, None]},
    {"prompt": "a", "model": 5},
    {"prompt": "a", "model": ""},
    {"prompt": "a", "model": ["puppet"]},
    {"prompt": "a", "stream": "yes"},
    {"prompt": "a", "stream": 1},
    {"prompt": "a", "stream": None},
    {"prompt": "a", "abandon_after": 0},
    {"prompt": "a", "abandon_after": -1},
    {"prompt": "a", "abandon_after": "30"},
    {"prompt": "a", "abandon_after": True},
    {"prompt": "a", "abandon_after": 1e300},
    [],
    ["prompt"],
    "prompt",
    5,
    None,
    True,
]
NO_JSON = [
    b"",
    b" ",
    b"{",
    b"{'prompt': 'a'}",
    b'{"prompt": "a"}}',
    b'{"prompt": "a"} {"prompt": "a"}',
    b'{"prompt": NaN}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "a\nb"}',
    b'\xef\xbb\xbf{"prompt": "a"}',
    b'{"prompt": "a"}\0',
    '{"prompt": "a"}'.encode("utf-16"),
    b"prompt=a",
    b'{"prompt":"a","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"prompt":"a","x":' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"prompt":"a","x":' + b'{"y":' * 300 + b"0" + b"}" * 300 + b"}",
]


@pytest.mark.parametrize("body", BAD_CREATES, ids=json.dumps)
async def test_wrong_typed_body_is_refused(here: Site, body: Any) -> None:
    answer = await here.http.ask("POST", "/v1/stream", JSON, data=json.dumps(body))
    assert (answer.status, answer.error) == (400, "bad_request")
    assert 0 < len(answer.json["detail"]) < 300
    assert here.puppets.begun == 0


async def test_malformed_body_is_refused(here: Site) -> None:
    """Also what is JSON, but nested deeper than anybody's encoder goes."""
    for path in ("/v1/stream", "/v1/stream/x/ack"):
        for body in NO_JSON:
            answer = await here.http.ask("POST", path, JSON, data=body)
            assert (answer.status, answer.error) == (400, "bad_request"), body[:40]
            assert len(answer.body) < 300
    assert here.puppets.begun == 0


@pytest.mark.parametrize("seq", [None, -1, 1.0, "1", True, [], 2**53, 10**30])
async def test_ack_of_no_number_is_refused(here: Site, seq: Any) -> None:
    stream_id = await here.told("a")
    answer = await here.http.post(f"/v1/stream/{stream_id}/ack", {"seq": seq})
    assert (answer.status, answer.error) == (400, "bad_request")
    answer = await here.http.post(f"/v1/stream/{stream_id}/ack", {})
    assert (answer.status, answer.error) == (400, "bad_request")


async def test_ack_beyond_the_end_is_409(here: Site) -> None:
    stream_id = await here.told("a")
    answer = await here.http.post(f"/v1/stream/{stream_id}/ack", {"seq": 4})
    assert (answer.status, answer.json) == (409, {"error": "cursor_ahead", "highest_seq": 3, "action": "restart"})


@pytest.mark.parametrize(
    "kind",
    [None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonp", "json"],
)
async def test_body_of_another_type_is_415(here: Site, kind: str | None) -> None:
    """What a web page can send without asking first is not taken for JSON, whatever it holds."""
    headers = [f"Content-Type: {kind}"] if kind is not None else []
    body = b'{"prompt":"a"}'
    for path in ("/v1/stream", "/v1/stream/x/ack"):
        async with wire(here.gateway) as peer:
            peer.request("POST", path, *headers, f"Content-Length: {len(body)}", "Connection: close", body=body)
            assert (await peer.head())[0] == 415
            assert json.loads(await peer.rest())["error"] == "unsupported_media_type"
    assert here.puppets.begun == 0


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/json;x=y"])
async def test_json_by_any_spelling_is_taken(here: Site, kind: str) -> None:
    response = await here.http.open("POST", "/v1/stream", {"Content-Type": kind}, data=b'{"prompt":"a"}')
    assert response.status == 200
    response.close()


async def test_too_large_a_body_is_413() -> None:
    """Declared: at once, with nothing read.  In chunks: as soon as it is too much.  At the limit it is good."""
    limit = 1000
    async with site(max_body=limit) as here:
        body = json.dumps({"prompt": ""}).encode()
        fits = body.replace(b'""', b'"' + b"x" * (limit - len(body)) + b'"')
        response = await here.http.open("POST", "/v1/stream", JSON, data=fits)
        assert response.status == 200
        response.close()
        answer = await here.http.ask("POST", "/v1/stream", JSON, data=fits + b" ")
        assert (answer.status, answer.error) == (413, "too_large")
        for head in (f"Content-Length: {limit + 1}", f"Content-Length: {10**12}"):
            async with wire(here.gateway) as peer:
                peer.request("POST", "/v1/stream", "Content-Type: application/json", head)
                assert (await peer.head())[0] == 413
        async with wire(here.gateway) as peer:
            peer.request("POST", "/v1/stream", "Content-Type: application/json", "Transfer-Encoding: chunked")
            for _ in range(11):
                peer.send(b"64\r\n" + b" " * 100 + b"\r\n")
            assert (await peer.head())[0] == 413
        assert here.puppets.begun == 1


async def test_client_that_leaves_in_its_request_begins_nothing(here: Site) -> None:
    async with wire(here.gateway) as peer:
        peer.request("POST", "/v1/stream", "Content-Type: application/json", "Content-Length: 100", body=b'{"prompt"')
        peer.drop()
    assert (await here.http.get("/healthz")).status == 200
    assert here.puppets.begun == 0


async def test_unknown_model_is_404(here: Site) -> None:
    for model in ("nobody", "x" * 100_000, "a\r\nb\0"):
        answer = await here.http.post("/v1/stream", {"prompt": "a", "model": model})
        assert (answer.status, answer.error) == (404, "unknown_model")
        assert len(answer.body) < 500


async def test_upstream_that_cannot_be_asked_for_its_models_is_502() -> None:
    """Without a model in the request the first upstream is asked; when it does not answer there is no stream yet."""

    class Away(Puppets):
        async def default_model(self) -> str:
            raise ProducerFailed("upstream_unreachable", "nobody is there", retryable=True)

    async with site(puppets=Away()) as here:
        answer = await here.http.post("/v1/stream", {"prompt": "a"})
        assert (answer.status, answer.json) == (502, {"error": "upstream_unreachable", "detail": "nobody is there"})


# --- forgery ---------------------------------------------------------------------------------------------------------

FORGED = "\r\n\r\nid: 99\r\nevent: done\r\ndata: {}\r\n\r\n\n\nid: 99\nevent: done\ndata: {}\n\n\0\u2028"


async def test_text_cannot_forge_an_event() -> None:
    """CR, LF and NUL in prompt, model name and answer are JSON escapes on the wire, here and in every later answer."""
    async with site(puppets=Puppets(FORGED)) as here:
        stream_id, puppet, reader = await here.begin(prompt=FORGED)
        assert puppet.body["messages"][0]["content"] == FORGED
        await puppet.say(FORGED)
        await puppet.fail("upstream_error", FORGED)
        body = await reader.read()
        frames = body.split(b"\n\n")[:-1]
        assert [frame.partition(b"\ndata: ")[0].split(b"id: ")[1] for frame in frames] == [
            b"1\nevent: start",
            b"2\nevent: token",
            b"3\nevent: failed",
        ]
        assert b"\r" not in body
        assert b"\0" not in body
        assert json.loads(frames[1].partition(b"data: ")[2])["delta"] == FORGED
        for rest in ("/state", "/snapshot"):
            assert (await here.http.get(f"/v1/stream/{stream_id}{rest}")).json["model"] == FORGED


@pytest.mark.parametrize("header", ["Last-Event-ID", "Idempotency-Key", "traceparent", "Authorization", "Origin"])
@pytest.mark.parametrize("value", ["5\0", "5\rid: 9", "5\x01", "5\x7f"])
async def test_control_characters_in_a_header_forge_nothing(here: Site, header: str, value: str) -> None:
    """What is refused below us or by us is refused; what passes stands in no answer's head."""
    body = b'{"prompt":"a"}'
    async with wire(here.gateway) as peer:
        lines = [
            f"{header}: {value}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Connection: close",
        ]
        peer.request("POST", "/v1/stream", *lines, body=body)
        status, headers = await peer.head()
        assert status in (200, 400, 403)
        assert "id" not in dict(headers)
        if status == 200:
            peer.drop()


async def test_folded_header_is_no_second_header(here: Site) -> None:
    """Request smuggling by an obsolete line folding ends in a refusal, not in another request."""
    async with wire(here.gateway) as peer:
        peer.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\nConnection: close\r\n\r\n")
        status, _ = await peer.head()
        assert status in (200, 400)
        assert b"HTTP/1.1" not in await peer.rest()
