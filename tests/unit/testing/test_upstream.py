"""The misbehaving upstream does on the wire what its scripts say, seen through raw sockets."""

import asyncio
import json
import socket
import struct
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvloop

from midstream.testing.upstream import (
    DONE,
    FAULTS,
    Closed,
    CloseDirty,
    Comment,
    Event,
    Head,
    MisbehavingUpstream,
    Pause,
    Raw,
    Reset,
    Script,
    Send,
    Stall,
    Status,
    Step,
    chat_answer,
    chat_event,
    completion_event,
    redirect,
)

QUIET = 0.05  # seconds in which nothing may come
SOON = 5.0  # seconds within which something must


class Wire:
    """A raw HTTP client: it sends a request and shows what came back, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def post(self, model: str = "m", path: str = "/v1/chat/completions", **fields: object) -> None:
        body = json.dumps({"model": model, **fields}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\nContent-Length: {len(body)}"
        self.writer.write(head.encode() + b"\r\n\r\n" + body)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers, their names in lower case."""
        async with asyncio.timeout(SOON):
            first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        pairs = (line.split(": ", 1) for line in lines)
        return int(first.split(" ")[1]), {name.lower(): value for name, value in pairs}

    async def chunk(self) -> bytes:
        """One chunk of a chunked body; b"" is its end."""
        async with asyncio.timeout(SOON):
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            return (await self.reader.readexactly(size + 2))[:-2]

    async def pieces(self, headers: dict[str, str]) -> AsyncIterator[bytes]:
        """The body as it comes, decompressed, up to its end, clean or not."""
        inflate = zlib.decompressobj(wbits=31) if headers.get("content-encoding") == "gzip" else None
        left = int(headers.get("content-length", -1))
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while left:
                if "transfer-encoding" in headers:
                    data = await self.chunk()
                else:
                    data = await self.reader.read(min(left, 65_536) if left > 0 else 65_536)
                    left -= len(data) if left > 0 else 0
                if not data:
                    return
                yield inflate.decompress(data) if inflate else data

    async def body(self, headers: dict[str, str]) -> bytes:
        return b"".join([piece async for piece in self.pieces(headers)])

    async def quiet(self) -> bool:
        """Nothing comes for a while, not even an end."""
        try:
            async with asyncio.timeout(QUIET):
                await self.reader.read(1)
        except TimeoutError:
            return True
        return False

    async def rest(self) -> bytes:
        """Everything up to the close."""
        async with asyncio.timeout(SOON):
            return await self.reader.read()


@asynccontextmanager
async def connected(upstream: MisbehavingUpstream) -> AsyncIterator[Wire]:
    wire = Wire(*await asyncio.open_connection("127.0.0.1", upstream.port, limit=8 * 2**20))
    try:
        yield wire
    finally:
        wire.writer.close()
        with suppress(ConnectionError):
            await wire.writer.wait_closed()


@asynccontextmanager
async def asked(script: Script) -> AsyncIterator[tuple[MisbehavingUpstream, Wire]]:
    """An upstream with one script, and a client that has sent it a request."""
    async with MisbehavingUpstream(default=script) as upstream, connected(upstream) as wire:
        await wire.post()
        yield upstream, wire


def payloads(body: bytes) -> list[Any]:
    """The JSON of each event of a plain body, without the last, [DONE]."""
    *events, done = [line[6:] for line in body.decode().split("\n") if line.startswith("data: ")]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


# What it hears


async def test_a_request_is_recorded_with_path_headers_and_json() -> None:
    async with asked(Script([DONE])) as (upstream, wire):
        await wire.head()
        (request,) = upstream.requests
        assert (request.method, request.path) == ("POST", "/v1/chat/completions")
        assert request.headers["authorization"] == "Bearer k"
        assert request.json == {"model": "m"}
        assert request.at <= asyncio.get_running_loop().time()


