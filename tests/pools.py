"""A gateway with a worker pool, workers that a test leads by the hand, and readers of what they say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from midstream.codec.sse import Decoder
from midstream.pool.leases import LeaseView
from midstream.pool.pool import Pool
from midstream.testing.patience import PATIENCE, soon
from midstream.wire import H_STREAM_ID, TERMINAL
from tests.gateways import Answer, Http, Site, site

TEXT = "/api/v2/generate/text"
MODEL = "tiny"
# Requesters and workers of different owners, and their keys.
ADA, BOB, CAT = "ada-key-1", "bob-key-1", "cat-key-1"
KEYS = f"ada:{ADA}\nbob:{BOB}\ncat:{CAT}:admin\n"


@dataclass
class Job:
    """A popped job.  `seq` is the last batch that was posted."""

    http: Http
    body: dict[str, Any]
    seq: int = 0

    @property
    def id(self) -> str:
        return str(self.body["id"])

    @property
    def payload(self) -> dict[str, Any]:
        payload: dict[str, Any] = self.body["payload"]
        return payload

    async def send(self, content: Any = "", seq: Any = None, http: Http | None = None, **more: Any) -> Answer:
        """Post a batch as it is given, whatever comes of it."""
        body = {"id": self.id, "seq": self.seq + 1 if seq is None else seq, "content": content, **more}
        return await (http or self.http).post(f"{TEXT}/progress", body)

    async def post(self, *texts: str, **more: Any) -> None:
        """Post these as the next batches, each of which must be taken."""
        for text in texts:
            answer = await self.send(text, **more)
            assert (answer.status, answer.json) == (200, {"cancelled": False})
            self.seq += 1

    async def submit(self, generation: Any = None, http: Http | None = None, **more: Any) -> Answer:
        body = {"id": self.id, **({} if generation is None else {"generation": generation}), **more}
        return await (http or self.http).post(f"{TEXT}/submit", body)

    async def finish(self, text: str) -> int:
        """Hand in a chat job's reply, which must be taken; the reward."""
        answer = await self.submit(message={"role": "assistant", "content": text}, finish_reason="stop")
        assert answer.status == 200, answer.body
        return int(answer.json["reward"])

    async def fault(self) -> None:
        answer = await self.submit(state="faulted", fault_reason="generation_error")
        assert (answer.status, answer.json) == (200, {"reward": 0})


@dataclass
class Hand:
    """A worker of our own: it takes chats, and posts what a test tells it to."""

    http: Http
    name: str = "worker"
    models: tuple[str, ...] = (MODEL,)
    declares: dict[str, Any] = field(default_factory=lambda: {"chat_jobs": True, "max_length": 1024})

    async def ask(self, **more: Any) -> Answer:
        return await self.http.post(f"{TEXT}/pop", self.declared(**more))

    def declared(self, **more: Any) -> dict[str, Any]:
        body = {"name": self.name, "models": list(self.models), "max_context_length": 8192, "bridge_agent": "Hand:1:x"}
        return body | self.declares | more

    async def look(self, **more: Any) -> Job | None:
        """A job, if there is one."""
        answer = await self.ask(**more)
        assert answer.status == 200, answer.body
        return Job(self.http, answer.json) if answer.json["id"] is not None else None

    async def pop(self, **more: Any) -> Job:
        """A job; there is one, or comes soon: a stream is opened before its request is in the queue."""
        async with asyncio.timeout(PATIENCE):
            while (job := await self.look(**more)) is None:
                pass
        return job


