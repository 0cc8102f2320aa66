"""The gateway, in front of one or more OpenAI-compatible endpoints. It runs until SIGTERM or Ctrl-C.

    midstream serve --upstream http://127.0.0.1:8080/v1
    midstream serve --upstream scripted:                  a simulation, to try it without a model

A flag can also be set in the environment: --port 8402 is MIDSTREAM_PORT=8402.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

import uvloop

from midstream.cli.exits import FAILED, OK, USAGE
from midstream.cli.supervisor import Supervisor, reserved, sharing_is_possible
from midstream.errors import JournalError
from midstream.server import settings
from midstream.server.app import Gateway
from midstream.server.serving import serve
from midstream.server.settings import Settings

HELP = "run the gateway in front of one or more OpenAI-compatible endpoints"

Within = Callable[[Settings], AbstractAsyncContextManager[Settings]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # Not argparse's own, which would put a dozen lines of flags in front of every complaint.
    parser.usage = "%(prog)s --upstream URL [options]"
    settings.add_arguments(parser)
    parser.add_argument("--verbose", action="store_true", help="log what is of use when looking for a fault")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal.  Nothing goes to stdout; the address and one line per ended stream go to stderr."""
    return with_settings(args, lambda loaded: _start_upstreams(loaded, verbose=args.verbose))


def with_settings(args: argparse.Namespace, start: Callable[[Settings], int]) -> int:
    """Read the settings, begin the log, and go on.  Returns an exit code."""
    try:
        loaded = settings.load(args, os.environ)
    except ValueError as error:
        return fail(str(error), USAGE)
    log_to_stderr(verbose=args.verbose)
    return start(loaded)


def _start_upstreams(loaded: Settings, *, verbose: bool) -> int:
    if not loaded.upstream and loaded.pool is None:
        return fail("no --upstream: name an endpoint such as http://127.0.0.1:8080/v1, or `scripted:`", USAGE)
    if loaded.workers > 1:
        return _start_workers(loaded, verbose=verbose)
    return start(loaded)


def _start_workers(loaded: Settings, *, verbose: bool) -> int:
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
            return await Supervisor(ready, verbose=verbose).run(lambda: announce(gateway, address, page=False))

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
        await serve(gateway, lambda address: announce(gateway, address, page=page))


def announce(gateway: Gateway, address: str, *, page: bool) -> None:
    """Where it is, what it keeps, and who may use it."""
    chosen = gateway.settings
    kept = "survives a restart" if gateway.journal.traits.durable else "is gone when this process ends"
    say(f"midstream serves {address}")
    if chosen.grpc_port:
        host = f"[{chosen.host}]" if ":" in chosen.host else chosen.host
        say(f"  gRPC      {host}:{chosen.grpc_port}{' (TLS)' if chosen.grpc_tls_cert else ''}")
    if chosen.upstream:
        say(f"  upstream  {', '.join(chosen.upstream)}")
    if chosen.pool is not None:
        say(f"  pool      {_without_password(chosen.pool)}, for workers that pull")
    say(f"  journal   {_without_password(chosen.journal)} ({kept})")
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


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def fail(message: str, code: int) -> int:
    say(f"midstream: {message}")
    return code


def log_to_stderr(*, verbose: bool, process: bool = False) -> None:
    """One line per event, with its time, and with `process` by whom; libraries only from warnings up."""
    whose = " %(process)d" if process else ""
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format=f"%(asctime)s{whose} %(levelname)s %(name)s %(message)s"
    )
    logging.getLogger("midstream").setLevel(logging.DEBUG if verbose else logging.INFO)
