"""`midstream worker` as a process: its lines, its signals, its exit codes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from midstream.cli import exits
from midstream.testing.fault_proxy import FaultProxy
from midstream.testing.patience import until
from midstream.testing.upstream import Script, Stall
from tests.pools import BOB, CAT, MODEL
from tests.workers import Shop, shop

# Seconds for a process to start and to say something, on a machine that is busy with other tests.
WITHIN = 30.0


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Shop]:
    async with shop(tmp_path) as running:
        yield running


class Program:
    """A run of it.  `said` is what stands on its stderr."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.said = ""

    async def see(self, text: str) -> None:
        """Wait until it has said so.  Raises TimeoutError."""
        assert self.process.stderr is not None
        try:
            async with asyncio.timeout(WITHIN):
                while text not in self.said:
                    data = await self.process.stderr.read(65_536)
                    assert data, f"it ended before it said {text!r}: {self.said}"
                    self.said += data.decode()
        except TimeoutError:
            raise TimeoutError(f"waited for {text!r}: {self.said}") from None

    async def end(self) -> int:
        """Its exit code; `said` is then complete."""
        assert self.process.stderr is not None
        async with asyncio.timeout(WITHIN):
            self.said += (await self.process.stderr.read()).decode()
            code = await self.process.wait()
        assert "Traceback" not in self.said
        return code


@asynccontextmanager
async def program(
    here: Shop, *words: str, key: str | None = BOB, url: str | None = None, local: str | None = None
) -> AsyncIterator[Program]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MIDSTREAM_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-W", "error::ResourceWarning", "-m", "midstream", "worker"),
        *("--gateway", url or f"http://127.0.0.1:{here.line.port}"),
        *("--upstream", local or here.upstream.url),
        *("--name", "kitchen"),
        *words,
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=PIPE,
        env={**kept, **({} if key is None else {"MIDSTREAM_KEY": key})},
    )
    try:
        yield Program(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_signal_gives_back_what_it_holds_and_says_what_was_done(here: Shop) -> None:
    """It has waited for its local server before, and offered all that it lists."""
    here.upstream.script(MODEL, Script([Stall()]))
    async with FaultProxy("127.0.0.1", here.upstream.port) as door:
        await door.refuse()
        async with program(here, local=f"http://127.0.0.1:{door.port}/v1") as running:
            await running.see("waiting for the local server: ")
            await door.accept()
            await running.see(f"worker 'kitchen' offers {MODEL} to http://127.0.0.1:{here.line.port}\n")
            async with asyncio.timeout(WITHIN):
                reading = await here.ask()
            await until(lambda: here.tap.posts, "the job to be running")
            running.process.send_signal(signal.SIGTERM)
            assert await running.end() == exits.OK
    assert running.said.splitlines()[2:] == [
        f"faulted    {MODEL}  0 tokens  the worker stops",
        "worked: 1 faulted; 0 tokens; earned 0",
    ]
    job = await here.site.hand("second", CAT).pop()
    await job.finish("from another")
    assert (await reading.end())[0] == "done"
    assert reading.text == "from another"


async def test_a_second_signal_ends_it_at_once(here: Shop) -> None:
    here.upstream.script(MODEL, Script([Stall()]))
    async with program(here, "--model", MODEL, "--model", "pear=plum") as running:
        await running.see(f"offers {MODEL}, pear to")
        await running.see(f"the local server lists no model 'plum'; it has: {MODEL}")
        await here.ask()
        await until(lambda: here.tap.posts, "the job to be running")
        here.line.stall()
        running.process.send_signal(signal.SIGINT)
        await here.upstream.disconnected(1, within=10)  # the first one has been heard
        running.process.send_signal(signal.SIGINT)
        assert await running.end() == exits.INTERRUPTED
    assert "worked" not in running.said


async def test_a_pool_that_refuses_ends_it_with_the_reason(here: Shop) -> None:
    async with program(here, "--model", MODEL, key="wrong") as wrong, program(here, "--model", MODEL, key=None) as none:
        assert (await wrong.end(), await none.end()) == (exits.REFUSED, exits.REFUSED)
    start = f"the pool at http://127.0.0.1:{here.line.port} refuses this worker: "
    assert wrong.said.splitlines()[-1] == f"{start}no user has this API key (status 401)"
    assert none.said.splitlines()[-1] == f"{start}it asks for a key: set MIDSTREAM_KEY"


async def test_a_closed_terminal_ends_it_also_while_it_waits_for_its_local_server(here: Shop) -> None:
    async with FaultProxy("127.0.0.1", here.upstream.port) as door:
        door.stall()
        async with program(here, local=f"http://127.0.0.1:{door.port}/v1") as running:
            async with asyncio.timeout(WITHIN):
                while not door.connections:  # noqa: ASYNC110  # by another process, which sends no event
                    await asyncio.sleep(0.01)
            running.process.send_signal(signal.SIGHUP)
            assert await running.end() == exits.OK
    assert running.said == "worked: no jobs; 0 tokens; earned 0\n"
