"""Runs what the documents tell their readers to type, against a real gateway on a port of its own.

How a block is run is said by the comment right above it, which GitHub does not show:

    ```sh                          run to its end, within a time; must exit with 0
    <!-- sh: exits 3 -->           the same, but with this exit code
    <!-- sh: serves -->            runs for ever: waited for until it says where it listens, ended with the page
    <!-- sh: target -->            `make X`: the target must be there; what it does is tested elsewhere
    ```console                     what the block before it must have printed; … stands for anything
    ```python                      run as a program of its own
    <!-- python: pytest -->        run by pytest
    <!-- js: node -->              run by Node, with the clients that the tests have

A page's blocks share a directory and, like lines typed into one terminal, the variables that were exported.  The pages
speak of the gateway at its default address; here `midstream generate` and `inspect` are told the real one.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, Block
from tests.javascript import MODULES

WITHIN = 120.0  # seconds for a block: a slow and busy machine imports an SDK for the first time
_TOLD = "http://127.0.0.1:8400"  # what the pages say; on the way to the shell it becomes where the gateway is
_BIN = Path(sys.executable).parent
_VARIABLES = ".variables.sh"
_MIDSTREAM = """\
#!/bin/sh
case "$1" in generate | inspect | worker) verb=$1; shift; set -- "$verb" --gateway "$DOCS_GATEWAY" "$@" ;; esac
exec "{program}" "$@"
"""


class Server:
    """A command that runs for ever.  Wait for `address`; `stop` ends it and all it has started."""

    def __init__(self, script: str, directory: Path, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            ["bash", "-euc", script],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._talk: list[str] = []
        self._listening = threading.Event()
        self._ear = threading.Thread(target=self._hear, daemon=True)
        self._ear.start()

    def _hear(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._talk.append(line)
                if line.startswith("midstream serves "):
                    self._listening.set()
        self._listening.set()

    @property
    def talk(self) -> str:
        """What it has said on stderr so far."""
        return "".join(self._talk)

    def address(self) -> str:
        """Where it listens.  Raises AssertionError, with what it said, when it does not."""
        self._listening.wait(WITHIN)
        found = re.search(r"^midstream serves (http\S+)", self.talk, re.MULTILINE)
        assert found, f"does not serve; it said:\n{self.talk}"
        return found[1]

    def stop(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(WITHIN)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._ear.join()


@dataclass(slots=True)
class Terminal:
    """Somebody who types a page's commands.  `printed` is the stdout of each block so far."""

    directory: Path
    environment: dict[str, str]
    server: Server | None = None
    address: str = _TOLD  # where the gateway is
    printed: list[str] = field(default_factory=list)

    def serve(self, script: str) -> None:
        """Start a gateway in place of the one before."""
        self.close()
        self.server = Server(self._here(script), self.directory, self.environment)
        self.address = self.server.address()

    def type(self, block: Block) -> None:
        """Do what the block and its mark say.  Raises AssertionError when it does not go as the page says."""
        match block.language, block.mark:
            case "console", None:
                self._compare(block.text)
            case "sh", "serves":
                self.serve(block.text)
            case "sh", "target":
                self._targets(block.text)
            case "sh", mark if mark is None or mark.startswith("exits "):
                code = int(mark.removeprefix("exits ")) if mark else 0
                self._run(["bash", "-euc", self._script(block.text)], code)
            case "python", None:
                self._run([str(_BIN / "python"), "-X", "dev", "-c", self._here(block.text)], 0)
            case "python", "pytest":
                (self.directory / "test_page.py").write_text(self._here(block.text), encoding="utf-8")
                self._run([str(_BIN / "python"), "-m", "pytest", "-q", "test_page.py"], 0)
            case "js", "node":
                self._node(block.text)
            case _:
                raise AssertionError(f"line {block.line}: {block.language} is not marked {block.mark!r}")

    def _here(self, text: str) -> str:
        return text.replace(_TOLD, self.address)

    def _script(self, text: str) -> str:
        """The block, with what earlier blocks exported, keeping what it exports for later ones."""
        before = f"test ! -e {_VARIABLES} || . ./{_VARIABLES}"
        gateway = f"export DOCS_GATEWAY={self.address}"
        keep = f"trap 'export -p > {_VARIABLES}' EXIT"
        return "\n".join(["set -a", before, gateway, keep, self._here(text)])  # -a: every variable is exported

    def _run(self, command: list[str], code: int) -> None:
        done = subprocess.run(
            command,
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WITHIN,
            check=False,
        )
        self.printed.append(done.stdout)
        assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"

    def _node(self, text: str) -> None:
        program = shutil.which("node") or pytest.skip("no node is installed")
        modules = self.directory / "node_modules"  # where Node looks for what a program imports
        if not modules.exists():
            modules.symlink_to(MODULES)
        (self.directory / "page.mjs").write_text(self._here(text), encoding="utf-8")
        self._run([program, "page.mjs"], 0)

    def _targets(self, text: str) -> None:
        for line in text.splitlines():
            command, _, _ = line.partition("#")
            words = shlex.split(command)
            assert words[:1] == ["make"], f"no make: {line}"
            subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, check=True, capture_output=True)

    def _compare(self, expected: str) -> None:
        pattern = ".*".join(re.escape(part) for part in expected.strip().split("…"))
        printed = self.printed[-1]
        assert re.fullmatch(pattern, printed.strip(), re.DOTALL), f"the page shows:\n{expected}\nit printed:\n{printed}"

    def close(self) -> None:
        if self.server is not None:
            self.server.stop()
            self.server = None


@contextmanager
def terminal(directory: Path) -> Iterator[Terminal]:
    """A terminal in an empty directory, whose gateways take a free port."""
    commands = directory / ".bin"
    commands.mkdir()
    (commands / "midstream").write_text(_MIDSTREAM.format(program=_BIN / "midstream"), encoding="utf-8")
    (commands / "midstream").chmod(0o755)
    environment = {
        "PATH": f"{commands}:{_BIN}:{os.environ['PATH']}",
        "HOME": str(directory),
        "LANG": "C.UTF-8",
        "MIDSTREAM_PORT": "0",
        "MIDSTREAM_GRPC_PORT": "0",
        # Else it asks for one three times where nothing can be reached.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    opened = Terminal(directory, environment)
    try:
        yield opened
    finally:
        opened.close()
