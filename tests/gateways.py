"""A gateway for the tests of the HTTP contract, and clients to ask it: one polite, one that writes bytes by hand."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from midstream.cursor import Cursor
from midstream.server.app import Gateway
from midstream.server.settings import Settings
from midstream.testing.gateway import RunningGateway
from midstream.testing.patience import soon
from midstream.testing.puppet import Puppet, Puppets
from midstream.transports.openapi import describe
from midstream.transports.openapi_pool import with_pool
from midstream.wire import H_STREAM_ID

# As a list, for names that stand twice.
Headers = Mapping[str, str] | list[tuple[str, str]]

_PATHS: dict[str, Any] = with_pool(describe("test"))["paths"]
_TEMPLATES = [(re.compile(re.sub(r"\{\w+\}", "[^/]+", path)), operations) for path, operations in _PATHS.items()]


def check_described(method: str, path: str, status: int) -> None:
    """Whatever a described operation answers in any test must stand in the description."""
    for template, operations in _TEMPLATES:
        if template.fullmatch(path) and method.lower() in operations:
            answers = operations[method.lower()]["responses"]
            known = {str(status), "default"} & answers.keys()
            assert known, f"/openapi.json does not know that {method} {path} answers {status}"


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer.  `headers` have lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        assert self.headers["content-type"] == "application/json"
        return json.loads(self.body)

    @property
    def error(self) -> str:
        return str(self.json["error"])


class Http:
    """A client that sends `headers` with everything."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        address: str,
        opened: list[aiohttp.ClientResponse],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._session = session
        self._address = address
        self._opened = opened
        self._headers = dict(headers or {})

    def sending(self, **headers: str) -> Http:
        """The same client with further headers; `_` in a name stands for `-`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return Http(self._session, self._address, self._opened, self._headers | named)

    def keyed(self, key: str) -> Http:
        return self.sending(Authorization=f"Bearer {key}")

    async def open(self, method: str, path: str, headers: Headers | None = None, **more: Any) -> aiohttp.ClientResponse:
        """The response as soon as its head is there; it is closed with the client, if not before."""
        url = URL(self._address + path, encoded=True)
        given = headers if isinstance(headers, list) else list((headers or {}).items())
        together = CIMultiDict(item for item in self._headers.items() if item[0] not in dict(given))
        together.extend(given)
        request = self._session.request(method, url, headers=together, allow_redirects=False, **more)
        response = await soon(request)
        self._opened.append(response)
        check_described(method, url.path, response.status)
        return response

    async def ask(self, method: str, path: str, headers: Headers | None = None, **more: Any) -> Answer:
        """The whole answer."""
        async with await self.open(method, path, headers, **more) as response:
            body = await soon(response.read())
            named = {name.lower(): value for name, value in response.headers.items()}
            return Answer(response.status, named, body)

    async def get(self, path: str, headers: Headers | None = None) -> Answer:
        return await self.ask("GET", path, headers)

    async def post(self, path: str, body: Any = None, headers: Headers | None = None) -> Answer:
        return await self.ask("POST", path, headers, json=body)

    async def create(self, headers: Headers | None = None, **body: Any) -> aiohttp.ClientResponse:
        """Ask for an answer, and have its stream open."""
        return await self.open("POST", "/v1/stream", headers, json={"prompt": "Hello"} | body)


@dataclass(frozen=True, slots=True)
class Site:
    """A running gateway and a client without a key."""

    gateway: RunningGateway
    http: Http

    @property
    def puppets(self) -> Puppets:
        return self.gateway.puppets

    async def begin(self, http: Http | None = None, **body: Any) -> tuple[str, Puppet, aiohttp.ClientResponse]:
        """A stream that has begun: its id, who speaks in it, and its first reader's response."""
        response = await (http or self.http).create(**body)
        assert response.status == 200
        return response.headers[H_STREAM_ID], await self.puppets.next(), response

    async def open_stream(self, *texts: str, http: Http | None = None, **body: Any) -> tuple[str, Puppet]:
        """The same without its reader, who has left, and with these chunks in it."""
        stream_id, puppet, response = await self.begin(http, **body)
        response.close()
        await self.gateway.unread(stream_id)
        if texts:
            await puppet.say(*texts)
        return stream_id, puppet

    async def told(self, *texts: str, http: Http | None = None, **body: Any) -> str:
        """A stream that has ended well; nobody reads it."""
        stream_id, puppet = await self.open_stream(*texts, http=http, **body)
        await puppet.finish()
        return stream_id


