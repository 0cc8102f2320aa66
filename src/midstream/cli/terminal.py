"""What stands between a program and a person: text made safe for a terminal, colour, and signals taken in time."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TextIO

from midstream.cli.exits import INTERRUPTED, TERMINATED

# What a terminal would obey and not show: C0 but for tab and line feed, DEL, C1 (ECMA-48, section 5), and the marks
# that reorder what is read (Unicode Standard Annex 9, section 2.1 to 2.5).
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

_STYLES = {"dim": "2", "bold": "1", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def safe(text: str) -> str:
    """Text of a stranger, such as a model, with what a terminal would obey written out: ESC becomes `\\x1b`."""
    return _COMMANDS.sub(_written_out, text)


def safe_json(text: str) -> str:
    """The same for JSON, which stays JSON: in it these characters can only stand inside strings."""
    return _COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class OutputFailed(Exception):
    """Stdout takes no more.  `__cause__` is the OSError."""

    def __init__(self, reason: str, *, broken_pipe: bool = False) -> None:
        super().__init__(reason)
        self.broken_pipe = broken_pipe


class Console:
    """Data to stdout, unbuffered; talk to stderr.  Where both are one terminal, neither breaks into the other's line.

    Data is made safe when stdout is a terminal and passed on as it is when it is not; talk is always made safe.
    """

    def __init__(self, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self._out = stdout or sys.stdout
        self._err = stderr or sys.stderr
        self.out_is_terminal = _is_terminal(self._out)
        self.err_is_terminal = _is_terminal(self._err)
        self._out_colour = self.out_is_terminal and _colour_wanted()
        self._err_colour = self.err_is_terminal and _colour_wanted()
        self._out_middle = False  # in the middle of a line
        self._err_middle = False

    @property
    def width(self) -> int:
        """Columns of the terminal."""
        return shutil.get_terminal_size().columns

    # --- data -------------------------------------------------------------------------------------------------------

    def text(self, text: str) -> None:
        """Write data and have it out of this process.  Raises OutputFailed."""
        if text:
            self._before_data()
            self._write(safe(text) if self.out_is_terminal else text)

    def json(self, line: bytes) -> None:
        """Write a line of JSON.  Raises OutputFailed."""
        text = line.decode()
        self._before_data()
        self._write((safe_json(text) if self.out_is_terminal else text) + "\n")

    def styled(self, text: str, style: str = "") -> str:
        """For `raw`: in colour where stdout shows colours."""
        return _paint(safe(text), style if self._out_colour else "")

    def raw(self, text: str) -> None:
        """Write what is already safe.  Raises OutputFailed."""
        self._write(text)

    def _before_data(self) -> None:
        if self._err_middle and self.out_is_terminal:
            self._say("\n")

    def _write(self, text: str) -> None:
        if self._out is None:  # started with stdout closed: the number 1 may be anybody's by now
            raise OutputFailed("stdout is closed")
        encoding = self._out.encoding if self.out_is_terminal else "utf-8"
        try:
            _write_all(self._out.fileno(), text.encode(encoding, "backslashreplace"))
        except OSError as error:
            broken = isinstance(error, BrokenPipeError)
            raise OutputFailed(error.strerror or str(error), broken_pipe=broken) from error
        self._out_middle = not text.endswith("\n")

    # --- talk -------------------------------------------------------------------------------------------------------

    def talk(self, line: str, style: str = "") -> None:
        """A line on stderr.  Never fails: there is nobody left to tell."""
        self._before_talk()
        self._say(_paint(safe(line), style if self._err_colour else "") + "\n")

    def aside(self, text: str) -> None:
        """A piece of running text on stderr, dimmed."""
        if text:
            if not self._err_middle:
                self._before_talk()
            self._say(_paint(safe(text), "dim" if self._err_colour else ""), ends_line=text.endswith("\n"))

    def drawn(self, text: str) -> None:
        """Write to stderr, as it is, what is already safe and what moves the cursor.  Never fails."""
        self._say(text)

    def echoed(self) -> None:
        """The terminal has written on its own, such as `^C`: what comes next begins a line."""
        self._err_middle = self.err_is_terminal

    def close(self) -> None:
        """Leave the cursor of a terminal at the beginning of a line."""
        if self._out_middle and self.out_is_terminal and not self.err_is_terminal:
            self._write("\n")
        self._before_talk()

    def _before_talk(self) -> None:
        if self._err_middle or (self._out_middle and self.out_is_terminal and self.err_is_terminal):
            self._say("\n")
            self._out_middle = self._out_middle and not self.out_is_terminal

    def _say(self, text: str, *, ends_line: bool = True) -> None:
        self._err_middle = not ends_line
        if self._err is not None:
            # Past its buffer: what that could not get rid of would change the exit code when Python ends.
            with contextlib.suppress(OSError):
                _write_all(self._err.fileno(), text.encode(self._err.encoding, "backslashreplace"))


def _write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:  # somebody made the pipe non-blocking, which all its holders share
            select.select([], [fd], [])


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def _colour_wanted() -> bool:
    """By https://no-color.org; a dumb terminal shows the codes themselves."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _paint(text: str, style: str) -> str:
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if style and text else text


class Interrupted(BaseException):
    """SIGINT or SIGTERM, with its exit code.  No Exception: nothing may take it for a failure to be mended."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.code = TERMINATED if signum == signal.SIGTERM else INTERRUPTED


class Interrupts:
    """Raises Interrupted for SIGINT and SIGTERM, but not inside `held`: so a record is written whole or not at all.

    A second signal is not held: what is held may be stuck.
    """

    def __init__(self) -> None:
        self._holding = False
        self._pending: int | None = None

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._take) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, signum: int, frame: FrameType | None) -> None:
        if self._holding and self._pending is None:
            self._pending = signum
        else:
            self._pending = None
            raise Interrupted(signum)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        if self._pending is not None:
            signum, self._pending = self._pending, None
            raise Interrupted(signum)


def command(*words: str) -> str:
    """A line for the user's shell that runs this program again."""
    return shlex.join([*_program(), *words])


def _program() -> list[str]:
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return [sys.executable, "-m", "midstream"]
    found = shutil.which(called.name)
    if found is not None and Path(found).resolve() == called.resolve():
        return [called.name]
    return [str(called)]


def save(path: Path, text: str) -> None:
    """Replace a file's content in one step: whoever reads it, whenever we die, finds the old or the new one whole.

    Not synced to the disk: it outlives this process, not the machine's power.  Raises OSError.
    """
    path = path.resolve()
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="ascii")
    new.replace(path)
