"""A small real model, the gateway in front of it, and the playground: a page on which to cut the wire.

    midstream demo                 then open the address that it says
    midstream demo --scripted      without a model: a simulation answers

Where the model's packages are not installed, a simulation answers, too. Every flag of `midstream serve` is taken as
well, but for --workers; here are those that a demo may need. The end of each answer is told in a line; --verbose makes
it the JSON line that `serve` writes, and logs more.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Final

from midstream.cli import serve
from midstream.cli.exits import USAGE
from midstream.cli.logs import fail, say
from midstream.cli.model import NAME, Model, ModelUnavailable, available
from midstream.server import settings
from midstream.server.settings import Settings

SCRIPTED: Final = "scripted:"

# Settings that `--help` shows.
_SHOWN: Final = frozenset({"port", "grpc_port", "upstream", "journal"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options]"
    parser.epilog = f"every other flag of `midstream serve`: see `midstream serve --help`\n{parser.epilog or ''}"
    parser.add_argument("--scripted", action="store_true", help="without a model: a scripted simulation answers")
    settings.add_arguments(parser, only=_SHOWN)
    parser.add_argument(
        "--verbose", action="store_true", help="log what is of use when looking for a fault, and each end as JSON"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal.  Where the model cannot run it says why, and goes on with the simulation."""

    def start(loaded: Settings) -> int:
        if loaded.workers > 1:
            return fail("--workers is for `midstream serve`; the demo is one process", USAGE)
        from midstream.cli import serve_start

        return serve_start.start(loaded, within=lambda chosen: _model(chosen, scripted=args.scripted), page=True)

    return serve.with_settings(args, start, brief=not args.verbose)


@contextlib.asynccontextmanager
async def _model(chosen: Settings, *, scripted: bool) -> AsyncIterator[Settings]:
    """The settings with an upstream that runs for as long as this context."""
    if chosen.upstream and not scripted:
        yield chosen
        return
    reason = "as you asked" if scripted else available()
    if reason is None:
        say("starting the model (SmolLM2-135M, one thread) …")
        try:
            async with Model() as model:
                # The simulation stays within reach by its name, for the examples of the documents.
                yield dataclasses.replace(chosen, upstream=(f"{NAME}={model.url}", f"scripted*={SCRIPTED}"))
                return
        except ModelUnavailable as error:
            reason = str(error)
    say(f"no model ({reason}): a scripted SIMULATION answers instead")
    yield dataclasses.replace(chosen, upstream=(SCRIPTED,))
