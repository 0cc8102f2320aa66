"""A store that is away, slow, full or a replica, and lost replies: nothing twice, nothing gone, and a clear word."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from midstream.codec import native
from midstream.errors import JournalError, OutOfSequence, StoreUnavailable
from midstream.journal.redis import RedisJournal
from midstream.journal.redis_url import parse
from midstream.records import Finish, Frame
from midstream.rules import Bounds
from midstream.testing.clock import ManualClock
from midstream.testing.fault_proxy import FaultProxy
from midstream.testing.journal_writer import Writer, meta, read_all, text_of, tokens, written
from midstream.testing.patience import until
from tests.sharing import Processes, Reader, processes, refusal_of
from tests.valkeys import QUICK, redis_journal, shared, valkey


@pytest_asyncio.fixture
async def proxy() -> AsyncIterator[FaultProxy]:
    async with FaultProxy("127.0.0.1", shared().port) as proxy:
        yield proxy


@pytest_asyncio.fixture
async def several() -> AsyncIterator[Processes]:
    async with processes() as made:
        yield made


@pytest_asyncio.fixture
async def journal(several: Processes, proxy: FaultProxy) -> RedisJournal:
    """A journal that reaches its store through the proxy."""
    return await several.start(url=through(proxy, several))


def through(proxy: FaultProxy, several: Processes, **options: str) -> str:
    more = "".join(f"&{name}={value}" for name, value in options.items())
    return f"redis://127.0.0.1:{proxy.port}?prefix={several.prefix}{more}"


async def taken_and_not_told(journal: RedisJournal, proxy: FaultProxy, stream_id: str, batch: list[Frame]) -> None:
    """Append a batch that the store takes, and then is gone before it can say so; return when it is back."""
    await proxy.refuse()
    proxy.lose_reply(stream_id.encode())
    with pytest.raises(StoreUnavailable):
        await journal.append(stream_id, batch, epoch=1, first_seq=4)
    assert proxy.lost
    await proxy.accept()
    await until(journal.available, "the journal to be there again")


# --- replies that are lost --------------------------------------------------------------------------------------------


async def test_append_whose_reply_was_lost_is_written_once(
    journal: RedisJournal, proxy: FaultProxy, several: Processes
) -> None:
    """It is sent again, unchanged, known again, and the writer never hears of it (R3)."""
    writer = await written(journal, meta(several.clock), 3)
    for turn in range(5):
        proxy.lose_reply(writer.stream_id.encode())
        await writer.say(f"a{turn}", f"b{turn}")
        await writer.say("between")
    assert proxy.lost == 5
    await writer.finish()
    assert await read_all(journal, writer.stream_id) == writer.frames
    assert (await journal.state(writer.stream_id)).highest_seq == len(writer.frames)


async def test_every_verb_stands_a_lost_reply(journal: RedisJournal, proxy: FaultProxy, several: Processes) -> None:
    """Create, claim, ack, touch, cancel, expire: done once, and answered as if nothing had happened."""
    told = meta(several.clock)
    mark = told.stream_id.encode()
    proxy.lose_reply(mark)
    created = await journal.create(told, [native.start(told.stream_id, "m")], ["ada/idem/K"])
    assert not created.existed
    writer = Writer(journal, told.stream_id, [native.start(told.stream_id, "m")])
    await writer.say("a", "b", "c")
    proxy.lose_reply(mark)
    assert (await journal.claim(told.stream_id)).epoch == 2
    proxy.lose_reply(mark)
    assert (await journal.trim(told.stream_id, 2, None)).oldest_retained_seq == 3
    assert text_of(await journal.snapshot(told.stream_id)) == "abc"
    several.clock.advance(100)
    proxy.lose_reply(mark)
    await journal.touch(told.stream_id)
    proxy.lose_reply(mark)
    state = await journal.request_cancel(told.stream_id, "client")
    assert (state.status, state.highest_seq, state.epoch) == ("cancelled", 5, 3)
    proxy.lose_reply(mark)
    await journal.expire(told.stream_id)
    assert await journal.find("ada/idem/K") is None
    assert journal.retained_bytes() == 0
    assert proxy.lost == 6


async def test_resets_lose_and_double_nothing(journal: RedisJournal, proxy: FaultProxy, several: Processes) -> None:
    """Connections are pulled while twenty streams are written and read: every reader has every record once."""
    writers = [await Writer.begin(journal, meta(several.clock)) for _ in range(20)]
    readers = [Reader(journal, writer.stream_id) for writer in writers]

    async def write(writer: Writer) -> None:
        for count in range(30):
            await writer.say(f"<{count}>", "…")
        await writer.finish()

    async def pull() -> None:
        for _ in range(8):
            await asyncio.sleep(0.02)
            proxy.reset()

    await asyncio.gather(pull(), *map(write, writers))
    for writer, reader in zip(writers, readers, strict=True):
        await reader.over()
        assert reader.frames == writer.frames


async def test_bytes_in_any_pieces_are_understood(journal: RedisJournal, proxy: FaultProxy, several: Processes) -> None:
    """A reply that comes byte by byte, late, is the same reply."""
    proxy.split = 7
    proxy.delay = 0.002
    writer = await Writer.begin(journal, meta(several.clock))
    await writer.say("né✅🚀", "two\r\n\r\n", "three")
    await writer.finish()
    assert await read_all(journal, writer.stream_id) == writer.frames


# --- the store is away ------------------------------------------------------------------------------------------------


async def test_short_outage_is_not_noticed(journal: RedisJournal, proxy: FaultProxy, several: Processes) -> None:
    """Gone for a moment: what was to be written is written once it is back."""
    writer = await written(journal, meta(several.clock), 3)
    await proxy.refuse()
    proxy.reset()
    saying = asyncio.create_task(writer.say("through"))
    await asyncio.sleep(0.1)
    await proxy.accept()
    await saying
    assert await read_all(journal, writer.stream_id) == writer.frames


async def test_long_outage_is_told_promptly_and_forgotten(
    journal: RedisJournal, proxy: FaultProxy, several: Processes
) -> None:
    """Each verb says StoreUnavailable within its patience, at once when that is over already; and works afterwards."""
    writer = await written(journal, meta(several.clock), 3)
    assert journal.available()
    await proxy.refuse()
    proxy.reset()
    loop = asyncio.get_running_loop()
    verbs: list[Callable[[], Awaitable[object]]] = [
        lambda: journal.state(writer.stream_id),
        lambda: writer.say("lost"),
        lambda: journal.create(meta(several.clock), [native.start("x", "m")]),
        lambda: journal.request_cancel(writer.stream_id, "client"),
        lambda: journal.snapshot(writer.stream_id),
        lambda: journal.find("x"),
        lambda: journal.list("ada"),
        lambda: journal.trim(writer.stream_id, 1, None),
    ]
    for verb in verbs:
        began = loop.time()
        with pytest.raises(StoreUnavailable) as away:
            await verb()
        assert loop.time() - began < QUICK.patience + 0.5
        assert away.value.retry_after >= 1
    began = loop.time()
    for verb in verbs:
        with pytest.raises(StoreUnavailable):
            await verb()
    assert loop.time() - began < QUICK.patience  # known to be away: nobody waits again
    assert not journal.available()
    await proxy.accept()
    await until(journal.available, "the journal to be there again")
    await writer.say("back")
    assert await read_all(journal, writer.stream_id) == writer.frames


async def test_store_that_is_down_at_the_start_is_met_later(proxy: FaultProxy, several: Processes) -> None:
    """A gateway starts without its store, says so, and serves as soon as there is one: no failure is kept."""
    await proxy.refuse()
    journal = await several.start(url=through(proxy, several))
    assert not journal.available()
    with pytest.raises(StoreUnavailable):
        await Writer.begin(journal, meta(several.clock))
    await proxy.accept()
    await until(journal.available, "the journal to be there")
    writer = await written(journal, meta(several.clock), 2)
    assert await read_all(journal, writer.stream_id) == writer.frames


async def test_store_that_does_not_answer_is_no_wait_for_ever(
    journal: RedisJournal, proxy: FaultProxy, several: Processes
) -> None:
    """Connected and silent: the reply's time runs out, the batch is in doubt, and is settled when it is sent again."""
    writer = await written(journal, meta(several.clock), 3)
    proxy.stall()
    began = asyncio.get_running_loop().time()
    batch = tokens(4, ["in doubt"])
    with pytest.raises(StoreUnavailable):
        await journal.append(writer.stream_id, batch, epoch=1, first_seq=4)
    assert asyncio.get_running_loop().time() - began < 3
    proxy.resume()
    await until(journal.available, "the journal to be there again")
    await writer.append([*batch, *tokens(5, ["and more", "behind it"])])
    await writer.finish()
    assert await read_all(journal, writer.stream_id) == writer.frames


