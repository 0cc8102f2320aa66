"""What a gateway keeps: the streams of your key with their counters, or one of them whole."""

from __future__ import annotations

import argparse
import math
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from midstream.cli import exits
from midstream.cli.gateway import add_gateway, key_of, refusal
from midstream.cli.terminal import Console, Interrupted, Interrupts, OutputFailed
from midstream.client import Client, UnexpectedAnswer, Unreachable
from midstream.errors import MidstreamError

HELP = "show the streams a gateway keeps, and their counters"

_TIMEOUT = 10.0
_STYLES = {"open": "cyan", "done": "green", "failed": "red", "cancelled": "yellow"}
_COLUMNS = ("STREAM", "STATUS", "AGE", "MODEL", "HIGHEST", "RETAINED", "ACKED", "READERS", "BYTES")
_TEXT_COLUMNS = {"STREAM", "STATUS", "MODEL"}
# What a narrow terminal goes without, in this order: a table whose lines are broken is none.
_DROPPED_FIRST = ("ACKED", "RETAINED", "BYTES", "READERS", "MODEL", "AGE")
_MODEL_WIDTH = 24
# Home, and clear what is below: what was there is overwritten without a flicker.
_REDRAW = "\x1b[H\x1b[J"
# The terminal's other screen, which leaves what stood on the first one as it was.
_OTHER_SCREEN, _FIRST_SCREEN = "\x1b[?1049h", "\x1b[?1049l"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "stream_id", nargs="?", metavar="STREAM_ID", help="show this one whole (without: all, as a table)"
    )
    add_gateway(parser)
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="print what the gateway answers, on one line")
    shape.add_argument("--text", action="store_true", help="print the answer so far, as far as it is kept")
    parser.add_argument("--watch", action="store_true", help="look again and again, until Ctrl-C")
    parser.add_argument(
        "--every", type=_seconds, default=1.0, metavar="SECONDS", help="with --watch: how often (default: %(default)g)"
    )


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.05 <= value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0.05 up")
    return value


def run(args: argparse.Namespace) -> int:
    """Print what there is; returns an exit code of `exits`."""
    console = Console()
    try:
        if args.text and (args.stream_id is None or args.watch):
            raise ValueError("--text prints the answer of one STREAM_ID, once")
        client = Client(args.gateway, key=key_of(args), timeout=_TIMEOUT)
    except ValueError as error:
        console.talk(f"midstream inspect: {error}")
        return exits.USAGE
    look = _Look(args, console, client)
    with Interrupts():
        try:
            return look.watch() if args.watch else look.once()
        except Interrupted as signalled:
            return signalled.code
        except OutputFailed as error:
            console.talk(f"cannot write: {error}", "red")
            return exits.BROKEN_PIPE if error.broken_pipe else exits.OUTPUT_FAILED
        except MidstreamError as error:
            console.talk(_wording(error, args), "red")
            return exits.of(error)


def _wording(error: MidstreamError, args: argparse.Namespace) -> str:
    if isinstance(error, Unreachable) and "status" not in error.facts:
        return f"no answer from {args.gateway}: {error}; is the gateway running?"
    return refusal(error, args)


class _Look:
    """One run of the verb."""

    def __init__(self, args: argparse.Namespace, console: Console, client: Client) -> None:
        self._args = args
        self._console = console
        self._client = client

    def once(self) -> int:
        if self._args.text:
            return self._text()
        self._console.raw(self._drawing())
        return exits.OK

    def watch(self) -> int:
        """Never returns: Ctrl-C ends it.  A gateway that is away for a while is waited for."""
        redraw = self._console.out_is_terminal and not self._args.json
        if not redraw:
            return self._watch(redraw=False)
        self._console.raw(_OTHER_SCREEN)
        try:
            return self._watch(redraw=True)
        finally:
            self._console.raw(_FIRST_SCREEN)

    def _watch(self, *, redraw: bool) -> int:
        while True:
            try:
                drawing = self._drawing()
            except Unreachable as error:
                drawing = self._console.styled(_wording(error, self._args), "yellow") + "\n"
            if redraw:
                title = f"{self._args.gateway} · {time.strftime('%H:%M:%S')} · Ctrl-C ends"
                drawing = _REDRAW + self._console.styled(title, "dim") + "\n" + _fit(drawing)
            self._console.raw(drawing if redraw or self._args.json else drawing + "\n")
            time.sleep(self._args.every)

    def _drawing(self) -> str:
        stream_id = self._args.stream_id
        told = self._client.state(stream_id) if stream_id is not None else self._client.streams()
        if self._args.json:
            return orjson.dumps(told).decode() + "\n"
        if stream_id is not None:
            return self._whole(told)
        states = told.get("streams")
        if not isinstance(states, list):
            raise UnexpectedAnswer("a list without streams: is this a Midstream gateway?")
        return self._table(sorted(states, key=lambda state: -_number(state, "created_at")))

    def _text(self) -> int:
        """The answer so far, raw; what is missing or unfinished is said on stderr."""
        snapshot = self._client.snapshot(self._args.stream_id)
        self._console.text(str(snapshot.get("text", "")))
        self._console.close()
        if snapshot.get("complete") is False:
            self._console.talk("the beginning is no longer kept: this is not the whole answer", "yellow")
        self._console.talk(f"{snapshot.get('status')}, up to record {snapshot.get('seq')}", "dim")
        return exits.OK

    def _table(self, states: Sequence[dict[str, Any]]) -> str:
        if not states:
            return "no streams\n"
        now = time.time()
        rows = [_row(state, now) for state in states]
        widths = [max(len(row[at]) for row in [list(_COLUMNS), *rows]) for at in range(len(_COLUMNS))]
        if self._console.out_is_terminal:
            widths = _narrowed(widths, shutil.get_terminal_size().columns)
        lines = [self._console.styled(_line(_COLUMNS, widths), "dim")]
        for row in rows:
            status = row[1]
            line = self._console.styled(_line(row, widths))
            # After the aligning, since colour takes no room; the id in front of it is never a status.
            lines.append(line.replace(f" {status}", f" {self._console.styled(status, _STYLES.get(status, ''))}", 1))
        return "\n".join(lines) + "\n"

    def _whole(self, state: dict[str, Any]) -> str:
        now = time.time()
        lines = []
        for name, show in _FIELDS:
            value = show(state, now)
            style = _STYLES.get(value, "") if name == "status" else ""
            lines.append(f"{self._console.styled(name.ljust(10), 'dim')}{self._console.styled(value, style)}")
        return "\n".join(lines) + "\n"


