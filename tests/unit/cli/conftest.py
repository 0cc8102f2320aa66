"""The command line, run in this process."""

from __future__ import annotations

import sys

import pytest

from midstream.cli import main
from tests.unit.cli.program import Run


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line; exit code, stdout, stderr."""
    for variable in ("MIDSTREAM_KEY", "MIDSTREAM_GATEWAY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "argv", ["midstream"])

    def run(*words: str) -> tuple[int, str, str]:
        code = main(words)
        out, err = capfd.readouterr()
        return code, out, err

    return run
