"""Calls over gRPC, and what can happen to them."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc import ChannelConnectivity, aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from midstream.errors import StoreUnavailable
from midstream.records import Page
from midstream.testing.grpc_dial import serving
from midstream.testing.patience import soon, until
from midstream.testing.transport_dial import ADA, BOB, KEYS
from midstream.transports.grpc import _OPTIONS
from midstream.wire import GRPC_SERVICE, SEND_STALL
from tests.calls import Client, Said, Site, site

# --- keys ------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def keyed(directory: Path) -> AsyncIterator[Site]:
    (directory / "keys").write_text(KEYS)
    async with site(keys_file=str(directory / "keys")) as here:
        yield here


@pytest.mark.parametrize(
    "metadata",
    [
        [("authorization", f"Bearer {ADA}")],
        [("authorization", f"bearer {ADA}")],
        [("apikey", ADA)],
        [("apikey", ADA), ("authorization", f"Bearer {ADA}")],
    ],
)
async def test_a_key_travels_as_metadata(tmp_path: Path, metadata: list[tuple[str, str]]) -> None:
    """Under either name, or both when they are the same."""
    async with keyed(tmp_path) as here:
        call = here.client.keyed(*metadata).generate(prompt="Hello")
        stream_id = await call.stream_id()
        assert (await here.gateway.streams.journal.state(stream_id)).meta.owner == "ada"


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("authorization", "Bearer wrong-key")],
        [("authorization", f"Basic {ADA}")],
        [("apikey", "")],
        [("apikey", ADA), ("authorization", f"Bearer {BOB}")],
        [("apikey", ADA), ("apikey", ADA)],
    ],
)
async def test_what_is_no_known_key_is_unauthenticated_on_every_verb(
    tmp_path: Path, metadata: list[tuple[str, str]]
) -> None:
    """Before anything is looked up, and for a request that is none as well as for a good one."""
    async with keyed(tmp_path) as here:
        stranger = here.client.keyed(*metadata)
        for said in (
            await stranger.said(prompt="Hello", session_id="demo"),
            await stranger.said(session_id="demo", resume_from_token=-3),
            await stranger.send(b"\xff").rest(),
            await stranger.ack("demo", 0),
            await stranger.cancel("demo"),
        ):
            assert (said.messages, said.status, said.reason) == ([], "UNAUTHENTICATED", "UNAUTHORIZED")
        assert here.puppets.begun == 0


async def test_sessions_are_each_owners_own(tmp_path: Path) -> None:
    """One name of two owners is two streams, and a stranger's is unknown, by name and by id."""
    async with keyed(tmp_path) as here:
        ada, bob = (here.client.keyed(("apikey", key)) for key in (ADA, BOB))
        one = await ada.generate(prompt="Hello", session_id="demo").stream_id()
        await here.puppets.next()
        for said in (
            await bob.said(session_id="demo"),
            await bob.said(session_id=one),
            await bob.said(session_id=one, resume_from_token=7),
            await bob.ack(one, 0),
            await bob.cancel(one),
        ):
            assert (said.status, said.reason) == ("NOT_FOUND", "UNKNOWN_STREAM")
        other = await bob.generate(prompt="Hello", session_id="demo").stream_id()
        assert one != other
        assert (await ada.generate(session_id="demo").stream_id(), here.puppets.begun) == (one, 2)


async def test_a_key_that_goes_is_refused_from_then_on(tmp_path: Path) -> None:
    """The keys are asked anew for each call, so that a re-read file counts at once."""
    async with keyed(tmp_path) as here:
        ada = here.client.keyed(("apikey", ADA))
        await ada.generate(prompt="Hello", session_id="demo").stream_id()
        (tmp_path / "keys").write_text(f"bob:{BOB}\n")
        here.gateway.gateway.reload_keys()
        assert (await ada.said(session_id="demo")).status == "UNAUTHENTICATED"


# --- who leaves ------------------------------------------------------------------------------------------------------


