"""Records as OpenAI's chunks: the table of PROTOCOL.md, row by row, and nothing the upstream said lost on the way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson
import pytest

from midstream import rules
from midstream.codec import fold, native
from midstream.codec.chat import ChatEvents, Style, choices_in, plain_text
from midstream.codec.chat_whole import Extras, completion, joined, tool_calls
from midstream.codec.openai import MAX_PARTS, ChatReader
from midstream.codec.sse import Decoder
from midstream.errors import ProducerFailed
from midstream.records import Choice, Chunk, Finish, Fold, Frame, StreamMeta, ToolCall
from midstream.wire import CHAT_PATH, COMPLETIONS_PATH

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
ENVELOPE: dict[str, Any] = {
    "id": "chatcmpl-abc",
    "object": "chat.completion.chunk",
    "created": 1_700_000_000,
    "model": "m",
}
WITH_USAGE = {"stream_options": {"include_usage": True}}


def style(body: Mapping[str, Any] | None = None, route: str = CHAT_PATH, model: str = "m") -> Style:
    request = json.dumps({"route": route, "body": body or {}}).encode()
    return Style(StreamMeta("abc", "ada", model, 1_700_000_000.9, 600.0, request=request))


def rendered(*frames: Frame, of: Style | None = None) -> list[tuple[str | None, Any]]:
    """Id and data of every event."""
    body = ChatEvents(of or style()).render(frames)
    decoder = Decoder()
    events = decoder.feed(body)
    assert decoder.close() == b""
    return [(event.id, event.data if event.data == b"[DONE]" else json.loads(event.data)) for event in events]


def choice(frame: Frame, of: Style | None = None) -> Any:
    """The only choice of a record's last event."""
    [said] = rendered(frame, of=of)[-1][1]["choices"]
    return said


# --- one record ------------------------------------------------------------------------------------------------------


