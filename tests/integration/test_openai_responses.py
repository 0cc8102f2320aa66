"""An unchanged OpenAI SDK begins, resumes, reads, cancels and deletes responses in front of any chat model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import openai
import pytest
import pytest_asyncio
from starlette.middleware.gzip import GZipMiddleware

from midstream.cli.model import Model
from midstream.producers.continuation import continuation
from midstream.records import Chunk
from midstream.testing.patience import soon
from midstream.testing.puppet import Puppets
from midstream.testing.upstream import MisbehavingUpstream, Pause, Script, Stall, chat_answer, chat_event
from tests.gateways import site
from tests.responses import ASKED, USAGE, Here, every, kinds, refused, responding, sdk_of, stream_id_of
from tests.valkeys import shared

EVENTS_OF_TEXT = ["created", "in_progress", "output_item.added", "content_part.added"]
END_OF_TEXT = ["output_text.done", "content_part.done", "output_item.done", "completed"]


@pytest_asyncio.fixture
async def here() -> AsyncIterator[Here]:
    async with responding() as running:
        yield running


# --- resuming ---------------------------------------------------------------------------------------------------------


async def test_a_response_goes_on_behind_every_one_of_its_events(here: Here) -> None:
    """Whatever number a client has seen last, what it retrieves is the rest, once each, to the end (I3)."""
    response_id, events = await here.told("lo", " wörld")
    assert kinds(events) == [*EVENTS_OF_TEXT, *["output_text.delta"] * 3, *END_OF_TEXT]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == "Hello wörld"
    for event in events:
        assert await here.after(response_id, event.sequence_number) == events[event.sequence_number + 1 :]


async def test_a_response_is_resumed_while_it_is_said(here: Here) -> None:
    """First what was missed, then what comes; and to the first reader nothing happens (I3)."""
    response_id, first, puppet = await here.begin()
    second = await soon(here.sdk.responses.retrieve(response_id, stream=True, starting_after=2))
    assert [(await soon(anext(second))).sequence_number for _ in (3, 4)] == [3, 4]
    third = await soon(here.sdk.responses.retrieve(response_id, stream=True, starting_after=4))
    await puppet.say("lo")
    assert (await soon(anext(third))).delta == "lo"
    await puppet.finish()
    rest = await every(third)
    assert await every(second) == [*(await here.after(response_id, 4))[:1], *rest]
    assert [event.sequence_number for event in await every(first)] == list(range(1, 10))


async def test_a_long_response_goes_on_behind_every_one_of_its_events(here: Here) -> None:
    """Where the records that a resume passes over are more than one page of a reader (I3)."""
    response_id, events = await here.told("a" * 600_000, "b" * 300_000, "c")
    assert sum(event.type.endswith("text.delta") for event in events) > 5
    for event in events:
        assert await here.after(response_id, event.sequence_number) == events[event.sequence_number + 1 :]


async def test_middleware_around_changes_nothing() -> None:
    """Where the server's own way past it is closed, and an end is too large to be one piece."""
    async with responding(around=GZipMiddleware) as here:
        response_id, events = await here.told("a" * 100_000)
        assert await here.after(response_id, 3) == events[4:]


async def test_the_sdks_own_way_to_resume_replays_and_filters(here: Here) -> None:
    """`responses.stream(response_id=…)` wants the events from the first on, and puts the whole response together."""
    response_id, events = await here.told("lo")
    async with here.sdk.responses.stream(response_id=response_id, starting_after=4) as stream:
        assert [event.sequence_number async for event in stream] == [event.sequence_number for event in events[5:]]
        assert (await stream.get_final_response()).output_text == "Hello"


async def test_a_resume_has_the_options_of_the_first_request(here: Here) -> None:
    """It names nothing but the response and a number, and the events are of the same kinds as before."""
    options: Any = {"include": ["message.output_text.logprobs"], "reasoning": {"summary": "auto"}, "top_logprobs": 1}
    response_id, stream, puppet = await here.begin(**options)
    entry = {"token": "lo", "logprob": -0.5, "bytes": [108, 111], "top_logprobs": []}
    await puppet.say_chunks([Chunk("", {"reasoning": "so"}), Chunk("lo", {"logprobs": {"content": [entry]}})])
    await puppet.finish(usage=USAGE)
    events = await every(stream)
    assert "reasoning_summary_text.delta" in kinds(events)
    told = [event.logprobs for event in events if event.type == "response.output_text.delta"]
    assert [entry.token for logprobs in told for entry in logprobs] == ["lo"]
    for at in range(len(events)):
        assert await here.after(response_id, at) == events[at:]


