"""OpenAI's format on the wire: resumed after any event, in any format and over any transport; and every refusal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk
from starlette.middleware.gzip import GZipMiddleware

from midstream.codec.chat import ChatEvents, Style
from midstream.codec.sse import Decoder, Event
from midstream.errors import CursorExpired, ProducerFailed, StoreUnavailable
from midstream.producers.continuation import Continuation
from midstream.records import Chunk, StreamMeta
from midstream.testing import grpc_dial, ws_dial
from midstream.testing.patience import soon, until
from midstream.testing.transport_dial import ADA, KEYS
from midstream.testing.upstream import (
    DONE,
    MisbehavingUpstream,
    Script,
    Stall,
    chat_answer,
    chat_event,
    completion_event,
)
from midstream.transports.openai_chat import ChatRendering
from midstream.wire import H_STREAM_ID
from tests.gateways import Answer, Http, Site, cursor, heard, site
from tests.valkeys import shared

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest_asyncio.fixture
async def puppeteer(tmp_path: Path) -> AsyncIterator[Site]:
    """A gateway with keys, whose model says what the test says."""
    (tmp_path / "keys").write_text(KEYS)
    async with site(keys_file=str(tmp_path / "keys"), max_body=4096, max_streams=3) as running:
        yield running


async def asked(http: Http, model: str, path: str = CHAT, **body: Any) -> Answer:
    given = HELLO if path == CHAT else {"prompt": "Hello"}
    return await http.post(path, given | {"model": model, "stream": True} | body)


def events(body: bytes) -> list[Event]:
    decoder = Decoder()
    said = decoder.feed(body)
    assert decoder.close() == b""
    return said


def resumed_at(said: list[Event], cut: int) -> tuple[int, list[Event]]:
    """The position of a reader who has dispatched so many events, and what it is still to be given."""
    position, after = 0, 0
    for place, event in enumerate(said[:cut], 1):
        if event.id is not None:
            position, after = int(event.id), place
    return position, said[after:]


# --- resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["chat", "completions"])
async def test_cut_after_any_event_and_resumed_it_is_the_same(
    here: Site, upstream: MisbehavingUpstream, route: str
) -> None:
    """I3, with what the first request asked: its choices, its usage, its route."""
    body: dict[str, Any] = {"stream_options": {"include_usage": True}, "n": 2}
    path, model = CHAT, "choices-interleaved"
    if route == "completions":
        path, model = "/v1/completions", "texts"
        ends = [completion_event(finish_reason="stop"), completion_event(choice=1, finish_reason="stop"), DONE]
        upstream.script(model, Script([completion_event("a"), completion_event("b", choice=1), *ends]))
    answer = await asked(here.http, model, path, **body)
    stream_id = answer.headers[H_STREAM_ID.lower()]
    place = answer.headers["location"]
    assert place == f"/v1/stream/{stream_id}?format=openai"
    said = events(answer.body)
    for cut in range(len(said) + 1):
        position, rest = resumed_at(said, cut)
        if position == 0:
            resumed = await here.http.get(f"{place}&from=start")
        elif cut % 2:
            resumed = await here.http.get(place, {"Last-Event-ID": str(position)})
        else:
            resumed = await here.http.get(f"{place}&cursor={cursor(stream_id, position)}")
        assert resumed.status == (200 if rest else 204)
        assert events(resumed.body) == rest
        if rest:
            assert resumed.headers["location"] == place
            assert b"retry:" not in resumed.body


async def test_resume_keeps_what_the_first_request_asked(here: Site, upstream: MisbehavingUpstream) -> None:
    """Reasoning, logprobs and usage: the same kinds of event as before the drop."""
    steps = [chat_event({"reasoning_content": "h"}), chat_event("a", logprobs={"content": [{"token": "a"}]})]
    usage = chat_event(choices=[], usage={"total_tokens": 3})
    upstream.script("m", Script([*steps, chat_event(finish_reason="stop"), usage, DONE]))
    answer = await asked(here.http, "m", logprobs=True, stream_options={"include_usage": True})
    place = f"/v1/stream/{answer.headers[H_STREAM_ID.lower()]}?format=openai"
    rest = (await here.http.get(place, {"Last-Event-ID": "1"})).body
    assert answer.body.endswith(rest)
    for kind in (b'"reasoning_content":"h"', b'"logprobs":{', b'"usage":{"total_tokens":3}', b"data: [DONE]"):
        assert rest.count(kind) == 1


async def assembled(here: Site, model: str, body: bytes) -> list[Any]:
    """What OpenAI's own assembler makes of the answer: uncut, and cut after every event and resumed."""
    stream_id = json.loads(events(body)[0].data)["id"].removeprefix("chatcmpl-")
    said = events(body)
    outcomes = []
    for cut in [len(said), *range(len(said))]:
        position, _ = resumed_at(said, cut)
        first = [event for event in said if event.id is not None and int(event.id) <= position]
        rest = await here.http.get(f"/v1/stream/{stream_id}?format=openai&cursor={cursor(stream_id, position)}")
        state = ChatCompletionStreamState()
        for event in first + events(rest.body):
            if event.data != b"[DONE]":
                state.handle_chunk(ChatCompletionChunk.model_validate_json(event.data))
        calls = state.get_final_completion().choices[0].message.tool_calls or ()
        outcomes.append([(call.id, call.function.name, call.function.arguments) for call in calls])
    return outcomes


