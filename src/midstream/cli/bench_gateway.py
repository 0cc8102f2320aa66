"""The gateway that `midstream bench` measures: this very program, as a process of its own on ports of its own."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

_READY: Final = 20.0  # seconds until it must serve
_GRACE: Final = 5.0  # seconds between asking it to end and ending it
_SECRETS: Final = "MIDSTREAM_UPSTREAM_KEY"


class GatewayFailed(Exception):
    """The gateway did not start; the text is what it said."""


class GatewayProcess:
    """`midstream serve`, an async context manager: `url` and `grpc` (host:port) say where it is."""

    def __init__(self, upstream: str, journal: str) -> None:
        self._upstream = upstream
        self._journal = journal
        self.url = ""
        self.grpc = ""

    async def __aenter__(self) -> Self:
        grpc_port = _free_port()
        # A session of its own: a Ctrl-C in the terminal is for the parent, which then stops it in order.
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "midstream", "serve", "--upstream", self._upstream),
            *("--journal", self._journal, "--port", "0", "--grpc-port", str(grpc_port)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if _passed(name)},
            start_new_session=True,
        )
        self._talk: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(_READY):
                self.url = await self._announced()
        except TimeoutError:
            await self._stop()
            raise GatewayFailed(f"it was not ready within {_READY:g} s") from None
        except BaseException:
            await self._stop()
            raise
        self.grpc = f"127.0.0.1:{grpc_port}"
        self._talk = asyncio.create_task(self._hear())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def _announced(self) -> str:
        assert self._process.stderr is not None
        said = ""
        async for line in self._process.stderr:
            said = line.decode(errors="replace").strip()
            if said.startswith("midstream serves "):
                return said.removeprefix("midstream serves ").split()[0]
        raise GatewayFailed(said.removeprefix("midstream: ") or "it ended without a word")

    async def _hear(self) -> None:
        """Read on, so that it never blocks; what it says about ended streams is of no use here."""
        assert self._process.stderr is not None
        while await self._process.stderr.read(65_536):
            pass

    async def _stop(self) -> None:
        with suppress(ProcessLookupError):
            self._process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(_GRACE):
                await self._process.wait()
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        if self._talk is not None:
            await self._talk


def _passed(name: str) -> bool:
    """A setting in the environment would make it another gateway than the one that is reported."""
    return not name.startswith("MIDSTREAM_") or name.startswith(_SECRETS)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port
