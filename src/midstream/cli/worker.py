"""Lend a local model to a pool: pulls jobs from a gateway, runs them here, posts the tokens while they come.

    midstream worker --gateway https://pool.example --upstream http://127.0.0.1:8080/v1

Nothing has to reach this machine from outside. Ctrl-C gives back what is held, a second one ends at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import signal
import sys
import time
from importlib.metadata import version

import aiohttp
import uvloop

from midstream.cli import exits
from midstream.cli.gateway import add_gateway, key_of
from midstream.cli.serve import log_to_stderr
from midstream.cli.terminal import Console
from midstream.cli.worker_board import Board
from midstream.errors import ProducerFailed
from midstream.worker.local import LocalServer
from midstream.worker.pool import PoolRefused, PoolRoutes
from midstream.worker.slot import Offer, Worker

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
        default=[],
        metavar="NAME[=LOCAL]",
        help="a model to offer, and what the local server calls it; may be given several times (default: all it lists)",
    )
    parser.add_argument(
        "--name", default=platform.node() or "worker", help="this worker's name in the pool (default: %(default)s)"
    )
    parser.add_argument("--threads", type=_count, default=1, metavar="N", help="jobs at a time (default: %(default)s)")
    parser.add_argument(
        "--max-length", type=_count, default=1024, metavar="TOKENS", help="longest answer taken (default: %(default)s)"
    )
    parser.add_argument(
        "--max-context-length",
        type=_count,
        default=4096,
        metavar="TOKENS",
        help="longest prompt with its answer (default: %(default)s)",
    )
    parser.add_argument(
        "--feature",
        action="append",
        default=[],
        metavar="NAME",
        help="what else the local model can do, such as tools or json_schema; may be given several times",
    )
    parser.add_argument("--verbose", action="store_true", help="log what is of use when looking for a fault")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= 1_048_576:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to 1,048,576")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Work until a signal.  Returns an exit code of `exits`."""
    console = Console()
    log_to_stderr(verbose=args.verbose)
    try:
        key = key_of(args)
        local = LocalServer(args.upstream, os.environ.get("MIDSTREAM_UPSTREAM_KEY") or None)
    except ValueError as error:
        console.talk(f"midstream worker: {error}")
        return exits.USAGE
    return uvloop.run(_work(args, console, local, key))


async def _work(args: argparse.Namespace, console: Console, local: LocalServer, key: str | None) -> int:
    agent = f"Midstream Worker:{version('midstream')}:unknown"
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _end, stop, number)
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
        pool = PoolRoutes(session, args.gateway, key, agent)
        try:
            models = _named(args.model) or await _listed(local, console, stop)
            if not models:
                return exits.OK
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
            console.talk(f"the pool at {args.gateway} refuses this worker: {refused}", "red")
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
    board.watch(worker)
    console.talk(f"worker {offer.name!r} offers {', '.join(offer.models)} to {args.gateway}")
    working = asyncio.create_task(worker.run(), name="worker")
    looking = asyncio.create_task(_look(pool, board), name="account")
    stopping = asyncio.create_task(stop.wait(), name="signal")
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        worker.stop()
        await working
    finally:
        looking.cancel()
        stopping.cancel()
        await asyncio.gather(looking, stopping, return_exceptions=True)
        board.close()
    return exits.OK


async def _look(pool: PoolRoutes, board: Board) -> None:
    clock = asyncio.get_running_loop().time
    due = clock()
    while True:
        if clock() >= due:
            due = clock() + _LOOK_EVERY
            board.balance = await pool.earned()
        board.draw()
        await asyncio.sleep(_DRAW_EVERY)


def _named(models: list[str]) -> dict[str, str]:
    named = {}
    for text in models:
        name, _, local = text.partition("=")
        named[name] = local or name
    return named


async def _listed(local: LocalServer, console: Console, stop: asyncio.Event) -> dict[str, str]:
    """All models of the local server, waited for; none where a signal came first."""
    told = False
    while not stop.is_set():
        try:
            if models := await local.models():
                return {name: name for name in models}
            reason = "it lists no models"
        except ProducerFailed as failure:
            reason = str(failure)
        if not told:
            console.talk(f"waiting for the local server: {reason}", "yellow")
            told = True
        try:
            async with asyncio.timeout(_TRY_EVERY):
                await stop.wait()
        except TimeoutError:
            pass
    return {}
