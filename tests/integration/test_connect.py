"""Connect and gRPC-Web on the HTTP port: what the wire adds to the service, and clients that are not ours."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from midstream.codec.pb import inference_pb2 as pb
from midstream.codec.pb.inference_connect import InferenceServiceClient
from midstream.codec.pb.inference_pb import AckRequest, CancelRequest, GenerateRequest
from midstream.testing.gateway import RunningGateway
from midstream.testing.patience import soon, until
from midstream.testing.transport_dial import ADA, KEYS
from midstream.wire import GRPC_SERVICE, H_STREAM_ID, SEND_STALL
from tests.gateways import Http, Site, Wire, site, wire
from tests.integration.test_grpc_process import buf

PATH = f"/{GRPC_SERVICE}"
CONNECT, GRPC_WEB = "application/connect+json", "application/grpc-web+proto"
SCHEMA = Path(__file__).parents[2] / "proto" / "inference.proto"
JSON = {"Content-Type": "application/json"}


def envelope(data: bytes, flags: int = 0) -> bytes:
    return bytes([flags]) + len(data).to_bytes(4, "big") + data


def envelopes(body: bytes) -> list[tuple[int, bytes]]:
    """Flags and data of each."""
    found = []
    while body:
        size = int.from_bytes(body[1:5], "big")
        found.append((body[0], body[5 : 5 + size]))
        body = body[5 + size :]
    return found


def asked(kind: str, **fields: Any) -> bytes:
    """The body of a Generate."""
    if "json" in kind:
        return envelope(json.dumps(fields).encode())
    return envelope(pb.GenerateRequest(**fields).SerializeToString())


async def generate(
    http: Http, kind: str = CONNECT, headers: dict[str, str] | None = None, **fields: Any
) -> aiohttp.ClientResponse:
    head = {"Content-Type": kind, **(headers or {})}
    return await http.open("POST", f"{PATH}/Generate", head, data=asked(kind, **fields))


async def begun(here: Site, kind: str = CONNECT) -> tuple[aiohttp.ClientResponse, Any, str]:
    """A call that has begun: its response, who speaks in it, and the stream's id."""
    response = await generate(here.http, kind, prompt="Hello", session_id="demo")
    return response, await here.puppets.next(), response.headers[H_STREAM_ID]


# --- what the wire adds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [CONNECT, "application/connect+proto", GRPC_WEB, "application/grpc-web"])
async def test_headers_come_before_the_model_has_said_anything(kind: str) -> None:
    """With the stream's id; the body then has its messages and no other, and is neither stored nor compressed."""
    async with site() as here:
        response, puppet, _ = await begun(here, kind)
        assert response.status == 200
        assert response.headers["content-type"] == (f"{kind}+proto" if kind == "application/grpc-web" else kind)
        assert response.headers["cache-control"] == "no-store, no-transform"
        assert response.headers["x-accel-buffering"] == "no"
        await puppet.say("a")
        await puppet.finish()
        told = envelopes(await soon(response.read()))
        assert len(told) == 3
        if "json" in kind:
            assert [json.loads(data) for _, data in told] == [{"token": "a"}, {"tokenIndex": 1, "isFinal": True}, {}]
        else:
            assert [pb.GenerateResponse.FromString(data).token for _, data in told[:2]] == ["a", ""]
        assert [flags for flags, _ in told] == [0, 0, 0x80 if "web" in kind else 2]


async def test_all_that_is_new_goes_out_in_one_write() -> None:
    """A replay of a hundred messages is not a hundred chunks of HTTP."""
    async with site() as here, wire(here.gateway) as reader:
        stream_id = await here.told(*["word"] * 100)
        body = asked(CONNECT, session_id=stream_id)
        reader.request(
            "POST", f"{PATH}/Generate", f"Content-Type: {CONNECT}", f"Content-Length: {len(body)}", body=body
        )
        assert (await reader.head())[0] == 200
        first = await reader.chunk()
        assert len(envelopes(first)) == 101
        assert [flags for flags, _ in envelopes(await reader.body())] == [2]


async def test_answers_are_not_compressed_whatever_the_client_takes() -> None:
    """A message would wait in the compressor for others; requests may be compressed."""
    async with site() as here:
        stream_id = await here.told("a")
        takes = {"Accept-Encoding": "gzip", "Connect-Accept-Encoding": "gzip", "Grpc-Accept-Encoding": "gzip"}
        for kind, name in ((CONNECT, "Connect-Content-Encoding"), (GRPC_WEB, "Grpc-Encoding")):
            data = asked(kind, session_id=stream_id)[5:]
            head = {"Content-Type": kind, name: "gzip", **takes}
            response = await here.http.open(
                "POST", f"{PATH}/Generate", head, data=envelope(gzip.compress(data), flags=1)
            )
            assert response.headers[name] == "identity"
            assert envelopes(await response.read())[0][0] == 0
        head = {**JSON, **takes}
        answer = await here.http.ask("POST", f"{PATH}/Cancel", head, data=json.dumps({"sessionId": stream_id}))
        assert answer.headers["content-encoding"] == "identity"
        assert answer.json == {"sessionId": stream_id}
        assert answer.headers["cache-control"] == "no-store, no-transform"