async def test_batch_in_doubt_goes_before_anything_newer(
    journal: RedisJournal, proxy: FaultProxy, several: Processes
) -> None:
    """Written, its reply lost, the store gone: what is appended next may begin with it, and it stands once."""
    writer = await written(journal, meta(several.clock), 3)
    batch = tokens(4, ["in doubt"])
    await taken_and_not_told(journal, proxy, writer.stream_id, batch)
    assert (await journal.state(writer.stream_id)).highest_seq == 4
    await writer.append([*batch, native.done(5, Finish("stop"))])
    assert await read_all(journal, writer.stream_id) == writer.frames


async def test_other_content_at_the_place_of_a_doubt_is_refused(
    journal: RedisJournal, proxy: FaultProxy, several: Processes
) -> None:
    """Who does not repeat the batch in doubt hears the number that is next: it stands (R3)."""
    writer = await written(journal, meta(several.clock), 3)
    await taken_and_not_told(journal, proxy, writer.stream_id, tokens(4, ["in doubt"]))
    with pytest.raises(OutOfSequence) as refused:
        await writer.say("something else")
    assert refused.value.expected == 5


async def test_readers_are_told_of_an_outage(journal: RedisJournal, proxy: FaultProxy, several: Processes) -> None:
    """Not at once, and not never: who waits while the store is away for long is closed, to resume elsewhere."""
    other = await several.start()
    ours, foreign = await written(journal, meta(several.clock), 2), await written(other, meta(several.clock), 2)
    readers = [Reader(journal, writer.stream_id) for writer in (ours, foreign)]
    for reader in readers:
        await reader.has(2)
        await reader.waits()
    await proxy.refuse()
    proxy.reset()
    for reader in readers:
        await reader.over()
        assert isinstance(reader.error, StoreUnavailable)
        assert len(reader.frames) == 2


