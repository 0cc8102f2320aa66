"""One run of `midstream worker`: from the first look at the local server to the end after a signal."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version

import aiohttp

from midstream.cli import exits
from midstream.cli.gateway import KEY_VARIABLE, path_advice
from midstream.cli.terminal import Console
from midstream.cli.worker_board import Board
from midstream.errors import ProducerFailed
from midstream.worker.local import LocalServer
from midstream.worker.pool import PoolRefused, PoolRoutes
from midstream.worker.slot import Offer, Worker

_log = logging.getLogger("midstream")

# Seconds between two looks at the account, and between two tries to reach a local server that is not up yet.
_LOOK_EVERY = 30.0
_DRAW_EVERY = 0.5
_TRY_EVERY = 1.0


async def work(
    args: argparse.Namespace, console: Console, local: LocalServer, key: str | None, named: dict[str, str]
) -> int:
    """Work for the pool until a signal, or until it refuses.  Returns an exit code."""
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
            if advice := path_advice(args):
                reason += f"; {advice}"
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
