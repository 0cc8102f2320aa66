"""WebSocket for the transport contract: one socket per reader, by a client that knows nothing of our messages."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as open_socket
from websockets.exceptions import ConnectionClosed

from midstream.cursor import Cursor
from midstream.testing import sse_dial
from midstream.testing.gateway import RunningGateway
from midstream.testing.transport_dial import FACTS, Heard, Refused, Wire, narrow
from midstream.wire import WS_CLOSE, WS_PATH

WEBSOCKET = Wire("websocket", native_records=True, seq_twice=False, heartbeats=True, has_state=False, rests_at_end=True)

# How the gateway's own records stand in their message; what follows is the data as the journal has it.
_DATA = re.compile(r'\{"type":"record",.*?"event":"\w+","data":', re.DOTALL)
_JSON = json.JSONDecoder()


async def dialled(gateway: RunningGateway, key: str | None = None, **more: Any) -> ClientConnection:
    """A socket to the gateway, which takes no more from the wire than is asked of it.

    `key` goes into a header.  Raises what `websockets` does where the gateway refuses.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    wire = narrow((socket.AF_INET, socket.SOCK_STREAM, 0))
    wire.setblocking(False)
    await asyncio.get_running_loop().sock_connect(wire, ("127.0.0.1", gateway.port))
    return await open_socket(
        gateway.address.replace("http", "ws", 1) + WS_PATH,
        additional_headers=headers | more.pop("headers", {}),
        sock=wire,
        compression=None,
        proxy=None,
        ping_interval=None,
        max_size=None,
        max_queue=1,
        close_timeout=0.2,  # what it has not been asked to read may hide the end from it
        **more,
    )


def told(message: str | bytes) -> list[dict[str, Any]]:
    """What a message says, one by one: it may be an array."""
    assert isinstance(message, str), "the gateway sent a binary message"
    said = orjson.loads(message)
    return said if isinstance(said, list) else [said]


def records(message: str) -> list[Heard]:
    """The records of a message, their data cut out as it came."""
    at, heard = int(message.startswith("[")), []
    while at < len(message) and message[at] == "{":
        fields, end = _JSON.raw_decode(message, at)
        begin = _DATA.match(message, at)
        assert begin is not None
        data = message[begin.end() : end - 1].encode()
        heard.append(Heard(fields["data"]["seq"], fields["event"], data))
        at = end + 1
    return heard


class WsReader:
    """A socket that follows one stream, under one `ref`."""

    REF = "é1"

    def __init__(self, socket: ClientConnection, stream_id: str) -> None:
        self._socket = socket
        self.stream_id = stream_id
        self.heartbeats = 0
        self.clean: bool | None = None
        self._heard: deque[Heard | Refused | None] = deque()

    async def next(self) -> Heard | None:
        while not self._heard and self.clean is None:
            await self._read()
        record = self._heard.popleft() if self._heard else None
        if record is None and self.clean is None:
            self.clean = True
            await self._socket.close()
        if isinstance(record, Refused):
            raise record
        return record

    async def _read(self) -> None:
        try:
            message = await self._socket.recv()
        except ConnectionClosed as closed:
            self.clean = closed.rcvd is not None and closed.rcvd.code == WS_CLOSE["shutting_down"]
            return
        for said in told(message):
            assert said["ref"] == self.REF
            self.stream_id = said.get("stream_id", self.stream_id)
            if said["type"] == "heartbeat":
                self.heartbeats += 1
            elif said["type"] == "journal_state":
                self._heard.append(None)
            elif said["type"] == "error":
                self._heard.append(refusal(said))
            else:
                assert said["type"] == "record"
        if told(message)[0]["type"] == "record":
            assert isinstance(message, str)
            self._heard += records(message)

    async def first(self) -> WsReader:
        """Wait for the first message, which names the stream.  Raises Refused."""
        while not self._heard:
            await self._read()
        if isinstance(self._heard[0], Refused):
            raise self._heard[0]
        return self

    async def drop(self) -> None:
        self.clean = False
        self._socket.transport.abort()


class WsDial:
    """Each reader, and each ack and cancel, has a socket to itself; that several share one is tested elsewhere."""

    wire = WEBSOCKET
    garbage: Sequence[Any] = (*sse_dial.SseDial.garbage, 7.0, True, None, [], {}, {"v": 1})

    def __init__(self, gateway: RunningGateway, key: str) -> None:
        self._gateway = gateway
        self._key = key
        self._readers: list[WsReader] = []

    async def close(self) -> None:
        """Drop every reader."""
        for reader in self._readers:
            await reader.drop()

    async def generate(self, prompt: str) -> WsReader:
        return await (await self._follow({"type": "generate", "prompt": prompt}, "")).first()

    async def resume(self, stream_id: str, after: Any, *, of: str | None = None) -> WsReader:
        cursor = Cursor(of or stream_id, after).encode() if type(after) is int else after
        return await self._follow({"type": "resume", "stream_id": stream_id, "cursor": cursor}, stream_id)

    async def _follow(self, asked: dict[str, Any], stream_id: str) -> WsReader:
        socket = await dialled(self._gateway, self._key)
        self._readers.append(WsReader(socket, stream_id))
        await socket.send(orjson.dumps(asked | {"ref": WsReader.REF}).decode())
        return self._readers[-1]

    async def ack(self, stream_id: str, seq: int) -> None:
        await self._ask({"type": "ack", "stream_id": stream_id, "seq": seq})

    async def cancel(self, stream_id: str) -> None:
        await self._ask({"type": "cancel", "stream_id": stream_id})

    async def state(self, stream_id: str) -> dict[str, Any]:
        raise NotImplementedError

    async def _ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        async with await dialled(self._gateway, self._key) as socket:
            await socket.send(orjson.dumps(asked).decode())
            (said,) = told(await socket.recv())
        if said["type"] == "error":
            raise refusal(said)
        assert said["type"] == "journal_state"
        return said


def refusal(said: dict[str, Any]) -> Refused:
    """An `error` message, as what the contract compares."""
    return Refused(said["code"], {name: said[name] for name in FACTS if name in said})


@asynccontextmanager
async def connect(gateway: RunningGateway, key: str) -> AsyncIterator[WsDial]:
    """The dial of one key's owner."""
    dial = WsDial(gateway, key)
    yield dial
    await dial.close()
