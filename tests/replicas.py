"""Several gateways on one store, each a process of its own: started, paused, killed and drained as operators do it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from midstream.cursor import Cursor
from midstream.testing.patience import soon
from midstream.wire import H_STREAM_ID, TERMINAL

_ADDRESS = re.compile(rb"midstream serves (http://[0-9.:]+)")
_FRAME = re.compile(rb"id: ([0-9]+)\nevent: ([a-z]+)\ndata: (.*)\n\n")


class Replica:
    """`midstream serve` as a process.  It belongs to no event loop, so that tests can share it.

    `module` is what is run in place of `midstream`.
    """

    def __init__(self, journal: str, options: Sequence[str], module: str = "midstream") -> None:
        self._arguments = ["-m", module, "serve", "--port", "0", "--grpc-port", "0", "--journal", journal, *options]
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # it lives as long as this object
        self._began = 0.0
        self.url = ""

    @property
    def log(self) -> bytes:
        """What it has said, and those that were in its place before."""
        return os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start it, or start another one in its place, at another port."""
        said = len(self.log)
        command = [sys.executable, *self._arguments]
        self._process = subprocess.Popen(command, stderr=self._log)  # noqa: ASYNC220  # it is to outlive this loop
        async with asyncio.timeout(30):
            while (found := _ADDRESS.search(self.log, said)) is None:
                assert self.alive, f"the gateway did not start: {self.log[said:].decode()}"
                await asyncio.sleep(0.02)
        self.url = found[1].decode()
        self._began = time.monotonic()

    async def settled(self, lease: float) -> None:
        """Wait until it has known the store for a term: before, it calls nobody gone."""
        await asyncio.sleep(max(0.0, self._began + lease - time.monotonic()))

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def pause(self) -> None:
        """SIGSTOP: it holds everything and does nothing."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM: it drains."""
        self._signal(signal.SIGTERM)

    async def ended(self) -> int:
        """Its exit code, once it has ended."""
        assert self._process is not None
        return await asyncio.to_thread(self._process.wait, 45)

    def kill(self) -> None:
        """SIGKILL, also when it has ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        self.kill()
        self._log.close()


@dataclass(slots=True)
class Visit:
    """What one connection was given: whole frames after `after`, and what did not make one."""

    stream_id: str
    after: int
    status: int = 0
    frames: list[bytes] = field(default_factory=list)
    rest: bytes = b""
    broken: bool = False  # by the connection, not by the gateway

    @property
    def seq(self) -> int:
        return self.after + len(self.frames)

    @property
    def ended(self) -> bool:
        return bool(self.frames) and event_of(self.frames[-1]) in TERMINAL

    def take(self, data: bytes) -> None:
        """Keep the whole frames in it.  They must follow each other from the position on, once each (I3)."""
        self.rest += data
        at = 0
        for found in _FRAME.finditer(self.rest):
            assert int(found[1]) == self.seq + 1, f"after {self.seq} came {found[0]!r}"
            self.frames.append(found[0])
            at = found.end()
        self.rest = self.rest[at:]


def event_of(frame: bytes) -> str:
    return frame.split(b"\n", 2)[1].removeprefix(b"event: ").decode()


class Fleet:
    """Gateways on one journal, and a client of them all.  No connection is used twice: a killed gateway leaves none."""

    def __init__(self, journal: str, *options: str) -> None:
        self._journal = journal
        self._options = options
        self._replicas: list[Replica] = []
        self.session: aiohttp.ClientSession

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Fleet]:
        """With a client for this event loop."""
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self.session:
            yield self

    async def gateways(self, count: int) -> list[Replica]:
        """So many that are alive; who has been signalled before is not among them if it is ending."""
        living = [replica for replica in self._replicas if replica.alive][:count]
        return living + await self.grow(count - len(living))

    async def grow(self, count: int, *options: str) -> list[Replica]:
        """So many more, started at once, with further options."""
        more = [Replica(self._journal, [*self._options, *options]) for _ in range(count)]
        self._replicas += more
        await asyncio.gather(*(replica.start() for replica in more))
        return more

    def close(self) -> None:
        for replica in self._replicas:
            replica.close()

    async def create(self, replica: Replica, model: str, headers: dict[str, str] | None = None, **body: Any) -> str:
        """Begin a stream and leave before its first token."""
        asked = {"prompt": "Hello", "model": model} | body
        async with self.session.post(f"{replica.url}/v1/stream", json=asked, headers=headers) as response:
            assert response.status == 200, await response.text()
            return response.headers[H_STREAM_ID]

    async def read(self, replica: Replica, stream_id: str, after: int = 0, upto: int | None = None) -> Visit:
        """Read what follows a position, to the end of the connection or up to a seq."""
        visit = Visit(stream_id, after)
        path = f"{replica.url}/v1/stream/{stream_id}?cursor={Cursor(stream_id, after).encode()}"
        try:
            async with self.session.get(path) as response:
                visit.status = response.status
                while (upto is None or visit.seq < upto) and (data := await response.content.readany()):
                    visit.take(data)
        except (aiohttp.ClientError, ConnectionError):
            visit.broken = True
        return visit

    async def ask(self, method: str, replica: Replica, path: str, body: Any = None) -> Any:
        """The JSON of an answer that is no error."""
        async with self.session.request(method, f"{replica.url}/v1{path}", json=body) as response:
            assert response.status < 300, (response.status, await response.text())
            return await soon(response.json()) if response.status != 204 else None


@asynccontextmanager
async def fleet(journal: str, *options: str) -> AsyncIterator[Fleet]:
    """No gateway yet; those that are started are killed at the end."""
    running = Fleet(journal, *options)
    try:
        async with running.connected():
            yield running
    finally:
        running.close()
