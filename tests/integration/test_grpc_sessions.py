"""Sessions over gRPC: what begins a generation, what goes on with one, what is refused (PROTOCOL.md, section 19)."""

from __future__ import annotations

import asyncio

import pytest

from midstream.codec.pb import inference_pb2 as pb
from midstream.records import Chunk
from midstream.testing.patience import soon
from midstream.testing.puppet import Puppets
from midstream.wire import H_STREAM_ID, MAX_SESSION_CHARS
from tests import gateways
from tests.calls import Said, site

STREAM_ID = H_STREAM_ID.lower()


async def test_a_new_name_begins_a_generation() -> None:
    """Every chunk has its index, and the end is a message of its own, at the index after the last."""
    async with site() as here:
        call, puppet, _ = await here.begin("demo", prompt="What is a journal?")
        assert puppet.body["messages"] == [{"role": "user", "content": "What is a journal?"}]
        await puppet.say("a", "b")
        await puppet.finish()
        assert await call.rest() == Said([("a", 0, False), ("b", 1, False), ("", 2, True)], "OK")


async def test_metadata_comes_before_the_model_has_said_anything() -> None:
    """So that a reader can resume from the first moment on."""
    async with site() as here:
        call = here.client.generate(prompt="Hello", session_id="demo")
        stream_id = await call.stream_id()
        assert (await here.gateway.streams.journal.state(stream_id)).highest_seq == 1
        call.cancel()


@pytest.mark.parametrize("prompt", ["Hello", ""])
async def test_a_known_name_replays_for_the_same_prompt_and_for_none(prompt: str) -> None:
    """A retry is safe: it costs no second generation."""
    async with site() as here:
        stream_id = await here.told("a", "b", session_id="demo")
        call = here.client.generate(prompt=prompt, session_id="demo")
        assert await call.stream_id() == stream_id
        assert (await call.rest()).messages == [("a", 0, False), ("b", 1, False), ("", 2, True)]
        assert here.puppets.begun == 1


@pytest.mark.parametrize("fields", [{"prompt": "Another"}, {"prompt": "Hello", "model": "other"}])
async def test_a_known_name_with_another_request_is_refused(fields: dict[str, str]) -> None:
    """Neither the old answer nor a new one under the old name."""
    async with site(puppets=Puppets("puppet", "other")) as here:
        await here.told("a", session_id="demo")
        said = await here.client.said(session_id="demo", **fields)
        assert (said.messages, said.status, said.reason) == ([], "ALREADY_EXISTS", "IDEMPOTENCY_MISMATCH")
        assert here.puppets.begun == 1


async def test_a_resume_does_not_look_at_the_prompt() -> None:
    """It has been answered for the most part: what stands in the request says nothing any more."""
    async with site() as here:
        await here.told("a", "b", session_id="demo")
        said = await here.client.said(prompt="Another", session_id="demo", resume_from_token=1)
        assert said.messages == [("b", 1, False), ("", 2, True)]


async def test_resume_keeps_the_indices_at_every_position() -> None:
    """The original ones, from the first wanted to the final message alone."""
    async with site() as here:
        await here.told(*"abc", session_id="demo")
        whole = [("a", 0, False), ("b", 1, False), ("c", 2, False), ("", 3, True)]
        for wanted in range(4):
            assert await here.client.said(session_id="demo", resume_from_token=wanted) == Said(whole[wanted:], "OK")


async def test_beyond_the_final_message_is_out_of_range() -> None:
    """And the range that can be had is told, in the counting of the service."""
    async with site() as here:
        await here.told(*"abc", session_id="demo")
        said = await here.client.said(session_id="demo", resume_from_token=4)
        facts = {"highest_seq": "5", "resume_from_lowest": "0", "resume_from_highest": "3"}
        assert said == Said([], "OUT_OF_RANGE", "CURSOR_AHEAD", facts)


async def test_open_stream_can_be_resumed_up_to_its_next_token() -> None:
    """One further, and it is a claim that nobody can have earned."""
    async with site() as here:
        _, puppet, _ = await here.begin("demo")
        await puppet.say("a", "b")
        said = await here.client.said(session_id="demo", resume_from_token=3)
        assert (said.status, said.facts and said.facts["resume_from_highest"]) == ("OUT_OF_RANGE", "2")
        waiting = here.client.generate(session_id="demo", resume_from_token=2)
        await waiting.stream_id()
        await puppet.say("c")
        assert await waiting.take(1) == [("c", 2, False)]


