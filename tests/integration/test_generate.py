"""`midstream generate` and the clients against the real gateway: cut wires, killed processes, no token lost."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from midstream.cli import exits
from midstream.client import AsyncClient, Client, Cursor, Patience
from midstream.errors import CursorAhead, CursorExpired, Unauthorized, UnknownStream
from midstream.producers.scripted import tokens
from midstream.server.settings import Settings
from midstream.testing.gateway import RunningGateway
from midstream.testing.patience import soon
from midstream.testing.puppet import Puppet
from tests.unit.cli.program import COMMAND, environment

HASTE = Patience(base=0.001, cap=0.01)


class Wire:
    """A TCP relay between a client and a gateway, that can be cut.  `port` is where it leads; None: nowhere."""

    def __init__(self, port: int | None) -> None:
        self.port = port
        self._pipes: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def cut(self) -> None:
        """Drop every connection, with whatever is on its way."""
        for pipe in list(self._pipes):
            pipe.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(OSError):
                if self.port is not None:
                    await self._relay(reader, writer, *await asyncio.open_connection("127.0.0.1", self.port))
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _relay(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        far_reader: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter,
    ) -> None:
        pair = {writer, far_writer}
        self._pipes |= pair
        both = [asyncio.ensure_future(_pump(reader, far_writer)), asyncio.ensure_future(_pump(far_reader, writer))]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            far_writer.transport.abort()
            self._pipes -= pair


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()


async def start(*words: str) -> Process:
    return await asyncio.create_subprocess_exec(*COMMAND, *words, stdout=PIPE, stderr=PIPE, env=environment())


async def again(line: str) -> tuple[int, str]:
    """Run a command that was told; exit code and stdout."""
    process = await asyncio.create_subprocess_shell(line, stdout=PIPE, stderr=PIPE, env=environment())
    out, _ = await soon(process.communicate())
    assert process.returncode is not None
    return process.returncode, out.decode()


async def printed(process: Process, text: str) -> str:
    """Wait until a run has printed just this, and no more so far."""
    assert process.stdout is not None
    data = await soon(process.stdout.readexactly(len(text.encode())))
    assert data.decode() == text
    return text


async def finish(process: Process) -> tuple[int, str, str]:
    out, err = await soon(process.communicate())
    assert process.returncode is not None
    assert b"Traceback" not in err
    return process.returncode, out.decode(), err.decode()


def told_command(talk: str) -> str:
    return talk.strip().splitlines()[-1]


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    async with RunningGateway() as gateway:
        yield gateway


async def only_stream(gateway: RunningGateway) -> dict[str, Any]:
    """The state of the gateway's one stream, as its owner sees it."""
    async with AsyncClient(gateway.address) as client:
        (state,) = (await client.streams())["streams"]
        return dict(state)


async def kept_text(gateway: RunningGateway) -> str:
    stream_id = (await only_stream(gateway))["stream_id"]
    async with AsyncClient(gateway.address) as client:
        return str((await client.snapshot(stream_id))["text"])


async def say(puppet: Puppet, count: int, start: int = 0) -> str:
    texts = [f" {n}é" for n in range(start, start + count)]
    await puppet.say(*texts)
    return "".join(texts)


# --- generate ---------------------------------------------------------------------------------------------------------


async def test_a_wire_cut_again_and_again_is_mended_at_the_exact_token(gateway: RunningGateway) -> None:
    async with Wire(gateway.port) as wire:
        run = await start("generate", "hi", "--gateway", wire.url)
        puppet = await gateway.puppets.next()
        text = ""
        for turn in range(4):
            text += await printed(run, await say(puppet, 3, 10 * turn))
            wire.cut()
            unseen = await say(puppet, 4, 10 * turn + 3)
            text += await printed(run, unseen)
        await puppet.finish()
        code, rest, err = await finish(run)
    assert (code, rest) == (exits.OK, "")
    assert text.count("é") == 28
    assert err.count("connection lost; resumed after token") == 4
    assert gateway.puppets.begun == 1


async def test_a_wire_cut_before_the_first_token_pays_for_one_generation(gateway: RunningGateway) -> None:
    async with Wire(gateway.port) as wire:
        run = await start("generate", "hi", "--gateway", wire.url)
        puppet = await gateway.puppets.next()
        wire.cut()
        text = await say(puppet, 3)
        await printed(run, text)
        await puppet.finish()
        assert (await finish(run))[0] == exits.OK
    assert gateway.puppets.begun == 1


