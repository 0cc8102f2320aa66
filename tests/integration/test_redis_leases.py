"""Who is alive: leases, streams whose writer is gone, and a gateway that was stopped and wakes up."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from midstream.errors import StaleWriter
from midstream.journal.redis import RedisJournal
from midstream.records import Record
from midstream.testing.journal_writer import Writer, meta, read_all, tokens, written
from midstream.testing.patience import eventually, until
from tests.sharing import Processes, Reader, Told, crash, processes, reconnected, refusal_of
from tests.valkeys import BRIEF, clustered, shared


@pytest_asyncio.fixture
async def several() -> AsyncIterator[Processes]:
    async with processes() as made:
        yield made


@pytest_asyncio.fixture(params=["server", "cluster"])
async def either(request: pytest.FixtureRequest) -> AsyncIterator[Processes]:
    """Where leases lie differs: one on a server, one for each tag on a cluster."""
    async with processes(shared() if request.param == "server" else clustered()) as made:
        yield made


async def orphaned(journal: RedisJournal, stream_id: str) -> None:
    """Return once its writer's process counts as gone."""

    async def gone() -> bool:
        return stream_id in await journal.orphans()

    await eventually(gone, "the lease to run out")


async def test_waiting_reader_hears_that_the_writer_is_gone(several: Processes) -> None:
    """Its gateway's look finds the lease gone, and says so until somebody has claimed the stream; and not before."""
    told = Told()
    a, b = await several.start(terms=BRIEF), await several.start(told, terms=BRIEF)
    writer = await written(a, meta(several.clock), 3)
    reader = Reader(b, writer.stream_id)
    await reader.has(3)
    await reader.waits()
    await asyncio.sleep(0.3)
    assert told.orphans == []
    await crash(a)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await until(lambda: told.orphans, "the look to find the orphan")
    assert loop.time() - began < BRIEF.lease + 1
    orphan = await b.claim_orphan(writer.stream_id)
    assert orphan is not None
    assert (orphan.state.epoch, orphan.state.highest_seq, orphan.intact) == (2, 3, True)
    heir = Writer(b, writer.stream_id, writer.frames, 2)
    await heir.say("on")
    await heir.finish()
    await reader.over()
    assert reader.frames == heir.frames
    count = len(told.orphans)
    await asyncio.sleep(0.2)
    assert len(told.orphans) == count


async def test_racing_claims_of_an_orphan_are_won_once(either: Processes) -> None:
    """Of four gateways that notice at the same time exactly one gets the stream; the others hear None."""
    a = await either.start(terms=BRIEF)
    others = [await either.start(Told(), terms=BRIEF) for _ in range(4)]
    writers = [await written(a, meta(either.clock), 2) for _ in range(5)]
    await crash(a)
    await orphaned(others[0], writers[0].stream_id)
    for writer in writers:
        claims = await asyncio.gather(*(journal.claim_orphan(writer.stream_id) for journal in others))
        won = [claim for claim in claims if claim is not None]
        assert [claim.state.epoch for claim in won] == [2]
        winner = others[[claim is not None for claim in claims].index(True)]
        for journal in others:
            verb = journal.append(writer.stream_id, tokens(3, ["x"]), epoch=2, first_seq=3)
            assert await refusal_of(verb) == ("nothing" if journal is winner else "stale_writer")


async def test_stream_of_a_living_writer_is_no_orphan(several: Processes) -> None:
    """However silent it is; nor is one's own, nor one that has ended, nor one that never was."""
    a, b = await several.start(terms=BRIEF), await several.start(Told(), terms=BRIEF)
    silent, done = await written(a, meta(several.clock), 2), await written(a, meta(several.clock), 2)
    await done.finish()
    await asyncio.sleep(1.3)  # longer than a lease that nobody renews
    for stream_id in (silent.stream_id, done.stream_id):
        assert await b.claim_orphan(stream_id) is None
        assert await a.claim_orphan(stream_id) is None
    assert await b.orphans() == await a.orphans() == []
    assert await refusal_of(b.claim_orphan("never-was")) == "unknown_stream"
    await silent.say("still here")


async def test_process_that_closes_gives_up_its_streams_at_once(either: Processes) -> None:
    """Nobody waits for the lease of a gateway that went in order."""
    a, b = await either.start(), await either.start(Told())
    writer = await written(a, meta(either.clock), 2)
    await a.close()
    assert await b.orphans() == [writer.stream_id]
    assert await b.claim_orphan(writer.stream_id) is not None


async def test_without_a_listener_an_orphan_is_ended(several: Processes) -> None:
    """A journal used alone leaves nobody hanging: what nobody continues fails as `writer_lost`, by look or by sweep."""
    a, b = await several.start(terms=BRIEF), await several.start(terms=BRIEF)
    watched, unwatched = await written(a, meta(several.clock), 3), await written(a, meta(several.clock), 3)
    reader = Reader(b, watched.stream_id)
    await crash(a)
    await reader.over()
    end = Record.of(reader.frames[-1])
    assert (end.seq, end.event, end.json()["error"]["code"]) == (4, "failed", "writer_lost")
    await b.sweep()
    assert (await b.state(unwatched.stream_id)).status == "failed"


