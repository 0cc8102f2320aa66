"""A gateway's process, from its settings to its end: what it is put inside of, what it announces, its exit code.

`serve` and `demo` import it when they run, since it brings the whole server in.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

import uvloop

from midstream.cli.exits import FAILED, OK, USAGE
from midstream.cli.logs import fail, say
from midstream.cli.supervisor import Supervisor, reserved, sharing_is_possible
from midstream.errors import JournalError
from midstream.server.app import Gateway
from midstream.server.serving import serve
from midstream.server.settings import Settings

Within = Callable[[Settings], AbstractAsyncContextManager[Settings]]


def start_workers(loaded: Settings, *, verbose: bool) -> int:
    """Run gateways in processes of their own, on the same ports.  Returns an exit code."""

    async def supervise() -> int:
        gateway = Gateway(loaded, os.environ)  # not to be started: it knows what is wrong with the settings
        if not gateway.journal.traits.shared:
            raise ValueError(f"--workers {loaded.workers} need a journal that they can share: --journal redis://HOST")
        if not sharing_is_possible():
            raise ValueError("--workers: on this system processes cannot share a port")
        with reserved(loaded) as ready:
            host = f"[{ready.host}]" if ":" in ready.host else ready.host
            address = f"http://{host}:{ready.port}"
            return await Supervisor(ready, verbose=verbose).run(lambda: announce(gateway, address, journal=""))

    return exit_code(loaded, supervise())


def start(loaded: Settings, within: Within | None = None, *, page: bool = False) -> int:
    """Run a gateway in this process, inside `within` (what gives it its upstream).  Returns an exit code."""
    return exit_code(loaded, _serve(loaded, within or _as_they_are, page=page))


def exit_code(loaded: Settings, serving: Coroutine[Any, Any, int | None]) -> int:
    """Run it to its end: its own code, or that of what has kept it from running, which is told."""
    try:
        return uvloop.run(serving) or OK
    except ValueError as error:
        return fail(str(error), USAGE)
    except JournalError as error:
        return fail(error.detail, FAILED)
    except OSError as error:
        return fail(f"cannot start: {_reason(loaded, error)}", FAILED)


def _reason(loaded: Settings, error: OSError) -> str:
    """What is wrong with a file or a port, and what to do about a port that is taken."""
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    where = f"{loaded.host}:{loaded.port}"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is in use: stop what listens there, or take another --port (0: any that is free)"
    return f"{where}: {error.strerror}" if error.strerror else str(error)


@contextlib.asynccontextmanager
async def _as_they_are(loaded: Settings) -> AsyncIterator[Settings]:
    yield loaded


async def _serve(loaded: Settings, within: Within, *, page: bool) -> None:
    async with within(loaded) as ready:
        gateway = Gateway(ready, os.environ)
        await serve(gateway, lambda address: announce(gateway, address, journal=_of_journal(gateway), page=page))


def _of_journal(gateway: Gateway) -> str:
    """What is to be known of the journal of a gateway that has started."""
    if not gateway.journal.available():
        return " (does NOT answer; there are no streams until it does)"
    return " (survives a restart)" if gateway.journal.traits.durable else " (is gone when this process ends)"


def announce(gateway: Gateway, address: str, *, journal: str, page: bool = False) -> None:
    """Where it is, what it keeps, and who may use it.  `journal` is said behind the journal's URL."""
    chosen = gateway.settings
    say(f"midstream serves {address}")
    if chosen.grpc_port:
        host = f"[{chosen.host}]" if ":" in chosen.host else chosen.host
        say(f"  gRPC      {host}:{chosen.grpc_port}{' (TLS)' if chosen.grpc_tls_cert else ''}")
    if chosen.upstream:
        say(f"  upstream  {', '.join(chosen.upstream)}")
    if chosen.pool is not None:
        say(f"  pool      {_without_password(chosen.pool)}, for workers that pull")
    say(f"  journal   {_without_password(chosen.journal)}{journal}")
    if chosen.workers > 1:
        say(f"  workers   {chosen.workers} processes on these ports")
    if gateway.keys.open:
        say(f"  keys      none: {'ANYONE who reaches it' if chosen.insecure else 'anyone on this machine'} may use it")
    else:
        say(f"  keys      those in {chosen.keys_file}; each owner sees their own streams")
    if page:
        say(f"\nOpen {address}/ in a browser, ask something, and cut the connection. Ctrl-C ends it.")


def _without_password(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//…@", url)