async def test_a_deadline_ends_the_call_and_not_the_generation() -> None:
    """Whose time is over has only stopped reading, and goes on in another call."""
    async with site() as here:
        call = here.client.generate(prompt="Hello", session_id="demo", timeout=0.2)
        puppet = await here.puppets.next()
        await puppet.say("a")
        said = await call.rest()
        assert said.status == "DEADLINE_EXCEEDED"
        await until(lambda: not here.gateway.streams.readers, "the reader to go")
        assert not puppet.stopped.is_set()
        await puppet.say("b")
        await puppet.finish()
        rest = await here.client.said(session_id="demo", resume_from_token=len(said.messages))
        assert said.text + rest.text == "ab"


async def test_cancelled_calls_leave_nothing_behind() -> None:
    """Twenty calls that are cancelled in the middle of a stream: their handlers are gone, and the next call works."""
    async with site() as here:
        first, puppet, stream_id = await here.begin("demo")
        await puppet.say("a", "b", "c")
        await first.take(3)
        before = len(asyncio.all_tasks())
        calls = [here.client.generate(session_id="demo") for _ in range(20)]
        for call in calls:
            await call.take(3)
        await here.gateway.idle(stream_id, readers=21)
        for call in calls:
            call.cancel()
        async with asyncio.timeout(1.0):
            await here.gateway.idle(stream_id, readers=1)
        await until(lambda: len(asyncio.all_tasks()) <= before + 1, "the handlers to be gone")
        assert (await here.client.generate(session_id="demo").take(3))[0] == ("a", 0, False)
        await puppet.finish()
        assert (await first.rest()).status == "OK"


_FOLLOW = """
import sys, grpc
from midstream.codec.pb import inference_pb2 as pb
channel = grpc.insecure_channel(sys.argv[1])
generate = channel.unary_stream(
    "/inference.InferenceService/Generate",
    request_serializer=pb.GenerateRequest.SerializeToString, response_deserializer=pb.GenerateResponse.FromString)
for told in generate(pb.GenerateRequest(session_id=sys.argv[2])):
    print(told.token, flush=True)
"""


async def test_a_killed_client_is_noticed_and_its_stream_goes_on() -> None:
    """kill -9 in the middle: the kernel tells, the handler goes, and what is said later is there for a resume."""
    async with site() as here:
        call, puppet, stream_id = await here.begin("demo")
        await puppet.say("a", "b", "c")
        call.cancel()
        await here.gateway.unread(stream_id)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _FOLLOW, here.address, "demo", stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        assert [await soon(process.stdout.readline()) for _ in range(3)] == [b"a\n", b"b\n", b"c\n"]
        await here.gateway.idle(stream_id)
        process.send_signal(signal.SIGKILL)
        await soon(process.wait())
        await here.gateway.unread(stream_id)
        await puppet.say("d")
        await puppet.finish()
        assert (await here.client.said(session_id="demo", resume_from_token=3)).text == "d"


async def test_cancel_before_the_stream_is_made_leaves_a_generation_with_a_writer() -> None:
    """A call that is given up while its stream is being made does not leave one that nobody ends."""
    async with site() as here:
        call = here.client.generate(prompt="Hello", session_id="demo")
        await asyncio.sleep(0)
        call.cancel()
        resumed = here.client.generate(prompt="Hello", session_id="demo")
        puppet = await here.puppets.next()
        await puppet.say("a")
        await puppet.finish()
        assert (await resumed.rest()).text == "a"
        assert here.puppets.begun == 1


# --- who dawdles -----------------------------------------------------------------------------------------------------


async def test_a_slow_reader_costs_no_memory_and_gets_everything() -> None:
    """It is handed what its window holds, message by message; the rest waits in the journal, where it is anyway."""
    async with site() as here:
        call, puppet, stream_id = await here.begin("demo")
        for _ in range(10):
            await puppet.say(*["x" * 200] * 500)
        await puppet.finish()
        taken = await call.take(1)
        [follow] = here.gateway.readers(stream_id)
        for _ in range(3):
            handed = follow.position
            await here.gateway.pulse(SEND_STALL / 2)
            # Its window, and the page from which it is being filled.
            assert handed <= follow.position < len(taken) + 1500
            taken += await call.take(300)
        taken += (await call.rest()).messages
        assert [index for _, index, _ in taken] == list(range(5001))


