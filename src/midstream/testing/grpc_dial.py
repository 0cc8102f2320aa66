"""gRPC for the transport contract, by grpcio's own client; the gateway's gRPC server runs as long as the dial does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import orjson
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from grpc import aio

from midstream.codec.inference import index_of, resume_from, seq_of
from midstream.codec.pb import inference_pb2 as pb
from midstream.testing.gateway import RunningGateway
from midstream.testing.transport_dial import FACTS, Heard, Refused, Wire
from midstream.wire import CANCELLED, DONE, FAILED, GRPC_SERVICE, H_STREAM_ID, TOKEN

GRPC = Wire(
    "grpc",
    native_records=False,
    seq_twice=False,
    heartbeats=False,
    has_state=False,
    rests_at_end=False,
    max_position=2**31 - 1,
)
# A window that does not grow by itself: what a reader has not asked for stays with the gateway.
_CHANNEL = (("grpc.http2.bdp_probe", 0),)
_STREAM_ID = H_STREAM_ID.lower()


def told_by(details: bytes | None) -> ErrorInfo | None:
    """The ErrorInfo in a `google.rpc.Status`, as it stands in the metadata of a call's end."""
    for detail in Status.FromString(details or b"").details:
        if detail.Is(ErrorInfo.DESCRIPTOR):
            info = ErrorInfo()
            detail.Unpack(info)
            return info
    return None


def ended(info: ErrorInfo) -> Heard | Refused:
    """What a status that is not OK says: how the stream ended, or why there is nothing (more) of it."""
    code, facts = info.reason.lower(), dict(info.metadata)
    if "token_index" not in facts:
        return Refused(code, {name: int(facts[name]) for name in FACTS if name in facts})
    seq = seq_of(int(facts["token_index"]))
    if code == CANCELLED:
        return Heard(seq, CANCELLED, orjson.dumps({"seq": seq, "delta": ""}))
    return Heard(seq, FAILED, orjson.dumps({"seq": seq, "delta": "", "error": {"code": code}}))


def heard(index: int, token: str, *, final: bool) -> Heard:
    """A message, put into the shape of the record it stands for."""
    seq = seq_of(index)
    return Heard(seq, DONE if final else TOKEN, orjson.dumps({"seq": seq, "delta": token}))


class GrpcReader:
    """One call.  To be dropped it is cancelled, which is all that a client of gRPC can do."""

    heartbeats = 0

    def __init__(self, call: Any, stream_id: str) -> None:
        self._call = call
        self._over = False
        self.stream_id = stream_id
        self.clean: bool | None = None

    async def next(self) -> Heard | None:
        if self._over:
            return None
        try:
            told = await self._call.read()
        except aio.AioRpcError as error:
            return self._end(error)
        if told is aio.EOF:
            self._over = self.clean = True
            return None
        return heard(told.token_index, told.token, final=told.is_final)

    def _end(self, error: aio.AioRpcError) -> Heard | None:
        self._over = True
        info = told_by(details_of(error))
        self.clean = info is not None
        if info is None:
            return None
        end = ended(info)
        if isinstance(end, Refused):
            raise end
        return end

    async def drop(self) -> None:
        self._call.cancel()


def details_of(error: aio.AioRpcError) -> bytes | None:
    """The bytes of the `google.rpc.Status` that came with the error."""
    found: dict[str, bytes] = dict(error.trailing_metadata() or ())
    return found.get("grpc-status-details-bin")


