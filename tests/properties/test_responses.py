"""Responses events are a pure function of the records: the same for any split, from any fold, at any position."""

from __future__ import annotations

import json
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from midstream import rules
from midstream.codec import native
from midstream.codec.fold import decode, encode
from midstream.codec.responses import ResponseEvents, whole_response
from midstream.codec.responses_parts import Shared
from midstream.errors import ProducerFailed
from midstream.records import Chunk, Finish, Fold, Frame, StreamMeta

EVENTS: Any = TypeAdapter(ResponseStreamEvent)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
ENTRY = st.fixed_dictionaries(
    {"token": TEXT, "logprob": st.one_of(st.none(), st.floats(-9, 0))},
    optional={"bytes": st.none(), "top_logprobs": st.just([{"token": "x", "logprob": -1.0}])},
)
CALL = st.fixed_dictionaries(
    {"index": st.integers(0, 2), "function": st.fixed_dictionaries({}, optional={"name": TEXT, "arguments": TEXT})},
    optional={"id": st.sampled_from(["", "a", "b", "c"])},
)
MORE = st.fixed_dictionaries(
    {},
    optional={
        "reasoning": TEXT,
        "refusal": TEXT,
        "choice": st.integers(0, 1),
        "tool_calls": st.lists(CALL, max_size=3),
        "logprobs": st.fixed_dictionaries({"content": st.lists(ENTRY, max_size=2)}),
        "finish_reason": st.sampled_from(["stop", "length"]),
    },
)
CHUNKS = st.lists(st.one_of(st.builds(Chunk, TEXT), st.builds(Chunk, TEXT, MORE)), max_size=12)
ENDS = st.sampled_from(["open", "stop", "length", "failed", "cancelled"])
BODIES = st.fixed_dictionaries(
    {"model": st.just("m"), "input": st.just("Hi")},
    optional={
        "reasoning": st.sampled_from([{"summary": "auto"}, {"effort": "low"}]),
        "include": st.just(["message.output_text.logprobs"]),
        "tools": st.just([{"type": "function", "name": "f"}]),
    },
)


def meta_of(body: dict[str, Any]) -> StreamMeta:
    request = orjson.dumps({"route": "/v1/responses", "body": body})
    return StreamMeta("s", "owner", "m", 1_700_000_000.5, 600.0, None, request)


def told(chunks: list[Chunk], end: str) -> list[Frame]:
    frames = [native.start("s", "m"), *(native.token(seq, chunk) for seq, chunk in enumerate(chunks, 2))]
    seq = len(frames) + 1
    if end == "failed":
        frames.append(native.failed(seq, ProducerFailed("upstream_error", "broke", status=429)))
    elif end == "cancelled":
        frames.append(native.cancelled(seq, "client"))
    elif end != "open":
        frames.append(native.done(seq, Finish(end, {"prompt_tokens": 1, "completion_tokens": 2})))
    return frames


def folded(frames: list[Frame]) -> Fold:
    """As a store keeps it."""
    fold = Fold()
    rules.fold(fold, frames)
    return decode(encode(fold))


@given(CHUNKS, ENDS, BODIES)
def test_events_are_numbered_without_a_gap_and_are_what_the_sdk_knows(
    chunks: list[Chunk], end: str, body: dict[str, Any]
) -> None:
    """Every event is one of the SDK's types, field by field; the last one tells the response."""
    frames, meta = told(chunks, end), meta_of(body)
    events = ResponseEvents(meta).take(frames)
    for number, event in enumerate(events):
        kind, data = event.decode().removesuffix("\n\n").split("\ndata: ", 1)
        fields = json.loads(data)
        assert (fields["sequence_number"], f"event: {fields['type']}") == (number, kind)
        EVENTS.validate_python(fields)
    whole = orjson.loads(whole_response(meta, folded(frames), end if end not in ("stop", "length") else "done"))
    Response.model_validate(whole)
    if end != "open":
        assert json.loads(events[-1].split(b"\ndata: ", 1)[1])["response"] == whole


@given(CHUNKS, ENDS, BODIES, st.lists(st.integers(1, 14), max_size=4))
def test_any_split_into_batches_gives_the_same_events(
    chunks: list[Chunk], end: str, body: dict[str, Any], cuts: list[int]
) -> None:
    """Numbers are the records', not the pages' they came in."""
    frames, meta = told(chunks, end), meta_of(body)
    events, rendered, at = ResponseEvents(meta), list[bytes](), 0
    for cut in [*sorted(cuts), len(frames)]:
        rendered += events.take(frames[at:cut])
        at = max(at, cut)
    assert rendered == ResponseEvents(meta).take(frames)


@given(CHUNKS, ENDS, BODIES, st.floats(0, 1))
def test_any_fold_and_any_position_give_the_rest(
    chunks: list[Chunk], end: str, body: dict[str, Any], where: float
) -> None:
    """Whatever was dropped, wherever a reader stands behind it and whatever others were told before, it is given the
    rest, byte for byte (I3, R9)."""
    frames, meta = told(chunks, end), meta_of(body)
    whole, shared = ResponseEvents(meta).take(frames), Shared()
    for dropped in range(len(frames) + (end == "open")):  # the terminal record is never dropped
        fold = encode(folded(frames[:dropped]))
        first = ResponseEvents(meta, decode(fold), shared=shared).number
        for after in {first - 1, first - 1 + round(where * (len(whole) - first)), len(whole) - 1}:
            events = ResponseEvents(meta, decode(fold), after, shared)
            assert events.take(frames[dropped:]) == whole[after + 1 :]
            assert events.number == len(whole)


@given(CHUNKS, BODIES)
def test_deltas_add_up_to_what_is_done(chunks: list[Chunk], body: dict[str, Any]) -> None:
    """Item by item and part by part the text of the deltas is that of the done event, and of the whole response."""
    frames = told(chunks, "stop")
    events = [json.loads(event.split(b"\ndata: ", 1)[1]) for event in ResponseEvents(meta_of(body)).take(frames)]
    said: dict[tuple[str, int], str] = {}
    finals: dict[tuple[str, int], str] = {}
    for event in events:
        place = (event.get("item_id", ""), event.get("content_index", event.get("summary_index", 0)))
        if event["type"].endswith(".delta"):
            said[place] = said.get(place, "") + event["delta"]
        elif event["type"].endswith((".done",)) and event["type"].count(".") == 2 and "item_id" in event:
            text = event.get("text", event.get("refusal", event.get("arguments")))
            if text is not None:
                finals[place] = text
    assert {place: text for place, text in finals.items() if text} == {
        place: text for place, text in said.items() if text
    }
    items = events[-1]["response"]["output"]
    assert [item["id"] for item in items] == [
        event["item"]["id"] for event in events if event["type"] == "response.output_item.added"
    ]
    assert all(item["status"] == "completed" for item in items)
    done = {event["item"]["id"]: event["item"] for event in events if event["type"] == "response.output_item.done"}
    assert [done[item["id"]] for item in items] == items
