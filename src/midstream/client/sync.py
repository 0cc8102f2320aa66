"""The blocking client: `resume.Reader` over the lines of `lines`, no event loop in the background.

    client = Client("http://127.0.0.1:8400", key="…")
    for record in client.generate("Tell me a story"):
        print(record.text, end="", flush=True)

Names and meanings are those of `aio`.  A client may be shared by threads, a stream may not.
"""

from __future__ import annotations

import ssl
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

from midstream.client.answers import MAX_ANSWER, Unreachable, object_in
from midstream.client.lines import BROKEN, HttpLine, Line, Peer, http_answer, http_connection
from midstream.client.resume import Reader
from midstream.client.steps import Connect, Lost, Patience, Read, Record, Request, Resumed, Wait
from midstream.client.surface import DEFAULT_GATEWAY, Call, Gateway, Handle, address, creation, why
from midstream.cursor import Cursor

if TYPE_CHECKING:
    from midstream.client.grpc_line import Channel

Reply = dict[str, Any]

# What carries streams: server-sent events over HTTP, a WebSocket, or gRPC.
Transport = Literal["sse", "ws", "grpc"]
GRPC_PORT = 8401


class Client(Gateway[Reply]):
    """A client of one gateway; see `AsyncClient`.  Each stream and each call has a connection of its own.

    transport  what streams are followed over: "sse", "ws", or "grpc"; calls go over HTTP, but for acks and cancels of
               "grpc", which carries text alone (no reasoning, no tool calls, no usage)
    grpc       the host and port of the gateway's gRPC, where it is not its own host's 8401
    """

    def __init__(
        self,
        base_url: str = DEFAULT_GATEWAY,
        *,
        key: str | Callable[[], str] | None = None,
        patience: Patience | None = None,
        timeout: float = 30.0,
        notify: Callable[[Lost | Resumed], None] | None = None,
        transport: Transport = "sse",
        grpc: str | None = None,
    ) -> None:
        super().__init__(base_url, patience, timeout, notify)
        self._key = key
        tls = ssl.create_default_context() if self.address.secure else None
        self._peer = Peer(self.address, tls, timeout, self.authorization)
        self._channel = self._grpc_channel(grpc) if transport == "grpc" else None
        self._transport = transport

    def _grpc_channel(self, given: str | None) -> Channel:
        # It takes a fifth of a second to import, which only who wants it should wait for.
        from midstream.client.grpc_line import Channel

        where = address(f"http://{given}") if given else self.address._replace(port=GRPC_PORT)
        return Channel(self._peer._replace(address=where._replace(secure=self.address.secure, prefix="")))

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[dict[str, Any]] | None = None,
        model: str | None = None,
        idempotency_key: str | None = None,
        **options: Any,
    ) -> Stream:
        """Begin a generation.  Returns once the gateway has taken it, before the model has said anything."""
        key = idempotency_key or uuid.uuid4().hex
        reader = self._reader(creation(prompt, messages, key, {"model": model, **options}))
        reading = _Reading(self, reader)
        reading.open()
        return Stream(self, reader, reading)

    def resume(self, cursor: str | Cursor) -> Stream:
        """Go on after a position; connects when it is iterated.  Raises BadCursor."""
        return Stream(self, self._reader(cursor))

    def ack(self, stream_id: str, seq: int) -> Reply:
        return self._channel.ack(stream_id, seq) if self._channel is not None else super().ack(stream_id, seq)

    def cancel(self, stream_id: str) -> Reply:
        return self._channel.cancel(stream_id) if self._channel is not None else super().cancel(stream_id)

    def find(self, session: str, token: int = 0) -> str:
        """The id of the session's stream, in which this token is wanted next.

        Sessions are gRPC's names for streams.  Raises ValueError over another transport, and what the gateway refuses.
        """
        if self._channel is None:
            raise ValueError("only gRPC has sessions")
        return self._channel.find(session, token)

    def line(self) -> Line:
        """A new connection for a stream, not connected yet."""
        if self._channel is not None:
            from midstream.client.grpc_line import GrpcLine

            return GrpcLine(self._channel)
        if self._transport == "ws":
            from midstream.client.socket_line import SocketLine

            return SocketLine(self._peer)
        return HttpLine(self._peer)

    def close(self) -> None:
        """Close what outlives a stream, which only gRPC has."""
        if self._channel is not None:
            self._channel.close()

    def _call(self, call: Call) -> Reply:
        headers, connection = call.headers | self.authorization(), http_connection(self._peer)
        try:
            connection.request(call.method, self.address.prefix + call.path, call.body, headers)
            response = connection.getresponse()
            answer = http_answer(response, response.read(MAX_ANSWER))
        except BROKEN as error:
            raise Unreachable(why(error)) from error
        finally:
            connection.close()
        return object_in(answer)

    def authorization(self) -> dict[str, str]:
        """The header that says whose call it is; the key may have changed since the last one."""
        key = self._key() if callable(self._key) else self._key
        return {} if key is None else {"authorization": f"Bearer {key}"}


class Stream(Handle["_Reading", Reply]):
    __doc__ = Handle.__doc__

    _gateway: Client

    def __iter__(self) -> _Reading:
        return self._begin(lambda: _Reading(self._gateway, self._reader))


class _Reading:
    """One loop over a stream; its connection is closed as soon as the loop is left."""

    def __init__(self, client: Client, reader: Reader) -> None:
        self._client = client
        self._reader = reader
        self._line: Line | None = None
        self.closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Record:
        while True:
            if self.closed:
                raise RuntimeError("this stream was closed, or is being read by a later loop")
            try:
                step = self._reader.step()
            except BaseException:
                self._hang_up()
                raise
            if isinstance(step, Record):
                return step
            if step is None:
                self._hang_up()
                raise StopIteration
            self._do(step)

    def open(self) -> None:
        """Connect, so that a refusal is raised here and not in the loop."""
        while not self._reader.opened:
            step = self._reader.step()
            assert not isinstance(step, Record)
            assert step is not None
            self._do(step)

    def _do(self, step: Connect | Read | Wait) -> None:
        match step:
            case Connect(request):
                self._connect(request)
            case Read(within):
                self._read(within)
            case Wait(seconds):
                time.sleep(seconds)

    def _connect(self, request: Request) -> None:
        self._hang_up()
        self._line = line = self._client.line()
        try:
            answer = line.open(request)
        except BROKEN as error:
            self._drop(why(error))
        else:
            self._reader.answered(answer)

    def _read(self, within: float) -> None:
        assert self._line is not None
        try:
            data = self._line.read(within)
        except TimeoutError:
            self._drop(f"nothing was heard for {within:g} s")
        except BROKEN as error:
            self._drop(why(error))
        else:
            if data:
                self._reader.received(data)
            else:
                self._drop("the connection ended before the answer")

    def _drop(self, reason: str) -> None:
        self._hang_up()
        self._reader.lost(reason)

    def _hang_up(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()

    def close(self) -> None:
        self.closed = True
        self._hang_up()

    def __del__(self) -> None:
        self._hang_up()
