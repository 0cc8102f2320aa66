"""What is said on a WebSocket, message by message, without the socket (PROTOCOL.md, "WebSocket")."""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson
from starlette.types import Message

from midstream import cursor
from midstream.cursor import Cursor
from midstream.errors import (
    BadCursor,
    BadRequest,
    Busy,
    MidstreamError,
    ProducerFailed,
    TooLarge,
    UnsupportedMediaType,
)
from midstream.records import Frame, Page
from midstream.transports.http import error_body
from midstream.wire import HTTP_STATUS, MAX_REF_CHARS

# A page of more records than this goes as one JSON array: its reader is behind, and better served by few messages.
_APART = 16


class Where(NamedTuple):
    """What is to be followed: a stream, and a position that may have been given out for another one."""

    stream_id: str
    at: Cursor


class Envelope:
    """Makes a page into messages, for one reader: each record with his `ref` and his stream's id around it."""

    def __init__(self, ref: str | None) -> None:
        self._ref = ref
        self.alive = self._head = self._first_head = b""

    def address(self, stream_id: str, heartbeat: float) -> None:
        """Before the first page.  Whatever is said first tells the heartbeat, in seconds."""
        where = b'"ref":%b,"stream_id":%b' % (orjson.dumps(self._ref), orjson.dumps(stream_id))
        self._head = b'{"type":"record",%b,"event":"' % where
        self._first_head = b'{"type":"record",%b,"heartbeat":%g,"event":"' % (where, heartbeat)
        self.alive = b'{"type":"heartbeat",%b,"heartbeat":%g}' % (where, heartbeat)

    def messages(self, page: Page) -> list[bytes]:
        frames = page.frames
        if not frames:
            return [self.alive]
        head, self._first_head = self._first_head or self._head, b""
        messages = [_enveloped(head, frames[0])]
        if len(frames) > 1:
            messages += [_enveloped(self._head, frame) for frame in frames[1:]]
            if len(frames) > _APART:
                return [b"[%b]" % b",".join(messages)]
        return messages


def _enveloped(head: bytes, frame: Frame) -> bytes:
    """The record as a message, its data byte for byte as it was appended (JSON of ours holds no line feed)."""
    _, event, data, _, _ = frame.split(b"\n")
    return b'%b%b","data":%b}' % (head, event[7:], data[6:])


def error_message(error: MidstreamError, ref: str | None) -> bytes:
    """An error as a message: what its HTTP body would say, under the names of this transport."""
    body = error_body(error)
    code = error.failure if isinstance(error, ProducerFailed) else error.code
    # The status is for clients that meet a code they do not know.
    status = HTTP_STATUS.get(code, 502 if isinstance(error, ProducerFailed) else 500)
    told: dict[str, Any] = {"type": "error", "ref": ref, "code": code, "status": status, "detail": str(error)}
    del body["error"]
    if isinstance(error, Busy):
        body["retry_after"] = error.retry_after
    return orjson.dumps(told | body)


def fields_of(message: Message, max_body: int) -> dict[str, Any]:
    """A message of the client's.  Raises BadRequest, TooLarge, UnsupportedMediaType."""
    text = message.get("text")
    if text is None:
        raise UnsupportedMediaType("a message is JSON text; this one was binary")
    if len(text) > max_body:
        raise TooLarge(f"the message is over {max_body} bytes; shorten it, or raise --max-body")
    try:
        fields = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the message is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadRequest("the message must be a JSON object")
    return fields


def ref_of(fields: dict[str, Any]) -> str | None:
    """The client's own name for what the message begins or ends.  Raises BadRequest."""
    ref = fields.get("ref")
    if ref is None or (isinstance(ref, str) and 1 <= len(ref) <= MAX_REF_CHARS):
        return ref
    raise BadRequest(f"'ref' must be text of 1 to {MAX_REF_CHARS} characters")


def stream_id_of(fields: dict[str, Any]) -> str:
    """Raises BadRequest."""
    stream_id = fields.get("stream_id")
    if not isinstance(stream_id, str):
        raise BadRequest("'stream_id' must be text")
    return stream_id


def where_of(fields: dict[str, Any]) -> Where:
    """What a resume names.  Raises BadCursor, BadRequest."""
    token = fields.get("cursor")
    if not isinstance(token, str):
        raise BadCursor("'cursor' must be a cursor, as text")
    return Where(at=cursor.decode(token), stream_id=stream_id_of(fields))
