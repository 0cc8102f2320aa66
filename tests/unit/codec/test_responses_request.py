"""A Responses request is the chat request that means the same, or is refused by the name of the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from midstream.codec.responses_input import input_items, page_of
from midstream.codec.responses_request import read_request
from midstream.errors import BadRequest

ASKED = {"model": "m", "input": "Hi"}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
OTHER = {"type": "function", "name": "g"}
CHAT_FUNCTION = {"type": "function", "function": {name: FUNCTION[name] for name in ("name", "parameters", "strict")}}
CHAT_OTHER = {"type": "function", "function": {"name": "g"}}
USER = {"role": "user", "content": "Hi"}
LOGPROBS = "message.output_text.logprobs"


def chat(**fields: Any) -> dict[str, Any]:
    """What the upstream is asked."""
    return read_request({**ASKED, **fields}).upstream


def test_text_alone_is_what_the_user_said() -> None:
    """Nothing is added to it."""
    assert read_request(ASKED) == ({"messages": [USER]}, "m", False, False)


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"temperature": 1, "top_p": 0.5}, {"temperature": 1, "top_p": 0.5}),
        ({"max_output_tokens": 9}, {"max_tokens": 9}),
        ({"user": "u", "service_tier": "flex", "prompt_cache_key": "k"},) * 2,
        ({"stop": ["x"], "seed": 1, "top_k": 4}, {"stop": ["x"], "seed": 1, "top_k": 4}),  # unknown to Responses
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {"verbosity": "low"}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {}, "strict": True},
                }
            },
        ),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        ({"reasoning": {"effort": None, "context": "auto", "mode": "standard"}}, {}),
        ({"include": [LOGPROBS]}, {"logprobs": True}),
        ({"include": [LOGPROBS], "top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
        ({"include": ["reasoning.encrypted_content"], "store": False, "truncation": "disabled"}, {}),
        ({"metadata": {"a": "b"}, "max_tool_calls": 3, "stream_options": {"include_obfuscation": False}}, {}),
        ({"n": 1, "previous_response_id": None, "conversation": None, "temperature": None}, {"n": 1}),
        ({"tools": [FUNCTION]}, {"tools": [CHAT_FUNCTION]}),
        ({"tools": [FUNCTION], "tool_choice": "required"}, {"tools": [CHAT_FUNCTION], "tool_choice": "required"}),
        (
            {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": False},
            {
                "tools": [CHAT_FUNCTION],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
                "parallel_tool_calls": False,
            },
        ),
        (
            {
                "tools": [FUNCTION, OTHER],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]},
            },
            {"tools": [CHAT_OTHER], "tool_choice": "auto"},
        ),
        ({"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}, {}),
    ],
)
def test_fields_have_their_place_in_chat(fields: dict[str, Any], asked: dict[str, Any]) -> None:
    """Under the name that chat has for them, or nowhere where there is nothing to say."""
    assert chat(**fields) == {**asked, "messages": [USER]}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([{"role": "developer", "content": "be brief"}, USER], [{"role": "system", "content": "be brief"}, USER]),
        ([{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}], [USER]),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}],
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        ),
        (
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": "http://x/y.png", "detail": "low"},
                        {"type": "input_file", "filename": "a.pdf", "file_data": "data:,x"},
                        {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
                    ],
                }
            ],
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "http://x/y.png", "detail": "low"}},
                        {"type": "file", "file": {"file_data": "data:,x", "filename": "a.pdf"}},
                        {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
                    ],
                }
            ],
        ),
        (
            [
                USER,
                {"type": "reasoning", "id": "rs_1", "summary": []},
                {
                    "type": "message",
                    "id": "msg_1",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "let me see", "annotations": [], "logprobs": []}],
                },
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{}", "status": "completed"},
                {"type": "function_call_output", "call_id": "a", "output": "1"},
                {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "2"}]},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            ],
            [
                USER,
                {
                    "role": "assistant",
                    "content": "let me see",
                    "tool_calls": [
                        {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                        {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
                    ],
                },
                {"role": "tool", "tool_call_id": "a", "content": "1"},
                {"role": "tool", "tool_call_id": "b", "content": "2"},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            ],
        ),
        (
            [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}],
            [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                }
            ],
        ),
    ],
)
def test_items_are_the_messages_of_a_chat(items: list[Any], messages: list[Any]) -> None:
    """Calls belong to what the assistant said before them; reasoning of earlier turns is left out."""
    assert chat(input=items)["messages"] == messages


def test_instructions_come_first() -> None:
    """As a message of the system's."""
    asked = chat(instructions="be brief", input=[{"role": "system", "content": "in French"}, USER])
    assert [message["content"] for message in asked["messages"]] == ["be brief", "in French", "Hi"]


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"input": True}, "input", "invalid_type"),
        ({"input": None}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": [5]}, "input[0]", "invalid_type"),
        ({"input": [USER, {"role": "robot", "content": "x"}]}, "input[1].role", "invalid_value"),
        ({"input": [{"content": "x"}]}, "input[0].role", "missing_required_parameter"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "invalid_type"),
        ({"input": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, "input[0].content[0].type",
         "invalid_value"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text",
         "missing_required_parameter"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
         "input[0].content[0].file_id", "unsupported_parameter"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "f"}]}]},
         "input[0].content[0].file_url", "unsupported_parameter"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "unsupported_parameter"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type", "unsupported_parameter"),
        ({"input": [{"type": ["x"]}]}, "input[0].type", "invalid_type"),
        ({"input": [USER | {"id": 5}]}, "input[0].id", "invalid_type"),
        ({"input": [USER | {"id": "a"}, USER, USER | {"id": "a"}]}, "input[2].id", "invalid_value"),
        ({"input": [{"type": json.loads("[" * 900 + "]" * 900)}]}, "input[0].type", "invalid_type"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": {}}]}, "input[0].arguments",
         "invalid_type"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id",
         "missing_required_parameter"),
        ({"model": ""}, "model", "invalid_value"),
        ({"model": 5}, "model", "invalid_type"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"temperature": True}, "temperature", "invalid_type"),
        ({"max_output_tokens": 1.5}, "max_output_tokens", "invalid_type"),
        ({"background": "yes"}, "background", "invalid_type"),
        ({"metadata": {"a": 5}}, "metadata.a", "invalid_type"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "invalid_value"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a", "invalid_value"),
        ({"include": ["everything"]}, "include[0]", "invalid_value"),
        ({"top_logprobs": 3}, "top_logprobs", "unsupported_parameter"),
        ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"conversation": {"id": "c"}}, "conversation", "unsupported_parameter"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
        ({"context_management": []}, "context_management", "unsupported_parameter"),
        ({"messages": []}, "messages", "unsupported_parameter"),
        ({"response_format": {}}, "response_format", "unsupported_parameter"),
        ({"max_tokens": 5}, "max_tokens", "unsupported_parameter"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema",
         "missing_required_parameter"),
        ({"text": {"tone": "dry"}}, "text.tone", "unsupported_parameter"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary", "invalid_value"),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context", "unsupported_parameter"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "unsupported_parameter"),
        ({"stream_options": {"include_usage": True}}, "stream_options.include_usage", "unsupported_parameter"),
        ({"tools": {}}, "tools", "invalid_type"),
        ({"tools": [{"type": "mcp"}]}, "tools[0].type", "unsupported_parameter"),
        ({"tools": [FUNCTION, {"type": "function", "function": {"name": "f"}}]}, "tools[1].name",
         "missing_required_parameter"),
        ({"tools": [FUNCTION | {"defer_loading": True}]}, "tools[0].defer_loading", "unsupported_parameter"),
        ({"tools": [FUNCTION | {"parameters": "{}"}]}, "tools[0].parameters", "invalid_type"),
        ({"tool_choice": "maybe"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "invalid_value"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [OTHER]}},
         "tool_choice.tools", "invalid_value"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_name(fields: dict[str, Any], param: str, reason: str) -> None:
    """Left out in silence it would change the answer."""
    with pytest.raises(BadRequest) as refusal:
        chat(**fields)
    assert (refusal.value.param, refusal.value.reason) == (param, reason)
    assert f"'{param}" in refusal.value.detail


