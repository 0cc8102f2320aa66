"""Whatever the records, OpenAI's format may be cut after any event and gone on with, and its short way is no other."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from midstream.codec import chat, native
from midstream.codec.chat import ChatEvents, Style, choices_in
from midstream.codec.sse import Decoder, Event
from midstream.errors import ProducerFailed
from midstream.records import Chunk, Finish, Frame, Record, StreamMeta
from midstream.wire import CHAT_PATH, COMPLETIONS_PATH

# Characters that JSON escapes, and those that end a string, a field or a record.
texts = st.text(st.sampled_from([*'ab"\\,:{}[]\n\r\0\u2028', "é", "🚀"]), max_size=12)
names = st.sampled_from(["", "m", 'm"', '""', "né\\"])
calls = st.lists(st.fixed_dictionaries({"index": st.integers(0, 2), "id": texts}), max_size=2)
extras = st.fixed_dictionaries(
    {},
    optional={
        "choice": st.integers(1, 4),
        "reasoning": texts,
        "refusal": texts,
        "tool_calls": calls,
        "finish_reason": texts,
        "logprobs": st.just({"content": [{"token": '"'}]}),
        "upstream": st.dictionaries(
            st.sampled_from(["chunk", "choice", "delta"]), st.dictionaries(texts, texts, max_size=2)
        ),
        "src": st.just(["g", 1]),
    },
)
chunks = st.builds(Chunk, texts, st.none() | extras)
ends = st.sampled_from(
    [
        lambda seq: native.done(seq, Finish("stop", {"total_tokens": 3})),
        lambda seq: native.done(seq, Finish(None, None, {"upstream": {"choice": {"x": 1}}})),
        lambda seq: native.failed(seq, ProducerFailed("upstream_error", "no", status=429)),
        lambda seq: native.cancelled(seq, "client"),
    ]
)


@st.composite
def streams(draw: Any) -> tuple[Style, list[Frame]]:
    """A request and all its records."""
    body = {"n": draw(st.integers(1, 4)), "stream_options": {"include_usage": draw(st.booleans())}}
    route = draw(st.sampled_from([CHAT_PATH, COMPLETIONS_PATH]))
    model = draw(names)
    request = json.dumps({"route": route, "body": body}).encode()
    said = draw(st.lists(chunks, max_size=12))
    frames = [native.start("abc", model), *(native.token(seq, chunk) for seq, chunk in enumerate(said, 2))]
    frames.append(draw(ends)(len(frames) + 1))
    return Style(StreamMeta("abc", "ada", model, 1e9, 600.0, request=request)), frames


def events_of(body: bytes) -> list[Event]:
    decoder = Decoder()
    events = decoder.feed(body)
    assert decoder.close() == b"", "no event is left open"
    return events


@given(streams())
def test_the_short_way_says_what_the_long_one_says(stream: tuple[Style, list[Frame]]) -> None:
    """Byte for byte."""
    style, frames = stream
    short = ChatEvents(style).render(frames)
    with patch.object(chat, "plain_text", lambda _: None):
        assert ChatEvents(style).render(frames) == short


@given(streams(), st.data())
def test_any_pages_say_the_same(stream: tuple[Style, list[Frame]], data: st.DataObject) -> None:
    """However many records come at a time."""
    style, frames = stream
    events = ChatEvents(style)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(frames)), max_size=4)))
    pages = [frames[start:end] for start, end in zip([0, *cuts], [*cuts, len(frames)], strict=True)]
    assert b"".join(map(events.render, pages)) == ChatEvents(style).render(frames)


@given(streams())
def test_cut_after_any_event_and_gone_on_with_it_is_the_same(stream: tuple[Style, list[Frame]]) -> None:
    """I3: what follows the last id that was seen is what follows it in the uninterrupted stream."""
    style, frames = stream
    whole = events_of(ChatEvents(style).render(frames))
    for cut in range(len(whole) + 1):
        position, after = 0, 0
        for place, event in enumerate(whole[:cut], 1):
            if event.id is not None:
                position, after = int(event.id), place
        began = choices_in(frames[:position])
        rest = events_of(ChatEvents(style, began).render(frames[position:]))
        assert rest == whole[after:]


@given(streams())
def test_only_the_last_event_of_a_record_has_an_id(stream: tuple[Style, list[Frame]]) -> None:
    """And it is the record's."""
    style, frames = stream
    events = ChatEvents(style)
    for frame in frames:
        said = events_of(events.render([frame]))
        ids = [event.id for event in said]
        assert ids == [None] * (len(ids) - 1) + [str(Record.of(frame).seq)] * bool(ids)
        assert {event.event for event in said} <= {"message"}
