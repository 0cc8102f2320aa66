"""Two gateways on one store: what one writes the other reads, and what one decides the other respects."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import pytest_asyncio

from midstream import rules
from midstream.codec import native
from midstream.errors import CursorExpired, StaleWriter, UnknownStream
from midstream.journal.redis_keys import shard_of
from midstream.journal.redis_url import Terms
from midstream.records import Record
from midstream.testing.journal_writer import Writer, meta, read_all, seqs, text_of, tokens, written
from midstream.testing.patience import eventually, until
from tests.sharing import Processes, Reader, Told, crash, processes, refusal_of
from tests.valkeys import QUICK, clustered, shared


@pytest_asyncio.fixture(params=["server", "cluster"])
async def several(request: pytest.FixtureRequest) -> AsyncIterator[Processes]:
    async with processes(shared() if request.param == "server" else clustered()) as made:
        yield made


async def test_foreign_appends_arrive_at_once(several: Processes) -> None:
    """What another gateway writes is told, not found by looking: a hundred tokens take a hundred short waits."""
    a, b = await several.start(), await several.start()
    writer = await Writer.begin(a, meta(several.clock))
    reader = Reader(b, writer.stream_id)
    await reader.has(1)
    await reader.waits()
    loop, waits = asyncio.get_running_loop(), []
    for count in range(2, 102):
        began = loop.time()
        await writer.say("x")
        await reader.has(count)
        waits.append(loop.time() - began)
    await writer.finish()
    await reader.over()
    assert reader.frames == writer.frames
    assert sorted(waits)[50] < 0.02  # a look comes only each 0.05 s


@pytest.mark.parametrize("verb", ["request_cancel", "claim", "expire"])
async def test_writer_that_says_nothing_hears_what_is_done_to_its_stream(several: Processes, verb: str) -> None:
    """Cancelled, claimed or forgotten elsewhere: it is told, and does not find it by looking."""
    told, rarely = Told(), replace(QUICK, look=30.0)
    a, b = await several.start(told, terms=rarely), await several.start(Told(), terms=rarely)
    silent, other = await written(a, meta(several.clock), 2), await written(b, meta(several.clock), 2)

    async def heard() -> bool:
        shard = shard_of(silent.stream_id)
        mailbox, sharded = a._space.mailbox(shard, a._lease.process), "SHARD" if a._space.clustered else ""
        return several.server.ask("PUBSUB", f"{sharded}NUMSUB", mailbox)[1] == 1

    await eventually(heard, "the writer's process to listen")
    deeds: dict[str, Callable[[], Awaitable[object]]] = {
        "request_cancel": lambda: b.request_cancel(silent.stream_id, "client"),
        "claim": lambda: b.claim(silent.stream_id),
        "expire": lambda: b.expire(silent.stream_id),
    }
    await deeds[verb]()
    await until(lambda: told.gone, "the writer's process to be told")
    assert told.gone == [silent.stream_id]
    assert await refusal_of(silent.say("late")) in ("stale_writer", "stream_ended", "unknown_stream")
    await other.say("who writes another stream is not concerned")


async def test_thousand_readers_of_a_foreign_stream_cost_one_read(several: Processes) -> None:
    """A process reads once for all its readers."""
    a, b = await several.start(terms=Terms()), await several.start(terms=Terms())
    writer = await Writer.begin(a, meta(several.clock))
    readers = [Reader(b, writer.stream_id) for _ in range(1000)]
    for reader in readers:
        await reader.has(1)
        await reader.waits()
    before = reads(several)
    for _ in range(20):
        await writer.say("x")
    await writer.finish()
    for reader in readers:
        await reader.over()
        assert reader.frames == writer.frames
    assert reads(several) - before <= 45


def reads(several: Processes) -> int:
    """How often the store has been asked for records."""
    return int(several.server.info("commandstats")["cmdstat_xrange"].split("calls=")[1].split(",")[0])


@pytest.mark.parametrize("ended", [True, False])
async def test_replay_of_a_foreign_stream_is_one_read(several: Processes, ended: bool) -> None:
    """However many pages it is handed out in, and however many readers come for it, live or over."""
    a, b = await several.start(), await several.start()
    writer = await written(a, meta(several.clock), 2000)
    if ended:
        await writer.finish()
    await b.state(writer.stream_id)
    before = reads(several)
    for _ in range(3):
        reader = Reader(b, writer.stream_id)
        await reader.has(len(writer.frames))
        assert reader.frames == writer.frames
        await reader.leave()
    assert reads(several) - before <= 3  # one for the records, one or two to know that there are no more


async def test_local_readers_need_nothing_of_the_store(several: Processes) -> None:
    """Who reads what its own gateway writes is served by the reply to the append."""
    journal = await several.start()
    writer = await Writer.begin(journal, meta(several.clock))
    reader = Reader(journal, writer.stream_id)
    await reader.waits()
    trips = journal.round_trips().count
    for _ in range(50):
        await writer.say("x")
    await reader.has(51)
    assert journal.round_trips().count - trips < 50 + 20  # 50 appends, and the looks and renewals meanwhile
    await reader.leave()


async def test_resume_on_another_gateway_before_the_first_token(several: Processes) -> None:
    """A reader that arrives the moment a stream was created elsewhere attaches and waits, every time."""
    a, b = await several.start(), await several.start()
    for _ in range(100):
        writer = await Writer.begin(a, meta(several.clock))
        state = await b.state(writer.stream_id)
        rules.honour(state, 1)
        reader = Reader(b, writer.stream_id, 1)
        await writer.say("first")
        await reader.has(1)
        assert reader.frames == writer.frames[1:]
        await reader.leave()
        await a.expire(writer.stream_id)


async def test_lost_wake_up_costs_one_look(several: Processes) -> None:
    """A message that never comes is made up for by the look, and nothing is skipped."""
    a, b = await several.start(), await several.start()
    writer = await Writer.begin(a, meta(several.clock))
    reader = Reader(b, writer.stream_id)
    await reader.has(1)
    await reader.waits()
    b._store.on_message = lambda channel, message: None
    for node in b._store.nodes():
        node.ears._heard = b._store.on_message
    for count in range(2, 6):
        await writer.say("x")
        await reader.has(count)
    await writer.finish()
    await reader.over()
    assert reader.frames == writer.frames


async def test_only_the_gateway_that_owns_a_stream_may_write_it(several: Processes) -> None:
    """The right epoch is not enough: a process that never had the stream is refused (I2)."""
    a, b = await several.start(), await several.start()
    writer = await written(a, meta(several.clock), 3)
    with pytest.raises(StaleWriter):
        await b.append(writer.stream_id, tokens(4, ["forged"]), epoch=1, first_seq=4)
    assert await read_all(b, writer.stream_id) == writer.frames


async def test_claim_elsewhere_fences_the_writer(several: Processes) -> None:
    """The old writer is refused, is told without asking, and the new one goes on at the next number (R2)."""
    told = Told()
    a, b = await several.start(told), await several.start()
    old = await written(a, meta(several.clock), 3)
    state = await b.claim(old.stream_id)
    assert (state.epoch, state.highest_seq) == (2, 3)
    new = Writer(b, old.stream_id, old.frames, state.epoch)
    await new.say("on")
    await until(lambda: told.gone, "the old writer's process to hear of it")
    assert told.gone == [old.stream_id]
    with pytest.raises(StaleWriter):
        await old.say("late")
    assert await read_all(a, old.stream_id) == new.frames == await read_all(b, old.stream_id)


async def test_cancel_elsewhere_is_heard_before_the_first_token(several: Processes) -> None:
    """A Stop that reaches another gateway ends the stream, wakes the readers everywhere, and the writer's process."""
    told = Told()
    a, b = await several.start(told), await several.start()
    writer = await Writer.begin(a, meta(several.clock))
    here, there = Reader(a, writer.stream_id), Reader(b, writer.stream_id)
    await here.waits()
    await there.has(1)
    state = await b.request_cancel(writer.stream_id, "client")
    assert (state.status, state.highest_seq) == ("cancelled", 2)
    await here.over()
    await there.over()
    assert here.frames == there.frames == [*writer.frames, native.cancelled(2, "client")]
    await until(lambda: told.gone, "the writer's process to hear of it")


