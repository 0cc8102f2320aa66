"""What the pool is asked for an OpenAI request, and what it refuses to ask."""

from __future__ import annotations

from typing import Any

import pytest

from midstream.errors import BadRequest
from midstream.pool.payload import DEFAULT_LENGTH, TURN, ask_for, on_stream, stops, without_turn
from midstream.pool.shapes import Ask, Reply

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}


def chat(**body: Any) -> Ask:
    """The ask for a chat about nothing, with these fields."""
    return ask_for("ada", "m", {"messages": HELLO, **body}, "chat")


def nested(depth: int) -> dict[str, Any]:
    """A schema of so many levels."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth - 1):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def test_chat_job_has_every_parameter_a_worker_expects() -> None:
    """Also those that the request leaves to us."""
    ask = chat()
    assert ask.payload == {
        "messages": HELLO,
        "max_length": DEFAULT_LENGTH,
        "max_context_length": ask.max_context_length,
        "temperature": 1,
        "top_p": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "rep_pen": 1,
        "top_k": 0,
        "min_p": 0,
    }
    assert (ask.owner, ask.models, ask.chat, ask.streams, ask.amount, ask.features) == (
        "ada",
        ("m",),
        True,
        True,
        1,
        frozenset(),
    )


def test_what_the_request_says_goes_on_under_the_worker_s_names() -> None:
    ask = chat(
        max_completion_tokens=64,
        max_tokens=100,
        temperature=0.5,
        repetition_penalty=1.1,
        top_k=40,
        stop="END",
        seed=7,
        reasoning_effort="low",
        user="somebody",
        stream_options={"include_usage": True},
    )
    payload = ask.payload
    assert (ask.max_length, payload["max_length"], payload["temperature"], payload["rep_pen"]) == (64, 64, 0.5, 1.1)
    assert (payload["top_k"], payload["stop_sequence"], payload["seed"]) == (40, ["END"], 7)
    assert payload["reasoning_effort"] == "low"
    assert payload.keys().isdisjoint({"user", "stream_options", "stop", "max_tokens", "repetition_penalty"})
    assert stops(ask) == ["END", TURN]


def test_context_is_asked_for_by_what_the_messages_may_need() -> None:
    """Three bytes to a token, what stands around messages, images, and room for the answer; or as the request says."""
    short, long = chat(max_tokens=16), chat(max_tokens=16, messages=[{"role": "user", "content": "x" * 30_000}])
    assert short.max_context_length == 80
    assert 10_000 < long.max_context_length < 10_100
    with_image = chat(max_tokens=16, messages=[{"role": "user", "content": [IMAGE, {"type": "text", "text": "x"}]}])
    assert with_image.max_context_length > 1024
    assert chat(max_context_length=4096).max_context_length == 4096


@pytest.mark.parametrize(
    ("body", "features"),
    [
        ({"tools": [TOOL]}, {"tools"}),
        ({"response_format": {"type": "json_object"}}, {"json_object"}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
            {"json_schema"},
        ),
    ],
)
def test_tools_and_response_formats_are_not_streamed(body: dict[str, Any], features: set[str]) -> None:
    """And go only to workers that have declared them."""
    ask = chat(**body)
    assert not ask.streams
    assert ask.features == features


def test_tools_come_with_what_was_said_of_them() -> None:
    payload = chat(tools=[TOOL], tool_choice="auto").payload
    assert (payload["tools"], payload["tool_choice"], payload["parallel_tool_calls"]) == ([TOOL], "auto", True)
    assert chat(tools=[TOOL], parallel_tool_calls=False).payload["parallel_tool_calls"] is False


@pytest.mark.parametrize("body", [{"tools": []}, {"tools": None}, {"response_format": {"type": "text"}}])
def test_request_that_names_tools_and_formats_without_wanting_any_is_streamed(body: dict[str, Any]) -> None:
    ask = chat(**body)
    assert ask.streams
    assert ask.payload.keys().isdisjoint({"tools", "response_format", "parallel_tool_calls"})


def test_strict_conformance_asks_for_guarantees_too() -> None:
    assert chat(seed=1).features == frozenset()
    assert chat(seed=1, horde={"conformance": "strict"}).features == {"seed", "prompt_overflow_refused"}


def test_completion_is_a_prompt_job() -> None:
    ask = ask_for("ada", "m", {"prompt": "Once upon", "max_tokens": 20, "stop": ["\n"]}, "completions")
    assert (ask.chat, ask.streams, ask.payload["prompt"], ask.max_length) == (False, True, "Once upon", 20)
    assert "messages" not in ask.payload
    assert stops(ask) == ["\n"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 2}, "n"),
        ({"max_tokens": 15}, "max_tokens"),
        ({"max_tokens": 16_385}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": 1}, "max_completion_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": "a\0"}, "stop"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"functions": [{}]}, "functions"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": "f"}, "tools"),
        ({"tools": ["f"]}, "tools"),
        ({"tools": [{"type": "function", "function": "f"}]}, "tools"),
        ({"tools": [{**TOOL, "x": "y" * 262_144}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": nested(11)}}]}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["x"]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "wizard", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a\0b"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "é" * 600_000}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": 5}}]}]},
            "messages[0].content[0].image_url.url",
        ),
        ({"messages": [{"role": "user", "content": "x" * 2**20}] * 4}, "messages"),
    ],
)
def test_what_no_worker_can_be_asked_is_refused_by_its_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        chat(**body)
    assert refused.value.param == param


@pytest.mark.parametrize("prompt", [None, "", ["a", "b"], [1, 2], 5, "a\0"])
def test_completion_has_one_prompt(prompt: Any) -> None:
    with pytest.raises(BadRequest) as refused:
        ask_for("ada", "m", {"prompt": prompt}, "completions")
    assert refused.value.param == "prompt"


def test_assistant_s_message_may_be_calls_alone() -> None:
    calls = [{"role": "assistant", "content": None, "tool_calls": [{}]}, {"role": "tool", "content": "1"}]
    assert chat(messages=[*HELLO, *calls]).payload["messages"] == [*HELLO, *calls]


def test_schema_of_ten_levels_is_within_the_bound() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": nested(10)}}]
    assert chat(tools=tools).payload["tools"] == tools


def test_reply_loses_the_stop_string_that_was_ours() -> None:
    """At its end, once; nothing else of it changes."""
    assert without_turn(Reply(f"a{TURN}", "hm")) == Reply("a", "hm")
    assert without_turn(Reply(f"a{TURN} b")) == Reply(f"a{TURN} b")
    assert without_turn(Reply(None)) == Reply(None)


def test_ask_is_answered_on_its_stream() -> None:
    ask = chat()
    assert ask.stream_id is None
    assert on_stream(ask, "s").stream_id == "s"
