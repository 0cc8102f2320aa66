"""The blocking client: `resume.Reader` over the standard library's HTTP, no event loop in the background.

    client = Client("http://127.0.0.1:8400", key="…")
    for record in client.generate("Tell me a story"):
        print(record.text, end="", flush=True)

Names and meanings are those of `aio`.  A client may be shared by threads, a stream may not.
"""

from __future__ import annotations

import socket
import ssl
import time
import uuid
from collections.abc import Callable, Sequence
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Self

from midstream.client.answers import MAX_ANSWER, Answer, Unreachable, object_in
from midstream.client.resume import Reader
from midstream.client.steps import Connect, Lost, Patience, Read, Record, Request, Resumed, Wait
from midstream.client.surface import DEFAULT_GATEWAY, Call, Gateway, Handle, creation, why
from midstream.cursor import Cursor

Reply = dict[str, Any]

_BROKEN = (OSError, HTTPException)
_READ = 65_536


class Client(Gateway[Reply]):
    """A client of one gateway; see `AsyncClient`.  Each stream and each call has a connection of its own."""

    def __init__(
        self,
        base_url: str = DEFAULT_GATEWAY,
        *,
        key: str | Callable[[], str] | None = None,
        patience: Patience | None = None,
        timeout: float = 30.0,
        notify: Callable[[Lost | Resumed], None] | None = None,
    ) -> None:
        super().__init__(base_url, patience, timeout, notify)
        self._key = key
        self._tls = ssl.create_default_context() if self.address.secure else None

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

    def _call(self, call: Call) -> Reply:
        headers, connection = call.headers | self.authorization(), self.connection()
        try:
            connection.request(call.method, self.address.prefix + call.path, call.body, headers)
            response = connection.getresponse()
            answer = _answer(response, response.read(MAX_ANSWER))
        except _BROKEN as error:
            raise Unreachable(why(error)) from error
        finally:
            connection.close()
        return object_in(answer)

    def connection(self) -> HTTPConnection:
        host, port = self.address.host, self.address.port
        if self._tls is not None:
            return HTTPSConnection(host, port, timeout=self.timeout, context=self._tls)
        return HTTPConnection(host, port, timeout=self.timeout)

    def authorization(self) -> dict[str, str]:
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
        self._connection: HTTPConnection | None = None
        self._socket: socket.socket | None = None
        self._response: HTTPResponse | None = None
        self._closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Record:
        while True:
            if self._closed:
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
        headers = request.headers | self._client.authorization()
        self._connection = connection = self._client.connection()
        try:
            path = self._client.address.prefix + request.path
            connection.request(request.method, path, request.body, headers)
            # An answer that ends with its connection takes the socket away from it.
            self._socket = connection.sock
            self._response = response = connection.getresponse()
            if not (answer := _answer(response)).is_stream:
                answer = _answer(response, response.read(MAX_ANSWER))
        except _BROKEN as error:
            self._drop(why(error))
        else:
            self._reader.answered(answer)

    def _read(self, within: float) -> None:
        assert self._response is not None
        assert self._socket is not None
        try:
            self._socket.settimeout(within)
            data = self._response.read1(_READ)
        except TimeoutError:
            self._drop(f"nothing was heard for {within:g} s")
        except _BROKEN as error:
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
        if self._response is not None:
            self._response.close()
        if self._connection is not None:
            self._connection.close()
        self._response = self._connection = self._socket = None

    def close(self) -> None:
        self._closed = True
        self._hang_up()

    def __del__(self) -> None:
        self._hang_up()


def _answer(response: HTTPResponse, body: bytes = b"") -> Answer:
    return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, body)
