"""Bounds, retention and abandonment, as a client meets them (PROTOCOL.md, section 13; I5, I6)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from midstream.errors import StoreUnavailable
from midstream.testing.transport_dial import ADA, BOB, KEYS
from midstream.wire import H_STREAM_ID, RETAIN_CAP, SWEEP_EVERY
from tests.gateways import Site, cursor, site

HOUR = 3600.0


async def pass_time(here: Site, seconds: float) -> None:
    """Let the clock go on, and the gateway look at it."""
    here.gateway.clock.advance(seconds)
    await here.gateway.streams.pulse(0.0)


async def status(here: Site, stream_id: str) -> str:
    """Status of a stream, without asking for it in a way that counts as interest."""
    return (await here.gateway.streams.journal.state(stream_id)).status


# --- how many streams ------------------------------------------------------------------------------------------------


async def test_limit_of_open_streams_is_429_and_passes() -> None:
    """Running streams are never ended for a new one; one that ends makes room."""
    async with site(max_streams=3) as here:
        running = [await here.open_stream("a") for _ in range(3)]
        answer = await here.http.post("/v1/stream", {"prompt": "one too many"})
        assert (answer.status, answer.error) == (429, "too_many_streams")
        assert int(answer.headers["retry-after"]) >= 1
        assert here.puppets.begun == 3
        for stream_id, puppet in running:
            assert await status(here, stream_id) == "open"
            assert not puppet.stopped.is_set()
        await running[0][1].finish()
        await here.open_stream("room again")
        assert (await here.http.post("/v1/stream", {"prompt": "one too many"})).status == 429


async def test_limit_of_one_owner_is_not_anothers(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEYS)
    async with site(keys_file=str(tmp_path / "keys"), max_streams_per_owner=2) as here:
        ada, bob = here.http.keyed(ADA), here.http.keyed(BOB)
        for _ in range(2):
            await here.open_stream("a", http=ada)
        answer = await ada.post("/v1/stream", {"prompt": "one too many"})
        assert (answer.status, answer.error) == (429, "too_many_streams")
        assert int(answer.headers["retry-after"]) >= 1
        await here.open_stream("b", http=bob)


async def test_retry_finds_its_stream_also_at_the_limit() -> None:
    """Idempotency first: the stream that the first try opened is not one more."""
    async with site(max_streams=1) as here:
        headers = {"Idempotency-Key": "k"}
        stream_id, puppet = await here.open_stream(http=here.http.sending(**headers))
        response = await here.http.create(headers)
        assert response.headers[H_STREAM_ID] == stream_id
        response.close()
        await puppet.finish()


async def test_ends_of_all_kinds_make_room() -> None:
    """Cancelled, failed, deleted: none of them counts any more."""
    async with site(max_streams=1) as here:
        stream_id, puppet = await here.open_stream()
        await here.http.post(f"/v1/stream/{stream_id}/cancel")
        await puppet.stopped.wait()
        stream_id, puppet = await here.open_stream()
        await puppet.fail()
        stream_id, puppet = await here.open_stream()
        await here.http.ask("DELETE", f"/v1/stream/{stream_id}")
        await puppet.stopped.wait()
        await here.open_stream()


async def test_simultaneous_creates_do_not_pass_the_limit() -> None:
    async with site(max_streams=3) as here:
        answers = await asyncio.gather(*(here.http.create() for _ in range(10)))
        assert sorted(answer.status for answer in answers) == [200] * 3 + [429] * 7
        for answer in answers:
            answer.close()


# --- how many bytes --------------------------------------------------------------------------------------------------

TOKEN = "x" * 1000


async def test_total_of_bytes_lets_finished_streams_go_first() -> None:
    """The least recently used of them first, whole; open ones are untouched, however old."""
    async with site(max_bytes=57_000) as here:
        running, _ = await here.open_stream(*[TOKEN] * 10)
        finished = []
        for _ in range(3):
            here.gateway.clock.advance(61)
            finished.append(await here.told(*[TOKEN] * 10))
        here.gateway.clock.advance(61)
        assert (await here.http.get(f"/v1/stream/{finished[0]}/state")).status == 200  # used last
        newest, _ = await here.open_stream(*[TOKEN] * 10)
        here.gateway.clock.advance(61)
        await here.open_stream()
        left = {state["stream_id"] for state in (await here.http.get("/v1/streams")).json["streams"]}
        assert {running, newest, finished[0], finished[2]} <= left
        assert finished[1] not in left
        assert (await here.http.get(f"/v1/stream/{finished[1]}?from=start")).error == "unknown_stream"


async def test_total_of_bytes_never_takes_an_open_stream() -> None:
    """When all of it is of open streams a new one waits, and says for how long."""
    async with site(max_bytes=20_000) as here:
        first, puppet = await here.open_stream(*[TOKEN] * 30)
        answer = await here.http.post("/v1/stream", {"prompt": "no room"})
        assert (answer.status, answer.error) == (429, "out_of_space")
        assert int(answer.headers["retry-after"]) >= 1
        assert here.puppets.begun == 1
        await pass_time(here, SWEEP_EVERY + 1)
        assert (await here.gateway.streams.journal.state(first)).retained_records == 31
        await puppet.finish()
        await here.open_stream("now there is")
        assert (await here.http.get(f"/v1/stream/{first}?from=start")).error == "unknown_stream"


async def test_evicted_records_stay_in_the_snapshot() -> None:
    """R9: what readers can no longer have one by one, who restarts still gets whole; it says where to go on."""
    async with site(max_stream_records=4) as here:
        stream_id, puppet = await here.open_stream(*"abcdefgh")
        snapshot = (await here.http.get(f"/v1/stream/{stream_id}/snapshot")).json
        assert (snapshot["text"], snapshot["seq"], snapshot["complete"]) == ("abcdefgh", 9, True)
        await puppet.say("i")
        await puppet.finish()
        answer = await here.http.get(f"/v1/stream/{stream_id}?cursor={snapshot['cursor']}")
        assert answer.body.count(b"\nid: ") == 2
        assert (await here.http.get(f"/v1/stream/{stream_id}/snapshot")).json["text"] == "abcdefghi"


async def test_snapshot_says_when_even_the_fold_had_to_go() -> None:
    async with site(max_stream_bytes=20_000) as here:
        stream_id, _ = await here.open_stream(*[TOKEN] * 100)
        snapshot = (await here.http.get(f"/v1/stream/{stream_id}/snapshot")).json
        assert snapshot["complete"] is False
        state = (await here.http.get(f"/v1/stream/{stream_id}/state")).json
        assert state["retained_bytes"] <= 20_000
        assert state["oldest_retained_seq"] > 1


# --- how long --------------------------------------------------------------------------------------------------------


async def test_finished_stream_is_forgotten_after_its_grace_time() -> None:
    """R10: by the sweep, without anybody asking; access, of whatever kind, pushes it on."""
    async with site(retain=300.0) as here:
        stream_id = await here.told("a")
        for rest in ("/state", "/snapshot", f"?cursor={cursor(stream_id, 1)}"):
            await pass_time(here, 290)
            assert (await here.http.get(f"/v1/stream/{stream_id}{rest}")).status == 200
        await pass_time(here, 290)
        assert (await here.http.post(f"/v1/stream/{stream_id}/ack", {"seq": 1})).status == 200
        await pass_time(here, 301)
        assert (await here.http.get("/v1/streams")).json == {"streams": []}
        assert (await here.http.get(f"/v1/stream/{stream_id}/state")).error == "unknown_stream"


async def test_listing_pushes_nothing_on() -> None:
    """A page that polls its list does not keep every stream for ever."""
    async with site(retain=300.0) as here:
        await here.told("a")
        for _ in range(4):
            await pass_time(here, 100)
            listed = (await here.http.get("/v1/streams")).json["streams"]
        assert listed == []


async def test_no_access_keeps_a_stream_beyond_its_cap() -> None:
    """R10: a day after its end it is over in any case."""
    async with site(retain=2 * HOUR) as here:
        stream_id = await here.told("a")
        for _ in range(int(RETAIN_CAP / HOUR) - 1):
            await pass_time(here, HOUR)
            assert (await here.http.get(f"/v1/stream/{stream_id}/state")).status == 200
        await pass_time(here, HOUR)
        assert (await here.http.get(f"/v1/stream/{stream_id}/state")).status == 404


async def test_open_stream_never_expires() -> None:
    """R10: a generation may be silent for days."""
    async with site(retain=60.0) as here:
        stream_id, puppet = await here.open_stream("a")
        for _ in range(3):
            await pass_time(here, 2 * RETAIN_CAP)
        await puppet.say("b")
        await puppet.finish()
        answer = await here.http.get(f"/v1/stream/{stream_id}?from=start")
        assert answer.body.count(b"\nid: ") == 4


async def test_reader_whose_stream_expires_is_told() -> None:
    """Its peer takes nothing while the grace time runs out; what it then hears is no end."""
    async with site(retain=60.0, max_stream_bytes=64 * 2**20) as here:
        stream_id, puppet = await here.open_stream()
        response = await here.http.open("GET", f"/v1/stream/{stream_id}?from=start")
        [follow] = here.gateway.readers(stream_id)
        for _ in range(200):
            await puppet.say("x" * 200_000)
            if (
                not follow.waiting
                and follow.position < (await here.gateway.streams.journal.state(stream_id)).highest_seq
            ):
                break
        await puppet.finish()
        await pass_time(here, 61)
        body = await asyncio.wait_for(response.read(), 10)
        assert body.endswith(
            b'\n\nevent: expired\ndata: {"error":"cursor_expired","oldest_available":null,"action":"restart"}\n\n'
        )
        assert b"event: done" not in body


# --- abandonment -----------------------------------------------------------------------------------------------------


async def test_abandoned_generation_is_cancelled() -> None:
    """I6: nobody has read or asked for so long; who comes back hears why it ended."""
    async with site() as here:
        stream_id, puppet = await here.open_stream("a", abandon_after=30)
        await pass_time(here, 29)
        assert await status(here, stream_id) == "open"
        await pass_time(here, 1)
        assert await status(here, stream_id) == "cancelled"
        await asyncio.wait_for(puppet.stopped.wait(), 1.0)
        answer = await here.http.get(f"/v1/stream/{stream_id}?from=start")
        assert b'"reason":"abandoned"' in answer.body


@pytest.mark.parametrize("interest", ["/state", "/snapshot", "?from=start"])
async def test_any_sign_of_interest_begins_the_deadline_anew(interest: str) -> None:
    async with site() as here:
        stream_id, _ = await here.open_stream("a", abandon_after=30)
        for _ in range(3):
            await pass_time(here, 29)
            response = await here.http.open("GET", f"/v1/stream/{stream_id}{interest}")
            response.close()
            await here.gateway.unread(stream_id)
            assert await status(here, stream_id) == "open"
        await pass_time(here, 30)
        assert await status(here, stream_id) == "cancelled"


async def test_generation_with_a_reader_is_never_abandoned() -> None:
    """From when it leaves the time runs; not from when it came."""
    async with site() as here:
        stream_id, _, reader = await here.begin(abandon_after=30)
        for _ in range(5):
            await pass_time(here, 100)
        assert await status(here, stream_id) == "open"
        reader.close()
        await here.gateway.unread(stream_id)
        await pass_time(here, 29)
        assert await status(here, stream_id) == "open"
        await pass_time(here, 1)
        assert await status(here, stream_id) == "cancelled"


async def test_abandonment_is_off_unless_asked_for() -> None:
    async with site() as here:
        stream_id, _ = await here.open_stream("a")
        await pass_time(here, 10 * RETAIN_CAP)
        assert await status(here, stream_id) == "open"


async def test_setting_holds_where_the_request_says_nothing() -> None:
    async with site(abandon_after=100.0) as here:
        patient, _ = await here.open_stream("a")
        hasty, _ = await here.open_stream("a", abandon_after=10.5)
        await pass_time(here, 11)
        assert [await status(here, stream_id) for stream_id in (patient, hasty)] == ["open", "cancelled"]
        await pass_time(here, 90)
        assert await status(here, patient) == "cancelled"


# --- when the store does not answer ----------------------------------------------------------------------------------


async def test_store_that_does_not_answer_is_503_and_leaves_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client comes back after `Retry-After`; nothing here waits for a reader that never was."""
    async with site() as here:
        stream_id, puppet = await here.open_stream("a")

        async def away(stream_id: str) -> None:
            raise StoreUnavailable("the disk is full", 7)

        monkeypatch.setattr(here.gateway.streams.journal, "touch", away)
        answer = await here.http.get(f"/v1/stream/{stream_id}?from=start")
        assert (answer.status, answer.error, answer.headers["retry-after"]) == (503, "store_unavailable", "7")
        assert not here.gateway.readers(stream_id)
        await puppet.finish()