async def test_unary_calls_are_plain_json_for_who_wants_that() -> None:
    """`curl` is a client of Connect."""
    async with site() as here:
        stream_id = await here.told("a", "b")
        answer = await here.http.post(f"{PATH}/Ack", {"session_id": stream_id, "acked_token_index": 1})
        assert answer.json == {
            "sessionId": stream_id,
            "ackedTokenIndex": 1,
            "journaledTokenCount": 2,
            "firstRetainedIndex": 2,
        }
        answer = await here.http.post(f"{PATH}/Ack", {"session_id": "never-was"})
        assert (answer.status, answer.json["code"]) == (404, "not_found")
        assert answer.json["details"][0]["type"] == "google.rpc.ErrorInfo"
        answer = await here.http.post(f"{PATH}/Ack", {"session_id": stream_id, "acked_token_index": 7})
        assert (answer.status, answer.json["code"]) == (400, "out_of_range")


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/grpc", 415),  # needs HTTP/2 trailers: its port is another
        ("application/grpc+proto", 415),
        ("application/grpc-web-text", 415),
        ("application/json", 415),  # of a stream it is application/connect+json
        ("text/plain", 415),  # what a page of another origin could send unasked
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data", 415),
        ("", 415),
        (CONNECT, 200),
        (GRPC_WEB, 200),
    ],
)
async def test_only_the_protocols_own_types_are_taken(kind: str, status: int) -> None:
    """None of them can a page send without asking first (Fetch, section 2.2.2)."""
    async with site() as here:
        body = asked(kind if status == 200 else CONNECT, prompt="Hello")
        head = {"Content-Type": kind}
        response = await here.http.open("POST", f"{PATH}/Generate", head, data=body)
        assert response.status == status
        assert here.puppets.begun == (1 if status == 200 else 0)


async def test_methods_and_paths_that_are_not_there() -> None:
    """405 and 404, as the protocols want; a `Content-Type` that stands twice is none."""
    async with site() as here:
        for method in ("GET", "PUT", "DELETE"):
            assert (await here.http.ask(method, f"{PATH}/Generate")).status == 405
        assert (await here.http.post(f"{PATH}/Nothing", {})).status == 404
        assert (await here.http.post(f"{PATH}/", {})).status == 404
        assert (await here.http.post("/another.Service/Generate", {})).status == 404
        double = [("Content-Type", CONNECT), ("Content-Type", GRPC_WEB)]
        assert (await here.http.ask("POST", f"{PATH}/Generate", double, data=b"")).status == 400


@pytest.mark.parametrize("data", [b"", b"\0", envelope(b"{"), envelope(b"[]"), b"\0\0\0\0\x09{}", envelope(b"{}") * 2])
async def test_body_that_is_no_call_has_a_status(data: bytes) -> None:
    """Nothing hangs, nothing is begun, and the next call works."""
    async with site() as here:
        head = {"Content-Type": CONNECT}
        response = await here.http.open("POST", f"{PATH}/Generate", head, data=data)
        [(flags, end)] = envelopes(await soon(response.read()))
        assert (response.status, flags) == (200, 2)
        assert json.loads(end)["error"]["code"] in {"invalid_argument", "unimplemented"}
        assert here.puppets.begun == 0
        assert await here.told("a") != ""


async def test_text_that_is_no_unicode_is_an_invalid_argument() -> None:
    """Half a surrogate pair in JSON, bytes that are not UTF-8 in protobuf: neither may reach a model or a journal."""
    async with site() as here:
        bodies = {CONNECT: rb'{"prompt":"\ud800"}', "application/connect+proto": b"\x0a\x02\xc3\x28"}
        for kind, data in bodies.items():
            response = await here.http.open("POST", f"{PATH}/Generate", {"Content-Type": kind}, data=envelope(data))
            [(_, end)] = envelopes(await soon(response.read()))
            assert json.loads(end)["error"]["code"] == "invalid_argument"
        assert here.puppets.begun == 0


