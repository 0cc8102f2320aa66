"""What the documents tell their readers to type works, and prints what they show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from midstream import cursor
from midstream.client import Client
from tests.docs.markdown import ROOT, Block, blocks, name, pages
from tests.docs.shell import Terminal, terminal

RUN = {"sh", "console", "python"}
# Shown, not run: files of other programs, data, and drawings.  What a page's script does is tested in a browser.
SHOWN = {"text", "json", "nginx", "haproxy", "caddyfile", "yaml", "ini", "html", "js"}


def is_run(block: Block) -> bool:
    return block.language in RUN or block.mark == "node"


def typed(page: Path) -> bool:
    return any(is_run(block) for block in blocks(page.read_text(encoding="utf-8")))


README = ROOT / "README.md"


@contextmanager
def reader_of(directory: Path) -> Iterator[Terminal]:
    """A terminal and, until the page starts a gateway of its own, one with a simulated model."""
    with terminal(directory) as shell:
        shell.serve("midstream serve --upstream scripted: --journal memory:")
        yield shell


def type_all(shell: Terminal, page: Path, before: Callable[[Block], object] = lambda block: None) -> None:
    """Every block of the page that is run, in order.  `before` is called before each."""
    for block in blocks(page.read_text(encoding="utf-8")):
        if not is_run(block):
            continue
        try:
            before(block)
            shell.type(block)
        except AssertionError as error:
            error.add_note(f"{name(page)}, line {block.line}")
            raise


@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", [page for page in pages() if typed(page) and page != README], ids=name)
def test_a_page_does_what_it_says(page: Path, tmp_path: Path) -> None:
    """Every command exits as it should, and prints what the page shows."""
    with reader_of(tmp_path) as shell:
        type_all(shell, page)


@pytest.mark.timeout(120)
def test_the_readme_does_what_it_says_and_its_two_halves_are_the_answer(tmp_path: Path) -> None:
    """Killed, then resumed: joined, the outputs are what the gateway kept, but for the one token the text speaks of."""
    compared = False

    def compare(block: Block) -> None:
        nonlocal compared
        if block.mark != "serves" or compared:
            return
        stream_id = cursor.decode((tmp_path / "here").read_text(encoding="ascii").strip()).stream_id
        whole = Client(shell.address).snapshot(stream_id)["text"]
        first, rest = shell.printed
        again = len(first) + len(rest) - len(whole)
        assert first
        assert rest
        assert first + rest[again:] == whole
        assert rest[:again] == first[len(first) - again :]
        assert len(rest[:again].split()) <= 1
        compared = True

    with reader_of(tmp_path) as shell:
        type_all(shell, README, before=compare)
    assert compared


@pytest.mark.parametrize("page", pages(), ids=name)
def test_every_block_is_of_a_known_kind(page: Path) -> None:
    """So that none is passed over because nobody knew what to do with it."""
    for block in blocks(page.read_text(encoding="utf-8")):
        assert block.language in RUN | SHOWN, f"line {block.line}: {block.language or 'no language'}"
        assert is_run(block) or block.mark is None, f"line {block.line}: a mark on what is not run"
