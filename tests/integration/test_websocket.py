"""Several streams over one WebSocket: what is asked, what is told, and what ends what."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from midstream.errors import ProducerFailed
from midstream.records import Chunk
from midstream.testing.patience import soon, until
from midstream.testing.puppet import Puppets
from midstream.transports import websocket
from midstream.wire import H_STREAM_ID, MAX_REF_CHARS, SEND_STALL, WS_CLOSE
from tests.gateways import Site, cursor, site, wire
from tests.sockets import HANDSHAKE, Peer, seqs, socket


@pytest_asyncio.fixture
async def here() -> AsyncIterator[Site]:
    async with site() as running:
        yield running


@pytest_asyncio.fixture
async def peer(here: Site) -> AsyncIterator[Peer]:
    async with socket(here.gateway) as opened:
        yield opened


# --- following -------------------------------------------------------------------------------------------------------


async def test_nothing_is_said_that_was_not_asked_for(peer: Peer) -> None:
    """Who attaches his handler late has missed nothing: the first message answers the first one."""
    await peer.say("resume", ref="a", stream_id="0" * 32, cursor=cursor("0" * 32, 1))
    await peer.refused("unknown_stream", "a")


async def test_record_is_the_journals_own_in_an_envelope(here: Site, peer: Peer) -> None:
    stream_id, puppet = await peer.begin(here, ref='"ré\n')
    await puppet.say_chunks([Chunk(' 你"\n', {"reasoning": "because"})])
    (said,) = await peer.hear_under('"ré\n', records=1)
    data = {"seq": 2, "delta": ' 你"\n', "reasoning": "because", "done": False}
    assert said == {"type": "record", "ref": '"ré\n', "stream_id": stream_id, "event": "token", "data": data}


async def test_several_streams_share_a_socket(here: Site, peer: Peer) -> None:
    """Each has its own ref, position and end."""
    begun = {ref: await peer.begin(here, ref, prompt=f"prompt {ref}") for ref in "abcde"}
    for ref, (_, puppet) in begun.items():
        assert puppet.body["messages"][0]["content"] == f"prompt {ref}"
    for word in ("one", "two"):
        for ref, (_, puppet) in begun.items():
            await puppet.say(f"{word} {ref}")
    for _, puppet in begun.values():
        await puppet.finish()
    ended: list[str] = []
    text: dict[str, list[Any]] = {ref: [] for ref in begun}
    while len(ended) < len(begun):
        said = await peer.hear()
        assert said["stream_id"] == begun[said["ref"]][0]
        assert said["ref"] not in ended
        if said["type"] == "journal_state":
            assert said["status"] == "done"
            ended.append(said["ref"])
        else:
            text[said["ref"]].append(said["data"].get("delta"))
    assert text == {ref: [f"one {ref}", f"two {ref}", None] for ref in begun}


async def test_two_readers_of_one_stream_share_a_socket(here: Site, peer: Peer) -> None:
    stream_id, puppet = await peer.begin(here, "a")
    await puppet.say("x")
    await peer.hear_under("a", records=1)
    await peer.resume(stream_id, 1, ref="b")
    assert seqs(await peer.hear_under("b", records=1)) == [2]
    await puppet.say("y")
    assert Counter([(await peer.hear())["ref"], (await peer.hear())["ref"]]) == Counter("ab")


async def test_first_message_of_a_reader_tells_the_heartbeat(here: Site, peer: Peer) -> None:
    """A silent stream says at once that it is there; one that has something to say says it with that."""
    stream_id = await here.told("x")
    silent, _ = await here.open_stream()
    await peer.resume(stream_id, 1, ref="a")
    first, second = await peer.hear_under("a", records=2)
    assert first["heartbeat"] == here.gateway.settings.heartbeat
    assert "heartbeat" not in second
    assert (await peer.hear())["type"] == "journal_state"
    await peer.resume(silent, 1, ref="b")
    said = await peer.hear()
    assert said == {"type": "heartbeat", "ref": "b", "stream_id": silent, "heartbeat": 15}


async def test_reader_that_is_behind_is_given_arrays(here: Site, peer: Peer) -> None:
    """Few records come one by one; many together, as one JSON array."""
    stream_id = await here.told(*["w"] * 1000)
    await peer.resume(stream_id, 986)
    for seq in range(987, 1003):
        assert seqs([json.loads(await soon(peer.socket.recv()))]) == [seq]
    assert (await peer.hear())["type"] == "journal_state"
    await peer.resume(stream_id, 1)
    several = json.loads(await soon(peer.socket.recv()))
    assert isinstance(several, list)
    assert len(several) == 512
    rest = await peer.hear_under("a", records=1001 - 512)
    assert seqs(several + rest) == list(range(2, 1003))


async def test_end_is_told_with_the_state(here: Site, peer: Peer) -> None:
    """The last thing said under a ref is how it ended; then the ref is free."""
    for _ in range(2):
        stream_id, puppet = await peer.begin(here)
        await puppet.say("x")
        await puppet.finish()
        assert [said["event"] for said in await peer.hear_under("a", records=2)] == ["token", "done"]
        state = await peer.hear()
        told = {"type": "journal_state", "ref": "a", **(await here.http.get(f"/v1/stream/{stream_id}/state")).json}
        assert state == told | {"last_access": state["last_access"]}
        assert (state["status"], state["highest_seq"], state["readers"]) == ("done", 3, 0)


async def test_resume_at_the_end_is_answered_with_the_state_alone(here: Site, peer: Peer) -> None:
    stream_id = await here.told("x")
    await peer.resume(stream_id, 3)
    state = await peer.hear()
    assert (state["type"], state["ref"], state["status"]) == ("journal_state", "a", "done")


async def test_ref_may_be_left_out(here: Site, peer: Peer) -> None:
    """By who follows one stream at a time."""
    _, puppet = await peer.begin(here, ref=None)
    await peer.say("generate", prompt="b")
    await peer.refused("bad_request")
    await puppet.finish()
    await peer.hear_under(None, records=1)
    assert (await peer.hear())["type"] == "journal_state"
    await peer.begin(here, ref=None)


async def test_leave_ends_the_reading_alone(here: Site, peer: Peer) -> None:
    """I6: the generation goes on; the socket and its ref can be used again."""
    stream_id, puppet = await peer.begin(here, "a")
    other, _ = await peer.begin(here, "b")
    await here.gateway.idle(stream_id)
    await peer.say("leave", ref="a")
    state = await peer.hear()
    assert (state["type"], state["ref"], state["status"], state["readers"]) == ("journal_state", "a", "open", 0)
    await puppet.say("x")
    assert len(here.gateway.readers(other)) == 1
    await peer.resume(stream_id, 1, ref="a")
    assert seqs(await peer.hear_under("a", records=1)) == [2]
    await peer.say("leave", ref="never")
    await peer.refused("bad_request", "never")


async def test_failed_generation_is_a_record_and_an_end(here: Site, peer: Peer) -> None:
    _, puppet = await peer.begin(here)
    await puppet.fail("upstream_timeout", "too slow")
    (said,) = await peer.hear_under("a", records=1)
    assert (said["event"], said["data"]["error"]["code"]) == ("failed", "upstream_timeout")
    assert (await peer.hear())["status"] == "failed"


# --- ack and cancel --------------------------------------------------------------------------------------------------


async def test_ack_is_answered_with_the_state(here: Site, peer: Peer) -> None:
    stream_id, puppet = await peer.begin(here)
    await puppet.say("x", "y")
    await peer.hear_under("a", records=2)
    await here.gateway.idle(stream_id)
    await peer.say("ack", stream_id=stream_id, seq=2)
    state = await peer.hear()
    assert "ref" not in state
    assert (state["type"], state["acked_seq"], state["trimmed_seq"]) == ("journal_state", 2, 2)
    await peer.say("ack", ref="mine", stream_id=stream_id, seq=3)
    assert (await peer.hear())["ref"] == "mine"
    await peer.say("ack", ref="mine", stream_id=stream_id, seq=4)
    assert (await peer.refused("cursor_ahead", "mine"))["highest_seq"] == 3


async def test_acks_keep_a_long_answer_small(here: Site, peer: Peer) -> None:
    """Of 10,000 tokens, acked a hundred at a time, never 300 are kept one by one; the answer stays whole."""
    stream_id, puppet = await peer.begin(here)
    for at in range(100):
        await puppet.say(*["word "] * 100)
        assert (await here.gateway.streams.journal.state(stream_id)).retained_records < 300
        heard = await peer.hear_under("a", records=100)
        assert seqs(heard)[-1] == 101 + at * 100
        await here.gateway.idle(stream_id)
        await peer.say("ack", stream_id=stream_id, seq=seqs(heard)[-1])
        assert (await peer.hear())["retained_records"] <= 1
    await puppet.finish()
    snapshot = (await here.http.get(f"/v1/stream/{stream_id}/snapshot")).json
    assert (snapshot["complete"], snapshot["text"]) == (True, "word " * 10_000)


async def test_cancel_is_answered_with_the_state_and_heard_by_readers(here: Site, peer: Peer) -> None:
    """Also of a stream that is followed elsewhere, or not at all."""
    stream_id, puppet = await peer.begin(here)
    await peer.say("cancel", ref="stop", stream_id=stream_id)
    said = [await peer.hear() for _ in range(3)]
    states = {state["ref"]: state["status"] for state in said if state["type"] == "journal_state"}
    assert states == {"stop": "cancelled", "a": "cancelled"}
    assert [(it["event"], it["data"]["reason"]) for it in said if it["type"] == "record"] == [("cancelled", "client")]
    await soon(puppet.stopped.wait())
    unread, puppet = await here.open_stream()
    await peer.say("cancel", stream_id=unread)
    assert (await peer.hear())["status"] == "cancelled"
    await soon(puppet.stopped.wait())


# --- generate --------------------------------------------------------------------------------------------------------


async def test_request_goes_on_to_the_upstream_and_what_is_ours_does_not(here: Site, peer: Peer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    fields: dict[str, Any] = {
        "prompt": None,
        "messages": messages,
        "max_tokens": 7,
        "idempotency_key": "k",
        "stream": True,
    }
    _, puppet = await peer.begin(here, **fields)
    assert puppet.body == {"model": "puppet", "messages": messages, "max_tokens": 7}


async def test_same_idempotency_key_is_one_generation_over_any_transport(here: Site, peer: Peer) -> None:
    """Begun here and asked for again over HTTP, and the other way round."""
    stream_id, puppet = await peer.begin(here, idempotency_key="one")
    response = await here.http.create({"Idempotency-Key": "one"}, stream=True)
    assert response.headers[H_STREAM_ID] == stream_id
    await peer.say("generate", ref="b", prompt="Hello", idempotency_key="one")
    assert (await peer.hear_under("b", records=1))[0]["stream_id"] == stream_id
    await peer.say("generate", ref="c", prompt="another", idempotency_key="one")
    await peer.refused("idempotency_mismatch", "c")
    over_http = await here.http.create({"Idempotency-Key": "two"})
    await peer.say("generate", ref="d", prompt="Hello", idempotency_key="two")
    assert (await peer.hear_under("d", records=1))[0]["stream_id"] == over_http.headers[H_STREAM_ID]
    assert here.puppets.begun == 2
    await puppet.finish()


async def test_refusals_of_a_request_are_those_of_http(here: Site, peer: Peer) -> None:
    asked: list[tuple[dict[str, Any], str]] = [
        ({}, "bad_request"),
        ({"prompt": 7}, "bad_request"),
        ({"prompt": "a", "messages": []}, "bad_request"),
        ({"prompt": "a", "stream": False}, "bad_request"),
        ({"prompt": "a", "idempotency_key": 7}, "bad_request"),
        ({"prompt": "a", "idempotency_key": ""}, "bad_request"),
        ({"prompt": "a", "model": "nobody's"}, "unknown_model"),
    ]
    for fields, code in asked:
        await peer.say("generate", ref="a", **fields)
        await peer.refused(code, "a")
    assert here.gateway.gateway.observer.refused == Counter(code for _, code in asked)


async def test_upstream_that_cannot_be_asked_for_its_models_is_named(here: Site) -> None:
    class Unreachable(Puppets):
        async def default_model(self) -> str:
            raise ProducerFailed("upstream_unreachable", "nobody is there", retryable=True)

    async with site(puppets=Unreachable()) as other, socket(other.gateway) as peer:
        await peer.say("generate", ref="a", prompt="x")
        assert (await peer.refused("upstream_unreachable", "a"))["detail"] == "nobody is there"
        await peer.still_works()


async def test_limits_name_when_to_come_again() -> None:
    async with site(max_streams=1) as here, socket(here.gateway) as peer:
        await peer.begin(here, "a")
        await peer.say("generate", ref="b", prompt="x")
        assert (await peer.refused("too_many_streams", "b"))["retry_after"] >= 1


async def test_socket_follows_only_so_many_streams(here: Site, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those it follows are not disturbed, and one that ends makes room."""
    monkeypatch.setattr(websocket, "WS_STREAMS", 2)
    await peer.begin(here, "a")
    stream_id, puppet = await peer.begin(here, "b")
    await peer.resume(stream_id, 0, ref="c")
    await peer.refused("too_many_streams", "c")
    await puppet.finish()
    await peer.hear_under("b", records=1)
    await peer.hear()
    await peer.begin(here, "c")


