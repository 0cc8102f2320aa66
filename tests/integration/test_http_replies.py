"""Asking twice, and answers in one piece (PROTOCOL.md, sections 8 and 9)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from midstream.records import Chunk
from midstream.wire import H_STREAM_ID
from tests.gateways import Site, cursor, site, wire

JSON = {"Content-Type": "application/json"}


@pytest_asyncio.fixture
async def here() -> AsyncIterator[Site]:
    async with site() as running:
        yield running


# --- idempotency -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("journal", ["memory:", "sqlite:///{}/journal.db"])
async def test_simultaneous_tries_begin_one_generation(journal: str, tmp_path: Path) -> None:
    """All are the answer that `?from=start` on the one stream would be, also while that is still being written."""
    async with site(journal=journal.format(tmp_path)) as here:
        headers = {"Idempotency-Key": "once"}
        responses = await asyncio.gather(*(here.http.create(headers) for _ in range(5)))
        puppet = await here.puppets.next()
        await puppet.say("a")
        await puppet.finish()
        assert len({response.headers[H_STREAM_ID] for response in responses}) == 1
        assert here.puppets.begun == 1
        bodies = {(await response.read()).partition(b"\n")[2] for response in responses}
        again = await here.http.post("/v1/stream", {"prompt": "Hello"}, headers)
        assert {again.body.partition(b"\n")[2]} == bodies
        assert again.headers["location"] == f"/v1/stream/{responses[0].headers[H_STREAM_ID]}"


async def test_retry_in_the_middle_attaches_and_goes_on_live(here: Site) -> None:
    """A client that lost its connection before the first event hears all of it."""
    headers = {"Idempotency-Key": "once"}
    response = await here.http.create(headers)
    puppet = await here.puppets.next()
    response.close()
    await puppet.say("a")
    retry = await here.http.create(headers)
    await puppet.finish()
    assert (await retry.read()).count(b"\nid: ") == 3


async def test_order_of_fields_makes_no_other_body(here: Site) -> None:
    bodies = (
        b'{"prompt":"a","max_tokens":5,"x":{"b":1,"a":2}}',
        b'{"x": {"a": 2, "b": 1}, "max_tokens": 5, "prompt": "a"}',
    )
    ids = set()
    for body in bodies:
        response = await here.http.open("POST", "/v1/stream", JSON | {"Idempotency-Key": "k"}, data=body)
        ids.add(response.headers[H_STREAM_ID])
        response.close()
    assert len(ids) == 1


@pytest.mark.parametrize("other", [{"prompt": "b"}, {"prompt": "a", "max_tokens": 5}, {"prompt": "a", "stream": False}])
async def test_same_key_with_another_body_is_422(here: Site, other: dict[str, Any]) -> None:
    headers = {"Idempotency-Key": "once"}
    _, puppet, reader = await here.begin(here.http.sending(**headers), prompt="a")
    answer = await here.http.post("/v1/stream", other, headers)
    assert (answer.status, answer.error) == (422, "idempotency_mismatch")
    assert here.puppets.begun == 1
    await puppet.finish()
    assert b"event: done" in await reader.read()
    assert (await here.http.post("/v1/stream", other, headers)).status == 422


async def test_key_lives_as_long_as_its_stream(here: Site) -> None:
    """After the stream it is free, whether that expired or was deleted."""
    headers = {"Idempotency-Key": "once"}
    http = here.http.sending(**headers)
    first = await here.told("a", http=http)
    here.gateway.clock.advance(here.gateway.settings.retain + 1)
    await here.gateway.streams.pulse(0.0)
    second = await here.told("b", http=http, prompt="another")
    assert second != first
    await here.http.ask("DELETE", f"/v1/stream/{second}")
    third = await here.told("c", http=http, prompt="a third")
    assert third != second
    assert here.puppets.begun == 3


async def test_other_keys_and_no_key_begin_their_own(here: Site) -> None:
    """Keys are compared whole, character by character."""
    for key in ("k", "K", "k/x", "k ", "idem/k", "é", None):
        headers = {} if key is None else {"Idempotency-Key": key}
        response = await here.http.create(headers)
        response.close()
    assert here.puppets.begun == 6  # "k " is "k": blanks around a header's value are no part of it


@pytest.mark.parametrize("key", ["", "x" * 256])
async def test_idempotency_key_out_of_bounds_is_refused(here: Site, key: str) -> None:
    answer = await here.http.post("/v1/stream", {"prompt": "a"}, {"Idempotency-Key": key})
    assert (answer.status, answer.error) == (400, "bad_request")
    answer = await here.http.post("/v1/stream", {"prompt": "a"}, [("Idempotency-Key", "a"), ("Idempotency-Key", "a")])
    assert (answer.status, answer.error) == (400, "bad_request")
    assert here.puppets.begun == 0


# --- whole replies ---------------------------------------------------------------------------------------------------


async def test_whole_reply_is_a_snapshot_of_the_finished_stream(here: Site) -> None:
    """`stream: false` waits for the end."""
    asking = asyncio.create_task(here.http.post("/v1/stream", {"prompt": "a", "stream": False}))
    puppet = await here.puppets.next()
    await puppet.say("Hel", "lo")
    assert not asking.done()
    await puppet.finish("length", {"completion_tokens": 2})
    answer = await asking
    stream_id = answer.headers[H_STREAM_ID.lower()]
    assert (answer.status, answer.json) == (
        200,
        {
            "stream_id": stream_id,
            "seq": 4,
            "cursor": cursor(stream_id, 4),
            "text": "Hello",
            "complete": True,
            "status": "done",
            "model": "puppet",
            "finish_reason": "length",
            "usage": {"completion_tokens": 2},
        },
    )
    assert answer.headers["location"] == f"/v1/stream/{stream_id}"
    assert answer.headers["cache-control"] == "no-store"
    assert (await here.http.get(f"/v1/stream/{stream_id}/snapshot")).json == answer.json


async def test_whole_reply_of_a_failure_is_502_with_the_stream(here: Site) -> None:
    """What was said before the failure is not lost: the stream's id is in the answer."""
    asking = asyncio.create_task(here.http.post("/v1/stream", {"prompt": "a", "stream": False}))
    puppet = await here.puppets.next()
    await puppet.say("Hel")
    await puppet.fail("upstream_timeout", "too slow")
    answer = await asking
    stream_id = answer.headers[H_STREAM_ID.lower()]
    assert (answer.status, answer.json) == (
        502,
        {"error": "upstream_timeout", "detail": "too slow", "stream_id": stream_id},
    )
    assert (await here.http.get(f"/v1/stream/{stream_id}/snapshot")).json["text"] == "Hel"


