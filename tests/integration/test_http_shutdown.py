"""How a gateway ends: in this process step by step, and as a process that gets signals (PROTOCOL.md, section 14)."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from midstream.testing.patience import soon, until
from midstream.wire import H_STREAM_ID
from tests.gateways import cursor, site

DRAINED = b'"done":true,"reason":"shutdown"}\n\n'


async def test_drain_lets_readers_stay_until_their_streams_end(tmp_path: Path) -> None:
    """Nothing new is accepted; what is open goes on, also to a reader that has yet to be given it."""
    async with site(journal=f"sqlite:///{tmp_path}/journal.db", drain=60.0) as here:
        stream_id, puppet, reader = await here.begin()
        draining = asyncio.create_task(here.gateway.drain())
        await until(lambda: not here.gateway.gateway.ready)
        await puppet.say("a", "b")
        await here.gateway.idle(stream_id)
        assert not draining.done()
        with pytest.raises(aiohttp.ClientConnectorError):
            await here.http.get("/healthz")
        await puppet.finish()
        assert (await reader.read()).count(b"\nid: ") == 4
        await soon(draining)


async def test_drain_ends_what_does_not_end_by_itself(tmp_path: Path) -> None:
    """Many at once, each with its terminal record, which its readers still receive."""
    async with site(journal=f"sqlite:///{tmp_path}/journal.db", drain=0.01) as here:
        begun = [await here.begin() for _ in range(20)]
        await soon(here.gateway.drain())
        for stream_id, puppet, reader in begun:
            body = await soon(reader.read())
            assert body.endswith(b'id: 2\nevent: cancelled\ndata: {"seq":2,' + DRAINED)
            assert puppet.stopped.is_set()
            assert (await here.gateway.streams.journal.state(stream_id)).status == "cancelled"


async def test_stream_that_is_being_opened_is_drained_too(tmp_path: Path) -> None:
    """A drain that begins between the request and its stream leaves no stream without an end."""
    async with site(journal=f"sqlite:///{tmp_path}/journal.db", drain=0.01) as here:
        streams = here.gateway.streams
        opening = asyncio.create_task(here.http.create())
        await until(lambda: streams._opening)
        await soon(streams.drain(0.01))
        body = await soon((await opening).read())
        assert body.endswith(DRAINED)
        assert not streams.writers


async def test_draining_gateway_refuses_new_streams_on_open_connections() -> None:
    """503 with `Retry-After`: another process will answer.  A retry of an open one is no new one."""
    async with site(drain=60.0) as here:
        headers = {"Idempotency-Key": "k"}
        stream_id, puppet, reader = await here.begin(here.http.sending(**headers))
        draining = asyncio.create_task(here.gateway.gateway.drain())
        await until(lambda: not here.gateway.gateway.ready)
        answer = await here.http.post("/v1/stream", {"prompt": "a"})
        assert (answer.status, answer.error) == (503, "shutting_down")
        assert int(answer.headers["retry-after"]) >= 1
        again = await here.http.create(headers)
        assert again.headers[H_STREAM_ID] == stream_id
        await puppet.finish()
        assert (await reader.read()).partition(b"\n")[2] == (await again.read()).partition(b"\n")[2]
        await soon(draining)


async def test_whole_reply_is_drained_with_its_stream() -> None:
    async with site(drain=0.01) as here:
        asking = asyncio.create_task(here.http.post("/v1/stream", {"prompt": "a", "stream": False}))
        await here.puppets.next()
        await soon(here.gateway.drain())
        answer = await asking
        assert (answer.status, answer.error) == (502, "cancelled")


async def test_stop_without_a_drain_is_no_end_for_a_reader() -> None:
    """I7: the connection ends without a terminal record; a whole reply is 503 and names its stream."""
    async with site() as here:
        _, puppet, reader = await here.begin()
        await puppet.say("a")
        asking = asyncio.create_task(here.http.post("/v1/stream", {"prompt": "a", "stream": False}))
        await here.puppets.next()
        await soon(here.gateway.gateway.stop())
        body = await soon(reader.read())
        assert body.endswith(b'{"seq":2,"delta":"a","done":false}\n\n')
        answer = await asking
        assert (answer.status, answer.error) == (503, "shutting_down")
        assert answer.json["stream_id"] == answer.headers.get(H_STREAM_ID.lower(), answer.json["stream_id"])


async def test_second_signal_ends_a_drain_that_no_reader_waits_for() -> None:
    """What is drained may have no connection at all; the second signal is at once all the same."""
    async with site(drain=600.0) as here:
        await here.open_stream("a")
        server = here.gateway.server
        server.handle_exit(signal.SIGTERM, None)
        draining = asyncio.create_task(here.gateway.drain())
        await asyncio.wait([draining], timeout=0.3)  # past the pause in which the server waits for its connections
        assert not draining.done()
        server.handle_exit(signal.SIGTERM, None)
        await soon(draining)


# --- as a process ----------------------------------------------------------------------------------------------------


class Process:
    """`python -m midstream serve` on a free port, in front of the scripted upstream."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self._process = process
        self.address = address
        self.talk: list[str] = []

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def ended(self) -> int:
        """The exit code, once it has ended."""
        assert self._process.stderr is not None
        async with asyncio.timeout(20):
            self.talk += (await self._process.stderr.read()).decode().splitlines()
            return await self._process.wait()