async def test_forgotten_elsewhere_is_heard(several: Processes) -> None:
    """A deletion reaches the readers and the writer on other gateways."""
    told = Told()
    a, b = await several.start(told), await several.start()
    writer = await Writer.begin(a, meta(several.clock))
    here = Reader(a, writer.stream_id)
    await here.waits()
    await b.expire(writer.stream_id)
    await here.over()
    assert isinstance(here.error, CursorExpired)
    await until(lambda: told.gone, "the writer's process to hear of it")
    with pytest.raises(UnknownStream):
        await writer.say("late")


async def test_two_first_tries_start_one_generation(several: Processes) -> None:
    """The same name at the same time on two gateways: one wins, the other attaches to it."""
    a, b = await several.start(), await several.start()
    for turn in range(20):
        told = [meta(several.clock) for _ in range(4)]
        made = await asyncio.gather(
            *(
                journal.create(one, [native.start(one.stream_id, "m")], [f"ada/idem/{turn}", f"ada/session/{turn}"])
                for journal, one in zip((a, b, a, b), told, strict=True)
            )
        )
        assert [created.existed for created in made].count(False) == 1
        winner = made[[created.existed for created in made].index(False)].state
        assert {created.state.meta.stream_id for created in made} == {winner.meta.stream_id}
        assert await b.find(f"ada/idem/{turn}") == await a.find(f"ada/session/{turn}") == winner.meta.stream_id


