"""A gateway with its gRPC server, and a client that shows all that a call says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from google.rpc.error_details_pb2 import ErrorInfo
from grpc import aio

from midstream.codec.pb import inference_pb2 as pb
from midstream.server.settings import Settings
from midstream.testing.gateway import RunningGateway
from midstream.testing.grpc_dial import details_of, serving, told_by
from midstream.testing.patience import soon
from midstream.testing.puppet import Puppet, Puppets
from midstream.wire import GRPC_SERVICE, H_STREAM_ID

# A window that does not grow by itself, so that what a reader has not asked for stays with the gateway.
_CHANNEL = (("grpc.http2.bdp_probe", 0),)

Metadata = Sequence[tuple[str, str]]


class Said(NamedTuple):
    """All that a call said: its messages as (token, index, final), and its end."""

    messages: list[tuple[str, int, bool]]
    status: str
    reason: str = ""
    facts: dict[str, str] | None = None

    @property
    def text(self) -> str:
        return "".join(token for token, _, _ in self.messages)


class Call:
    """A Generate that is under way."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def stream_id(self) -> str:
        return str(dict(await soon(self.call.initial_metadata()))[H_STREAM_ID.lower()])

    async def take(self, count: int) -> list[tuple[str, int, bool]]:
        """The next messages."""
        taken: list[tuple[str, int, bool]] = []
        for _ in range(count):
            told = await soon(self.call.read())
            assert told is not aio.EOF, f"ended after {len(taken)} of {count}"
            taken.append((told.token, told.token_index, told.is_final))
        return taken

    async def rest(self) -> Said:
        """Everything until the end, and the end."""
        messages = []
        try:
            while (told := await soon(self.call.read())) is not aio.EOF:
                messages.append((told.token, told.token_index, told.is_final))
        except aio.AioRpcError as error:
            return _said(messages, error)
        return Said(messages, (await soon(self.call.code())).name)

    def cancel(self) -> None:
        self.call.cancel()


def _said(messages: list[tuple[str, int, bool]], error: aio.AioRpcError) -> Said:
    info = told_by(details_of(error)) or ErrorInfo()
    return Said(messages, error.code().name, info.reason, dict(info.metadata))


@dataclass(frozen=True)
class Client:
    """Calls by their names in the definition; `metadata` goes with each."""

    channel: Any
    metadata: Metadata = ()

    def keyed(self, *metadata: tuple[str, str]) -> Client:
        return Client(self.channel, metadata)

    def generate(self, *, metadata: Metadata = (), timeout: float | None = None, **fields: Any) -> Call:
        return self.send(pb.GenerateRequest(**fields).SerializeToString(), metadata, timeout)

    def send(self, data: bytes, metadata: Metadata = (), timeout: float | None = None) -> Call:
        """Generate with these bytes for a request."""
        method = self.channel.unary_stream(
            f"/{GRPC_SERVICE}/Generate", response_deserializer=pb.GenerateResponse.FromString
        )
        return Call(method(data, metadata=(*self.metadata, *metadata), timeout=timeout))

    async def said(self, **fields: Any) -> Said:
        return await self.generate(**fields).rest()

    async def ack(self, session_id: str, acked_token_index: int) -> Any:
        """The AckResponse, or what was Said instead."""
        request = pb.AckRequest(session_id=session_id, acked_token_index=acked_token_index)
        return await self.unary("Ack", request.SerializeToString(), pb.AckResponse)

    async def cancel(self, session_id: str) -> Any:
        """The CancelResponse, or what was Said instead."""
        request = pb.CancelRequest(session_id=session_id)
        return await self.unary("Cancel", request.SerializeToString(), pb.CancelResponse)

    async def unary(self, method: str, data: bytes, response: Any) -> Any:
        call = self.channel.unary_unary(f"/{GRPC_SERVICE}/{method}", response_deserializer=response.FromString)
        try:
            return await soon(call(data, metadata=self.metadata))
        except aio.AioRpcError as error:
            return _said([], error)


@dataclass(frozen=True)
class Site:
    """A running gateway, where its gRPC server listens, and a client without a key."""

    gateway: RunningGateway
    address: str
    client: Client

    @property
    def puppets(self) -> Puppets:
        return self.gateway.puppets

    async def begin(self, session_id: str = "", **fields: Any) -> tuple[Call, Puppet, str]:
        """A generation that has begun: its call, who speaks in it, and the stream's id."""
        call = self.client.generate(**{"prompt": "Hello", "session_id": session_id, **fields})
        return call, await self.puppets.next(), await call.stream_id()

    async def told(self, *texts: str, session_id: str = "") -> str:
        """The id of a stream that has ended well; nobody reads it."""
        call, puppet, stream_id = await self.begin(session_id)
        await puppet.say(*texts)
        await puppet.finish()
        await call.rest()
        await self.gateway.unread(stream_id)
        return stream_id


@asynccontextmanager
async def site(
    *, options: Sequence[tuple[str, Any]] = (), puppets: Puppets | None = None, **settings: Any
) -> AsyncIterator[Site]:
    """A gateway with these settings besides the defaults, on a memory journal unless they say otherwise."""
    gateway = RunningGateway(Settings(**{"journal": "memory:"} | settings), puppets)
    async with (
        gateway,
        serving(gateway, options=options) as address,
        aio.insecure_channel(address, _CHANNEL) as channel,
    ):
        yield Site(gateway, address, Client(channel))
