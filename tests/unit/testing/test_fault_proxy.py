"""The fault proxy fails exactly as told, and not otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest
import pytest_asyncio

from midstream.testing.fault_proxy import FaultProxy

T = TypeVar("T")


async def soon(verb: Awaitable[T]) -> T:
    return await asyncio.wait_for(verb, 5)


class Echo:
    """Answers each line with itself in capitals, and remembers what it heard."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                self.heard.append(line)
                writer.write(line.upper())
        except ConnectionError:
            pass
        finally:
            writer.close()


@pytest_asyncio.fixture
async def echo() -> AsyncIterator[Echo]:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0, limit=1 << 20)
    echo.port = server.sockets[0].getsockname()[1]
    yield echo
    server.close()


@pytest_asyncio.fixture
async def proxy(echo: Echo) -> AsyncIterator[FaultProxy]:
    async with FaultProxy("127.0.0.1", echo.port) as proxy:
        yield proxy


class Talk:
    """A client's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def say(self, line: bytes) -> None:
        self.writer.write(line)

    async def ask(self, line: bytes) -> bytes:
        self.say(line)
        return await soon(self.reader.readline())


@asynccontextmanager
async def talk(proxy: FaultProxy) -> AsyncIterator[Talk]:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        yield Talk(reader, writer)
    finally:
        writer.close()


async def test_passes_everything_on_when_told_nothing(proxy: FaultProxy) -> None:
    """Both ways, large and small, in order, and the end as well."""
    async with talk(proxy) as client:
        assert await client.ask(b"one\n") == b"ONE\n"
        big = b"x" * 300_000 + b"\n"
        client.writer.write(big)
        assert await soon(client.reader.readexactly(len(big))) == big.upper()
        client.writer.write_eof()
        assert await soon(client.reader.read()) == b""
    assert proxy.connections == 1


async def test_cut_ends_the_next_connection_after_so_many_bytes(proxy: FaultProxy) -> None:
    """To the byte, in order; the connection after that is whole."""
    proxy.cut(after=6)
    async with talk(proxy) as client:
        assert await client.ask(b"one\n") == b"ONE\n"
        client.say(b"two\n")
        assert await soon(client.reader.read()) == b"TW"
    async with talk(proxy) as client:
        assert await client.ask(b"three\n") == b"THREE\n"


async def test_cut_before_the_first_byte(proxy: FaultProxy) -> None:
    """Nothing at all is answered."""
    proxy.cut(after=0)
    async with talk(proxy) as client:
        client.say(b"one\n")
        assert await soon(client.reader.read()) == b""


async def test_reset_is_a_reset(proxy: FaultProxy) -> None:
    """Open connections end with an error, not in order; new ones are served."""
    async with talk(proxy) as client:
        assert await client.ask(b"one\n") == b"ONE\n"
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            await soon(client.reader.readline())
    async with talk(proxy) as client:
        assert await client.ask(b"two\n") == b"TWO\n"


async def test_stall_holds_everything_up_and_loses_nothing(proxy: FaultProxy, echo: Echo) -> None:
    """Connections stay open and can be made; what was sent meanwhile arrives in the end."""
    async with talk(proxy) as client:
        assert await client.ask(b"one\n") == b"ONE\n"
        proxy.stall()
        client.say(b"two\n")
        async with talk(proxy) as other:
            other.say(b"three\n")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.reader.readline(), 0.05)
            assert echo.heard == [b"one\n"]
            proxy.resume()
            assert await soon(client.reader.readline()) == b"TWO\n"
            assert await soon(other.reader.readline()) == b"THREE\n"


async def test_delay_holds_up_both_ways(proxy: FaultProxy) -> None:
    """A round trip takes twice as long."""
    proxy.delay = 0.05
    loop = asyncio.get_running_loop()
    async with talk(proxy) as client:
        began = loop.time()
        assert await client.ask(b"one\n") == b"ONE\n"
        assert loop.time() - began >= 0.099


async def test_split_arrives_whole(proxy: FaultProxy) -> None:
    """Byte by byte, nothing is lost or changed."""
    proxy.split = 1
    async with talk(proxy) as client:
        assert await client.ask("né✅🚀 and a longer line\n".encode()) == "né✅🚀 and a longer line\n".encode().upper()


async def test_lost_reply_is_of_a_command_that_arrived(proxy: FaultProxy, echo: Echo) -> None:
    """The server has done it, the client cannot know: the connection is reset without an answer, once."""
    proxy.lose_reply(b"APPEND")
    async with talk(proxy) as client:
        assert await client.ask(b"other\n") == b"OTHER\n"
        client.say(b"APPEND 1\n")
        with pytest.raises(ConnectionResetError):
            await soon(client.reader.readline())
    assert echo.heard == [b"other\n", b"APPEND 1\n"]
    assert proxy.lost == 1
    async with talk(proxy) as client:
        assert await client.ask(b"APPEND 2\n") == b"APPEND 2\n"


async def test_refused_and_accepted_again_at_the_same_port(proxy: FaultProxy) -> None:
    """As a server that is restarted."""
    port = proxy.port
    await proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        async with talk(proxy):
            pass
    await proxy.accept()
    assert proxy.port == port
    async with talk(proxy) as client:
        assert await client.ask(b"one\n") == b"ONE\n"


async def test_retargeted_connections_go_elsewhere(proxy: FaultProxy, echo: Echo) -> None:
    """Open ones stay where they are."""
    other = Echo()
    server = await asyncio.start_server(other.serve, "127.0.0.1", 0)
    async with talk(proxy) as before:
        assert await before.ask(b"one\n") == b"ONE\n"
        proxy.retarget("127.0.0.1", server.sockets[0].getsockname()[1])
        async with talk(proxy) as after:
            assert await after.ask(b"two\n") == b"TWO\n"
        assert await before.ask(b"three\n") == b"THREE\n"
    assert (echo.heard, other.heard) == ([b"one\n", b"three\n"], [b"two\n"])
    server.close()


async def test_server_that_is_not_there_ends_the_connection() -> None:
    """A client of a dead server is not kept waiting."""
    async with FaultProxy("127.0.0.1", 1) as proxy, talk(proxy) as client:
        assert await soon(client.reader.read()) == b""