# --- what is no message of ours --------------------------------------------------------------------------------------

BAD: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "bad_request"),
    "no JSON": ("{", "bad_request"),
    "JSON that Python alone reads": ('{"type":"generate","prompt":NaN}', "bad_request"),
    "an array": ("[]", "bad_request"),
    "a number": ("7", "bad_request"),
    "no type": ("{}", "bad_request"),
    "unknown type": ('{"type":"subscribe"}', "bad_request"),
    "the gateway's own type": ('{"type":"record"}', "bad_request"),
    "a type that is a list": ('{"type":["ack"]}', "bad_request"),
    "a ref that is a number": ('{"type":"generate","ref":7,"prompt":"a"}', "bad_request"),
    "an empty ref": ('{"type":"generate","ref":"","prompt":"a"}', "bad_request"),
    "a long ref": (json.dumps({"type": "leave", "ref": "x" * (MAX_REF_CHARS + 1)}), "bad_request"),
    "no cursor": ('{"type":"resume","stream_id":"s"}', "bad_cursor"),
    "a cursor that is a number": ('{"type":"resume","stream_id":"s","cursor":7}', "bad_cursor"),
    "no stream": (json.dumps({"type": "resume", "cursor": cursor("s", 1)}), "bad_request"),
    "another stream's cursor": (
        json.dumps({"type": "resume", "stream_id": "s", "cursor": cursor("t", 1)}),
        "wrong_stream",
    ),
    "an unknown stream": (json.dumps({"type": "resume", "stream_id": "s", "cursor": cursor("s", 1)}), "unknown_stream"),
    "an ack without a seq": ('{"type":"ack","stream_id":"s"}', "bad_request"),
    "an ack of a negative seq": ('{"type":"ack","stream_id":"s","seq":-1}', "bad_request"),
    "an ack of a huge seq": ('{"type":"ack","stream_id":"s","seq":9007199254740992}', "bad_request"),
    "an ack of true": ('{"type":"ack","stream_id":"s","seq":true}', "bad_request"),
    "an ack of an unknown stream": ('{"type":"ack","stream_id":"s","seq":1}', "unknown_stream"),
    "a cancel of nothing": ('{"type":"cancel"}', "bad_request"),
    "a cancel of an unknown stream": ('{"type":"cancel","stream_id":"s"}', "unknown_stream"),
    "a late auth": ('{"type":"auth","key":"x"}', "bad_request"),
    "binary": (b'{"type":"generate","prompt":"a"}', "unsupported_media_type"),
    "nested too deep": ('{"type":"generate","prompt":"a","x":' + "[" * 300 + "]" * 300 + "}", "bad_request"),
}


