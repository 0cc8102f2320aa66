"""Which events a record makes, what they say, and how a response ends."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from midstream import rules
from midstream.codec import native
from midstream.codec.responses import ResponseEvents, whole_response
from midstream.codec.responses_object import response_id, stream_of, usage_of
from midstream.codec.responses_parts import Shared
from midstream.errors import ProducerFailed
from midstream.records import Chunk, Finish, Fold, Frame, StreamMeta

ENDING = ["output_text.done", "content_part.done", "output_item.done", "completed"]


def meta_of(**body: Any) -> StreamMeta:
    asked = {"route": "/v1/responses", "body": {"model": "m", "input": "Hi"} | body}
    return StreamMeta("s", "owner", "m", 1_700_000_000.5, 600.0, None, orjson.dumps(asked))


def frames_of(*chunks: Chunk | Finish | ProducerFailed) -> list[Frame]:
    made = [native.start("s", "m")]
    for seq, said in enumerate(chunks, 2):
        if isinstance(said, Chunk):
            made.append(native.token(seq, said))
        else:
            made.append(native.done(seq, said) if isinstance(said, Finish) else native.failed(seq, said))
    return made


def told(*chunks: Chunk | Finish | ProducerFailed, **body: Any) -> list[dict[str, Any]]:
    """The events behind the first two."""
    events = ResponseEvents(meta_of(**body), after=1).take(frames_of(*chunks))
    return [json.loads(event.split(b"\ndata: ", 1)[1]) for event in events]


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def call(arguments: str = "", **more: Any) -> Chunk:
    named = {"name": more.pop("name")} if "name" in more else {}
    return Chunk("", {"tool_calls": [{"index": 0, **more, "function": {**named, "arguments": arguments}}]})


def test_the_first_record_makes_two_events() -> None:
    """As the vendor begins: created, then in progress, of a response that has nothing yet."""
    rendered = b"".join(ResponseEvents(meta_of()).take(frames_of())).decode()
    created, started, end = rendered.split("\n\n")
    assert created.startswith(
        'event: response.created\ndata: {"type":"response.created","sequence_number":0,"response":'
    )
    assert started.startswith('event: response.in_progress\ndata: {"type":"response.in_progress","sequence_number":1,')
    assert end == ""
    response = json.loads(created.split("\ndata: ")[1])["response"]
    assert (response["id"], response["status"], response["output"]) == ("resp_s", "in_progress", [])
    assert response["created_at"] == 1_700_000_000


def test_text_is_one_part_of_one_message() -> None:
    """However many deltas it comes in."""
    events = told(Chunk("a"), Chunk('"b"\n'), Chunk(""), Finish("stop"))
    assert kinds(events) == ["output_item.added", "content_part.added", *["output_text.delta"] * 2, *ENDING]
    assert events[3] == {
        "type": "response.output_text.delta",
        "sequence_number": 5,
        "item_id": "msg_s_0",
        "output_index": 0,
        "content_index": 0,
        "delta": '"b"\n',
        "logprobs": [],
    }
    assert (events[4]["text"], events[5]["part"]["text"]) == ('a"b"\n',) * 2


def test_what_is_text_alone_is_told_like_what_is_more() -> None:
    """The short cut for most records makes the same events as the long way."""
    texts = ["a", "\\", '"', '\\"', "é\U0001f600", "\u2028", "\x00", "}", '","done":false}', "%d%b"]
    short = ResponseEvents(meta_of()).take(frames_of(*map(Chunk, texts), Finish("stop")))
    long = ResponseEvents(meta_of()).take(frames_of(*(Chunk(text, {"x": 1}) for text in texts), Finish("stop")))
    assert short == long


def test_an_answer_of_nothing_has_no_items() -> None:
    """It is completed all the same."""
    events = told(Finish("stop"))
    assert kinds(events) == ["completed"]
    assert events[0]["response"]["output"] == []


def test_each_kind_of_text_has_its_place() -> None:
    """Reasoning is an item that ends where the message begins; a refusal is a part of the message."""
    events = told(Chunk("", {"reasoning": "r"}), Chunk("a"), Chunk("", {"refusal": "n"}), Chunk("", {"reasoning": "s"}))
    assert kinds(events) == [
        *["output_item.added", "content_part.added", "reasoning_text.delta"],
        *["reasoning_text.done", "content_part.done", "output_item.done"],
        *["output_item.added", "content_part.added", "output_text.delta"],
        *["output_text.done", "content_part.done", "content_part.added", "refusal.delta"],
        *["refusal.done", "content_part.done", "output_item.done"],
        *["output_item.added", "content_part.added", "reasoning_text.delta"],
    ]
    assert [event["item"]["id"] for event in events if "item" in event] == [
        *["rs_s_0", "rs_s_0", "msg_s_1", "msg_s_1", "rs_s_2"]
    ]
    assert events[12]["content_index"] == 1


def test_reasoning_is_told_as_a_summary_where_one_was_asked_for() -> None:
    """In as many events, so that its numbers stay the same."""
    chunks = (Chunk("", {"reasoning": "so"}), Chunk("a"), Finish("stop"))
    plain, summary = told(*chunks), told(*chunks, reasoning={"summary": "concise"})
    assert len(plain) == len(summary)
    assert kinds(summary)[1:5] == [
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
    ]
    item = summary[-1]["response"]["output"][0]
    assert (item["summary"], item["content"]) == ([{"type": "summary_text", "text": "so"}], [])


def test_calls_stay_open_to_the_end() -> None:
    """Servers interleave them, also with text; an id that comes late is not taken up, since clients know another."""
    events = told(call("{", name="f"), Chunk("a"), call("}", id="late"), Chunk("b"), Finish("tool_calls"))
    assert kinds(events) == [
        *["output_item.added", "function_call_arguments.delta", "output_item.added", "content_part.added"],
        *["output_text.delta", "function_call_arguments.delta", "output_text.delta"],
        *["output_text.done", "content_part.done", "output_item.done"],
        *["function_call_arguments.done", "output_item.done", "completed"],
    ]
    assert {event["item"]["call_id"] for event in events if event.get("item", {}).get("type") == "function_call"} == {
        "call_s_0"
    }
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["function_call", "message"]


def test_no_two_calls_have_one_id() -> None:
    """SDKs take that for the same call twice; servers that count their calls from 0 in each delta make it so."""
    chunks = [Chunk("", {"tool_calls": [{"index": at, "id": "c", "function": {"name": "f"}}]}) for at in (0, 1)]
    output = told(*chunks, Finish("tool_calls"))[-1]["response"]["output"]
    assert [item["call_id"] for item in output] == ["c", "call_s_1"]


ENTRY = {"token": "a", "logprob": -0.5, "bytes": None, "top_logprobs": [{"token": "b", "logprob": None}]}
TOLD = {
    "token": "a",
    "logprob": -0.5,
    "bytes": [],
    "top_logprobs": [{"token": "b", "logprob": -9999.0, "bytes": []}],
}


@pytest.mark.parametrize(("include", "logprobs"), [(["message.output_text.logprobs"], [TOLD]), ([], [])])
def test_logprobs_are_told_to_who_asked_for_them(include: list[str], logprobs: list[Any]) -> None:
    """With each delta and with the whole text; a token that is a part of a character has a delta of its own."""
    more = {"logprobs": {"content": [ENTRY]}}
    events = told(Chunk("a", more), Chunk("", more), Chunk("b"), Finish("stop"), include=include)
    deltas = [event["logprobs"] for event in events if event["type"].endswith("text.delta")]
    assert deltas == [logprobs, logprobs, []]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == logprobs * 2


def test_a_seam_is_told_at_the_first_delta_behind_it() -> None:
    """Text of another generation never comes in silence (I8)."""
    events = told(Chunk("a"), Chunk("b", {"seam": {"epoch": 2}}), Chunk("c"), Finish("stop"))
    assert [event.get("seam") for event in events if event["type"].endswith("delta")] == [None, {"epoch": 2}, None]


@pytest.mark.parametrize(("arguments", "where"), [("{}", "function_call_arguments.delta"), ("", "output_item.added")])
def test_a_seam_is_told_at_a_call_too(arguments: str, where: str) -> None:
    """Where another generation goes on with a call; a call that begins without arguments says it itself (I8)."""
    chunk = call(arguments, name="f", id="c")
    assert chunk.more is not None
    chunk.more["seam"] = "writer_lost"
    events = told(Chunk("a"), chunk, Chunk("b"), Finish("stop"))
    assert [(kind, event["seam"]) for event, kind in zip(events, kinds(events), strict=True) if "seam" in event] == [
        (where, "writer_lost")
    ]


def test_readers_share_what_the_last_events_tell() -> None:
    """Each tells all of the response again: apart, its readers would hold it many times over (I5)."""
    chunks = [Chunk("", {"reasoning": "hm"}), Chunk("Hel"), Chunk("lo"), call("{}", name="f", id="c")]
    frames, shared = frames_of(*chunks, Finish("stop")), Shared()
    first = ResponseEvents(meta_of(), shared=shared).take(frames)
    second, paced = ResponseEvents(meta_of(), shared=shared), list[bytes]()
    for frame in frames:
        paced += second.take([frame])
    assert first == paced == ResponseEvents(meta_of()).take(frames)
    whole = (b"created\n", b"in_progress\n", b".done\n", b"completed\n")
    same = [one is other for one, other in zip(first, paced, strict=True) if any(kind in one for kind in whole)]
    assert same == [True] * 11


def test_other_choices_are_passed_over() -> None:
    """A response has one answer."""
    assert kinds(told(Chunk("x", {"choice": 1}), Chunk("", {"choice": 1, "reasoning": "y"}))) == []


@pytest.mark.parametrize(
    ("status", "code"),
    [(None, "server_error"), (500, "server_error"), (429, "rate_limit_exceeded"), (400, "invalid_prompt")],
)
def test_a_failure_keeps_what_was_said(status: int | None, code: str) -> None:
    """Under one of the vendor's codes, with ours beside it; what is open stays so."""
    facts: dict[str, Any] = {} if status is None else {"status": status}
    events = told(Chunk("a"), ProducerFailed("upstream_error", "broke", **facts))
    assert kinds(events)[-2:] == ["output_text.delta", "failed"]
    response = events[-1]["response"]
    assert response["error"] == {"code": code, "message": "broke", "type": "upstream_error", "param": None}
    assert (response["status"], response["output"][0]["status"]) == ("failed", "incomplete")


