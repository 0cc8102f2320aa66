"""A real model's answer that breaks and goes on equals the uninterrupted one, byte for byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from midstream.cli.model import Model
from midstream.testing.fault_proxy import FaultProxy
from midstream.wire import H_STREAM_ID
from tests.replicas import Fleet, Replica, Visit, event_of, fleet
from tests.valkeys import shared

PROMPT = {"prompt": "Tell a short story about a lighthouse keeper.", "temperature": 0, "max_tokens": 60}
LEASE = 2.0


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    async with Model() as running:
        yield running


async def begin(gateways: Fleet, replica: Replica, records: int) -> Visit:
    """Start the answer and leave after so many records."""
    async with gateways.session.post(f"{replica.url}/v1/stream", json=PROMPT) as response:
        visit = Visit(response.headers[H_STREAM_ID], 0)
        while len(visit.frames) < records:
            data = await response.content.readany()
            assert data, "the answer ended before it could be left"
            visit.take(data)
    return visit


async def answer(gateways: Fleet, replica: Replica, visit: Visit) -> dict[str, Any]:
    """The snapshot once the stream has ended; its records are what was seen before and what a resume gives."""
    rest = await gateways.read(replica, visit.stream_id, visit.seq)
    told = [json.loads(frame.split(b"\ndata: ")[1]) for frame in visit.frames + rest.frames]
    snapshot: dict[str, Any] = await gateways.ask("GET", replica, f"/stream/{visit.stream_id}/snapshot")
    assert "".join(record.get("delta", "") for record in told) == snapshot["text"]
    assert event_of(rest.frames[-1]) == snapshot["status"]
    return snapshot | {
        "seams": [record["seam"] for record in told if "seam" in record],
        "usage_from_seq": told[-1].get("usage_from_seq"),
    }


@pytest.mark.model
@pytest.mark.timeout(180)
@pytest.mark.parametrize("store", ["sqlite", "valkey"])
async def test_cut_upstream_and_killed_gateway_make_no_difference(model: Model, tmp_path: Path, store: str) -> None:
    """Once the upstream's connection is cut in mid-answer, once the gateway is killed: the text is the same.

    On SQLite it is started again; on a shared store another one goes on, for readers that wait there.
    """
    journals = {"sqlite": f"sqlite:///{tmp_path}/streams.db", "valkey": shared().url(f"t{uuid4().hex}", lease=LEASE)}
    port = int(model.url.rpartition(":")[2].removesuffix("/v1"))
    async with FaultProxy("127.0.0.1", port) as proxy:
        options = ("--upstream", f"http://127.0.0.1:{proxy.port}/v1", "--continue", "prefill")
        async with fleet(journals[store], *options) as gateways:
            one, *others = await gateways.gateways(1 if store == "sqlite" else 2)
            whole = await answer(gateways, one, await begin(gateways, one, 2))
            assert (whole["status"], whole["seams"]) == ("done", [])

            cut = await begin(gateways, one, 20)
            proxy.reset()
            after_cut = await answer(gateways, one, cut)
            assert (after_cut["status"], after_cut["text"]) == ("done", whole["text"])
            assert after_cut["seams"] == ["upstream_lost"], "the first record after the break says so, and no other"

            killed = await begin(gateways, one, 20)
            if store == "sqlite":
                one.kill()
                await one.start()
                after_kill = await answer(gateways, one, killed)
            else:
                await others[0].settled(LEASE)
                waiting = asyncio.create_task(answer(gateways, others[0], killed))
                one.kill()
                after_kill = await waiting
            assert (after_kill["status"], after_kill["text"]) == ("done", whole["text"])
            assert after_kill["seams"] == ["writer_lost"]
            assert after_cut["usage_from_seq"]
            assert after_kill["usage_from_seq"]
