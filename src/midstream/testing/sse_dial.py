"""Server-sent events for the transport contract, by an HTTP client that knows nothing of them: the reference dial."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp
import orjson

from midstream.codec.sse import Decoder
from midstream.cursor import Cursor
from midstream.testing.gateway import RunningGateway
from midstream.testing.transport_dial import FACTS, Heard, Refused, Wire, narrow
from midstream.wire import EXPIRED, H_STREAM_ID, Q_CURSOR

SSE = Wire("sse", native_records=True, seq_twice=True, heartbeats=True, has_state=True, rests_at_end=True)


class SseReader:
    """One response.  `heartbeats` counts the comment lines between frames."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.stream_id = response.headers[H_STREAM_ID]
        self.at_end = response.status == 204  # all had been read before
        self.heartbeats = 0
        self.clean: bool | None = None
        self._decoder = Decoder()
        self._heard: deque[Heard | Refused] = deque()
        self._line = b""

    async def next(self) -> Heard | None:
        while not self._heard:
            try:
                data = await self._response.content.readany()
            except aiohttp.ClientError:
                self.clean = False
                return None
            if not data:
                self.clean = self.clean is not False
                return None
            self._count_heartbeats(data)
            self._decode(data)
        record = self._heard.popleft()
        if isinstance(record, Refused):
            raise record
        return record

    def _decode(self, data: bytes) -> None:
        for event in self._decoder.feed(data):
            if event.event == EXPIRED:
                assert event.id is None, "a reader that was overtaken was told a position"
                self._heard.append(refusal(event.data))
            else:
                assert event.id is not None, "a record without an id"
                record = Heard(0, event.event, event.data, int(event.id))
                self._heard.append(record._replace(seq=record.fields["seq"]))

    def _count_heartbeats(self, data: bytes) -> None:
        *lines, self._line = (self._line + data).split(b"\n")
        self.heartbeats += sum(line.startswith(b":") for line in lines)

    async def drop(self) -> None:
        if self._response.connection is not None and self._response.connection.transport is not None:
            self._response.connection.transport.abort()
        self._response.close()


class SseDial:
    """Positions travel as cursors in the query, which is the explicit one of the three places."""

    wire = SSE
    garbage: Sequence[Any] = (
        "",
        "7",
        "garbage",
        "bnVsbA",  # null
        "W10",  # []
        "eyJ2Ijo5OX0",  # {"v":99}
        "eyJ2IjoxLCJzIjoieCJ9",  # {"v":1,"s":"x"}
        "eyJ2IjoxLCJzIjoieCIsImwiOnRydWV9",  # {"v":1,"s":"x","l":true}
        "eyJ2IjoxLCJzIjoieCIsImwiOi0xfQ",  # {"v":1,"s":"x","l":-1}
        "eyJ2IjoxLCJzIjoieCIsImwiOjEuMH0",  # {"v":1,"s":"x","l":1.0}
        "\r\n\r\nid: 7",
    )

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self._session = session
        self._address = address
        self._readers: list[SseReader] = []

    async def close(self) -> None:
        """Drop every reader."""
        for reader in self._readers:
            await reader.drop()

    async def generate(self, prompt: str) -> SseReader:
        return await self._follow(self._session.post(f"{self._address}/v1/stream", json={"prompt": prompt}))

    async def resume(self, stream_id: str, after: Any, *, of: str | None = None) -> SseReader:
        cursor = after if isinstance(after, str) else Cursor(of or stream_id, after).encode()
        return await self._follow(self._session.get(self._url(stream_id), params={Q_CURSOR: cursor}))

    async def ack(self, stream_id: str, seq: int) -> None:
        await self._ask(self._session.post(f"{self._url(stream_id)}/ack", json={"seq": seq}))

    async def cancel(self, stream_id: str) -> None:
        await self._ask(self._session.post(f"{self._url(stream_id)}/cancel"))

    async def state(self, stream_id: str) -> dict[str, Any]:
        return await self._ask(self._session.get(f"{self._url(stream_id)}/state"))

    def _url(self, stream_id: str) -> str:
        return f"{self._address}/v1/stream/{stream_id}"

    async def _follow(self, request: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> SseReader:
        response = await request.__aenter__()  # the reader's to close
        if response.status >= 400:
            raise refusal(await response.read())
        self._readers.append(SseReader(response))
        return self._readers[-1]

    async def _ask(self, request: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> dict[str, Any]:
        async with request as response:
            body = await response.read()
        if response.status >= 400:
            raise refusal(body)
        fields: dict[str, Any] = orjson.loads(body)
        return fields


def refusal(body: bytes) -> Refused:
    """An error body of the protocol, as what the contract compares."""
    fields = orjson.loads(body)
    return Refused(fields["error"], {name: fields[name] for name in FACTS if name in fields})


@asynccontextmanager
async def connect(gateway: RunningGateway, key: str) -> AsyncIterator[SseDial]:
    """The dial of one key's owner."""
    headers = {"Authorization": f"Bearer {key}"}
    connector = aiohttp.TCPConnector(limit=0, socket_factory=narrow)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as session:
        dial = SseDial(session, gateway.address)
        yield dial
        await dial.close()
