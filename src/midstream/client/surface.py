"""What users see of a client, written once: the shells `aio` and `sync` add the I/O.

`Reply` is what a call gives back: a JSON object in the blocking shell, an awaitable of one in the other.
"""

from __future__ import annotations

import random
import re
import socket
import ssl
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import BadStatusLine
from typing import Any, Generic, NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit

import orjson

from midstream.client.resume import Reader
from midstream.client.steps import Creation, Lost, Patience, Record, Resumed, stream_path
from midstream.cursor import Cursor, decode

DEFAULT_GATEWAY = "http://127.0.0.1:8400"

Reply = TypeVar("Reply", covariant=True)


class Address(NamedTuple):
    """Where a gateway is.  `prefix` is a path in front of its own, without a slash at its end; often empty."""

    secure: bool
    host: str
    port: int
    prefix: str

    @property
    def authority(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.secure else 'http'}://{self.authority}{self.prefix}"


def address(base_url: str) -> Address:
    """Read a base URL.  Raises ValueError, saying why it is none; credentials in it are refused: URLs get logged."""
    try:
        parts = urlsplit(base_url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"not a gateway's address: {base_url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"not a gateway's address: {base_url!r}; write http://HOST:PORT")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError("a gateway's address holds no credentials, query or fragment; pass the key as `key`")
    secure = parts.scheme == "https"
    return Address(secure, parts.hostname, port or (443 if secure else 80), parts.path.rstrip("/"))


@dataclass(frozen=True, slots=True)
class Call:
    """A request with one whole JSON answer."""

    method: str
    path: str
    body: bytes | None = None

    @property
    def headers(self) -> dict[str, str]:
        kind = {} if self.body is None else {"content-type": "application/json"}
        return {"accept": "application/json", **kind}


class Gateway(ABC, Generic[Reply]):
    """One gateway, as its client knows it.

    base_url  such as "http://127.0.0.1:8400"
    patience  how long dropped connections are mended
    timeout   seconds for an answer to begin (for a whole one, where it is not a stream)
    notify    is told `Lost` and `Resumed`, as they happen

    Every call raises what the gateway refused as its class in `midstream.errors`; Unreachable; UnexpectedAnswer.
    """

    def __init__(
        self,
        base_url: str,
        patience: Patience | None,
        timeout: float,
        notify: Callable[[Lost | Resumed], None] | None,
    ) -> None:
        self.address = address(base_url)
        self.timeout = timeout
        self._patience = patience
        self._notify = notify

    @abstractmethod
    def _call(self, call: Call) -> Reply: ...

    def streams(self) -> Reply:
        """`{"streams": [state, …]}`: those of this key's owner."""
        return self._call(Call("GET", "/v1/streams"))

    def pool(self) -> Reply:
        """The gateway's worker pool: workers, queue, leases and ledger.  For keys marked `:admin`."""
        return self._call(Call("GET", "/v1/pool"))

    def state(self, stream_id: str) -> Reply:
        """Its status and counters."""
        return self._call(Call("GET", f"{stream_path(stream_id)}/state"))

    def snapshot(self, stream_id: str) -> Reply:
        """The whole answer so far, and the cursor to go on from: what a reader needs whose position has gone."""
        return self._call(Call("GET", f"{stream_path(stream_id)}/snapshot"))

    def ack(self, stream_id: str, seq: int) -> Reply:
        """Everything up to `seq` is safe with its reader and may be dropped.  The state."""
        return self._call(Call("POST", f"{stream_path(stream_id)}/ack", orjson.dumps({"seq": seq})))

    def cancel(self, stream_id: str) -> Reply:
        """Stop the generation; its readers get a `cancelled` record.  Does nothing after the end."""
        return self._call(Call("POST", f"{stream_path(stream_id)}/cancel", b"{}"))

    def forget(self, stream_id: str) -> Reply:
        """Cancel it and drop everything that is kept of it."""
        return self._call(Call("DELETE", stream_path(stream_id)))

    def _reader(self, origin: Creation | str | Cursor) -> Reader:
        """Raises BadCursor."""
        return Reader(
            decode(origin) if isinstance(origin, str) else origin,
            clock=time.monotonic,
            random=random.random,
            patience=self._patience,
            notify=self._notify,
        )


class Reading(Protocol):
    """One loop over a stream, with its connection."""

    closed: bool

    def close(self) -> None:
        """Close the connection; the loop, if it still runs, ends with a RuntimeError."""


Pass = TypeVar("Pass", bound=Reading)


class Handle(Generic[Pass, Reply]):
    """One stream as its reader sees it; iterate it for the records that are left.

    It ends after the terminal record, which is also its `outcome`: a generation that failed is such a record, not an
    exception.  Raised while it is iterated: CursorExpired, CursorAhead (begin again, or take the snapshot), GaveUp, and
    whatever else the gateway refuses.
    """

    def __init__(self, gateway: Gateway[Reply], reader: Reader, opened: Pass | None = None) -> None:
        self._gateway = gateway
        self._reader = reader
        self._opened = opened
        self._latest: Callable[[], Pass | None] = lambda: None

    @property
    def stream_id(self) -> str:
        return self.position.stream_id

    @property
    def position(self) -> Cursor:
        """The last record that the user was given; seq 0 before the first."""
        position = self._reader.position
        assert position is not None, "a stream is handed out once it has an id"
        return position

    @property
    def cursor(self) -> str:
        """The position as a token: what to save, and to hand to `resume`."""
        return self.position.encode()

    @property
    def outcome(self) -> Record | None:
        """The terminal record, once the user was given it.

        None after the end of a stream that was resumed from its terminal record: then `state` tells.
        """
        return self._reader.outcome

    @property
    def waiting(self) -> int:
        """How many records have come and were not given to the user yet."""
        return self._reader.waiting

    def _begin(self, new: Callable[[], Pass]) -> Pass:
        """A loop over what is left; one that still runs is stopped by it, with a RuntimeError."""
        reading, self._opened = self._opened, None
        if reading is None or reading.closed:
            self.close()
            reading = new()
        # Not held here: only the loop does, so that its connection ends when it is left.
        self._latest = weakref.ref(reading)
        return reading

    def close(self) -> None:
        """Close its connection, if there is one; the generation goes on, and so does a next loop over this stream."""
        for reading in (self._opened, self._latest()):
            if reading is not None:
                reading.close()
        self._opened = None
        self._reader.left()

    def ack(self, seq: int | None = None) -> Reply:
        """Everything up to `seq` (the position, when left out) is safe and may be dropped.  The state."""
        return self._gateway.ack(self.stream_id, self.position.seq if seq is None else seq)

    def cancel(self) -> Reply:
        """Stop the generation."""
        return self._gateway.cancel(self.stream_id)

    def state(self) -> Reply:
        """Its status and counters."""
        return self._gateway.state(self.stream_id)

    def snapshot(self) -> Reply:
        """The whole answer so far, and the cursor to go on from."""
        return self._gateway.snapshot(self.stream_id)


def creation(
    prompt: str | None, messages: Sequence[dict[str, Any]] | None, idempotency_key: str, fields: dict[str, Any]
) -> Creation:
    """What to ask for; fields that are None are left out.  Raises ValueError for neither or both of the first two."""
    if (prompt is None) == (messages is None):
        raise ValueError("give either `prompt` (text) or `messages` (a list)")
    asked = {"prompt": prompt, "messages": list(messages) if messages is not None else None, **fields}
    body = orjson.dumps({name: value for name, value in asked.items() if value is not None})
    return Creation(body, idempotency_key)


# Libraries word these for their developers.
_PLAIN = {
    "ClientPayloadError": "the connection broke in the middle",
    "IncompleteRead": "the connection broke in the middle",
    "ServerDisconnectedError": "the connection was closed without an answer",
    "RemoteDisconnected": "the connection was closed without an answer",
}

# What is said of a port that answers, and not as HTTP/1.1 or not as TLS does.
GRPC_THERE = "what listens there speaks HTTP/2 alone, as a gRPC port does"
NO_HTTP_THERE = "what listens there does not speak HTTP"
TLS_THERE = "what listens there speaks TLS"
NO_TLS_THERE = "what listens there speaks no TLS"
CERTIFICATE = "its certificate is not trusted"
# The first bytes of what a server sends unasked in HTTP/2 (RFC 9113, section 4.1: a length, whose upper byte is 0, and
# after two more the type, SETTINGS), and of a TLS alert (RFC 8446, section 5.1).
_SETTINGS = re.compile("\x00..\x04", re.DOTALL)
_ALERT = "\x15\x03"
# OpenSSL's words for an answer that is no TLS, by its version.
_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST"})


def why(error: Exception) -> str:
    """A connection's failure in a few words for people."""
    if (plain := _PLAIN.get(type(error).__name__)) is not None:
        return plain
    cause = getattr(error, "os_error", error)
    if isinstance(cause, BadStatusLine):
        if _SETTINGS.match(str(cause)):
            return GRPC_THERE
        return TLS_THERE if str(cause).startswith(_ALERT) else NO_HTTP_THERE
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"{CERTIFICATE}: {cause.verify_message}"
    if isinstance(cause, ssl.SSLError) and cause.reason in _NO_TLS:
        return NO_TLS_THERE
    if isinstance(cause, ConnectionRefusedError):
        return "connection refused"
    if isinstance(cause, ConnectionError):
        return "the connection was reset"
    if isinstance(cause, TimeoutError):
        return "no answer in time"
    if isinstance(cause, socket.gaierror):
        return "the host name is not known"
    return str(cause) or type(cause).__name__
