"""Records as messages of the gRPC service: what is made by hand is what the generated class would write."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st

from midstream.codec import inference, native
from midstream.codec.inference import index_of, message, message_json, position_of, resume_from, seq_of
from midstream.codec.pb import inference_pb2 as pb
from midstream.records import Chunk, Finish
from midstream.wire import MAX_FIELD_BYTES

# A message's index is an int32; `start` has none.
SEQS = st.integers(2, 2**31 + 1)
CHUNKS = st.builds(
    Chunk,
    st.text(st.characters(exclude_categories=["Cs"])),
    st.none() | st.fixed_dictionaries({}, optional={"choice": st.integers(1, 3), "reasoning": st.text(min_size=1)}),
)


@given(SEQS, CHUNKS)
def test_a_chunk_is_the_message_that_protobuf_writes(seq: int, chunk: Chunk) -> None:
    """Byte for byte, and in JSON value for value."""
    frame = native.token(seq, Chunk(chunk.delta, chunk.more or None))
    text = "" if (chunk.more or {}).get("choice") else chunk.delta
    expected = pb.GenerateResponse(token=text, token_index=seq - 2)
    assert message(frame) == expected.SerializeToString()
    assert json.loads(message_json(frame)) == json_format.MessageToDict(expected)


@given(SEQS)
def test_done_is_a_final_message_of_its_own(seq: int) -> None:
    """Without a token, at the index that the next chunk would have had."""
    frame = native.done(seq, Finish("stop", {"total_tokens": 3}))
    expected = pb.GenerateResponse(token_index=seq - 2, is_final=True)
    assert message(frame) == expected.SerializeToString()
    assert json.loads(message_json(frame)) == json_format.MessageToDict(expected)


@pytest.mark.parametrize("size", [1, 127, 128, 511, 16_383, 16_384, MAX_FIELD_BYTES])
def test_long_text_is_written_whole(size: int) -> None:
    """Around the sizes at which the length takes one byte more, and where nothing is kept any more."""
    frame = native.token(5, Chunk("x" * size))
    assert pb.GenerateResponse.FromString(message(frame)).token == "x" * size
    assert json.loads(message_json(frame))["token"] == "x" * size


def test_text_that_looks_like_framing_stays_text() -> None:
    """What the text holds decides nothing about what the record is."""
    forged = '\nevent: done\ndata: {"seq":9}\n\n'
    told = pb.GenerateResponse.FromString(message(native.token(2, Chunk(forged))))
    assert (told.token, told.is_final) == (forged, False)


def test_what_is_encoded_for_one_reader_serves_all() -> None:
    """The same object, not one more like it."""
    frame = native.token(77, Chunk(" shared"))
    assert message(frame) is message(bytes(bytearray(frame)))
    assert message_json(frame) is message_json(bytes(bytearray(frame)))


@pytest.mark.parametrize(("encode", "kept"), [(message, inference._MESSAGES), (message_json, inference._JSON)])
def test_what_is_kept_is_bounded(encode: Callable[[bytes], bytes], kept: dict[bytes, bytes]) -> None:
    """By number, and by size: a long frame is not kept."""
    kept.clear()
    for seq in range(2, 10_000):
        encode(native.token(seq, Chunk("x")))
        assert 0 < len(kept) <= inference._KEPT
    kept.clear()
    encode(native.token(2, Chunk("x" * 1000)))
    assert not kept


@given(st.integers(0, 2**31 - 1))
def test_first_wanted_and_last_seen_are_the_same_place(index: int) -> None:
    """Who has token K asks for K + 1, and that is the position of a reader who has its record."""
    assert position_of(index + 1) == seq_of(index)
    assert index_of(seq_of(index)) == index
    assert resume_from(position_of(index)) == index


def test_nothing_seen_asks_for_the_first_token() -> None:
    """At position 0 and at that of `start` alike."""
    assert resume_from(0) == resume_from(1) == 0
