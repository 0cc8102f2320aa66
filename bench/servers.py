"""Starting, driving and stopping what is measured: the floor, the gateway, the fake upstream."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.machine import BUILD, cores, pinned
from bench.programs import program
from midstream.cursor import Cursor

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Server:
    """A running server.  Floor and gateway take the same commands below `/bench/`."""

    name: str
    port: int
    pid: int
    grpc_port: int = 0

    def streams(self, count: int, chunks: int = 0, request: str = "{}") -> list[str]:
        """Open streams of a `start` record and this many chunks; `request` is what the gateway keeps with them."""
        names: list[str] = self._command("streams", count=count, chunks=chunks, request=request)
        return names

    def fill(self, streams: Sequence[str], chunks: int) -> None:
        """Append this many chunks to each."""
        self._command("fill", streams=",".join(streams), chunks=chunks)

    def feed(self, streams: Sequence[str], rate: float, *, burst: int = 1, produced: bool = False) -> None:
        """From now on append `rate` chunks a second, to one stream after the other.

        `burst`: so many at a time, as one read of an upstream brings them; `produced`: by a producer of each stream's
        own, on a memory journal too, where else they go straight into it.  (Neither is for the floor.)
        """
        self._command("feed", streams=",".join(streams), rate=rate, burst=burst, produced=produced)

    def fed(self) -> dict[str, Any]:
        """What the feed has offered, and how late its 1 ms timer was each time."""
        told: dict[str, Any] = self._command("fed")
        return told

    def path(self, stream: str, after: int) -> str:
        """Where to read on after this seq."""
        if self.name == "floor":
            return f"/v1/stream/{stream}?after={after}"
        return f"/v1/stream/{stream}?cursor={Cursor(stream, after).encode()}"

    def paths(self, streams: Sequence[str], after: int) -> list[str]:
        return [self.path(stream, after) for stream in streams]

    def messages(self, streams: Sequence[str], after: int) -> list[str]:
        """The same, as what a WebSocket says first."""
        said = {"type": "resume", "ref": "a"}
        return [
            json.dumps(said | {"stream_id": stream, "cursor": Cursor(stream, after).encode()}) for stream in streams
        ]

    def _command(self, verb: str, **fields: object) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/bench/{verb}",
            json.dumps(fields).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)


@contextmanager
def _running(name: str, command: Sequence[str], core: int) -> Iterator[Server]:
    """A process that prints its port once it listens.  Its stderr is kept in the build folder."""
    BUILD.mkdir(exist_ok=True)
    log = BUILD / f"{name}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(pinned(core, command), stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{name} did not start:\n{log.read_text()[-2000:]}")
        yield Server(name, int(line), process.pid)
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def floor() -> Iterator[Server]:
    with _running("floor", [sys.executable, "-m", "bench.floor"], cores().server) as server:
        yield server


@contextmanager
def bare_socket() -> Iterator[Server]:
    with _running("bare", [sys.executable, "-m", "bench.bare_socket"], cores().server) as server:
        yield server


@contextmanager
def bare_http() -> Iterator[Server]:
    with _running("bare", [sys.executable, "-m", "bench.bare_http"], cores().server) as server:
        yield server


@contextmanager
def gateway(
    journal: str = "memory:",
    upstream: Server | None = None,
    heartbeat: float = 15,
    pool: str | None = None,
    core: int | None = None,
) -> Iterator[Server]:
    """The real gateway under `bench/gateway.py`, on a journal of its own: `memory:` or `sqlite:`; or a store's URL.

    `core`: where it runs instead of the server's.
    """
    database = BUILD / "bench.db"
    _remove(database)
    url = f"sqlite:///{database}" if journal == "sqlite:" else journal
    command = [sys.executable, "-m", "bench.gateway", "--journal", url, "--heartbeat", str(heartbeat)]
    if upstream is not None:
        command += ["--upstream", f"http://127.0.0.1:{upstream.port}/v1"]
    if pool is not None:
        command += ["--pool", pool]
    with _running("gateway", command, cores().server if core is None else core) as server:
        yield server
    _remove(database)


@contextmanager
def gateway_with_grpc() -> Iterator[Server]:
    """The real gateway on a memory journal, its gRPC port as well."""
    port = _free_port()
    command = [sys.executable, "-m", "bench.gateway", "--grpc-port", str(port)]
    with _running("gateway", command, cores().server) as server:
        yield replace(server, grpc_port=port)


@contextmanager
def bare_grpc() -> Iterator[Server]:
    port = _free_port()
    command = [sys.executable, "-m", "bench.bare_grpc", "--grpc-port", str(port)]
    with _running("bare", command, cores().server) as server:
        yield replace(server, grpc_port=port)


def _free_port() -> int:
    """A port that nobody listened on a moment ago: to the gateway itself 0 means that gRPC is off."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _remove(database: Path) -> None:
    for path in database.parent.glob(database.name + "*"):
        path.unlink()


@contextmanager
def upstream() -> Iterator[Server]:
    with _running("upstream", [str(program("upstream"))], cores().upstream) as server:
        yield server
