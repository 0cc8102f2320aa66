"""What connects a reader to its gateway: HTTP here, and in the files beside it a WebSocket and gRPC.

The reader (`resume`) knows one form: a request, an answer, server-sent events.  Every line has that form, whatever it
is made of, so that the laws of resuming stand once.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import NamedTuple, Protocol

from midstream.client.answers import MAX_ANSWER, Answer
from midstream.client.steps import Request
from midstream.client.surface import Address

# What a line raises when it is broken.
BROKEN = (OSError, HTTPException)
_READ = 65_536


class Peer(NamedTuple):
    """The gateway as a line needs it.  `authorization` is asked at each attempt; `timeout` is in seconds."""

    address: Address
    tls: ssl.SSLContext | None
    timeout: float
    authorization: Callable[[], dict[str, str]]


class Line(Protocol):
    """One connection that carries one stream.  Broken, it raises one of BROKEN."""

    def open(self, request: Request) -> Answer:
        """Send it; the head of the answer, with its body where it is no stream."""

    def read(self, within: float) -> bytes:
        """Server-sent events as they come; b"" at the end.  Raises TimeoutError after so many seconds of silence."""

    def close(self) -> None:
        """Hang up.  May be repeated."""


class HttpLine:
    """Over HTTP, as it is."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._connection: HTTPConnection | None = None
        self._socket: socket.socket | None = None
        self._response: HTTPResponse | None = None

    def open(self, request: Request) -> Answer:
        address = self._peer.address
        self._connection = connection = http_connection(self._peer)
        headers = request.headers | self._peer.authorization()
        connection.request(request.method, address.prefix + request.path, request.body, headers)
        # An answer that ends with its connection takes the socket away from it.
        self._socket = connection.sock
        self._response = response = connection.getresponse()
        answer = http_answer(response)
        return answer if answer.is_stream else http_answer(response, response.read(MAX_ANSWER))

    def read(self, within: float) -> bytes:
        assert self._response is not None
        assert self._socket is not None
        self._socket.settimeout(within)
        return self._response.read1(_READ)

    def close(self) -> None:
        if self._response is not None:
            self._response.close()
        if self._connection is not None:
            self._connection.close()
        self._response = self._connection = self._socket = None


def http_connection(peer: Peer) -> HTTPConnection:
    """A new one, not connected yet; the caller closes it."""
    address = peer.address
    if peer.tls is not None:
        return HTTPSConnection(address.host, address.port, timeout=peer.timeout, context=peer.tls)
    return HTTPConnection(address.host, address.port, timeout=peer.timeout)


def http_answer(response: HTTPResponse, body: bytes = b"") -> Answer:
    return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, body)
