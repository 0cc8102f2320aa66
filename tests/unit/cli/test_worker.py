"""`midstream worker`: what the command line may say, and what the terminal shows."""

from __future__ import annotations

import logging
import os
import pty
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO, cast

import pytest

from midstream.cli import exits, main
from midstream.cli.terminal import Console
from midstream.cli.worker_board import Board
from midstream.worker.asking import Answer, Task
from midstream.worker.job import Job, Result
from midstream.worker.slot import Tally, Worker

# --- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever this machine has in its environment, and the log as it was."""
    for name in ("MIDSTREAM_GATEWAY", "MIDSTREAM_KEY", "MIDSTREAM_UPSTREAM_KEY", "NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(logging.root, "handlers", list(logging.root.handlers))
    level = logging.getLogger("midstream").level
    yield
    logging.getLogger("midstream").setLevel(level)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--threads", "0"], "argument --threads: '0' is no whole number from 1 to 50"),
        (["--threads", "51"], "argument --threads: '51' is no whole number from 1 to 50"),
        (["--threads", "²"], "argument --threads: '²' is no whole number"),
        (["--max-length", "-1"], "argument --max-length: '-1' is no whole number from 1 to 1,048,576"),
        (["--max-length", "1e3"], "argument --max-length: '1e3' is no whole number"),
        (["--max-context-length", "9" * 5000], "is no whole number from 1 to 1,048,576"),
        (["--name", ""], "argument --name: '' is no name of 1 to 100 characters"),
        (["--name", "n" * 101], "is no name of 1 to 100 characters"),
        (["--model", "=local"], "argument --model: '=local' is not NAME or NAME=LOCAL"),
        (["--model", "name="], "argument --model: 'name=' is not NAME or NAME=LOCAL"),
        (["--feature", " "], "argument --feature: ' ' is no name of 1 to 100 characters"),
        (["--gatewy", "x"], "not understood: '--gatewy' 'x'"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["worker", *words])
    assert caught.value.code == exits.USAGE
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--gateway", "pool.example"], "not a gateway's address: 'pool.example'; write http://HOST:PORT"),
        (["--gateway", "http://bob:secret@pool.example"], "a gateway's address holds no credentials"),
        (["--upstream", "localhost:8080"], "an upstream is an http:// or https:// URL, not 'localhost:8080'"),
        (["--upstream", "http://u:p@localhost"], "must not hold credentials"),
        (["--key", "schlüssel"], "the key has characters that cannot be sent"),
        (["--model", "a=x", "--model", "a=y"], "--model names a model twice"),
    ],
)
def test_an_address_or_a_key_that_cannot_work_is_told_at_once(
    words: list[str], complaint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["worker", *words]) == exits.USAGE
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("midstream worker: ")
    assert complaint in err
    assert "secret" not in err


# --- the board -------------------------------------------------------------------------------------------------------


@dataclass
class Working:
    """What a board shows of a worker."""

    tally: Tally = field(default_factory=Tally)
    running: dict[int, Any] = field(default_factory=dict)
    trouble: str = ""


@dataclass
class Running:
    task: Task
    answer: Answer


def job(model: str = "home", tokens: int = 0, at: int = 0) -> Job:
    return cast(Job, Running(Task(f"job-{at}", model, True, {}), Answer(tokens=tokens)))


class Screen:
    """A terminal as one looks, for what a board writes: text, line feeds, carriage returns, and `clear the line`."""

    def __init__(self, columns: int) -> None:
        self.master, slave = pty.openpty()
        self.stream: TextIO = os.fdopen(slave, "w", encoding="utf-8")
        self.columns = columns
        self.written = ""

    def lines(self) -> list[str]:
        """Everything that stands there."""
        os.set_blocking(self.master, False)
        try:
            while data := os.read(self.master, 65_536):
                self.written += data.decode()
        except BlockingIOError:
            pass
        lines, column = [""], 0
        for part in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|.|\n", self.written.replace("\r\n", "\n"), re.DOTALL):
            if part == "\n":
                lines, column = [*lines, ""], 0
            elif part == "\r":
                column = 0
            elif part == "\x1b[K":
                lines[-1] = lines[-1][:column]
            elif not part.startswith("\x1b"):
                assert column < self.columns, "the line is broken by the terminal"
                lines[-1], column = lines[-1][:column] + part + lines[-1][column + 1 :], column + 1
        return lines

    def close(self) -> None:
        self.stream.close()
        os.close(self.master)


@dataclass
class Shown:
    board: Board
    screen: Screen
    worker: Working
    now: float = 0.0

    def draw(self, after: float = 1.0) -> list[str]:
        self.now += after
        self.board.draw()
        return self.screen.lines()