async def test_a_chunked_request_body_is_read_whole() -> None:
    async with MisbehavingUpstream() as upstream, connected(upstream) as wire:
        wire.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        wire.writer.write(b'8;x=y\r\n{"model"\r\n5\r\n:"m"}\r\n0\r\n\r\n')
        assert (await wire.head())[0] == 200
        assert upstream.requests[0].json == {"model": "m"}


async def test_waiting_for_a_request_ends_when_it_has_come() -> None:
    async with MisbehavingUpstream() as upstream, connected(upstream) as wire:
        waiting = asyncio.create_task(upstream.requested(2, within=SOON))
        await wire.post()
        await wire.post()
        await waiting
        assert len(upstream.requests) == 2


# What it answers


async def test_its_models_are_those_that_have_a_script() -> None:
    async with MisbehavingUpstream({"a": Script([DONE])}) as upstream, connected(upstream) as wire:
        upstream.script("b", Script([DONE]))
        wire.writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        status, headers = await wire.head()
        listed = json.loads(await wire.body(headers))
        assert status == 200
        assert [model["id"] for model in listed["data"]] == ["a", "b"]


async def test_another_path_is_not_found() -> None:
    async with MisbehavingUpstream() as upstream, connected(upstream) as wire:
        wire.writer.write(b"GET /v1/nothing HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await wire.head())[0] == 404


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/v1/chat/completions", lambda choice: choice["delta"].get("content", "")),
        ("/v1/completions", lambda choice: choice["text"]),
    ],
)
async def test_without_a_script_the_answer_is_polite_and_in_the_shape_of_the_route(path: str, text: Any) -> None:
    async with MisbehavingUpstream() as upstream, connected(upstream) as wire:
        await wire.post(path=path)
        status, headers = await wire.head()
        events = payloads(await wire.body(headers))
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert "".join(text(event["choices"][0]) for event in events) == "Hello, world"
        assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_scripts_of_one_model_are_taken_in_turn_and_the_last_one_stays() -> None:
    async with MisbehavingUpstream() as upstream, connected(upstream) as wire:
        upstream.script("m", Script([Send(b"1")]), Script([Send(b"2")]))
        heard = []
        for _ in range(3):
            await wire.post("m")
            heard.append(await wire.body((await wire.head())[1]))
        assert heard == [b"1", b"2", b"2"]


async def test_a_model_without_any_script_is_refused() -> None:
    with pytest.raises(ValueError, match="no script for 'm'"):
        MisbehavingUpstream().script("m")


# Its steps


async def test_a_clean_end_has_the_terminator_and_the_connection_serves_on() -> None:
    async with asked(Script([Send(b"ab"), Send(b"c")])) as (upstream, wire):
        for _ in range(2):
            await wire.head()
            assert [await wire.chunk(), await wire.chunk(), await wire.chunk()] == [b"ab", b"c", b""]
            await wire.post()
        assert upstream.open_connections == 1


async def test_a_dirty_close_is_a_fin_without_the_terminator() -> None:
    async with asked(Script([Send(b"ab"), CloseDirty()])) as (upstream, wire):
        await wire.head()
        assert await wire.rest() == b"2\r\nab\r\n"
        await upstream.idle()
        assert [(end.by_client, end.mid_answer) for end in upstream.closed] == [(False, False)]


async def test_a_reset_is_a_reset_after_what_was_read() -> None:
    told = asyncio.Event()
    async with asked(Script([Send(b"ab"), Pause(told), Reset()])) as (_, wire):
        await wire.head()
        assert await wire.chunk() == b"ab"
        told.set()
        with pytest.raises(ConnectionResetError):
            await wire.rest()


def test_a_reset_is_a_reset_under_uvloop_too() -> None:
    async def scenario() -> None:
        async with asked(Script([Reset()])) as (_, wire):
            with pytest.raises(ConnectionResetError):
                await wire.rest()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


async def test_a_pause_holds_what_follows_until_the_event_is_set() -> None:
    told = asyncio.Event()
    async with asked(Script([Send(b"a"), Pause(told), Send(b"b")])) as (_, wire):
        await wire.head()
        assert await wire.chunk() == b"a"
        assert await wire.quiet()
        told.set()
        assert await wire.chunk() == b"b"