@pytest.mark.parametrize("what", BAD)
async def test_bad_message_is_named_and_the_socket_stays(here: Site, peer: Peer, what: str) -> None:
    """Also in the middle of a stream, which does not notice."""
    message, code = BAD[what]
    _, puppet = await peer.begin(here)
    await peer.socket.send(message)
    await peer.refused(code)
    await puppet.say("x")
    assert seqs(await peer.hear_under("a", records=1)) == [2]
    assert here.puppets.begun == 1


@pytest.mark.parametrize(
    ("frame", "code", "close"),
    [
        (b"\x81\xfe\xff\xff" + b"\0" * 4, "too_large", "too_large"),
        (b"\x81\xff" + (2**40).to_bytes(8, "big") + b"\0" * 4, "too_large", "too_large"),
        (b"\x01\xfe\x7f\xff\0\0\0\0" + b"x" * 0x7FFF + b"\x80\xfe\x7f\xff\0\0\0\0", "too_large", "too_large"),
        (b"\x81\x82\0\0\0\0\xc3\x28", "bad_request", "not_utf8"),
        (b"\x81\x83\0\0\0\0\xed\xa0\x80", "bad_request", "not_utf8"),
        (b"\x83\x80\0\0\0\0", "bad_request", "not_a_frame"),
        (b"\xc1\x80\0\0\0\0", "bad_request", "not_a_frame"),
        (b"\x81\x02{}", "bad_request", "not_a_frame"),
    ],
    ids=["too large", "huge", "too large in parts", "not UTF-8", "a surrogate", "unknown opcode", "compressed", "bare"],
)
async def test_what_ends_the_socket_is_named_before(frame: bytes, code: str, close: str) -> None:
    """RFC 6455 lets nobody go on after these; the stream goes on all the same."""
    async with site(max_body=40_000) as here, socket(here.gateway) as peer:
        stream_id, puppet = await peer.begin(here)
        peer.socket.transport.write(frame)
        await peer.refused(code)
        assert await peer.closed() == WS_CLOSE[close]
        await here.gateway.unread(stream_id)
        await puppet.say("x")
        assert not puppet.stopped.is_set()