async def test_a_reader_that_takes_a_little_is_not_cut_off() -> None:
    """A page may last it for longer than the limit for one that takes nothing at all: each message taken counts."""
    async with site() as here:
        call, puppet, stream_id = await here.begin("demo")
        for _ in range(4):
            await puppet.say(*["x" * 3000] * 128)
        await puppet.finish()
        await call.take(1)
        [follow] = here.gateway.readers(stream_id)
        for _ in range(4):
            while follow.still < SEND_STALL * 0.9:
                await here.gateway.streams.pulse(1.0)
                await asyncio.sleep(0)  # what is under way may go on
            await call.take(60)
            await until(lambda: not follow.still, "progress")
        assert len((await call.rest()).messages) == 4 * 128 + 1 - 241


async def test_a_reader_that_takes_nothing_is_told_where_it_can_go_on() -> None:
    """UNAVAILABLE, behind the messages it had not taken; a client of gRPC takes that for a reason to come again."""
    async with site() as here:
        call, puppet, stream_id = await here.begin("demo")
        for _ in range(40):
            await puppet.say("x" * 100_000)
        await puppet.finish()
        [follow] = here.gateway.readers(stream_id)
        await until(lambda: not follow.waiting)
        await here.gateway.streams.pulse(0.0)
        await here.gateway.streams.pulse(SEND_STALL)
        await here.gateway.unread(stream_id)
        said = await call.rest()
        assert said.status == "UNAVAILABLE"
        rest = await here.client.said(session_id="demo", resume_from_token=len(said.messages))
        assert said.text + rest.text == "x" * 4_000_000


# --- connections -----------------------------------------------------------------------------------------------------


