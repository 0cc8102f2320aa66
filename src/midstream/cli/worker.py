"""Lend a local model to a pool: pulls jobs from a gateway, runs them here, posts the tokens while they come.

    midstream worker --gateway https://pool.example --upstream http://127.0.0.1:8080/v1

Nothing has to reach this machine from outside. Ctrl-C gives back what is held, a second one ends at once.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import platform
import signal
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version

import aiohttp
import uvloop

from midstream.cli import exits
from midstream.cli.gateway import KEY_VARIABLE, add_gateway, key_of
from midstream.cli.serve import log_to_stderr
from midstream.cli.terminal import Console
from midstream.cli.worker_board import Board
from midstream.client.surface import address
from midstream.errors import ProducerFailed
from midstream.wire import POOL_CONTEXTS, POOL_MOST_THREADS
from midstream.worker.local import LocalServer
from midstream.worker.pool import PoolRefused, PoolRoutes
from midstream.worker.slot import Offer, Worker

_log = logging.getLogger("midstream")

HELP = "lend a local model to a pool: pull jobs, post tokens"

DEFAULT_LOCAL = "http://127.0.0.1:8080/v1"
# Seconds between two looks at the account, and between two tries to reach a local server that is not up yet.
_LOOK_EVERY = 30.0
_DRAW_EVERY = 0.5
_TRY_EVERY = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_gateway(parser)
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
    return uvloop.run(_work(args, console, local, key, named))


def _named(models: list[tuple[str, str]]) -> dict[str, str]:
    """The pool's names and the local server's.  Raises ValueError for one that is given twice."""
    named = dict(models)
    if len(named) < len(models):
        raise ValueError("--model names a model twice")
    return named


async def _work(
    args: argparse.Namespace, console: Console, local: LocalServer, key: str | None, named: dict[str, str]
) -> int:
    agent = f"Midstream Worker:{version('midstream')}:unknown"
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup: the terminal may go
            loop.add_signal_handler(number, _end, stop, number)
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
        pool = PoolRoutes(session, args.gateway, key, agent)
        try:
            models = named or await _listed(local, console, stop)
            offer = Offer(
                args.name,
                models,
                args.max_length,
                args.max_context_length,
                args.threads,
                agent,
                tuple(args.feature),
            )
            return await _until_stopped(args, console, offer, local, pool, stop)
        except PoolRefused as refused:
            wants_key = refused.wants_key and key is None
            reason = f"it asks for a key: set {KEY_VARIABLE}" if wants_key else str(refused)
            console.talk(f"the pool at {args.gateway} refuses this worker: {reason}", "red")
            return exits.REFUSED
        finally:
            await local.close()


def _end(stop: asyncio.Event, number: int) -> None:
    if stop.is_set():
        os._exit(128 + number)
    stop.set()


async def _until_stopped(
    args: argparse.Namespace, console: Console, offer: Offer, local: LocalServer, pool: PoolRoutes, stop: asyncio.Event
) -> int:
    board = Board(sys.stderr, console, time.monotonic)
    worker = Worker(offer, local, pool, board.ended, board.draw)
    if stop.is_set():
        worker.stop()
    else:
        console.talk(f"worker {offer.name!r} offers {', '.join(offer.models)} to {args.gateway}")
    board.watch(worker)
    working = asyncio.create_task(worker.run(), name="worker")
    checking = asyncio.create_task(_check(local, offer.models), name="models")
    looking = asyncio.create_task(_look(pool, board, worker), name="account")
    stopping = asyncio.create_task(stop.wait(), name="signal")
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        worker.stop()
        await working
    finally:
        beside = (checking, looking, stopping)
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        board.close()
    return exits.OK


async def _check(local: LocalServer, models: Mapping[str, str]) -> None:
    """Warn of a model that the local server may not have, since each of its jobs would fail.  Some list only a few."""
    try:
        listed = await local.models()
    except ProducerFailed:
        return
    for missing in sorted(set(models.values()) - set(listed)):
        _log.warning("the local server lists no model %r; it has: %s", missing, ", ".join(listed) or "none")


async def _look(pool: PoolRoutes, board: Board, worker: Worker) -> None:
    """Keep the last line, where there is one, up to date: the account after each job, since others may share it."""
    clock = asyncio.get_running_loop().time
    due, seen = clock(), -1
    while board.live:
        ended = sum(worker.tally.jobs.values())
        if clock() >= due or ended != seen:
            due, seen = clock() + _LOOK_EVERY, ended
            board.balance = await pool.earned()
        board.draw()
        await asyncio.sleep(_DRAW_EVERY)


async def _listed(local: LocalServer, console: Console, stop: asyncio.Event) -> dict[str, str]:
    """All models of the local server, waited for; none where a signal came first."""
    told = ""
    stopping = asyncio.create_task(stop.wait())
    while not stop.is_set():
        listing = asyncio.create_task(local.models())
        await asyncio.wait([listing, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not listing.done():
            listing.cancel()
            break
        try:
            if models := listing.result():
                stopping.cancel()
                return {name: name for name in models}
            reason = "it lists no models"
        except ProducerFailed as failure:
            reason = str(failure)
        if told != reason:
            console.talk(f"waiting for the local server: {reason}", "yellow")
            told = reason
        await asyncio.wait([stopping], timeout=_TRY_EVERY)
    return {}
