"""The command line as a whole: verbs, help, exit codes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from midstream.cli import VERBS, exits, main
from midstream.client import GaveUp, UnexpectedAnswer
from midstream.errors import CursorAhead, CursorExpired, MidstreamError, StoreUnavailable, Unauthorized


def test_alone_it_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == exits.OK
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("usage: midstream ")
    for verb in VERBS:
        assert f"\n    {verb} " in out


@pytest.mark.parametrize("words", [["--help"], *[[verb, "--help"] for verb in VERBS]])
def test_every_help_shows_every_exit_code(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == exits.OK
    out = capsys.readouterr().out
    for code, meaning in exits.MEANINGS.items():
        assert f"{code:>5}  {meaning}\n" in out


def test_every_exit_code_stands_in_the_table() -> None:
    named = {value for name, value in vars(exits).items() if name.isupper() and isinstance(value, int)}
    assert named == set(exits.MEANINGS)


@pytest.mark.parametrize("words", [["nonsense"], ["--nonsense"], ["inspect", "--nonsense"], ["inspect", "--js"]])
def test_what_is_not_understood_is_a_usage_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == exits.USAGE
    assert words[-1] in capsys.readouterr().err


def test_a_verb_does_not_wait_for_the_modules_of_others() -> None:
    """`generate` starts without a server, and without aiohttp."""
    code = (
        "import sys; from midstream.cli import main\n"
        "try: main(['generate', '--help'])\n"
        "finally: print(sorted({'starlette', 'uvicorn', 'aiohttp', 'asyncio'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=20, check=False)
    assert done.stderr.decode().strip() == "[]"


@pytest.mark.parametrize("verb", ["", "generate"])
def test_it_runs_as_a_module(verb: str) -> None:
    command = [sys.executable, "-m", "midstream", *verb.split(), "--help"]
    done = subprocess.run(command, capture_output=True, timeout=20, check=False)
    assert done.returncode == exits.OK
    assert done.stdout.startswith(f"usage: midstream {verb}".encode().rstrip())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Unauthorized(), exits.REFUSED),
        (UnexpectedAnswer(), exits.REFUSED),
        (CursorExpired(3), exits.POSITION_GONE),
        (CursorAhead(9), exits.POSITION_GONE),
        (GaveUp("reset", 3, None), exits.UNREACHABLE),
        (StoreUnavailable(), exits.REFUSED),
    ],
)
def test_each_error_of_a_client_has_its_code(error: MidstreamError, code: int) -> None:
    assert exits.of(error) == code
