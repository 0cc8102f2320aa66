"""What a gateway keeps: the streams of your key with their counters, one of them whole, or its worker pool."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from midstream.cli import exits, inspect_pool
from midstream.cli.gateway import add_gateway, code_of, key_of, path_advice, refusal, silence
from midstream.cli.table import Column, age, counted, draw, fit, size
from midstream.cli.terminal import Console, Interrupted, Interrupts, OutputFailed
from midstream.client import Client, UnexpectedAnswer, Unreachable
from midstream.errors import MidstreamError, NotFound

_TIMEOUT = 10.0
_STYLES = {"open": "cyan", "done": "green", "failed": "red", "cancelled": "yellow"}
# A narrow terminal goes without some of them.
_COLUMNS = (
    Column("STREAM", text=True),
    Column("STATUS", text=True, styles=_STYLES),
    Column("AGE", spare=6),
    Column("MODEL", text=True, most=24, spare=5),
    Column("HIGHEST"),
    Column("RETAINED", spare=2),
    Column("ACKED", spare=1),
    Column("READERS", spare=4),
    Column("BYTES", spare=3),
)
# Home, and clear what is below: what was there is overwritten without a flicker.
_REDRAW = "\x1b[H\x1b[J"
# The terminal's other screen, which leaves what stood on the first one as it was.
_OTHER_SCREEN, _FIRST_SCREEN = "\x1b[?1049h", "\x1b[?1049l"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "stream_id",
        nargs="?",
        metavar="STREAM_ID",
        help="show this one whole (without: all, as a table); `pool`: the worker pool, for a key marked :admin",
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
        if args.text and (args.stream_id in (None, inspect_pool.NAME) or args.watch):
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
            return code_of(error)


def _wording(error: MidstreamError, args: argparse.Namespace) -> str:
    if isinstance(error, Unreachable) and "status" not in error.facts:
        return f"no answer from {silence(error, args.gateway)}"
    if isinstance(error, NotFound) and args.stream_id == inspect_pool.NAME and not path_advice(args):
        return "this gateway has no pool; one that is started with --pool has"
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
                drawing = _REDRAW + self._console.styled(title, "dim") + "\n" + fit(drawing)
            self._console.raw(drawing if redraw or self._args.json else drawing + "\n")
            time.sleep(self._args.every)

    def _drawing(self) -> str:
        stream_id = self._args.stream_id
        told = self._told(stream_id)
        if self._args.json:
            return orjson.dumps(told).decode() + "\n"
        if stream_id == inspect_pool.NAME:
            return inspect_pool.tables(self._console, told, self._args.gateway)
        if stream_id is not None:
            return self._whole(told)
        states = told.get("streams")
        if not isinstance(states, list):
            raise UnexpectedAnswer("a list without streams: is this a Midstream gateway?")
        return self._table(sorted(states, key=lambda state: -_number(state, "created_at")))

    def _told(self, stream_id: str | None) -> dict[str, Any]:
        if stream_id is None:
            return self._client.streams()
        return self._client.pool() if stream_id == inspect_pool.NAME else self._client.state(stream_id)

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
        return draw(self._console, _COLUMNS, [_row(state, now) for state in states])

    def _whole(self, state: dict[str, Any]) -> str:
        now = time.time()
        lines = []
        for name, show in _FIELDS:
            value = show(state, now)
            style = _STYLES.get(value, "") if name == "status" else ""
            lines.append(f"{self._console.styled(name.ljust(10), 'dim')}{self._console.styled(value, style)}")
        return "\n".join(lines) + "\n"


def _row(state: dict[str, Any], now: float) -> list[str]:
    return [
        str(state.get("stream_id")),
        str(state.get("status")),
        age(now - _number(state, "created_at")),
        str(state.get("model", "")),
        counted(state, "highest_seq"),
        counted(state, "retained_records"),
        counted(state, "acked_seq"),
        counted(state, "readers"),
        size(_number(state, "retained_bytes")),
    ]


def _readers(state: dict[str, Any], now: float) -> str:
    lowest = state.get("lowest_reader_seq")
    return counted(state, "readers") + (f", the slowest at {lowest:,}" if isinstance(lowest, int) else "")


def _records(state: dict[str, Any], now: float) -> str:
    oldest, highest = counted(state, "oldest_retained_seq"), counted(state, "highest_seq")
    return f"{counted(state, 'retained_records')} retained, {oldest} to {highest}"


_FIELDS: tuple[tuple[str, Callable[[dict[str, Any], float], str]], ...] = (
    ("stream", lambda state, now: str(state.get("stream_id"))),
    ("status", lambda state, now: str(state.get("status"))),
    ("model", lambda state, now: str(state.get("model"))),
    ("created", lambda state, now: f"{age(now - _number(state, 'created_at'))} ago"),
    ("accessed", lambda state, now: f"{age(now - _number(state, 'last_access'))} ago"),
    ("records", _records),
    ("bytes", lambda state, now: size(_number(state, "retained_bytes"))),
    ("acked", lambda state, now: f"up to {counted(state, 'acked_seq')}"),
    ("trimmed", lambda state, now: f"up to {counted(state, 'trimmed_seq')}"),
    ("readers", _readers),
)


def _number(state: dict[str, Any], name: str) -> float:
    value = state.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0