async def test_retried_claim_is_not_made_twice(several: Processes) -> None:
    """A claim whose reply was lost is told again: one epoch, not two."""
    a, b = await several.start(), await several.start(Told())
    writer = await written(a, meta(several.clock), 2)
    await a.close()
    script = b._store.run
    sent: list[bytes] = []

    async def twice(shard: int, packed: bytes) -> Any:
        if b"EVALSHA" in packed and writer.stream_id.encode() in packed:
            sent.append(packed)
            await script(shard, packed)
        return await script(shard, packed)

    b._store.run = twice  # type: ignore[method-assign]  # as the lane does when a connection breaks
    orphan = await b.claim_orphan(writer.stream_id)
    assert orphan is not None
    assert sent
    assert orphan.state.epoch == (await b.state(writer.stream_id)).epoch == 2


async def test_nobody_is_called_dead_while_nobody_could_renew(several: Processes) -> None:
    """After the store was away the living get a whole term to say so: it was no fault of theirs that leases ran out."""
    a, b = await several.start(terms=BRIEF), await several.start(Told(), terms=BRIEF)
    writer = await written(a, meta(several.clock), 2)
    await crash(a)
    await orphaned(b, writer.stream_id)
    await reconnected(b)
    assert await b.claim_orphan(writer.stream_id) is None

    async def claimed() -> bool:
        return await b.claim_orphan(writer.stream_id) is not None

    await eventually(claimed, "the term to be over")


async def test_lease_lost_to_an_outage_is_taken_up_again(either: Processes) -> None:
    """Who could not renew because the store was away goes on writing, as long as nobody has claimed (I6)."""
    told = Told()
    a = await either.start(told)
    writer = await written(a, meta(either.clock), 2)
    process = a._lease.process
    a._hurry.clear()
    either.delete(":lease:")
    await reconnected(a)
    await until(lambda: either.keys(":lease:"), "the lease to be taken up again")
    await writer.say("on")
    assert (a._lease.process, told.gone) == (process, [])


class Child:
    """A gateway's journal in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.stream_id = ""

    async def told(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(await asyncio.wait_for(self.process.stdout.readline(), 20))

    async def ask(self, text: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n".encode())
        return await self.told()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)


@asynccontextmanager
async def child(several: Processes) -> AsyncIterator[Child]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.redis_child",
        several.server.url(several.prefix),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    one = Child(process)
    try:
        one.stream_id = (await one.told())["stream_id"]
        yield one
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_killed_process_loses_its_stream_within_a_lease(several: Processes) -> None:
    """SIGKILL: what was appended is there, and the stream is claimed under the next epoch."""
    b = await several.start(Told(), terms=BRIEF)
    async with child(several) as killed:
        assert (await killed.ask("second"))["did"] == "ok"
        killed.signal(signal.SIGKILL)
        reader = Reader(b, killed.stream_id)
        await reader.has(3)
        await orphaned(b, killed.stream_id)
        orphan = await b.claim_orphan(killed.stream_id)
        assert orphan is not None
        heir = Writer(b, killed.stream_id, reader.frames, orphan.state.epoch)
        await heir.finish()
        await reader.over()
        assert [Record.of(frame).event for frame in reader.frames] == ["start", "token", "token", "done"]


async def test_paused_process_wakes_up_fenced(several: Processes) -> None:
    """SIGSTOP past the lease, then SIGCONT: it is refused, and nothing of it is merged (I2)."""
    b = await several.start(Told(), terms=BRIEF)
    async with child(several) as paused:
        paused.signal(signal.SIGSTOP)
        await orphaned(b, paused.stream_id)
        orphan = await b.claim_orphan(paused.stream_id)
        assert orphan is not None
        frames = await read_all(b, paused.stream_id)
        heir = Writer(b, paused.stream_id, frames, orphan.state.epoch)
        await heir.say("the heir's")
        paused.signal(signal.SIGCONT)
        assert (await paused.ask("late"))["did"] == "stale_writer"
        assert (await paused.ask("later"))["did"] == "stale_writer"
        await heir.finish()
        assert await read_all(b, paused.stream_id) == heir.frames


async def test_paused_process_gives_up_what_nobody_claimed(several: Processes) -> None:
    """It cannot know that nobody did: after its lease it is refused all the same, and the stream is an orphan."""
    b = await several.start(Told(), terms=BRIEF)
    async with child(several) as paused:
        paused.signal(signal.SIGSTOP)
        await orphaned(b, paused.stream_id)
        paused.signal(signal.SIGCONT)
        while (told := await paused.ask("late"))["gone"] == []:
            assert told["did"] == "ok"  # until it has noticed; nobody else writes
        assert told["gone"] == [paused.stream_id]
        assert (await paused.ask("later"))["did"] == "stale_writer"
        assert await b.orphans() == [paused.stream_id]


async def test_refused_writer_reads_on_from_the_store(either: Processes) -> None:
    """Readers of a gateway that lost its lease go on, with what the store has."""
    told = Told()
    a, b = await either.start(told, terms=BRIEF), await either.start(Told(), terms=BRIEF)
    writer = await written(a, meta(either.clock), 3)
    reader = Reader(a, writer.stream_id)
    await reader.has(3)
    either.delete(f":lease:{a._lease.process}")
    await until(lambda: told.gone, "the renewal to find the lease gone")
    with pytest.raises(StaleWriter):
        await writer.say("late")
    orphan = await b.claim_orphan(writer.stream_id)
    assert orphan is not None
    heir = Writer(b, writer.stream_id, writer.frames, orphan.state.epoch)
    await heir.say("on")
    await heir.finish()
    await reader.over()
    assert reader.frames == heir.frames