async def test_readers_sit_out_a_short_outage(journal: RedisJournal, proxy: FaultProxy, several: Processes) -> None:
    """Gone and back: what was written elsewhere meanwhile is read, though nobody could tell of it."""
    other = await several.start()
    writer = await written(other, meta(several.clock), 2)
    reader = Reader(journal, writer.stream_id)
    await reader.has(2)
    await reader.waits()
    await proxy.refuse()
    proxy.reset()
    await writer.say("unheard")
    await proxy.accept()
    await reader.has(3)
    await writer.finish()
    await reader.over()
    assert reader.frames == writer.frames


async def test_idle_readers_are_left_in_peace(proxy: FaultProxy, several: Processes) -> None:
    """A time-out for replies is none for silence: no connection is made anew, and the next token arrives."""
    options = {"socket_timeout": "1.5", "socket_connect_timeout": "2"}
    journal = await several.start(url=through(proxy, several, **options))
    other = await several.start()
    writer = await written(other, meta(several.clock), 2)
    reader = Reader(journal, writer.stream_id)
    await reader.has(2)
    await reader.waits()
    await until(lambda: proxy.connections == 3, "a connection for appends, one for the rest, and one that listens")
    await asyncio.sleep(2.0)  # longer than a reply may take
    assert proxy.connections == 3
    await writer.say("at last")
    await reader.has(3)
    await reader.leave()


