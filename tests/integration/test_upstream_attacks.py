"""Upstreams that break HTTP itself, below any script: each answer has a clear end, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from midstream.producers import openai
from midstream.testing.patience import soon
from tests.gateways import Site, site

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
SAID = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
STOP = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n" % (len(data), extension, data)


WHOLE = HEAD + b"\r\n" + chunk(SAID + STOP) + b"0\r\n\r\n"


async def read_request(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    lengths = [int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    await reader.readexactly(sum(lengths))


def answers(*parts: bytes) -> Serve:
    """Reads the request, sends these bytes, and keeps the connection open."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for part in parts:
            writer.write(part)
            await writer.drain()
        await reader.read()

    return serve


def floods(first: bytes, part: bytes) -> Serve:
    """Sends the same thing for as long as anybody takes it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(first)
        while True:
            writer.write(part)
            await writer.drain()

    return serve


async def answers_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Does not wait for the request's body, nor read it, as a proxy that refuses does."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(WHOLE)
    await writer.drain()
    await asyncio.sleep(0.05)


@asynccontextmanager
async def in_front_of(serve: Serve, **settings: float) -> AsyncIterator[Site]:
    """A gateway in front of an upstream that does this on each connection."""

    async def quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await serve(reader, writer)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    tasks: set[asyncio.Task[None]] = set()
    server = await asyncio.start_server(lambda r, w: tasks.add(asyncio.ensure_future(quietly(r, w))), "127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        limits: dict[str, Any] = {"upstream_first_token": 1.0, "upstream_idle": 1.0, "upstream_total": 2.0}
        async with site(upstream=(url,), **{**limits, **settings}) as here:
            yield here
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def ending(here: Site, **body: Any) -> dict:
    """The terminal record of an answer."""
    response = await here.http.create(model="m", **body)
    return json.loads((await soon(response.read())).rpartition(b"\ndata: ")[2])


@pytest.mark.parametrize(
    "serve",
    [
        answers(HEAD + b"\r\n" + chunk(SAID + STOP) + b"0\r\nX-Sum: 1\r\nX-More: 2\r\n\r\n"),
        answers(b"HTTP/1.1 100 Continue\r\n\r\n" + b"HTTP/1.1 103 Early Hints\r\nLink: <a>\r\n\r\n" * 20 + WHOLE),
        answers(HEAD + b"\r\n" + chunk(SAID + STOP, b';a="b";c=' + b"d" * 50_000) + b"0\r\n\r\n"),
        floods(HEAD + b"\r\n" + chunk(SAID + STOP) + b"0\r\n", b"X: " + b"t" * 1000 + b"\r\n"),
        answers_early,
        answers(HEAD.replace(b"Transfer-Encoding: chunked\r\n", b"").replace(b"1.1", b"1.0") + b"\r\n" + SAID + STOP),
    ],
    ids=["trailers", "1xx before it", "chunk extensions", "trailers without end", "answer before the request", "1.0"],
)
async def test_whole_answer_in_odd_http_is_taken(serve: Serve) -> None:
    async with in_front_of(serve) as here:
        assert (await ending(here, padding="x" * 900_000))["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("serve", "codes"),
    [
        (answers(HEAD.replace(b"text/event", b"te\xff\xfe") + b"\r\n" + chunk(b"hello") + b"0\r\n\r\n"), "malformed"),
        (answers(b"HTTP/1.1 302 Found\r\nLocation: http://\xff\xfe/\r\nContent-Length: 0\r\n\r\n"), "error"),
        (answers(b"HTTP/1.1 418 \xff\xfe\r\nRetry-After: \xb2\r\nContent-Length: 3\r\n\r\n\xff\xfe\xfd"), "error"),
        (answers(HEAD + b"Content-Encoding: \xff\r\n\r\n" + chunk(SAID)), "malformed"),
        (answers(HEAD + b"Content-Encoding: gzip, identity\r\n\r\n" + chunk(SAID)), "malformed"),
        (answers(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n" + SAID), "error"),
        (floods(b"", b"HTTP/1.1 103 Early Hints\r\nLink: <a>\r\n\r\n"), "timeout"),
        (floods(HEAD, b"X: " + b"h" * 1000 + b"\r\n"), "malformed"),
        (floods(HEAD + b"X: ", b"h" * 65_536), "malformed"),
        (floods(HEAD + b"\r\n5;x=", b"e" * 65_536), "timeout"),
        (floods(HEAD + b"\r\n", chunk(b": ping\n\n")), "timeout"),
        (answers(HEAD + b"Content-Length: 9\r\n\r\n" + chunk(SAID)), "malformed"),
        (answers(b"\x16\x03\x01\x02\x00"), "malformed"),
    ],
    ids=[
        "content type that is no text",
        "location that is no text",
        "reason and error that are no text",
        "encoding that is no text",
        "two encodings",
        "another protocol",
        "1xx without end",
        "headers without end",
        "one header without end",
        "chunk extension without end",
        "comments without end",
        "two lengths",
        "tls",
    ],
)
async def test_what_is_no_answer_ends_its_stream_by_name(serve: Serve, codes: str) -> None:
    async with in_front_of(serve) as here:
        assert (await ending(here))["error"]["code"] == f"upstream_{codes}"


async def test_header_that_comes_byte_by_byte_is_late() -> None:
    """Each byte is a sign of life, and none of them is an answer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for byte in WHOLE:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.05)

    async with in_front_of(serve, upstream_first_token=0.3) as here:
        assert (await ending(here))["error"]["code"] == "upstream_timeout"


