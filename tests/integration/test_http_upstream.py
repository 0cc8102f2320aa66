"""The gateway in front of an upstream over HTTP: what passes through it, and what stops when (I6)."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from midstream.server.settings import Settings
from midstream.testing.gateway import RunningGateway
from midstream.testing.patience import soon
from midstream.testing.transport_dial import ADA, KEYS
from midstream.testing.upstream import (
    MisbehavingUpstream,
    Pause,
    Script,
    Stall,
    Status,
    Step,
    chat_answer,
    chat_event,
    error_body,
)
from midstream.wire import H_STREAM_ID
from tests.gateways import Http, Site, client, heard, site


@pytest_asyncio.fixture
async def upstream() -> AsyncIterator[MisbehavingUpstream]:
    async with MisbehavingUpstream({"m": Script(chat_answer("Hel", "lo"))}) as running:
        yield running


def records(body: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Event and data of each record."""
    return [(event.decode(), json.loads(data)) for event, data in re.findall(rb"event: (\w+)\ndata: (.*)\n\n", body)]


async def test_answer_passes_through(here: Site, upstream: MisbehavingUpstream) -> None:
    """Text chunk by chunk, and how it ended; the upstream's first model where none is named."""
    answer = await here.http.post("/v1/stream", {"prompt": "Hi", "temperature": 0.5})
    events = records(answer.body)
    assert [event for event, _ in events] == ["start", "token", "token", "done"]
    assert [data["delta"] for event, data in events if event == "token"] == ["Hel", "lo"]
    assert events[0][1]["model"] == "m"
    [asked] = [request for request in upstream.requests if request.method == "POST"]
    assert asked.json["messages"] == [{"role": "user", "content": "Hi"}]
    assert asked.json["temperature"] == 0.5
    assert asked.json["stream"] is True


@pytest.mark.parametrize("steps", [[Stall()], [chat_event("Hel"), Stall()]], ids=["before token 1", "in the middle"])
async def test_cancel_closes_the_upstream_connection(
    here: Site, upstream: MisbehavingUpstream, steps: Sequence[Step]
) -> None:
    """Within a second, silent or not; the reader hears one `cancelled`, and a second cancel changes nothing."""
    upstream.script("m", Script(steps))
    reader = await here.http.create(model="m")
    stream_id = reader.headers[H_STREAM_ID]
    await upstream.requested()
    if len(steps) > 1:
        await heard(reader, b"Hel")
    for _ in range(2):
        assert (await here.http.post(f"/v1/stream/{stream_id}/cancel")).json["status"] == "cancelled"
    await upstream.disconnected(within=1.0)
    assert (await soon(reader.read())).count(b"event: cancelled\n") == 1


async def test_cancel_after_completion_changes_nothing(here: Site) -> None:
    reader = await here.http.create(model="m")
    stream_id = reader.headers[H_STREAM_ID]
    await soon(reader.read())
    assert (await here.http.post(f"/v1/stream/{stream_id}/cancel")).json["status"] == "done"


async def test_mere_disconnect_keeps_the_upstream_busy(here: Site, upstream: MisbehavingUpstream) -> None:
    """I6: the reader leaves before the first token; the answer is complete when he comes back."""
    told = asyncio.Event()
    upstream.script("m", Script([Pause(told), *chat_answer("Hel", "lo")]))
    reader = await here.http.create(model="m")
    stream_id = reader.headers[H_STREAM_ID]
    await upstream.requested()
    reader.close()
    await here.gateway.unread(stream_id)
    assert upstream.open_connections == 1
    told.set()
    answer = await here.http.get(f"/v1/stream/{stream_id}?from=start")
    assert [event for event, _ in records(answer.body)] == ["start", "token", "token", "done"]


async def test_headers_come_while_the_upstream_is_silent(here: Site, upstream: MisbehavingUpstream) -> None:
    """A model may think for minutes: nothing on the way may take that for a dead connection."""
    upstream.script("m", Script([Stall()]))
    reader = await here.http.create(model="m")
    assert reader.status == 200
    assert b"event: start\n" in await soon(reader.content.readany())
    stream_id = reader.headers[H_STREAM_ID]
    await here.gateway.idle(stream_id)
    await here.gateway.pulse(here.gateway.settings.heartbeat)
    assert await soon(reader.content.readany()) == b": ping\n"


