"""What `midstream bench` makes of what it saw: medians, the check, the table.  No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

RETRY: Final = "retry"
RESUME: Final = "resume"
WAYS: Final = (RETRY, RESUME)

_COLUMNS: Final = (
    "dropped after",
    "reader",
    "first token",
    "first new token",
    "to the end",
    "inferred",
    "again",
    "text",
)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One reader that was cut off after `drop` tokens and came back.  Times in seconds from when it began to come back.

    first      until a token came
    unseen     until a token came that it had not had before the cut
    end        until the answer was complete
    inferred   tokens that the upstream wrote for it: those it had when it was cut, and all that were written after that
    length     tokens in the answer that it ended up with
    requests   how often the upstream was asked after the first time
    identical  what it ended up with is the answer, byte for byte
    overshoot  tokens that the upstream wrote after the cut and before it noticed: thrown away, and not in `inferred`
    """

    drop: int
    way: str
    first: float
    unseen: float
    end: float
    inferred: int
    length: int
    requests: int
    identical: bool
    overshoot: int = 0

    @property
    def again(self) -> int:
        """Tokens that were written a second time."""
        return self.inferred - self.length


@dataclass(frozen=True, slots=True)
class Row:
    """The runs of one way at one position: medians of the times; `identical` if all were."""

    drop: int
    way: str
    runs: int
    first: float
    unseen: float
    end: float
    inferred: float
    again: float
    identical: bool


def rows(attempts: Sequence[Attempt]) -> list[Row]:
    """A row for each position and way, in the order in which they were first tried."""
    groups: dict[tuple[int, str], list[Attempt]] = {}
    for attempt in attempts:
        groups.setdefault((attempt.drop, attempt.way), []).append(attempt)
    return [_row(drop, way, runs) for (drop, way), runs in groups.items()]


def _row(drop: int, way: str, runs: Sequence[Attempt]) -> Row:
    return Row(
        drop,
        way,
        len(runs),
        first=median(run.first for run in runs),
        unseen=median(run.unseen for run in runs),
        end=median(run.end for run in runs),
        inferred=median(run.inferred for run in runs),
        again=median(run.again for run in runs),
        identical=all(run.identical for run in runs),
    )


def violations(attempts: Sequence[Attempt], *, deterministic: bool) -> list[str]:
    """What should not be, a sentence each.

    Of a resume always: its text is the stream's, and the upstream is not asked again.  Of a model that says the same
    each time also: a retry costs exactly the tokens that the reader already had, and ends with the same text.
    """
    found = [wrong for attempt in attempts if attempt.way == RESUME for wrong in _of_resume(attempt)]
    if deterministic:
        retries = [attempt for attempt in attempts if attempt.way == RETRY]
        resumes = [attempt for attempt in attempts if attempt.way == RESUME]
        found += [wrong for pair in zip(retries, resumes, strict=True) for wrong in _of_pair(*pair)]
    return found


def _of_resume(resume: Attempt) -> list[str]:
    found = []
    if not resume.identical:
        found.append(f"resume after {resume.drop}: the two halves joined are not the answer")
    if resume.requests:
        found.append(f"resume after {resume.drop}: the upstream was asked again")
    if resume.again:
        found.append(f"resume after {resume.drop}: {resume.again} tokens were inferred again")
    return found


def _of_pair(retry: Attempt, resume: Attempt) -> list[str]:
    found = []
    if not retry.identical:
        found.append(f"retry after {retry.drop}: another text, so this upstream does not say the same each time")
    saved = retry.inferred - resume.inferred
    if saved != retry.drop:
        found.append(f"dropped after {retry.drop}: resume inferred {saved} tokens fewer than retry, not {retry.drop}")
    return found


def table(found: Sequence[Row]) -> str:
    """For people; columns of text, the same in a terminal and in a page."""
    cells = [_COLUMNS, *(_cells(row) for row in found)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_COLUMNS))]
    return "\n".join(_line(line, widths) for line in cells) + "\n"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    left = (1, len(cells) - 1)  # words; all others are numbers
    padded = [
        cell.ljust(width) if column in left else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()


def _cells(row: Row) -> tuple[str, ...]:
    text = "identical" if row.identical else "DIFFERENT"
    times = (duration(row.first), duration(row.unseen), duration(row.end))
    return (str(row.drop), row.way, *times, f"{row.inferred:g}", f"{row.again:g}", text)


def duration(seconds: float) -> str:
    """Three digits: 2.13 ms, 845 ms, 12.3 s."""
    value, unit = (seconds * 1000, "ms") if seconds < 1 else (seconds, "s")
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"


def document(about: dict[str, Any], attempts: Sequence[Attempt], wrong: Sequence[str]) -> dict[str, Any]:
    """All of it, for programs: what was measured and how, the medians, each run.  Times in seconds."""
    return {
        **about,
        "ok": not wrong,
        "violations": list(wrong),
        "rows": [asdict(row) for row in rows(attempts)],
        "attempts": [asdict(attempt) | {"again": attempt.again} for attempt in attempts],
    }
