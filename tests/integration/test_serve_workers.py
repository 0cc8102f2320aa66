"""`midstream serve --workers N`: processes that share their ports, and one that looks after them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from midstream.cli.supervisor import pause_after
from midstream.cursor import Cursor
from midstream.testing.patience import soon, until
from tests.gateways import Wire
from tests.processes import children, holder, listeners, wire_to
from tests.replicas import Fleet, Replica, Visit, event_of, fleet
from tests.valkeys import free_port, shared, valkey

LEASE = 2.0


class Workers:
    """A `midstream serve --workers 2` and ways to its processes."""

    def __init__(self, gateways: Fleet, replica: Replica) -> None:
        self.gateways, self.replica = gateways, replica
        self.port = int(replica.url.rpartition(":")[2])

    @property
    def pids(self) -> set[int]:
        return children(self.replica.pid)

    def alive(self, *pids: int) -> bool:
        """Whether any of these is still there."""
        return any(Path(f"/proc/{pid}/fd/0").is_symlink() for pid in pids)

    def listens(self, pid: int) -> bool:
        return holder({pid}, self.port, 0) is not None

    async def ask(self, pid: int, method: str, path: str, *headers: str, body: Any = None) -> tuple[int, bytes]:
        """What this process answers: the status, and the whole body."""
        async with wire_to(pid, self.pids, self.port) as wire:
            return await self._asked(wire, method, path, *headers, body=body)

    async def _asked(self, wire: Wire, method: str, path: str, *headers: str, body: Any) -> tuple[int, bytes]:
        content = b"" if body is None else json.dumps(body).encode()
        framing = [f"Content-Length: {len(content)}", "Content-Type: application/json"] if content else []
        wire.request(method, path, "Connection: close", *framing, *headers, body=content)
        status, told = await wire.head()
        if ("transfer-encoding", "chunked") in told:
            return status, await wire.body()
        return status, await wire.rest()

    async def create(self, pid: int, model: str) -> str:
        """Begin a stream on this process, and leave when its head is there."""
        async with wire_to(pid, self.pids, self.port) as wire:
            body = json.dumps({"prompt": "Hello", "model": model}).encode()
            framing = (f"Content-Length: {len(body)}", "Content-Type: application/json")
            wire.request("POST", "/v1/stream", *framing, body=body)
            status, headers = await wire.head()
            assert status == 200
            return dict(headers)["midstream-stream-id"]

    async def reader(self, pid: int, stream_id: str, after: int = 0) -> asyncio.Task[Visit]:
        """A reader at this process, whose answer has begun; what it is given to the end."""
        stack, visit = AsyncExitStack(), Visit(stream_id, after)
        wire = await stack.enter_async_context(wire_to(pid, self.pids, self.port))
        wire.request("GET", f"/v1/stream/{stream_id}?cursor={Cursor(stream_id, after).encode()}", "Connection: close")
        visit.status, _ = await wire.head()

        async def read() -> Visit:
            async with stack:
                visit.take(await wire.body())
            return visit

        return asyncio.create_task(read())

    async def read(self, pid: int, stream_id: str, after: int = 0) -> Visit:
        return await (await self.reader(pid, stream_id, after))


@asynccontextmanager
async def workers(*options: str, journal: str = "") -> AsyncIterator[Workers]:
    """Two processes on one port, on a part of the store that is theirs alone."""
    journal = journal or shared().url(f"t{uuid4().hex}", lease=LEASE)
    async with fleet(journal, "--upstream", "scripted:", "--workers", "2", *options) as gateways:
        (replica,) = await gateways.gateways(1)
        yield Workers(gateways, replica)


async def test_stream_of_one_worker_is_resumed_on_the_other() -> None:
    """One port, two gateways: whoever is asked serves every stream; gRPC is on one port, too."""
    grpc_port = free_port()
    async with workers("--grpc-port", str(grpc_port)) as running:
        one, two = running.pids
        stream_id = await running.create(one, "scripted-n40-r100")
        here, there = await asyncio.gather(running.read(one, stream_id), running.read(two, stream_id))
        assert here.frames == there.frames
        assert (len(here.frames), event_of(here.frames[-1])) == (42, "done")
        assert (await running.read(two, stream_id, 30)).frames == here.frames[30:]
        for pid in (one, two):  # each of them listens for gRPC
            async with wire_to(pid, running.pids, grpc_port):
                pass
        async with running.gateways.session.get(f"{running.replica.url}/metrics") as response:
            page = await response.text()
        opened = {
            sample.labels["worker"]: sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == "midstream_streams_opened_total"
        }
        assert sorted(opened) == ["1", "2"], "a scrape sees every process, whichever it gets to"
        assert sum(opened.values()) == 1
        async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            told = await soon(stub.Check(health_pb2.HealthCheckRequest()))
        assert told.status == health_pb2.HealthCheckResponse.SERVING


async def test_killed_worker_is_replaced_and_its_streams_are_ended_by_the_other() -> None:
    """SIGKILL of one: the other goes on, ends what it wrote as any gateway would, and soon there are two again."""
    async with workers() as running:
        one, two = running.pids
        lost = await running.create(one, "scripted-n3000-r50")
        kept = await running.create(two, "scripted-n100-r50")
        await running.replica.settled(LEASE)
        readers = [await running.reader(two, stream_id) for stream_id in (lost, kept)]
        await running.gateways.read(running.replica, lost, upto=5)
        listening = listeners(running.port)
        os.kill(one, signal.SIGKILL)
        # A process is gone before its sockets are: until then the kernel gives them connections, and resets these.
        await until(lambda: not listening <= listeners(running.port), "its socket to be gone")
        assert not running.alive(one)
        async with running.gateways.session.get(f"{running.replica.url}/readyz") as response:
            assert response.status == 200  # nothing that comes now is given to the dead one
        ended, whole = await asyncio.gather(*readers)
        assert json.loads(ended.frames[-1].split(b"\ndata: ")[1])["error"]["code"] == "writer_lost"
        assert (len(whole.frames), event_of(whole.frames[-1])) == (102, "done")
        await until(lambda: len(running.pids) == 2, "another process")
        (new,) = running.pids - {two}
        await until(lambda: running.listens(new), "the other process to serve")
        assert (await running.read(new, kept)).frames == whole.frames
        await until(lambda: b"ended with -9" in running.replica.log, "what became of it to be said")


async def test_sigterm_drains_every_worker() -> None:
    """Readers are let go at once on both, generations run on to their end, and then there is no process left."""
    async with workers() as running:
        one, two = running.pids
        ids = [await running.create(pid, "scripted-n160-r40") for pid in (one, two)]
        readers = [await running.reader(pid, stream_id) for pid, stream_id in zip((two, one), ids, strict=True)]
        for stream_id in ids:
            await running.gateways.read(running.replica, stream_id, upto=5)
        running.replica.terminate()
        first = await soon(asyncio.gather(*readers))
        assert running.replica.alive, "the generations were not waited for"
        assert not any(visit.ended for visit in first)
        assert await running.replica.ended() == 0
        assert not running.alive(one, two)
        (after,) = await running.gateways.gateways(1)
        for visit in first:
            rest = await running.gateways.read(after, visit.stream_id, visit.seq)
            assert (rest.seq, event_of(rest.frames[-1])) == (162, "done")


async def test_second_signal_ends_every_worker_at_once() -> None:
    """However long what is open would still take."""
    async with workers() as running:
        one, two = running.pids
        stream_id = await running.create(one, "scripted-n3000-r50")
        reader = await running.reader(two, stream_id)
        await running.gateways.read(running.replica, stream_id, upto=5)
        running.replica.terminate()
        await soon(reader)  # the first one has arrived
        running.replica.terminate()
        await soon(running.replica.ended())
        assert not running.alive(one, two)


async def test_worker_that_is_told_to_go_is_replaced_too() -> None:
    """SIGTERM to one of them drains that one; this is no end of the others."""
    async with workers() as running:
        one, two = running.pids
        os.kill(one, signal.SIGTERM)
        await until(lambda: len(running.pids) == 2 and one not in running.pids, "another process")
        assert two in running.pids
        await until(lambda: b"ended with 0" in running.replica.log, "what became of it to be said")


async def test_workers_leave_when_nobody_looks_after_them() -> None:
    """SIGKILL of the parent: no process is left behind that nobody could stop in order."""
    async with workers() as running:
        one, two = running.pids
        running.replica.kill()
        await until(lambda: not running.alive(one, two), "the processes to leave")


async def test_sighup_reaches_every_worker(tmp_path: Path) -> None:
    """A new key is good everywhere, and an old one nowhere."""
    keys = tmp_path / "keys"
    keys.write_text("ada:before-it\n")
    async with workers("--keys-file", str(keys)) as running:
        keys.write_text("ada:after-it\n")
        os.kill(running.replica.pid, signal.SIGHUP)
        await until(lambda: running.replica.log.count(b"keys re-read") == 2, "both to read the keys")
        for pid in running.pids:
            for key, status in (("before-it", 401), ("after-it", 200)):
                told, _ = await running.ask(pid, "GET", "/v1/streams", f"Authorization: Bearer {key}")
                assert told == status


async def test_start_that_cannot_be_is_told_and_leaves_nothing() -> None:
    """A store that will not let us in: the reason, the usual code, and no process."""
    with valkey() as server:
        server.ask("CONFIG", "SET", "requirepass", "s3cret")
        command = [sys.executable, "-m", "midstream", "serve", "--port", "0", "--grpc-port", "0", "--workers", "2"]
        command += ["--upstream", "scripted:", "--journal", server.url()]
        ended = await asyncio.to_thread(
            subprocess.run, command, stderr=subprocess.PIPE, timeout=30, text=True, check=False
        )
        assert ended.returncode == 1
        assert "midstream: the store will not let us in" in ended.stderr
        assert "midstream serves" not in ended.stderr


async def test_port_that_others_share_is_in_use() -> None:
    """Two of them on one port would each get some of the calls, and neither would say so."""
    async with workers() as running:
        command = [sys.executable, "-m", "midstream", "serve", "--port", str(running.port), "--grpc-port", "0"]
        command += ["--workers", "2", "--upstream", "scripted:", "--journal", shared().url("other")]
        ended = await asyncio.to_thread(
            subprocess.run, command, stderr=subprocess.PIPE, timeout=30, text=True, check=False
        )
        assert ended.returncode == 1
        assert f"127.0.0.1:{running.port} is in use" in ended.stderr


def test_pauses_between_tries_are_bounded() -> None:
    """At once after a long life; ever longer, and never for ever, where they die as soon as they live."""
    assert [pause_after(count) for count in range(8)] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert pause_after(10_000) == 10.0
