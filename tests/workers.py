"""A worker in the test's own loop, between a real gateway with a pool and a local server that says what it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from midstream.testing.fault_proxy import FaultProxy
from midstream.testing.patience import soon, until
from midstream.testing.upstream import MisbehavingUpstream
from midstream.worker.job import Job, Result
from midstream.worker.local import LocalServer
from midstream.worker.pool import PoolRoutes
from midstream.worker.slot import Offer, Worker
from midstream.worker.times import Times
from tests.pools import BOB, MODEL, PoolSite, Reading, pool_site

# In a hurry, but for what a test waits for.
TIMES = Times(gather=0.01, alive=0.05, pop=0.02, most=0.1, look=0.01)
# Not a status: the call is taken and not answered.
NEVER = 0


@dataclass(frozen=True)
class Seen:
    """A call of a worker's, as it reached the pool; `at` is the loop's time."""

    route: str
    body: dict[str, Any]
    at: float


@dataclass
class Tap:
    """Stands before the gateway: notes what workers send, and answers in the pool's place where it is told to."""

    seen: list[Seen] = field(default_factory=list)
    instead: list[tuple[Callable[[Seen], bool], int, bytes]] = field(default_factory=list)

    def answer(self, route: str, status: int, body: Any = None, holds: Callable[[Seen], bool] = lambda _: True) -> None:
        """The next call of this route for which it holds is answered so (or NEVER), and does not get through."""
        told = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        self.instead.append((lambda call: call.route == route and holds(call), status, told))

    def calls(self, route: str) -> list[dict[str, Any]]:
        return [call.body for call in self.seen if call.route == route]

    @property
    def posts(self) -> list[dict[str, Any]]:
        return self.calls("progress")

    @property
    def batches(self) -> list[dict[str, Any]]:
        """The posts that carry tokens."""
        return [post for post in self.posts if post["seq"]]

    @property
    def submits(self) -> list[dict[str, Any]]:
        return self.calls("submit")

    def around(self, app: Any) -> Any:
        async def tapped(scope: Any, receive: Any, send: Any) -> None:
            route = scope.get("path", "").rpartition("/generate/text/")[2]
            if scope["type"] != "http" or route not in ("pop", "progress", "submit"):
                await app(scope, receive, send)
                return
            raw, more = b"", True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                raw, more = raw + message["body"], message.get("more_body", False)
            call = Seen(route, json.loads(raw), asyncio.get_running_loop().time())
            self.seen.append(call)
            for at, (holds, status, body) in enumerate(self.instead):
                if holds(call):
                    del self.instead[at]
                    if status == NEVER:
                        await receive()  # until it has left
                        return
                    await send({"type": "http.response.start", "status": status, "headers": []})
                    await send({"type": "http.response.body", "body": body})
                    return
            whole = [{"type": "http.request", "body": raw, "more_body": False}]
            await app(scope, lambda: _next(whole, receive), send)

        return tapped


async def _next(whole: list[Any], receive: Any) -> Any:
    return whole.pop() if whole else await receive()


def once(reading: Reading) -> None:
    """Its records come from one generation, each batch at most once, in order."""
    sources = reading.sources
    assert len({generation for generation, _ in sources}) == 1
    numbers = [seq for _, seq in sources]
    assert numbers == sorted(set(numbers))


@dataclass
class Shop:
    """A gateway with a pool, a line to it that can fail, a local server, and what workers did."""

    site: PoolSite
    tap: Tap
    line: FaultProxy
    upstream: MisbehavingUpstream
    ended: list[tuple[Job, Result]] = field(default_factory=list)

    @property
    def results(self) -> list[Result]:
        return [result for _, result in self.ended]

    @property
    def outcomes(self) -> list[str]:
        return [result.outcome for result in self.results]

    @property
    def asked(self) -> list[dict[str, Any]]:
        """What the local server was asked to generate."""
        return [request.json for request in self.upstream.requests if request.method == "POST"]

    async def over(self, jobs: int = 1) -> Result:
        """The last result, once there are so many."""
        await until(lambda: len(self.ended) >= jobs, f"{jobs} jobs to end")
        return self.results[jobs - 1]

    async def ask(self, model: str = MODEL, **body: Any) -> Reading:
        """A reader of a model that a worker serves, or soon will."""
        await until(lambda: self.site.pool.serves(model), f"a worker of {model}")
        return await self.site.read(model=model, **body)

    @asynccontextmanager
    async def worker(
        self,
        name: str = "kitchen",
        *,
        key: str | None = BOB,
        models: Mapping[str, str] | None = None,
        threads: int = 1,
        local: str | None = None,
        times: Times = TIMES,
        features: tuple[str, ...] = (),
        url: str | None = None,
    ) -> AsyncIterator[Worker]:
        """One that works until the end of the block, where it is stopped."""
        served = LocalServer(local or self.upstream.url, times=times)
        async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
            pool = PoolRoutes(session, url or f"http://127.0.0.1:{self.line.port}", key, "Test:1:x", times)
            offer = Offer(name, models or {MODEL: MODEL}, 16_384, 65_536, threads, "Test:1:x", features)
            worker = Worker(offer, served, pool, lambda job, result: self.ended.append((job, result)), times=times)
            working = asyncio.create_task(worker.run())
            try:
                yield worker
                worker.stop()
                await soon(working)
            finally:
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)
                await served.close()


@asynccontextmanager
async def shop(directory: Path, **settings: Any) -> AsyncIterator[Shop]:
    """All of it, with a gateway of these settings."""
    tap = Tap()
    async with (
        MisbehavingUpstream() as upstream,
        pool_site(directory, around=tap.around, **settings) as site,
        FaultProxy("127.0.0.1", site.site.gateway.port) as line,
    ):
        yield Shop(site, tap, line, upstream)
