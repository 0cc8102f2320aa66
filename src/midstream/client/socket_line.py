"""A line over a WebSocket (PROTOCOL.md, "WebSocket"), which follows one stream."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import orjson
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.sync.client import ClientConnection, connect

from midstream.client.answers import Answer
from midstream.client.lines import Peer
from midstream.client.steps import Creation, Request
from midstream.codec import native
from midstream.cursor import Cursor
from midstream.wire import EXPIRED, H_HEARTBEAT, H_STREAM_ID, WS_PATH

_STREAM = "text/event-stream"
_PING = b": ping\n"


class SocketLine:
    """One socket; what it says after the answer is given on as server-sent events."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._opened = ExitStack()
        self._socket: ClientConnection | None = None
        self._first = b""

    def open(self, request: Request) -> Answer:
        address = self._peer.address
        try:
            socket = connect(
                f"{'wss' if address.secure else 'ws'}://{address.authority}{address.prefix}{WS_PATH}",
                additional_headers=self._peer.authorization(),
                ssl=self._peer.tls,
                compression=None,
                proxy=None,
                open_timeout=self._peer.timeout,
                close_timeout=0.1,
                ping_interval=None,
                max_size=None,
            )
            self._socket = self._opened.enter_context(socket)
            socket.send(orjson.dumps(_message(request.of)), text=True)
            return self._answer(_said(socket.recv(self._peer.timeout)))
        except InvalidStatus as refused:
            headers = {name.lower(): value for name, value in refused.response.headers.raw_items()}
            return Answer(refused.response.status_code, headers, bytes(refused.response.body or b""))
        except (ConnectionClosed, InvalidHandshake, InvalidURI) as error:
            raise ConnectionResetError(str(error)) from error

    def _answer(self, said: list[dict[str, Any]]) -> Answer:
        """The first message as the answer it would have been over HTTP."""
        first = said[0]
        if first["type"] == "error":
            return _refusal(first)
        if first["type"] == "journal_state":
            return Answer(204)
        self._first = b"".join(map(_event, said))
        heartbeat = {H_HEARTBEAT.lower(): str(first["heartbeat"])} if "heartbeat" in first else {}
        return Answer(200, {"content-type": _STREAM, H_STREAM_ID.lower(): first["stream_id"], **heartbeat})

    def read(self, within: float) -> bytes:
        if self._first:
            data, self._first = self._first, b""
            return data
        assert self._socket is not None
        try:
            said = _said(self._socket.recv(within))
        except ConnectionClosed:
            return b""
        return b"".join(map(_event, said)) if said[0]["type"] != "journal_state" else b""

    def close(self) -> None:
        self._socket = None
        self._opened.close()


def _message(asked: Creation | Cursor | None) -> dict[str, Any]:
    if isinstance(asked, Creation):
        body: dict[str, Any] = orjson.loads(asked.body)
        return body | {"type": "generate", "idempotency_key": asked.idempotency_key}
    assert asked is not None
    return {"type": "resume", "stream_id": asked.stream_id, "cursor": asked.encode()}


def _said(message: str | bytes) -> list[dict[str, Any]]:
    """What a message holds, one by one.  Raises ConnectionError for what no gateway of ours says."""
    try:
        said = orjson.loads(message)
        several = said if isinstance(said, list) else [said]
        if several and all(isinstance(one, dict) and isinstance(one.get("type"), str) for one in several):
            return several
    except orjson.JSONDecodeError:
        pass
    raise ConnectionResetError("the socket said something else than messages of this protocol")


def _event(said: dict[str, Any]) -> bytes:
    """A message as SSE has it.  Raises ConnectionError for an error that another connection may mend."""
    if said["type"] == "record":
        data = said["data"]
        return native.frame(data["seq"], said["event"], data)
    if said["type"] == "error":
        refusal = _refusal(said)
        if refusal.worth_retrying:
            raise ConnectionResetError(str(said.get("detail")))
        return b"event: %b\ndata: %b\n\n" % (EXPIRED.encode(), refusal.body)
    return _PING


def _refusal(said: dict[str, Any]) -> Answer:
    """An error as the answer it would have been over HTTP."""
    body = {"error": said.get("code"), **{name: value for name, value in said.items() if name not in _ENVELOPE}}
    wait = said.get("retry_after")
    headers = {"retry-after": str(wait)} if isinstance(wait, int) else {}
    status = said.get("status")
    return Answer(status if isinstance(status, int) else 500, headers, orjson.dumps(body))


_ENVELOPE = frozenset({"type", "ref", "code", "status", "retry_after"})
