"""What the SSE decoder says does not depend on where its bytes were cut, and is what the standard says."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.codec.sse import Decoder, Event

Outcome = tuple[list[Event], str, int | None, bytes]

TEXT = "né✅你🚀"
STREAMS = {
    "characters of every width": f'data: {{"content":"{TEXT}"}}\n\ndata: [DONE]\n\n'.encode(),
    "CRLF": b"event: token\r\nid: 1\r\ndata: a\r\ndata: b\r\n\r\ndata: c\r\n\r\n",
    "CR": b"event: token\rid: 1\rdata: a\rdata: b\r\rdata: c\r\r",
    "mixed line ends": b"data: a\r\n\rdata: b\n\r\ndata: c\r\r\n\ndata: d\n\n\n\r\n\r",
    "byte order marks": b"\xef\xbb\xbfdata: \xef\xbb\xbfa\n\n\xef\xbb\xbfdata: b\n\ndata: c\n\n",
    "comments and fields": b": c\n\n:\n\n: c\nfoo: bar\nid: 3\n\nretry: 20\nid: 4\ndata\n: d\n\nevent: ping\ndata:\n\n",
    "bare lines": b"retry: 2137\nid: 1\nevent: start\ndata: {}\n\n: ping\n: ping\nid: 2\ndata: x\n\n: ping\n",
    "cut off": b"data: a\n\nid: 2\ndata: b\n",
    "cut off in a character": f"data: a\n\ndata: {TEXT}".encode()[:-2],
}


def outcome(pieces: list[bytes]) -> Outcome:
    decoder = Decoder()
    events = [event for piece in pieces for event in decoder.feed(piece)]
    rest = decoder.close()
    return events, decoder.last_event_id, decoder.retry, rest


def by_the_book(stream: bytes) -> tuple[list[Event], str]:
    """WHATWG HTML, "Interpreting an event stream", a line at a time over all of it."""
    lines = re.split(rb"\r\n|\n|\r", stream.removeprefix(b"\xef\xbb\xbf"))[:-1]
    events, last_id, data, kind, block_id, block_retry = [], "", b"", b"", None, None
    for line in lines:
        name, _, value = line.partition(b":")
        value = value[1:] if value[:1] == b" " else value
        match name:
            case b"" if not line:
                last_id = last_id if block_id is None else block_id
                if data:
                    name_of = kind.decode(errors="replace") or "message"
                    events.append(Event(name_of, data[:-1], block_id, block_retry))
                data, kind, block_id, block_retry = b"", b"", None, None
            case b"data":
                data += value + b"\n"
            case b"event":
                kind = value
            case b"id" if b"\0" not in value:
                block_id = value.decode(errors="replace")
            case b"retry" if re.fullmatch(rb"[0-9]+", value):
                block_retry = int(value)
    return events, last_id


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_every_cut_in_two_gives_the_same_events(stream: bytes) -> None:
    """At every byte, as if the network had cut there."""
    whole = outcome([stream])
    assert whole[:2] == by_the_book(stream)
    for at in range(len(stream) + 1):
        assert outcome([stream[:at], stream[at:]]) == whole


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_byte_by_byte_gives_the_same_events(stream: bytes) -> None:
    """The most cuts there can be."""
    assert outcome([bytes([byte]) for byte in stream]) == outcome([stream])


def test_characters_survive_every_cut() -> None:
    """No cut turns half a character into U+FFFD."""
    stream = STREAMS["characters of every width"]
    for at in range(len(stream) + 1):
        events = outcome([stream[:at], stream[at:]])[0]
        assert json.loads(events[0].data) == {"content": TEXT}


FRAGMENTS = st.sampled_from(
    [
        *(b"\n", b"\n", b"\n\n", b"\r", b"\r\n", b":", b" ", b"\0", b"\xff", "é🚀".encode(), b"\xef\xbb\xbf", b"\xef"),
        *(
            b"data",
            b"data: x",
            b"data:y",
            b"id: 1",
            b"id",
            b"id: \0",
            b"event: e",
            b"retry: 7",
            b"retry: x",
            b": ping\n",
        ),
    ]
)


@st.composite
def cut_streams(draw: st.DrawFn) -> list[bytes]:
    stream = b"".join(draw(st.lists(st.one_of(FRAGMENTS, st.binary(max_size=3)), max_size=30)))
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    return [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


@given(cut_streams())
def test_any_stream_in_any_pieces_is_read_by_the_book(pieces: list[bytes]) -> None:
    """Events, ids and what was cut off depend on the bytes alone."""
    stream = b"".join(pieces)
    whole = outcome([stream])
    assert outcome(pieces) == whole
    assert whole[:2] == by_the_book(stream)