async def test_another_gateway_numbers_alike() -> None:
    """A response is resumed, read and cancelled at any replica, at every event (I3)."""
    journal, puppets = shared().url(f"t{uuid4().hex}"), Puppets()
    async with (
        site(journal=journal, puppets=puppets) as one,
        site(journal=journal, puppets=puppets) as other,
        sdk_of(one) as sdk,
        sdk_of(other) as elsewhere,
    ):
        here, there = Here(one, sdk), Here(other, elsewhere)
        response_id, stream, puppet = await here.begin()
        following = await soon(elsewhere.responses.retrieve(response_id, stream=True, starting_after=0))
        await puppet.say_chunks([Chunk("", {"reasoning": "hm"}), Chunk("lo")])
        await puppet.finish(usage=USAGE)
        assert await every(following) == await every(stream)
        events = await here.all(response_id)
        for number in range(len(events)):
            assert await there.after(response_id, number) == events[number + 1 :]
        assert await there.whole(response_id) == await here.whole(response_id) == events[-1].response
        response_id, stream, puppet = await here.begin()
        assert (await soon(elsewhere.responses.cancel(response_id))).status == "cancelled"
        assert (await every(stream))[-1].response.status == "cancelled"


async def test_after_an_ack_what_is_only_in_the_fold_is_refused(here: Here) -> None:
    """The rest of it is as before, and a whole response still is whole (R5, R9)."""
    response_id, stream, puppet = await here.begin()
    await puppet.say_chunks([Chunk("", {"reasoning": "so"}), Chunk("lo"), Chunk("", {"refusal": "no"}), Chunk("!")])
    await puppet.finish(usage=USAGE)
    await every(stream)
    events = await here.all(response_id)
    stream_id = stream_id_of(response_id)
    dropped = {1: 2, 2: 5, 3: 11, 4: 17, 5: 21, 6: 25}  # the last record acked -> events that it and those before made
    for seq, gone in dropped.items():
        assert (await here.site.http.post(f"/v1/stream/{stream_id}/ack", {"seq": seq})).status == 200
        for number in range(len(events)):
            if number + 1 < gone:
                assert await refused(here.after(response_id, number)) == (400, "starting_after")
            else:
                assert await here.after(response_id, number) == events[number + 1 :]
        assert await refused(here.all(response_id)) == (400, "starting_after")
        assert await here.whole(response_id) == events[-1].response


async def test_after_an_eviction_the_rest_is_as_before() -> None:
    """Records that went for space leave the numbers of the others what they were (R7, R9)."""
    async with responding(max_stream_records=4) as here:
        response_id, stream, puppet = await here.begin()
        for text in ("a", "b", "c", "d", "e", "f"):
            await puppet.say(text)
        await puppet.finish(usage=USAGE)
        events = await every(stream)
        whole = await here.whole(response_id)
        assert whole.output_text == "Helabcdef"
        first = 8  # the delta of the oldest record that is retained
        assert await refused(here.after(response_id, first - 2)) == (400, "starting_after")
        for number in range(first - 1, 15):
            assert await here.after(response_id, number) == events[number:]


async def test_a_response_that_was_too_long_to_keep_says_so() -> None:
    """Where even the fold had to go, nothing is told that begins in the middle (I4)."""
    async with responding(max_stream_bytes=64 * 1024) as here:
        response_id, stream, puppet = await here.begin()
        for _ in range(6):
            await puppet.say("x" * 8 * 1024)
        await puppet.finish()
        assert (await every(stream))[-1].type == "response.completed"
        await here.site.http.post(f"/v1/stream/{stream_id_of(response_id)}/ack", {"seq": 7})
        assert await refused(here.after(response_id, 9)) == (400, "starting_after")
        status, _ = await refused(here.whole(response_id))
        assert status == 502


