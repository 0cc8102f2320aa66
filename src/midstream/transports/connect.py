"""Connect and gRPC-Web: inference.InferenceService on the HTTP port (PROTOCOL.md, "gRPC, Connect and gRPC-Web").

The wire is connectrpc's, by which a browser needs no bridge.  What it has no place for stands here: headers that go out
before the model has said anything, one write for all that is new, and a peer that takes nothing.

- A stream's first message is `_OPENING`, which is none: it makes the headers go out, and is then held back.
- Answers are never compressed: a message is about as long as its frame, and would wait for others in a compressor.
- Plain gRPC needs HTTP/2 trailers, which this port does not have: 415, and grpcio has a port of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, NoReturn, TypeVar, cast

from connectrpc.code import Code
from connectrpc.codec import Codec, proto_binary_codec, proto_json_codec
from connectrpc.errors import ConnectError, ErrorDetail
from connectrpc.request import RequestContext
from protobuf.wkt import Any as Packed
from starlette.types import Message, Receive, Scope, Send

from midstream.codec.inference import message, message_json
from midstream.codec.pb.inference_connect import InferenceService, InferenceServiceASGIApplication
from midstream.codec.pb.inference_pb import (
    AckRequest,
    AckResponse,
    CancelRequest,
    CancelResponse,
    GenerateRequest,
    GenerateResponse,
)
from midstream.errors import UnsupportedMediaType
from midstream.transports.http import DIRECT, caller, header
from midstream.transports.inference import Inference, Refusal, Request, refusal
from midstream.transports.sse import PIPE
from midstream.wire import H_STREAM_ID, SEND_STALL

# What a stream yields so that its headers go out; the message made of it is held back.
_OPENING = b""
# With these a client asks for compressed answers.
_ACCEPTS = frozenset({b"accept-encoding", b"connect-accept-encoding", b"grpc-accept-encoding"})
# Of every answer: neither a proxy nor a browser may hold, change or keep it.
_HEADERS = [(b"cache-control", b"no-store, no-transform"), (b"x-accel-buffering", b"no")]
# Where the guard leaves what it refuses a call for, so that the call ends as its protocol has it.
REFUSED = "midstream.refused"

_Asked = TypeVar("_Asked")
_Told = TypeVar("_Told")
_Context = RequestContext[_Asked, _Told]


class Carrier:
    """One call: the `send` that connectrpc is given.

    Bodies gather until `flush`, so that all that is new goes out as one write.  `abort` is for a peer that has stopped
    taking: what is still said to it then goes nowhere.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self.scope = scope
        self._send = send
        self._send_body: Send = scope.get(DIRECT, send)
        self._parts: list[bytes] = []
        self._opening = False
        self._aborted = False
        self._task = asyncio.current_task()

    async def __call__(self, event: Message) -> None:
        if event["type"] == "http.response.start":
            event["headers"] = [*event["headers"], *_HEADERS]
            await self._send(event)
        elif event.get("more_body", False):
            if self._opening:
                self._opening = False
            else:
                self._parts.append(event["body"])
        else:
            self._parts.append(event.get("body", b""))
            await self._end()

    def open(self) -> bytes:
        """What to yield first."""
        self._opening = True
        return _OPENING

    async def flush(self) -> None:
        """Send what has gathered, and return when there is room for more."""
        await self._body(more=True)

    async def _end(self) -> None:
        """The last words wait for room as any, but nobody looks any more whether the peer takes them."""
        try:
            async with asyncio.timeout(SEND_STALL):
                await self._body(more=False)
        except TimeoutError:
            self.abort()

    async def _body(self, *, more: bool) -> None:
        body, self._parts = b"".join(self._parts), []
        if not self._aborted:
            await self._send_body({"type": "http.response.body", "body": body, "more_body": more})

    def abort(self) -> None:
        self._aborted = True
        pipe = self.scope.get("extensions", {}).get(PIPE)
        if pipe is not None:
            pipe.abort()
        elif self._task is not None:
            self._task.cancel()


_carrier: ContextVar[Carrier] = ContextVar("carrier")


