"""What the completion routes take: a slip is told with the field's name, and the rest goes on as it came."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from midstream.errors import BadRequest
from midstream.transports.asking import NATIVE, Front, asked
from midstream.transports.openai_asking import CHAT, COMPLETIONS

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.mark.parametrize(
    ("front", "body", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": None}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "Hello"}, "messages"),
        (CHAT, {"messages": ["Hello"]}, "messages"),
        (CHAT, {"prompt": "Hello"}, "messages"),
        (CHAT, {"model": 7}, "model"),
        (CHAT, {"model": ""}, "model"),
        (CHAT, {"stream": "yes"}, "stream"),
        (CHAT, {"stream": 1}, "stream"),
        (CHAT, {"stream_options": []}, "stream_options"),
        (CHAT, {"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        (CHAT, {"n": 0}, "n"),
        (CHAT, {"n": True}, "n"),
        (CHAT, {"n": "2"}, "n"),
        (CHAT, {"max_tokens": 1.5}, "max_tokens"),
        (CHAT, {"temperature": "hot"}, "temperature"),
        (CHAT, {"tools": {}}, "tools"),
        (CHAT, {"tool_choice": 1}, "tool_choice"),
        (CHAT, {"stop": [1]}, "stop"),
        (CHAT, {"logprobs": 3}, "logprobs"),
        (CHAT, {"response_format": "json"}, "response_format"),
        (CHAT, {"abandon_after": 0}, "abandon_after"),
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": 7}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "logprobs": True}, "logprobs"),
    ],
)
def test_a_slip_is_told_with_the_fields_name(front: Front, body: dict[str, Any], param: str) -> None:
    complete = body if param in ("messages", "prompt") or front is COMPLETIONS else HELLO | body
    with pytest.raises(BadRequest) as caught:
        asked(complete, front)
    assert caught.value.param == param
    assert param.split(".")[0] in caught.value.detail
    missing = complete.get(param.split(".")[0]) is None
    assert caught.value.reason == ("missing_required_parameter" if missing else "invalid_type")


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_prompts_of_every_kind(prompt: Any) -> None:
    assert asked({"prompt": prompt}, COMPLETIONS).upstream == {"prompt": prompt}


def test_what_is_asked_goes_on_but_for_what_is_ours() -> None:
    """Null stands for what is left out."""
    body = HELLO | {"model": "m", "stream": True, "abandon_after": 30, "n": None, "store": True, "x": {"y": 1}}
    what = asked(body, CHAT)
    assert (what.model, what.stream, what.abandon_after, what.front.route) == ("m", True, 30, "chat")
    assert what.upstream == HELLO | {"n": None, "store": True, "x": {"y": 1}}
    assert not asked(HELLO, CHAT).stream, "whole, where nothing else is said"
    kept = orjson.loads(what.request)
    assert (kept["route"], kept["body"]) == ("/v1/chat/completions", body)


def test_the_same_request_is_the_same_however_it_is_written() -> None:
    """But not on another route."""
    one, other = asked(HELLO | {"stream": False, "n": 1}, CHAT), asked({"n": 1} | HELLO, CHAT)
    assert one.is_of(other.request)
    assert other.is_of(one.request)
    assert not one.is_of(asked(HELLO | {"n": 1, "stream": True}, CHAT).request)
    assert not asked(HELLO | {"x": 1}, CHAT).is_of(asked(HELLO | {"x": True}, CHAT).request), "1 is not true"
    assert not asked(HELLO, CHAT).is_of(asked(HELLO | {"stream": False}, NATIVE).request)
    assert not asked(HELLO, CHAT).is_of(b"{}"), "nor one that was not kept"