async def test_after_sigkill_the_saved_position_prints_the_rest(gateway: RunningGateway, tmp_path: Path) -> None:
    kept = tmp_path / "position"
    run = await start("generate", "hi", "--gateway", gateway.address, "--position", str(kept))
    puppet = await gateway.puppets.next()
    first = await printed(run, await say(puppet, 5))
    position = Cursor((await only_stream(gateway))["stream_id"], 6).encode() + "\n"
    async with asyncio.timeout(10):
        while kept.read_text() != position:  # noqa: ASYNC110  # a file tells nobody that it changes
            await asyncio.sleep(0.001)
    run.kill()
    assert (await finish(run))[0] == -signal.SIGKILL
    rest = await say(puppet, 5, 5)
    resumed = await start("generate", "--gateway", gateway.address, f"--position={kept}", f"--resume=@{kept}")
    rest = await printed(resumed, rest)
    rest += await printed(resumed, await say(puppet, 5, 10))
    await puppet.finish()
    assert (await finish(resumed))[:2] == (exits.OK, "")
    assert first + rest == await kept_text(gateway)


async def test_ctrl_c_stops_the_reading_not_the_generation(gateway: RunningGateway) -> None:
    run = await start("generate", "hi", "--gateway", gateway.address)
    puppet = await gateway.puppets.next()
    first = await printed(run, await say(puppet, 5))
    run.send_signal(signal.SIGINT)
    code, _, err = await finish(run)
    assert code == exits.INTERRUPTED
    stream_id = (await only_stream(gateway))["stream_id"]
    assert f'session="{stream_id}" last_token_index=4 (resume with --resume-from 5)' in err.splitlines()
    rest = await say(puppet, 3, 5)
    await puppet.finish()
    assert await again(told_command(err)) == (exits.OK, rest)
    assert first + rest == await kept_text(gateway)


async def test_a_cancelled_and_a_failed_answer_end_with_their_codes(gateway: RunningGateway) -> None:
    cancelled = await start("generate", "hi", "--gateway", gateway.address)
    puppet = await gateway.puppets.next()
    await printed(cancelled, await say(puppet, 2))
    async with AsyncClient(gateway.address) as client:
        await client.cancel((await only_stream(gateway))["stream_id"])
    code, _, err = await finish(cancelled)
    assert code == exits.CANCELLED
    assert "cancelled (client): 2 chunks in " in err

    failed = await start("generate", "hi", "--gateway", gateway.address)
    puppet = await gateway.puppets.next()
    await puppet.fail("upstream_timeout", "nothing for 60 s")
    code, _, err = await finish(failed)
    assert code == exits.GENERATION_FAILED
    assert "failed: upstream_timeout: nothing for 60 s" in err


async def test_what_was_acked_is_gone_for_resume_and_still_there_for_text(gateway: RunningGateway) -> None:
    run = await start("generate", "hi", "--gateway", gateway.address, "--ack-every", "2")
    puppet = await gateway.puppets.next()
    text = await printed(run, await say(puppet, 6))
    await puppet.finish()
    await finish(run)
    state = await only_stream(gateway)
    assert state["acked_seq"] == 8
    stale = await start("generate", "--gateway", gateway.address, "--resume", Cursor(state["stream_id"], 0).encode())
    code, out, _ = await finish(stale)
    assert (code, out) == (exits.POSITION_GONE, "")
    inspect = shlex.join([*COMMAND, "inspect", "--gateway", gateway.address, state["stream_id"], "--text"])
    assert await again(inspect) == (exits.OK, text)


async def test_inspect_shows_an_open_stream_and_its_reader(gateway: RunningGateway) -> None:
    run = await start("generate", "hi", "--gateway", gateway.address)
    puppet = await gateway.puppets.next()
    await printed(run, await say(puppet, 3))
    _, table = await again(shlex.join([*COMMAND, "inspect", "--gateway", gateway.address]))
    header, row = table.splitlines()
    shown = dict(zip(header.split(), row.split(), strict=False))
    seen = (shown["STATUS"], shown["MODEL"], shown["HIGHEST"], shown["RETAINED"], shown["READERS"])
    assert seen == ("open", "puppet", "4", "4", "1")
    await puppet.finish()
    await finish(run)


