"""The terminal: `midstream VERB …`.  Data goes to stdout, talk to stderr; each verb is a module of its own.

A verb's module has HELP (a line for the overview), `add_arguments(parser)` and `run(args)`, which returns an exit code.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from midstream.cli import exits

VERBS = ("serve", "demo", "generate", "inspect", "worker", "bench")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (the process's own by default) and return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = _parser(words)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        # Told by the verb, whose flags these should have been.
        getattr(args, "parser", parser).error(f"not understood: {' '.join(map(repr, unknown))}")
    if args.verb is None:
        parser.print_help()
        return exits.OK
    try:
        code: int = args.run(args)
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    return code


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="midstream",
        description="Keeps every token of an LLM's answer, so that a dropped reader goes on at the exact token.",
        epilog=exits.table(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"midstream {version('midstream')}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    # A verb brings in what it needs, and `generate` should not wait for a server's modules: of the verbs that stand on
    # the command line only the first is meant, and the overview needs them all.
    meant = next((word for word in words if not word.startswith("-")), None)
    for verb in [meant] if meant in VERBS else VERBS:
        module: Any = importlib.import_module(f"midstream.cli.{verb}")
        one = verbs.add_parser(
            verb,
            help=module.HELP,
            description=module.__doc__,
            epilog=exits.table(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(one)
        one.set_defaults(run=module.run, parser=one)
    return parser
