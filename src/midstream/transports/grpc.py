"""gRPC: inference.InferenceService on a port of its own, by grpcio (PROTOCOL.md, "gRPC, Connect and gRPC-Web").

Bytes go in and out of grpcio as they are: a request that is no protobuf gets a status of ours, and a message encoded
for one reader serves all.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_status import rpc_status

from midstream.codec.inference import message
from midstream.codec.pb import inference_pb2 as pb
from midstream.errors import BadRequest, Unauthorized
from midstream.transports.http import Caller
from midstream.transports.inference import Inference, Refusal, Request, refusal
from midstream.wire import GRPC_SERVICE, H_STREAM_ID

# Times are milliseconds.  A stream may be silent for minutes: a client may ask every 10 s whether we are there, the
# shortest time that gRPC's own clients allow; who asks more than twice as often is sent away (`too_many_pings`).
_OPTIONS: dict[str, Any] = {
    "grpc.http2.min_ping_interval_without_data_ms": 5_000,
    "grpc.http2.max_ping_strikes": 2,
    "grpc.keepalive_permit_without_calls": 1,
    # And we ask, or a reader that vanished would be kept for as long as its stream is silent.
    "grpc.keepalive_time_ms": 30_000,
    "grpc.keepalive_timeout_ms": 20_000,
    "grpc.http2.max_pings_without_data": 0,
    # Two gateways on one port would each get some of the calls, and neither would say so.
    "grpc.so_reuseport": 0,
}
_REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
# Seconds.  What bounds a drain is the gateway's, which ends streams and with them their calls.
_AS_LONG_AS_IT_TAKES = 365 * 86_400.0


class Context(Protocol):
    """What we use of grpcio's servicer context."""

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]] | None: ...
    async def send_initial_metadata(self, metadata: Sequence[tuple[str, str]]) -> None: ...
    async def write(self, message: bytes) -> None: ...
    async def abort_with_status(self, status: grpc.Status) -> NoReturn: ...


def tls(certificate: bytes, key: bytes) -> grpc.ServerCredentials:
    """Credentials from PEM: the certificate chain and its private key."""
    return grpc.ssl_server_credentials([(key, certificate)])


class Identify(Protocol):
    """Whose keys these are."""

    def __call__(self, authorization: str | None, apikey: str | None) -> Caller:
        """Raises Unauthorized."""