async def test_a_fault_of_ours_is_internal_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller gets a status and the log the cause; nothing of it leaks, and the server does not see it raised."""
    async with site() as here:

        async def broken(name: str) -> str:
            raise RuntimeError("secret")

        with monkeypatch.context() as patch:
            patch.setattr(here.gateway.streams, "find", broken)
            body = await (await generate(here.http, prompt="Hello", session_id="demo")).read()
            answer = await here.http.post(f"{PATH}/Cancel", {"session_id": "demo"})
        assert json.loads(envelopes(body)[0][1])["error"]["code"] == answer.json["code"] == "internal"
        assert b"secret" not in body + answer.body
        assert caplog.text.count("RuntimeError: secret") == 2


async def test_header_that_is_no_text_harms_nobody() -> None:
    """It is none that anybody here looks at."""
    async with site() as here, wire(here.gateway) as reader:
        body = asked(CONNECT, prompt="Hello")
        lines = (f"Content-Type: {CONNECT}", f"Content-Length: {len(body)}", "X-Odd: \xff\xfe")
        reader.request("POST", f"{PATH}/Generate", *lines, body=body)
        assert (await reader.head())[0] == 200


async def test_a_request_over_the_limit_is_refused() -> None:
    """Before it is decompressed to more than that."""
    async with site(max_body=4096) as here:
        big = json.dumps({"prompt": "x" * 5000}).encode()
        for flags, data in ((0, big), (1, gzip.compress(big))):
            head = {"Content-Type": CONNECT, "Connect-Content-Encoding": "gzip"}
            response = await here.http.open("POST", f"{PATH}/Generate", head, data=envelope(data, flags))
            [(_, end)] = envelopes(await soon(response.read()))
            assert json.loads(end)["error"]["code"] == "resource_exhausted"
        assert here.puppets.begun == 0


@pytest.mark.parametrize("kind", [CONNECT, GRPC_WEB])
async def test_without_a_key_the_call_has_its_protocols_status(kind: str, tmp_path: Path) -> None:
    """A client of either looks for it there, and not in HTTP's."""
    (tmp_path / "keys").write_text(KEYS)
    async with site(keys_file=str(tmp_path / "keys")) as here:
        response = await generate(here.http, kind, prompt="Hello")
        assert response.status == 200
        [(_, end)] = envelopes(await response.read())
        if kind == CONNECT:
            assert json.loads(end)["error"]["code"] == "unauthenticated"
        else:
            assert b"grpc-status: 16\r\n" in end
        answer = await here.http.post(f"{PATH}/Cancel", {"session_id": "demo"})
        assert (answer.status, answer.json["code"]) == (401, "unauthenticated")
        assert here.puppets.begun == 0
        assert here.gateway.gateway.observer.refused == {"unauthorized": 2}
        ada = here.http.keyed(ADA)
        assert (await generate(ada, kind, prompt="Hello")).headers[H_STREAM_ID]


async def test_session_cookie_is_for_event_sources_alone(tmp_path: Path) -> None:
    """A page that can call can send a header."""
    (tmp_path / "keys").write_text(KEYS)
    async with site(keys_file=str(tmp_path / "keys")) as here:
        answer = await here.http.keyed(ADA).post("/v1/session")
        cookie = answer.headers["set-cookie"].partition(";")[0]
        response = await generate(here.http, headers={"Cookie": cookie}, prompt="Hello")
        assert b"unauthenticated" in await response.read()


async def test_pages_of_a_configured_origin_see_headers_and_errors() -> None:
    """The preflight allows what the official client sends; every answer, errors included, has the headers."""
    page = "https://app.example"
    async with site(cors_origin=(page,)) as here:
        asks = {
            "Origin": page,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,connect-protocol-version,connect-timeout-ms,content-type,"
            "midstream-stream-id,model,x-grpc-web,x-user-agent,grpc-timeout",
        }
        answer = await here.http.ask("OPTIONS", f"{PATH}/Generate", asks)
        allowed = {name.strip().lower() for name in answer.headers["access-control-allow-headers"].split(",")}
        assert answer.status == 204
        assert set(asks["Access-Control-Request-Headers"].split(",")) <= allowed
        for fields in ({"prompt": "Hello"}, {"session_id": "never-was"}):
            response = await generate(here.http, headers={"Origin": page}, **fields)
            assert response.headers["access-control-allow-origin"] == page
            exposed = response.headers["access-control-expose-headers"].lower()
            assert H_STREAM_ID.lower() in exposed
            assert "grpc-status-details-bin" in exposed
        refused = await here.http.open("POST", f"{PATH}/Generate", {"Origin": "https://evil.example"}, data=b"")
        assert refused.status == 403


