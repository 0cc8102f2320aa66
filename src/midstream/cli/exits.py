"""The exit codes of every verb, in one table; `midstream --help` shows it."""

from __future__ import annotations

from typing import Final

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2  # argparse's own
GENERATION_FAILED: Final = 3
CANCELLED: Final = 4
REFUSED: Final = 5
POSITION_GONE: Final = 6
UNREACHABLE: Final = 7
OUTPUT_FAILED: Final = 8
# 128 + the signal's number, as shells report it.
HUNG_UP: Final = 129
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141
TERMINATED: Final = 143

MEANINGS: Final = {
    OK: "all done; for generate: the answer is complete; for serve, demo, worker: a signal ended it in order",
    FAILED: "could not start, or failed in a way that has no code of its own; for bench: its check failed",
    USAGE: "the command line, or a setting in the environment, makes no sense",
    GENERATION_FAILED: "the generation failed; the reason stands on stderr",
    CANCELLED: "the generation was cancelled",
    REFUSED: "the gateway refused: key, stream, model, or the request itself",
    POSITION_GONE: "the position cannot be resumed: begin again, or read what is kept",
    UNREACHABLE: "no connection to the gateway, or too many dropped in a row",
    OUTPUT_FAILED: "stdout, or a file that was asked for, cannot be written",
    HUNG_UP: "the terminal went away (SIGHUP); for worker: after another signal",
    INTERRUPTED: "interrupted (Ctrl-C); for worker: for the second time",
    BROKEN_PIPE: "whoever read stdout closed it",
    TERMINATED: "terminated (SIGTERM); for worker: for the second time",
}


def table() -> str:
    """All codes, one line each."""
    return "exit codes:\n" + "\n".join(f"  {code:>3}  {meaning}" for code, meaning in MEANINGS.items())