async def test_whole_reply_of_a_cancelled_stream_is_502(here: Site) -> None:
    asking = asyncio.create_task(here.http.post("/v1/stream", {"prompt": "a", "stream": False}))
    await here.puppets.next()
    [stream_id] = here.gateway.streams.writers
    await here.http.post(f"/v1/stream/{stream_id}/cancel")
    answer = await asking
    assert (answer.status, answer.error, answer.json["stream_id"]) == (502, "cancelled", stream_id)


async def test_client_of_a_whole_reply_may_leave(here: Site) -> None:
    """I6: the generation goes on, and nothing waits for the client any more."""
    async with wire(here.gateway) as peer:
        body = b'{"prompt":"a","stream":false}'
        peer.request("POST", "/v1/stream", "Content-Type: application/json", f"Content-Length: {len(body)}", body=body)
        puppet = await here.puppets.next()
        [stream_id] = here.gateway.streams.writers
        await here.gateway.idle(stream_id)
        peer.drop()
        await here.gateway.unread(stream_id)
    await puppet.say("a")
    await puppet.finish()
    assert (await here.http.get(f"/v1/stream/{stream_id}/snapshot")).json["status"] == "done"


async def test_whole_reply_of_a_stream_that_outgrew_its_bound() -> None:
    """R9: a reply in one piece comes from the fold, and waits for the end although its reader is overtaken."""
    async with site(max_stream_records=3) as here:
        asking = asyncio.create_task(here.http.post("/v1/stream", {"prompt": "a", "stream": False}))
        puppet = await here.puppets.next()
        for _ in range(3):
            await puppet.say(*"abcdefgh")
        await puppet.finish()
        answer = await asking
        assert (answer.status, answer.json["text"]) == (200, "abcdefgh" * 3)


async def test_snapshot_tells_reasoning_choices_and_tools(here: Site) -> None:
    """What there is of them, per choice; and nothing of what there is not."""
    stream_id, puppet = await here.open_stream()
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":'}}
    await puppet.say_chunks([Chunk("A", {"reasoning": "hm"}), Chunk("B", {"choice": 1, "finish_reason": "stop"})])
    await puppet.say_chunks([Chunk("", {"tool_calls": [call]})])
    await puppet.say_chunks([Chunk("", {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]})])
    await puppet.finish()
    snapshot = (await here.http.get(f"/v1/stream/{stream_id}/snapshot")).json
    assert (snapshot["text"], snapshot["reasoning"]) == ("A", "hm")
    function = {"name": "f", "arguments": '{"a":1}'}
    assert snapshot["choices"] == [
        {
            "index": 0,
            "text": "A",
            "reasoning": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
            "finish_reason": "stop",
        },
        {"index": 1, "text": "B", "finish_reason": "stop"},
    ]
