"""The gateway, in front of one or more OpenAI-compatible endpoints. It runs until SIGTERM or Ctrl-C.

    midstream serve --upstream http://127.0.0.1:8080/v1
    midstream serve --upstream scripted:                  a simulation, to try it without a model

A flag can also be set in the environment: --port 8402 is MIDSTREAM_PORT=8402.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from midstream.cli.exits import USAGE
from midstream.cli.logs import fail, log_to_stderr
from midstream.server import settings
from midstream.server.settings import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # Not argparse's own, which would put a dozen lines of flags in front of every complaint.
    parser.usage = "%(prog)s --upstream URL [options]"
    settings.add_arguments(parser)
    parser.add_argument("--verbose", action="store_true", help="log what is of use when looking for a fault")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal.  Nothing goes to stdout; the address and one line per ended stream go to stderr."""
    return with_settings(args, lambda loaded: _start(loaded, verbose=args.verbose))


def with_settings(args: argparse.Namespace, start: Callable[[Settings], int], *, brief: bool = False) -> int:
    """Read the settings, begin the log (`brief` as `logs` has it), and go on.  Returns an exit code."""
    try:
        loaded = settings.load(args, os.environ)
    except ValueError as error:
        return fail(str(error), USAGE)
    log_to_stderr(verbose=args.verbose, brief=brief)
    return start(loaded)


def _start(loaded: Settings, *, verbose: bool) -> int:
    if not loaded.upstream and loaded.pool is None:
        return fail("no --upstream: name an endpoint such as http://127.0.0.1:8080/v1, or `scripted:`", USAGE)
    from midstream.cli import serve_start

    if loaded.workers > 1:
        return serve_start.start_workers(loaded, verbose=verbose)
    return serve_start.start(loaded)
