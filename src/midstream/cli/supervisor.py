"""`midstream serve --workers N`: several processes on the same ports, and this one, which serves nobody.

Each of them is a gateway like one of several on a shared store (`supervised`).  All listen on the same ports, and the
kernel deals out what comes among those that live (SO_REUSEPORT): one that dies takes no connection with it but its own.
This process keeps the ports, passes on what it is told by signals, and starts another process for one that has died.

They are told through a pipe, which is their standard input, and not by signals: a supervisor of services may send these
to all processes of a service, and a second one means "at once".  The end of the pipe is that of this process; nobody
is then left to start and stop them, so they leave.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from midstream.cli.exits import FAILED, OK
from midstream.server.serving import bound
from midstream.server.settings import Settings

_log = logging.getLogger("midstream")

# What a process is told, a byte each: to drain and end, to end at once, to read the keys again.
LEAVE, NOW, KEYS = b"l", b"n", b"k"
# What it says once it serves, and how many bytes tell the size of what it is handed first.
READY = b"ready\n"
SIZE_BYTES = 4

# A process that has lived for less than _STEADY seconds is replaced after a pause, which grows each time up to the last
# of these: what kills each of them at once is not to keep the machine busy.
_STEADY = 10.0
_PAUSES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0)


def pause_after(short_lives: int) -> float:
    """Seconds to wait before the next process, after so many in a row that did not live long."""
    return _PAUSES[min(short_lives, len(_PAUSES) - 1)]


@contextmanager
def reserved(settings: Settings) -> Iterator[Settings]:
    """The settings with their ports taken for processes to come.  Raises OSError where somebody listens already."""
    with ExitStack() as stack:
        port = stack.enter_context(_reserved(settings.host, settings.port))
        if settings.grpc_port:
            stack.enter_context(_reserved(settings.host, settings.grpc_port))
        yield replace(settings, port=port)


@contextmanager
def _reserved(host: str, port: int) -> Iterator[int]:
    with bound(host, port) as alone:  # refused where others share the port among themselves
        port = alone.getsockname()[1]
    with bound(host, port, shared=True):  # bound and not listening: it gets no connections
        yield port


class Handed(NamedTuple):
    """What a process is told first: its number, and where it and the others meet."""

    settings: Settings
    verbose: bool
    number: int
    directory: Path


class _Process:
    """One that serves: handed its settings, told what to do."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    @classmethod
    async def start(cls, handed: Handed) -> _Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "midstream.cli.supervised",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal is for this process to pass on
        )
        one = cls(process)
        packed = pickle.dumps(handed)
        one.tell(len(packed).to_bytes(SIZE_BYTES, "big") + packed)
        return one

    async def ready(self) -> bool:
        """True once it serves, False when it has ended before."""
        assert self._process.stdout is not None
        return await self._process.stdout.readline() == READY

    def tell(self, what: bytes) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(what)

    async def ended(self) -> int:
        return await self._process.wait()


class Supervisor:
    """`run` it.  The ports of the settings must be `reserved`."""

    def __init__(self, settings: Settings, *, verbose: bool) -> None:
        self._settings = settings
        self._verbose = verbose
        self._living: dict[int, _Process] = {}  # number of the worker -> its process now
        self._leaving = asyncio.Event()
        self._served = False  # all of them have served at the same time
        self._directory = Path()

    async def run(self, serving: Callable[[], None]) -> int:
        """Until all have ended after a signal, or one of the first could not begin.  `serving` is told when all serve.

        Returns an exit code.
        """
        with TemporaryDirectory(prefix="midstream-") as directory:
            self._directory = Path(directory)
            return await self._run(serving)

    async def _run(self, serving: Callable[[], None]) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._leave)
        loop.add_signal_handler(signal.SIGHUP, self._tell_all, KEYS)
        ready: list[asyncio.Future[bool]] = [loop.create_future() for _ in range(self._settings.workers)]
        workers = [asyncio.create_task(self._keep(number, ready[number - 1])) for number in range(1, len(ready) + 1)]
        if all(await asyncio.gather(*ready)):
            self._served = True
            serving()
        else:
            self._leave()
        codes = await asyncio.gather(*workers)
        return OK if self._served and not any(codes) else max((code for code in codes if code > 0), default=FAILED)

    def _leave(self) -> None:
        """The first time in order, then at once."""
        self._tell_all(NOW if self._leaving.is_set() else LEAVE)
        self._leaving.set()

    def _tell_all(self, what: bytes) -> None:
        for process in self._living.values():
            process.tell(what)

    async def _keep(self, number: int, ready: asyncio.Future[bool]) -> int:
        """Have one process after the other be this worker, until it is time to leave.  The last one's exit code."""
        clock, short_lives = asyncio.get_running_loop().time, 0
        while True:
            began = clock()
            handed = Handed(self._settings, self._verbose, number, self._directory)
            process = self._living[number] = await _Process.start(handed)
            if self._leaving.is_set():  # it came while this one was being started
                process.tell(LEAVE)
            begun = await process.ready()
            if not ready.done():
                ready.set_result(begun)
            code = await process.ended()
            del self._living[number]
            if self._leaving.is_set() or not self._served:
                return code
            short_lives = short_lives + 1 if clock() - began < _STEADY else 0
            pause = pause_after(short_lives)
            _log.error("worker %d (pid %d) ended with %d; another in %g s", number, process.pid, code, pause)
            if await _happens(self._leaving.wait(), within=pause):
                return code
            _log.info("worker %d is started again", number)


async def _happens(what: Awaitable[object], within: float) -> bool:
    try:
        async with asyncio.timeout(within):
            await what
    except TimeoutError:
        return False
    return True


def sharing_is_possible() -> bool:
    """Whether several processes can listen on one port here."""
    return hasattr(socket, "SO_REUSEPORT")