async def test_parallel_tool_calls_survive_a_drop_inside_an_escape(here: Site) -> None:
    """Arguments cut inside `\\u00e9`: dropped there and gone on with, it is the same two valid texts."""
    answer = await asked(here.http, "parallel-tool-calls")
    outcomes = await assembled(here, "parallel-tool-calls", answer.body)
    expected = [("call_a", "first", '{"x":"\\u00e9"}'), ("call_b", "second", '{"y":1}')]
    assert all(outcome == expected for outcome in outcomes)


async def test_parallel_tool_calls_of_one_index_pass_as_they_are(here: Site, upstream: MisbehavingUpstream) -> None:
    """Both have index 0, the second has no id later on: the deltas arrive unchanged and in order, a drop makes no
    difference to who assembles them, and the whole answer has two calls."""
    deltas: list[dict[str, Any]] = [
        {"index": 0, "id": "call_a", "type": "function", "function": {"name": "f", "arguments": '{"x":"\\u00'}},
        {"index": 0, "function": {"arguments": 'e9"}'}},
        {"index": 0, "id": "call_b", "type": "function", "function": {"name": "g", "arguments": '{"y"'}},
        {"index": 0, "function": {"arguments": ":1}"}},
    ]
    steps = [chat_event({"tool_calls": [delta]}) for delta in deltas]
    upstream.script("m", Script([*steps, chat_event(finish_reason="tool_calls"), DONE]))
    answer = await asked(here.http, "m")
    chunks = [json.loads(event.data) for event in events(answer.body)[:-1]]
    assert [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())] == deltas
    uncut, *cut = await assembled(here, "m", answer.body)
    assert all(outcome == uncut for outcome in cut)
    whole = (await asked(here.http, "m", stream=False)).json["choices"][0]
    assert [json.loads(call["function"]["arguments"]) for call in whole["message"]["tool_calls"]] == [
        {"x": "é"},
        {"y": 1},
    ]


async def test_a_live_stream_is_followed_in_this_format(puppeteer: Site) -> None:
    """From the middle, in step with the records, heartbeats between them."""
    ada = puppeteer.http.keyed(ADA)
    stream_id, puppet = await puppeteer.open_stream("a", "b", http=ada)
    reader = await ada.open("GET", f"/v1/stream/{stream_id}?format=openai&cursor={cursor(stream_id, 2)}")
    body = await heard(reader, b'"b"')
    await puppeteer.gateway.idle(stream_id)
    await puppeteer.gateway.pulse(puppeteer.gateway.settings.heartbeat)
    await puppet.say("c")
    body += await heard(reader, b'"c"')
    await puppet.finish()
    body += await soon(reader.read())
    assert b": ping\nid: 4\ndata: {" in body
    assert [event.id for event in events(body)] == ["3", "4", None, "5"]
    for name, value in (("Cache-Control", "no-store, no-transform"), ("X-Accel-Buffering", "no")):
        assert reader.headers[name] == value
    assert "Content-Length" not in reader.headers


