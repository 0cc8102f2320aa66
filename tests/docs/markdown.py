"""What tests of the documents need of Markdown: tables, fenced blocks, headings, links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(\w*)\s*$")
_MARK = re.compile(r"^<!-- (\w+): (.+) -->$")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`[^`]*`")


def pages() -> list[Path]:
    """Every document of the project."""
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def name(page: Path) -> str:
    """A page's path from the root, as a test's id."""
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.  `mark` is what the comment right above it says, as in `<!-- sh: serves -->`."""

    line: int
    language: str
    mark: str | None
    text: str


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    language, begin, inside, mark, kept = "", 0, False, None, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        if not inside and (fence := _FENCE.match(line)):
            language, begin, inside, kept = fence[1], number, True, []
        elif inside and line.strip() == "```":
            yield Block(begin, language, mark, "".join(f"{each}\n" for each in kept))
            inside, mark = False, None
        elif inside:
            kept.append(line)
        elif found := _MARK.match(line):
            mark = found[2]
        elif line.strip():
            mark = None


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next one of the same or a higher level.  Raises LookupError."""
    lines = text.splitlines()
    begin = next((at for at, line in enumerate(lines) if re.sub(r"^#+ ", "", line) == heading != line), None)
    if begin is None:
        raise LookupError(f"no heading {heading!r}")
    level = len(lines[begin]) - len(lines[begin].lstrip("#"))
    rest = lines[begin + 1 :]
    end = next((at for at, line in enumerate(rest) if re.match(rf"#{{1,{level}}} ", line)), len(rest))
    return "\n".join(rest[:end])


def table(text: str) -> list[list[str]]:
    """The rows of the first table, without its head; cells without the white space around them."""
    rows: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif rows:
            break
    return rows[2:]


def plain(cell: str) -> str:
    """A cell without its back-quotes."""
    return cell.strip("`")


def anchors(text: str) -> set[str]:
    """What a link may point to in a page, by GitHub's rule for headings."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", without_blocks(text), re.MULTILINE):
        kept = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(kept.replace(" ", "-"))
    return found


def links(text: str) -> list[str]:
    """Where the links and pictures of a page point to."""
    return _LINK.findall(_CODE.sub("", without_blocks(text)))


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