# --- the store refuses ------------------------------------------------------------------------------------------------


async def test_full_store_is_told_and_nothing_is_half_written() -> None:
    """Out of memory: the append is refused as a whole, the stream is as it was, and goes on once there is room."""
    with valkey() as server:
        async with processes(server) as several:
            journal = await several.start()
            writer = await written(journal, meta(several.clock), 3)
            before = await journal.state(writer.stream_id)
            server.ask("CONFIG", "SET", "maxmemory", "1")
            with pytest.raises(StoreUnavailable, match="OOM"):
                await writer.say("no room")
            with pytest.raises(StoreUnavailable, match="OOM"):
                await journal.create(meta(several.clock), [native.start("x", "m")])
            assert await journal.state(writer.stream_id) == before
            assert await read_all(journal, writer.stream_id) == writer.frames
            server.ask("CONFIG", "SET", "maxmemory", "0")
            await writer.say("room again")
            assert await read_all(journal, writer.stream_id) == writer.frames


async def test_replica_is_no_store() -> None:
    """READONLY is StoreUnavailable, and passes when the server is the primary again."""
    with valkey() as server, valkey() as primary:
        async with processes(server) as several:
            journal = await several.start()
            writer = await written(journal, meta(several.clock), 3)
            server.ask("REPLICAOF", "127.0.0.1", primary.port)
            with pytest.raises(StoreUnavailable):
                await writer.say("refused")
            await until(lambda: not journal.available(), "the replica to be shunned")
            server.ask("REPLICAOF", "NO", "ONE")
            await until(journal.available, "the server to be a primary again")
            assert await refusal_of(journal.create(meta(several.clock), [native.start("x", "m")])) == "nothing"


async def test_flushed_scripts_are_loaded_again(journal: RedisJournal, several: Processes) -> None:
    """A server that forgot the scripts is given them."""
    writer = await written(journal, meta(several.clock), 3)
    several.server.ask("SCRIPT", "FLUSH")
    await writer.say("on")
    several.server.ask("SCRIPT", "FLUSH")
    await journal.trim(writer.stream_id, 2, None)
    assert await read_all(journal, writer.stream_id, 2) == writer.frames[2:]


async def test_eviction_by_the_store_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """A store that deletes keys when it is full deletes parts of streams; one that does not is not spoken of."""
    with valkey(maxmemory_policy="allkeys-lru", maxmemory="100mb") as server:
        async with processes(server) as several:
            await several.start()
    assert "maxmemory-policy is allkeys-lru" in caplog.text
    caplog.clear()
    async with processes() as several:
        await several.start()
    assert "maxmemory-policy" not in caplog.text


async def test_keys_deleted_behind_our_back_are_a_loss(several: Processes) -> None:
    """A stream of which parts are gone is StoreLost by name: never unknown, never empty, never later records (I4)."""
    a, b = await several.start(), await several.start()
    for key in ("stream", "log"):
        writer = await written(a, meta(several.clock), 9)
        several.server.ask("DEL", getattr(a._space.of_stream(writer.stream_id, "ada"), key))
        assert await refusal_of(b.read(writer.stream_id, 3)) == "store_lost"
        assert await refusal_of(b.snapshot(writer.stream_id)) == "store_lost"
    assert await refusal_of(b.state(writer.stream_id)) == "nothing"


async def test_deleted_records_are_named_for_who_needs_them(several: Processes) -> None:
    """The last three of ten are gone, the producer goes on with 11: position 7 hears of 8, position 10 is given 11."""
    a, b = await several.start(), await several.start()
    writer = await written(a, meta(several.clock), 10)
    log = a._space.log(writer.stream_id)
    for seq in (8, 9, 10):
        several.server.ask("XDEL", log, f"{seq}-0")
    assert await refusal_of(b.read(writer.stream_id, 7)) == "store_lost"
    await writer.say("eleven")
    with pytest.raises(JournalError, match="lost record 8"):
        await b.read(writer.stream_id, 7)
    assert (await b.read(writer.stream_id, 10)).frames == writer.frames[10:]
    reader = Reader(b, writer.stream_id, 7)
    await reader.over()
    assert reader.error is not None
    assert (reader.error.code, reader.frames) == ("store_lost", [])