async def test_message_up_to_the_limit_is_taken() -> None:
    async with site(max_body=200_000) as here, socket(here.gateway) as peer:
        await peer.begin(here, prompt="x" * 199_900)


# --- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("politely", [True, False])
async def test_closed_socket_stops_no_generation(here: Site, politely: bool) -> None:
    """I6: of none of the streams it followed, whichever way it went."""
    async with socket(here.gateway) as peer:
        begun = [await peer.begin(here, ref) for ref in "abc"]
        if not politely:
            peer.socket.transport.abort()
    for stream_id, puppet in begun:
        await here.gateway.unread(stream_id)
        await puppet.say("x")
        await puppet.finish()
        assert (await here.http.get(f"/v1/stream/{stream_id}/state")).json["status"] == "done"


async def test_generation_asked_for_in_the_last_breath_is_whole_or_none(here: Site) -> None:
    """The socket may go at any moment: a stream that was begun has its writer."""
    async with socket(here.gateway) as peer:
        for at in range(20):
            await peer.say("generate", ref=str(at), prompt="x")
        peer.socket.transport.abort()
    await until(lambda: len(here.gateway.streams.writers) == here.puppets.begun)
    for _ in range(here.puppets.begun):
        puppet = await here.puppets.next()
        await puppet.finish()