def deep(depth: int) -> Iterator[bytes]:
    for where in (b'"content":"b","x":%b', b'"tool_calls":[%b]', b'"reasoning":%b'):
        yield b'data: {"choices":[{"index":0,"delta":{%b}}]}\n\n' % (where % (b"[" * depth + b"]" * depth))
    yield b'data: {"choices":[],"usage":{"a":%b}}\n\n' % (b"[" * depth + b"]" * depth)


@pytest.mark.parametrize("depth", [100, 260, 1030, 200_000])
async def test_json_nested_too_deep_fails_the_stream(depth: int) -> None:
    """Also where it is deeper than what reads it can read, or than what writes it can write; what came before stays."""
    for event in deep(depth):
        async with in_front_of(answers(HEAD + b"\r\n" + chunk(SAID), chunk(event + STOP))) as here:
            end = await ending(here)
            assert (end["seq"], end["error"]["code"]) == (3, "upstream_malformed")


async def test_arguments_of_a_mebibyte_arrive_whole() -> None:
    arguments = json.dumps({"x": "é\\" * 2**19})
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    event = b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}).encode() + b"\n\n"
    async with in_front_of(answers(HEAD + b"\r\n" + chunk(event + STOP) + b"0\r\n\r\n")) as here:
        whole = await here.http.post("/v1/stream", {"prompt": "x", "model": "m", "stream": False})
        assert whole.status == 200
        [told] = whole.json["choices"][0]["tool_calls"]
        assert told["function"]["arguments"] == arguments


async def test_requests_do_not_queue_for_a_list_of_models_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that ask meanwhile hear of its failure at once; they do not try one after the other."""
    monkeypatch.setattr(openai, "_MODELS_PATIENCE", 0.3)
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await asyncio.Event().wait()

    async with in_front_of(serve) as here:
        tries = [here.http.post("/v1/stream", {"prompt": "x"}) for _ in range(20)]
        began = asyncio.get_running_loop().time()
        assert {(answer.status, answer.error) for answer in await asyncio.gather(*tries)} == {(502, "upstream_timeout")}
        assert asyncio.get_running_loop().time() - began < 2
        assert asked == 1
        assert (await here.http.post("/v1/stream", {"prompt": "x"})).status == 502
        assert asked == 2