async def test_what_a_reader_holds_is_bounded() -> None:
    """The last events tell the whole response: one past what a stream may take is not collected for ever (I5)."""
    async with responding(max_stream_bytes=64 * 1024) as here:
        _, stream, puppet = await here.begin()
        for _ in range(12):
            await puppet.say("x" * 8 * 1024)
        with pytest.raises(openai.APIError, match="longer"):
            await every(stream)


# --- whole, background, cancel, delete --------------------------------------------------------------------------------


async def test_a_whole_response_tells_what_was_asked_and_what_it_took(here: Here) -> None:
    """Without `stream` the end is waited for; later the same is retrieved."""
    asking = asyncio.create_task(
        here.create(instructions="Be brief.", metadata={"case": "7"}, temperature=0.5, max_output_tokens=20)
    )
    puppet = await here.site.puppets.next()
    assert puppet.body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]
    assert (puppet.body["max_tokens"], puppet.body["temperature"]) == (20, 0.5)
    await puppet.say("Hi", " there")
    await puppet.finish(usage=USAGE | {"completion_tokens_details": {"reasoning_tokens": 1}})
    response = await soon(asking)
    assert (response.status, response.output_text, response.model) == ("completed", "Hi there", "puppet")
    assert (response.instructions, response.metadata, response.temperature) == ("Be brief.", {"case": "7"}, 0.5)
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (3, 2, 5)
    assert response.usage.output_tokens_details.reasoning_tokens == 1
    assert await here.whole(response.id) == response


