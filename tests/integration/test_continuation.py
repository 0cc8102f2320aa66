"""A real model's answer that breaks and goes on equals the uninterrupted one, byte for byte."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from midstream.cli.model import Model
from midstream.testing.fault_proxy import FaultProxy

PROMPT = {"prompt": "Tell a short story about a lighthouse keeper.", "temperature": 0, "max_tokens": 60}


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    async with Model() as running:
        yield running


class Gateway:
    """`midstream serve` as a process."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url

    @classmethod
    async def start(cls, journal: str, upstream: str) -> Gateway:
        arguments = ["serve", "--port", "0", "--grpc-port", "0", "--journal", journal]
        arguments += ["--upstream", upstream, "--continue", "prefill"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "midstream", *arguments, stderr=asyncio.subprocess.PIPE, env=dict(os.environ)
        )
        assert process.stderr is not None
        async with asyncio.timeout(20):
            while (found := re.search(rb"http://[0-9.:]+", await process.stderr.readline())) is None:
                pass
        return cls(process, found[0].decode())

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


async def answer(session: aiohttp.ClientSession, url: str, stream_id: str) -> dict[str, Any]:
    """The snapshot once the stream has ended."""
    async with asyncio.timeout(30):
        async with session.get(f"{url}/v1/stream/{stream_id}?from=start") as response:
            await response.read()
        async with session.get(f"{url}/v1/stream/{stream_id}/snapshot") as response:
            snapshot: dict[str, Any] = await response.json()
            return snapshot


async def begin(session: aiohttp.ClientSession, url: str, records: int) -> str:
    """Start the answer and leave after so many records."""
    async with session.post(f"{url}/v1/stream", json=PROMPT) as response:
        seen = 0
        while seen < records:
            line = await response.content.readline()
            assert line, "the answer ended before it could be left"
            seen += line.startswith(b"id: ")
        return response.headers["Midstream-Stream-Id"]


@pytest.mark.model
@pytest.mark.timeout(180)
async def test_cut_upstream_and_killed_gateway_make_no_difference(model: Model, tmp_path: Path) -> None:
    """Once the upstream's connection is cut in mid-answer, once the gateway is killed: the text is the same."""
    journal = f"sqlite:///{tmp_path}/streams.db"
    port = int(model.url.rpartition(":")[2].removesuffix("/v1"))
    async with FaultProxy("127.0.0.1", port) as proxy, aiohttp.ClientSession() as session:
        upstream = f"http://127.0.0.1:{proxy.port}/v1"
        gateway = await Gateway.start(journal, upstream)
        try:
            whole = await answer(session, gateway.url, await begin(session, gateway.url, 2))
            assert whole["status"] == "done"

            cut = await begin(session, gateway.url, 20)
            proxy.reset()
            after_cut = await answer(session, gateway.url, cut)
            assert (after_cut["status"], after_cut["text"]) == ("done", whole["text"])

            killed = await begin(session, gateway.url, 20)
            await gateway.kill()
            gateway = await Gateway.start(journal, upstream)
            after_kill = await answer(session, gateway.url, killed)
            assert (after_kill["status"], after_kill["text"]) == ("done", whole["text"])

            for stream_id, reason in ((cut, "upstream_lost"), (killed, "writer_lost")):
                async with session.get(f"{gateway.url}/v1/stream/{stream_id}?from=start") as response:
                    records = await response.text()
                assert records.count('"seam":') == 1, "the first record after the break says so, and no other"
                assert f'"seam":"{reason}"' in records
                assert '"usage_from_seq":' in records
        finally:
            await gateway.kill()
