"""`midstream` run as users run it: as a process with pipes, or on a terminal of its own."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

COMMAND = [sys.executable, "-W", "error::ResourceWarning", "-m", "midstream"]
PATIENCE = 20.0  # seconds, for what takes a fraction of one

# A command line run in this process: exit code, stdout, stderr.
Run = Callable[..., tuple[int, str, str]]


def environment(**changes: str) -> dict[str, str]:
    """This process's, without what would change the output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MIDSTREAM_")}
    for name in ("NO_COLOR", "LINES"):
        kept.pop(name, None)
    return {**kept, "TERM": "xterm", "COLUMNS": "120", **changes}


def start(*words: str, stdout: int | IO[Any] = subprocess.PIPE, **env: str) -> subprocess.Popen[bytes]:
    """A run with pipes; stdin is empty."""
    return subprocess.Popen(
        [*COMMAND, *words], stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, env=environment(**env)
    )


def read_upto(stream: IO[bytes], mark: bytes) -> bytes:
    """What comes, up to the mark.  Raises TimeoutError."""
    data = b""
    until = time.monotonic() + PATIENCE
    while not data.endswith(mark):
        ready, _, _ = select.select([stream], [], [], until - time.monotonic())
        if not ready or not (byte := os.read(stream.fileno(), 1)):
            raise TimeoutError(f"waited for {mark!r}, got {data!r}")
        data += byte
    return data


def finish(process: subprocess.Popen[bytes]) -> tuple[int, bytes, str]:
    """Exit code, what is left of stdout, stderr."""
    out, err = process.communicate(timeout=PATIENCE)
    talk = err.decode()
    assert "Traceback" not in talk
    assert "Warning" not in talk
    return process.returncode, out or b"", talk


def holds(path: Path, text: str) -> None:
    """Wait until a file holds just this.  Raises TimeoutError."""
    until = time.monotonic() + PATIENCE
    while not path.exists() or path.read_text() != text:
        if time.monotonic() > until:
            raise TimeoutError(f"{path} holds {path.read_text() if path.exists() else None!r}, not {text!r}")
        time.sleep(0.005)


@dataclass
class Terminal:
    """A run on a terminal of 120 columns; `screen` is everything it has written."""

    process: subprocess.Popen[bytes]
    master: int
    screen: bytes = field(default=b"")

    def see(self, mark: bytes) -> None:
        """Wait until it has written this.  Raises TimeoutError."""
        until = time.monotonic() + PATIENCE
        while mark not in self.screen:
            ready, _, _ = select.select([self.master], [], [], max(0.0, until - time.monotonic()))
            if not ready or not self.more():
                self.process.kill()
                self.process.wait()
                raise TimeoutError(f"waited for {mark!r}, saw {self.screen!r}")

    def press(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def end(self) -> int:
        """Read what is left; the exit code."""
        while self.more():
            pass
        os.close(self.master)
        return self.process.wait(PATIENCE)

    def more(self) -> bool:
        """Read what there is, at least something; False at the end."""
        try:
            data = os.read(self.master, 65_536)
        except OSError:  # EIO: the other end is closed
            return False
        self.screen += data
        return bool(data)


def on_terminal(*words: str, **env: str) -> Terminal:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
    process = subprocess.Popen(
        [*COMMAND, *words], stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=environment(**env),
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(slave)
    return Terminal(process, master)
