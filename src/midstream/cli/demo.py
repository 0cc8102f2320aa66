"""A small real model, the gateway in front of it, and the playground: a page on which to cut the wire.

Where the model's packages are not installed, or with --scripted, a simulation answers instead.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import AsyncIterator

from midstream.cli import serve
from midstream.cli.exits import USAGE
from midstream.cli.model import NAME, Model, ModelUnavailable, available
from midstream.server.settings import Settings

HELP = "try it: a small real model, the gateway in front of it, and a page to cut the wire on"

SCRIPTED = "scripted:"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    serve.add_arguments(parser)
    parser.usage = "%(prog)s [options]"
    parser.add_argument("--scripted", action="store_true", help="without a model: a scripted simulation answers")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal.  Where the model cannot run it says why, and goes on with the simulation."""

    def start(loaded: Settings) -> int:
        if loaded.workers > 1:
            return serve.fail("--workers is for `midstream serve`; the demo is one process", USAGE)
        return serve.start(loaded, within=lambda chosen: _model(chosen, scripted=args.scripted), page=True)

    return serve.with_settings(args, start)


@contextlib.asynccontextmanager
async def _model(chosen: Settings, *, scripted: bool) -> AsyncIterator[Settings]:
    """The settings with an upstream that runs for as long as this context."""
    if chosen.upstream and not scripted:
        yield chosen
        return
    reason = "as you asked" if scripted else available()
    if reason is None:
        serve.say("starting the model (SmolLM2-135M, one thread) …")
        try:
            async with Model() as model:
                # The simulation stays within reach by its name, for the examples of the documents.
                yield dataclasses.replace(chosen, upstream=(f"{NAME}={model.url}", f"scripted*={SCRIPTED}"))
                return
        except ModelUnavailable as error:
            reason = str(error)
    serve.say(f"no model ({reason}): a scripted SIMULATION answers instead")
    yield dataclasses.replace(chosen, upstream=(SCRIPTED,))
