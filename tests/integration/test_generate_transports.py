"""`midstream generate` over a WebSocket and over gRPC: the same answer, the same mending, the same words."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from midstream.cli import exits
from midstream.client import Client, Cursor, Patience
from midstream.client.sync import Transport
from midstream.errors import CursorAhead, CursorExpired, Unauthorized, UnknownModel, UnknownStream
from midstream.server.settings import Settings
from midstream.testing.gateway import RunningGateway
from midstream.testing.grpc_dial import serving
from midstream.testing.patience import soon, until
from midstream.testing.puppet import Puppet
from midstream.testing.transport_dial import ADA, BOB, KEYS
from tests.integration.test_generate import Wire, again, finish, only_stream, printed, say, start, told_command

HASTE = Patience(base=0.001, cap=0.01)
TRANSPORTS: list[Transport] = ["ws", "grpc"]


@dataclass(frozen=True, slots=True)
class Place:
    """A gateway behind a wire that can be cut, and the flags that lead there."""

    gateway: RunningGateway
    wire: Wire
    transport: Transport

    @property
    def flags(self) -> tuple[str, ...]:
        if self.transport == "grpc":
            gateway = ("--gateway", self.gateway.address)
            return (*gateway, "--transport", "grpc", "--grpc", urlsplit(self.wire.url).netloc)
        return ("--gateway", self.wire.url, "--transport", self.transport)

    def client(self, key: str | None = None) -> Client:
        grpc = urlsplit(self.wire.url).netloc if self.transport == "grpc" else None
        return Client(self.wire.url, key=key, patience=HASTE, transport=self.transport, grpc=grpc, timeout=5)


@asynccontextmanager
async def place_of(transport: Transport, settings: Settings | None = None) -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(RunningGateway(settings))
        port = gateway.port
        if transport == "grpc":
            port = int((await stack.enter_async_context(serving(gateway))).rpartition(":")[2])
        yield Place(gateway, await stack.enter_async_context(Wire(port)), transport)


@pytest.fixture(params=TRANSPORTS)
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    async with place_of(request.param) as place:
        yield place


def facts(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("session=")]


# --- the terminal ----------------------------------------------------------------------------------------------------


async def test_an_answer_is_printed_and_where_it_stands_is_told(place: Place) -> None:
    run = await start("generate", "hi", *place.flags)
    puppet = await place.gateway.puppets.next()
    text = await say(puppet, 42)
    await puppet.finish()
    code, out, err = await finish(run)
    assert (code, out) == (exits.OK, text)
    stream_id = (await only_stream(place.gateway))["stream_id"]
    assert facts(err) == [f'session="{stream_id}" last_token_index=41 (resume with --resume-from 42)']


async def test_a_wire_cut_again_and_again_is_mended_at_the_exact_token(place: Place) -> None:
    """Each drop says where the reader stands; one generation in all."""
    run = await start("generate", "hi", *place.flags)
    puppet = await place.gateway.puppets.next()
    text = await printed(run, await say(puppet, 3))
    for at in range(3, 15, 4):
        place.wire.cut()
        text += await printed(run, await say(puppet, 4, at))
    await puppet.finish()
    code, out, err = await finish(run)
    stream_id = (await only_stream(place.gateway))["stream_id"]
    assert (code, out) == (exits.OK, "")
    told = [
        f'session="{stream_id}" last_token_index={at} (resume with --resume-from {at + 1})' for at in (2, 6, 10, 14)
    ]
    assert facts(err) == told
    assert place.gateway.puppets.begun == 1


async def test_a_wire_cut_before_the_first_token_pays_for_one_generation(place: Place) -> None:
    run = await start("generate", "hi", *place.flags)
    puppet = await place.gateway.puppets.next()
    await until(lambda: place.gateway.streams.readers)
    place.wire.cut()
    text = await say(puppet, 3)
    await puppet.finish()
    assert (await finish(run))[:2] == (exits.OK, text)
    assert place.gateway.puppets.begun == 1


async def test_ctrl_c_is_told_with_the_command_that_prints_the_rest(place: Place) -> None:
    """Over the same transport; the generation goes on meanwhile."""
    run = await start("generate", "hi", *place.flags)
    puppet = await place.gateway.puppets.next()
    first = await printed(run, await say(puppet, 5))
    run.send_signal(signal.SIGINT)
    code, _, err = await finish(run)
    assert code == exits.INTERRUPTED
    rest = await say(puppet, 3, 5)
    await puppet.finish()
    assert f"--transport {place.transport}" in told_command(err)
    assert await again(told_command(err)) == (exits.OK, rest)
    assert first


async def test_what_was_printed_is_acked(place: Place) -> None:
    """Every so many records, and at the end: only the terminal record is kept."""
    run = await start("generate", "hi", "--ack-every", "4", *place.flags)
    puppet = await place.gateway.puppets.next()
    await printed(run, await say(puppet, 9))
    stream_id = (await only_stream(place.gateway))["stream_id"]
    journal = place.gateway.streams.journal
    async with asyncio.timeout(10):
        while (await journal.state(stream_id)).acked_seq != 8:  # noqa: ASYNC110  # it has no event
            await asyncio.sleep(0.01)
    await puppet.finish()
    assert (await finish(run))[0] == exits.OK
    state = await journal.state(stream_id)
    assert (state.acked_seq, state.retained_records) == (11, 1)


async def test_ends_that_are_not_well_have_their_codes(place: Place) -> None:
    for end, code in (("fail", exits.GENERATION_FAILED), ("cancel", exits.CANCELLED)):
        run = await start("generate", "hi", *place.flags)
        puppet = await place.gateway.puppets.next()
        text = await say(puppet, 2)
        if end == "fail":
            await puppet.fail("upstream_timeout", "too slow")
        else:
            [stream_id] = place.gateway.streams.writers
            await place.gateway.streams.cancel(stream_id, "open")
        got, out, err = await finish(run)
        assert (got, out) == (code, text)
        assert "upstream_timeout: too slow (asking again may succeed)" in err if end == "fail" else "cancelled" in err


# --- sessions --------------------------------------------------------------------------------------------------------


@pytest.fixture
async def grpc() -> AsyncIterator[Place]:
    async with place_of("grpc") as place:
        yield place


async def told(grpc: Place, *words: str) -> tuple[int, str, str]:
    return await finish(await start("generate", *words, *grpc.flags))


async def test_a_session_is_the_answers_name(grpc: Place) -> None:
    """Asked under a name, printed again under it, and resumed from any token, whatever the prompt is then."""
    run = await start("generate", "hi", "--session", "demo", *grpc.flags)
    puppet = await grpc.gateway.puppets.next()
    texts = [f" {n}é" for n in range(42)]
    await puppet.say(*texts)
    await puppet.finish()
    code, out, err = await finish(run)
    assert (code, out) == (exits.OK, "".join(texts))
    where = 'session="demo" last_token_index=41 (resume with --resume-from 42)'
    assert facts(err) == [where]
    for words in (("--session", "demo"), ("hi", "--session", "demo"), ("--session", "demo", "--resume-from", "0")):
        code, out, err = await told(grpc, *words)
        assert (code, out, facts(err)) == (exits.OK, "".join(texts), [where])
    for token, prompt in ((1, ()), (41, ()), (42, ()), (40, ("another",))):
        code, out, err = await told(grpc, *prompt, "--session", "demo", "--resume-from", str(token))
        assert (code, out, facts(err)) == (exits.OK, "".join(texts[token:]), [where])
    assert grpc.gateway.puppets.begun == 1


async def test_a_session_that_cannot_be_gone_on_with_is_named(grpc: Place) -> None:
    """Never a fresh start (I4)."""
    run = await start("generate", "hi", "--session", "demo", *grpc.flags)
    puppet = await grpc.gateway.puppets.next()
    await puppet.say("x")
    await puppet.finish()
    await finish(run)
    assert (await told(grpc, "--session", "never"))[0] == exits.REFUSED
    assert (await told(grpc, "--session", "never", "--resume-from", "3"))[0] == exits.REFUSED
    assert (await told(grpc, "another", "--session", "demo"))[0] == exits.REFUSED
    assert (await told(grpc, "--session", "demo", "--resume-from", "3"))[0] == exits.POSITION_GONE
    assert grpc.gateway.puppets.begun == 1


@pytest.mark.parametrize("transport", ["sse", "ws", "grpc"])
async def test_a_streams_id_stands_for_a_session(transport: Transport) -> None:
    """Over every transport: what one began, any other goes on with."""
    async with place_of(transport) as place:
        run = await start("generate", "hi", "--gateway", place.gateway.address)
        puppet = await place.gateway.puppets.next()
        await puppet.say("a", "b", "c")
        await puppet.finish()
        await finish(run)
        stream_id = (await only_stream(place.gateway))["stream_id"]
        words = ("--session", stream_id, "--resume-from", "1")
        code, out, err = await finish(await start("generate", *words, *place.flags))
        assert (code, out) == (exits.OK, "bc")
        assert facts(err) == [f'session="{stream_id}" last_token_index=2 (resume with --resume-from 3)']


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--resume-from", "3"), "--session"),
        (("hi", "--session", "demo", "--transport", "ws"), "--transport grpc"),
        (("--session", "demo", "--transport", "sse", "--resume-from", "3"), "--transport grpc"),
        (("hi", "--session", "0" * 32), "--transport grpc"),
        (("--session", "demo", "--resume", Cursor("s", 1).encode()), "give one"),
        (("hi", "--transport", "grpc", "--seed", "7"), "PROMPT"),
        (("hi", "--transport", "grpc", "--system", "Be brief."), "PROMPT"),
        (("hi", "--session", "demo", "--resume-from", "-1"), "number"),
        (("hi", "--transport", "smoke-signals"), "choice"),
    ],
)
async def test_what_makes_no_sense_is_a_usage_error(words: tuple[str, ...], hint: str) -> None:
    code, _, err = await finish(await start("generate", *words))
    assert code == exits.USAGE
    assert hint in err


# --- the client ------------------------------------------------------------------------------------------------------


async def ended(gateway: RunningGateway, client: Client, *texts: str) -> str:
    """The id of a stream that has said this."""
    stream = await soon(asyncio.to_thread(client.generate, "hi"))
    puppet: Puppet = await gateway.puppets.next()
    await puppet.say(*texts)
    await puppet.finish()
    stream.close()
    return stream.stream_id


async def test_from_every_position_a_client_gets_what_follows(place: Place) -> None:
    """I3."""
    client = place.client()
    stream_id = await ended(place.gateway, client, *"abcdef")
    whole = [(seq, text) for seq, text in zip(range(2, 9), [*"abcdef", ""], strict=True)]
    for seq in range(8):
        read = await soon(asyncio.to_thread(lambda: list(client.resume(Cursor(stream_id, seq)))))  # noqa: B023
        heard = [(record.seq, record.text) for record in read if record.event != "start"]
        assert heard == [it for it in whole if it[0] > seq]
        assert [record.seq for record in read][:1] == [seq + 1]
        assert read[-1].event == "done"


async def test_refusals_are_those_of_http(tmp_path: Path) -> None:
    """Whatever the wire calls them."""
    (tmp_path / "keys").write_text(KEYS)
    settings = Settings(journal="memory:", keys_file=str(tmp_path / "keys"), max_stream_records=5)
    for transport in TRANSPORTS:
        async with place_of(transport, settings) as place:
            ada, bob = place.client(ADA), place.client(BOB)
            stream_id = await ended(place.gateway, ada, *"abcdefgh")
            for client, seq, kind in (
                (ada, 3, CursorExpired),
                (ada, 480, CursorAhead),
                (bob, 6, UnknownStream),
                (place.client("nobodys-key"), 6, Unauthorized),
            ):
                with pytest.raises(kind) as refused:
                    await soon(asyncio.to_thread(lambda: list(client.resume(Cursor(stream_id, seq)))))  # noqa: B023
                assert not isinstance(refused.value, CursorExpired) or refused.value.oldest_available == 6
            with pytest.raises(UnknownModel):
                await soon(asyncio.to_thread(lambda: ada.generate("hi", model="nobody's")))  # noqa: B023


async def test_a_reader_that_is_overtaken_is_told_after_what_it_had(place: Place) -> None:
    """The stream is deleted under it."""
    client = place.client()
    stream = await soon(asyncio.to_thread(client.generate, "hi"))
    puppet = await place.gateway.puppets.next()
    await puppet.say("a")
    records = iter(stream)
    heard = [await soon(asyncio.to_thread(next, records)) for _ in range(2)]
    await place.gateway.idle(stream.stream_id)
    await place.gateway.streams.journal.expire(stream.stream_id)
    place.gateway.streams.journal.wake(stream.stream_id)
    with pytest.raises((CursorExpired, UnknownStream)):
        await soon(asyncio.to_thread(next, records))
    assert [record.seq for record in heard] == [1, 2]


async def test_cancel_and_ack_are_the_streams_own(place: Place) -> None:
    client = place.client()
    stream = await soon(asyncio.to_thread(client.generate, "hi"))
    puppet = await place.gateway.puppets.next()
    await puppet.say("a", "b")
    state = await soon(asyncio.to_thread(stream.ack, 2))
    assert state["acked_seq"] == 2
    with pytest.raises(CursorAhead):
        await soon(asyncio.to_thread(stream.ack, 9))
    assert (await soon(asyncio.to_thread(stream.cancel)))["status"] == "cancelled"
    await soon(puppet.stopped.wait())
    read = await soon(asyncio.to_thread(list, stream))
    assert [record.event for record in read] == ["start", "token", "token", "cancelled"]
    assert read[-1].data["reason"] == "client"
