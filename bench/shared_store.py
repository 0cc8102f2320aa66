"""What a journal on a shared store costs, beside one in memory; and how soon one gateway has what another one wrote.

The store runs on the load client's core, as the upstream does: what is measured is the gateway, which has its own.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from bench.figures import Budget, Figure
from bench.machine import cores, cpu_seconds
from bench.measurements import Plan, Seen, calmest, compared, costs
from bench.programs import load
from bench.servers import Server, gateway, upstream
from bench.store import Store, store
from bench.ticker import chunk_text, now_us
from midstream.codec import native
from midstream.journal.redis import RedisJournal
from midstream.journal.redis_keys import SHARDS
from midstream.journal.redis_url import parse
from midstream.records import Chunk, StreamMeta

_BESIDE = "memory"
# Streams that are read back, and their chunks.
_REPLAYED, _CHUNKS = 10, 4000


@contextmanager
def _on_a_store() -> Iterator[Server]:
    with store() as running, gateway(running.url) as server:
        yield server


def _fed(server: Server, plan: Plan, streams: int, rate: float, burst: int = 1, reading: Server | None = None) -> Seen:
    """Feed this gateway, and read each stream once: from it, or from another one."""
    names, reading = server.streams(streams), reading or server
    server.feed(names, rate, burst=burst, produced=True)
    paths = reading.paths(names, 1)
    return costs(load("live", reading, paths, conns=streams, first=2, warm=plan.warm, window=plan.window))


def _dearer(plan: Plan, title: str, most: float, measure: Callable[[Server], Seen]) -> list[Figure]:
    """How much more CPU a chunk costs than in memory."""
    figures = {
        "cpu": Figure(title, "CPU per chunk", "µs", beside=_BESIDE),
        "rate": Figure(title, "delivered", "chunks/s", beside=_BESIDE),
        "p50": Figure(title, "append to reader, median", "ms", beside=_BESIDE),
        "p99": Figure(title, "append to reader, p99", "ms", beside=_BESIDE),
        "gaps": Figure(title, "gaps", "ids", budget=Budget(0, of="worst"), beside=_BESIDE),
    }
    compared(plan, figures, measure, ours=_on_a_store, theirs=gateway)
    cpu = figures["cpu"]
    more = [on_store - in_memory for on_store, in_memory in zip(cpu.values, cpu.floor, strict=True)]
    return [Figure(title, "more CPU per chunk", "µs", more, budget=Budget(most)), *figures.values()]


def shared_appends(plan: Plan) -> list[Figure]:
    """200 streams of 100 chunks a second each, an entry of the store for every chunk."""
    title = "shared store, 200 streams × 100 chunks/s"
    return _dearer(plan, title, 25, lambda server: _fed(server, plan, 200, 20_000))


def shared_batches(plan: Plan) -> list[Figure]:
    """25 streams of 100 times eight chunks a second: an entry of the store for every eight."""
    title = "shared store, 25 streams × 100 × 8 chunks/s"
    return _dearer(plan, title, 8, lambda server: _fed(server, plan, 25, 20_000, burst=8))


def shared_delay(plan: Plan) -> list[Figure]:
    """20 streams at 50 tokens a second from an upstream: how much later than with a memory journal a token arrives."""
    title = "shared store, 20 streams × 50 tokens/s"
    body = json.dumps({"prompt": f"tokens={int((plan.warm + plan.window + 5) * 50)} every_us=20000 stamp=1"})

    def measure(server: Server) -> Seen:
        seen = load("live", server, ["/v1/stream"], conns=20, body=body, warm=plan.warm, window=plan.window)
        return {"p50": seen.time("latency_us", "p50") / 1000, "waited": seen.server_waited}

    more = Figure(title, "more delay, median", "ms", beside=_BESIDE, budget=Budget(1.5))
    with upstream() as up:
        for _ in range(plan.rounds):
            in_memory, on_store = calmest(lambda: (_asked(up, None, measure), _shared(up, measure)))
            more.values.append(on_store["p50"] - in_memory["p50"])
            more.floor.append(in_memory["p50"])
            more.waited.append(max(on_store["waited"], in_memory["waited"]))
    return [more]


def _asked(up: Server, journal: str | None, measure: Callable[[Server], Seen]) -> Seen:
    with gateway(journal or "memory:", upstream=up) as server:
        return measure(server)


def _shared(up: Server, measure: Callable[[Server], Seen]) -> Seen:
    with store() as running:
        return _asked(up, running.url, measure)


def foreign_arrival(plan: Plan) -> list[Figure]:
    """20 streams at 50 chunks a second, written by one gateway and read from another one."""
    title = "shared store, 20 streams × 50 chunks/s from another gateway"
    p50 = Figure(title, "append to reader, median", "ms")
    p99 = Figure(title, "append to reader, p99", "ms", budget=Budget(5))
    gaps = Figure(title, "gaps", "ids", budget=Budget(0, of="worst"))
    for _ in range(plan.rounds):
        (seen,) = calmest(lambda: (_from_another(plan),))
        for key, figure in (("p50", p50), ("p99", p99), ("gaps", gaps)):
            figure.values.append(seen[key])
            figure.waited.append(seen["waited"])
    return [p50, p99, gaps]


def _from_another(plan: Plan) -> Seen:
    with store() as running, gateway(running.url, core=cores().client) as writing, gateway(running.url) as reading:
        return _fed(writing, plan, 20, 1000, reading=reading)


def silent_streams(plan: Plan) -> list[Figure]:
    """10,000 open streams on which nothing happens: one look a second, a script call for each tag of the store."""
    title = "shared store, 10,000 silent streams"
    looks = Figure(title, "looks at all of them", "1/s", budget=Budget(1.1))
    core = Figure(title, "gateway", "% of a core")
    of_store = Figure(title, "store", "% of a core")
    for _ in range(plan.rounds):
        with store() as running, gateway(running.url) as server:
            server.streams(10_000)
            time.sleep(plan.warm)
            _watch(running, server, max(plan.window, 3.0), looks, core, of_store)
    return [looks, core, of_store]


def _watch(running: Store, server: Server, seconds: float, looks: Figure, core: Figure, of_store: Figure) -> None:
    calls, began = running.calls("evalsha"), time.monotonic()
    used = [cpu_seconds(pid) for pid in (server.pid, running.pid)]
    time.sleep(seconds)
    passed = time.monotonic() - began
    looks.values.append((running.calls("evalsha") - calls) / SHARDS / passed)
    for figure, pid, before in zip((core, of_store), (server.pid, running.pid), used, strict=True):
        figure.values.append((cpu_seconds(pid) - before) / passed * 100)


def store_replay(plan: Plan) -> list[Figure]:
    """4,000 chunks, each an entry of its own, read from the store by a process that knows nothing of their stream."""
    title = "shared store, replay of 4,000 chunks"
    middle = Figure(title, "first to last, median", "ms", budget=Budget(10))
    worst = Figure(title, "first to last, worst", "ms")
    for _ in range(plan.rounds):
        with store() as running:
            times = asyncio.run(_replays(running))
        middle.values.append(median(times) * 1000)
        worst.values.append(max(times) * 1000)
    return [middle, worst]


async def _replays(running: Store) -> list[float]:
    """Seconds that each stream took."""
    writing, reading = [RedisJournal(parse(running.url), time.time) for _ in range(2)]
    await writing.open()
    await reading.open()
    try:
        names = [f"replayed-{at}" for at in range(_REPLAYED)]
        await asyncio.gather(*(_written(writing, name) for name in names))
        return [await _read(reading, name) for name in names]
    finally:
        await reading.close()
        await writing.close()


async def _written(journal: RedisJournal, name: str) -> None:
    await journal.create(StreamMeta(name, "open", "bench", time.time(), 600.0), [native.start(name, "bench")])
    for seq in range(2, _CHUNKS + 2):
        await journal.append(name, [native.token(seq, Chunk(chunk_text(now_us())))], epoch=1, first_seq=seq)


async def _read(journal: RedisJournal, name: str) -> float:
    began, after = time.perf_counter(), 0
    while after <= _CHUNKS:
        after = (await journal.read(name, after)).last_seq
    return time.perf_counter() - began


SHARED: dict[str, Callable[[Plan], list[Figure]]] = {
    "store": shared_appends,
    "store-batches": shared_batches,
    "store-delay": shared_delay,
    "store-foreign": foreign_arrival,
    "store-silent": silent_streams,
    "store-replay": store_replay,
}
