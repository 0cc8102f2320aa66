"""What `midstream serve` says of a start that cannot be: which setting, what it takes, what to do."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from midstream.cli import exits, main
from tests.unit.cli.program import finish, read_upto, start


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MIDSTREAM_")]:
        monkeypatch.delenv(name)


def serve(*words: str) -> int:
    return main(["serve", "--upstream", "scripted:", "--journal", "memory:", "--grpc-port", "0", *words])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--port", "abc"], "--port 'abc': not a whole number"),
        (["--port", "65536"], "--port '65536': must be from 0 to 65535"),
        (["--max-streams", "many"], "--max-streams 'many': not a whole number"),
        (["--max-streams", "0"], "--max-streams '0': must be at least 1"),
        (["--retain", "10m"], "--retain '10m': not a number of seconds"),
        (["--retain", "-1"], "--retain '-1': must be above 0 seconds"),
        (["--retain", "90000"], "--retain '90000': must be at most 86400 seconds (24 h)"),
        (["--max-bytes", "10"], "--max-bytes '10': must be at least 64KiB"),
        (["--max-stream-bytes", "1k"], "--max-stream-bytes '1k': must be at least 64KiB"),
        (["--max-body", "big"], "--max-body 'big': not a size; write bytes, or 512KiB, 8MiB, 1GiB"),
        (["--cors-origin", "*"], "--cors-origin '*': not an origin; write https://app.example"),
        (
            ["--allowed-host", "http://gateway.example"],
            "--allowed-host 'http://gateway.example': not a host; write gateway.example, without a scheme or a port",
        ),
        (
            ["--allowed-host", "10.0.0.5:8400"],
            "--allowed-host '10.0.0.5:8400': not a host; write gateway.example, without a scheme or a port",
        ),
    ],
)
def test_a_setting_that_makes_no_sense_is_named_with_what_it_takes(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve(*words) == exits.USAGE
    assert capsys.readouterr().err == f"midstream: {told}\n"


def test_workers_need_a_journal_that_they_can_share(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("--workers", "2") == exits.USAGE
    assert capsys.readouterr().err == (
        "midstream: --workers 2 need a journal that they can share: --journal redis://HOST\n"
    )


def test_no_upstream_is_told_with_what_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == exits.USAGE
    assert capsys.readouterr().err.startswith("midstream: no --upstream: name an endpoint such as http://")


def test_a_port_that_is_taken_is_told_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve("--port", str(port)) == exits.FAILED
    assert capsys.readouterr().err == (
        f"midstream: cannot start: 127.0.0.1:{port} is in use: stop what listens there, or take another --port "
        "(0: any that is free)\n"
    )


def test_a_keys_file_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("--keys-file", str(tmp_path / "keys.txt")) == exits.FAILED
    reason = os.strerror(errno.ENOENT)
    assert capsys.readouterr().err == f"midstream: cannot start: {tmp_path / 'keys.txt'}: {reason}\n"


def test_a_flag_that_is_not_understood_is_told_in_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--upstrem", "scripted:"])
    assert capsys.readouterr().err.splitlines() == [
        "usage: midstream serve --upstream URL [options]",
        "midstream serve: error: not understood: '--upstrem' 'scripted:'",
    ]


@pytest.mark.parametrize(
    ("journal", "told"),
    [
        ("memory:", "  journal   memory: (is gone when this process ends)\n"),
        ("sqlite:///kept.db", "  journal   sqlite:///kept.db (survives a restart)\n"),
        (
            "redis://127.0.0.1:1",
            "  journal   redis://127.0.0.1:1 (does NOT answer; there are no streams until it does)\n",
        ),
    ],
)
def test_what_is_said_of_the_journal_is_so(
    journal: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    process = start("serve", "--upstream", "scripted:", "--port", "0", "--grpc-port", "0", "--journal", journal)
    assert process.stderr is not None
    try:
        assert read_upto(process.stderr, b"  journal ") is not None
        assert (b"  journal " + read_upto(process.stderr, b"\n")).decode() == told
        read_upto(process.stderr, b"  keys ")
    finally:
        process.terminate()
        code, _, _ = finish(process)
    assert code == exits.OK