@pytest.mark.parametrize(("reason", "why"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
async def test_an_answer_that_was_cut_short_is_incomplete(here: Here, reason: str, why: str) -> None:
    """Its stream ends with another event, and says why."""
    response_id, stream, puppet = await here.begin()
    await puppet.finish(reason)
    last = (await every(stream))[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")
    assert last.response.incomplete_details.reason == why
    assert last.response.output[0].status == "incomplete"
    assert await here.whole(response_id) == last.response


async def test_a_background_response_goes_on_by_itself() -> None:
    """It is answered at once, and nobody needs to ask for it, however long (I6)."""
    async with responding(abandon_after=1.0) as here:
        response = await here.create(background=True)
        assert (response.status, response.background, response.output) == ("in_progress", True, [])
        puppet = await here.site.puppets.next()
        await puppet.say("Hel")
        here.site.gateway.clock.advance(10_000)
        await here.site.gateway.streams.pulse(1.0)
        await puppet.say("lo")
        assert (await here.whole(response.id)).output_text == "Hello"
        await puppet.finish()
        done = await here.whole(response.id)
        assert (done.status, done.output_text) == ("completed", "Hello")


async def test_a_foreground_response_that_nobody_reads_is_abandoned_where_that_is_set() -> None:
    """The same without `background`: the exemption is what makes the difference (I6)."""
    async with responding(abandon_after=1.0) as here:
        response_id, stream, puppet = await here.begin()
        await stream.close()
        await here.site.gateway.unread(stream_id_of(response_id))
        here.site.gateway.clock.advance(10_000)
        await here.site.gateway.streams.pulse(1.0)
        await soon(puppet.stopped.wait())
        assert (await here.whole(response_id)).status == "cancelled"


async def test_cancel_stops_a_response_once(here: Here) -> None:
    """Its readers are told, what was said stays, and cancelled again it is the same (I6, I7)."""
    beginning = asyncio.create_task(here.create(stream=True, background=True))
    puppet = await here.site.puppets.next()
    stream = await soon(beginning)
    await puppet.say("Hel")
    response_id = (await soon(anext(stream))).response.id
    cancelled = await soon(here.sdk.responses.cancel(response_id))
    assert (cancelled.status, cancelled.output_text) == ("cancelled", "Hel")
    await soon(puppet.stopped.wait())
    last = (await every(stream))[-1]
    assert (last.type, last.response) == ("response.incomplete", cancelled)
    assert await soon(here.sdk.responses.cancel(response_id)) == cancelled


async def test_cancel_stops_a_response_that_is_followed_too(here: Here) -> None:
    """Nothing else would: to leave its stream does not stop it (I6)."""
    response_id, stream, puppet = await here.begin()
    assert (await soon(here.sdk.responses.cancel(response_id))).status == "cancelled"
    await soon(puppet.stopped.wait())
    assert (await every(stream))[-1].response.status == "cancelled"


async def test_cancel_of_what_is_over_changes_nothing(here: Here) -> None:
    """In the background it is told as it ended; a synchronous one that is over cannot be cancelled."""
    response_id, events = await here.told(background=True)
    assert await soon(here.sdk.responses.cancel(response_id)) == events[-1].response
    response_id, events = await here.told()
    assert await refused(here.sdk.responses.cancel(response_id)) == (400, None)
    assert await here.whole(response_id) == events[-1].response


async def test_a_deleted_response_is_unknown_everywhere(here: Here) -> None:
    """Its generation is stopped, and every route says 404 afterwards."""
    response_id, _, puppet = await here.begin()
    answer = await here.site.http.ask("DELETE", f"/v1/responses/{response_id}")
    assert answer.json == {"id": response_id, "object": "response", "deleted": True}
    await soon(puppet.stopped.wait())
    assert await unknown_on_every_route(here, response_id)


async def unknown_on_every_route(here: Here, response_id: str) -> bool:
    responses = here.sdk.responses
    asked = [
        responses.retrieve(response_id),
        responses.retrieve(response_id, stream=True, starting_after=0),
        responses.cancel(response_id),
        responses.delete(response_id),
        responses.input_items.list(response_id),
    ]
    return {await refused(asking) for asking in asked} == {(404, None)}


async def test_anothers_response_and_what_is_none_are_unknown(tmp_path: Any) -> None:
    """To any other key it does not exist (I9); nor do streams that are no responses, under that name."""
    keys = tmp_path / "keys"
    keys.write_text("ann:key-of-ann\nbob:key-of-bob\n")
    async with (
        site(keys_file=str(keys)) as running,
        sdk_of(running, "key-of-ann") as ann,
        sdk_of(running, "key-of-bob") as bob,
    ):
        response_id, _, puppet = await Here(running, ann).begin()
        assert await unknown_on_every_route(Here(running, bob), response_id)
        await puppet.finish()
        native = await running.told("Hello", http=running.http.keyed("key-of-ann"))
        for none in (f"resp_{native}", native, "resp_", "resp_" + "0" * 32, "x"):
            assert await unknown_on_every_route(Here(running, ann), none)
        assert (
            await running.http.keyed("key-of-ann").get(f"/v1/stream/{stream_id_of(response_id)}/snapshot")
        ).status == 200


async def test_input_is_told_back_item_by_item(here: Here) -> None:
    """The newest first, page after page, as the SDK asks for them; ids that a client gave stay."""
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    asked: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "What is it?"}, image]},
        {"type": "function_call", "id": "fc_mine", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "a cat"},
    ]
    response_id, _ = await here.told(input=asked)
    listing = here.sdk.responses.input_items
    items: list[Any] = [item async for item in await soon(listing.list(response_id, limit=1))]
    assert [item.type for item in items] == ["function_call_output", "function_call", "message", "message"]
    assert (items[1].id, items[2].content[0].text, items[2].content[1].detail) == ("fc_mine", "What is it?", "auto")
    assert len({item.id for item in items}) == 4
    page = await soon(listing.list(response_id, order="asc", limit=3))
    assert [item.id for item in page.data] == [item.id for item in items[:0:-1]]
    assert page.has_more
    assert await refused(listing.list(response_id, after="nothing")) == (400, "after")
    assert await refused(listing.list(response_id, limit=0)) == (400, "limit")
    assert await refused(listing.list(response_id, limit=101)) == (400, "limit")


async def test_a_retry_under_its_key_finds_the_first_try(here: Here) -> None:
    """Nothing is paid for twice; another body under the same key is refused."""
    keyed: Any = {"extra_headers": {"Idempotency-Key": "k1"}}
    response_id, events = await here.told("lo", **keyed)
    again = await every(await here.create(stream=True, **keyed))
    assert again == events
    assert here.site.puppets.begun == 1
    assert await refused(here.sdk.responses.create(**ASKED | {"input": "Bye"}, stream=True, **keyed)) == (422, None)
    assert response_id == events[0].response.id