async def test_a_stall_before_the_head_says_nothing_at_all() -> None:
    async with asked(FAULTS["silent-before-headers"]) as (_, wire):
        assert await wire.quiet()


async def test_a_stall_after_the_head_says_nothing_more() -> None:
    async with asked(FAULTS["silent-before-first-token"]) as (_, wire):
        assert (await wire.head())[0] == 200
        assert await wire.quiet()


async def test_a_head_step_sends_the_headers_before_any_body() -> None:
    async with asked(Script([Head(503, {"X-Why": "busy"}), Stall()])) as (_, wire):
        status, headers = await wire.head()
        assert (status, headers["x-why"]) == (503, "busy")
        assert await wire.quiet()


async def test_raw_bytes_stand_outside_head_and_framing() -> None:
    async with asked(Script([Raw(b"SSH-2.0-no\r\n"), CloseDirty()])) as (_, wire):
        assert await wire.rest() == b"SSH-2.0-no\r\n"
    async with asked(Script([Send(b"a"), Raw(b"zz\r\n"), CloseDirty()])) as (_, wire):
        await wire.head()
        assert await wire.rest() == b"1\r\na\r\nzz\r\n"


async def test_a_status_is_a_whole_answer_with_its_true_length() -> None:
    async with asked(Script([Status(429, {"Retry-After": "7"}, b'{"error":{}}'), Stall()])) as (_, wire):
        status, headers = await wire.head()
        assert status == 429
        assert headers == {"content-type": "application/json", "content-length": "12", "retry-after": "7"}
        assert await wire.body(headers) == b'{"error":{}}'


async def test_a_redirect_names_where_to_go() -> None:
    async with asked(redirect("http://127.0.0.1:9/v1", 308)) as (_, wire):
        status, headers = await wire.head()
        assert (status, headers["location"]) == (308, "http://127.0.0.1:9/v1")


# Its lies about the body


@pytest.mark.parametrize("lie", [0, 5, -1])
async def test_the_length_is_true_but_for_the_lie(lie: int) -> None:
    script = Script([Send(b"ab"), Event("c")], framing="length", length_lie=lie, bom=True)
    async with asked(script) as (upstream, wire):
        _, headers = await wire.head()
        assert int(headers["content-length"]) == len(script.body()) + lie
        assert await wire.reader.readexactly(len(script.body())) == script.body()
        if lie:
            assert await wire.rest() == b""
        else:
            assert await wire.quiet()
            assert upstream.open_connections == 1


async def test_a_body_ended_by_the_close_has_no_framing() -> None:
    async with asked(Script([Send(b"ab"), Send(b"c")], framing="close")) as (_, wire):
        _, headers = await wire.head()
        assert not {"content-length", "transfer-encoding"} & headers.keys()
        assert await wire.rest() == b"abc"


async def test_headers_may_contradict_the_framing() -> None:
    async with asked(Script([DONE], headers={"Content-Length": "3"}, content_type=None)) as (_, wire):
        _, headers = await wire.head()
        assert headers == {"transfer-encoding": "chunked", "content-length": "3"}


async def test_a_split_body_arrives_in_pieces_of_that_many_bytes() -> None:
    async with MisbehavingUpstream(default=Script(chat_answer("né🚀"), split=3)) as upstream:
        loop = asyncio.get_running_loop()
        with socket.create_connection(("127.0.0.1", upstream.port)) as client:
            client.setblocking(False)
            await loop.sock_sendall(client, b"POST /v1/chat/completions HTTP/1.1\r\n\r\n")
            pieces = [await loop.sock_recv(client, 65_536)]
            while not b"".join(pieces).endswith(b"0\r\n\r\n"):
                pieces.append(await loop.sock_recv(client, 65_536))
        assert max(map(len, pieces)) == 3
        assert len(pieces) > 100


