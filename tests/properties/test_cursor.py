"""Any token is read exactly, or is a BadCursor."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.cursor import Cursor, decode, decode_last_event_id
from midstream.errors import BadCursor
from midstream.wire import MAX_SEQ

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
seqs = st.integers(0, MAX_SEQ)
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | texts
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4))
fields = st.fixed_dictionaries(
    {}, optional={"v": st.just(1) | values, "s": st.just("abc") | values, "l": seqs | values, "x": values}
)


def token(json: Any) -> str:
    return urlsafe_b64encode(orjson.dumps(json)).rstrip(b"=").decode()


@given(texts.filter(bool), seqs, st.booleans())
def test_every_position_round_trips(stream_id: str, seq: int, padded: bool) -> None:
    """Whatever the id, with and without padding, and as a `Last-Event-ID`."""
    encoded = Cursor(stream_id, seq).encode()
    if padded:
        encoded += "=" * (-len(encoded) % 4)
    assert decode(encoded) == decode_last_event_id(encoded, "other") == (stream_id, seq)


@given(st.text(max_size=40) | st.text("abcdefgXYZ0189-_=", max_size=40) | values.map(token))
def test_anything_else_is_a_bad_cursor(value: str) -> None:
    """Nothing is raised but BadCursor, and nothing is guessed."""
    with pytest.raises(BadCursor):
        decode(value)
    if not (value.isascii() and value.isdigit() and len(value) <= 16):
        with pytest.raises(BadCursor):
            decode_last_event_id(value, "abc")


@given(fields)
def test_every_field_counts(json: dict[str, Any]) -> None:
    """A token is good exactly if each field is there, of its type and in its range."""
    good = (
        (type(json.get("v")), json.get("v")) == (int, 1)
        and isinstance(json.get("s"), str)
        and json["s"] != ""
        and type(json.get("l")) is int
        and 0 <= json["l"] <= MAX_SEQ
    )
    if good:
        assert decode(token(json)) == (json["s"], json["l"])
        return
    with pytest.raises(BadCursor):
        decode(token(json))


@given(texts.filter(bool), seqs, st.data())
def test_token_that_was_cut_is_refused(stream_id: str, seq: int, data: st.DataObject) -> None:
    """A link that lost its end never leads to another position."""
    encoded = Cursor(stream_id, seq).encode()
    kept = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(BadCursor):
        decode(encoded[:kept])
