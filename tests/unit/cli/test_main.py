"""The command line as a whole: verbs, help, exit codes."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

from midstream.cli import VERBS, exits, main
from tests.unit.cli.program import environment
from tests.unit.client.odd_gateway import OddGateway, in_thread


def test_alone_it_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == exits.OK
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("usage: midstream ")
    for verb in VERBS:
        assert f"\n    {verb} " in out


def test_help_shows_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == exits.OK
    out = capsys.readouterr().out
    for code, meaning in exits.MEANINGS.items():
        assert f"{code:>5}  {meaning}\n" in out


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_says_what_it_is_for_and_where_the_exit_codes_are(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == exits.OK
    out = capsys.readouterr().out
    module = sys.modules[f"midstream.cli.{verb}"]
    assert module.__doc__ is not None
    assert module.__doc__.strip() in out
    assert out.endswith("\nexit codes: see `midstream --help`\n")


def test_every_exit_code_stands_in_the_table() -> None:
    named = {value for name, value in vars(exits).items() if name.isupper() and isinstance(value, int)}
    assert named == set(exits.MEANINGS)


@pytest.mark.parametrize("words", [["nonsense"], ["--nonsense"], ["inspect", "--nonsense"], ["inspect", "--js"]])
def test_what_is_not_understood_is_a_usage_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == exits.USAGE
    assert words[-1] in capsys.readouterr().err


# What takes long to import, each for some verbs alone.
HEAVY = {
    *("aiohttp", "asyncio", "connectrpc", "google", "grpc", "prometheus_client", "protobuf", "redis", "ssl"),
    *("starlette", "uvicorn", "uvloop", "websockets"),
    *("midstream.client", "midstream.journal", "midstream.pool", "midstream.producers", "midstream.server"),
    *("midstream.streams", "midstream.transports", "midstream.worker"),
}
# A client over HTTP, which blocks.
CLIENT = {"ssl", "midstream.client"}
# What a setting of the gateway is made of.
SETTINGS = {"midstream.producers", "midstream.server"}


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        ("--version", set()),
        ("--help", set()),
        ("nonsense", set()),
        ("generate --help", CLIENT),
        ("inspect --help", CLIENT),
        ("worker --help", CLIENT),
        ("serve --help", SETTINGS),
        ("demo --help", SETTINGS | {"asyncio", "ssl"}),  # it runs a model's process
    ],
)
def test_nothing_is_imported_for_another_verb_or_before_it_runs(words: str, needed: set[str]) -> None:
    code = (
        "import sys; from midstream.cli import main\n"
        f"try: main({words.split()!r})\n"
        f"finally: print('loaded', *sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=20, check=False)
    assert set(done.stderr.decode().splitlines()[-1].split()) - {"loaded"} <= needed


def test_an_answer_over_http_loads_no_server_and_no_other_transport() -> None:
    code = (
        "import sys; from midstream.cli import main\n"
        "code = main(['generate', 'hi'])\n"
        f"print('loaded', *sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)"
    )
    with in_thread(OddGateway()) as gateway:
        env = environment(MIDSTREAM_GATEWAY=gateway.url)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=20, check=False, env=env)
        assert done.stdout.decode() == gateway.text
    assert set(done.stderr.decode().splitlines()[-1].split()) - {"loaded"} <= CLIENT


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == exits.OK
    assert capsys.readouterr().out == f"midstream {version('midstream')}\n"


@pytest.mark.parametrize("verb", ["", "generate"])
def test_it_runs_as_a_module(verb: str) -> None:
    command = [sys.executable, "-m", "midstream", *verb.split(), "--help"]
    done = subprocess.run(command, capture_output=True, timeout=20, check=False)
    assert done.returncode == exits.OK
    assert done.stdout.startswith(f"usage: midstream {verb}".encode().rstrip())