@pytest.fixture
def shown(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    """A board on a terminal, of 80 columns unless the test says otherwise."""
    columns = getattr(request, "param", 80)
    monkeypatch.setenv("COLUMNS", str(columns))
    screen = Screen(columns)
    monkeypatch.setattr(logging.root, "handlers", [logging.StreamHandler(screen.stream)])
    worker = Working()
    board = Board(screen.stream, Console(stderr=screen.stream), lambda: drawn.now)
    drawn = Shown(board, screen, worker)
    board.watch(cast(Worker, worker))
    yield drawn
    board.close()
    screen.close()


def test_the_last_line_says_what_it_does_and_has_earned(shown: Shown) -> None:
    assert shown.draw() == ["waiting for work · 0 jobs so far · earned 0"]
    shown.worker.running[0] = job("home", 1)
    shown.worker.tally = Tally({"done": 2, "cancelled": 1}, 12_345, 1_200.0)
    shown.board.balance = -20
    assert shown.draw() == ["home: 1 token · 3 jobs so far · earned 1,200 · balance -20"]
    shown.worker.running = {at: job("home", 1_000, at) for at in range(4)}
    assert shown.draw() == ["4 running: 4,000 tokens · 3 jobs so far · earned 1,200 · balance -20"]
    shown.worker.trouble = "the pool does not answer: Connection refused"
    assert shown.draw() == ["the pool does not answer · 4 running: 4,000 tokens · 3 jobs so far"]
    shown.worker.running.clear()
    assert shown.draw() == ["the pool does not answer · 3 jobs so far · earned 1,200 · balance -20"]


@pytest.mark.parametrize(
    ("shown", "line"),
    [
        (50, "home: 12 tokens · 1 job so far · earned 1,234"),
        (40, "home: 12 tokens · 1 job so far"),
        (32, "home: 12 tokens · 1 job so far"),
        (20, "home: 12 tokens"),
        (10, "home: 12…"),
    ],
    indirect=["shown"],
)
def test_a_narrow_terminal_shows_what_matters_most(shown: Shown, line: str) -> None:
    shown.worker.running[0] = job("home", 12)
    shown.worker.tally = Tally({"done": 1}, 99, 1_234)
    shown.board.balance = 5
    assert shown.draw() == [line]


def test_jobs_and_log_lines_stand_above_the_last_line_which_is_whole(shown: Shown) -> None:
    one = job("home", 7)
    shown.worker.running[0] = job("home\x1b[2J\n", 7)
    assert shown.draw() == ["home\\x1b[2J : 7 tokens · 0 jobs so far · earned 0"]
    logging.getLogger("midstream").warning("the pool does not answer: \x1b[2J%s", "reset")
    shown.worker.running.clear()
    shown.worker.tally = Tally({"done": 1}, 7, 20)
    shown.now += 1
    shown.board.ended(one, Result("done", 7, 20.0))
    assert shown.draw() == [
        "the pool does not answer: \\x1b[2Jreset",
        "done       home  7 tokens  7/s  +20",
        "waiting for work · 1 job so far · earned 20",
    ]
    shown.board.ended(job("home"), Result("faulted", 0, why="the upstream at\n127.0.0.1 cannot be reached"))
    shown.board.close()
    logging.getLogger("midstream").warning("afterwards")
    assert shown.screen.lines()[2:] == [
        "faulted    home  0 tokens  the upstream at 127.0.0.1 cannot be reached",
        "worked: 1 done; 7 tokens; earned 20",
        "afterwards",
        "",
    ]


def test_tokens_that_come_faster_than_anybody_reads_are_not_all_drawn(shown: Shown) -> None:
    running = job("home", 0)
    shown.worker.running[0] = running
    for _ in range(1_000):
        running.answer.tokens += 1
        shown.draw(after=0.001)
    assert 2 <= shown.screen.written.count("\x1b[K") <= 6


def test_what_could_not_be_given_back_is_told(shown: Shown) -> None:
    shown.worker.tally.lost = 2
    shown.board.close()
    assert shown.screen.lines() == ["worked: 2 not given back; 0 tokens; earned 0", ""]


def test_colour_only_where_it_is_wanted(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    shown.board.ended(job(), Result("cancelled", 1))
    shown.screen.lines()
    assert "\x1b[33mcancelled" in shown.screen.written
    monkeypatch.setenv("NO_COLOR", "1")
    shown.board.close()
    plain = Board(shown.screen.stream, Console(stderr=shown.screen.stream), lambda: 0.0)
    plain.ended(job(), Result("cancelled", 2))
    assert shown.screen.lines()[-2] == "cancelled  home  2 tokens"
    assert shown.screen.written.count("\x1b[33m") == 1


@pytest.mark.parametrize("terminal", [True, False])
def test_where_no_line_can_be_redrawn_there_are_only_lines(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pipe, and on a terminal that knows no commands."""
    monkeypatch.setenv("TERM", "dumb")
    screen = Screen(80)
    stream = screen.stream if terminal else open(os.pipe()[1], "w", encoding="utf-8")  # noqa: SIM115
    log = logging.StreamHandler(stream)
    monkeypatch.setattr(logging.root, "handlers", [log])
    board = Board(stream, Console(stderr=stream), lambda: 0.0)
    board.watch(cast(Worker, Working()))
    board.draw()
    assert log.stream is stream
    board.close()
    stream.flush()
    assert "\x1b" not in "".join(screen.lines())
    stream.close()
    screen.close()


def test_a_terminal_that_has_gone_does_not_end_the_work(shown: Shown) -> None:
    os.close(shown.screen.master)
    shown.board.draw()
    shown.board.ended(job(), Result("done", 1))
    logging.getLogger("midstream").warning("still here")
    shown.board.close()
    shown.screen.master = os.open(os.devnull, os.O_RDONLY)


def test_the_log_of_others_goes_where_it_went(shown: Shown) -> None:
    """Only what is written to the board's own stream stands above its line."""
    elsewhere = logging.StreamHandler(sys.__stdout__)
    logging.root.addHandler(elsewhere)
    Board(shown.screen.stream, Console(stderr=shown.screen.stream), lambda: 0.0).close()
    assert elsewhere.stream is sys.__stdout__