class Reading:
    """A reader of a stream's records."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.stream_id = response.headers[H_STREAM_ID]
        self.heard: list[tuple[str, dict[str, Any]]] = []
        self._decoder = Decoder()
        self._events: list[tuple[str, dict[str, Any]]] = []

    async def next(self) -> tuple[str, dict[str, Any]]:
        """The next record: its event and its data."""
        while not self._events:
            data = await soon(self.response.content.readany())
            assert data, f"the stream ended without a terminal record after {self.heard}"
            self._events += [(event.event, json.loads(event.data)) for event in self._decoder.feed(data)]
        self.heard.append(self._events.pop(0))
        return self.heard[-1]

    async def read(self, count: int) -> str:
        """The text of the next so many records, the start record left out."""
        told: list[str] = []
        while len(told) < count:
            event, fields = await self.next()
            if event != "start":
                assert event == "token", (event, fields)
                told.append(fields["delta"])
        return "".join(told)

    async def end(self) -> tuple[str, dict[str, Any]]:
        """Everything, and the terminal record."""
        while not self.heard or self.heard[-1][0] not in TERMINAL:
            await self.next()
        return self.heard[-1]

    @property
    def tokens(self) -> list[dict[str, Any]]:
        return [fields for event, fields in self.heard if event == "token"]

    @property
    def text(self) -> str:
        return "".join(fields["delta"] for fields in self.tokens)

    @property
    def sources(self) -> list[list[Any]]:
        """Whence each record came: generation and the worker's seq."""
        return [fields["src"] for fields in self.tokens]

    def leave(self) -> None:
        self.response.close()


@dataclass(frozen=True)
class PoolSite:
    """A gateway with a pool.  `ada` asks, `bob` and `cat` work; `http` sends no key."""

    site: Site

    @property
    def http(self) -> Http:
        return self.site.http

    @property
    def ada(self) -> Http:
        return self.keyed(ADA)

    def keyed(self, key: str) -> Http:
        return self.http.sending(apikey=key)

    def hand(self, name: str = "worker", key: str = BOB, **declares: Any) -> Hand:
        hand = Hand(self.keyed(key), name)
        hand.declares |= declares
        return hand

    @property
    def pool(self) -> Pool:
        assert self.site.gateway.gateway.pooled is not None
        return self.site.gateway.gateway.pooled.pool

    async def sweep(self) -> None:
        """What comes each ten seconds."""
        assert self.site.gateway.gateway.pooled is not None
        await self.site.gateway.gateway.pooled.sweep()

    @property
    def clock(self) -> Any:
        return self.site.gateway.clock

    async def read(self, http: Http | None = None, **body: Any) -> Reading:
        """Ask for an answer of the pool, and read it."""
        fields: dict[str, Any] = {"model": MODEL, "max_tokens": 100}
        response = await (http or self.ada).create(None, **fields | body)
        assert response.status == 200, await response.read()
        return Reading(response)

    async def again(self, stream_id: str) -> Reading:
        """Read a stream from its start."""
        return Reading(await self.ada.open("GET", f"/v1/stream/{stream_id}?from=start"))

    async def serving(self, **declares: Any) -> Hand:
        """A worker whose models can be asked for, since it has looked for a job."""
        hand = self.hand(**declares)
        assert await hand.look() is None
        return hand

    async def begun(self, **body: Any) -> tuple[Reading, Job]:
        """A reader and a worker of the same answer."""
        hand = await self.serving()
        reading = await self.read(**body)
        return reading, await hand.pop()

    async def held(self) -> dict[str, LeaseView]:
        """Live leases by generation."""
        return {view.generation: view for view in await self.pool.leases.held()}

    async def balance(self, key: str) -> int:
        answer = await self.keyed(key).get("/api/v2/find_user")
        assert answer.status == 200
        return int(answer.json["kudos"])

    async def balances(self) -> tuple[int, int, int]:
        """Ada's, Bob's and Cat's; all there is."""
        found = await self.balance(ADA), await self.balance(BOB), await self.balance(CAT)
        assert sum(found) == 0
        return found


@asynccontextmanager
async def pool_site(directory: Path, *, keys: str | None = KEYS, **settings: Any) -> AsyncIterator[PoolSite]:
    """A gateway with a pool on SQLite and these settings besides; `keys` None is open mode."""
    if keys is not None:
        (directory / "keys").write_text(keys)
        settings["keys_file"] = str(directory / "keys")
    async with site(**{"pool": f"sqlite:///{directory}/pool.db"} | settings) as running:
        yield PoolSite(running)


def asked(**body: Any) -> Mapping[str, Any]:
    """The body of an `async` for the workers of these tests."""
    return {"prompt": "Once upon a time", "models": [MODEL], "params": {"max_length": 100}} | body