async def test_log_trimmed_behind_our_back_is_a_loss(several: Processes) -> None:
    """Who reads past what somebody else trimmed is told, at once and while live; nobody starts at what is left."""
    a, b = await several.start(), await several.start()
    writer = await written(a, meta(several.clock), 30)
    several.server.ask("XTRIM", a._space.log(writer.stream_id), "MAXLEN", "5")
    assert await refusal_of(b.read(writer.stream_id, 10)) == "store_lost"
    assert (await b.read(writer.stream_id, 25)).frames == writer.frames[25:]


async def test_eviction_by_us_is_expired_not_lost(several: Processes) -> None:
    """Records that went for space, under the bounds, are told as that, with the oldest there is: live and on resume."""
    a, b = await several.start(bounds=Bounds(max_stream_records=10)), await several.start()
    writer = await written(a, meta(several.clock), 5)
    page = await b.read(writer.stream_id, 3)
    assert page.last_seq == 5
    for _ in range(30):
        await writer.say("x")
    page = await b.read(writer.stream_id, 3)
    assert (page.frames, page.oldest_retained_seq) == ([], 26)


# --- getting in -------------------------------------------------------------------------------------------------------


async def test_user_and_password_come_by_url() -> None:
    """An ACL user gets in with what is listed for it; the wrong password is told at the start, without quoting it."""
    with valkey() as server:
        server.ask("ACL", "SETUSER", "mid", "on", ">p%40ss", "~ms:*", "&ms:*", *["+@all", "-@admin"])
        server.ask("ACL", "SETUSER", "default", "off")
        good = f"redis://mid:p%2540ss@127.0.0.1:{server.port}/0?prefix=ms"
        journal = redis_journal(good, "ms")
        await journal.open()
        try:
            writer = await written(journal, meta(ManualClock()), 4)
            await writer.finish()
            assert await read_all(journal, writer.stream_id) == writer.frames
        finally:
            await journal.close()
        bad = redis_journal(good.replace("p%2540ss", "wrong"), "ms")
        with pytest.raises(JournalError, match="will not let us in") as refused:
            await bad.open()
        assert "wrong" not in str(refused.value)


async def test_database_is_the_urls(several: Processes) -> None:
    """`/3` keeps apart what lies in other databases."""
    server = several.server
    journal = await several.start(url=f"redis://127.0.0.1:{server.port}/3?prefix={several.prefix}")
    await written(journal, meta(several.clock), 2)
    assert several.keys() == []


async def test_unix_socket_is_a_place(tmp_path_factory: pytest.TempPathFactory) -> None:
    """`unix://PATH` reaches a server that listens nowhere else."""
    path = tmp_path_factory.mktemp("s") / "v.sock"
    with valkey(unixsocket=str(path)):
        journal = redis_journal(f"unix://{path}", "ms")
        await journal.open()
        try:
            writer = await written(journal, meta(ManualClock()), 2)
            assert await read_all(journal, writer.stream_id) == writer.frames
        finally:
            await journal.close()


async def test_what_is_no_server_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    """Something else listens there: verbs fail, the log says what is wrong, and nothing hangs."""

    async def babble(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    journal = RedisJournal(parse(f"redis://127.0.0.1:{port}"), ManualClock(), terms=QUICK)
    with caplog.at_level(logging.ERROR):
        await journal.open()
    try:
        assert not journal.available()
        assert await refusal_of(journal.find("x")) == "store_unavailable"
        assert "is no Redis server" in caplog.text
    finally:
        await journal.close()
        server.close()