class Pinging:
    """A client that asks as often as grpcio lets it, once a second, whether we are there; its questions are counted."""

    OPTIONS = (
        ("grpc.keepalive_time_ms", 100),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
    PING = b"\0\0\x08\x06\0\0\0\0\0"  # RFC 9113, section 6.7

    def __init__(self, here: Site) -> None:
        self._here = here
        self.pings = 0
        self.enough = asyncio.Event()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, aio.insecure_channel(f"127.0.0.1:{port}", self.OPTIONS) as channel:
            yield Client(channel)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._here.address.partition(":")
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(self._pump(reader, there_writer, self.PING), self._pump(there_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: bytes = b"") -> None:
        while data := await reader.read(65536):
            self.pings += data.count(count) if count else 0
            if self.pings == 5:
                self.enough.set()
            writer.write(data)
        writer.close()


async def _pinged(here: Site) -> tuple[list[tuple[str, int, bool]], Said]:
    """What comes of an idle stream whose reader pings: what it heard first, and how it went on."""
    _, puppet, _ = await here.begin("demo")
    await puppet.say("a")
    pinging = Pinging(here)
    async with pinging.client() as client:
        call = client.generate(session_id="demo")
        first = await call.take(1)
        rest = asyncio.create_task(call.rest())
        await soon(asyncio.wait({rest, asyncio.create_task(pinging.enough.wait())}, return_when="FIRST_COMPLETED"))
        await puppet.say("b")
        await puppet.finish()
        return first, await rest


async def test_an_idle_stream_survives_pings_and_a_flood_of_them_is_sent_away() -> None:
    """A client may ask once in two intervals; five times in one is `too_many_pings`, which its reader survives."""
    allowed = [("grpc.http2.min_ping_interval_without_data_ms", 500)]
    async with site(options=allowed) as patient, site() as usual:
        (heard, rest), (flooding, cut) = await asyncio.gather(_pinged(patient), _pinged(usual))
        assert heard == flooding == [("a", 0, False)]
        assert rest == Said([("b", 1, False), ("", 2, True)], "OK")
        assert cut == Said([], "UNAVAILABLE", "", {})
        assert (await usual.client.said(session_id="demo", resume_from_token=1)).text == "b"


def test_what_clients_of_grpc_send_by_default_is_no_flood() -> None:
    """A ping each ten seconds is allowed twice over; a reader that vanished is noticed within the limit of a stall."""
    assert _OPTIONS["grpc.http2.min_ping_interval_without_data_ms"] * 2 <= 10_000
    assert _OPTIONS["grpc.keepalive_permit_without_calls"] == 1
    assert 0 < _OPTIONS["grpc.http2.max_ping_strikes"] <= 2
    assert _OPTIONS["grpc.keepalive_time_ms"] + _OPTIONS["grpc.keepalive_timeout_ms"] <= SEND_STALL * 1000


async def test_an_ageing_connection_is_replaced_in_the_middle_and_nothing_is_lost() -> None:
    """A GOAWAY after `max_connection_age`, and UNAVAILABLE when its grace is over: neither is the end of the stream."""
    ageing = [("grpc.max_connection_age_ms", 50), ("grpc.max_connection_age_grace_ms", 50)]
    async with site(options=ageing) as here:
        call, puppet, _ = await here.begin("demo")
        heard: list[int] = []
        breaks = 0
        while breaks < 3:
            await puppet.say("x")
            said = await _until_broken(call, puppet, heard)
            breaks += 1
            assert said.status == "UNAVAILABLE"
            call = here.client.generate(session_id="demo", resume_from_token=len(heard))
        finishing = asyncio.create_task(puppet.finish())
        while (said := await call.rest()).status == "UNAVAILABLE":
            heard += [index for _, index, _ in said.messages]
            call = here.client.generate(session_id="demo", resume_from_token=len(heard))
        await finishing
        heard += [index for _, index, _ in said.messages]
        assert said.status == "OK"
        assert heard == list(range(len(heard)))


async def _until_broken(call: Any, puppet: Any, heard: list[int]) -> Said:
    """Speak and listen until the connection ends."""
    reading = asyncio.create_task(call.rest())
    while not reading.done():
        await puppet.say("x")
        await asyncio.wait([reading], timeout=0.005)
    said: Said = reading.result()
    heard += [index for _, index, _ in said.messages]
    return said


# --- the gateway's side ----------------------------------------------------------------------------------------------


async def test_a_drain_says_unavailable_to_new_calls_and_lets_open_ones_end() -> None:
    """What runs goes on to its end; what comes is sent elsewhere."""
    async with site() as here:
        server = here.gateway.gateway.grpc_server()
        port = server.bind("127.0.0.1", 0)
        await server.start()
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            client = Client(channel)
            call = client.generate(prompt="Hello", session_id="demo")
            puppet = await here.puppets.next()
            await call.stream_id()
            await server.drain()
            # A call that crosses with the news on the wire is CANCELLED by gRPC itself, without a reason of ours.
            await until(lambda: channel.get_state() is not ChannelConnectivity.READY, "the client to hear of it")
            assert (await client.said(session_id="demo")).status == "UNAVAILABLE"
            await puppet.say("a")
            await puppet.finish()
            assert await call.rest() == Said([("a", 0, False), ("", 1, True)], "OK")
            await soon(server.stop(1.0))


async def test_readers_of_a_gateway_that_stops_are_told_to_resume() -> None:
    """UNAVAILABLE with a code of ours, and no final message."""
    async with site() as here:
        call, puppet, stream_id = await here.begin("demo")
        await puppet.say("a")
        assert await call.take(1) == [("a", 0, False)]
        await here.gateway.idle(stream_id)
        await soon(here.gateway.gateway.stop())
        said = await call.rest()
        assert (said.messages, said.status, said.reason) == ([], "UNAVAILABLE", "SHUTTING_DOWN")


async def test_a_draining_gateway_begins_nothing() -> None:
    """UNAVAILABLE, with when to come back."""
    async with site(drain=0.01) as here:
        call, _, _ = await here.begin("demo")
        await soon(here.gateway.gateway.drain())
        facts = {"token_index": "0", "reason": "shutdown"}
        assert await call.rest() == Said([], "CANCELLED", "CANCELLED", facts)
        said = await here.client.said(prompt="Hello", session_id="late")
        assert (said.status, said.reason) == ("UNAVAILABLE", "SHUTTING_DOWN")


async def test_a_store_that_is_away_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a stream as at its beginning; the position stays good."""
    async with site() as here:
        await here.told("a", "b", session_id="demo")
        journal = here.gateway.streams.journal

        async def away(stream_id: str, after: int, *_: int) -> Page:
            raise StoreUnavailable("the store does not answer", 3)

        with monkeypatch.context() as patch:
            patch.setattr(journal, "read", away)
            said = await here.client.said(session_id="demo", resume_from_token=1)
            assert (said.messages, said.status, said.reason) == ([], "UNAVAILABLE", "STORE_UNAVAILABLE")
        assert (await here.client.said(session_id="demo", resume_from_token=1)).text == "b"


async def test_a_fault_of_ours_is_internal_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller gets a status and the log the cause; nothing of it leaks."""
    async with site() as here:

        async def broken(name: str) -> str:
            raise RuntimeError("secret")

        with monkeypatch.context() as patch:
            patch.setattr(here.gateway.streams, "find", broken)
            said = await here.client.said(prompt="Hello", session_id="demo")
        assert (said.status, said.reason) == ("INTERNAL", "INTERNAL_ERROR")
        assert "secret" in caplog.text
        assert await here.told("a") != ""


async def test_a_stream_that_goes_under_its_reader_is_out_of_range() -> None:
    """Deleted or expired: told, not ended as if it were complete."""
    async with site() as here:
        call, puppet, stream_id = await here.begin("demo")
        await puppet.say("a")
        assert await call.take(1) == [("a", 0, False)]
        await here.gateway.idle(stream_id)
        await here.gateway.streams.journal.expire(stream_id)
        said = await call.rest()
        assert (said.messages, said.status, said.reason, said.facts) == ([], "OUT_OF_RANGE", "CURSOR_EXPIRED", {})


async def test_a_taken_port_is_an_error_at_the_start() -> None:
    """Two servers on one port would each get some of the calls."""
    async with site() as here:
        server = here.gateway.gateway.grpc_server()
        with pytest.raises(OSError, match="cannot listen for gRPC"):
            server.bind("127.0.0.1", int(here.address.rpartition(":")[2]))


async def test_health_follows_the_gateway() -> None:
    """Serving, not serving before it is ready and once it drains; without a key, as any probe is."""
    async with site() as here, aio.insecure_channel(here.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def check(service: str) -> int:
            answer = await soon(stub.Check(health_pb2.HealthCheckRequest(service=service)))
            return int(answer.status)

        statuses = health_pb2.HealthCheckResponse
        for service in ("", GRPC_SERVICE):
            assert await check(service) == statuses.SERVING
        with pytest.raises(aio.AioRpcError, match="NOT_FOUND"):
            await check("another.Service")
        here.gateway.gateway.ready = False
        for service in ("", GRPC_SERVICE):
            assert await check(service) == statuses.NOT_SERVING
        here.gateway.gateway.ready = True
        watching = stub.Watch(health_pb2.HealthCheckRequest(service=GRPC_SERVICE))
        assert (await soon(watching.read())).status == statuses.NOT_SERVING
        await check(GRPC_SERVICE)
        assert (await soon(watching.read())).status == statuses.SERVING
        watching.cancel()


async def test_refusals_are_counted_by_code() -> None:
    """In the same metric as those over HTTP."""
    async with site() as here:
        await here.client.said(session_id="never-was", resume_from_token=1)
        await here.client.cancel("never-was")
        assert here.gateway.gateway.observer.refused == {"unknown_stream": 2}


async def test_two_servers_may_share_a_gateway() -> None:
    """A stream of one is read through the other."""
    async with site() as here, serving(here.gateway) as other, aio.insecure_channel(other) as channel:
        await here.told("a", session_id="demo")
        assert (await Client(channel).said(session_id="demo")).text == "a"
