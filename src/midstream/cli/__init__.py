"""The terminal: `midstream VERB …`.  Data goes to stdout, talk to stderr; each verb is a module of its own.

A verb's module has `add_arguments(parser)` and `run(args)`, which returns an exit code; what it says of itself is its
`--help`.  It is imported when its verb is meant, and brings in what runs it when it runs: a gateway's modules take
seconds on a small machine, for which neither an overview nor a client should wait.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from midstream.cli import exits

# Each with its line for the overview.
VERBS: Final = {
    "serve": "run the gateway in front of one or more OpenAI-compatible endpoints",
    "demo": "try it: a small real model, the gateway in front of it, and a page to cut the wire on",
    "generate": "ask a model and print its answer, across dropped connections",
    "inspect": "show the streams a gateway keeps, and their counters; or its worker pool",
    "worker": "lend a local model to a pool: pull jobs, post tokens",
    "bench": "measure what a dropped connection costs, by retry and by resume",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (the process's own by default) and return its exit code."""
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:
        return exits.INTERRUPTED


def _run(words: list[str]) -> int:
    parser = _parser(words)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        # Told by the verb, whose flags these should have been.
        getattr(args, "parser", parser).error(f"not understood: {' '.join(map(repr, unknown))}")
    if args.verb is None:
        parser.print_help()
        return exits.OK
    code: int = args.run(args)
    return code


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="midstream",
        description="Keeps every token of an LLM's answer, so that a dropped reader goes on at the exact token.",
        epilog=f"`midstream VERB --help` shows the flags of a verb.\n\n{exits.table()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    # Of the verbs that stand on the command line only the first is meant.
    meant = next((word for word in words if not word.startswith("-")), None)
    for verb, line in VERBS.items():
        one = verbs.add_parser(
            verb,
            help=line,
            epilog="exit codes: see `midstream --help`",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if verb == meant:
            module: Any = importlib.import_module(f"midstream.cli.{verb}")
            one.description = module.__doc__
            module.add_arguments(one)
            one.set_defaults(run=module.run, parser=one)
    return parser


class _Version(argparse.Action):
    """Looked up when it is asked for: the packages' own descriptions take longer to read than all of `--help`."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        print(f"midstream {version('midstream')}")
        parser.exit()
