"""A token is read exactly or refused: never half, never as something else."""

from __future__ import annotations

from base64 import urlsafe_b64encode

import pytest

from midstream.cursor import Cursor, decode, decode_last_event_id
from midstream.errors import BadCursor
from midstream.wire import MAX_CURSOR_CHARS, MAX_SEQ


def token(json: str | bytes) -> str:
    """base64url of this JSON, without padding."""
    raw = json if isinstance(json, bytes) else json.encode()
    return urlsafe_b64encode(raw).rstrip(b"=").decode()


def test_encoded_as_the_protocol_says() -> None:
    """Writers of SDKs build it by hand: the shape is public."""
    assert Cursor("abc", 151).encode() == token('{"v":1,"s":"abc","l":151}')


@pytest.mark.parametrize("seq", [0, 1, 151, MAX_SEQ])
@pytest.mark.parametrize("stream_id", ["a", "ab", "abc", "a" * 64, "ü:{b}"])
def test_round_trip(stream_id: str, seq: int) -> None:
    """With and without padding."""
    encoded = Cursor(stream_id, seq).encode()
    assert "=" not in encoded
    assert decode(encoded) == (stream_id, seq)
    assert decode(encoded + "=" * (-len(encoded) % 4)) == (stream_id, seq)


def test_unknown_fields_are_ignored() -> None:
    """A later version may say more."""
    assert decode(token('{"v":1,"s":"abc","l":7,"more":{"x":[1]}}')) == ("abc", 7)


MALFORMED = [
    "",
    " ",
    "=",
    "garbage",
    "5-",
    "1e3",
    "+5",
    " 5",
    "5\n",
    "٥",
    "%",
    "a" * 100_000,
    "-1",
    "1.0",
    "null",
    "start",
    "12345678901234567",
    "9" * 20,
    token("[]"),
    token("7"),
    token("null"),
    token("{"),
    token(b"\xff\xfe"),
    token("[" * 3000),
    token('{"v":99}'),
    token('{"v":1,"s":"x"}'),
    token('{"v":1,"l":1}'),
    token('{"s":"x","l":1}'),
    token('{"v":"1","s":"x","l":1}'),
    token('{"v":1.0,"s":"x","l":1}'),
    token('{"v":true,"s":"x","l":1}'),
    token('{"v":2,"s":"x","l":1}'),
    token('{"v":1,"s":5,"l":1}'),
    token('{"v":1,"s":null,"l":1}'),
    token('{"v":1,"s":"","l":1}'),
    token('{"v":1,"s":"\\ud800","l":1}'),
    token('{"v":1,"s":"x","l":-1}'),
    token('{"v":1,"s":"x","l":1.0}'),
    token('{"v":1,"s":"x","l":1e3}'),
    token('{"v":1,"s":"x","l":true}'),
    token('{"v":1,"s":"x","l":null}'),
    token('{"v":1,"s":"x","l":"1"}'),
    token('{"v":1,"s":"x","l":NaN}'),
    token(f'{{"v":1,"s":"x","l":{MAX_SEQ + 1}}}'),
    token('{"v":1,"s":"x","l":1' + "0" * 400 + "}"),
    token('{"v":1,"s":"x","l":1} {}'),
    token('{"v":1,"s":"' + "x" * MAX_CURSOR_CHARS + '","l":1}'),
    token('{"v":1,"s":"x","l":1}') + "===",
    token('{"v":1,"s":"x","l":1}') + "\n",
    "+" + token('{"v":1,"s":"x","l":1}'),
]


@pytest.mark.parametrize("malformed", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_token_is_a_bad_cursor(malformed: str) -> None:
    """Nothing else is raised, and the reason is said."""
    for read in (decode, lambda value: decode_last_event_id(value, "abc")):
        with pytest.raises(BadCursor) as bad:
            read(malformed)
        assert bad.value.detail


@pytest.mark.parametrize("bare", ["5", "0", "640"])
def test_bare_integer_is_no_cursor(bare: str) -> None:
    """Only a `Last-Event-ID` may be one: alone it does not say of which stream."""
    with pytest.raises(BadCursor):
        decode(bare)


@pytest.mark.parametrize(("value", "seq"), [("0", 0), ("5", 5), ("151", 151), ("0007", 7), (str(MAX_SEQ), MAX_SEQ)])
def test_last_event_id_may_be_the_bare_seq(value: str, seq: int) -> None:
    """It is what the SSE `id:` line carries."""
    assert decode_last_event_id(value, "abc") == ("abc", seq)


def test_last_event_id_may_be_a_token_of_any_stream() -> None:
    """Whether it is of the right one is not for the decoder to say."""
    assert decode_last_event_id(Cursor("other", 3).encode(), "abc") == ("other", 3)


def test_last_event_id_beyond_the_largest_seq_is_refused() -> None:
    """Sixteen digits can exceed 2^53 - 1."""
    with pytest.raises(BadCursor):
        decode_last_event_id(str(MAX_SEQ + 1), "abc")
