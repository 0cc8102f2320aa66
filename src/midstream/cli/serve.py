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
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

import uvloop

from midstream.cli.exits import FAILED, OK, USAGE
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
    return with_settings(args, _start_upstreams)


def with_settings(args: argparse.Namespace, start: Callable[[Settings], int]) -> int:
    """Read the settings, begin the log, and go on.  Returns an exit code."""
    try:
        loaded = settings.load(args, os.environ)
    except ValueError as error:
        return _fail(str(error), USAGE)
    log_to_stderr(verbose=args.verbose)
    return start(loaded)


def _start_upstreams(loaded: Settings) -> int:
    if not loaded.upstream:
        return _fail("no --upstream: name an endpoint such as http://127.0.0.1:8080/v1, or `scripted:`", USAGE)
    return start(loaded)


def start(loaded: Settings, within: Within | None = None, *, page: bool = False) -> int:
    """Run a gateway in this process, inside `within` (what gives it its upstream).  Returns an exit code."""
    try:
        uvloop.run(_serve(loaded, within or _as_they_are, page=page))
    except ValueError as error:
        return _fail(str(error), USAGE)
    except JournalError as error:
        return _fail(error.detail, FAILED)
    except OSError as error:
        return _fail(f"cannot start: {_reason(loaded, error)}", FAILED)
    return OK


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
    say(f"  upstream  {', '.join(chosen.upstream)}")
    say(f"  journal   {_without_password(chosen.journal)} ({kept})")
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


def _fail(message: str, code: int) -> int:
    say(f"midstream: {message}")
    return code


def log_to_stderr(*, verbose: bool) -> None:
    """One line per event, with its time; libraries only from warnings up."""
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    logging.getLogger("midstream").setLevel(logging.DEBUG if verbose else logging.INFO)