# --- who leaves, who dawdles -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Connect-Timeout-Ms", "Grpc-Timeout"])
async def test_a_deadline_ends_the_call_and_not_the_generation(name: str) -> None:
    """With the protocol's own status; the rest is there for another call."""
    kind, value = (CONNECT, "400") if name.startswith("Connect") else (GRPC_WEB, "400m")
    async with site() as here:
        response = await generate(here.http, kind, {name: value}, prompt="Hello", session_id="demo")
        puppet = await here.puppets.next()
        await puppet.say("a")
        told = envelopes(await soon(response.read()))
        assert b"deadline_exceeded" in told[-1][1] or b"grpc-status: 4\r\n" in told[-1][1]
        await here.gateway.unread(response.headers[H_STREAM_ID])
        await puppet.say("b")
        await puppet.finish()
        rest = await (await generate(here.http, session_id="demo", resume_from_token=1)).read()
        assert [json.loads(data).get("token") for _, data in envelopes(rest)] == ["b", None, None]


async def drop_who_takes_nothing(here: Site, stuck: Wire) -> None:
    """One call whose peer takes nothing of all that is said, until it is let go."""
    response, puppet, stream_id = await begun(here)
    body = asked(CONNECT, session_id="demo")
    lines = (f"Content-Type: {CONNECT}", f"Content-Length: {len(body)}")
    stuck.request("POST", f"{PATH}/Generate", *lines, body=body)
    await stuck.head()
    response.close()
    await here.gateway.idle(stream_id)
    [follow] = here.gateway.readers(stream_id)
    while follow.waiting:
        await puppet.say(*["x" * 200_000] * 10)
        await asyncio.sleep(0)
    await here.gateway.streams.pulse(0.0)
    await here.gateway.streams.pulse(SEND_STALL)
    await here.gateway.unread(stream_id)
    await puppet.finish()


async def test_a_peer_that_takes_nothing_is_dropped_and_leaves_no_handler() -> None:
    """Its connection ends; neither its task nor its reader stays."""
    async with site() as here, wire(here.gateway) as stuck:
        before = len(asyncio.all_tasks())
        await drop_who_takes_nothing(here, stuck)
        await until(lambda: len(asyncio.all_tasks()) <= before, "the handler to go")


async def test_a_peer_that_leaves_is_noticed_while_its_stream_is_silent() -> None:
    """And its generation goes on."""
    async with site() as here:
        response, puppet, stream_id = await begun(here)
        await here.gateway.idle(stream_id)
        response.close()
        await here.gateway.unread(stream_id)
        assert not puppet.stopped.is_set()


async def test_another_server_than_ours_carries_it_too() -> None:
    """Behind a middleware that hides the connection, aborting a stalled reader still ends its call."""

    def hiding(gateway: Any) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope.pop("extensions", None)
            await gateway(scope, receive, send)

        return app

    async with site(around=hiding) as here, wire(here.gateway) as stuck:
        await drop_who_takes_nothing(here, stuck)


# --- clients that are not ours ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["connect", "grpcweb"])
async def test_buf_curl_streams_resumes_and_is_refused(protocol: str) -> None:
    """From the definition alone."""
    async with site() as here:
        stream_id = await here.told("a", "b")
        words = ("--protocol", protocol, "--schema", str(SCHEMA))
        url = f"{here.gateway.address}{PATH}"
        ask = json.dumps({"session_id": stream_id, "resume_from_token": 1})
        told = await asyncio.to_thread(buf, *words, "-d", ask, f"{url}/Generate")
        assert "".join(told.split()) == '{"token":"b","tokenIndex":1}{"tokenIndex":2,"isFinal":true}'
        ask = json.dumps({"session_id": stream_id, "acked_token_index": 0})
        assert '"journaledTokenCount": 2' in await asyncio.to_thread(buf, *words, "-d", ask, f"{url}/Ack")


async def test_connects_own_python_client_goes_through() -> None:
    """The generated client, over the generated server, with our tokens between."""
    async with site() as here:
        client = InferenceServiceClient(here.gateway.address)
        stream_id = await here.told("a", "b")
        told = client.generate(GenerateRequest(session_id=stream_id))
        assert [(message.token, message.token_index, message.is_final) async for message in told] == [
            ("a", 0, False),
            ("b", 1, False),
            ("", 2, True),
        ]
        assert (await client.ack(AckRequest(session_id=stream_id))).journaled_token_count == 2
        assert not (await client.cancel(CancelRequest(session_id=stream_id))).cancelled


async def test_a_gateway_that_stops_says_unavailable() -> None:
    """So that the reader resumes, and takes it for no end."""
    gateway = RunningGateway()
    async with gateway, aiohttp.ClientSession() as session:
        head = {"Content-Type": CONNECT}
        url = f"{gateway.address}{PATH}/Generate"
        async with session.post(url, data=asked(CONNECT, prompt="Hello"), headers=head) as response:
            puppet = await gateway.puppets.next()
            await puppet.say("a")
            await gateway.idle(response.headers[H_STREAM_ID])
            await soon(gateway.gateway.stop())
            told = envelopes(await soon(response.read()))
    assert json.loads(told[0][1]) == {"token": "a"}
    assert json.loads(told[-1][1])["error"]["code"] == "unavailable"