async def test_the_range_tells_what_acks_and_eviction_left() -> None:
    """After an ack the next chunk can be had; after an eviction the one that follows it in the queue cannot."""
    async with site(max_stream_records=5) as here:
        await here.told(*"abcdefgh", session_id="evicted")
        said = await here.client.said(session_id="evicted", resume_from_token=1)
        facts = {"oldest_available": "6", "resume_from_lowest": "5", "resume_from_highest": "8"}
        assert said == Said([], "OUT_OF_RANGE", "CURSOR_EXPIRED", facts)
        assert (await here.client.said(session_id="evicted", resume_from_token=4)).status == "OUT_OF_RANGE"
        assert (await here.client.said(session_id="evicted", resume_from_token=5)).text == "fgh"
    async with site() as here:
        await here.told(*"abcdefgh", session_id="acked")
        await here.client.ack("acked", 3)
        said = await here.client.said(session_id="acked", resume_from_token=3)
        facts = {"oldest_available": "6", "resume_from_lowest": "4", "resume_from_highest": "8"}
        assert said == Said([], "OUT_OF_RANGE", "CURSOR_EXPIRED", facts)
        assert (await here.client.said(session_id="acked", resume_from_token=4)).text == "efgh"


@pytest.mark.parametrize("fields", [{"resume_from_token": 1, "prompt": "Hello"}, {"resume_from_token": 0}])
async def test_an_unknown_name_is_never_a_fresh_start(fields: dict[str, object]) -> None:
    """Not for who wants to go on, and not for who has nothing to ask."""
    async with site() as here:
        said = await here.client.said(session_id="never-was", **fields)
        assert (said.messages, said.status, said.reason) == ([], "NOT_FOUND", "UNKNOWN_STREAM")
        assert here.puppets.begun == 0


async def test_a_forgotten_stream_is_no_fresh_start_for_who_has_seen_it() -> None:
    """The name is free again, but this caller means what he has seen of it."""
    async with site() as here:
        stream_id = await here.told("a", session_id="demo")
        await here.gateway.streams.forget(stream_id, "open")
        seen = here.client.keyed((STREAM_ID, stream_id))
        assert (await seen.said(prompt="Hello", session_id="demo")).status == "NOT_FOUND"
        assert (await seen.said(prompt="Hello", session_id="demo", resume_from_token=1)).status == "NOT_FOUND"
        assert here.puppets.begun == 1
        await here.begin("demo")
        said = await seen.said(session_id="demo", resume_from_token=0)
        assert (said.status, said.reason) == ("FAILED_PRECONDITION", "WRONG_STREAM")


async def test_the_stream_id_stands_for_the_name() -> None:
    """On every verb, and also beside a session that has a name."""
    async with site() as here:
        call, puppet, stream_id = await here.begin("demo")
        await puppet.say("a", "b")
        assert await call.take(2) == [("a", 0, False), ("b", 1, False)]
        resumed = here.client.generate(session_id=stream_id, resume_from_token=1)
        assert await resumed.take(1) == [("b", 1, False)]
        assert (await here.client.ack(stream_id, 0)).acked_token_index == 0
        assert (await here.client.cancel(stream_id)).cancelled


