"""Leases and progress of the worker pool, without HTTP: what a post costs, and when its relay has it.

`python -m bench.pool memory|URL` is the process that is measured, alone on its core: workers that post as fast as they
are answered, then at the rate that the budget names, and a relay for each that reads what it is woken for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import quantiles

import uvloop

from bench.figures import Budget, Figure
from bench.machine import cores, pinned
from bench.measurements import Plan
from midstream.pool.leases import Leases, Terms, open_leases
from midstream.testing.lease_worker import Worker
from tests.valkeys import Valkey

# Requests that are generated at once, each with its relay; workers that wait for an answer at a time.
_REQUESTS, _AT_ONCE = 200, 50
_TEXT = " a few tokens, as a tenth of a second brings them"
EMBEDDED, SHARED = 5000, 3000


def lease_posts(plan: Plan) -> list[Figure]:
    """Progress posts at the leases, in memory and in Valkey, with 200 relays reading."""
    memory = _figures("pool, leases in memory", EMBEDDED, Budget(5))
    for _ in range(plan.rounds):
        _fill(memory, _seen("memory:", EMBEDDED, plan))
    shared = _figures("pool, leases in Valkey", SHARED, None)
    with _store() as url:
        for _ in range(plan.rounds):
            _fill(shared, _seen(url, SHARED, plan))
    return [*memory.values(), *shared.values()]


def _figures(title: str, rate: int, latency: Budget | None) -> dict[str, Figure]:
    return {
        "rate": Figure(title, "posts on one core", "posts/s", budget=Budget(rate, "at least")),
        "cpu": Figure(title, "CPU per post", "µs"),
        "p50": Figure(title, f"post to relay at {rate:,}/s, median", "ms", budget=latency),
        "p99": Figure(title, f"post to relay at {rate:,}/s, p99", "ms"),
    }


def _fill(figures: dict[str, Figure], seen: dict[str, float]) -> None:
    for key, figure in figures.items():
        figure.values.append(seen[key])


@contextmanager
def _store() -> Iterator[str]:
    """A Valkey on the client's core."""
    server = Valkey()
    try:
        os.sched_setaffinity(server.pid, {cores().client})
        yield server.url("bench")
    finally:
        server.close()


def _seen(url: str, rate: int, plan: Plan) -> dict[str, float]:
    """Raises RuntimeError when the process failed."""
    command = [sys.executable, "-m", "bench.pool", url, "--rate", str(rate)]
    command += ["--warm", str(plan.warm), "--window", str(plan.window)]
    done = subprocess.run(pinned(cores().server, command), stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"bench.pool {url}: exit status {done.returncode}")
    seen: dict[str, float] = json.loads(done.stdout)
    return seen


class Relay:
    """Reads what it is woken for, and knows when it had it."""

    def __init__(self, leases: Leases, request: str) -> None:
        self._leases, self._request = leases, request
        self._news = asyncio.Event()
        self.times: list[float] = []
        leases.watch(request, self._news.set)

    async def run(self) -> None:
        position = ""
        while True:
            await self._news.wait()
            self._news.clear()
            for at, entry in await self._leases.entries(self._request, position):
                position = at
                self.times.append(time.perf_counter() - float(entry.reasoning))


async def _post(worker: Worker) -> None:
    worker.seq += 1
    await worker.post(worker.seq, _TEXT, repr(time.perf_counter()))


async def _saturate(workers: list[Worker], seconds: float) -> int:
    """Posts answered while so many workers post without a pause."""
    end = time.perf_counter() + seconds

    async def work(mine: list[Worker]) -> int:
        count = 0
        while time.perf_counter() < end:
            await _post(mine[count % len(mine)])
            count += 1
            await asyncio.sleep(0)  # memory answers without suspending
        return count

    return sum(await asyncio.gather(*(work(workers[at::_AT_ONCE]) for at in range(_AT_ONCE))))


async def _pace(workers: list[Worker], rate: float, seconds: float) -> None:
    """Posts at a steady rate, each on its own."""
    started = time.perf_counter()
    posts: set[asyncio.Task[None]] = set()
    for count in range(int(rate * seconds)):
        if (ahead := started + count / rate - time.perf_counter()) > 0:
            await asyncio.sleep(ahead)
        task = asyncio.create_task(_post(workers[count % len(workers)]))
        posts.add(task)
        task.add_done_callback(posts.discard)
    await asyncio.gather(*posts)


async def _measure(url: str, rate: float, warm: float, window: float) -> dict[str, float]:
    leases = open_leases(url, time.time, Terms(batches=10**9))
    await leases.open()
    workers = [await Worker.begin(leases, max_bytes=10**12) for _ in range(_REQUESTS)]
    relays = [Relay(leases, worker.request) for worker in workers]
    reading = [asyncio.create_task(relay.run()) for relay in relays]
    await _saturate(workers, warm)
    cpu, begun = time.process_time(), time.perf_counter()
    count = await _saturate(workers, window)
    rest = {"rate": count / (time.perf_counter() - begun), "cpu": (time.process_time() - cpu) / count * 1e6}
    await _pace(workers, rate, warm)
    for relay in relays:
        relay.times.clear()
    await _pace(workers, rate, window)
    await asyncio.sleep(0.2)
    times = [seconds * 1000 for relay in relays for seconds in relay.times]
    if len(times) < rate * window:
        raise RuntimeError(f"{len(times)} of {rate * window:.0f} posts reached their relay")
    for task in reading:
        task.cancel()
    await leases.close()
    cuts = quantiles(times, n=100)
    return rest | {"p50": cuts[49], "p99": cuts[98]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pool")
    parser.add_argument("url")
    parser.add_argument("--rate", type=float, default=SHARED)
    parser.add_argument("--warm", type=float, default=0.5)
    parser.add_argument("--window", type=float, default=2.0)
    told = parser.parse_args()
    print(json.dumps(uvloop.run(_measure(told.url, told.rate, told.warm, told.window))))


LEASES: dict[str, Callable[[Plan], list[Figure]]] = {"leases": lease_posts}

if __name__ == "__main__":
    main()