async def test_a_response_is_a_stream_like_any_other(here: Here) -> None:
    """It is read in the native format, and what one of its readers acks is acked for all."""
    response_id, _ = await here.told("lo")
    snapshot = await here.site.http.get(f"/v1/stream/{stream_id_of(response_id)}/snapshot")
    assert (snapshot.json["text"], snapshot.json["status"]) == ("Hello", "done")


# --- real clients of real servers -------------------------------------------------------------------------------------


def call(index: int, name: str | None = None, arguments: str = "", **more: Any) -> dict[str, Any]:
    named = {"name": name} if name else {}
    return {"tool_calls": [{"index": index, **more, "function": {**named, "arguments": arguments}}]}


SCRIPTS = {
    "calls": Script(
        [
            chat_event({"role": "assistant", "content": None}),
            chat_event(call(0, "weather", id="c1", type="function")),
            chat_event(call(0, arguments='{"city":')),
            chat_event(call(1, "time", '{"zone"', id="c2", type="function")),
            chat_event(call(0, arguments='"Oslo"}')),
            chat_event(call(1, arguments=':"UTC"}')),
            chat_event(finish_reason="tool_calls"),
            *chat_answer()[-1:],
        ]
    ),
    "same-index": Script(
        [
            chat_event(call(0, "look", '{"q":"caf\\u00', id="c1", type="function")),
            chat_event(call(0, arguments='e9"}')),
            chat_event(call(0, "look", '{"q":', id="c2", type="function")),
            chat_event({"tool_calls": [{"index": 0, "function": {"arguments": part}} for part in ('"tea', '"}')]}),
            chat_event(finish_reason="tool_calls"),
            *chat_answer()[-1:],
        ]
    ),
    "thinks": Script(
        [chat_event({"reasoning_content": "two "}), chat_event({"reasoning_content": "and two"}), *chat_answer("4")]
    ),
    "refuses": Script([chat_event({"refusal": "I "}), chat_event({"refusal": "won't."}), *chat_answer()]),
    "slow": Script([chat_event("Hel"), Pause(0.3), chat_event("lo"), Pause(0.3), *chat_answer("!")]),
}
TOOL: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}


@pytest_asyncio.fixture
async def served() -> AsyncIterator[tuple[MisbehavingUpstream, Here]]:
    async with MisbehavingUpstream(SCRIPTS) as upstream, responding(upstream=(upstream.url,), heartbeat=0.05) as here:
        yield upstream, here


async def test_function_calls_are_called_and_answered(served: tuple[MisbehavingUpstream, Here]) -> None:
    """Calls that a server interleaves are put together; the next turn takes the output and what the function said."""
    upstream, here = served
    async with here.sdk.responses.stream(model="calls", input="Weather?", tools=[TOOL]) as stream:
        await soon(stream.until_done())
        response = await stream.get_final_response()
    calls: list[Any] = response.output
    assert [(item.type, item.call_id, item.name, item.arguments) for item in calls] == [
        ("function_call", "c1", "weather", '{"city":"Oslo"}'),
        ("function_call", "c2", "time", '{"zone":"UTC"}'),
    ]
    history: list[Any] = [
        {"role": "user", "content": "Weather?"},
        *(item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in calls),
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": "12:00"},
    ]
    await here.create(model="thinks", input=history, tools=[TOOL])
    sent = upstream.requests[-1].json
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "tool", "tool"]
    assert [made["id"] for made in sent["messages"][1]["tool_calls"]] == ["c1", "c2"]
    assert sent["tools"][0]["function"]["name"] == "weather"


async def test_parallel_calls_of_one_index_stay_apart_wherever_they_are_cut(
    served: tuple[MisbehavingUpstream, Here],
) -> None:
    """Each call has its own arguments, whole and valid JSON, with a drop in the middle of them and without."""
    _, here = served
    events = await every(await here.create(model="same-index", stream=True, tools=[TOOL | {"name": "look"}]))
    calls = events[-1].response.output
    assert [(item.call_id, json.loads(item.arguments)) for item in calls] == [
        ("c1", {"q": "café"}),
        ("c2", {"q": "tea"}),
    ]
    response_id = events[0].response.id
    for number in range(len(events)):
        assert await here.after(response_id, number) == events[number + 1 :]