async def test_no_name_is_named_by_the_stream_id() -> None:
    """Each such call begins a generation of its own; the metadata has the name to go on with."""
    async with site() as here:
        first, _, one = await here.begin()
        _, _, other = await here.begin()
        assert one != other
        first.cancel()
        assert await here.client.generate(session_id=one).stream_id() == one
        assert await here.client.generate(metadata=[(STREAM_ID, one)]).stream_id() == one


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "BAD_REQUEST"),
        ({"resume_from_token": 3}, "BAD_REQUEST"),
        ({"session_id": "demo", "resume_from_token": -1}, "BAD_CURSOR"),
        ({"session_id": "demo", "resume_from_token": -(2**31)}, "BAD_CURSOR"),
        ({"session_id": "x" * (MAX_SESSION_CHARS + 1), "prompt": "Hello"}, "BAD_REQUEST"),
        ({"session_id": "two\nlines", "prompt": "Hello"}, "BAD_REQUEST"),
        ({"session_id": "nul\0", "prompt": "Hello"}, "BAD_REQUEST"),
    ],
)
async def test_what_is_no_request_is_an_invalid_argument(fields: dict[str, object], reason: str) -> None:
    """Whatever it is, the channel survives it, and nothing is begun."""
    async with site() as here:
        said = await here.client.said(**fields)
        assert (said.messages, said.status, said.reason) == ([], "INVALID_ARGUMENT", reason)
        assert here.puppets.begun == 0
        assert await here.told("a") != ""


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\x05ab", b"\x0a\x02\xc3\x28", b"{}"])
async def test_bytes_that_are_no_message_are_an_invalid_argument(data: bytes) -> None:
    """Cut short, not UTF-8, or something else: on each verb."""
    async with site() as here:
        said = await here.client.send(data).rest()
        assert (said.status, said.reason) == ("INVALID_ARGUMENT", "BAD_REQUEST")
        for method, response in (("Ack", pb.AckResponse), ("Cancel", pb.CancelResponse)):
            said = await here.client.unary(method, data, response)
            assert (said.status, said.reason) == ("INVALID_ARGUMENT", "BAD_REQUEST")
        assert await here.told("a") != ""


async def test_a_request_over_the_limit_is_refused_and_the_channel_goes_on() -> None:
    """The bound is that of a body over HTTP."""
    async with site(max_body=4096) as here:
        assert (await here.client.said(prompt="x" * 5000)).status == "RESOURCE_EXHAUSTED"
        assert await here.told("a") != ""


async def test_limits_of_streams_say_when_to_come_back() -> None:
    """RESOURCE_EXHAUSTED, with the code that says of what."""
    async with site(max_streams=1) as here:
        await here.begin("one")
        said = await here.client.said(prompt="Hello", session_id="two")
        assert (said.status, said.reason) == ("RESOURCE_EXHAUSTED", "TOO_MANY_STREAMS")
        call = here.client.generate(prompt="Hello", session_id="one")
        assert await call.stream_id() == await here.client.generate(session_id="one").stream_id()


async def test_simultaneous_tries_begin_one_generation() -> None:
    """Exactly one wins the name; the other follows the winner's stream."""
    async with site() as here:
        calls = [here.client.generate(prompt="Hello", session_id="demo") for _ in range(5)]
        assert len({await call.stream_id() for call in calls}) == 1
        puppet = await here.puppets.next()
        await puppet.say("once")
        await puppet.finish()
        for call in calls:
            assert (await call.rest()).text == "once"
        assert here.puppets.begun == 1


async def test_model_is_named_in_the_request_or_beside_it() -> None:
    """The field wins; a model that nobody serves is NOT_FOUND."""
    async with site(puppets=Puppets("first", "second", "third")) as here:
        _, puppet, _ = await here.begin()
        assert puppet.body["model"] == "first"
        _, puppet, _ = await here.begin(metadata=[("model", "second")])
        assert puppet.body["model"] == "second"
        _, puppet, _ = await here.begin(model="third", metadata=[("model", "second")])
        assert puppet.body["model"] == "third"
        said = await here.client.said(prompt="Hello", model="none")
        assert (said.status, said.reason) == ("NOT_FOUND", "UNKNOWN_MODEL")


async def test_trace_is_passed_on() -> None:
    """As HTTP does."""
    async with site() as here:
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        _, puppet, _ = await here.begin(metadata=[("traceparent", trace)])
        assert puppet.headers["traceparent"] == trace


async def test_only_text_of_the_first_choice_is_a_token_but_every_chunk_counts() -> None:
    """The index is the chunk's on every wire, so that a stream can be handed over at any place."""
    async with site() as here:
        call, puppet, stream_id = await here.begin()
        await puppet.say_chunks([Chunk("", {"reasoning": "hm"}), Chunk("a"), Chunk("b", {"choice": 1}), Chunk("c")])
        await puppet.finish()
        told = [("", 0, False), ("a", 1, False), ("", 2, False), ("c", 3, False), ("", 4, True)]
        assert (await call.rest()).messages == told
        assert (await here.gateway.streams.journal.state(stream_id)).highest_seq == 6