async def test_restart_is_named_to_who_resumes(here: Site) -> None:
    """With a memory journal nothing is left: an error at once, no silence and no fresh start."""
    async with socket(here.gateway) as peer:
        stream_id, _ = await peer.begin(here)
    async with site() as again, socket(again.gateway) as peer:
        await peer.resume(stream_id, 1)
        await peer.refused("unknown_stream", "a")
        await peer.still_works()
        assert again.puppets.begun == 0


async def test_drain_ends_streams_then_closes() -> None:
    """I7: `cancelled` `shutdown`, the state, and 1001, so that the client knows it may come again."""
    async with site(drain=0.01) as here, socket(here.gateway) as peer, socket(here.gateway) as idle:
        await peer.begin(here, "a")
        await peer.begin(here, "b")
        draining = asyncio.create_task(here.gateway.drain())
        assert await idle.closed() == WS_CLOSE["shutting_down"]
        said = [await peer.hear() for _ in range(4)]
        assert Counter(it["ref"] for it in said) == {"a": 2, "b": 2}
        assert [it["data"]["reason"] for it in said if it["type"] == "record"] == ["shutdown"] * 2
        assert await peer.closed() == WS_CLOSE["shutting_down"]
        await soon(draining)


async def test_draining_gateway_begins_nothing_and_lets_streams_end_by_themselves() -> None:
    async with site(drain=60.0) as here, socket(here.gateway) as peer:
        stream_id, puppet = await peer.begin(here)
        draining = asyncio.create_task(here.gateway.drain())
        await until(lambda: not here.gateway.gateway.ready)
        await peer.say("generate", ref="b", prompt="x")
        await peer.refused("shutting_down", "b")
        await peer.resume(stream_id, 0, ref="c")
        await peer.hear_under("c", records=1)
        await puppet.finish()
        ended = [await peer.hear() for _ in range(4)]
        assert Counter((it["ref"], it["type"]) for it in ended) == Counter(
            (ref, kind) for ref in "ac" for kind in ("record", "journal_state")
        )
        assert await peer.closed() == WS_CLOSE["shutting_down"]
        await soon(draining)


