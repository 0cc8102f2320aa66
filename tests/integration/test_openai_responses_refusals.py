"""What the Responses routes refuse, in the vendor's shape, and how responses fail: an SDK raises or is told, always."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from midstream.testing.patience import soon
from midstream.testing.upstream import (
    CloseClean,
    MisbehavingUpstream,
    Script,
    Status,
    chat_event,
    error_body,
    json_event,
)
from tests.responses import ASKED, Here, every, refused, responding

SCRIPTS = {
    "refusing": Script([Status(429, body=error_body("slow down"))]),
    "failing": Script([chat_event("Hel"), json_event({"error": {"message": "out of memory", "code": 500}})]),
    "limiting": Script([chat_event("Hel"), json_event({"error": {"message": "too fast", "code": 429}})]),
    "cut": Script([chat_event("Hel"), CloseClean()]),
}


@pytest_asyncio.fixture
async def here() -> AsyncIterator[Here]:
    async with responding() as running:
        yield running


@pytest_asyncio.fixture
async def failing() -> AsyncIterator[Here]:
    async with MisbehavingUpstream(SCRIPTS) as upstream, responding(upstream=(upstream.url,)) as running:
        yield running


@pytest.mark.parametrize(
    ("model", "code", "kind", "message"),
    [
        ("failing", "server_error", "upstream_error", "out of memory"),
        ("limiting", "rate_limit_exceeded", "upstream_error", "too fast"),
        ("cut", "server_error", "upstream_truncated", "ended early"),
    ],
)
async def test_a_response_that_fails_midway_says_why(
    failing: Here, model: str, code: str, kind: str, message: str
) -> None:
    """In its last event, in what is retrieved later, and to every later reader; what was said before stays (I7)."""
    events = await every(await failing.create(model=model, stream=True))
    failed = events[-1].response
    assert (events[-1].type, failed.status) == ("response.failed", "failed")
    assert (failed.error.code, failed.error.type) == (code, kind)
    assert message in failed.error.message
    assert (failed.output_text, failed.output[0].status) == ("Hel", "incomplete")
    assert await failing.whole(failed.id) == failed
    assert await failing.after(failed.id, events[-2].sequence_number) == events[-1:]


@pytest.mark.parametrize("stream", [True, False])
async def test_what_the_upstream_refuses_is_refused(failing: Here, stream: bool) -> None:
    """With its own status, before a client could take anything for a success."""
    with pytest.raises(openai.RateLimitError, match="slow down"):
        await failing.create(model="refusing", stream=stream)


async def test_a_whole_response_that_fails_raises(failing: Here) -> None:
    """A client that waits for all of it gets no half of it as if it were all."""
    with pytest.raises(openai.APIStatusError, match="ended early") as caught:
        await failing.create(model="cut")
    assert caught.value.status_code == 502
    with pytest.raises(openai.InternalServerError, match="out of memory"):
        await failing.create(model="failing")


async def test_a_background_response_that_is_refused_is_retrieved_as_failed(failing: Here) -> None:
    """It has been answered by then."""
    response = await failing.create(model="refusing", background=True)
    events = await failing.all(response.id)
    assert (events[-1].response.status, events[-1].response.error.code) == ("failed", "rate_limit_exceeded")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": None}, "input"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"abandon_after": -1}, "abandon_after"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(here: Here, fields: dict[str, Any], param: str) -> None:
    """And no model is asked."""
    body = {name: value for name, value in (ASKED | fields).items() if value is not None}
    answer = await here.site.http.post("/v1/responses", body)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)
    assert here.site.puppets.begun == 0


async def test_an_unknown_model_and_a_body_that_is_too_long_are_refused() -> None:
    """As the vendor does: 404 with the field, 413."""
    async with responding(max_body=1024) as here:
        assert await refused(here.create(model="nobody")) == (404, "model")
        assert await refused(here.create(input="x" * 2000)) == (413, None)


@pytest.mark.parametrize(
    "position",
    ["-1", "x", "1.5", "+1", "%201", "", "1e3", "%D9%A5", "1&starting_after=1", "10", "9007199254740992", "9" * 400],
)
async def test_a_position_that_nobody_can_have_is_refused(here: Here, position: str) -> None:
    """Negative, no number, twice, or past the end: never an answer that skips (I4)."""
    response_id, events = await here.told()
    assert len(events) == 9
    answer = await here.site.http.get(f"/v1/responses/{response_id}?stream=true&starting_after={position}")
    assert (answer.status, answer.json["error"]["param"]) == (400, "starting_after")


async def test_past_the_end_of_what_is_still_said_is_refused(here: Here) -> None:
    """A client that claims to have seen what is yet to come has mistaken the response (I4)."""
    response_id, _, puppet = await here.begin()
    for number in (5, 6, 100):
        assert await refused(here.after(response_id, number)) == (400, "starting_after")
    assert (await here.whole(response_id)).output_text == "Hel"
    await puppet.finish()


async def test_behind_the_last_event_there_is_nothing(here: Here) -> None:
    """200 and a stream that ends, which an SDK reads to its end without an error."""
    response_id, events = await here.told()
    answer = await here.site.http.get(f"/v1/responses/{response_id}?stream=true&starting_after={len(events) - 1}")
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize(
    "query", ["stream=1", "stream=", "stream=true&stream=true", "starting_afer=3", "starting_after=3"]
)
async def test_a_query_that_is_not_understood_is_refused(here: Here, query: str) -> None:
    """A slip in it would give another answer than was asked for."""
    response_id, _ = await here.told()
    assert (await here.site.http.get(f"/v1/responses/{response_id}?{query}")).status == 400


async def test_without_a_key_nothing_is_told(tmp_path: Any) -> None:
    """In the vendor's shape, so that the SDK raises what it raises there."""
    keys = tmp_path / "keys"
    keys.write_text("ann:key-of-ann\n")
    async with responding(keys_file=str(keys)) as here:
        with pytest.raises(openai.AuthenticationError):
            await soon(here.sdk.responses.retrieve("resp_x"))