async def test_an_answer_that_another_process_goes_on_with_says_so(tmp_path: Any) -> None:
    """Where continuation is configured: the numbers go on, and the first delta behind the seam tells of it (I8)."""
    scripts = {"m": Script([chat_event("Hel"), Stall()])}
    async with MisbehavingUpstream(scripts) as upstream:
        settings: Any = {
            "upstream": (upstream.url,),
            "journal": f"sqlite:///{tmp_path}/streams.db",
            "continuation": (continuation("prefill"),),
        }
        async with responding(**settings) as here:
            stream = await here.create(model="m", instructions="Be brief.", stream=True)
            seen = [await soon(anext(stream)) for _ in range(5)]
        upstream.script("m", Script(chat_answer("lo", "!")))
        async with responding(**settings) as here:
            rest = await here.after(seen[0].response.id, seen[-1].sequence_number)
            assert await here.all(seen[0].response.id) == [*seen, *rest]
        deltas = [event for event in [*seen, *rest] if event.type.endswith(".delta")]
        assert [(event.delta, getattr(event, "seam", None)) for event in deltas] == [
            ("Hel", None),
            ("lo", "writer_lost"),
            ("!", None),
        ]
        assert rest[-1].response.output_text == "Hello!"
        sent = upstream.requests[-1].json["messages"]
        assert [(message["role"], message["content"]) for message in sent] == [
            ("system", "Be brief."),
            ("user", "Hello"),
            ("assistant", "Hel"),
        ]


async def test_reasoning_is_an_item_of_its_own(served: tuple[MisbehavingUpstream, Here]) -> None:
    """It is closed when the answer begins; who asks for a summary is told it in the events of one."""
    _, here = served
    response: Any = await here.create(model="thinks")
    reasoning, message = response.output
    assert (reasoning.type, reasoning.content[0].text, reasoning.status) == ("reasoning", "two and two", "completed")
    assert (message.content[0].text, response.output_text) == ("4", "4")
    events = await every(await here.create(model="thinks", stream=True, reasoning={"summary": "auto"}))
    assert [event.delta for event in events if event.type == "response.reasoning_summary_text.delta"] == [
        "two ",
        "and two",
    ]
    assert events[-1].response.output[0].summary[0].text == "two and two"
    assert kinds(events).index("output_item.done") < kinds(events).index("output_text.delta")


async def test_a_refusal_is_told_as_one(served: tuple[MisbehavingUpstream, Here]) -> None:
    """A part of the message, not its text."""
    _, here = served
    events = await every(await here.create(model="refuses", stream=True))
    assert [event.delta for event in events if event.type == "response.refusal.delta"] == ["I ", "won't."]
    content = events[-1].response.output[0].content
    assert [(part.type, part.refusal) for part in content] == [("refusal", "I won't.")]


async def test_silence_makes_no_client_fail(served: tuple[MisbehavingUpstream, Here]) -> None:
    """Heartbeats stand between events and are none."""
    _, here = served
    events = await every(await here.create(model="slow", stream=True))
    assert events[-1].response.output_text == "Hello!"


async def test_a_client_that_is_let_go_hears_it(here: Here) -> None:
    """A clean end would be taken for that of the response: the SDK raises, and resumes where it was (I4)."""
    response_id, stream, puppet = await here.begin()
    seen = [await soon(anext(stream)) for _ in range(4)]
    await here.site.gateway.idle(stream_id_of(response_id))
    here.site.gateway.readers(stream_id_of(response_id))[0].interrupt()
    with pytest.raises(openai.APIError, match="interrupted"):
        await every(stream)
    await puppet.finish()
    assert (await here.after(response_id, seen[-1].sequence_number))[-1].type == "response.completed"


@pytest.mark.model
async def test_a_real_model_is_resumed_at_every_event() -> None:
    """The same text whole, streamed and resumed."""
    async with Model() as model, responding(upstream=(model.url,)) as here:
        asked: Any = {"model": Model.name, "input": "Name three colours.", "temperature": 0, "max_output_tokens": 12}
        events = await every(await here.create(**asked, stream=True))
        response_id = events[0].response.id
        assert events[-1].response.usage.output_tokens > 0
        for number in range(len(events)):
            assert await here.after(response_id, number) == events[number + 1 :]
        whole = await here.create(**asked)
        assert whole.output_text == events[-1].response.output_text != ""