class GrpcDial:
    """Sessions are named by their streams' ids."""

    wire = GRPC
    garbage: Sequence[Any] = (-1, -(2**31))

    def __init__(self, channel: Any, metadata: Sequence[tuple[str, str]]) -> None:
        self._metadata = tuple(metadata)
        self._generate = _method(channel.unary_stream, "Generate", pb.GenerateRequest, pb.GenerateResponse)
        self._ack = _method(channel.unary_unary, "Ack", pb.AckRequest, pb.AckResponse)
        self._cancel = _method(channel.unary_unary, "Cancel", pb.CancelRequest, pb.CancelResponse)
        self._calls: list[Any] = []

    def close(self) -> None:
        """Drop every reader."""
        for call in self._calls:
            call.cancel()

    async def generate(self, prompt: str) -> GrpcReader:
        return await self.ask(pb.GenerateRequest(prompt=prompt))

    async def resume(self, stream_id: str, after: Any, *, of: str | None = None) -> GrpcReader:
        wanted = resume_from(after) if after >= 0 else after
        request = pb.GenerateRequest(session_id=stream_id, resume_from_token=wanted)
        return await self.ask(request, *([(_STREAM_ID, of)] if of is not None else []))

    async def ask(self, request: pb.GenerateRequest, *metadata: tuple[str, str], **options: Any) -> GrpcReader:
        """Call Generate; `options` are grpcio's, such as `timeout` in seconds."""
        call = self._generate(request, metadata=(*self._metadata, *metadata), **options)
        self._calls.append(call)
        stream_id = dict(await call.initial_metadata()).get(_STREAM_ID)
        if stream_id is None:
            try:
                await call.read()
            except aio.AioRpcError as error:
                raise _refused(error) from None
            raise AssertionError("a call without metadata that is answered")
        return GrpcReader(call, stream_id)

    async def ack(self, stream_id: str, seq: int) -> None:
        await self.ack_token(stream_id, index_of(seq))

    async def ack_token(self, session: str, index: int) -> Any:
        """Call Ack; the AckResponse."""
        return await self._once(self._ack, pb.AckRequest(session_id=session, acked_token_index=index))

    async def cancel(self, stream_id: str) -> None:
        await self.cancel_session(stream_id)

    async def cancel_session(self, session: str) -> Any:
        """Call Cancel; the CancelResponse."""
        return await self._once(self._cancel, pb.CancelRequest(session_id=session))

    async def _once(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, metadata=self._metadata)
        except aio.AioRpcError as error:
            raise _refused(error) from None

    async def state(self, stream_id: str) -> dict[str, Any]:
        raise NotImplementedError


def _refused(error: aio.AioRpcError) -> Refused:
    """What the contract compares; a status that is not ours is called by its name."""
    info = told_by(details_of(error))
    end = ended(info) if info is not None else Refused(error.code().name)
    assert isinstance(end, Refused), f"a call that was refused says how a stream ended: {end}"
    return end


def _method(kind: Callable[..., Any], name: str, request: Any, response: Any) -> Any:
    return kind(
        f"/{GRPC_SERVICE}/{name}",
        request_serializer=request.SerializeToString,
        response_deserializer=response.FromString,
    )


@asynccontextmanager
async def serving(gateway: RunningGateway, *, options: Sequence[tuple[str, Any]] = ()) -> AsyncIterator[str]:
    """The gateway's gRPC server on a free port; the address.  It ends at once, as a process does that is killed."""
    server = gateway.gateway.grpc_server(options)
    port = server.bind("127.0.0.1", 0)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop()


@asynccontextmanager
async def dialling(
    address: str,
    key: str,
    *,
    options: Sequence[tuple[str, Any]] = (),
    credentials: grpc.ChannelCredentials | None = None,
) -> AsyncIterator[GrpcDial]:
    """The dial of one key's owner to a server that runs."""
    options = (*_CHANNEL, *options)
    channel = (
        aio.insecure_channel(address, options)
        if credentials is None
        else aio.secure_channel(address, credentials, options)
    )
    async with channel:
        dial = GrpcDial(channel, [("authorization", f"Bearer {key}")])
        yield dial
        dial.close()


@asynccontextmanager
async def connect(gateway: RunningGateway, key: str) -> AsyncIterator[GrpcDial]:
    """The dial of one key's owner, and a server for it."""
    async with serving(gateway) as address, dialling(address, key) as dial:
        yield dial