def test_start_is_the_role_of_the_first_choice() -> None:
    delta = {"role": "assistant", "content": ""}
    assert rendered(native.start("abc", "m")) == [
        ("1", {**ENVELOPE, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    ]


def test_a_token_is_one_chunk() -> None:
    said = {"index": 0, "delta": {"content": " production"}, "finish_reason": None}
    assert rendered(native.token(151, Chunk(" production"))) == [("151", {**ENVELOPE, "choices": [said]})]


@pytest.mark.parametrize(
    ("chunk", "delta"),
    [
        (Chunk("", {"reasoning": "hm"}), {"reasoning_content": "hm"}),
        (Chunk("", {"refusal": "no"}), {"refusal": "no"}),
        (Chunk("", {"tool_calls": [{"index": 0, "x": 1}]}), {"tool_calls": [{"index": 0, "x": 1}]}),
        (Chunk("a", {"reasoning": "hm"}), {"content": "a", "reasoning_content": "hm"}),
        (Chunk("a", {"upstream": {"delta": {"audio": {"id": 1}}}}), {"content": "a", "audio": {"id": 1}}),
        (Chunk("a", {"upstream": {"delta": {"content": [{"text": "a"}]}}}), {"content": [{"text": "a"}]}),
        (Chunk("", {"logprobs": {"content": []}}), {"content": ""}),
    ],
)
def test_everything_in_a_delta_is_in_the_chunks_delta(chunk: Chunk, delta: dict[str, Any]) -> None:
    """Whatever the upstream called it, and in its own shape."""
    assert choice(native.token(2, chunk))["delta"] == delta


def test_fields_stand_where_the_upstream_had_them() -> None:
    upstream = {"chunk": {"system_fingerprint": "fp"}, "choice": {"stop_reason": 3}, "delta": {"role": "tool"}}
    chunk = Chunk("a", {"choice": 2, "logprobs": {"content": [1]}, "upstream": upstream, "seam": "upstream_lost"})
    [(_, event)] = rendered(native.token(2, chunk))
    assert event["system_fingerprint"] == "fp"
    assert event["seam"] == "upstream_lost"
    assert event["choices"] == [
        {
            "index": 2,
            "stop_reason": 3,
            "delta": {"content": "a", "role": "tool"},
            "logprobs": {"content": [1]},
            "finish_reason": None,
        }
    ]


def test_the_envelope_is_the_streams_and_the_upstreams_own_stands_beside_it() -> None:
    """Else it would change with the chunk that brought it, which a reader that resumes has not seen."""
    theirs: dict[str, Any] = {"id": "chatcmpl-1", "created": 1, "model": "m-2026", "error": False}
    [(_, event)] = rendered(native.token(2, Chunk("a", {"upstream": {"chunk": theirs}})))
    assert {name: event[name] for name in ENVELOPE} == ENVELOPE
    assert event["upstream"] == theirs
    assert "error" not in event, "at which official clients would raise"


def test_the_end_is_a_finish_the_usage_if_asked_and_done() -> None:
    """Only the last of them has the record's id."""
    frame = native.done(9, Finish("stop", USAGE, {"usage_from_seq": 4}))
    finish: dict[str, Any] = {**ENVELOPE, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    assert rendered(frame) == [(None, finish), ("9", b"[DONE]")]
    usage = {**ENVELOPE, "choices": [], "usage": USAGE, "usage_from_seq": 4}
    assert rendered(frame, of=style(WITH_USAGE)) == [(None, finish | {"usage": None}), (None, usage), ("9", b"[DONE]")]


@pytest.mark.parametrize("asked", [None, {}, {"stream_options": {}}, {"stream_options": {"include_usage": None}}])
def test_who_did_not_ask_for_usage_gets_no_sign_of_it(asked: dict[str, Any] | None) -> None:
    for frame in (native.start("abc", "m"), native.token(2, Chunk("a")), native.done(9, Finish("stop", USAGE))):
        assert b"usage" not in ChatEvents(style(asked)).render([frame])


def test_an_end_without_a_reason_is_not_given_one() -> None:
    """With several choices each has told its own; what came after the last chunk is told all the same."""
    assert rendered(native.done(9, Finish())) == [("9", b"[DONE]")]
    late = {"upstream": {"chunk": {"x_groq": {"id": 1}}}}
    told_late: dict[str, Any] = {**ENVELOPE, "choices": [], "x_groq": {"id": 1}}
    assert rendered(native.done(9, Finish(None, None, late))) == [(None, told_late), ("9", b"[DONE]")]


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (
            native.failed(9, ProducerFailed("upstream_truncated", "it broke", retryable=True)),
            {"message": "it broke", "type": "server_error", "param": None, "code": "upstream_truncated"},
        ),
        (
            native.failed(
                9, ProducerFailed("upstream_error", "slow down", status=429, upstream={"type": "tokens", "code": "rl"})
            ),
            {"message": "slow down", "type": "tokens", "param": None, "code": "rl"},
        ),
        (
            native.cancelled(9, "abandoned"),
            {
                "message": "the answer was cancelled (abandoned)",
                "type": "server_error",
                "param": None,
                "code": "cancelled",
            },
        ),
    ],
)
def test_a_bad_end_is_an_error_object_and_no_done(frame: Frame, error: dict[str, Any]) -> None:
    assert rendered(frame) == [("9", {"error": error})]


def test_text_completions_have_text_and_no_roles() -> None:
    of = style(route=COMPLETIONS_PATH)
    assert rendered(native.start("abc", "m"), of=of) == []
    [(seq, event)] = rendered(native.token(2, Chunk("a", {"choice": 1, "logprobs": {"tokens": ["a"]}})), of=of)
    assert (seq, event["id"], event["object"]) == ("2", "cmpl-abc", "text_completion")
    assert event["choices"] == [{"index": 1, "text": "a", "logprobs": {"tokens": ["a"]}, "finish_reason": None}]
    assert choice(native.token(2, Chunk("a")), of) == {"index": 0, "text": "a", "finish_reason": None}


@pytest.mark.parametrize("odd", [{"upstream": 7}, {"upstream": {"delta": [], "chunk": 1}}, {"choice": "x"}])
def test_records_of_odd_types_are_rendered_all_the_same(odd: dict[str, Any]) -> None:
    """Producers put into a record what they like."""
    assert choice(native.token(2, Chunk("a", odd)))["delta"] == {"content": "a"}


@pytest.mark.parametrize("model", ["", 'a"', '""', '"content":""', "b\\", "né🚀"])
def test_any_name_of_a_model_is_only_a_name(model: str) -> None:
    [(_, event)] = rendered(native.token(2, Chunk('say "x"')), of=style(model=model))
    assert event["model"] == model
    assert event["choices"][0]["delta"] == {"content": 'say "x"'}


# --- several choices -------------------------------------------------------------------------------------------------


def test_another_choice_gets_its_role_with_its_first_record() -> None:
    """Before it, in the same record: the id is the later event's."""
    frames = [native.token(seq, Chunk("x", {"choice": 1} if seq != 3 else None)) for seq in (2, 3, 4)]
    events = rendered(*frames, of=style({"n": 2}))
    assert [seq for seq, _ in events] == [None, "2", "3", "4"]
    roles = [said["choices"][0]["delta"].get("role") for _, said in events]
    assert roles == ["assistant", None, None, None]
    assert events[0][1]["choices"][0]["index"] == 1


def test_a_choice_that_had_begun_before_the_position_gets_no_second_role() -> None:
    frames = [native.token(2, Chunk("x", {"choice": 1})), native.token(3, Chunk("y", {"choice": 2}))]
    assert choices_in(frames) == {1, 2}
    assert choices_in([native.token(2, Chunk('"choice":3'))]) <= {0}
    events = ChatEvents(style({"n": 3}), choices_in(frames[:1])).render(frames)
    assert events.count(b'"role"') == 1


def test_a_choice_nobody_asked_for_gets_no_role() -> None:
    """Whether it had begun before a reader's position could not be told from what was asked."""
    assert b'"role"' not in ChatEvents(style()).render([native.token(2, Chunk("x", {"choice": 1}))])


# --- the short way ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "a", '"', '\\"', '",', '","done":false}', "\n\n", "\\", "né🚀", '","choice":1,"x":"']
)
def test_the_text_of_a_plain_token_is_cut_out(text: str) -> None:
    for seq in (2, 99, 100, 2**53 - 1):
        assert json.loads(plain_text(native.token(seq, Chunk(text))) or b"") == text