async def test_middleware_around_changes_nothing(upstream: MisbehavingUpstream) -> None:
    """Where the server's own way past it is closed: the same events, one by one, and the same last words."""
    upstream.script("m", Script([chat_event("Hel"), Stall()]))

    def around(app: Any) -> Any:
        return GZipMiddleware(app, minimum_size=0)

    async with site(upstream=(upstream.url,), around=around) as here:
        polite = await asked(here.http.sending(Accept_Encoding="gzip"), "polite")
        assert "content-encoding" not in polite.headers
        assert [event.id for event in events(polite.body)] == ["1", "2", "3", "4", None, "5"]
        reader = await here.http.open("POST", CHAT, json=HELLO | {"model": "m", "stream": True})
        body = await heard(reader, b"Hel")
        await here.gateway.idle(reader.headers[H_STREAM_ID])
        await here.gateway.pulse(here.gateway.settings.heartbeat)
        body += await heard(reader, b": ping\n")
        [follow] = here.gateway.readers(reader.headers[H_STREAM_ID])
        follow.interrupt()
        last = events(body + await soon(reader.read()))[-1]
        assert (last.id, json.loads(last.data)["error"]["code"]) == (None, "interrupted")


async def test_client_that_waits_for_its_headers_is_there(puppeteer: Site) -> None:
    """Its stream is not abandoned while the upstream thinks about whether to accept."""
    waiting = asyncio.ensure_future(asked(puppeteer.http.keyed(ADA), "puppet", abandon_after=1))
    puppet = await puppeteer.puppets.next()
    [stream_id] = puppeteer.gateway.streams.writers
    await until(lambda: puppeteer.gateway.readers(stream_id), "the client to be seen")
    puppeteer.gateway.clock.advance(5)
    await puppeteer.gateway.streams.pulse(1.0)
    await puppet.say("a")
    await puppet.finish()
    assert events((await soon(waiting)).body)[-1].data == b"[DONE]"


async def test_client_that_waits_for_its_headers_as_its_gateway_leaves_is_told_where_to_go_on() -> None:
    """The answer goes on elsewhere: to send its client away without the place would have it made, and paid, twice."""
    async with site(journal=shared().url(f"t{uuid4().hex}")) as here:
        opening = asyncio.ensure_future(here.http.open("POST", CHAT, json=HELLO | {"model": "puppet", "stream": True}))
        await here.puppets.next()
        await here.gateway.streams.drain(0)
        reader = await soon(opening)
        await here.gateway.idle(reader.headers[H_STREAM_ID])
        await here.gateway.streams.close()
        last = json.loads(events(await soon(reader.read()))[-1].data)["error"]
        assert last["code"] == "interrupted"
        assert reader.headers["Location"] in last["message"]


@pytest.mark.parametrize("wanted", ["", "native", "OpenAI", "openai&format=openai"])
async def test_any_other_format_is_refused(puppeteer: Site, wanted: str) -> None:
    ada = puppeteer.http.keyed(ADA)
    stream_id = await puppeteer.told("a", http=ada)
    answer = await ada.get(f"/v1/stream/{stream_id}?from=start&format={wanted}")
    assert (answer.status, answer.error) == (400, "bad_request")
    assert "openai" in answer.json["detail"]


async def test_positions_are_refused_as_ever(puppeteer: Site) -> None:
    """The place is a native one, whatever is rendered: its errors have their exact bodies."""
    ada = puppeteer.http.keyed(ADA)
    stream_id = await puppeteer.told("a", http=ada)
    place = f"/v1/stream/{stream_id}?format=openai"
    for path, status, body in (
        (place, 400, "bad_cursor"),
        (f"{place}&cursor={cursor('x', 1)}", 403, "wrong_stream"),
        (f"/v1/stream/x?format=openai&cursor={cursor('x', 1)}", 404, "unknown_stream"),
        (f"{place}&cursor={cursor(stream_id, 99)}", 409, "cursor_ahead"),
    ):
        answer = await ada.get(path)
        assert (answer.status, answer.error) == (status, body)


def test_last_words_are_an_error_without_a_position() -> None:
    """Whatever ended the connection before the answer: an official client raises, and nobody moves on."""
    rendering = ChatRendering(
        "/v1/stream/abc?format=openai", ChatEvents(Style(StreamMeta("abc", "ada", "m", 1.0, 600.0)))
    )
    for error, code in ((None, "interrupted"), (CursorExpired(7), "cursor_expired"), (StoreUnavailable("x"), None)):
        [event] = events(rendering.interrupted(error))
        assert event.id is None
        assert json.loads(event.data)["error"]["code"] == (code or "store_unavailable")