class GrpcServer:
    """The service, health and reflection on one port: `bind`, `start`, maybe `drain`, `stop`.

    `ready` is what health answers, `refused` counts refusals by code, `options` are further ones of grpcio's.
    """

    def __init__(
        self,
        inference: Inference,
        identify: Identify,
        *,
        max_body: int,
        ready: Callable[[], bool],
        refused: dict[str, int],
        options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self._inference = inference
        self._identify = identify
        self._refused = refused
        self._stopping: asyncio.Future[None] | None = None
        # Of an option that stands twice grpcio takes the first.
        chosen = {**_OPTIONS, "grpc.max_receive_message_length": max_body, **dict(options)}
        self._server = aio.server(options=tuple(chosen.items()))
        self._server.add_registered_method_handlers(GRPC_SERVICE, self._methods())
        self._health = _Health(ready)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        _add_reflection(self._server)

    def bind(self, host: str, port: int, credentials: grpc.ServerCredentials | None = None) -> int:
        """Take the port (0: a free one) and return it; nobody is served yet.  Raises OSError."""
        address = f"{f'[{host}]' if ':' in host else host}:{port}"
        try:
            if credentials is None:
                return int(self._server.add_insecure_port(address))
            return int(self._server.add_secure_port(address, credentials))
        except RuntimeError:
            raise OSError(
                errno.EADDRINUSE,
                "cannot listen for gRPC: is the port in use? Take another --grpc-port (0: off)",
                address,
            ) from None

    async def start(self) -> None:
        await self._health.refresh()
        await self._server.start()

    async def drain(self) -> None:
        """Accept nothing more: open calls go on, new ones are UNAVAILABLE, health says NOT_SERVING."""
        await self._health.enter_graceful_shutdown()
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._server.stop(_AS_LONG_AS_IT_TAKES))
            await asyncio.sleep(0)

    async def stop(self, grace: float | None = None) -> None:
        """The same, but calls have `grace` seconds to end (None: not any), and are then broken off."""
        await self._server.stop(grace)
        if self._stopping is not None:
            await self._stopping

    def _methods(self) -> dict[str, grpc.RpcMethodHandler]:
        return {
            "Generate": grpc.unary_stream_rpc_method_handler(self._generate),
            "Ack": grpc.unary_unary_rpc_method_handler(self._ack),
            "Cancel": grpc.unary_unary_rpc_method_handler(self._cancel),
        }

    # --- the verbs --------------------------------------------------------------------------------------------------

    async def _generate(self, data: bytes, context: Context) -> None:
        """Follow to the end.  A client that cancels, vanishes or runs out of time ends its call, no stream (I6)."""
        task, stalled = asyncio.current_task(), False

        def abort() -> None:
            nonlocal stalled
            stalled = True
            if task is not None:
                task.cancel()

        try:
            await self._answering(context, self._follow(data, context, abort))
        except asyncio.CancelledError:
            if not stalled:
                raise
            # It goes out behind what the peer has not taken, so that it can still read up to here.
            await self._refuse(context, Refusal("UNAVAILABLE", "nothing was taken for too long; resume"))

    async def _follow(self, data: bytes, context: Context, abort: Callable[[], None]) -> None:
        metadata = _Metadata(context)
        owner = self._caller(metadata).owner
        asked = _parsed(pb.GenerateRequest, data)
        begun = await self._inference.generate(
            owner,
            Request(
                asked.prompt,
                asked.session_id,
                asked.resume_from_token,
                asked.model or metadata.only("model") or "",
                metadata.only(H_STREAM_ID.lower()),
                metadata.only("traceparent"),
            ),
            abort,
        )
        try:
            await context.send_initial_metadata(((H_STREAM_ID.lower(), begun.stream_id),))
            async with aclosing(self._inference.messages(begun, owner)) as messages:
                write, follow = context.write, begun.follow
                async for frames in messages:
                    for frame in frames:
                        await write(message(frame))
                        follow.still = 0.0  # the peer takes, however slowly; its position moves by whole pages
        finally:
            self._inference.streams.leave(begun.follow)

    async def _ack(self, data: bytes, context: Context) -> bytes:
        return await self._answering(context, self._acked(data, context))

    async def _acked(self, data: bytes, context: Context) -> bytes:
        owner = self._caller(_Metadata(context)).owner
        asked = _parsed(pb.AckRequest, data)
        acked = await self._inference.ack(owner, asked.session_id, asked.acked_token_index)
        encoded: bytes = pb.AckResponse(
            session_id=asked.session_id,
            acked_token_index=acked.acked,
            journaled_token_count=acked.journaled,
            first_retained_index=acked.first_retained,
        ).SerializeToString()
        return encoded

    async def _cancel(self, data: bytes, context: Context) -> bytes:
        return await self._answering(context, self._cancelled(data, context))

    async def _cancelled(self, data: bytes, context: Context) -> bytes:
        owner = self._caller(_Metadata(context)).owner
        asked = _parsed(pb.CancelRequest, data)
        cancelled = await self._inference.cancel(owner, asked.session_id)
        encoded: bytes = pb.CancelResponse(session_id=asked.session_id, cancelled=cancelled).SerializeToString()
        return encoded

    # --- what all of them share -------------------------------------------------------------------------------------

    def _caller(self, metadata: _Metadata) -> Caller:
        try:
            authorization, apikey = metadata.only("authorization"), metadata.only("apikey")
        except BadRequest:
            raise Unauthorized from None
        return self._identify(authorization, apikey)

    async def _answering(self, context: Context, verb: Awaitable[_Answer]) -> _Answer:
        """The verb's answer; what it raises becomes the call's status."""
        try:
            return await verb
        except Exception as error:  # noqa: BLE001  # whatever went wrong, the caller gets a status
            await self._refuse(context, refusal(error, self._refused))

    async def _refuse(self, context: Context, told: Refusal) -> NoReturn:
        code = grpc.StatusCode[told.status]
        status = Status(code=code.value[0], message=told.message, details=told.details)
        await context.abort_with_status(rpc_status.to_status(status))


_Answer = TypeVar("_Answer")
_Message = TypeVar("_Message")


class _Metadata:
    """The metadata of a call; names are in lower case."""

    def __init__(self, context: Context) -> None:
        self._pairs = context.invocation_metadata() or ()

    def only(self, name: str) -> str | None:
        """The only value of a name.  Raises BadRequest when it stands twice: which one is meant cannot be known."""
        values = [value for key, value in self._pairs if key == name]
        if len(values) > 1:
            raise BadRequest(f"the metadata {name} stands {len(values)} times; send it once")
        return str(values[0]) if values else None


def _parsed(kind: type[_Message], data: bytes) -> Any:
    """Raises BadRequest for what is no such message, among it text that is not UTF-8."""
    try:
        return kind.FromString(data)  # type: ignore[attr-defined]  # protobuf's classes are made at run time
    except DecodeError:
        raise BadRequest(f"the request is no {kind.__name__} in protobuf's binary form") from None


def _add_reflection(server: Any) -> None:
    """Under both of its names, whose messages are the same: grpcio has the older, newer tools ask for the other."""
    reflecting = reflection.aio.ReflectionServicer((GRPC_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME))
    handler = grpc.stream_stream_rpc_method_handler(
        reflecting.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for service in (reflection.SERVICE_NAME, _REFLECTION_V1):
        server.add_registered_method_handlers(service, {"ServerReflectionInfo": handler})


class _Health(health.aio.HealthServicer):  # type: ignore[misc]  # grpcio-health-checking has no types
    """grpc.health.v1, of the whole server and of the service; looked at anew with each question."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        super().__init__()
        self._ready = ready

    async def refresh(self) -> None:
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if self._ready() else statuses.NOT_SERVING
        for service in ("", GRPC_SERVICE):
            await self.set(service, status)

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802  # the service's own name
        await self.refresh()
        return await super().Check(request, context)