def _row(state: dict[str, Any], now: float) -> list[str]:
    model = str(state.get("model", ""))
    return [
        str(state.get("stream_id")),
        str(state.get("status")),
        age(now - _number(state, "created_at")),
        model if len(model) <= _MODEL_WIDTH else model[: _MODEL_WIDTH - 1] + "…",
        _count(state, "highest_seq"),
        _count(state, "retained_records"),
        _count(state, "acked_seq"),
        _count(state, "readers"),
        size(_number(state, "retained_bytes")),
    ]


def _narrowed(widths: list[int], room: int) -> list[int]:
    """The widths, with 0 for each column that has to go."""
    kept = list(widths)
    for name in _DROPPED_FIRST:
        if sum(width + 2 for width in kept if width) - 2 <= room:
            break
        kept[_COLUMNS.index(name)] = 0
    return kept


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    parts = [
        cell.ljust(width) if column in _TEXT_COLUMNS else cell.rjust(width)
        for cell, width, column in zip(cells, widths, _COLUMNS, strict=True)
        if width
    ]
    return "  ".join(parts)


def _readers(state: dict[str, Any], now: float) -> str:
    lowest = state.get("lowest_reader_seq")
    return _count(state, "readers") + (f", the slowest at {lowest:,}" if isinstance(lowest, int) else "")


def _records(state: dict[str, Any], now: float) -> str:
    oldest, highest = _count(state, "oldest_retained_seq"), _count(state, "highest_seq")
    return f"{_count(state, 'retained_records')} retained, {oldest} to {highest}"


_FIELDS: tuple[tuple[str, Callable[[dict[str, Any], float], str]], ...] = (
    ("stream", lambda state, now: str(state.get("stream_id"))),
    ("status", lambda state, now: str(state.get("status"))),
    ("model", lambda state, now: str(state.get("model"))),
    ("created", lambda state, now: f"{age(now - _number(state, 'created_at'))} ago"),
    ("accessed", lambda state, now: f"{age(now - _number(state, 'last_access'))} ago"),
    ("records", _records),
    ("bytes", lambda state, now: size(_number(state, "retained_bytes"))),
    ("acked", lambda state, now: f"up to {_count(state, 'acked_seq')}"),
    ("trimmed", lambda state, now: f"up to {_count(state, 'trimmed_seq')}"),
    ("readers", _readers),
)


def _number(state: dict[str, Any], name: str) -> float:
    value = state.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0


def _count(state: dict[str, Any], name: str) -> str:
    value = state.get(name)
    return f"{value:,}" if isinstance(value, int) else "–"


def age(seconds: float) -> str:
    """A time that has passed, in its largest unit: 3s, 12m, 5h, 2d."""
    seconds = max(0.0, seconds)
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{int(seconds)}s"


def size(count: float) -> str:
    """Bytes for people, in powers of 1024: 512 B, 3.4 KiB."""
    if count < 1024:
        return f"{int(count)} B"
    for unit in ("KiB", "MiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} GiB"


def _fit(drawing: str) -> str:
    """As many lines as the terminal has room for, under the title."""
    room = max(2, shutil.get_terminal_size().lines - 2)
    lines = drawing.splitlines()
    if len(lines) <= room:
        return drawing
    return "\n".join([*lines[: room - 1], f"… and {len(lines) - room + 1} more"]) + "\n"