async def test_try_that_died_does_not_block_the_name() -> None:
    """On a cluster a name is reserved first: the second try waits, and replaces a reservation that runs out."""
    async with processes(clustered()) as several:
        a, b = await several.start(), await several.start()
        dead, told = meta(several.clock), meta(several.clock)
        assert await a._names.reserve(["ada/idem/K"], dead.stream_id) is None
        assert await b.find("ada/idem/K") is None
        created = await b.create(told, [native.start(told.stream_id, "m")], ["ada/idem/K"])
        assert not created.existed
        assert await a.find("ada/idem/K") == told.stream_id


async def test_try_that_died_after_creating_is_found() -> None:
    """Created and not yet bound: the second try attaches, and binds the name."""
    async with processes(clustered()) as several:
        a, b = await several.start(), await several.start()
        first, told = meta(several.clock), meta(several.clock)
        assert await a._names.reserve(["ada/idem/K"], first.stream_id) is None
        await a.create(first, [native.start(first.stream_id, "m")])
        key = a._names.key("ada/idem/K")
        created = await b.create(told, [native.start(told.stream_id, "m")], ["ada/idem/K"])
        assert created.existed
        assert created.state.meta.stream_id == first.stream_id
        assert several.server.ask("GET", key) == f"?{first.stream_id}".encode()  # it never said that this was its name


async def test_ack_never_trims_under_a_reader_elsewhere(several: Processes) -> None:
    """A position held on one gateway stops acks on another, until it has moved on or its reader has left (R6)."""
    readers = Told()
    a, b = await several.start(), await several.start(readers)
    writer = await written(a, meta(several.clock), 9)
    readers.readers[writer.stream_id] = 3
    await b.hold(writer.stream_id, 3)
    assert await a.lowest_elsewhere(writer.stream_id) == 3
    assert await b.lowest_elsewhere(writer.stream_id) is None
    state = await a.trim(writer.stream_id, 8, None)
    assert (state.acked_seq, state.oldest_retained_seq, state.trimmed_seq) == (8, 4, 3)
    state = await a.trim(writer.stream_id, 8, 2)
    assert state.oldest_retained_seq == 4
    assert seqs(await read_all(b, writer.stream_id, 3)) == list(range(4, 10))
    await asyncio.sleep(1.0)  # longer than a hold lasts: the journal asks where the reader is, and tells it again
    assert (await a.trim(writer.stream_id, 8, None)).oldest_retained_seq == 4
    readers.readers[writer.stream_id] = 6

    async def told(position: int | None) -> bool:
        return await a.lowest_elsewhere(writer.stream_id) == position

    await eventually(lambda: told(6), "the reader's new position")
    assert (await a.trim(writer.stream_id, 8, None)).oldest_retained_seq == 7
    del readers.readers[writer.stream_id]
    await eventually(lambda: told(None), "the end of the hold")
    state = await a.trim(writer.stream_id, 8, None)
    assert (state.oldest_retained_seq, state.trimmed_seq) == (9, 8)
    assert text_of(await b.snapshot(writer.stream_id)) == "word " * 8


async def test_hold_of_a_dead_gateway_runs_out(several: Processes) -> None:
    """Nobody waits for ever for a reader whose gateway is gone."""
    a, b = await several.start(), await several.start()
    writer = await written(a, meta(several.clock), 9)
    await b.hold(writer.stream_id, 2)
    await crash(b)
    assert (await a.trim(writer.stream_id, 8, None)).oldest_retained_seq == 3

    async def trimmed() -> bool:
        return (await a.trim(writer.stream_id, 8, None)).oldest_retained_seq == 9

    await eventually(trimmed, "the hold to run out")


