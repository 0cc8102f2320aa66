"""What leases in Redis promise beyond the contract: keys, how long they live, and how little is asked of the store."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator

import orjson
import pytest
import pytest_asyncio
from redis.crc import key_slot

from midstream.pool.leases import Terms, open_leases
from midstream.pool.leases_memory import MemoryLeases
from midstream.pool.leases_redis import RedisLeases
from midstream.pool.leases_scripts import TAGS, tag_of
from midstream.pool.leases_tail import BLOCK
from midstream.testing.clock import ManualClock
from midstream.testing.lease_reading import Reader
from midstream.testing.lease_worker import Worker, new_id
from midstream.testing.patience import until
from tests.leases import redis_leases
from tests.valkeys import Valkey, clustered, valkey


@pytest.fixture(scope="module")
def server() -> Iterator[Valkey]:
    """Of this module's own: it counts what its server does."""
    with valkey() as server:
        yield server


@pytest_asyncio.fixture
async def leases(server: Valkey) -> AsyncIterator[RedisLeases]:
    leases = redis_leases(server.url(uuid.uuid4().hex))
    await leases.open()
    yield leases
    await leases.close()


def blocked(server: Valkey) -> int:
    return int(server.info("clients")["blocked_clients"])


def calls(server: Valkey, name: str) -> int:
    told = server.info("commandstats").get(f"cmdstat_{name}", "calls=0,")
    return int(told.partition(",")[0].removeprefix("calls="))


async def busy(leases: RedisLeases) -> list[Worker]:
    """Requests in every state there is."""
    workers = [await Worker.begin(leases) for _ in range(4)]
    for worker in workers:
        await worker.say("a", "b")
    await leases.flag(workers[1].request)
    await leases.flag(new_id())
    await leases.end(workers[2].generation, marker=True)
    await leases.end(workers[3].generation, marker=False)
    return workers


async def test_every_key_expires(server: Valkey, leases: RedisLeases) -> None:
    """Progress after its retention, the rest after an hour; also the one that interrupts the reading."""
    begun = Worker(leases, new_id(), 100)
    prefix = leases._access.prefix
    await leases._index(begun.generation, begun.request)
    assert len(server.keys(f"{prefix}:*")) == 1, "the index is written first"
    readers = [Reader(leases, worker.request) for worker in await busy(leases)]
    for reader in readers:
        await reader.until(2)
    await until(lambda: blocked(server) == 1, "the XREAD to wait")
    Reader(leases, new_id())
    await until(lambda: server.keys(f"{prefix}:*control*"), "the interrupt")
    terms = Terms()
    longest = {b"progress": terms.retain, b"request": terms.linger, b"held": terms.linger, b"generation": terms.linger}
    keys = server.keys(f"{prefix}:*")
    kinds = {key.split(b"pool:")[1].partition(b":")[0] for key in keys}
    assert kinds == {*longest, b"control"}
    for key in keys:
        kind = key.split(b"pool:")[1].partition(b":")[0]
        left = server.ask("PTTL", key) / 1000
        most = longest.get(kind, 60.0)
        assert most - 30 < left <= most, key


async def test_keys_of_a_request_lie_in_one_slot(leases: RedisLeases) -> None:
    """All that one script touches; requests spread over the tags."""
    slots = set()
    for _ in range(200):
        request = new_id()
        keys = leases._space.of_request(request)
        assert len({key_slot(key) for key in keys}) == 1
        assert key_slot(leases._space.channel(tag_of(request))) == key_slot(keys[0])
        slots.add(key_slot(keys[0]))
    assert len(slots) == TAGS


async def test_one_read_waits_for_all_requests(server: Valkey, leases: RedisLeases) -> None:
    """Of a process: a second gateway has its own."""
    readers = [Reader(leases, new_id()) for _ in range(50)]
    await until(lambda: blocked(server) == 1, "one XREAD to wait")
    other = redis_leases(server.url(uuid.uuid4().hex))
    await other.open()
    readers.append(Reader(other, new_id()))
    await until(lambda: blocked(server) == 2, "another process's")
    await other.close()
    await until(lambda: blocked(server) == 1, "it to be gone")


async def test_one_read_waits_for_each_slot_in_use() -> None:
    server = clustered()
    leases = redis_leases(server.url(uuid.uuid4().hex))
    await leases.open()
    requests = [new_id() for _ in range(200)]
    before = blocked(server)
    few = [request for request in requests if tag_of(request) in (1, 2)]
    stops = [leases.watch(request, lambda: None) for request in few]
    await until(lambda: blocked(server) == before + 2, "an XREAD per slot")
    stops += [leases.watch(request, lambda: None) for request in requests]
    await until(lambda: blocked(server) == before + TAGS, "an XREAD for every slot")
    await leases.close()
    await until(lambda: blocked(server) == before, "them to be gone")


async def test_new_watch_interrupts_the_wait(leases: RedisLeases, server: Valkey) -> None:
    """It is not put off until the XREAD under way has waited long enough."""
    first = await Worker.begin(leases)
    stop = leases.watch(first.request, lambda: None)
    loop = asyncio.get_running_loop()
    for _ in range(3):
        await until(lambda: blocked(server) == 1, "an XREAD to wait")
        started = loop.time()
        late = await Worker.begin(leases)
        await late.say("a")
        assert await Reader(leases, late.request).until(1) == ["a"]
        woken = asyncio.Event()
        leases.watch(late.request, woken.set)
        await late.say("b")
        await asyncio.wait_for(woken.wait(), BLOCK)
        assert loop.time() - started < BLOCK
    stop()


