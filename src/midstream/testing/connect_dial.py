"""Connect and gRPC-Web for the transport contract, by an HTTP client that is told how their envelopes look.

Connect speaks JSON here, as browsers do, and gRPC-Web protobuf's binary form.  Nothing of the server's is used to read
what it wrote (connectrpc.com/docs/protocol; the gRPC project's PROTOCOL-WEB).
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import aiohttp
import orjson
from google.protobuf import json_format
from google.rpc.error_details_pb2 import ErrorInfo

from midstream.codec.inference import index_of, resume_from
from midstream.codec.pb import inference_pb2 as pb
from midstream.testing.gateway import RunningGateway
from midstream.testing.grpc_dial import GRPC, ended, heard, told_by
from midstream.testing.transport_dial import Connect, Heard, Refused, Wire, narrow
from midstream.wire import GRPC_SERVICE, H_STREAM_ID

CONNECT, GRPC_WEB = replace(GRPC, name="connect"), replace(GRPC, name="grpc-web")
_HEAD = 5  # a byte of flags, and the length


class Answer(Protocol):
    """How a wire writes what is answered.  `end` and `refusal` give the google.rpc.ErrorInfo; None: all is well."""

    wire: Wire

    def headers(self, *, stream: bool) -> dict[str, str]: ...
    def encode(self, message: Any, *, stream: bool) -> bytes: ...
    def decode(self, data: bytes, kind: Any) -> Any: ...

    def is_end(self, flags: int) -> bool:
        """Whether an envelope with these flags is the last."""

    def end(self, data: bytes) -> ErrorInfo | None: ...
    def refusal(self, status: int, headers: Mapping[str, str], body: bytes) -> ErrorInfo | None: ...


def _envelope(data: bytes) -> bytes:
    return b"\0" + len(data).to_bytes(4, "big") + data


class ConnectJson:
    """The Connect protocol with JSON."""

    wire = CONNECT

    def headers(self, *, stream: bool) -> dict[str, str]:
        kind = "application/connect+json" if stream else "application/json"
        return {"Content-Type": kind, "Connect-Protocol-Version": "1"}

    def encode(self, message: Any, *, stream: bool) -> bytes:
        data = json_format.MessageToJson(message).encode()
        return _envelope(data) if stream else data

    def decode(self, data: bytes, kind: Any) -> Any:
        return json_format.Parse(data, kind())

    def is_end(self, flags: int) -> bool:
        return flags & 2 != 0

    def end(self, data: bytes) -> ErrorInfo | None:
        error = orjson.loads(data).get("error")
        return self._info(error) if error is not None else None

    def refusal(self, status: int, headers: Mapping[str, str], body: bytes) -> ErrorInfo | None:
        return self._info(orjson.loads(body)) if status != 200 else None

    def _info(self, error: dict[str, Any]) -> ErrorInfo:
        for detail in error.get("details", ()):
            if detail["type"] == ErrorInfo.DESCRIPTOR.full_name:
                return ErrorInfo.FromString(b64decode(detail["value"] + "=="))
        return ErrorInfo(reason=error["code"])


class GrpcWeb:
    """gRPC-Web with protobuf's binary form."""

    wire = GRPC_WEB

    def headers(self, *, stream: bool) -> dict[str, str]:
        return {"Content-Type": "application/grpc-web+proto", "X-Grpc-Web": "1"}

    def encode(self, message: Any, *, stream: bool) -> bytes:
        return _envelope(message.SerializeToString())

    def decode(self, data: bytes, kind: Any) -> Any:
        return kind.FromString(data)

    def is_end(self, flags: int) -> bool:
        return flags & 0x80 != 0

    def end(self, data: bytes) -> ErrorInfo | None:
        lines = (line.partition(":") for line in data.decode().split("\r\n") if line)
        return self._info({name.strip(): value.strip() for name, _, value in lines})

    def refusal(self, status: int, headers: Mapping[str, str], body: bytes) -> ErrorInfo | None:
        assert status == 200, f"gRPC-Web is answered with HTTP status {status}"
        if "grpc-status" in headers:
            return self._info(headers)
        while body:
            size = int.from_bytes(body[1:_HEAD], "big")
            if self.is_end(body[0]):
                return self.end(body[_HEAD : _HEAD + size])
            body = body[_HEAD + size :]
        raise AssertionError("an answer without trailers")

    def _info(self, trailers: Mapping[str, str]) -> ErrorInfo | None:
        if trailers["grpc-status"] == "0":
            return None
        details = trailers.get("grpc-status-details-bin")
        info = told_by(b64decode(details + "==")) if details else None
        return info or ErrorInfo(reason=f"grpc-status {trailers['grpc-status']}")


