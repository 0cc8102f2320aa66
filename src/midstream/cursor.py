"""The cursor: a reader's claim "I have dispatched everything up to seq N of stream S".

The token is base64url (RFC 4648, section 5; padding accepted) of `{"v":1,"s":"<stream_id>","l":N}`.  It is opaque
to users, public for SDK writers, unsigned, and holds no secret: knowing a stream id grants nothing (I9), and a
position somebody made up can only harm himself.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import NamedTuple

import orjson

from midstream.errors import BadCursor
from midstream.wire import CURSOR_VERSION, MAX_CURSOR_CHARS, MAX_SEQ

_ALPHABET = re.compile(r"[A-Za-z0-9_-]+={0,2}", re.ASCII)
# At most 16 digits: longer ones exceed MAX_SEQ, and int() of a huge string is quadratic.
_INTEGER = re.compile(r"[0-9]{1,16}", re.ASCII)


class Cursor(NamedTuple):
    """Stream id and the last seq its reader has dispatched (0: nothing yet)."""

    stream_id: str
    seq: int

    def encode(self) -> str:
        """The token, without padding."""
        raw = orjson.dumps({"v": CURSOR_VERSION, "s": self.stream_id, "l": self.seq})
        return urlsafe_b64encode(raw).rstrip(b"=").decode()


def decode(token: str) -> Cursor:
    """Read a token.  Raises BadCursor saying what is wrong with it; unknown fields are ignored."""
    if len(token) > MAX_CURSOR_CHARS:
        raise BadCursor(f"longer than {MAX_CURSOR_CHARS} characters")
    if not _ALPHABET.fullmatch(token):
        raise BadCursor("empty" if not token else "not base64url")
    try:
        fields = orjson.loads(urlsafe_b64decode(token.rstrip("=") + "=" * (-len(token.rstrip("=")) % 4)))
    except ValueError:
        raise BadCursor("not base64url of JSON") from None
    if not isinstance(fields, dict):
        raise BadCursor("not a JSON object")
    version, stream_id, seq = fields.get("v"), fields.get("s"), fields.get("l")
    if type(version) is not int or version != CURSOR_VERSION:
        raise BadCursor(f"version must be {CURSOR_VERSION}")
    if not isinstance(stream_id, str) or not stream_id:
        raise BadCursor("'s' must be a stream id")
    if type(seq) is not int or not 0 <= seq <= MAX_SEQ:
        raise BadCursor("'l' must be an integer from 0 to 2^53 - 1")
    return Cursor(stream_id, seq)


def decode_last_event_id(value: str, stream_id: str) -> Cursor:
    """Read a `Last-Event-ID`: a bare integer (what the SSE `id:` line carries), or a cursor token."""
    if _INTEGER.fullmatch(value):
        seq = int(value)
        if seq > MAX_SEQ:
            raise BadCursor("beyond 2^53 - 1")
        return Cursor(stream_id, seq)
    return decode(value)