# --- other formats, other transports ---------------------------------------------------------------------------------


async def test_a_stream_of_one_format_reads_in_the_other(here: Site) -> None:
    answer = await asked(here.http, "polite")
    stream_id = answer.headers[H_STREAM_ID.lower()]
    records = events((await here.http.get(f"/v1/stream/{stream_id}?from=start")).body)
    assert [event.event for event in records] == ["start", "token", "token", "token", "done"]
    assert [event.id for event in records] == [event.id for event in events(answer.body) if event.id is not None]
    native = await here.http.create(model="polite")
    made = native.headers[H_STREAM_ID]
    await soon(native.read())
    chunks = events((await here.http.get(f"/v1/stream/{made}?format=openai&from=start")).body)
    assert chunks[-1].data == b"[DONE]"
    texts = [json.loads(event.data)["choices"][0]["delta"].get("content", "") for event in chunks[:-1]]
    assert "".join(texts) == "Hello, world"


@pytest.mark.parametrize("dial", [ws_dial, grpc_dial], ids=["WebSocket", "gRPC"])
async def test_a_chat_reads_over_other_transports(puppeteer: Site, dial: Any) -> None:
    ada = puppeteer.http.keyed(ADA)
    asking = asyncio.ensure_future(asked(ada, "puppet"))
    puppet = await puppeteer.puppets.next()
    await puppet.say("a", "b")
    await puppet.finish()
    stream_id = (await soon(asking)).headers[H_STREAM_ID.lower()]
    async with dial.connect(puppeteer.gateway, ADA) as dialled:
        reader = await dialled.resume(stream_id, 2)
        said = []
        while (record := await soon(reader.next())) is not None:
            said.append((record.seq, record.fields.get("delta")))
    assert said[0] == (3, "b")
    assert [seq for seq, _ in said] == [3, 4]


# --- whole answers and keys ------------------------------------------------------------------------------------------


async def test_client_that_was_lost_fetches_the_finished_answer(puppeteer: Site) -> None:
    """With its Idempotency-Key and the same request: the model is not asked again."""
    ada, body, key = puppeteer.http.keyed(ADA), HELLO | {"model": "puppet"}, {"Idempotency-Key": "k1"}
    lost = asyncio.ensure_future(ada.post(CHAT, body, key))
    puppet = await puppeteer.puppets.next()
    await puppet.say("Hel")
    lost.cancel()
    [stream_id] = puppeteer.gateway.streams.writers
    await puppeteer.gateway.unread(stream_id)
    await puppet.say("lo")
    await puppet.finish(usage={"total_tokens": 3})
    for _ in range(2):
        answer = await ada.post(CHAT, body, key)
        assert (answer.status, answer.json["id"]) == (200, f"chatcmpl-{stream_id}")
        assert answer.json["choices"][0]["message"]["content"] == "Hello"
        assert answer.headers["location"] == f"/v1/stream/{stream_id}?format=openai"
    assert puppeteer.puppets.begun == 1
    for path, other in ((CHAT, body | {"n": 2}), (CHAT, body | {"stream": True}), ("/v1/stream", body)):
        refused = await ada.post(path, other, key)
        assert refused.status == 422


async def test_two_tries_at_once_are_one_answer(puppeteer: Site) -> None:
    ada, key = puppeteer.http.keyed(ADA).sending(Idempotency_Key="k1"), "puppet"
    tries = [asyncio.ensure_future(asked(ada, key)) for _ in range(3)]
    puppet = await puppeteer.puppets.next()
    await puppet.say("a")
    await puppet.finish()
    answers = [await soon(one) for one in tries]
    assert len({answer.body for answer in answers}) == 1
    assert puppeteer.puppets.begun == 1


async def test_retry_at_another_gateway_waits_for_the_status_too(tmp_path: Path) -> None:
    """Where another process writes the stream: until there is a word of it, or its end."""
    settings: dict[str, Any] = {"journal": shared().url(f"t{uuid4().hex}")}
    async with site(**settings) as one, site(**settings) as other:
        first = asyncio.ensure_future(asked(one.http.sending(Idempotency_Key="k1"), "puppet"))
        puppet = await one.puppets.next()
        second = asyncio.ensure_future(asked(other.http.sending(Idempotency_Key="k1"), "puppet"))
        await soon(asyncio.wait([second], timeout=0.3))
        assert not second.done()
        puppet.push(ProducerFailed("upstream_error", "slow down", status=429))
        for answer in (await soon(first), await soon(second)):
            assert vendors(answer, 429, "upstream_error")["message"] == "slow down"
        assert other.puppets.begun == 0


