"""What an OpenAI-compatible server says is bounded, and can be told, however odd it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from midstream.codec import native
from midstream.codec.openai import ChatReader
from midstream.codec.upstream_errors import error_in, upstream_error
from midstream.errors import ProducerFailed
from midstream.records import Record
from midstream.wire import MAX_FIELD_BYTES


def event(*choices: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"id": "c1", "choices": choices, **fields}).encode()


def said(index: int, **delta: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta}


def nested(depth: int) -> Any:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "events",
    [
        [event(*(said(0, content="x") for _ in range(2049)))],
        [event(said(index, content="x")) for index in range(2049)],
        [event(said(0, tool_calls=[{"index": at, "function": {"arguments": "1"}} for at in range(2049)]))],
    ],
    ids=["choices at once", "choices one by one", "tool calls"],
)
def test_as_many_as_no_model_makes_are_refused(events: list[bytes]) -> None:
    """Each costs time of the loop and memory of the stream; what a real request can ask for is far below."""
    reader = ChatReader()
    *fine, last = events
    for data in fine:
        reader.read(data)
    with pytest.raises(ProducerFailed) as refused:
        reader.read(last)
    assert refused.value.failure == "upstream_malformed"
    ChatReader().read(event(*(said(index, content="x") for index in range(2048))))


@pytest.mark.parametrize("depth", [60, 900, 1010])
@pytest.mark.parametrize("field", ["message", "code", "anything"])
def test_error_nested_however_deep_is_the_upstreams_error(depth: int, field: str) -> None:
    """Not a fault of ours: what it says in its other fields is still told."""
    body = json.dumps({"error": {"type": "quota", field: 0}}).replace("0", "[" * depth + "]" * depth)
    for failure in (error_in(body.encode(), 429), failure_in_stream(body)):
        assert failure.failure == "upstream_error"
        assert failure.facts["upstream"]["type"] == "quota"
        Record.of(native.failed(2, failure)).json()


def failure_in_stream(data: str) -> ProducerFailed:
    with pytest.raises(ProducerFailed) as told:
        ChatReader().read(data.encode())
    return told.value


@pytest.mark.parametrize("reason", ["\ud800x", {"a": ["\udc00"]}, nested(50), "\ud83d\ude80"])
def test_any_finish_reason_can_be_told(reason: Any) -> None:
    """Half a surrogate pair in it becomes U+FFFD, as everywhere."""
    reader = ChatReader()
    reader.read(event(said(0, content="a")))
    reader.read(event({"index": 0, "delta": {}, "finish_reason": reason}))
    assert Record.of(native.done(3, reader.finish())).json()["finish_reason"]


@pytest.mark.parametrize("where", ["finish_reason", "usage", "upstream"])
def test_end_that_is_too_large_is_a_failure(where: str) -> None:
    """A terminal record is bounded like any other; none of its fields can be cut."""
    large = "x" * (MAX_FIELD_BYTES + 1)
    choice: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": large if where == "finish_reason" else "stop"}
    fields: dict[str, Any] = {"usage": {"note": large}} if where == "usage" else {}
    if where == "upstream":
        choice["stop_reason"] = large
    reader = ChatReader()
    reader.read(event(said(0, content="a")))
    reader.read(event(choice, **fields))
    with pytest.raises(ProducerFailed) as refused:
        native.done(3, reader.finish())
    assert refused.value.failure == "upstream_too_large"


def test_message_is_valid_unicode_wherever_it_comes_from() -> None:
    """Headers of an upstream are bytes; what no text can hold is replaced before it is journaled, logged or sent."""
    failure = ProducerFailed("upstream_malformed", "Content-Type te\udcffxt")
    assert failure.detail == "Content-Type te?xt"
    assert Record.of(native.failed(2, failure)).json()["error"]["message"] == "Content-Type te?xt"
    assert upstream_error("\ud800").detail == "\ufffd"
