"""One stream, handed from transport to transport: from server-sent events to gRPC, to a WebSocket, to the terminal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path

import pytest

from midstream.cli import exits
from midstream.client import Cursor
from midstream.server.settings import Settings
from midstream.testing import grpc_dial, sse_dial, ws_dial
from midstream.testing.gateway import RunningGateway
from midstream.testing.transport_dial import ADA, KEYS, Dial, hear, hear_all
from tests.integration.test_generate import finish, start

# A word, white space, what could forge framing, a character of four bytes, an empty line, the rest.
TEXTS = ("Once", "  ", "\n\ndata: x\n\n", "🚀", "\r\n", " upon.")
LAST = len(TEXTS) + 2  # `start`, the chunks, `done`


@dataclass(frozen=True, slots=True)
class Stations:
    """One gateway, and Ada's dial on each of its transports."""

    gateway: RunningGateway
    sse: Dial
    grpc: Dial
    ws: Dial

    async def leg(self, dial: Dial, stream_id: str, after: int, upto: int) -> str:
        """The text of the records after one position and up to another, over one transport."""
        if upto <= max(after, 1):
            return ""
        reader = await dial.resume(stream_id, after)
        wanted = [seq for seq in range(after + 1, upto + 1) if seq > 1 or dial.wire.native_records]
        heard = await hear(reader, len(wanted))
        await reader.drop()
        assert [said.seq for said in heard] == wanted
        return "".join(said.fields["delta"] for said in heard if said.event == "token")


@pytest.fixture
async def stations(tmp_path: Path) -> AsyncIterator[Stations]:
    (tmp_path / "keys").write_text(KEYS)
    settings = Settings(journal=f"sqlite:///{tmp_path}/journal.db", keys_file=str(tmp_path / "keys"))
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(RunningGateway(settings))
        dials: list[Dial] = [
            await stack.enter_async_context(module.connect(gateway, ADA)) for module in (sse_dial, grpc_dial, ws_dial)
        ]
        yield Stations(gateway, *dials)


async def printed(stations: Stations, stream_id: str, after: int) -> str:
    """What the terminal prints of the stream after a position."""
    words = ("--gateway", stations.gateway.address, "--key", ADA, "--resume", Cursor(stream_id, after).encode())
    code, out, _ = await finish(await start("generate", *words))
    assert code == exits.OK
    return out


async def test_relay_joins_at_every_boundary(stations: Stations) -> None:
    """I3: wherever it is handed over, the four parts are the whole, once and in order."""
    reader = await stations.sse.generate("hi")
    puppet = await stations.gateway.puppets.next()
    await puppet.say(*TEXTS)
    await puppet.finish()
    await hear_all(reader)
    stream_id = reader.stream_id
    ends = await asyncio.gather(*[printed(stations, stream_id, after) for after in range(1, LAST + 1)])
    rest = dict(enumerate(ends, 1))
    for first, second, third in combinations_with_replacement(range(1, LAST), 3):
        parts = [
            await stations.leg(stations.sse, stream_id, 0, first),
            await stations.leg(stations.grpc, stream_id, first, second),
            await stations.leg(stations.ws, stream_id, second, third),
            rest[third],
        ]
        assert "".join(parts) == "".join(TEXTS), f"handed over at {first}, {second}, {third}"


async def test_relay_joins_while_the_stream_is_written(stations: Stations) -> None:
    """I3, I6: each token is heard on the next transport, and the terminal prints the end; one generation in all."""
    reader = await stations.grpc.generate("hi")
    puppet = await stations.gateway.puppets.next()
    await reader.drop()
    text, at = "", 1
    for word, dial in zip(TEXTS, [stations.sse, stations.grpc, stations.ws] * 2, strict=True):
        following = await dial.resume(reader.stream_id, at)
        await stations.gateway.idle(reader.stream_id)
        await puppet.say(word)
        (said,) = await hear(following, 1)
        await following.drop()
        await stations.gateway.unread(reader.stream_id)
        text, at = text + said.fields["delta"], said.seq
    words = ("--gateway", stations.gateway.address, "--key", ADA, "--session", reader.stream_id)
    terminal = await start("generate", *words, "--resume-from", str(at - 1))
    await stations.gateway.idle(reader.stream_id)
    await puppet.say(" The end.")
    await puppet.finish()
    code, out, _ = await finish(terminal)
    assert (code, text + out) == (exits.OK, "".join(TEXTS) + " The end.")
    assert stations.gateway.puppets.begun == 1