@pytest.mark.parametrize("gzip", [False, True], ids=["plain", "gzip"])
async def test_upstreams_framing_is_not_ours(here: Site, upstream: MisbehavingUpstream, gzip: bool) -> None:
    """Its length and its compression are of its own body, of an answer and of a refusal alike."""
    upstream.script("m", Script(chat_answer("Hel", "lo"), framing="length", gzip=gzip, headers={"X-Upstream": "1"}))
    reader = await here.http.create(model="m")
    for name in ("Content-Length", "Content-Encoding", "X-Upstream"):
        assert name not in reader.headers
    assert [event for event, _ in records(await soon(reader.read()))] == ["start", "token", "token", "done"]
    upstream.script("m", Script([Status(400, body=error_body("no such thing"))], gzip=gzip))
    reader = await here.http.create(model="m")
    assert reader.status == 200
    event, data = records(await soon(reader.read()))[-1]
    assert (event, data["error"]["code"], data["error"]["retryable"]) == ("failed", "upstream_error", False)
    assert "no such thing" in data["error"]["message"]


async def test_failure_of_the_upstream_is_replayed_as_it_was(here: Site, upstream: MisbehavingUpstream) -> None:
    """I7: an answer that was cut is never `done`, now or later."""
    upstream.script("m", Script([chat_event("Hel"), chat_event("lo")]))
    reader = await here.http.create(model="m")
    body = await soon(reader.read())
    assert records(body)[-1][1]["error"]["code"] == "upstream_truncated"
    again = await here.http.get(f"/v1/stream/{reader.headers[H_STREAM_ID]}?from=start")
    assert records(again.body) == records(body)
    whole = await here.http.post("/v1/stream", {"prompt": "Hi", "model": "m", "stream": False})
    assert (whole.status, whole.error) == (502, "upstream_truncated")


async def test_upstream_that_is_away() -> None:
    """A model that was named gets its stream, which fails; where the upstream should have named one there is none."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    async with site(upstream=(url,)) as here:
        reader = await here.http.create(model="m")
        assert records(await soon(reader.read()))[-1][1]["error"]["code"] == "upstream_unreachable"
        answer = await here.http.post("/v1/stream", {"prompt": "Hi"})
        assert (answer.status, answer.error) == (502, "upstream_unreachable")


async def test_model_no_upstream_serves_is_404(upstream: MisbehavingUpstream) -> None:
    async with site(upstream=(f"only-*={upstream.url}",)) as here:
        answer = await here.http.post("/v1/stream", {"prompt": "Hi", "model": "another"})
        assert (answer.status, answer.error) == (404, "unknown_model")
        assert upstream.requests == []


async def test_callers_key_is_never_passed_on(upstream: MisbehavingUpstream, tmp_path: Path) -> None:
    """Nor his cookies, nor anything else he sent, but for the trace he wants to follow."""
    (tmp_path / "keys").write_text(KEYS)
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with site(upstream=(upstream.url,), keys_file=str(tmp_path / "keys")) as here:
        caller: Http = here.http.keyed(ADA).sending(apikey=ADA, Cookie="a=b", traceparent=trace, X_Mine="1")
        assert (await caller.post("/v1/stream", {"prompt": "Hi", "model": "m"})).status == 200
    [asked] = upstream.requests
    sent = {name.lower(): value for name, value in asked.headers.items()}
    assert sent["traceparent"] == trace
    assert not {"authorization", "apikey", "cookie", "x-mine"} & sent.keys()
    assert ADA not in str(sent)


async def test_generation_is_kept_by_more_than_weak_references(here: Site, upstream: MisbehavingUpstream) -> None:
    """Nobody reads it, nobody holds it, and the collector runs all the time: it completes."""
    told = [asyncio.Event() for _ in range(5)]
    steps: list[Step] = [step for at in range(5) for step in (Pause(told[at]), chat_event(str(at)))]
    upstream.script("m", Script([*steps, *chat_answer("end")]))
    reader = await here.http.create(model="m")
    stream_id = reader.headers[H_STREAM_ID]
    reader.close()
    del reader
    journal = here.gateway.streams.journal
    for event in told:
        gc.collect()
        event.set()
        await asyncio.sleep(0)
        gc.collect()
    while (await journal.state(stream_id)).status == "open":
        gc.collect()
        await journal.wait(stream_id, (await journal.state(stream_id)).highest_seq)
    assert (await here.http.get(f"/v1/stream/{stream_id}/snapshot")).json["text"] == "01234end"


def test_gateways_live_in_any_loop() -> None:
    """Two at once in two threads, and one after the other: nothing belongs to the loop that was first."""

    async def one() -> str:
        gateway = RunningGateway(Settings(journal="memory:"))
        async with gateway, client(gateway) as http:
            here = Site(gateway, http)
            stream_id = await here.told("a", "b")
            return str((await http.get(f"/v1/stream/{stream_id}/snapshot")).json["text"])

    async def two() -> list[str]:
        return list(await asyncio.gather(*(asyncio.to_thread(asyncio.run, one()) for _ in range(2))))

    assert asyncio.run(one()) == "ab"
    assert asyncio.run(two()) == ["ab", "ab"]