async def test_a_stream_begun_over_http_is_gone_on_with_here_and_back() -> None:
    """One stream, one journal, two wires: the rest here, the rest of it there."""
    async with site() as here, gateways.client(here.gateway) as http:
        response = await http.create()
        stream_id, puppet = response.headers[H_STREAM_ID], await here.puppets.next()
        await puppet.say("a", "b")
        call = here.client.generate(session_id=stream_id, resume_from_token=1)
        assert await call.take(1) == [("b", 1, False)]
        await puppet.say("c")
        assert await call.take(1) == [("c", 2, False)]
        call.cancel()
        resumed = await http.open("GET", f"/v1/stream/{stream_id}?cursor={gateways.cursor(stream_id, 4)}")
        await puppet.finish()
        assert b'"done":true' in await soon(resumed.read())
        said = await here.client.said(prompt="Hello", session_id=stream_id)
        assert said.text == "abc"
        assert (await here.client.said(prompt="Other", session_id=stream_id)).status == "ALREADY_EXISTS"


async def test_failure_is_aborted_after_its_tokens() -> None:
    """With the code of the failure; a later reader hears the same, also at the place of the end."""
    async with site() as here:
        call, puppet, _ = await here.begin("demo")
        await puppet.say("a")
        await puppet.fail("upstream_timeout", "too slow")
        facts = {"token_index": "1", "retryable": "true"}
        assert await call.rest() == Said([("a", 0, False)], "ABORTED", "UPSTREAM_TIMEOUT", facts)
        said = await here.client.said(session_id="demo", resume_from_token=1)
        assert said == Said([], "ABORTED", "UPSTREAM_TIMEOUT", facts)
        assert (await here.client.said(session_id="demo", resume_from_token=2)).status == "OUT_OF_RANGE"


async def test_cancel_is_cancelled_for_every_reader() -> None:
    """Whose cancel it was stands in the details."""
    async with site() as here:
        call, puppet, _ = await here.begin("demo")
        await puppet.say("a")
        assert (await here.client.cancel("demo")).cancelled
        assert (await here.client.cancel("demo")).session_id == "demo"
        facts = {"token_index": "1", "reason": "client"}
        assert await call.rest() == Said([("a", 0, False)], "CANCELLED", "CANCELLED", facts)
        await asyncio.wait_for(puppet.stopped.wait(), 1)


async def test_cancel_of_an_answer_that_is_complete_changes_nothing() -> None:
    """And says so."""
    async with site() as here:
        await here.told("a", session_id="demo")
        assert not (await here.client.cancel("demo")).cancelled
        assert (await here.client.said(session_id="demo")).status == "OK"


async def test_verbs_on_a_session_that_is_not_there() -> None:
    """NOT_FOUND; without a name, INVALID_ARGUMENT."""
    async with site() as here:
        assert (await here.client.ack("never-was", 0)).status == "NOT_FOUND"
        assert (await here.client.cancel("never-was")).status == "NOT_FOUND"
        assert (await here.client.ack("", 0)).status == "INVALID_ARGUMENT"
        assert (await here.client.cancel("")).status == "INVALID_ARGUMENT"
        await here.told("a", session_id="demo")
        assert (await here.client.ack("demo", -1)).status == "INVALID_ARGUMENT"
        assert (await here.client.ack("demo", 2)).status == "OUT_OF_RANGE"
        assert (await here.client.ack("demo", 2**31 - 1)).status == "OUT_OF_RANGE"


async def test_ack_tells_what_is_journaled_and_what_is_left() -> None:
    """Counted in chunks: neither the start nor the end is one."""
    async with site() as here:
        call, puppet, stream_id = await here.begin("demo")
        await puppet.say(*"abcde")
        await call.take(5)
        await here.gateway.idle(stream_id)

        def told(response: pb.AckResponse) -> tuple[int, int, int]:
            return response.acked_token_index, response.journaled_token_count, response.first_retained_index

        assert told(await here.client.ack("demo", 1)) == (1, 5, 2)
        assert told(await here.client.ack("demo", 0)) == (1, 5, 2)
        assert told(await here.client.ack("demo", 4)) == (4, 5, 5)
        await puppet.say("f")
        assert told(await here.client.ack("demo", 4)) == (4, 6, 5)
        await puppet.finish()
        await call.rest()
        await here.gateway.unread(stream_id)
        assert told(await here.client.ack("demo", 5)) == (5, 6, 6)
        assert told(await here.client.ack("demo", 6)) == (6, 6, 6)
        assert (await here.client.said(session_id="demo", resume_from_token=6)).messages == [("", 6, True)]