@asynccontextmanager
async def served(*flags: str) -> AsyncIterator[Process]:
    """Started, its address read from what it says; killed at the end if it still runs."""
    words = ("serve", "--port", "0", "--grpc-port", "0", "--upstream", "scripted:", *flags)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "midstream", *words, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(20):
            said = ""
            while not (match := re.search(r"midstream serves (http://\S+)", said)):
                line = await process.stderr.readline()
                assert line, f"it did not start: {said}"
                said += line.decode()
        yield Process(process, match[1])
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def asked(session: aiohttp.ClientSession, process: Process, model: str) -> aiohttp.ClientResponse:
    """A reader that has heard the first token."""
    response = await session.post(f"{process.address}/v1/stream", json={"prompt": "a", "model": model})
    assert response.status == 200
    heard = b""
    while b"event: token" not in heard:
        heard += await soon(response.content.readany())
    return response


async def test_sigterm_lets_streams_end_by_themselves(tmp_path: Path) -> None:
    """Within the time it is given a stream ends with its own `done`; then the process ends well."""
    async with served("--journal", f"sqlite:///{tmp_path}/journal.db") as process, aiohttp.ClientSession() as session:
        reader = await asked(session, process, "scripted-n40-r100")
        process.signal(signal.SIGTERM)
        body = await asyncio.wait_for(reader.read(), 20)
        assert b"event: done\n" in body
        assert await process.ended() == 0


async def test_sigterm_ends_streams_after_their_time(tmp_path: Path) -> None:
    """They get `cancelled` `shutdown`, which stands in the journal when the gateway comes back."""
    journal = f"sqlite:///{tmp_path}/journal.db"
    async with aiohttp.ClientSession() as session:
        async with served("--journal", journal, "--drain", "0.2") as process:
            reader = await asked(session, process, "scripted-n100000-r20")
            stream_id = reader.headers[H_STREAM_ID]
            process.signal(signal.SIGTERM)
            body = await asyncio.wait_for(reader.read(), 20)
            assert body.endswith(DRAINED)
            assert await process.ended() == 0
            assert any('"status":"cancelled"' in line and stream_id in line for line in process.talk)
        async with served("--journal", journal) as process:
            path = f"{process.address}/v1/stream/{stream_id}?cursor={cursor(stream_id, 1)}"
            async with session.get(path) as response:
                assert (await response.read()).endswith(body[-200:])


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_second_signal_is_at_once(second: signal.Signals) -> None:
    """Whichever: with readers, and also when nobody reads what is being drained."""
    async with served("--journal", "memory:", "--drain", "600") as process, aiohttp.ClientSession() as session:
        reader = await asked(session, process, "scripted-n100000-r20")
        if second is signal.SIGINT:
            reader.close()
        process.signal(signal.SIGTERM)
        await until_refused(process)
        process.signal(second)
        assert await asyncio.wait_for(process.ended(), 5) == 0
        if second is signal.SIGTERM:
            try:
                assert b"event: done" not in await soon(reader.read())
            except aiohttp.ClientPayloadError:
                pass  # cut off: as little a success


async def until_refused(process: Process) -> None:
    """Wait until the process accepts no connections any more."""
    port = int(process.address.rpartition(":")[2])
    async with asyncio.timeout(10):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionError:  # refused, or reset where it still stood in the queue
                return
            writer.close()


async def test_sighup_reads_the_keys_again(tmp_path: Path) -> None:
    """A key that was added counts without a restart; streams do not notice."""
    keys = tmp_path / "keys"
    write(keys, "ada:first-key-1\n")
    async with (
        served("--journal", "memory:", "--keys-file", str(keys)) as process,
        aiohttp.ClientSession() as session,
    ):
        path = f"{process.address}/v1/streams"
        write(keys, "ada:second-key-2\n")
        process.signal(signal.SIGHUP)
        async with asyncio.timeout(10):
            while True:
                async with session.get(path, headers={"apikey": "second-key-2"}) as response:
                    if response.status == 200:
                        break
        async with session.get(path, headers={"apikey": "first-key-1"}) as response:
            assert response.status == 401


def write(path: Path, text: str) -> None:
    path.write_text(text)