async def test_acks_from_everywhere_keep_the_answer(several: Processes) -> None:
    """Two gateways ack in turn, above and below the size at which the fold is written: the answer stays whole."""
    a, b = await several.start(), await several.start()
    writer = await Writer.begin(a, meta(several.clock))
    said = ""
    for turn in range(30):
        texts = [f"<{turn}:{at}>" * 12 for at in range(40)]
        said += "".join(texts)
        await writer.say(*texts)
        acker = (a, b)[turn % 2]
        await acker.trim(writer.stream_id, writer.next_seq - 1 - turn % 7, None)
        if turn % 5 == 0:
            assert text_of(await (b, a)[turn % 2].snapshot(writer.stream_id)) == said
    await writer.finish()
    assert text_of(await a.snapshot(writer.stream_id)) == text_of(await b.snapshot(writer.stream_id)) == said
    assert int(several.server.ask("XLEN", a._space.log(writer.stream_id))) < 15  # what was folded is gone from the log


async def test_retained_bytes_count_the_whole_store(several: Processes) -> None:
    """What another gateway holds counts for the bound that both have."""
    a, b = await several.start(), await several.start()
    await written(a, meta(several.clock), 20)
    await until(lambda: b.retained_bytes() == a.retained_bytes() > 0, "the other's bytes")


async def test_owner_lists_streams_of_every_gateway(several: Processes) -> None:
    """Newest first, wherever they were made (I9)."""
    a, b = await several.start(), await several.start()
    told = [meta(several.clock, created_at=several.clock() + age) for age in range(3)]
    for journal, one in zip((a, b, a), told, strict=True):
        await Writer.begin(journal, one)
    assert [state.meta for state in await b.list("ada")] == told[::-1]


async def test_every_key_expires_by_itself(several: Processes) -> None:
    """Right after a create and one append by a process that is then killed, no key is there for ever."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.redis_child",
        several.server.url(several.prefix),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdout is not None
    told = json.loads(await asyncio.wait_for(child.stdout.readline(), 20))
    os.kill(child.pid, signal.SIGKILL)
    await child.wait()
    keys = several.keys()
    assert len(keys) - len(several.keys(":lease:")) == 5  # stream, log, owner, open, bytes
    assert any(told["stream_id"].encode() in key for key in keys)
    for key in keys:
        assert several.server.ask("PTTL", key) > 0, key
    retain_and_spare = several.server.ask("PTTL", *several.keys(":log:"))
    assert 895_000 < retain_and_spare <= 900_000


async def test_batches_are_entries_of_the_stream(several: Processes) -> None:
    """One entry per batch, its id the seq of its last record, its first seq inside; large batches make several."""
    journal = await several.start()
    writer = await Writer.begin(journal, meta(several.clock))
    await writer.say("a", "b", "c")
    await writer.say(*["x"] * 700)
    await writer.say(*["y" * 100_000] * 5)
    entries = several.server.ask("XRANGE", journal._space.log(writer.stream_id), "-", "+")
    ranges = [(int(fields[1]), int(entry_id.split(b"-")[0])) for entry_id, fields in entries]
    assert ranges[:4] == [(1, 1), (2, 4), (5, 516), (517, 704)]
    assert all(first == last + 1 for (_, last), (first, _) in pairwise(ranges))
    assert all(last - first < 512 for first, last in ranges)
    assert all(len(fields[3]) <= 256 * 1024 for _, fields in entries)
    assert await read_all(journal, writer.stream_id) == writer.frames
    assert Record.of(writer.frames[-1]).seq == ranges[-1][1]


async def test_trim_is_exact_by_record(several: Processes) -> None:
    """An ack inside an entry leaves the entry and moves the oldest; entries wholly below go with the fold."""
    journal = await several.start()
    writer = await Writer.begin(journal, meta(several.clock))
    for _ in range(4):
        await writer.say(*["z" * 2000] * 10)
    log = journal._space.log(writer.stream_id)
    state = await journal.trim(writer.stream_id, 5, None)
    assert (state.oldest_retained_seq, several.server.ask("XLEN", log)) == (6, 5)
    assert seqs(await read_all(journal, writer.stream_id, 5)) == list(range(6, 42))
    state = await journal.trim(writer.stream_id, 35, None)
    assert state.oldest_retained_seq == 36
    first = several.server.ask("XRANGE", log, "-", "+")[0]
    assert (int(first[1][1]), first[0]) == (32, b"41-0")
    assert seqs(await read_all(journal, writer.stream_id, 35)) == list(range(36, 42))


async def test_refusals_are_the_stores_own_not_the_caches(several: Processes) -> None:
    """State is asked from the store: another gateway's news is told before any message could have come."""
    a, b = await several.start(), await several.start()
    writer = await written(a, meta(several.clock), 3)
    await b.state(writer.stream_id)
    await writer.say("x")
    assert (await b.state(writer.stream_id)).highest_seq == 4
    await a.expire(writer.stream_id)
    assert await refusal_of(b.state(writer.stream_id)) == "unknown_stream"
