"""Lend a local model to a pool: pulls jobs from a gateway, runs them here, posts the tokens while they come.

    midstream worker --gateway https://pool.example --upstream http://127.0.0.1:8080/v1

Nothing has to reach this machine from outside. Ctrl-C gives back what is held, a second one ends at once.
"""

from __future__ import annotations

import argparse
import os
import platform

from midstream.cli import exits
from midstream.cli.gateway import add_gateway, key_of
from midstream.cli.logs import log_to_stderr
from midstream.cli.terminal import Console
from midstream.client.surface import address
from midstream.wire import POOL_CONTEXTS, POOL_MOST_THREADS

DEFAULT_LOCAL = "http://127.0.0.1:8080/v1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_gateway(parser, key="the key of the account that this worker earns for, where the gateway asks for one")
    parser.add_argument(
        "--upstream",
        default=DEFAULT_LOCAL,
        metavar="URL",
        help="the local OpenAI-compatible server (default: %(default)s); its key, if it has one, stands in "
        "MIDSTREAM_UPSTREAM_KEY",
    )
    parser.add_argument(
        "--model",
        action="append",
        type=_model,
        default=[],
        metavar="NAME[=LOCAL]",
        help="a model to offer, and what the local server calls it; may be given several times (default: all it lists)",
    )
    parser.add_argument(
        "--name",
        type=_text,
        default=platform.node()[:100] or "worker",
        help="this worker's name in the pool (default: %(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=_threads,
        default=1,
        metavar="N",
        help=f"jobs at a time, at most {POOL_MOST_THREADS} (default: %(default)s)",
    )
    parser.add_argument(
        "--max-length", type=_tokens, default=1024, metavar="TOKENS", help="longest answer taken (default: %(default)s)"
    )
    parser.add_argument(
        "--max-context-length",
        type=_tokens,
        default=4096,
        metavar="TOKENS",
        help="longest prompt with its answer (default: %(default)s)",
    )
    parser.add_argument(
        "--feature",
        action="append",
        type=_text,
        default=[],
        metavar="NAME",
        help="what else the local model can do, such as tools or json_schema; may be given several times",
    )
    parser.add_argument("--verbose", action="store_true", help="log what is of use when looking for a fault")


def _threads(text: str) -> int:
    return _count(text, POOL_MOST_THREADS)


def _tokens(text: str) -> int:
    return _count(text, POOL_CONTEXTS[1])


def _count(text: str, most: int) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:20]) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to {most:,}")
    return int(text)


def _text(text: str) -> str:
    if not text.strip() or len(text) > 100:
        raise argparse.ArgumentTypeError(f"{text!r} is no name of 1 to 100 characters")
    return text


def _model(text: str) -> tuple[str, str]:
    name, equals, local = text.partition("=")
    if not name or (equals and not local):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME or NAME=LOCAL")
    return name, local or name


def run(args: argparse.Namespace) -> int:
    """Work until a signal.  Returns an exit code of `exits`."""
    import uvloop

    from midstream.cli.worker_run import work
    from midstream.worker.local import LocalServer

    console = Console()
    log_to_stderr(verbose=args.verbose)
    try:
        key = key_of(args)
        args.gateway = address(args.gateway).url
        named = _named(args.model)
        local = LocalServer(args.upstream, os.environ.get("MIDSTREAM_UPSTREAM_KEY") or None)
    except ValueError as error:
        console.talk(f"midstream worker: {error}")
        return exits.USAGE
    return uvloop.run(work(args, console, local, key, named))


def _named(models: list[tuple[str, str]]) -> dict[str, str]:
    """The pool's names and the local server's.  Raises ValueError for one that is given twice."""
    named = dict(models)
    if len(named) < len(models):
        raise ValueError("--model names a model twice")
    return named
