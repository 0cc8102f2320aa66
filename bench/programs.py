"""The two C programs: built when their source is newer; they answer with one line, of JSON or a port."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.machine import BUILD, cores, pinned


class Listening(Protocol):
    """A server process on loopback."""

    @property
    def port(self) -> int: ...
    @property
    def pid(self) -> int: ...


class LoadFailed(Exception):
    """The load client could not do its work: the figure would be none."""


def program(name: str) -> Path:
    """The built program, compiled first where that is due.  Raises SystemExit without a C compiler."""
    source, built = Path(__file__).with_name(f"{name}.c"), BUILD / name
    newest = max(path.stat().st_mtime for path in (source, *source.parent.glob("*.h")))
    if not built.exists() or built.stat().st_mtime < newest:
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise SystemExit("The benchmarks need a C compiler (cc, gcc or clang), and none was found.")
        BUILD.mkdir(exist_ok=True)
        subprocess.run([compiler, "-O2", "-Wall", "-Wextra", "-o", str(built), str(source)], check=True)
    return built


@dataclass(frozen=True)
class Load:
    """What the load client saw in its window.  Times are microseconds unless named otherwise."""

    seen: dict[str, Any]

    @property
    def frames(self) -> int:
        return int(self.seen["frames"])

    @property
    def gaps(self) -> int:
        return int(self.seen["gaps"])

    @property
    def seconds(self) -> float:
        return float(self.seen["window_s"])

    @property
    def rate(self) -> float:
        """Frames a second."""
        return self.frames / self.seconds

    @property
    def cpu_per_frame(self) -> float:
        return float(self.seen["server_cpu_s"]) * 1e6 / self.frames

    @property
    def core(self) -> float:
        """How much of one core the server used."""
        return float(self.seen["server_cpu_s"]) / self.seconds

    @property
    def waited(self) -> float:
        """The share of the window in which server or client could have run and somebody else had its core."""
        return max(float(self.seen["server_wait_s"]), float(self.seen["client_wait_s"])) / self.seconds

    @property
    def server_waited(self) -> float:
        """The same of the server alone, where the client shares its core by design."""
        return float(self.seen["server_wait_s"]) / self.seconds

    def time(self, what: str, quantile: str) -> float:
        """For instance `time("latency_us", "p50")`."""
        return float(self.seen[what][quantile])


@contextmanager
def _listed(lines: Sequence[str]) -> Iterator[str]:
    """The name of a file with these lines."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("".join(f"{line}\n" for line in lines))
        file.flush()
        yield file.name


def load(mode: str, server: Listening, paths: Sequence[str], *, messages: Sequence[str] = (), **flags: object) -> Load:
    """Run the load client on its core, with these flags of its own (`pause_us=3000`: `--pause-us 3000`).

    With `messages` each connection is a WebSocket, which says one of them.

    Raises LoadFailed when connections were refused, cut or never answered.
    """
    with _listed(paths) as listed, _listed(messages) as said:
        command = [str(program("load")), "--mode", mode, "--paths", listed]
        command += ["--messages", said] if messages else []
        for flag, value in {"port": server.port, "pid": server.pid, **flags}.items():
            command += [f"--{flag.replace('_', '-')}", str(value)]
        done = subprocess.run(
            pinned(cores().client, command), stdout=subprocess.PIPE, text=True, timeout=120, check=False
        )
    seen = json.loads(done.stdout) if done.stdout else {"failed": f"exit status {done.returncode}"}
    if "failed" in seen or seen["errors"]:
        raise LoadFailed(f"{mode}: {done.stdout.strip() or seen['failed']}")
    return Load(seen)