async def test_acked_records_are_in_the_whole_answer_all_the_same(puppeteer: Site) -> None:
    ada, key = puppeteer.http.keyed(ADA), {"Idempotency-Key": "k1"}
    body = HELLO | {"model": "puppet", "n": 2}
    waiting = asyncio.ensure_future(ada.post(CHAT, body, key))
    puppet = await puppeteer.puppets.next()
    await puppet.say_chunks([Chunk("A"), Chunk("X", {"choice": 1}), Chunk("B"), Chunk("", {"finish_reason": "stop"})])
    await puppet.say_chunks([Chunk("Y", {"choice": 1}), Chunk("", {"choice": 1, "finish_reason": "length"})])
    await puppet.finish(finish_reason="stop")
    stream_id = (await soon(waiting)).json["id"].removeprefix("chatcmpl-")
    await ada.post(f"/v1/stream/{stream_id}/ack", {"seq": 5})
    answer = await ada.post(CHAT, body, key)
    said = [(one["message"]["content"], one["finish_reason"]) for one in answer.json["choices"]]
    assert said == [("AB", "stop"), ("XY", "length")]
    live = events((await ada.get(f"/v1/stream/{stream_id}?format=openai&cursor={cursor(stream_id, 5)}")).body)
    assert all(b'"role"' not in event.data for event in live), "choice 1 had its role with a record that is gone"


@pytest.mark.parametrize("route", ["chat", "completions"])
async def test_stream_whose_gateway_died_is_continued_on_its_route(
    upstream: MisbehavingUpstream, tmp_path: Path, route: str
) -> None:
    """Out of route and body that were kept with it, by prefill; and it renders as before."""
    event = chat_event if route == "chat" else completion_event
    path = CHAT if route == "chat" else "/v1/completions"
    upstream.script("m", Script([event("Hel"), Stall()]), Script([event("lo"), event(finish_reason="stop"), DONE]))
    settings: dict[str, Any] = {
        "journal": f"sqlite:///{tmp_path}/journal.db",
        "upstream": (upstream.url,),
        "continuation": (Continuation("*", "prefill"),),
    }
    given = (HELLO if route == "chat" else {"prompt": "Hello"}) | {"model": "m", "stream": True}
    async with site(**settings) as first:
        reader = await first.http.open("POST", path, json=given)
        stream_id, place = reader.headers[H_STREAM_ID], reader.headers["Location"]
        before = await heard(reader, b"Hel")
    async with site(**settings) as second:
        after = await second.http.get(f"{place}&from=start")
        [continued] = upstream.requests[1:]
        assert continued.path == path
        if route == "chat":
            assert continued.json["messages"][-1] == {"role": "assistant", "content": "Hel"}
        else:
            assert continued.json["prompt"] == "HelloHel"
    assert after.body.startswith(before)
    assert b'"seam":"writer_lost"' in after.body
    assert events(after.body)[-1].data == b"[DONE]"
    assert stream_id in place


# --- refusals --------------------------------------------------------------------------------------------------------