async def test_stopped_gateway_says_that_it_was_no_end(here: Site, peer: Peer) -> None:
    """I7: a reader that was cut off is told so, under its ref."""
    stream_id, _ = await peer.begin(here)
    await here.gateway.idle(stream_id)
    await soon(here.gateway.gateway.stop())
    assert (await peer.refused("shutting_down", "a"))["stream_id"] == stream_id


async def test_reader_whose_stream_goes_is_told(here: Site, peer: Peer) -> None:
    """I4: with what a 409 would say; the other streams of the socket go on."""
    stream_id, _ = await peer.begin(here, "a")
    _, puppet = await peer.begin(here, "b")
    await here.gateway.idle(stream_id)
    await here.http.ask("DELETE", f"/v1/stream/{stream_id}")
    said = [await peer.hear()]
    while said[-1]["type"] != "error":
        said.append(await peer.hear())
    assert (said[-1]["code"], said[-1]["ref"]) in {("cursor_expired", "a"), ("unknown_stream", "a")}
    await puppet.say("x")
    assert seqs(await peer.hear_under("b", records=1)) == [2]


# --- pace ------------------------------------------------------------------------------------------------------------


async def test_ping_gets_through_a_large_replay() -> None:
    """What is unsent when a ping comes is a socket's worth, not the rest of the stream."""
    async with site(max_stream_bytes=64 * 1024**2) as here, wire(here.gateway) as raw:
        stream_id = await here.told(*["x" * 100_000] * 400)
        raw.request("GET", "/v1/ws", *HANDSHAKE)
        assert (await raw.head())[0] == 101
        asked = json.dumps({"type": "resume", "stream_id": stream_id, "cursor": cursor(stream_id, 0)}).encode()
        raw.send(b"\x81\xfe" + len(asked).to_bytes(2, "big") + b"\0\0\0\0" + asked)
        await until(lambda: here.gateway.readers(stream_id) and here.gateway.readers(stream_id)[0].position > 1)
        raw.send(b"\x89\x84\0\0\0\0ping")
        heard = b""
        while b"\x8a\x04ping" not in heard:
            heard = heard[-16:] + await soon(raw.some())
        assert here.gateway.readers(stream_id)[0].position < 400


