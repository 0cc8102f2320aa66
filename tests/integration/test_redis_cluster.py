"""A cluster of two servers: each stream on the one that has its slot, found there, followed when the slot moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
import pytest_asyncio
from redis.crc import key_slot

from midstream.journal.redis import RedisJournal
from midstream.journal.redis_keys import SHARDS, Space, shard_of
from midstream.journal.redis_scripts import SCRIPTS
from midstream.journal.redis_url import Terms
from midstream.testing.journal_writer import Writer, meta, read_all, text_of, written
from midstream.testing.patience import until
from tests.clusters import Slots, two_nodes
from tests.sharing import Processes, Reader, Told, processes, refusal_of
from tests.valkeys import QUICK, Valkey

# A slot that is being moved answers TRYAGAIN for as long as that takes.
PATIENT = replace(QUICK, patience=5.0, outage=5.0)


class Pair(Slots):
    """Two servers that share the slots, and gateways that know one of them each."""

    def __init__(self, nodes: list[Valkey], several: Processes) -> None:
        super().__init__(nodes)
        self.several = several

    async def start(self, first: int, listener: Told | None = None, terms: Terms = PATIENT) -> RedisJournal:
        url = self.nodes[first].url(self.several.prefix)
        return await self.several.start(listener, url=url, terms=terms)


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Valkey]]:
    with two_nodes() as made:
        yield made


@pytest_asyncio.fixture
async def pair(nodes: list[Valkey]) -> AsyncIterator[Pair]:
    async with processes(nodes[0]) as several:
        yield Pair(nodes, several)


async def test_streams_lie_where_their_slots_are(pair: Pair) -> None:
    """Written, followed, acked, cancelled and listed from gateways that were told one server each."""
    told = Told()
    a, b = await pair.start(0, told), await pair.start(1)
    writers = [await Writer.begin(a, meta(pair.several.clock), [f"ada/idem/{at}"]) for at in range(12)]
    assert {pair.holder(shard_of(writer.stream_id)) for writer in writers} == {0, 1}
    readers = [Reader(b, writer.stream_id) for writer in writers]
    for writer in writers:
        await writer.say("a", "b", "c")
    for reader in readers:
        await reader.has(4)
    for at, writer in enumerate(writers):
        log = a._space.log(writer.stream_id)
        assert pair.nodes[pair.holder(shard_of(writer.stream_id))].ask("EXISTS", log) == 1
        assert await b.find(f"ada/idem/{at}") == writer.stream_id
        state = await b.trim(writer.stream_id, 2, None)
        assert state.oldest_retained_seq == 3
        assert text_of(await b.snapshot(writer.stream_id)) == "abc"
    assert {state.meta.stream_id for state in await b.list("ada")} == {writer.stream_id for writer in writers}
    for writer, reader in zip(writers, readers, strict=True):
        await b.request_cancel(writer.stream_id, "client")
        await reader.over()
        assert reader.frames[:-1] == writer.frames
    await until(lambda: len(told.gone) == 12, "the writers' process to hear of every cancel")
    pair.several.clock.advance(601)
    assert set(await a.sweep()) == {writer.stream_id for writer in writers}
    await until(lambda: b.retained_bytes() == 0, "both to know that nothing is left")


async def test_slot_that_moves_takes_its_streams_with_it(pair: Pair) -> None:
    """While a slot is moved its stream is written and read on: every record once, on the other server in the end."""
    a, b = await pair.start(0), await pair.start(1)
    writer = await Writer.begin(a, meta(pair.several.clock))
    reader = Reader(b, writer.stream_id)
    shard = shard_of(writer.stream_id)
    before = pair.holder(shard)
    moving = asyncio.create_task(pair.move(shard))
    while not moving.done():
        await writer.say("x")
        await asyncio.sleep(0.002)
    await moving
    await writer.say("moved")
    await writer.finish()
    await reader.over()
    assert reader.frames == writer.frames
    assert pair.holder(shard) != before
    assert pair.nodes[pair.holder(shard)].ask("EXISTS", a._space.log(writer.stream_id)) == 1
    assert await read_all(a, writer.stream_id) == writer.frames


async def test_who_listens_follows_a_slot_and_leaves_the_old_server_in_peace(pair: Pair) -> None:
    """It hears of the stream's changes where they are published now, and tries no more where they are not."""
    a, b = await pair.start(0), await pair.start(1)
    writer = await Writer.begin(a, meta(pair.several.clock))
    shard = shard_of(writer.stream_id)
    channel = a._space.channel(shard)
    reader = Reader(b, writer.stream_id)
    await writer.say("x")
    await reader.has(2)
    old = pair.nodes[pair.holder(shard)]
    await pair.move(shard)
    new = pair.nodes[pair.holder(shard)]
    await writer.say("moved")
    await reader.has(3)
    await until(lambda: new.ask("PUBSUB", "SHARDNUMSUB", channel) == [channel, 1], "it to listen there")
    before = old.info("stats")["total_connections_received"]
    for n in range(20):
        await writer.say(str(n))
    await writer.finish()
    await reader.over()
    after = old.info("stats")["total_connections_received"]
    assert int(after) - int(before) <= 2  # this test's own


