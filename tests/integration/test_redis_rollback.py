"""A store that comes back without what it said was kept: put right by who still has it, or told; never papered over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from midstream.codec import native
from midstream.errors import CursorAhead, ProducerFailed, StoreLost
from midstream.journal.redis import RedisJournal
from midstream.records import Record
from midstream.testing.journal_writer import Writer, meta, read_all, tokens, written
from midstream.testing.patience import eventually, until
from tests.sharing import Failover, Reader, Told, crash, failing_over, processes, refusal_of
from tests.valkeys import BRIEF, valkey

LOST = ProducerFailed("store_lost", "the store came back without the newest records", retryable=True)


@pytest_asyncio.fixture
async def failover() -> AsyncIterator[Failover]:
    async with failing_over() as made:
        yield made


async def everything(reader: Reader, journal: RedisJournal, writer: Writer) -> list[bytes]:
    """All it was given until its end; where it was told of an error, with what it is given when it comes back."""
    await reader.over()
    if reader.error is None:
        return reader.frames
    again = Reader(journal, writer.stream_id, len(reader.frames))
    await again.over()
    assert again.error is None
    return reader.frames + again.frames


async def test_restart_that_loses_nothing_is_not_noticed() -> None:
    """SIGKILL with every write on disk: writers and readers go on, and the stream stays fit to be continued."""
    with valkey(appendonly="yes", appendfsync="always") as server:
        async with processes(server) as several:
            a, b = await several.start(terms=BRIEF), await several.start(Told(), terms=BRIEF)
            writer = await Writer.begin(a, meta(several.clock), ["ada/idem/K"])
            await writer.say("before")
            readers = [Reader(journal, writer.stream_id) for journal in (a, b)]
            for reader in readers:
                await reader.has(2)
            server.kill()
            server.start()
            await until(lambda: a.available() and b.available(), "the store to be back")
            await writer.say("after")
            tail = a._tails.get(writer.stream_id)
            assert tail is not None
            await until(lambda: tail.run == server.info("server")["run_id"], "the writer to have looked after it")
            await crash(a)

            async def orphan() -> bool:
                claim = await b.claim_orphan(writer.stream_id)
                if claim is not None:
                    assert claim.intact
                return claim is not None

            await eventually(orphan, "the lease to run out")
            heir = Writer(b, writer.stream_id, writer.frames, 2)
            await heir.finish()
            assert await everything(readers[1], b, heir) == heir.frames
            assert await b.find("ada/idem/K") == writer.stream_id
            await readers[0].leave()


async def test_store_that_lost_everything_is_given_it_again() -> None:
    """Restarted empty: a living writer that has all of its stream puts it back, names and all, before it goes on."""
    with valkey() as server:
        async with processes(server) as several:
            a, b = await several.start(), await several.start()
            writer = await Writer.begin(a, meta(several.clock, request=b'{"x":1}'), ["ada/idem/K"])
            await writer.say("one ", "two ")
            silent = await written(a, meta(several.clock), 4)
            readers = [Reader(journal, writer.stream_id) for journal in (a, b)]
            for reader in readers:
                await reader.has(3)
                await reader.waits()
            server.kill()
            server.start()
            await until(lambda: a.available() and b.available(), "the store to be back")
            await writer.say("three")
            await writer.finish()
            for reader, journal in zip(readers, (a, b), strict=True):
                assert await everything(reader, journal, writer) == writer.frames
            assert await read_all(b, writer.stream_id) == writer.frames
            state = await b.state(writer.stream_id)
            assert (state.meta.request, state.epoch) == (b'{"x":1}', 1)
            assert await b.find("ada/idem/K") == writer.stream_id

            async def there() -> bool:
                return await refusal_of(b.state(silent.stream_id)) == "nothing"

            await eventually(there, "the silent stream, whose writer says nothing")
            assert await read_all(b, silent.stream_id) == silent.frames


async def test_what_is_not_held_any_more_is_lost_by_name() -> None:
    """Restarted empty, and a part of the answer was let go: the writer hears StoreLost; no stream begins in between."""
    with valkey() as server:
        async with processes(server) as several:
            journal = await several.start()
            writer = await written(journal, meta(several.clock), 9)
            await journal.trim(writer.stream_id, 5, None)
            server.kill()
            server.start()
            await until(journal.available, "the store to be back")
            with pytest.raises(StoreLost):
                await writer.say("on")
            assert several.keys(":log:") == []


async def test_lagging_replica_is_given_what_it_lacks(failover: Failover) -> None:
    """Fail-over to a replica without the last three records: the writer puts them back, byte for byte, and goes on."""
    a, b = await failover.start(), await failover.start()
    writer = await written(a, meta(failover.clock), 10)
    silent = await written(a, meta(failover.clock), 5)
    await failover.cut_off()
    await writer.say("a")
    await writer.say("b", "c")
    await silent.say("unseen")
    readers = [Reader(journal, writer.stream_id) for journal in (a, b)]
    for reader in readers:
        await reader.has(13)
        await reader.waits()
    failover.fail_over()
    await until(lambda: a.available() and b.available(), "the replica to be met")
    await writer.say("on")
    await writer.finish()
    for reader in readers:
        await reader.over()
        assert reader.frames == writer.frames
    assert await read_all(b, writer.stream_id) == writer.frames

    async def put_back() -> bool:
        return (await b.state(silent.stream_id)).highest_seq == 6

    await eventually(put_back, "the silent stream's record")
    assert await read_all(b, silent.stream_id) == silent.frames


async def test_writer_that_cannot_put_back_ends_its_stream(failover: Failover) -> None:
    """It hears where the stream ends now, can end it there, and readers further on are told that they are (I8)."""
    a, b = await failover.start(Told()), await failover.start(Told())
    writer = await written(a, meta(failover.clock), 10)
    await failover.cut_off()
    for text in ("a", "b", "c"):
        await writer.say(text)
    readers = {position: Reader(b, writer.stream_id, position) for position in (9, 11, 12, 13)}
    await readers[9].has(4)
    for reader in readers.values():
        await reader.waits()
    tail = a._tails.get(writer.stream_id)
    assert tail is not None
    tail.shrink(1)  # as if the records had gone for space
    failover.fail_over()
    await until(lambda: a.available() and b.available(), "the replica to be met")
    with pytest.raises(StoreLost) as lost:
        await writer.say("on")
    assert lost.value.facts["expected"] == 11
    end = native.failed(11, LOST)
    await a.append(writer.stream_id, [end], epoch=1, first_seq=11)
    for reader in readers.values():  # all have been given what is no more, or stand where it was
        await reader.over()
        assert isinstance(reader.error, CursorAhead)
        assert reader.error.highest_seq == 10 or reader.error.highest_seq == 11
    assert (await b.read(writer.stream_id, 0)).frames == [*writer.frames[:10], end]
    resumed = Reader(b, writer.stream_id, 10)
    await resumed.over()
    assert (resumed.frames, resumed.error) == ([end], None)


async def test_take_over_after_a_fail_over_is_known_to_be_unsafe(failover: Failover) -> None:
    """The writer is gone and so is its server: what the replica has may be short, so nobody continues it (I8)."""
    terms = replace(BRIEF, mend=0.3)
    a, b = await failover.start(terms=terms), await failover.start(Told(), terms=terms)
    writer = await written(a, meta(failover.clock), 10)
    await failover.cut_off()
    await writer.say("unreplicated")
    reader = Reader(b, writer.stream_id, 0)
    await reader.has(11)
    await crash(a)
    failover.fail_over()
    await until(b.available, "the replica to be met")
    assert await b.claim_orphan(writer.stream_id) is None  # the living have not had their time to renew
    claims = []

    async def claimed() -> bool:
        claims.append(await b.claim_orphan(writer.stream_id))
        return claims[-1] is not None

    await eventually(claimed, "the term to be over")
    assert claims[-1] is not None
    assert not claims[-1].intact
    seq = claims[-1].state.highest_seq + 1
    assert seq == 11
    await b.append(writer.stream_id, [native.failed(seq, LOST)], epoch=claims[-1].state.epoch, first_seq=seq)
    await reader.over()
    assert isinstance(reader.error, CursorAhead)
    page = await b.read(writer.stream_id, 10)
    assert [Record.of(frame).event for frame in page.frames] == ["failed"]
    assert page.ends


async def test_epoch_given_out_twice_fences_all_the_same(failover: Failover) -> None:
    """The replica missed a take-over: the epoch that another process then gets is not good for the first one (I2)."""
    terms = replace(BRIEF, renew=0.1)
    a, b, c = [await failover.start(Told(), terms=terms) for _ in range(3)]
    writer = await written(a, meta(failover.clock), 3)
    await failover.cut_off()
    await crash(a)
    claims = []

    async def claimed_by(journal: RedisJournal) -> bool:
        claims.append(await journal.claim_orphan(writer.stream_id))
        return claims[-1] is not None

    await eventually(lambda: claimed_by(b), "the first lease to run out")
    heir = Writer(b, writer.stream_id, writer.frames, 2)
    await heir.say("by the first heir")
    failover.fail_over()
    await until(lambda: b.available() and c.available(), "the replica to be met")
    state = await c.claim(writer.stream_id)
    assert state.epoch == 2
    with pytest.raises(Exception, match="claimed") as refused:
        await heir.say("more")
    assert refused.value.code == "stale_writer"  # type: ignore[attr-defined]  # a MidstreamError
    await c.append(writer.stream_id, tokens(4, ["by the second heir"]), epoch=2, first_seq=4)
    frames = await read_all(c, writer.stream_id)
    assert [Record.of(frame).json().get("delta") for frame in frames[3:]] == ["by the second heir"]
    await asyncio.sleep(0)


async def test_end_that_the_replica_missed_is_given_to_it(failover: Failover) -> None:
    """A stream that has ended is looked after too: nobody waits for an end that was reached, and lost."""
    a, b = await failover.start(), await failover.start()
    writer = await written(a, meta(failover.clock), 10)
    await failover.cut_off()
    await writer.say("last")
    await writer.finish()
    failover.fail_over()

    async def ended() -> bool:
        return (await b.state(writer.stream_id)).status == "done"

    await eventually(ended, "the end to be put back")
    assert await read_all(b, writer.stream_id) == writer.frames


async def test_ended_stream_that_is_all_gone_comes_back_ended() -> None:
    """Restarted empty: a finished answer is still there for who resumes it, as long as its gateway holds it."""
    with valkey() as server:
        async with processes(server) as several:
            a, b = await several.start(), await several.start()
            writer = await Writer.begin(a, meta(several.clock), ["ada/idem/K"])
            await writer.say("one ", "two")
            await writer.finish()
            server.kill()
            server.start()

            async def there() -> bool:
                return await refusal_of(b.state(writer.stream_id)) == "nothing"

            await eventually(there, "the stream to be back")
            await eventually(lambda: b.find("ada/idem/K"), "its name")
            assert await read_all(b, writer.stream_id) == writer.frames
            assert (await b.state(writer.stream_id)).status == "done"


async def test_end_that_nobody_holds_is_no_stream_open_for_ever(failover: Failover) -> None:
    """The process that ended it lives, but has forgotten it: it finds the stream open under its name, and ends it."""
    told = Told()
    a = await failover.start(told)
    writer = await written(a, meta(failover.clock), 10)
    await failover.cut_off()
    await writer.say("last")
    await writer.finish()
    a._tails.pop(writer.stream_id)
    failover.fail_over()
    await until(lambda: told.orphans, "the process to find the stream that it had ended")
    assert await a.orphans() == told.orphans == [writer.stream_id]
    orphan = await a.claim_orphan(writer.stream_id)
    assert orphan is not None
    assert (orphan.state.highest_seq, orphan.intact) == (10, False)
    await a.append(writer.stream_id, [native.failed(11, LOST)], epoch=orphan.state.epoch, first_seq=11)
    assert (await a.state(writer.stream_id)).status == "failed"
    assert await a.orphans() == []


async def test_stream_that_is_being_created_is_no_orphan(failover: Failover) -> None:
    """However often a process asks for its orphans while it begins and ends streams, it never takes its own."""
    a = await failover.start(Told())

    async def ask() -> None:
        for _ in range(60):
            for stream_id in await a.orphans():
                assert await a.claim_orphan(stream_id) is None

    async def live() -> None:
        for _ in range(30):
            writer = await Writer.begin(a, meta(failover.clock))
            await writer.say("x")
            await writer.finish()

    await asyncio.gather(ask(), live(), live())