class ConnectReader:
    """One response, taken apart into envelopes."""

    heartbeats = 0

    def __init__(self, response: aiohttp.ClientResponse, answer: Answer) -> None:
        self._response = response
        self._answer = answer
        self._over = False
        self.stream_id = response.headers.get(H_STREAM_ID, "")
        self.clean: bool | None = None

    async def next(self) -> Heard | None:
        if self._over:
            return None
        try:
            head = await self._response.content.readexactly(_HEAD)
            data = await self._response.content.readexactly(int.from_bytes(head[1:], "big"))
        except (aiohttp.ClientError, EOFError):  # an end that is not said is a break
            self._over, self.clean = True, False
            return None
        if not self._answer.is_end(head[0]):
            told = self._answer.decode(data, pb.GenerateResponse)
            return heard(told.token_index, told.token, final=told.is_final)
        self._over = self.clean = True
        return self._end(self._answer.end(data))

    def _end(self, info: ErrorInfo | None) -> Heard | None:
        if info is None:
            return None
        end = ended(info)
        if isinstance(end, Refused):
            raise end
        return end

    async def drop(self) -> None:
        if self._response.connection is not None and self._response.connection.transport is not None:
            self._response.connection.transport.abort()
        self._response.close()


class ConnectDial:
    """Sessions are named by their streams' ids."""

    garbage: Sequence[Any] = (-1, -(2**31))

    def __init__(self, session: aiohttp.ClientSession, address: str, answer: Answer) -> None:
        self.wire = answer.wire
        self._session = session
        self._address = address
        self._answer = answer
        self._readers: list[ConnectReader] = []

    async def close(self) -> None:
        """Drop every reader."""
        for reader in self._readers:
            await reader.drop()

    async def generate(self, prompt: str) -> ConnectReader:
        return await self.ask(pb.GenerateRequest(prompt=prompt))

    async def resume(self, stream_id: str, after: Any, *, of: str | None = None) -> ConnectReader:
        wanted = resume_from(after) if after >= 0 else after
        request = pb.GenerateRequest(session_id=stream_id, resume_from_token=wanted)
        return await self.ask(request, **({H_STREAM_ID: of} if of is not None else {}))

    async def ask(self, request: pb.GenerateRequest, **headers: str) -> ConnectReader:
        """Call Generate with these headers besides."""
        response = await self._post("Generate", request, stream=True, **headers).__aenter__()  # the reader's to close
        reader = ConnectReader(response, self._answer)
        if not reader.stream_id:
            if response.status == 200 and "grpc-status" not in response.headers:
                assert await reader.next() is None  # it raises what the call was refused for
            raise _refused(self._answer.refusal(response.status, response.headers, await response.read()))
        self._readers.append(reader)
        return reader

    async def ack(self, stream_id: str, seq: int) -> None:
        request = pb.AckRequest(session_id=stream_id, acked_token_index=index_of(seq))
        await self._once("Ack", request, pb.AckResponse)

    async def cancel(self, stream_id: str) -> None:
        await self._once("Cancel", pb.CancelRequest(session_id=stream_id), pb.CancelResponse)

    async def _once(self, method: str, request: Any, kind: Any) -> Any:
        async with self._post(method, request, stream=False) as response:
            body = await response.read()
        info = self._answer.refusal(response.status, response.headers, body)
        if info is not None:
            raise _refused(info)
        return kind

    def _post(
        self, method: str, request: Any, *, stream: bool, **headers: str
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._session.post(
            f"{self._address}/{GRPC_SERVICE}/{method}",
            data=self._answer.encode(request, stream=stream),
            headers={**self._answer.headers(stream=stream), **headers},
        )

    async def state(self, stream_id: str) -> dict[str, Any]:
        raise NotImplementedError


def _refused(info: ErrorInfo | None) -> Refused:
    end = ended(info) if info is not None else None
    assert isinstance(end, Refused), f"a call without a stream that is answered: {end}"
    return end


@asynccontextmanager
async def _connect(answer: Callable[[], Answer], gateway: RunningGateway, key: str) -> AsyncIterator[ConnectDial]:
    """The dial of one key's owner."""
    headers = {"Authorization": f"Bearer {key}"}
    connector = aiohttp.TCPConnector(limit=0, socket_factory=narrow)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as session:
        dial = ConnectDial(session, gateway.address, answer())
        yield dial
        await dial.close()


connect: Connect = partial(_connect, ConnectJson)
connect_web: Connect = partial(_connect, GrpcWeb)