class ConnectApi:
    """An ASGI application for everything below `/inference.InferenceService/`, behind the guard."""

    def __init__(self, inference: Inference, max_body: int, refused: dict[str, int]) -> None:
        self._app = InferenceServiceASGIApplication(
            _Service(inference, refused),
            interceptors=[_Refusing(refused)],
            read_max_bytes=max_body,
            codecs=[_Binary(), _Json()],
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = (header(scope, b"content-type") or "").partition(";")[0].strip().lower()
        if kind == "application/grpc" or kind.startswith("application/grpc+"):
            raise UnsupportedMediaType("gRPC has a port of its own (--grpc-port); here are Connect and gRPC-Web")
        carrier = Carrier(scope, send)
        token = _carrier.set(carrier)
        try:
            headers = [pair for pair in scope["headers"] if pair[0] not in _ACCEPTS and _is_text(pair[1])]
            await self._app(cast(Any, {**scope, "headers": headers}), cast(Any, receive), cast(Any, carrier))
        finally:
            _carrier.reset(token)


def _is_text(value: bytes) -> bool:
    """Whether connectrpc can read the header; none that it or we look at is anything else."""
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


class _Refusing:
    """Ends a call that the guard has refused, before anything of it is read."""

    def __init__(self, refused: dict[str, int]) -> None:
        self._refused = refused

    async def on_start(self, ctx: RequestContext[Any, Any]) -> None:
        if (error := _carrier.get().scope.get(REFUSED)) is not None:
            _end(refusal(error, self._refused))

    async def on_end(self, token: None, ctx: RequestContext[Any, Any], error: Exception | None) -> None:
        """There is nothing to undo."""


class _Service(InferenceService):
    """What the generated application calls."""

    def __init__(self, inference: Inference, refused: dict[str, int]) -> None:
        self._inference = inference
        self._refused = refused

    def generate(
        self, request: GenerateRequest, ctx: _Context[GenerateRequest, GenerateResponse]
    ) -> AsyncIterator[GenerateResponse]:
        # Frames for messages: the codecs below know what to do with them.
        return cast(AsyncIterator[GenerateResponse], self._generate(request, ctx))

    async def _generate(
        self, asked: GenerateRequest, ctx: _Context[GenerateRequest, GenerateResponse]
    ) -> AsyncGenerator[bytes, None]:
        carrier = _carrier.get()
        scope, owner = carrier.scope, caller(carrier.scope).owner
        try:
            request = Request(
                asked.prompt,
                asked.session_id,
                asked.resume_from_token,
                asked.model or header(scope, b"model") or "",
                header(scope, H_STREAM_ID.lower().encode()),
                header(scope, b"traceparent"),
            )
            begun = await self._inference.generate(owner, request, carrier.abort)
            try:
                ctx.response_headers[H_STREAM_ID] = begun.stream_id
                yield carrier.open()
                async with aclosing(self._inference.messages(begun, owner)) as messages:
                    async for frames in messages:
                        for frame in frames:
                            yield frame
                        await carrier.flush()
            finally:
                self._inference.streams.leave(begun.follow)
        except Exception as error:  # noqa: BLE001  # whatever went wrong, the caller gets a status
            _end(refusal(error, self._refused))

    async def ack(self, asked: AckRequest, ctx: _Context[AckRequest, AckResponse]) -> AckResponse:
        try:
            owner = caller(_carrier.get().scope).owner
            acked = await self._inference.ack(owner, asked.session_id, asked.acked_token_index)
        except Exception as error:  # noqa: BLE001  # as above
            _end(refusal(error, self._refused))
        return AckResponse(
            session_id=asked.session_id,
            acked_token_index=acked.acked,
            journaled_token_count=acked.journaled,
            first_retained_index=acked.first_retained,
        )

    async def cancel(self, asked: CancelRequest, ctx: _Context[CancelRequest, CancelResponse]) -> CancelResponse:
        try:
            cancelled = await self._inference.cancel(caller(_carrier.get().scope).owner, asked.session_id)
        except Exception as error:  # noqa: BLE001  # as above
            _end(refusal(error, self._refused))
        return CancelResponse(session_id=asked.session_id, cancelled=cancelled)


def _end(told: Refusal) -> NoReturn:
    """Raises what connectrpc makes a status of."""
    code = Code.CANCELED if told.status == "CANCELLED" else Code[told.status]
    details = [ErrorDetail(Packed(type_url=detail.type_url, value=detail.value)) for detail in told.details]
    raise ConnectError(code, told.message, details) from None


class _Binary(Codec[Any, Any]):
    """protobuf's binary form; a frame is made the message that it stands for."""

    def name(self) -> str:
        return "proto"

    def encode(self, told: Any) -> bytes:
        if type(told) is bytes:
            return message(told) if told else told
        return _BINARY.encode(told)

    def decode(self, data: bytes | bytearray, message_class: type[Any]) -> Any:
        return _BINARY.decode(data, message_class)


class _Json(Codec[Any, Any]):
    """protobuf's JSON form, likewise."""

    def name(self) -> str:
        return "json"

    def encode(self, told: Any) -> bytes:
        if type(told) is bytes:
            return message_json(told) if told else told
        return _JSON.encode(told)

    def decode(self, data: bytes | bytearray, message_class: type[Any]) -> Any:
        return _JSON.decode(data, message_class)


_BINARY, _JSON = proto_binary_codec(), proto_json_codec()