async def test_flood_of_pings_costs_no_memory(here: Site) -> None:
    """I5: who pings and takes nothing is owed one answer, not one for each."""
    async with wire(here.gateway) as raw:
        raw.request("GET", "/v1/ws", *HANDSHAKE)
        assert (await raw.head())[0] == 101
        (connection,) = here.gateway.server.server_state.connections
        pings = (b"\x89\xfd\0\0\0\0" + b"x" * 125) * 8000
        for _ in range(20):
            raw.send(pings)
            await raw.sent()
        assert connection.transport.get_write_buffer_size() < 300_000


async def test_slow_socket_serves_each_of_its_streams_in_turn(here: Site) -> None:
    """None is served to its end while another waits for its first record."""
    streams = [await here.told(*["x" * 100_000] * 75) for _ in range(4)]
    async with socket(here.gateway) as peer:
        for ref, stream_id in zip("abcd", streams, strict=True):
            await peer.resume(stream_id, 1, ref=ref)
        heard: Counter[str] = Counter()
        while (said := await peer.hear())["type"] == "record":
            heard[said["ref"]] += 1
        assert min(heard[ref] for ref in "abcd") > 10


async def test_stalled_socket_is_cut_off_with_all_its_readers(here: Site) -> None:
    """I5: it takes nothing for a minute."""
    streams = [await here.told(*["x" * 100_000] * 75) for _ in range(3)]
    async with socket(here.gateway) as peer:
        for ref, stream_id in zip("abc", streams, strict=True):
            await peer.resume(stream_id, 1, ref=ref)
        readers = here.gateway.streams.readers
        await until(lambda: len(readers) == 3)
        before: list[int] = []
        while before != (before := [it.position for several in readers.values() for it in several]):  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # until all that fits into the socket is in it
        await here.gateway.pulse(SEND_STALL)
        await until(lambda: not readers, "the readers to go")


async def test_wrapped_gateway_serves_sockets_all_the_same() -> None:
    """A middleware may be changing what is sent: then nothing goes past it."""
    sent: list[str] = []

    def wrapped(app: Any) -> Any:
        async def around(scope: Any, receive: Any, send: Any) -> None:
            async def noted(message: Any) -> None:
                sent.append(message["type"])
                await send(message)

            await app(scope, receive, noted)

        return around

    async with site(around=wrapped, drain=0.01) as here, socket(here.gateway) as peer:
        stream_id, puppet = await peer.begin(here)
        await puppet.say(*"xyz")
        assert seqs(await peer.hear_under("a", records=3)) == [2, 3, 4]
        await peer.say("ack", stream_id=stream_id, seq=2)
        assert (await peer.hear())["acked_seq"] == 2
        await peer.resume(stream_id, 2, ref="b")
        await peer.hear_under("b", records=2)
        await peer.say("leave", ref="b")
        assert (await peer.hear())["ref"] == "b"
        await puppet.finish()
        assert [(await peer.hear())["type"] for _ in range(2)] == ["record", "journal_state"]
    assert sent.count("websocket.accept") == 1
    assert sent.count("websocket.send") == 10
