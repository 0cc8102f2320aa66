"""The exit codes of every verb, in one table; `--help` shows it."""

from __future__ import annotations

from typing import Final

from midstream.client.answers import Unreachable
from midstream.errors import MidstreamError, PositionError, ProducerFailed

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
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141
TERMINATED: Final = 143

MEANINGS: Final = {
    OK: "all done; for generate: the answer is complete",
    FAILED: "could not start, or failed in a way that has no code of its own; for bench: its check failed",
    USAGE: "the command line makes no sense",
    GENERATION_FAILED: "the generation failed; the reason stands on stderr",
    CANCELLED: "the generation was cancelled",
    REFUSED: "the gateway refused: key, stream, model, or the request itself",
    POSITION_GONE: "the position cannot be resumed: begin again, or read what is kept",
    UNREACHABLE: "no connection to the gateway, or too many dropped in a row",
    OUTPUT_FAILED: "stdout or the position file cannot be written",
    INTERRUPTED: "interrupted (Ctrl-C)",
    BROKEN_PIPE: "whoever read stdout closed it",
    TERMINATED: "terminated (SIGTERM)",
}


def table() -> str:
    """All codes, one line each."""
    return "exit codes:\n" + "\n".join(f"  {code:>3}  {meaning}" for code, meaning in MEANINGS.items())


def of(error: MidstreamError) -> int:
    """The code for what a client raised."""
    if isinstance(error, Unreachable):
        return UNREACHABLE
    if isinstance(error, ProducerFailed):
        return GENERATION_FAILED
    return POSITION_GONE if isinstance(error, PositionError) else REFUSED