@pytest.mark.parametrize("framing", ["chunked", "length"])
async def test_a_compressed_step_can_be_read_before_the_next_is_sent(framing: Any) -> None:
    told = asyncio.Event()
    script = Script([chat_event("a"), Pause(told), DONE], gzip=True, framing=framing)
    async with asked(script) as (_, wire):
        _, headers = await wire.head()
        assert headers["content-encoding"] == "gzip"
        pieces = wire.pieces(headers)
        assert await anext(pieces) == chat_event("a").encode()
        told.set()
        assert b"".join([piece async for piece in pieces]) == DONE.encode()


# Its dialects of server-sent events


def test_an_event_has_a_field_for_its_name_and_each_line_of_its_data() -> None:
    assert Event("a\nb", "x").encode() == b"event: x\ndata: a\ndata: b\n\n"
    assert Event("").encode("\r", space=False) == b"data:\r\r"


def test_a_body_speaks_the_dialect_of_its_script() -> None:
    steps: list[Step] = [Event("a"), Comment(" ping"), Send(b"raw\n")]
    assert Script(steps).body() == b"data: a\n\n: ping\n\nraw\n"
    assert Script(steps, newline="\r\n", space=False).body() == b"data:a\r\n\r\n: ping\r\n\r\nraw\n"
    assert Script(steps, newline="\r", bom=True).body() == b"\xef\xbb\xbfdata: a\r\r: ping\r\rraw\n"


def test_a_chunk_has_the_openai_shape_and_any_extra_field() -> None:
    chat = json.loads(chat_event("x", choice=1, finish_reason="stop", usage={"total_tokens": 1}).data)
    assert chat["object"] == "chat.completion.chunk"
    assert chat["choices"] == [{"index": 1, "delta": {"content": "x"}, "finish_reason": "stop"}]
    assert chat["usage"] == {"total_tokens": 1}
    text = json.loads(completion_event("x", logprobs={"tokens": ["x"]}, system_fingerprint="f").data)
    assert (text["object"], text["system_fingerprint"]) == ("text_completion", "f")
    assert text["choices"] == [{"index": 0, "text": "x", "finish_reason": None, "logprobs": {"tokens": ["x"]}}]
    assert json.loads(chat_event(choices=[]).data)["choices"] == []


def test_characters_go_out_whole_and_only_half_a_surrogate_pair_is_escaped() -> None:
    assert '"content":"🚀\\ud83d"' in chat_event("🚀\ud83d").data
    assert "-Infinity" in FAULTS["infinite-logprob"].body().decode()


# What it sees of the client


async def test_a_client_that_leaves_a_silent_answer_is_seen_to_leave() -> None:
    async with asked(FAULTS["silent-before-headers"]) as (upstream, wire):
        await upstream.requested()
        wire.writer.close()
        await upstream.disconnected(1)
        (end,) = upstream.closed
        assert end == Closed(end.at, by_client=True, mid_answer=True)
        assert end.at >= upstream.requests[0].at
        await upstream.idle()


async def test_a_client_that_resets_is_seen_to_leave() -> None:
    async with asked(FAULTS["silent-mid-stream"]) as (upstream, wire):
        await wire.head()
        linger = struct.pack("ii", 1, 0)
        wire.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        wire.writer.transport.abort()
        await upstream.disconnected(1)


async def test_a_client_that_leaves_while_it_reads_nothing_is_seen_to_leave() -> None:
    async with asked(Script([Send(b"x" * 65_536, times=10_000)])) as (upstream, wire):
        wire.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a transport that also reads
        await upstream.requested()
        assert await wire.quiet()
        wire.writer.close()
        await upstream.disconnected(1)


async def test_a_client_that_leaves_between_two_answers_has_left_no_answer() -> None:
    async with asked(Script([DONE])) as (upstream, wire):
        await wire.body((await wire.head())[1])
        wire.writer.close()
        await upstream.idle()
        assert [(end.by_client, end.mid_answer) for end in upstream.closed] == [(True, False)]
        with pytest.raises(TimeoutError, match="1 connections closed mid-answer; saw 1 requests"):
            await upstream.disconnected(1, within=0.01)


