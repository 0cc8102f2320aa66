"""What is reported: a figure per round, the floor's beside it, and the budget they are held against."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal


@dataclass(frozen=True)
class Budget:
    """A bound: on the median round, on the worst one, or on the median ratio to the floor."""

    bound: float
    kind: Literal["at most", "at least"] = "at most"
    of: Literal["median", "worst", "ratio"] = "median"

    def holds(self, figure: Figure) -> bool:
        values = figure.ratios() if self.of == "ratio" else figure.values
        if self.kind == "at most":
            return (max(values) if self.of == "worst" else median(values)) <= self.bound
        return (min(values) if self.of == "worst" else median(values)) >= self.bound

    def __str__(self) -> str:
        sign = "≤" if self.kind == "at most" else "≥"
        return f"{sign} {number(self.bound)}{' ×' if self.of == 'ratio' else ''}"


@dataclass
class Figure:
    """One line of the table.  `values` and `floor` hold one entry per round, in the same order."""

    load: str
    title: str
    unit: str
    values: list[float] = field(default_factory=list)
    floor: list[float] = field(default_factory=list)
    budget: Budget | None = None
    beside: str = "floor"  # what `floor` is of, where it is not the floor server
    waited: list[float] = field(default_factory=list)  # shares of a core the server was kept from, per run

    def ratios(self) -> list[float]:
        """Ours by the floor's, per round; none where no floor was measured."""
        if not self.floor:
            return []
        return [ours / theirs for ours, theirs in zip(self.values, self.floor, strict=True) if theirs]

    @property
    def mark(self) -> str:
        if self.budget is None or not self.values:
            return ""
        return "ok" if self.budget.holds(self) else "OVER"

    def json(self) -> dict[str, Any]:
        return {
            "load": self.load,
            "title": self.title,
            "unit": self.unit,
            "values": self.values,
            self.beside: self.floor,
            "ratios": self.ratios(),
            "budget": str(self.budget) if self.budget else None,
            "mark": self.mark,
            "waited": self.waited,
        }


def number(value: float) -> str:
    """Three significant digits, thousands grouped: 4.71, 23.5, 1,234."""
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def spread(values: list[float]) -> str:
    """Median, and the lowest and highest round where they differ."""
    if not values:
        return ""
    low, high = number(min(values)), number(max(values))
    return number(median(values)) if low == high else f"{number(median(values))} ({low}–{high})"


def table(figures: list[Figure]) -> str:
    """Plain text in columns; figures of one kind of load stand under its name."""
    rows = [("", "unit", "gateway", "floor", "ratio", "budget", "", "kept waiting")]
    load = ""
    for figure in figures:
        if figure.load != load:
            load = figure.load
            rows += [("",) * 8, (load, *("",) * 7)]
        rows.append(_row(figure))
    widths = [max(len(row[column]) for row in rows if row[1]) for column in range(8)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _row(figure: Figure) -> tuple[str, str, str, str, str, str, str, str]:
    beside = spread(figure.floor)
    if beside and figure.beside != "floor":
        beside = f"{figure.beside}: {beside}"
    return (
        f"  {figure.title}",
        figure.unit,
        spread(figure.values),
        beside,
        spread(figure.ratios()) if figure.beside in ("floor", "bare", "native") else "",
        str(figure.budget) if figure.budget else "",
        figure.mark,
        f"{max(figure.waited):.0%}" if figure.waited else "",
    )
