"""The machine under the figures: what it is, which core does what, and whether somebody else was using it."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

BUILD = Path(__file__).resolve().parent / ".build"

_PACKAGES = ("midstream", "uvloop", "uvicorn", "httptools", "starlette", "aiohttp", "orjson")


class Cores(NamedTuple):
    """Which core the server has to itself, and which the load client and the upstream use."""

    server: int
    client: int
    upstream: int


def cores() -> Cores:
    """With two cores, client and upstream share one: the server's is what is measured."""
    usable = sorted(os.sched_getaffinity(0))
    return Cores(usable[0], usable[min(1, len(usable) - 1)], usable[min(2, len(usable) - 1)])


def pinned(core: int, command: Sequence[str]) -> list[str]:
    """The command, on this core from its first instruction on (threads and children inherit it)."""
    return ["taskset", "-c", str(core), *command]


def describe() -> dict[str, str]:
    """What a reader must know to compare: processor, cores, kernel, Python, versions."""
    about = {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            about[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            about[package] = "not installed"
    return about


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def pss_kb(pid: int) -> int:
    """The process's share of memory in KiB (its own pages whole, shared ones divided)."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    raise RuntimeError("the kernel tells no Pss")


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads that live, to the nanosecond (`/proc/PID/stat` counts in 10 ms)."""
    return _scheduled(pid, 0)


def wait_seconds(pid: int) -> float:
    """Time in which threads that live could have run, and somebody else had their core."""
    return _scheduled(pid, 1)


def _scheduled(pid: int, column: int) -> float:
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[column]) for thread in threads) / 1e9


def stolen_ticks() -> int:
    """Ticks of 10 ms the hypervisor has given to others since boot, over all cores."""
    return int(Path("/proc/stat").read_text().splitlines()[0].split()[8])