async def test_stopping_it_ends_every_connection_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    async with MisbehavingUpstream(default=Script([Stall()])) as upstream:
        wire = Wire(*await asyncio.open_connection("127.0.0.1", upstream.port))
        await wire.post()
        await upstream.requested()
    assert await wire.rest() == b""
    assert upstream.open_connections == 0
    wire.writer.close()
    await wire.writer.wait_closed()
    assert caplog.records == []


async def test_a_client_that_does_not_speak_http_fails_the_test_that_brought_it() -> None:
    async def greeted() -> None:
        async with MisbehavingUpstream() as upstream, connected(upstream) as wire:
            wire.writer.write(b"EHLO\r\n\r\n")
            assert await wire.rest() == b""

    with pytest.raises(ValueError, match="unpack"):
        await greeted()


# The catalogue

STREAMED = [
    name for name, script in FAULTS.items() if script.body() and script.length_lie >= 0 and name != "comments-for-ever"
]
WHOLE = {
    "gzip-error": 400,
    "unauthorized": 401,
    "rate-limited": 429,
    "bad-gateway-page": 502,
    "redirect": 307,
}


@pytest.mark.parametrize("name", STREAMED)
async def test_a_fault_says_on_the_wire_what_its_script_says(name: str) -> None:
    expected = FAULTS[name].body()
    async with asked(FAULTS[name]) as (_, wire):
        _, headers = await wire.head()
        heard = bytearray()
        async for piece in wire.pieces(headers):
            heard += piece
            if len(heard) >= len(expected):
                break
        assert heard == expected


@pytest.mark.parametrize(("name", "status"), WHOLE.items())
async def test_a_refusal_is_whole_and_has_its_status(name: str, status: int) -> None:
    async with asked(FAULTS[name]) as (_, wire):
        heard, headers = await wire.head()
        (step,) = FAULTS[name].steps
        assert heard == status
        assert isinstance(step, Status)
        assert await wire.body(headers) == step.body


async def test_a_body_longer_than_its_length_has_the_rest_behind_it() -> None:
    script = FAULTS["longer-than-its-length"]
    async with asked(script) as (_, wire):
        _, headers = await wire.head()
        body = await wire.body(headers)
        assert body + await wire.rest() == script.body()
        assert len(body) == len(script.body()) - 60


@pytest.mark.parametrize("name", ["empty-body", "empty-stream"])
async def test_an_empty_body_is_a_200_with_nothing_in_it(name: str) -> None:
    async with asked(FAULTS[name]) as (_, wire):
        status, headers = await wire.head()
        assert (status, await wire.body(headers)) == (200, b"")


@pytest.mark.parametrize(
    ("name", "error"), [("reset-before-headers", ConnectionResetError), ("closed-before-headers", None)]
)
async def test_a_connection_that_ends_before_the_headers_carries_nothing(
    name: str, error: type[Exception] | None
) -> None:
    async with asked(FAULTS[name]) as (_, wire):
        if error is None:
            assert await wire.rest() == b""
        else:
            with pytest.raises(error):
                await wire.rest()


async def test_comments_for_ever_go_on_until_the_client_leaves() -> None:
    async with asked(FAULTS["comments-for-ever"]) as (upstream, wire):
        await wire.head()
        assert [await wire.chunk(), await wire.chunk()] == [b": ping\n\n"] * 2
        wire.writer.close()
        await upstream.disconnected(1)


def test_every_fault_is_shown_by_one_of_these_tests() -> None:
    by_name = {"longer-than-its-length", "empty-body", "empty-stream", "comments-for-ever"}
    silent = {"silent-before-headers", "silent-before-first-token"}
    headless = {"reset-before-headers", "closed-before-headers"}
    assert FAULTS.keys() - set(STREAMED) - WHOLE.keys() == by_name | silent | headless
