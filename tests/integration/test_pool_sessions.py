"""Sessions over gRPC whose answers come from a pool's worker: named, left, resumed and cancelled like any other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest_asyncio
from grpc import aio

from midstream.testing.grpc_dial import serving
from midstream.testing.patience import eventually
from tests.calls import Call, Client, Said
from tests.pools import ADA, BOB, CAT, MODEL, Hand, Job, PoolSite, pool_site


@dataclass(frozen=True)
class Sessions:
    """A gateway with a pool and its gRPC server; `ada` and `cat` ask over it, and `hand` works."""

    site: PoolSite
    channel: aio.Channel
    hand: Hand

    def keyed(self, key: str) -> Client:
        return Client(self.channel, [("authorization", f"Bearer {key}")])

    @property
    def ada(self) -> Client:
        return self.keyed(ADA)

    async def begun(self, session_id: str, prompt: str = "Hello") -> tuple[Call, Job]:
        """A call, and the job that a worker has got by it."""
        call = self.ada.generate(prompt=prompt, session_id=session_id)
        return call, await self.hand.pop()

    async def left(self, call: Call) -> str:
        """The caller goes; the stream's id."""
        stream_id = await call.stream_id()
        call.cancel()
        await self.site.site.gateway.unread(stream_id)
        return stream_id


@pytest_asyncio.fixture
async def here(tmp_path: Path) -> AsyncIterator[Sessions]:
    async with (
        pool_site(tmp_path) as site,
        serving(site.site.gateway) as address,
        aio.insecure_channel(address) as channel,
    ):
        yield Sessions(site, channel, await site.serving())


async def test_each_batch_of_a_worker_is_a_token_with_its_index(here: Sessions) -> None:
    """What its reply has beyond them is the last one; the worker is paid by the caller."""
    call, job = await here.begun("demo", "What is a lease?")
    assert job.body["model"] == MODEL
    assert job.payload["messages"] == [{"role": "user", "content": "What is a lease?"}]
    await job.post("a", "b")
    assert await call.take(2) == [("a", 0, False), ("b", 1, False)]
    assert await job.finish("abc") == 20
    assert await call.rest() == Said([("c", 2, False), ("", 3, True)], "OK")
    assert await here.site.balances() == (-20, 20, 0)


async def test_a_session_goes_on_at_its_next_token_while_its_worker_goes_on(here: Sessions) -> None:
    """The call drops, the worker does not notice, and no other worker is asked."""
    call, job = await here.begun("demo")
    await job.post("a", "b")
    assert await call.take(2) == [("a", 0, False), ("b", 1, False)]
    stream_id = await here.left(call)
    await job.post("c")
    again = here.ada.generate(session_id="demo", resume_from_token=2)
    assert await again.stream_id() == stream_id
    assert await again.take(1) == [("c", 2, False)]
    await job.post("d")
    await job.finish("abcd")
    assert await again.rest() == Said([("d", 3, False), ("", 4, True)], "OK")
    assert await here.hand.look() is None
    whole = [("a", 0, False), ("b", 1, False), ("c", 2, False), ("d", 3, False), ("", 4, True)]
    for wanted in range(5):
        assert await here.ada.said(session_id="demo", resume_from_token=wanted) == Said(whole[wanted:], "OK")


async def test_a_name_is_asked_of_the_pool_once(here: Sessions) -> None:
    """The same prompt replays, another one is refused, and to another owner the name is free."""
    call, job = await here.begun("demo")
    await job.post("a")
    await call.take(1)
    repeated = here.ada.generate(prompt="Hello", session_id="demo")
    assert await repeated.take(1) == [("a", 0, False)]
    said = await here.ada.said(prompt="Another", session_id="demo")
    assert (said.status, said.reason) == ("ALREADY_EXISTS", "IDEMPOTENCY_MISMATCH")
    said = await here.keyed(CAT).said(session_id="demo", resume_from_token=1)
    assert (said.status, said.reason) == ("NOT_FOUND", "UNKNOWN_STREAM")
    assert await here.hand.look() is None


async def test_a_session_survives_workers_that_are_lost_before_they_said_anything(here: Sessions) -> None:
    """Its call waits for the next one."""
    call, job = await here.begun("demo")
    await job.fault()
    other = await here.hand.pop()
    await other.post("a")
    await other.finish("a")
    assert await call.rest() == Said([("a", 0, False), ("", 1, True)], "OK")


async def test_a_session_whose_worker_is_lost_half_way_ends_loudly(here: Sessions) -> None:
    """Whenever it is asked for: text of two workers never meets in it (I8)."""
    call, job = await here.begun("demo")
    await job.post("a")
    await call.take(1)
    await job.fault()
    said = await call.rest()
    assert (said.messages, said.status, said.reason) == ([], "ABORTED", "CHATSTREAMDIVERGED")
    again = await here.ada.said(session_id="demo", resume_from_token=0)
    assert (again.messages, again.status, again.reason) == ([("a", 0, False)], said.status, said.reason)
    assert await here.hand.look() is None


async def test_cancel_of_a_session_tells_its_worker_to_stop_and_pays_it(here: Sessions) -> None:
    call, job = await here.begun("demo")
    await job.post("x" * 120)
    await call.take(1)
    assert (await here.ada.cancel("demo")).cancelled
    assert (await call.rest()).status == "CANCELLED"

    async def told_to_stop() -> bool:
        return bool((await job.send(seq=0)).json["cancelled"])

    await eventually(told_to_stop)
    assert (await job.send("late")).json == {"cancelled": True}

    async def paid() -> bool:
        return await here.site.balance(BOB) > 0

    await eventually(paid)
    assert await here.site.balances() == (-30, 30, 0)