async def test_new_streams_in_a_moving_slot_are_asked_for(pair: Pair) -> None:
    """A slot half moved has its new keys on the other server already: a redirection for one command is followed."""
    a = await pair.start(0)
    told = meta(pair.several.clock)
    shard = shard_of(told.stream_id)
    slot, old = key_slot(b"%d" % shard), pair.holder(shard)
    source, target = pair.nodes[old], pair.nodes[1 - old]
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", pair.ids[old])
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", pair.ids[1 - old])
    keys = source.ask("CLUSTER", "GETKEYSINSLOT", slot, 100)
    source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
    creating = asyncio.create_task(written(a, told, 3))
    for node in (target, source):
        node.ask("CLUSTER", "SETSLOT", slot, "NODE", pair.ids[1 - old])
    writer = await creating
    assert await read_all(a, told.stream_id) == writer.frames


async def test_server_that_dies_takes_only_its_own_streams(pair: Pair) -> None:
    """Streams on the other one are written and read as if nothing had happened.  The last test of these servers."""
    a = await pair.start(0, terms=QUICK)
    writers: dict[int, Writer] = {}
    while len(writers) < 2:
        writer = await Writer.begin(a, meta(pair.several.clock))
        writers[pair.holder(shard_of(writer.stream_id))] = writer
    pair.nodes[1].kill()
    for _ in range(20):
        await writers[0].say("on")
    assert await read_all(a, writers[0].stream_id) == writers[0].frames
    assert await refusal_of(writers[1].say("lost")) == "store_unavailable"
    assert await refusal_of(a.state(writers[1].stream_id)) == "store_unavailable"


def test_every_key_of_a_stream_has_its_tag() -> None:
    """One slot for all that a script touches, the lease and the channel too, and for each tag one of its own."""
    space = Space("p:x")
    space.clustered = True
    slots = set()
    for at in range(1000):
        stream_id = f"s{{{at}}}"
        shard = shard_of(stream_id)
        keys = [*space.of_stream(stream_id, "{owner}"), space.lease(shard, "process"), space.channel(shard)]
        assert {key_slot(key) for key in keys} == {key_slot(b"%d" % shard)}
        assert space.shard_of_channel(space.channel(shard)) == shard
        slots.add(key_slot(keys[0]))
    assert len(slots) == SHARDS


def test_scripts_name_only_keys_they_were_given() -> None:
    """A key that a script makes up is one that a cluster cannot route: every one comes in KEYS."""
    assert len(SCRIPTS) == 14
    for script in SCRIPTS:
        for call in script.text.split("redis.call(")[1:]:
            arguments = call.split(")")[0].split(",")
            if len(arguments) > 1 and arguments[0] != "publish":
                key = arguments[1].strip()
                assert key in (
                    *("STREAM", "LOG", "BYTES", "FOLD", "HOLDS", "OWNED", "OPEN", "ENDED", "key"),
                    *("KEYS[1]", "KEYS[2]", "KEYS[3]", "KEYS[9]", "KEYS[at]", "KEYS[at + 3]", "ARGV[3]"),
                ), (script.name, call)