async def test_a_key_is_needed_where_keys_are_configured(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice:s3cret-a\nbob:s3cret-b\n")
    async with RunningGateway(Settings(journal="memory:", keys_file=str(keys))) as gateway:
        code, _, err = await finish(await start("generate", "hi", "--gateway", gateway.address))
        assert (code, err) == (exits.REFUSED, "the gateway asks for a key: set MIDSTREAM_KEY\n")
        async with (
            AsyncClient(gateway.address, key="s3cret-a") as alice,
            AsyncClient(gateway.address, key="s3cret-b") as bob,
            AsyncClient(gateway.address, key="s3cret-c") as stranger,
        ):
            stream = await alice.generate("hi")
            with pytest.raises(UnknownStream):
                await bob.state(stream.stream_id)
            with pytest.raises(UnknownStream):
                await anext(aiter(bob.resume(stream.cursor)))
            with pytest.raises(Unauthorized):
                await stranger.streams()
            stream.close()


class Served:
    """`midstream serve` in a process of its own, to be killed."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal

    async def __aenter__(self) -> Served:
        words = [
            "--upstream",
            "scripted:",
            "--journal",
            f"sqlite:///{self._journal}",
            "--port",
            "0",
            "--grpc-port",
            "0",
        ]
        self.process = await start("serve", *words)
        assert self.process.stderr is not None
        first = (await soon(self.process.stderr.readline())).decode()
        port = urlsplit(first.split()[-1]).port
        assert port is not None, first
        self.port = port
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await soon(self.process.communicate())


async def test_a_gateway_killed_and_started_again_gives_what_it_had_and_the_reason(tmp_path: Path) -> None:
    """Every token that was delivered before SIGKILL is there after it (I1), and the end is a loud one (I7)."""
    journal = tmp_path / "journal.db"
    async with Wire(None) as wire:
        async with Served(journal) as first:
            wire.port = first.port
            run = await start("generate", "hi", "--gateway", wire.url, "--model", "scripted-n1000-r100")
            text = await printed(run, "".join(islice(tokens("hi"), 20)))
            first.process.kill()
            await first.process.wait()
            wire.port = None
        async with Served(journal) as second:
            wire.port = second.port
            code, rest, err = await finish(run)
            async with AsyncClient(wire.url) as client:
                (state,) = (await client.streams())["streams"]
                snapshot = await client.snapshot(state["stream_id"])
    assert code == exits.GENERATION_FAILED
    assert "failed: writer_lost" in err
    assert text + rest == snapshot["text"]
    assert "".join(islice(tokens("hi"), 1000)).startswith(text + rest)


# --- the clients ------------------------------------------------------------------------------------------------------


async def test_from_every_position_both_clients_get_what_follows_and_nothing_else(gateway: RunningGateway) -> None:
    """I3."""
    async with AsyncClient(gateway.address, patience=HASTE) as client:
        stream = await client.generate("hi")
        puppet = await gateway.puppets.next()
        await say(puppet, 12)
        await puppet.finish()
        whole = [record async for record in stream]
        assert [record.seq for record in whole] == list(range(1, 15))
        blocking = Client(gateway.address, patience=HASTE)
        for seq in range(15):
            position = Cursor(stream.stream_id, seq)
            assert [record async for record in client.resume(position)] == whole[seq:]
            assert await asyncio.to_thread(lambda: list(blocking.resume(position))) == whole[seq:]  # noqa: B023
        with pytest.raises(CursorAhead) as caught:
            await anext(aiter(client.resume(Cursor(stream.stream_id, 15))))
        assert caught.value.highest_seq == 14


async def test_a_reader_goes_on_after_its_ack_and_not_before(gateway: RunningGateway) -> None:
    async with AsyncClient(gateway.address, patience=HASTE) as client:
        stream = await client.generate("hi")
        puppet = await gateway.puppets.next()
        await say(puppet, 6)
        async for record in stream:
            if record.seq == 4:
                break
        await gateway.unread(stream.stream_id)
        state = await stream.ack()
        assert (state["acked_seq"], state["trimmed_seq"]) == (4, 4)
        await puppet.finish()
        with pytest.raises(CursorExpired) as caught:
            await anext(aiter(client.resume(Cursor(stream.stream_id, 3))))
        assert caught.value.oldest_available == 5
        assert [record.seq async for record in stream] == [5, 6, 7, 8]


async def test_fifty_loops_left_early_leave_no_reader_behind(gateway: RunningGateway) -> None:
    async with AsyncClient(gateway.address, patience=HASTE, connections=2) as client:
        for _ in range(50):
            stream = await client.generate("hi")
            async for record in stream:
                assert record.event == "start"
                break
        await gateway.unread(stream.stream_id)
        last = await client.generate("hi")
        for _ in range(51):
            puppet = await gateway.puppets.next()
        await puppet.finish()
        assert [record.event async for record in last] == ["start", "done"]
