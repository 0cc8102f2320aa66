"""A gateway that is stopped for a while (SIGSTOP, a paused machine) and goes on: what came meanwhile is not late."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from midstream.testing.patience import soon
from midstream.testing.upstream import Head, MisbehavingUpstream, Pause, Script, chat_answer, chat_event


@asynccontextmanager
async def served(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A gateway in a process of its own, and its address."""
    words = ("serve", "--port", "0", "--grpc-port", "0", "--journal", "memory:", *flags)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "midstream", *words, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        said = ""
        while not (match := re.search(r"midstream serves (http://\S+)", said)):
            line = await asyncio.wait_for(process.stderr.readline(), 20)
            assert line, f"it did not start: {said}"
            said += line.decode()
        yield process, match[1]
    finally:
        process.kill()
        await process.communicate()


async def test_time_limits_of_an_upstream_do_not_run_out_while_the_gateway_is_held() -> None:
    """The bytes are there when it goes on; to fail the stream before it has looked would throw a good answer away."""
    told, more = asyncio.Event(), asyncio.Event()
    answer = Script(
        [Head(), chat_event("first"), Pause(told), chat_event("second"), Pause(more), *chat_answer("third")]
    )
    async with MisbehavingUpstream(default=answer) as upstream, aiohttp.ClientSession() as session:
        limits = ("--upstream-idle", "0.4", "--upstream-first-token", "0.8")
        async with (
            served("--upstream", upstream.url, *limits) as (process, address),
            session.post(f"{address}/v1/stream", json={"prompt": "x", "model": "m"}) as reader,
        ):
            heard = b""
            while b"first" not in heard:
                heard += await soon(reader.content.readany())
            process.send_signal(signal.SIGSTOP)
            told.set()
            await asyncio.sleep(1)  # real time, in which nobody here has anything to wait for
            process.send_signal(signal.SIGCONT)
            while b"second" not in heard:
                heard += await soon(reader.content.readany())
            more.set()
            heard += await soon(reader.read())
    assert b"third" in heard
    assert b"event: done\n" in heard
