"""`midstream demo`: the few flags that its help shows, and what it says of the answers that end."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from dataclasses import fields
from typing import Any

import orjson
import pytest

from midstream.cli import exits, main
from midstream.cli.logs import log_to_stderr
from midstream.server.settings import Settings, flag_name
from tests.unit.cli.program import environment, finish, read_upto, start

END = {
    "event": "stream_end",
    "stream_id": "0123456789abcdef0123456789abcdef",
    "model": "smollm2",
    "status": "done",
    "records": 22,
    "seconds": 0.44,
}


def help_of(verb: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == exits.OK
    return capsys.readouterr().out


def test_its_help_shows_a_few_flags_and_where_the_others_are(capsys: pytest.CaptureFixture[str]) -> None:
    shown = set(re.findall(r"^  (--[a-z-]+)", help_of("demo", capsys), re.MULTILINE))
    assert shown == {"--scripted", "--port", "--grpc-port", "--upstream", "--journal", "--verbose"}
    assert "every other flag of `midstream serve`: see `midstream serve --help`\n" in help_of("demo", capsys)
    serves = set(re.findall(r"^  (--[a-z-]+)", help_of("serve", capsys), re.MULTILINE))
    assert serves == {flag_name(setting) for setting in fields(Settings)} | {"--verbose"}


def test_a_flag_that_its_help_leaves_out_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--heartbeat", "soon"]) == exits.USAGE
    assert capsys.readouterr().err == "midstream: --heartbeat 'soon': not a number of seconds\n"


def logged(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str, **how: Any) -> str:
    """What stands on stderr when the gateway logs this of a stream."""
    monkeypatch.setattr(logging.root, "handlers", [])
    before = logging.getLogger("midstream").level
    try:
        log_to_stderr(verbose=False, **how)
        logging.getLogger("midstream.streams").info("%s", line)
    finally:
        logging.getLogger("midstream").setLevel(before)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "stream 01234567… of smollm2 done: 22 records in 0.4 s"),
        (
            {"status": "failed", "code": "upstream_lost", "message": "it\nis gone"},
            "stream 01234567… of smollm2 failed (upstream_lost: it is gone): 22 records in 0.4 s",
        ),
        ({"model": "a\x1b[2Jb"}, "stream 01234567… of a\\x1b[2Jb done: 22 records in 0.4 s"),
    ],
)
def test_an_end_is_told_in_a_few_words_that_are_safe_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], words: str
) -> None:
    told = logged(capsys, monkeypatch, orjson.dumps(END | changes).decode(), brief=True)
    assert re.fullmatch(r"\d\d:\d\d:\d\d (.*)\n", told)
    assert told[9:] == f"{words}\n"


@pytest.mark.parametrize("line", ["not JSON", "[1]", '{"event":"another"}'])
def test_another_line_of_the_log_stays_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    assert logged(capsys, monkeypatch, line, brief=True).endswith(f" INFO midstream.streams {line}\n")


def test_a_server_logs_the_end_as_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    line = orjson.dumps(END).decode()
    assert logged(capsys, monkeypatch, line).endswith(f" INFO midstream.streams {line}\n")


@pytest.mark.parametrize(
    ("words", "mark"), [([], "… of scripted done: 4 records in "), (["--verbose"], '"event":"stream_end"')]
)
def test_the_demo_tells_the_end_of_an_answer_in_words_and_verbose_as_json(words: list[str], mark: str) -> None:
    process = start("demo", "--scripted", "--port", "0", "--grpc-port", "0", "--journal", "memory:", *words)
    assert process.stderr is not None
    try:
        read_upto(process.stderr, b"midstream serves ")
        address = read_upto(process.stderr, b"\n").decode().strip()
        command = [sys.executable, "-m", "midstream", "generate", "hi", "--max-tokens", "2", "--gateway", address]
        subprocess.run(command, capture_output=True, timeout=20, check=True, env=environment())
        read_upto(process.stderr, mark.encode())
    finally:
        process.terminate()
        code, _, _ = finish(process)
    assert code == exits.OK