async def test_request_that_is_watched_anew_is_read_from_its_beginning(leases: RedisLeases, server: Valkey) -> None:
    """Though the XREAD under way still names it from where it was read to before."""
    worker = await Worker.begin(leases)
    reader = Reader(leases, worker.request)
    await worker.say("a", "b")
    await reader.until(2)
    await until(lambda: blocked(server) == 1, "the XREAD to wait")
    reader.stop()
    woken = asyncio.Event()
    leases.watch(worker.request, woken.set)
    last = {"generation": worker.generation, "seq": 3, "content": "c", "reasoning": "", "worker": "w", "model": "m"}
    fields = [part for pair in last.items() for part in pair]
    server.ask("XADD", leases._space.progress(worker.request), "*", *fields)  # before the XREAD can be interrupted
    await asyncio.wait_for(woken.wait(), BLOCK)
    await until(lambda: blocked(server) == 1, "the next XREAD to wait")
    told = [entry.content for _, entry in await leases.entries(worker.request, "")]
    assert told == ["a", "b", "c"]


async def test_relay_that_keeps_up_asks_the_store_for_nothing(server: Valkey, leases: RedisLeases) -> None:
    """What the one XREAD brought is taken from there, and no post asks for anything but its script."""
    worker = await Worker.begin(leases, max_bytes=10_000)
    reader = Reader(leases, worker.request)
    await worker.say("warm")
    await reader.until(1)
    await until(lambda: blocked(server) == 1, "the XREAD to wait again")
    before = {name: calls(server, name) for name in ("xrange", "get", "evalsha", "publish")}
    for n in range(50):
        await worker.say(str(n))
        await reader.until(n + 2)
    after = {name: calls(server, name) - was for name, was in before.items()}
    assert after == {"xrange": 0, "get": 0, "evalsha": 50, "publish": 0}


async def test_silent_requests_cost_a_read_each_block(server: Valkey, leases: RedisLeases) -> None:
    """However many are watched, and none is woken by it."""
    woken = 0

    def wake() -> None:
        nonlocal woken
        woken += 1

    for _ in range(300):
        leases.watch(new_id(), wake)
    await until(lambda: blocked(server) == 1, "the XREAD to wait")
    await asyncio.sleep(0.1)  # what was started by watching is over
    before = calls(server, "xread")
    await asyncio.sleep(0.4)
    assert calls(server, "xread") - before <= 1
    assert woken == 0


async def test_index_is_renewed_with_the_lease(server: Valkey) -> None:
    """A job longer than the index lives is found to its end, by a gateway that never saw it before too."""
    ahead = 0.0
    prefix = uuid.uuid4().hex
    terms = Terms(term=90, linger=400)
    leases, other = (redis_leases(server.url(prefix), terms, ahead=lambda: ahead) for _ in range(2))
    for each in (leases, other):
        await each.open()
    worker = await Worker.begin(leases)
    key = leases._space.generation(worker.generation)
    server.ask("PEXPIRE", key, 1000)
    await worker.say("a")
    assert server.ask("PTTL", key) <= 1000
    ahead += 31
    assert (await worker.live()).renew
    assert server.ask("PTTL", key) > 390_000
    worker.leases = other
    await worker.say("b")
    for each in (leases, other):
        await each.close()


async def test_lease_reads_as_json(server: Valkey, leases: RedisLeases) -> None:
    """What an operator sees with a client of the store."""
    worker = await Worker.begin(leases)
    await worker.post(1, "é", "漢")
    told = orjson.loads(server.ask("HGET", leases._space.of_request(worker.request)[0], worker.generation))
    assert told["worker"] == worker.lease.worker
    assert told["model"] == worker.lease.model
    assert told["key"] == worker.lease.key_digest.hex()
    assert (told["seq"], told["bytes"], told["chars"], told["cancelled"]) == (1, 5, 2, False)


async def test_names_of_half_characters_are_mended(leases: RedisLeases) -> None:
    """A worker may call itself anything that JSON can say."""
    worker = Worker(leases, new_id(), 100)
    for name, mended in (("\ud83d", "\ufffd"), ("\0\r\n", "\0\r\n"), ("😀", "😀")):
        lease = Worker(leases, worker.request, 100).lease
        object.__setattr__(lease, "worker", name)
        assert await leases.grant(lease)
        (view,) = [view for view in await leases.held() if view.generation == lease.generation]
        assert view.worker == mended


async def test_message_that_is_no_signal_is_passed_over(leases: RedisLeases, server: Valkey) -> None:
    heard: list[str] = []
    leases.listen(lambda request, _: heard.append(request))
    channel = leases._space.channel(tag_of("request"))
    await until(lambda: server.ask("PUBLISH", channel, b"\xff not JSON") == 1, "the ears to be there")
    for message in (b"[]", b"{}", b"1", orjson.dumps({"request": "request", "kind": "done"})):
        server.ask("PUBLISH", channel, message)
    await until(lambda: heard, "the signal")
    assert heard == ["request"]


def test_leases_lie_where_progress_lies() -> None:
    """In the journal's Redis; for every other journal in this process."""
    clock = ManualClock()
    for url in ("redis://localhost", "valkey://localhost/1?prefix=x", "unix:///run/valkey"):
        assert isinstance(open_leases(url, clock), RedisLeases)
    for url in ("memory:", "sqlite:///x.db"):
        leases = open_leases(url, clock)
        assert isinstance(leases, MemoryLeases)
        assert not leases.shared
    with pytest.raises(ValueError, match="no option"):
        open_leases("redis://localhost?colour=red", clock)
