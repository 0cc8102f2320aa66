"""Tables for a terminal: aligned columns, fewer of them where it is narrow, and numbers as people say them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from midstream.cli.terminal import Console, safe


class Column(NamedTuple):
    """`text` is aligned on the left, what is not on the right; `most` characters are shown.

    `spare`: where the terminal is narrow, columns go in the order of their numbers; 0 stays.
    """

    title: str
    text: bool = False
    most: int = 0
    spare: int = 0
    styles: Mapping[str, str] = {}


def draw(console: Console, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    """The table, with a head; a cell is coloured by its text.  On a terminal no line is broken that need not be."""
    cells = [[_cut(_flat(cell), column.most) for cell, column in zip(row, columns, strict=True)] for row in rows]
    widths = [
        max(len(line[at]) for line in [[column.title for column in columns], *cells]) for at in range(len(columns))
    ]
    if console.out_is_terminal:
        widths = _narrowed(columns, widths, shutil.get_terminal_size().columns)
    head = [console.styled(_line(columns, widths, [column.title for column in columns]), "dim")]
    return "\n".join(head + [_line(columns, widths, row, console) for row in cells]) + "\n"


def _flat(text: str) -> str:
    """On one line, whatever strangers have called it."""
    return safe(text).translate({ord("\n"): " ", ord("\t"): " "})


def _cut(text: str, most: int) -> str:
    return f"{text[: most - 1]}…" if most and len(text) > most else text


def _narrowed(columns: Sequence[Column], widths: Sequence[int], room: int) -> list[int]:
    """The widths, with 0 for each column that has to go: a table whose lines are broken is none."""
    kept = list(widths)
    for at in sorted((at for at, column in enumerate(columns) if column.spare), key=lambda at: columns[at].spare):
        if sum(width + 2 for width in kept if width) - 2 <= room:
            break
        kept[at] = 0
    return kept


def _line(columns: Sequence[Column], widths: Sequence[int], row: Sequence[str], console: Console | None = None) -> str:
    parts = []
    for column, width, cell in zip(columns, widths, row, strict=True):
        if width:
            pad = " " * (width - len(cell))
            # The pads are outside, since colour takes no room.
            shown = console.styled(cell, column.styles.get(cell, "")) if console is not None else cell
            parts.append(f"{shown}{pad}" if column.text else f"{pad}{shown}")
    return "  ".join(parts).rstrip(" ")


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


def counted(fields: Mapping[str, Any], name: str) -> str:
    """A whole number of an answer; a dash where it tells none."""
    value = fields.get(name)
    return f"{value:,}" if isinstance(value, int) else "–"


def fit(drawing: str) -> str:
    """As many lines as the terminal has room for, under a title."""
    room = max(2, shutil.get_terminal_size().lines - 2)
    lines = drawing.splitlines()
    if len(lines) <= room:
        return drawing
    return "\n".join([*lines[: room - 1], f"… and {len(lines) - room + 1} more"]) + "\n"
