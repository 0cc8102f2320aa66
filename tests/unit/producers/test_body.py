"""The body of an upstream's answer is told by its bytes, however they are cut or compressed."""

import gzip
import json
import zlib

import pytest

from midstream.codec.openai import ChatReader
from midstream.errors import ProducerFailed
from midstream.producers.body import Body, Inflate
from midstream.records import Chunk, Finish
from midstream.testing.upstream import FAULTS, Script, chat_answer

STREAM = Script(chat_answer("né✅", " you🚀")).body()
COMPLETION = json.dumps({"choices": [{"message": {"content": "né🚀"}, "finish_reason": "stop"}]}).encode()
DEFLATE_RAW = zlib.compressobj(wbits=-15)

BODIES = {
    "stream": (STREAM, ""),
    "stream after a byte order mark": (b"\xef\xbb\xbf" + STREAM, ""),
    "stream after white space": (b"\r\n \n" + STREAM, ""),
    "completion": (COMPLETION, ""),
    "completion after signs of life": (b"\xef\xbb\xbf\n\n  " + COMPLETION + b"\n", ""),
    "page": (b"\n<!doctype html><p>" + STREAM, ""),
    "words": (b"Bad gateway", ""),
    "nothing": (b"", ""),
    "half a byte order mark": (b"\xef\xbb", ""),
    "gzip": (gzip.compress(STREAM), "gzip"),
    "gzip in two members": (gzip.compress(STREAM[:90]) + gzip.compress(STREAM[90:]), "gzip"),
    "gzip and padding": (gzip.compress(STREAM) + b"\0\0", "gzip"),
    "deflate": (zlib.compress(STREAM), "deflate"),
    "deflate without a header": (DEFLATE_RAW.compress(STREAM) + DEFLATE_RAW.flush(), "deflate"),
    "gzip cut off": (gzip.compress(STREAM)[:-40], "gzip"),
    "gzip broken": (b"\x1f\x8b\x08\x00" + b"\xff" * 60, "gzip"),
    **{name: (script.body(), "") for name, script in FAULTS.items() if 0 < len(script.body()) < 4000},
}


def told(pieces: list[bytes], encoding: str) -> tuple[list[Chunk], Finish | tuple[str, str]]:
    """The chunks, and how it ended."""
    body = Body(ChatReader(), Inflate(encoding) if encoding else None, "text/plain", 10_000)
    chunks: list[Chunk] = []
    try:
        for piece in pieces:
            chunks += body.take(piece)
            if body.failure is not None:
                raise body.failure
            if body.done:
                break
        last, finish = body.end()
    except ProducerFailed as failure:
        return chunks, (failure.failure, failure.detail)
    return chunks + last, finish


@pytest.mark.parametrize(("body", "encoding"), BODIES.values(), ids=BODIES)
def test_every_cut_tells_the_same(body: bytes, encoding: str) -> None:
    """In two at each byte, and in as many pieces as there are bytes."""
    whole = told([body], encoding)
    for at in range(0, len(body), 1 + len(body) // 400):
        assert told([body[:at], body[at:]], encoding) == whole, at
    assert told([body[at : at + 1] for at in range(len(body))], encoding) == whole


@pytest.mark.parametrize(
    "name", [name for name in BODIES if name.startswith(("stream", "gzip in", "gzip and", "defl"))]
)
def test_what_stands_before_or_around_a_stream_takes_nothing_from_it(name: str) -> None:
    """Marks, white space, compression of three kinds."""
    chunks, end = told([BODIES[name][0]], BODIES[name][1])
    assert ("".join(chunk.delta for chunk in chunks), end) == ("né✅ you🚀", Finish("stop"))


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("page", "upstream_malformed"),
        ("words", "upstream_malformed"),
        ("nothing", "upstream_truncated"),
        ("half a byte order mark", "upstream_truncated"),
        ("gzip cut off", "upstream_truncated"),
        ("gzip broken", "upstream_malformed"),
    ],
)
def test_what_is_no_answer_has_a_name(name: str, code: str) -> None:
    """Each its own."""
    _, end = told([BODIES[name][0]], BODIES[name][1])
    assert isinstance(end, tuple)
    assert end[0] == code


@pytest.mark.parametrize(
    "body", [b'{"x":"' + b"x" * 20_000, b"data: " + b"x" * 20_000, STREAM + b"data: " + b"x" * 20_000 + b"\n\n"]
)
@pytest.mark.parametrize("size", [1, 1000, 10**6])
def test_more_than_the_cap_is_an_error_by_name(body: bytes, size: int) -> None:
    """For a completion and for an event, in any pieces; but not after [DONE]."""
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    _, end = told(pieces, "")
    if body.startswith(STREAM) and size < 10**6:
        assert isinstance(end, Finish)
    else:
        assert isinstance(end, tuple)
        assert end[0] == "upstream_too_large"


def test_inflation_is_made_in_bounded_steps() -> None:
    """As it is asked for: a thousandfold bomb is never in memory."""
    steps = Inflate("gzip").feed(gzip.compress(b" " * 2**26))
    assert [len(next(steps)) for _ in range(3)] == [65_536] * 3


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, br"])
def test_an_unknown_encoding_is_named(encoding: str) -> None:
    """It was not asked for."""
    with pytest.raises(ProducerFailed, match=encoding):
        Inflate(encoding)