ITEMS: list[Any] = [
    {"role": "user", "content": "Hi"},
    {"type": "reasoning", "id": "rs_mine", "summary": []},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": [{"type": "input_text", "text": "b"}, {"type": "input_image", "image_url": "u"}]},
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "1"},
]


def test_items_are_told_back_as_the_sdk_knows_them() -> None:
    """Whole, with an id each, and a text as the part it stands for."""
    items = input_items(ITEMS, "s")
    for item in items:
        TypeAdapter(ResponseItem).validate_python(item)
    assert [item["id"] for item in items] == [
        "msg_s_in0",
        "rs_mine",
        "msg_s_in2",
        "msg_s_in3",
        "fc_s_in4",
        "item_s_in5",
    ]
    assert items[0]["content"] == [{"type": "input_text", "text": "Hi"}]
    assert items[2]["content"][0]["type"] == "output_text"
    assert input_items("Hi", "s") == items[:1]


@pytest.mark.parametrize("newest_first", [True, False])
@pytest.mark.parametrize("limit", [1, 2, 6, 100])
def test_pages_make_the_list(limit: int, newest_first: bool) -> None:
    """Each item once, in order, and the last page says that it is the last."""
    items, got, after, more = input_items(ITEMS, "s"), [], None, True
    while more:
        page, more = page_of(items, after, limit, newest_first=newest_first)
        got += page
        after = page[-1]["id"]
    assert got == (items[::-1] if newest_first else items)