def test_an_open_response_is_told_as_far_as_it_has_come() -> None:
    """Without its stream, too."""
    fold = Fold()
    rules.fold(fold, frames_of(Chunk("a"), call("{", name="f", id="c")))
    response = json.loads(whole_response(meta_of(), fold, "open"))
    assert response["status"] == "in_progress"
    assert [item["status"] for item in response["output"]] == ["completed", "in_progress"]


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        ({"prompt_tokens": 3, "completion_tokens": 2}, (3, 0, 2, 0, 5)),
        (
            {
                "prompt_tokens": 3,
                "completion_tokens": 2,
                "total_tokens": 9,
                "prompt_tokens_details": {"cached_tokens": 1},
                "completion_tokens_details": {"reasoning_tokens": 2},
            },
            (3, 1, 2, 2, 9),
        ),
        ({"prompt_tokens": None, "completion_tokens": "2", "prompt_tokens_details": 5}, (0, 0, 0, 0, 0)),
    ],
)
def test_usage_has_other_names(usage: dict[str, Any], counts: tuple[int, ...]) -> None:
    """Whatever the upstream gives; nothing is made up where it gives nothing."""
    made = usage_of(usage)
    assert made is not None
    told_counts = (
        made["input_tokens"],
        made["input_tokens_details"]["cached_tokens"],
        made["output_tokens"],
        made["output_tokens_details"]["reasoning_tokens"],
        made["total_tokens"],
    )
    assert told_counts == counts
    assert usage_of(None) is None


def test_the_id_of_a_response_holds_that_of_its_stream() -> None:
    """So that any replica finds it."""
    assert stream_of(response_id("abc")) == "abc"
    assert stream_of("abc") is None


def test_what_is_held_is_what_was_said() -> None:
    """Closed or open, calls and logprobs too: as much as there is text, and what stands around it in JSON."""
    events = ResponseEvents(meta_of(include=["message.output_text.logprobs"]))
    assert events.held == 0
    chunks = [Chunk("", {"reasoning": "x" * 1000}), Chunk("y" * 1000), call("z" * 1000), Chunk("w" * 1000)]
    for count, frame in enumerate(frames_of(*chunks)):
        events.take([frame])
        assert count * 1000 <= events.held < count * 1000 + 400 * count + 1
