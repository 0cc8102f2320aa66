"""What a server says on stderr: its banner, its complaints, and its log."""

from __future__ import annotations

import json
import logging
import sys
from typing import Final

from midstream.cli.terminal import safe

# Where the line of each ended stream comes from.
_STREAMS: Final = "midstream.streams"
_SHOWN_OF_AN_ID: Final = 8


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def fail(message: str, code: int) -> int:
    say(f"midstream: {message}")
    return code


def log_to_stderr(*, verbose: bool, process: bool = False, brief: bool = False) -> None:
    """One line per event, with its time, and with `process` by whom; libraries only from warnings up.

    `brief`: the end of a stream is a few words for people, and not the JSON that a collector of logs reads.
    """
    whose = " %(process)d" if process else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines(f"%(asctime)s{whose} %(levelname)s %(name)s %(message)s", brief=brief))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("midstream").setLevel(logging.DEBUG if verbose else logging.INFO)


class _Lines(logging.Formatter):
    """Lines of the log; with `brief`, the end of a stream in a few words."""

    def __init__(self, shape: str, *, brief: bool) -> None:
        super().__init__(shape)
        self._brief = brief

    def format(self, record: logging.LogRecord) -> str:
        if self._brief and record.name == _STREAMS and (words := _in_brief(record.getMessage())):
            return f"{self.formatTime(record, '%H:%M:%S')} {words}"
        return super().format(record)


def _in_brief(logged: str) -> str:
    """The line of an ended stream for people, made safe: clients name models.  Nothing for another line."""
    try:
        told = json.loads(logged)
    except ValueError:
        return ""
    if not isinstance(told, dict) or told.get("event") != "stream_end":
        return ""
    why = f" ({told['code']}: {told['message']})" if "code" in told else ""
    took = f"{told['records']} records in {told['seconds']:.1f} s"
    line = f"stream {told['stream_id'][:_SHOWN_OF_AN_ID]}… of {told['model']} {told['status']}{why}: {took}"
    return safe(line).translate({ord("\n"): " ", ord("\t"): " "})
