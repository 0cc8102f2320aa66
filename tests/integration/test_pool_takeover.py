"""Two gateways on one Valkey and one database: the stream of one that is killed goes on at the other, word for word."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from midstream.journal.redis import RedisJournal
from midstream.journal.redis_url import Terms
from midstream.pool.shapes import Generation
from midstream.testing.clock import ManualClock
from midstream.testing.patience import eventually
from tests.houses import KEY, OWNER, House
from tests.leases import redis_leases
from tests.sharing import crash
from tests.valkeys import BRIEF, QUICK, redis_journal, shared


class Twins:
    """Two gateways; either can be killed."""

    def __init__(self, first: House, second: House) -> None:
        self.first, self.second = first, second

    async def kill_first(self) -> None:
        """Its connections are gone, and nothing is said to anybody."""
        journal = self.first.journal
        assert isinstance(journal, RedisJournal)
        await crash(journal)
        for writer in list(self.first.streams.writers.values()):
            writer.stop()
            await writer.join()

    async def taken(self, stream_id: str) -> None:
        """Wait until the second gateway writes the stream, or has ended it."""
        async with asyncio.timeout(20):
            while (state := await self.second.journal.state(stream_id)).epoch == 1:
                await self.second.streams.orphans.take_all()
                await asyncio.sleep(0.05)
            while not state.ended and stream_id not in self.second.streams.writers:
                await asyncio.sleep(0.01)
                state = await self.second.journal.state(stream_id)


@asynccontextmanager
async def twins(directory: Path, terms: Terms = BRIEF) -> AsyncIterator[Twins]:
    clock, prefix = ManualClock(), uuid4().hex
    async with AsyncExitStack() as stack:
        both = []
        for _ in range(2):
            one = House(
                directory / "pool.db",
                clock,
                redis_journal(shared(), prefix, clock, terms=terms),
                redis_leases(shared().url(prefix)),
            )
            await one.start()
            stack.push_async_callback(one.stop)
            assert await one.look() == []
            both.append(one)
        yield Twins(*both)


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Twins]:
    async with twins(tmp_path) as found:
        yield found


@pytest.fixture
async def lasting(tmp_path: Path) -> AsyncIterator[Twins]:
    """Neither is killed, and a busy machine takes neither's lease away."""
    async with twins(tmp_path, QUICK) as found:
        yield found


async def begun(two: Twins) -> tuple[str, Generation]:
    """A stream of the first gateway, and the generation that a worker has popped at the second."""
    stream_id = await two.first.ask()
    return stream_id, await two.second.pop()


def sources(records: list[tuple[str, dict[str, object]]]) -> list[object]:
    return [fields["src"] for event, fields in records if event == "token"]


async def test_worker_posts_to_one_gateway_and_its_reader_reads_at_the_other(lasting: Twins) -> None:
    stream_id, generation = await begun(lasting)
    assert generation.streams
    await lasting.second.post(generation, ["The", " ca"])
    await lasting.first.told(stream_id, 2)
    await lasting.second.finish(generation, "The cat")
    assert (await lasting.first.end(stream_id))[0] == "done"
    assert await lasting.second.text(stream_id) == "The cat"


async def test_stream_of_a_killed_gateway_goes_on_after_its_last_src(two: Twins) -> None:
    """What was posted in between is there once, in order; the worker notices nothing."""
    stream_id, generation = await begun(two)
    await two.second.post(generation, ["The", " ca"])
    await two.first.told(stream_id, 2)
    await two.kill_first()
    await two.second.post(generation, ["t", " sat"], 3)
    await two.taken(stream_id)
    await two.second.told(stream_id, 4)
    await two.second.post(generation, ["."], 5)
    await two.second.finish(generation, "The cat sat. Twice.")
    assert (await two.second.end(stream_id))[0] == "done"
    assert await two.second.text(stream_id) == "The cat sat. Twice."
    assert sources(await two.second.records(stream_id)) == [[generation.id, seq] for seq in (1, 2, 3, 4, 5, 0)]


async def test_acked_records_do_not_hide_where_to_go_on(two: Twins) -> None:
    stream_id, generation = await begun(two)
    await two.second.post(generation, ["The", " ca"])
    await two.first.told(stream_id, 2)
    await two.first.streams.ack(stream_id, OWNER, 3)
    assert (await two.first.streams.owned(stream_id, OWNER)).oldest_retained_seq == 4
    await two.kill_first()
    await two.taken(stream_id)
    await two.second.post(generation, ["t"], 3)
    await two.second.finish(generation, "The cat")
    assert (await two.second.end(stream_id))[0] == "done"
    answer = await two.second.streams.answer(stream_id, OWNER)
    assert answer.fold.choices[0].text == b"The cat"


async def test_killed_before_anything_was_shown_the_stream_begins_at_the_other(two: Twins) -> None:
    stream_id, generation = await begun(two)
    await two.kill_first()
    await two.second.post(generation, ["The", " cat"])
    await two.taken(stream_id)
    await two.second.finish(generation, "The cat")
    assert (await two.second.end(stream_id))[0] == "done"
    assert sources(await two.second.records(stream_id)) == [[generation.id, 1], [generation.id, 2]]


async def test_reply_that_came_while_nobody_wrote_completes_the_stream(two: Twins) -> None:
    stream_id, generation = await begun(two)
    await two.second.post(generation, ["The", " ca"])
    await two.first.told(stream_id, 2)
    await two.kill_first()
    await two.second.finish(generation, "The cat")
    await two.taken(stream_id)
    assert (await two.second.end(stream_id))[0] == "done"
    assert await two.second.text(stream_id) == "The cat"


async def test_worker_that_was_lost_meanwhile_ends_what_was_shown(two: Twins) -> None:
    stream_id, generation = await begun(two)
    await two.second.post(generation, ["The", " ca"])
    await two.first.told(stream_id, 2)
    await two.kill_first()
    await two.second.pool.fault(generation.id, "bob", "generation_error")
    other = await two.second.pop()
    await two.second.pool.progress(other.id, KEY, 1, "The dog", "")
    await two.taken(stream_id)
    event, fields = await two.second.end(stream_id)
    assert (event, fields["error"]["code"]) == ("failed", "ChatStreamDiverged")
    assert await two.second.text(stream_id) == "The ca"
    assert (await two.second.pool.progress(other.id, KEY, 2, "x", "")).cancelled


async def test_cancel_at_the_other_gateway_stops_the_worker(lasting: Twins) -> None:
    """The stream is written at one, cancelled and posted to at the other."""
    stream_id, generation = await begun(lasting)
    await lasting.second.post(generation, ["x" * 100])
    await lasting.first.told(stream_id, 1)
    await lasting.second.streams.cancel(stream_id, OWNER)

    async def told() -> bool:
        return (await lasting.second.pool.progress(generation.id, KEY, 0, "", "")).cancelled

    async def paid() -> bool:
        return await lasting.second.balances() == (-25, 25)

    await eventually(told)
    await eventually(paid)


async def test_gateway_that_stops_in_order_leaves_its_requests_to_the_other(two: Twins) -> None:
    """Its shutdown is no cancel."""
    stream_id, generation = await begun(two)
    await two.second.post(generation, ["The", " ca"])
    await two.first.told(stream_id, 2)
    await two.first.streams.close()
    await two.taken(stream_id)
    await two.second.post(generation, ["t"], 3)
    await two.second.finish(generation, "The cat")
    assert (await two.second.end(stream_id))[0] == "done"
    assert await two.second.text(stream_id) == "The cat"
