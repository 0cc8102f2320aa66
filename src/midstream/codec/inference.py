"""Records as messages of proto/inference.proto, in protobuf's binary form and in its JSON form.

A message is a function of its record's frame and of nothing else, so that what was encoded for one reader serves all.
The binary form is made by hand (protobuf.dev, "Encoding"): three fields do not need an object, and a test compares with
what the generated class writes.

Only the text of the first choice is a message's `token`.  A chunk of another choice, of reasoning or of a tool call has
its message too, with an empty token: the index counts chunks, on every wire alike.
"""

from __future__ import annotations

from typing import Any

import orjson

from midstream.records import Frame, Record

# What is kept encoded: this many messages of each form, none of a frame longer than this; about 6 MiB at most.
_KEPT = 4096
_KEPT_BYTES = 512
_MESSAGES: dict[Frame, bytes] = {}
_JSON: dict[Frame, bytes] = {}
# Between the id line of a chunk's frame, of at most 20 bytes, and its JSON.
_TOKEN_DATA = b"\nevent: token\ndata: "
_TOKEN_DATA_UPTO = 20 + len(_TOKEN_DATA)


def index_of(seq: int) -> int:
    """The `token_index` of the record with this seq: `start` is 1, and the first chunk 2."""
    return seq - 2


def seq_of(token_index: int) -> int:
    """The seq of the record with this `token_index`."""
    return token_index + 2


def position_of(resume_from_token: int) -> int:
    """The position of a reader who wants this chunk next: it has seen all before it.  Of 0 it is that of `start`."""
    return resume_from_token + 1


def resume_from(position: int) -> int:
    """The chunk that a reader at this position wants next."""
    return max(position - 1, 0)


def message(frame: Frame) -> bytes:
    """A chunk's, or `done`'s, as a GenerateResponse."""
    kept = _MESSAGES.get(frame)
    return kept if kept is not None else _keep(_MESSAGES, frame, _message(frame))


def message_json(frame: Frame) -> bytes:
    """The same in protobuf's JSON form; fields that have their default are left out, as in the binary form."""
    kept = _JSON.get(frame)
    return kept if kept is not None else _keep(_JSON, frame, _json(frame))


def _keep(messages: dict[Frame, bytes], frame: Frame, made: bytes) -> bytes:
    """For its other readers, who are mostly at the same place.  When it is full all is forgotten at once, which costs a
    tenth of finding out what was used least."""
    if len(frame) <= _KEPT_BYTES:
        if len(messages) >= _KEPT:
            messages.clear()
        messages[frame] = made
    return made


def _message(frame: Frame) -> bytes:
    text, index, final = _fields(frame)
    raw = text.encode()
    encoded = b"\x0a%b%b" % (_varint(len(raw)), raw) if raw else b""
    if index:
        encoded += b"\x10" + _varint(index)
    return encoded + b"\x18\x01" if final else encoded


def _json(frame: Frame) -> bytes:
    text, index, final = _fields(frame)
    fields: dict[str, Any] = {}
    if text:
        fields["token"] = text
    if index:
        fields["tokenIndex"] = index
    if final:
        fields["isFinal"] = True
    return orjson.dumps(fields)


def _fields(frame: Frame) -> tuple[str, int, bool]:
    """Token, index, whether it is the final message."""
    at = frame.find(_TOKEN_DATA, 4, _TOKEN_DATA_UPTO)
    if at < 0:
        return "", index_of(Record.of(frame).seq), True
    data = orjson.loads(frame[at + len(_TOKEN_DATA) : -2])
    return ("" if data.get("choice") else data["delta"]), index_of(data["seq"]), False


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first (protobuf.dev, "Base 128 Varints")."""
    if value < 0x80:
        return b"%c" % value
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
