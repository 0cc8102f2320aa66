"""A WebSocket client for tests: says what it is told to, and shows what it hears message by message."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from midstream.testing.gateway import RunningGateway
from midstream.testing.patience import soon
from midstream.testing.puppet import Puppet
from midstream.testing.ws_dial import dialled, told
from midstream.wire import HTTP_STATUS
from tests.gateways import Site, cursor

Said = dict[str, Any]

# For who writes his frames himself.
HANDSHAKE = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==",
)


class Peer:
    """One socket."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self._heard: deque[Said] = deque()

    async def say(self, type: str, **fields: Any) -> None:
        await self.socket.send(orjson.dumps({"type": type, **fields}).decode())

    async def hear(self) -> Said:
        """The next thing said, out of its array if it came in one."""
        while not self._heard:
            self._heard += told(await soon(self.socket.recv()))
        return self._heard.popleft()

    async def hear_under(self, ref: str | None, *, records: int) -> list[Said]:
        """The next so many records, all of which must be under this ref."""
        heard = [await self.hear() for _ in range(records)]
        assert [(said["type"], said["ref"]) for said in heard] == [("record", ref)] * records
        return heard

    async def refused(self, code: str, ref: str | None = None) -> Said:
        """The next thing said, which must be this error."""
        said = await self.hear()
        assert (said["type"], said.get("code"), said.get("ref")) == ("error", code, ref), said
        assert said["detail"]
        assert said["status"] == HTTP_STATUS.get(code, 502)
        return said

    async def closed(self) -> int:
        """The code that the gateway closes the socket with, nothing being said before."""
        with pytest.raises(ConnectionClosed) as closed:
            await soon(self.socket.recv())
        assert closed.value.rcvd is not None, "the connection broke off"
        return int(closed.value.rcvd.code)

    async def still_works(self) -> None:
        """The socket is not the worse for what was said on it."""
        await self.say("no such type", ref="check")
        await self.refused("bad_request", "check")

    async def begin(self, here: Site, ref: str | None = "a", **fields: Any) -> tuple[str, Puppet]:
        """Ask for an answer: the id of its stream, whose `start` has been heard, and who speaks in it."""
        await self.say("generate", **({"ref": ref} if ref else {}), **({"prompt": "Hello"} | fields))
        (start,) = await self.hear_under(ref, records=1)
        assert start["event"] == "start"
        return start["stream_id"], await here.puppets.next()

    async def resume(self, stream_id: str, seq: int, ref: str = "a", **fields: Any) -> None:
        await self.say("resume", ref=ref, **({"stream_id": stream_id, "cursor": cursor(stream_id, seq)} | fields))


def seqs(heard: list[Said]) -> list[int]:
    return [said["data"]["seq"] for said in heard]


@asynccontextmanager
async def socket(gateway: RunningGateway, key: str | None = None, **more: Any) -> AsyncIterator[Peer]:
    """Opened, and closed at the end."""
    async with await dialled(gateway, key, **more) as opened:
        yield Peer(opened)