@pytest.mark.parametrize(
    "frame",
    [
        native.start("abc", "m"),
        native.done(9, Finish("stop")),
        native.cancelled(9, "client"),
        native.token(2, Chunk("a", {"choice": 1})),
        native.token(2, Chunk("a", {"src": ["g", 1]})),
        native.token(2, Chunk("", {"reasoning": "a"})),
        b'id: 2\nevent: token\ndata: {"seq":2,"delta":7,"done":false}\n\n',
    ],
)
def test_no_other_record_is_taken_for_a_plain_token(frame: Frame) -> None:
    assert plain_text(frame) is None


# --- through and through ---------------------------------------------------------------------------------------------


def told(*chunks: dict[str, Any]) -> list[Frame]:
    """The records that these chunks of an upstream make."""
    reader = ChatReader()
    said = [ours for chunk in chunks for ours in reader.read(json.dumps(chunk).encode())]
    frames = [native.token(seq, chunk) for seq, chunk in enumerate(said, 2)]
    return [native.start("abc", "m"), *frames, native.done(len(frames) + 2, reader.finish())]


def chunk_of(delta: dict[str, Any], finish: str | None = None, beside: Any = None, **extra: Any) -> dict[str, Any]:
    return {"id": "up", "choices": [{"index": 0, "delta": delta, "finish_reason": finish, **(beside or {})}], **extra}


def test_whatever_an_upstream_says_comes_out_where_it_was() -> None:
    """Vendors' own fields of the chunk, the choice and the delta."""
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, "extra": {"s": 1}}
    events = rendered(
        *told(
            chunk_of({"role": "assistant"}),
            chunk_of({"content": "a", "citations": [1]}, beside={"content_filter": {"hate": 0}}, provider="p"),
            chunk_of({"reasoning_details": [{"t": "x"}], "reasoning": "r"}),
            chunk_of({"tool_calls": [call]}),
            chunk_of({}, "tool_calls", {"native_finish_reason": "TOOL"}, service_tier="flex"),
        )
    )
    chunks = [event for _, event in events if event != b"[DONE]"]
    assert chunks[1]["provider"] == "p"
    assert chunks[1]["choices"][0]["content_filter"] == {"hate": 0}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[1:] == [
        {"content": "a", "citations": [1]},
        {"reasoning_content": "r", "reasoning_details": [{"t": "x"}]},
        {"tool_calls": [call]},
        {},
    ]
    assert chunks[-1]["service_tier"] == "flex"
    assert chunks[-1]["choices"][0]["native_finish_reason"] == "TOOL"


def test_more_choices_than_there_can_be_cost_nothing() -> None:
    """A reader's rendering may have to count them all."""
    assert style({"n": 10**12}).choices == MAX_PARTS


def whole(*frames: Frame, body: Mapping[str, Any] | None = None, route: str = CHAT_PATH, acked: int = 0) -> Any:
    """The whole answer, of whose records the first `acked` are only in the fold any more."""
    kept = Fold()
    rules.fold(kept, frames)
    extras = Extras()
    extras.add(frames[acked:])
    return orjson.loads(orjson.dumps(completion(style(body, route), kept, extras)))


