"""Text made safe for a terminal, talk beside data, the command for the user's shell, signals taken in time."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
import threading
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.cli.exits import INTERRUPTED, TERMINATED
from midstream.cli.terminal import Console, Interrupted, Interrupts, OutputFailed, command, safe, safe_json, save

OBEYED = [chr(code) for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"]
BIDI = [chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, é, 🚀,\ta tab\nand a line", "plain, é, 🚀,\ta tab\nand a line"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("over\rwritten", "over\\x0dwritten"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("del\x7f", "del\\x7f"),
    ],
)
def test_what_a_terminal_would_obey_is_written_out(text: str, shown: str) -> None:
    assert safe(text) == shown


@pytest.mark.parametrize("character", OBEYED + BIDI)
def test_no_command_reaches_a_terminal(character: str) -> None:
    assert character not in safe(f"a{character}b")
    assert character not in safe_json(f'"a{character}b"')


@given(st.text())
def test_everything_else_is_shown_as_it_is(text: str) -> None:
    plain = "".join(c for c in text if unicodedata.category(c) not in ("Cc", "Cf"))
    assert safe(plain) == plain


@given(st.dictionaries(st.text(), st.text()))
def test_json_made_safe_is_still_the_same_json(value: dict[str, str]) -> None:
    assert json.loads(safe_json(json.dumps(value, ensure_ascii=False))) == value


class Screen:
    """Files that say they are terminals, or not; closed at the end of the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: list[TextIO] = []

    def file(self, name: str, *, terminal: bool = False) -> TextIO:
        stream = (self._folder / name).open("a", encoding="utf-8")
        self._open.append(stream)
        stream.isatty = lambda: terminal  # type: ignore[method-assign]
        return stream

    def console(self) -> Console:
        """One whose stdout and stderr are the same terminal."""
        return Console(self.file("screen", terminal=True), self.file("screen", terminal=True))

    def read(self, name: str = "screen") -> str:
        return (self._folder / name).read_bytes().decode()

    def close(self) -> None:
        for stream in self._open:
            stream.close()


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[Screen]:
    with contextlib.closing(Screen(tmp_path)) as screen:
        yield screen


def test_talk_on_the_same_terminal_never_stands_in_a_line_of_the_answer(screen: Screen) -> None:
    console = screen.console()
    console.text("Once upon")
    console.talk("lost")
    console.text(" a time\n")
    console.talk("done")
    console.close()
    assert screen.read() == "Once upon\nlost\n a time\ndone\n"


def test_running_talk_ends_before_the_answer_goes_on(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    console = screen.console()
    console.aside("hm")
    console.aside(", well")
    console.text("Yes")
    console.close()
    assert screen.read() == "hm, well\nYes\n"


def test_data_in_a_file_is_untouched_by_talk(screen: Screen) -> None:
    console = Console(screen.file("out"), screen.file("err", terminal=True))
    console.text("Once \x1b[31m")
    console.talk("lost")
    console.text("upon")
    console.close()
    assert screen.read("out") == "Once \x1b[31mupon"


@pytest.mark.parametrize(
    ("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colour_is_for_terminals_that_want_it(
    screen: Screen, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], coloured: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    console = screen.console()
    console.talk("oh\x1b[5m", "red")
    assert screen.read() == ("\x1b[31moh\\x1b[5m\x1b[0m\n" if coloured else "oh\\x1b[5m\n")


def test_a_file_gets_no_colour(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    console = Console(screen.file("out"), screen.file("err"))
    console.talk("oh", "red")
    assert screen.read("err") == "oh\n"
    assert console.styled("x", "red") == "x"


def test_a_full_pipe_that_somebody_made_nonblocking_is_waited_for() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with os.fdopen(reading, "rb") as reader, os.fdopen(writing, "w") as writer:
        console = Console(writer)
        text = "x" * 300_000
        got: list[bytes] = []
        taker = threading.Thread(target=lambda: got.append(reader.read(len(text))))
        taker.start()
        console.text(text)
        taker.join(5)
    assert got == [text.encode()]


def test_talk_to_nobody_is_no_failure(screen: Screen) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as nobody:
        Console(screen.file("out"), nobody).talk("hello?")


def test_stdout_that_is_closed_is_a_failure_and_not_somebody_elses_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(OutputFailed, match="closed"):
        Console().text("x")


def held(interrupts: Interrupts, done: list[str], *signals: signal.Signals) -> None:
    with interrupts.held():
        for number in signals:
            signal.raise_signal(number)
            done.append(number.name)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, TERMINATED)])
def test_a_signal_waits_until_what_is_held_is_done(number: signal.Signals, code: int) -> None:
    done: list[str] = []
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        with pytest.raises(Interrupted) as caught:
            held(interrupts, done, number)
        with pytest.raises(Interrupted):
            signal.raise_signal(number)
    assert done == [number.name]
    assert caught.value.code == code
    assert signal.getsignal(number) is before


def test_a_second_signal_does_not_wait() -> None:
    done: list[str] = []
    with Interrupts() as interrupts, pytest.raises(Interrupted):
        held(interrupts, done, signal.SIGTERM, signal.SIGINT)
    assert done == ["SIGTERM"]


def test_the_command_is_one_that_the_shell_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "my tools" / "midstream")])
    line = command("generate", "--position=a b'c.txt")
    assert shlex.split(line) == [str(tmp_path / "my tools" / "midstream"), "generate", "--position=a b'c.txt"]


def test_a_program_on_the_path_is_called_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "midstream"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(program)])
    assert command("inspect") == "midstream inspect"
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "__main__.py")])
    assert command("inspect") == f"{sys.executable} -m midstream inspect"


def test_a_saved_file_is_replaced_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    save(tmp_path / "link", "one\n")
    save(tmp_path / "link", "two\n")
    assert (tmp_path / "kept").read_text() == "two\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "link"]
