"""A line over gRPC (PROTOCOL.md, "gRPC, Connect and gRPC-Web"), and the calls beside it.

A message is put into the shape of the record that it stands for; what gRPC does not carry (reasoning, tool calls,
usage) is not in it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import orjson
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from midstream.client.answers import Answer, Unreachable, error_of
from midstream.client.lines import Peer
from midstream.client.steps import Creation, Request
from midstream.codec import native
from midstream.codec.inference import index_of, resume_from, seq_of
from midstream.codec.pb import inference_pb2 as pb
from midstream.cursor import Cursor
from midstream.wire import (
    CANCELLED,
    DONE,
    EXPIRED,
    FAILED,
    FAILURES,
    GRPC_DOMAIN,
    GRPC_SERVICE,
    H_STREAM_ID,
    HTTP_STATUS,
    TOKEN,
)

_STREAM_ID = H_STREAM_ID.lower()
# Milliseconds.  The wire shows no heartbeats: a dead peer is found out by HTTP/2's own pings.
_OPTIONS = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),
)

Metadata = list[tuple[str, str]]


class Channel:
    """A gateway's gRPC port.  Lines and calls share its connection."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        address, options = peer.address.authority, list(_OPTIONS)
        self._channel = (
            grpc.secure_channel(address, grpc.ssl_channel_credentials(), options)
            if peer.address.secure
            else grpc.insecure_channel(address, options)
        )
        self._generate = _method(self._channel.unary_stream, "Generate", pb.GenerateRequest, pb.GenerateResponse)
        self._ack = _method(self._channel.unary_unary, "Ack", pb.AckRequest, pb.AckResponse)
        self._cancel = _method(self._channel.unary_unary, "Cancel", pb.CancelRequest, pb.CancelResponse)

    def close(self) -> None:
        self._channel.close()

    def metadata(self) -> Metadata:
        return list(self.peer.authorization().items())

    def generate(self, request: Any, metadata: Metadata) -> Any:
        """The call, as it runs."""
        return self._generate(request, metadata=[*self.metadata(), *metadata])

    def find(self, session: str, token: int) -> str:
        """The id of the session's stream, of which this token is wanted next.  Raises what the gateway refuses."""
        call = self.generate(pb.GenerateRequest(session_id=session, resume_from_token=token), [])
        try:
            stream_id = dict(call.initial_metadata()).get(_STREAM_ID)
            if stream_id is not None:
                return str(stream_id)
            next(call)
        except grpc.RpcError as error:
            raise _raised(error) from None
        finally:
            call.cancel()
        raise Unreachable("a stream without a name: is this a Midstream gateway?")

    def ack(self, stream_id: str, seq: int) -> dict[str, Any]:
        """As over HTTP; of the state only what this wire tells."""
        index = max(index_of(seq), 0)
        told = self._once(self._ack, pb.AckRequest(session_id=stream_id, acked_token_index=index))
        return {"stream_id": stream_id, "acked_seq": seq_of(told.acked_token_index)}

    def cancel(self, stream_id: str) -> dict[str, Any]:
        told = self._once(self._cancel, pb.CancelRequest(session_id=stream_id))
        return {"stream_id": stream_id, "status": CANCELLED if told.cancelled else "ended"}

    def _once(self, method: Any, request: Any) -> Any:
        try:
            return method(request, metadata=self.metadata(), timeout=self.peer.timeout)
        except grpc.RpcError as error:
            raise _raised(error) from None


