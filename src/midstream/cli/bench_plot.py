"""The plot of `midstream bench`; needs matplotlib, which the extra `bench` installs."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from math import floor, log10
from pathlib import Path
from typing import Any, Final

from midstream.cli.bench_figures import RESUME, RETRY, Row, duration

_COLOURS: Final = {RETRY: "#d1495b", RESUME: "#00798c"}
_NAMES: Final = {RETRY: "retry: ask again from the start", RESUME: "resume: go on in the same stream"}
_INK: Final = "#22303c"
_FAINT: Final = "#8a97a3"
_WIDTH: Final = 0.36


def missing() -> str | None:
    """Why nothing can be drawn, or None."""
    if importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib: pip install 'midstream[bench]'"
    return None


def draw(found: Sequence[Row], about: dict[str, Any], path: Path) -> None:
    """Write the plot; what kind of file it is, is in the name.  Raises OSError."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style = {
        "font.family": "sans-serif",
        "font.size": 10,
        "text.color": _INK,
        "axes.edgecolor": _FAINT,
        "axes.labelcolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _FAINT,
        "svg.hashsalt": "midstream",  # the same figures, the same file
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(9.6, 4.3), facecolor="white", layout="constrained")
        waits, tokens = figure.subplots(1, 2)
        _waits(waits, found)
        _tokens(tokens, found)
        handles, names = waits.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False)
        figure.suptitle(_title(about), fontsize=9, color=_FAINT, x=0.01, ha="left")
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _title(about: dict[str, Any]) -> str:
    runs = "one run" if about["runs"] == 1 else f"medians of {about['runs']} runs"
    model = about["model"] or about["upstream"]
    return f"{model}, {about['length']} tokens an answer, over {about['transport']}; {runs}"


def _waits(axes: Any, found: Sequence[Row]) -> None:
    """On a scale of powers of ten, since the two are that far apart."""
    for way, places, group in _bars(found):
        heights = [row.unseen * 1000 for row in group]
        bars = axes.bar(places, heights, _WIDTH, color=_COLOURS[way], label=_NAMES[way])
        axes.bar_label(bars, [duration(row.unseen) for row in group], padding=2, fontsize=9)
    waits = [row.unseen * 1000 for row in found]
    axes.set_yscale("log")
    axes.set_ylim(10 ** floor(log10(min(waits)) - 0.1), max(waits) * 3)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:g} s" if value >= 1000 else f"{value:g} ms")
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.set_title("How long the reader waits for a new token", loc="left", fontsize=11, fontweight="bold")
    axes.set_ylabel("wait after coming back (log scale)")
    _dress(axes, found)


def _tokens(axes: Any, found: Sequence[Row]) -> None:
    for way, places, group in _bars(found):
        answer = [row.inferred - row.again for row in group]
        axes.bar(places, answer, _WIDTH, color=_COLOURS[way])
        again = [row.again for row in group]
        bars = axes.bar(places, again, _WIDTH, bottom=answer, color="white", edgecolor=_COLOURS[way], hatch="////")
        axes.bar_label(bars, [f"{row.inferred:g}" for row in group], padding=2, fontsize=9)
    axes.margins(y=0.14)
    axes.set_title("Tokens the model writes for one answer", loc="left", fontsize=11, fontweight="bold")
    axes.set_ylabel("tokens; hatched: written a second time")
    _dress(axes, found)


def _bars(found: Sequence[Row]) -> list[tuple[str, list[float], list[Row]]]:
    """For each way: where its bars stand, and what they show."""
    drops = _drops(found)
    sides = {RETRY: -_WIDTH / 2 - 0.01, RESUME: _WIDTH / 2 + 0.01}
    groups = {way: [row for row in found if row.way == way] for way in sides}
    return [(way, [drops.index(row.drop) + sides[way] for row in group], group) for way, group in groups.items()]


def _drops(found: Sequence[Row]) -> list[int]:
    return sorted({row.drop for row in found})


def _dress(axes: Any, found: Sequence[Row]) -> None:
    drops = _drops(found)
    axes.set_xticks(range(len(drops)), [str(drop) for drop in drops])
    axes.set_xlabel("tokens read before the connection was cut")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", length=0)
    axes.yaxis.grid(visible=True, color="#e6eaed", linewidth=0.8)
    axes.set_axisbelow(True)
