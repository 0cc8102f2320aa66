"""A wire that shows as little as a transport may: what the transport contract's traits are tried out with.

Like gRPC it carries chunks and how the stream ended, but no records; a position is the chunk wanted next, and there is
none after the end; signs of life are below what a reader sees; there is no verb for the state.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson

from midstream.testing import sse_dial
from midstream.testing.gateway import RunningGateway
from midstream.testing.sse_dial import SseDial, SseReader
from midstream.testing.transport_dial import Heard, Refused, Wire
from midstream.wire import START, TERMINAL

NARROW = Wire(
    "narrow",
    native_records=False,
    seq_twice=False,
    heartbeats=False,
    has_state=False,
    rests_at_end=False,
    max_position=2**31 - 1,
)


class NarrowReader:
    """An SSE reader with most of what it hears left out."""

    def __init__(self, inner: SseReader) -> None:
        self._inner = inner
        self.heartbeats = 0
        self.clean: bool | None = None
        self.stream_id = inner.stream_id

    async def next(self) -> Heard | None:
        said = await self._inner.next()
        while said is not None and said.event == START:
            said = await self._inner.next()
        self.clean = self._inner.clean
        if said is None:
            return None
        told = {"seq": said.seq, "delta": said.fields.get("delta", "")}
        if said.event in TERMINAL and "error" in said.fields:
            told["error"] = {"code": said.fields["error"]["code"]}
        return Heard(said.seq, said.event, orjson.dumps(told))

    async def drop(self) -> None:
        await self._inner.drop()


class NarrowDial:
    wire = NARROW
    garbage: Sequence[Any] = (-1, 2**31)

    def __init__(self, inner: SseDial) -> None:
        self._inner = inner

    async def generate(self, prompt: str) -> NarrowReader:
        return NarrowReader(await self._inner.generate(prompt))

    async def resume(self, stream_id: str, after: Any, *, of: str | None = None) -> NarrowReader:
        if not 0 <= after <= NARROW.max_position:
            raise Refused("bad_cursor")
        reader = await self._inner.resume(stream_id, max(after, 1), of=of)
        if reader.at_end:
            raise Refused("cursor_ahead", {"highest_seq": after})
        return NarrowReader(reader)

    async def ack(self, stream_id: str, seq: int) -> None:
        await self._inner.ack(stream_id, seq)

    async def cancel(self, stream_id: str) -> None:
        await self._inner.cancel(stream_id)

    async def state(self, stream_id: str) -> dict[str, Any]:
        raise NotImplementedError


@asynccontextmanager
async def connect(gateway: RunningGateway, key: str) -> AsyncIterator[NarrowDial]:
    async with sse_dial.connect(gateway, key) as dial:
        yield NarrowDial(dial)