def vendors(answer: Answer, status: int, code: str | None, param: str | None = None) -> dict[str, Any]:
    """The error of an answer, which has the vendor's shape and nothing else."""
    assert answer.status == status, answer.body
    assert list(answer.json) == ["error"]
    error: dict[str, Any] = answer.json["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (error["code"], error["param"]) == (code, param)
    assert error["message"]
    return error


async def test_every_refusal_has_the_vendors_shape(puppeteer: Site) -> None:
    ada = puppeteer.http.keyed(ADA)
    vendors(await puppeteer.http.post(CHAT, HELLO), 401, "invalid_api_key")
    vendors(await puppeteer.http.get("/v1/models"), 401, "invalid_api_key")
    vendors(await ada.post(CHAT, HELLO | {"model": "nobody"}), 404, "model_not_found", "model")
    vendors(await ada.get("/v1/models/nobody"), 404, "model_not_found", "model")
    vendors(await ada.get("/v1/chat/completions/x"), 404, "not_found")
    vendors(await ada.ask("GET", CHAT), 405, "method_not_allowed")
    vendors(await ada.post(f"{CHAT}?x=1", HELLO), 400, "bad_request")
    vendors(await ada.post(CHAT, {}), 400, "missing_required_parameter", "messages")
    vendors(await ada.post(CHAT, HELLO | {"temperature": "hot"}), 400, "invalid_type", "temperature")
    vendors(await ada.post("/v1/completions", {"prompt": 7}), 400, "invalid_type", "prompt")
    vendors(await ada.post(CHAT, [HELLO]), 400, "bad_request")
    vendors(await ada.ask("POST", CHAT, {"Content-Type": "application/json"}, data=b"{"), 400, "bad_request")
    vendors(await ada.ask("POST", CHAT, {"Content-Type": "text/plain"}, data=b"{}"), 415, "unsupported_media_type")
    vendors(await ada.post(CHAT, HELLO | {"user": "x" * 5000}), 413, "too_large")
    vendors(await ada.sending(Origin="http://evil.example").post(CHAT, HELLO), 403, "forbidden_origin")
    vendors(await ada.post(CHAT, HELLO, {"Idempotency-Key": "x" * 300}), 400, "bad_request")
    assert puppeteer.puppets.begun == 0


async def test_a_name_that_no_model_has_is_not_asked_for(here: Site, upstream: MisbehavingUpstream) -> None:
    """It would stand in every chunk that every reader is sent, where an upstream takes any name."""
    assert (await asked(here.http, "m" * 1024)).status == 200
    begun = len(upstream.requests)
    vendors(await asked(here.http, "m" * 1025), 404, "model_not_found", "model")
    assert len(upstream.requests) == begun


async def test_deep_nesting_is_refused(puppeteer: Site) -> None:
    ada = puppeteer.http.keyed(ADA)
    for depth in (300, 1000, 1900):
        body = b'{"messages":[{"content":' + b"[" * depth + b"]" * depth + b"}]}"
        vendors(await ada.ask("POST", CHAT, {"Content-Type": "application/json"}, data=body), 400, "bad_request")


async def test_limits_say_when_to_come_again(puppeteer: Site) -> None:
    ada = puppeteer.http.keyed(ADA)
    for _ in range(3):
        await puppeteer.open_stream("a", http=ada)
    answer = await ada.post(CHAT, HELLO)
    error = vendors(answer, 429, "rate_limit_exceeded")
    assert error["type"] == "requests"
    assert int(answer.headers["retry-after"]) > 0


async def test_shutdown_is_told_with_its_status(puppeteer: Site) -> None:
    """To who comes too late, and to who waits for a whole answer."""
    ada = puppeteer.http.keyed(ADA)
    waiting = asyncio.ensure_future(ada.post(CHAT, HELLO))
    await puppeteer.puppets.next()
    await puppeteer.gateway.streams.drain(0)
    vendors(await soon(waiting), 503, "cancelled")
    await until(lambda: not puppeteer.gateway.streams.writers)
    answer = await ada.post(CHAT, HELLO)
    vendors(answer, 503, "shutting_down")
    assert "retry-after" in answer.headers


async def test_models_of_a_gateway_without_any_are_none() -> None:
    async with site(upstream=("only-this=http://127.0.0.1:9/v1",)) as here:
        listed = (await here.http.get("/v1/models")).json
        assert [model["id"] for model in listed["data"]] == ["only-this"], "its name is known, though it is away"
        vendors(await here.http.post(CHAT, HELLO | {"model": "other"}), 404, "model_not_found", "model")
        assert (await here.http.get("/v1/models/only-this")).json["object"] == "model"


async def test_other_routes_keep_their_own_errors(puppeteer: Site) -> None:
    for path in ("/v1/stream/x/state", "/v1/modelsx", "/v1/chat"):
        answer = await puppeteer.http.get(path)
        assert answer.error == "unauthorized"


async def test_upstreams_headers_are_not_ours(here: Site, upstream: MisbehavingUpstream) -> None:
    """Its length and its compression are of its own body."""
    upstream.script("m", Script(chat_answer("Hel", "lo"), framing="length", gzip=True, headers={"X-Upstream": "1"}))
    for stream in (True, False):
        answer = await asked(here.http, "m", stream=stream)
        assert answer.status == 200
        assert "content-encoding" not in answer.headers
        assert "x-upstream" not in answer.headers
        assert ("content-length" in answer.headers) is not stream