@asynccontextmanager
async def site(*, around: Any = None, puppets: Puppets | None = None, **settings: Any) -> AsyncIterator[Site]:
    """A gateway with these settings besides the defaults, on a memory journal unless they say otherwise."""
    gateway = RunningGateway(Settings(**{"journal": "memory:"} | settings), puppets, around=around)
    async with gateway, client(gateway) as http:
        yield Site(gateway, http)


@asynccontextmanager
async def client(gateway: RunningGateway) -> AsyncIterator[Http]:
    """A client that has not been told a key, keeps no cookies, and sees compressed what comes compressed."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
    ) as session:
        opened: list[aiohttp.ClientResponse] = []
        yield Http(session, gateway.address, opened)
        for response in opened:
            response.close()


def cursor(stream_id: str, seq: int) -> str:
    return Cursor(stream_id, seq).encode()


class Wire:
    """A connection on which a test writes and reads bytes itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    def request(self, method: str, path: str, *headers: str, body: bytes = b"") -> None:
        """Send a request with `Host: localhost` and these header lines, as they are."""
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
        self.send("\r\n".join([*lines, "", ""]).encode("latin-1") + body)

    async def head(self) -> tuple[int, list[tuple[str, str]]]:
        """The next answer's status and its headers as they came, names in lower case."""
        status, *lines = (await soon(self._reader.readuntil(b"\r\n\r\n"))).decode("latin-1").split("\r\n")[:-2]
        pairs = (line.partition(":") for line in lines)
        return int(status.split(" ")[1]), [(name.lower(), value.strip()) for name, _, value in pairs]

    async def chunk(self) -> bytes:
        """The next chunk of a chunked body; b"" is its proper end."""
        size = int(await soon(self._reader.readuntil(b"\r\n")), 16)
        return (await soon(self._reader.readexactly(size + 2)))[:-2]

    def send_no_more(self) -> None:
        self._writer.write_eof()

    def segments(self) -> int:
        """In how many pieces everything came so far, as Linux's `tcp_info` counts those with data."""
        told = self._writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
        return int.from_bytes(told[152:156], sys.byteorder)

    async def body(self) -> bytes:
        """All that is left of a chunked body."""
        parts = []
        while part := await self.chunk():
            parts.append(part)
        return b"".join(parts)

    async def take(self, size: int) -> bytes:
        """So many bytes."""
        return await soon(self._reader.readexactly(size))

    async def some(self) -> bytes:
        """What has come, at least a byte; b"" when the other side has closed."""
        return await soon(self._reader.read(65_536))

    async def rest(self) -> bytes:
        """Everything until the other side closes."""
        return await soon(self._reader.read())

    async def everything(self) -> bytes:
        """The same, also when the other side resets the connection."""
        parts = []
        try:
            while part := await soon(self._reader.read(65536)):
                parts.append(part)
        except ConnectionError:
            pass
        return b"".join(parts)

    async def ended(self) -> bool:
        """Wait until the other side has closed or reset the connection."""
        await self.everything()
        return True

    async def sent(self) -> None:
        """Wait until the other side has taken most of what was sent; also when it closes instead."""
        try:
            await soon(self._writer.drain())
        except ConnectionError:
            pass

    def drop(self) -> None:
        self._writer.transport.abort()


@asynccontextmanager
async def wire(gateway: RunningGateway) -> AsyncIterator[Wire]:
    """A connection to the gateway, closed at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()
        try:
            await writer.wait_closed()
        except ConnectionError:
            pass


async def heard(reader: aiohttp.ClientResponse, text: bytes) -> bytes:
    """What arrives until this text does."""
    body = b""
    while text not in body:
        part = await soon(reader.content.readany())
        assert part, body
        body += part
    return body


def router_of(gateway: Gateway) -> Any:
    """The routes behind the guard."""
    return gateway.app._app._router  # type: ignore[attr-defined]  # what it is made of is nobody's business but this test's