def test_a_whole_answer_has_everything() -> None:
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": '{"x":'}, "extra_content": {"sig": "s"}}
    rest = {"index": 0, "function": {"arguments": "1}"}}
    frames = told(
        chunk_of({"reasoning_content": "h"}, system_fingerprint="fp"),
        chunk_of({"reasoning_content": "m", "annotations": [1]}),
        chunk_of({"content": "a", "annotations": [2]}, beside={"logprobs": {"content": [{"token": "a"}]}}),
        chunk_of({"content": "b"}, beside={"logprobs": {"content": [{"token": "b"}]}}),
        chunk_of({"tool_calls": [call]}),
        chunk_of({"tool_calls": [rest]}),
        chunk_of({}, "tool_calls", {"stop_reason": 7}, usage=USAGE),
    )
    answer = whole(*frames)
    assert answer == {
        **ENVELOPE,
        "object": "chat.completion",
        "system_fingerprint": "fp",
        "upstream": {"id": "up"},
        "usage": USAGE,
        "choices": [
            {
                "index": 0,
                "stop_reason": 7,
                "finish_reason": "tool_calls",
                "logprobs": {"content": [{"token": "a"}, {"token": "b"}]},
                "message": {
                    "role": "assistant",
                    "content": "ab",
                    "refusal": None,
                    "reasoning_content": "hm",
                    "annotations": [1, 2],
                    "tool_calls": [
                        {
                            "id": "c",
                            "type": "function",
                            "function": {"name": "f", "arguments": '{"x":1}'},
                            "extra_content": {"sig": "s"},
                        }
                    ],
                },
            }
        ],
    }
    acked = whole(*frames, acked=len(frames) - 1)
    message = acked["choices"][0].pop("message")
    assert message == {name: answer["choices"][0]["message"][name] for name in message}, "only a vendor's field is gone"
    assert message.keys() == answer["choices"][0]["message"].keys() - {"annotations"}
    assert acked["choices"][0]["logprobs"] == answer["choices"][0]["logprobs"]


def test_what_else_was_said_of_a_call_outlives_its_record() -> None:
    """In the fold, which a store keeps as JSON."""
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}, "extra_content": {"sig": "s"}}
    kept = Fold()
    rules.fold(kept, [native.token(2, Chunk("", {"tool_calls": [call]}))])
    restored = fold.decode(fold.encode(kept))
    assert tool_calls(restored.choices[0])[0]["extra_content"] == {"sig": "s"}
    assert rules.fold_bytes(kept) > rules.fold_bytes(Fold(choices={0: Choice(tool_calls=[ToolCall(0)])}))


def test_whole_choices_are_apart_and_in_order() -> None:
    frames = [
        native.token(2, Chunk("X", {"choice": 1})),
        native.token(3, Chunk("A")),
        native.token(4, Chunk("", {"choice": 1, "refusal": "no", "finish_reason": "stop"})),
        native.token(5, Chunk("", {"finish_reason": "length"})),
        native.done(6, Finish()),
    ]
    said = whole(*frames, body={"n": 2})["choices"]
    assert [(one["index"], one["message"]["content"], one["finish_reason"]) for one in said] == [
        (0, "A", "length"),
        (1, "X", "stop"),
    ]
    assert said[1]["message"]["refusal"] == "no"


def test_whole_text_completion() -> None:
    frames = [
        native.token(2, Chunk("a", {"logprobs": {"tokens": ["a"], "token_logprobs": [-1]}})),
        native.token(3, Chunk("b", {"logprobs": {"tokens": ["b"], "token_logprobs": [-2]}})),
        native.done(4, Finish("stop", USAGE)),
    ]
    answer = whole(*frames, route=COMPLETIONS_PATH)
    assert (answer["object"], answer["id"], answer["usage"]) == ("text_completion", "cmpl-abc", USAGE)
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "ab",
            "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-1, -2]},
            "finish_reason": "stop",
        }
    ]


@pytest.mark.parametrize(
    ("more", "content"),
    [({}, ""), ({"refusal": "no"}, None), ({"tool_calls": [{"index": 0, "id": "c"}]}, None), ({"reasoning": "r"}, "")],
)
def test_content_is_null_only_where_something_else_stands_for_it(more: dict[str, Any], content: str | None) -> None:
    frames = [native.token(2, Chunk("", more)), native.done(3, Finish("stop"))]
    assert whole(*frames)["choices"][0]["message"]["content"] == content


def test_an_answer_of_nothing_is_one_empty_choice() -> None:
    [said] = whole(native.done(2, Finish()))["choices"]
    assert (said["message"]["content"], said["finish_reason"]) == ("", None)


def test_deltas_add_up() -> None:
    """As the official clients add them."""
    assert joined({"a": "x", "b": [1], "c": 1}, {"a": "y", "b": [2], "c": 2, "d": None}) == {
        "a": "xy",
        "b": [1, 2],
        "c": 2,
        "d": None,
    }
    assert joined({"a": {"b": "x"}}, {"a": {"b": "y"}}) == {"a": {"b": "xy"}}
    assert joined("x", None) == "x"