class GrpcLine:
    """One call of Generate.  A thread takes its messages, so that who waits for one can stop waiting."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._call: Any = None
        self._heard: queue.Queue[bytes | Exception] = queue.Queue(maxsize=64)
        self._closed = threading.Event()
        self._next = 0

    def open(self, request: Request) -> Answer:
        asked = request.of
        assert asked is not None
        call, after = self._called(asked)
        self._call = call
        try:
            stream_id = dict(call.initial_metadata()).get(_STREAM_ID)
            if stream_id is None:  # an answer of trailers alone
                next(call)
                return Answer(502)
        except grpc.RpcError as error:
            return _refusal(error)
        self._next = max(after, 1) + 1
        if after == 0:
            self._heard.put(native.start(str(stream_id), ""))
        threading.Thread(target=self._take, args=(call,), daemon=True).start()
        return Answer(200, {"content-type": "text/event-stream", _STREAM_ID: str(stream_id)})

    def _called(self, asked: Creation | Cursor) -> tuple[Any, int]:
        if isinstance(asked, Cursor):
            request = pb.GenerateRequest(session_id=asked.stream_id, resume_from_token=resume_from(asked.seq))
            return self._channel.generate(request, [(_STREAM_ID, asked.stream_id)]), asked.seq
        body = orjson.loads(asked.body)
        request = pb.GenerateRequest(
            prompt=body["prompt"], model=body.get("model", ""), session_id=asked.idempotency_key
        )
        return self._channel.generate(request, []), 0

    def _take(self, call: Any) -> None:
        """Messages to frames, in a thread of their own, until the call ends."""
        try:
            for message in call:
                self._put(_frame(message))
            self._put(b"")
        except grpc.RpcError as error:
            for last in _last(error):
                self._put(last)

    def _put(self, item: bytes | Exception) -> None:
        while not self._closed.is_set():
            try:
                self._heard.put(item, timeout=0.2)
                return
            except queue.Full:
                pass

    def read(self, within: float) -> bytes:
        # No heartbeat shows on this wire: `within` says nothing about it.
        heard = self._heard.get()
        if isinstance(heard, Exception):
            raise heard
        return heard

    def close(self) -> None:
        self._closed.set()
        call, self._call = self._call, None
        if call is not None:
            call.cancel()


def _frame(message: Any) -> bytes:
    seq = seq_of(message.token_index)
    if message.is_final:
        return native.frame(seq, DONE, {"seq": seq, "done": True, "finish_reason": None})
    return native.frame(seq, TOKEN, {"seq": seq, "delta": message.token, "done": False})


def _last(error: Any) -> Iterator[bytes | Exception]:
    """How a call ended that did not end well: as a record, as what SSE would say, or as a broken line."""
    info, _ = _details(error)
    code = info.reason.lower() if info is not None else ""
    if info is not None and "token_index" in info.metadata:
        seq = seq_of(int(info.metadata["token_index"]))
        if code == CANCELLED:
            yield native.frame(seq, CANCELLED, {"seq": seq, "done": True, "reason": info.metadata.get("reason")})
        else:
            retryable = info.metadata.get("retryable", str(FAILURES.get(code, False))).lower() == "true"
            told = {"code": code, "message": error.details(), "retryable": retryable}
            yield native.frame(seq, FAILED, {"seq": seq, "done": True, "error": told})
        yield b""
        return
    refusal = _refusal_of(error)
    if refusal is not None and not refusal.worth_retrying:
        yield b"event: %b\ndata: %b\n\n" % (EXPIRED.encode(), refusal.body)
    yield ConnectionResetError(error.details())


def _refusal(error: Any) -> Answer:
    """A call that was refused, as the answer it would have been over HTTP.  Raises ConnectionError when it broke."""
    refusal = _refusal_of(error)
    if refusal is None:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            raise ConnectionRefusedError(error.details())
        raise ConnectionResetError(f"{error.code().name}: {error.details()}")
    return refusal


def _refusal_of(error: Any) -> Answer | None:
    info, retry = _details(error)
    if info is None:
        return None
    code, facts = info.reason.lower(), {name: _number(text) for name, text in info.metadata.items()}
    headers = {"retry-after": str(retry.retry_delay.seconds)} if retry is not None else {}
    body = orjson.dumps({"error": code, "detail": error.details(), **facts})
    return Answer(HTTP_STATUS.get(code, 502), headers, body)


def _raised(error: Any) -> Exception:
    refusal = _refusal_of(error)
    return error_of(refusal) if refusal is not None else Unreachable(f"{error.code().name}: {error.details()}")


def _details(error: Any) -> tuple[ErrorInfo | None, RetryInfo | None]:
    """What the gateway says of a status, if it was the gateway that said it."""
    raw = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
    info, retry = ErrorInfo(), RetryInfo()
    told, wait = None, None
    for detail in Status.FromString(raw).details:
        if detail.Unpack(info) and info.domain == GRPC_DOMAIN:
            told = info
        elif detail.Unpack(retry):
            wait = retry
    return told, wait


def _number(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdecimal() else text


def _method(kind: Any, name: str, request: Any, response: Any) -> Any:
    return kind(
        f"/{GRPC_SERVICE}/{name}",
        request_serializer=request.SerializeToString,
        response_deserializer=response.FromString,
    )
