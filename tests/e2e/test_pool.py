"""A whole pool: gateway, PostgreSQL, Valkey, workers and the real model, each a process; workers die, readers stay."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import aiohttp
import pytest

from midstream.cli.model import Model
from midstream.codec.sse import Decoder
from midstream.testing.fault_proxy import FaultProxy
from midstream.wire import H_STREAM_ID, TERMINAL
from tests import postgres, valkeys
from tests.replicas import Replica

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

ADA, BOB, CAT = "ada-key-1", "bob-key-1", "cat-key-1"
WITHIN = 40.0
PROMPTS = ("Tell me about the sea.", "Tell me about the moon.", "Tell me about the wind.")
LENGTHS = (48, 400, 400)


@dataclass
class Pool:
    """The running parts that a test sees."""

    gateway: Replica
    session: aiohttp.ClientSession
    database: Callable[[str], list[tuple[Any, ...]]]
    model: Model

    def request(self, prompt: str, length: int) -> dict[str, Any]:
        """Greedy decoding, so that every run of the model says the same."""
        messages = [{"role": "user", "content": prompt}]
        return {"model": Model.name, "messages": messages, "max_tokens": length, "temperature": 0}

    async def straight(self, prompt: str, length: int) -> str:
        """What the model itself answers."""
        url = f"{self.model.url}/chat/completions"
        async with self.session.post(url, json=self.request(prompt, length)) as answer:
            return str((await answer.json())["choices"][0]["message"]["content"])

    async def get(self, path: str, key: str) -> Any:
        async with self.session.get(self.gateway.url + path, headers={"apikey": key}) as answer:
            assert answer.status == 200
            return await answer.json()

    async def offers_the_model(self) -> bool:
        return Model.name in [model["id"] for model in (await self.get("/v1/models", ADA))["data"]]

    async def leased(self) -> list[tuple[Any, ...]]:
        """What workers have."""
        return self.database("SELECT id, worker FROM $midstream_generation WHERE status = 'leased'")

    async def idle(self) -> bool:
        return not await self.leased()

    async def worker_of(self, reader: Reader) -> str:
        """Whose words the reader has."""
        return str(dict(await self.leased())[next(iter(reader.sources))])

    async def until(self, holds: Callable[[], Awaitable[object]], what: str) -> None:
        try:
            async with asyncio.timeout(WITHIN):
                while not await holds():  # noqa: ASYNC110  # in other processes, which send no event
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise TimeoutError(f"waited for {what}") from None


@dataclass
class Reader:
    """One reader of one answer."""

    pool: Pool
    prompt: str
    length: int
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    stream_id: str = ""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self) -> tuple[str, dict[str, Any]]:
        """Ask, and read to the end."""
        decoder = Decoder()
        url = f"{self.pool.gateway.url}/v1/stream"
        body = self.pool.request(self.prompt, self.length)
        async with self.pool.session.post(url, json=body, headers={"apikey": ADA}) as answer:
            assert answer.status == 200, await answer.text()
            self.stream_id = answer.headers[H_STREAM_ID]
            async for data in answer.content.iter_any():
                self.events += [(event.event, json.loads(event.data)) for event in decoder.feed(data)]
                self._changed.set()
        assert self.events[-1][0] in TERMINAL
        assert [fields["seq"] for _, fields in self.events] == list(range(1, len(self.events) + 1))
        return self.events[-1]

    async def shown(self, records: int) -> None:
        """Wait until it has been shown so much."""
        async with asyncio.timeout(WITHIN):
            while len(self.tokens) < records:
                self._changed.clear()
                await self._changed.wait()

    async def cancel(self) -> None:
        url = f"{self.pool.gateway.url}/v1/stream/{self.stream_id}/cancel"
        async with self.pool.session.post(url, headers={"apikey": ADA}) as answer:
            assert (await answer.json())["status"] == "cancelled"

    @property
    def tokens(self) -> list[dict[str, Any]]:
        return [fields for event, fields in self.events if event == "token"]

    @property
    def text(self) -> str:
        return "".join(fields["delta"] for fields in self.tokens)

    @property
    def sources(self) -> set[str]:
        return {fields["src"][0] for fields in self.tokens}


@asynccontextmanager
async def worker(pool: Pool, name: str, key: str, upstream: str) -> AsyncIterator[Process]:
    """`midstream worker` as a process.  It is killed at the end; what it has said is told where the test fails."""
    command = ["worker", "--gateway", pool.gateway.url, "--upstream", upstream, "--name", name, "--model", Model.name]
    with TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "midstream", *command, env={"MIDSTREAM_KEY": key, "PATH": ""}, stderr=log
        )
        try:
            yield process
        except BaseException as error:
            log.seek(0)
            error.add_note(f"worker {name!r} ({process.returncode}) said: {log.read()[-2000:].decode()}")
            raise
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


@asynccontextmanager
async def running(directory: Path) -> AsyncIterator[Pool]:
    """Gateway, database, store and model."""
    (directory / "keys").write_text(f"ada:{ADA}\nbob:{BOB}\ncat:{CAT}\n")
    server = postgres.shared()
    url = server.url()
    schema = url.rpartition("%3D")[2]
    options = ["--pool", url, "--keys-file", str(directory / "keys")]
    gateway = Replica(valkeys.shared().url(f"t{uuid4().hex}"), options, module="tests.pool_child")
    timeout = aiohttp.ClientTimeout(total=None)
    async with Model() as model, aiohttp.ClientSession(timeout=timeout) as session:
        try:
            await gateway.start()
            yield Pool(gateway, session, lambda query: server.ask(query.replace("$", f"{schema}.")), model)
        except BaseException as error:
            error.add_note(f"the gateway said: {gateway.log[-4000:].decode()}")
            raise
        finally:
            gateway.close()


def paid(text: str, length: int) -> int:
    return min(length, max(20, -(-len(text) // 4)))


async def test_three_readers_outlive_the_workers_of_their_answers(tmp_path: Path) -> None:
    """One worker is killed before its reader has seen anything, one after that, and one request is cancelled.

    The first answer is whole and another worker's, the second ends loudly, the third is paid as far as it was posted;
    and what was paid sums to zero.
    """
    async with running(tmp_path) as pool, AsyncExitStack() as stack:
        kept, lost, stopped = map(Reader, [pool] * 3, PROMPTS, LENGTHS)
        # A model that says nothing any more: its worker holds the job, shows life, and is killed.
        async with FaultProxy("127.0.0.1", int(urlsplit(pool.model.url).port or 0)) as stalled:
            silent = await stack.enter_async_context(worker(pool, "silent", BOB, f"http://127.0.0.1:{stalled.port}/v1"))
            await pool.until(pool.offers_the_model, "a worker's model")
            stalled.stall()
            first = asyncio.create_task(kept.read())
            await pool.until(pool.leased, "the first job to be popped")
            silent.kill()
        owners = {"bob's": BOB, "cat's": CAT}
        workers = {
            name: await stack.enter_async_context(worker(pool, name, key, pool.model.url))
            for name, key in owners.items()
        }
        assert (await asyncio.wait_for(first, WITHIN))[0] == "done"
        assert kept.text == await pool.straight(kept.prompt, kept.length)
        assert len(kept.sources) == 1

        second, third = asyncio.create_task(lost.read()), asyncio.create_task(stopped.read())
        await asyncio.gather(lost.shown(3), stopped.shown(3))
        workers.pop(await pool.worker_of(lost)).kill()
        await stopped.cancel()
        assert (await asyncio.wait_for(third, WITHIN))[0] == "cancelled"
        event, fields = await asyncio.wait_for(second, WITHIN)
        assert (event, fields["error"]["code"]) == ("failed", "ChatStreamDiverged")
        for reader in (lost, stopped):
            assert len(reader.sources) == 1
            await _says_what_the_model_says(pool, reader)

        await pool.until(pool.idle, "everything to be settled")
        ((name, left),) = workers.items()
        left.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(left.wait(), WITHIN) == 0
        await _paid_once_each(pool, kept, lost, stopped, name)


async def _says_what_the_model_says(pool: Pool, reader: Reader) -> None:
    """As far as both go: the whole answer would take the model a while."""
    straight = await pool.straight(reader.prompt, 32)
    both = min(len(straight), len(reader.text))
    assert both > 0
    assert reader.text[:both] == straight[:both]


async def _paid_once_each(pool: Pool, kept: Reader, lost: Reader, stopped: Reader, last: str) -> None:
    """What each answer cost, who got it, and that all of it sums to zero."""
    rows = pool.database("SELECT generation, owner, units, worker FROM $midstream_ledger")
    assert sum(units for _, _, units, _ in rows) == 0
    spent = {generation: -units for generation, owner, units, _ in rows if owner == "ada"}
    (first,), (third,) = kept.sources, stopped.sources
    assert spent[first] == paid(kept.text, kept.length)
    # What was posted when it was cancelled is all that was shown, and perhaps some that was not any more.
    assert paid(stopped.text, stopped.length) <= spent[third] < stopped.length
    assert spent.keys() <= {first, third, *lost.sources}
    assert {worker for generation, _, _, worker in rows if generation == third} == {last}
    balances = [(await pool.get("/api/v2/find_user", key))["kudos"] for key in (ADA, BOB, CAT)]
    assert sum(balances) == 0
    assert balances[0] == -sum(spent.values())
