"""What the documents tell their readers to type works, and prints what they show."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from midstream import cursor
from midstream.client import Client
from tests.docs.markdown import ROOT, Block, blocks, name, pages
from tests.docs.shell import Terminal, terminal
from tests.valkeys import Valkey, free_port

RUN = {"sh", "console", "python"}
# Shown, not run: files of other programs, data, and drawings.  What a page's script does is tested in a browser.
SHOWN = {"text", "json", "nginx", "haproxy", "caddyfile", "yaml", "ini", "html", "js"}


def is_run(block: Block) -> bool:
    return block.language in RUN or block.mark == "node"


def typed(page: Path) -> bool:
    return any(is_run(block) for block in blocks(page.read_text(encoding="utf-8")))


README = ROOT / "README.md"
SEVERAL = ROOT / "docs" / "several-gateways.md"


@contextmanager
def reader_of(directory: Path) -> Iterator[Terminal]:
    """A terminal and, until the page starts a gateway of its own, one with a simulated model."""
    with terminal(directory) as shell:
        shell.serve("midstream serve --upstream scripted: --journal memory:")
        yield shell


def type_all(
    shell: Terminal,
    page: Path,
    before: Callable[[Block], object] = lambda block: None,
    here: Callable[[str], str] = lambda text: text,
) -> None:
    """Every block of the page that is run, in order.  `before` is called before each; `here` may change its text."""
    for block in blocks(page.read_text(encoding="utf-8")):
        if not is_run(block):
            continue
        try:
            before(block)
            shell.type(replace(block, text=here(block.text)))
        except AssertionError as error:
            error.add_note(f"{name(page)}, line {block.line}")
            raise


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", [page for page in pages() if typed(page) and page not in (README, SEVERAL)], ids=name)
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


@contextmanager
def killed_at_the_end(variables: Path, *names: str) -> Iterator[None]:
    """Ends what a page has left in the background: processes whose numbers are in these variables."""
    try:
        yield
    finally:
        exported = variables.read_text(encoding="utf-8") if variables.exists() else ""
        for pid in re.findall(rf'(?:{"|".join(names)})="(\d+)"', exported):
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@pytest.mark.timeout(120)
def test_one_gateway_is_killed_and_the_other_has_all_that_was_kept(tmp_path: Path) -> None:
    """On ports of their own and a real Valkey: joined, the outputs are the answer as far as it was written."""
    ports = {"8501": str(free_port()), "8502": str(free_port())}
    valkey = Valkey()
    ports["6379"] = str(valkey.port)
    try:
        with terminal(tmp_path) as shell, killed_at_the_end(tmp_path / ".variables.sh", "first", "second"):
            type_all(shell, SEVERAL, here=lambda text: re.sub("8501|8502|6379", lambda at: ports[at[0]], text))
            stream_id = cursor.decode((tmp_path / "here").read_text(encoding="ascii").strip()).stream_id
            kept = Client(f"http://127.0.0.1:{ports['8502']}").snapshot(stream_id)
            _, first, _, rest = shell.printed
            assert (kept["status"], kept["error"]["code"]) == ("failed", "writer_lost")
            assert rest.strip()
            assert first + rest == kept["text"]
    finally:
        valkey.close()


@pytest.mark.parametrize("page", pages(), ids=name)
def test_every_block_is_of_a_known_kind(page: Path) -> None:
    """So that none is passed over because nobody knew what to do with it."""
    for block in blocks(page.read_text(encoding="utf-8")):
        assert block.language in RUN | SHOWN, f"line {block.line}: {block.language or 'no language'}"
        assert is_run(block) or block.mark is None, f"line {block.line}: a mark on what is not run"
