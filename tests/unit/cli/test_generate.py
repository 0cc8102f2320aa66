"""`midstream generate` against a gateway that misbehaves: what is printed, where, and the exit code."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from midstream.cli import exits
from midstream.client import Cursor
from midstream.testing.upstream_script import CloseDirty, Reset, Stall
from tests.unit.cli.program import Run, finish, holds, on_terminal, read_upto, start
from tests.unit.client.odd_gateway import STREAM, OddGateway, frame, in_thread, refusal, stream


@pytest.fixture
def gateway() -> Iterator[OddGateway]:
    with in_thread(OddGateway(last=9)) as gateway:
        yield gateway


def ask(gateway: OddGateway, *words: str) -> list[str]:
    return ["generate", "--gateway", gateway.url, *words]


def resume_command(talk: str) -> list[str]:
    """The last command that was told."""
    return shlex.split(talk.strip().splitlines()[-1])


# --- what is printed --------------------------------------------------------------------------------------------------


def test_the_answer_is_on_stdout_and_everything_else_on_stderr(cli: Run, gateway: OddGateway) -> None:
    code, out, err = cli(*ask(gateway, "hi"))
    assert (code, out) == (exits.OK, gateway.text)
    first, command, done, facts = err.splitlines()
    assert first.startswith(f"stream {STREAM} · ")
    assert command == f"  midstream generate --gateway {gateway.url} --resume {Cursor(STREAM, 0).encode()}"
    assert done.startswith("done (stop): 7 chunks in ")
    assert done.endswith(" s · tokens: 7 completion")
    assert facts == f'session="{STREAM}" last_token_index=6 (resume with --resume-from 7)'


def test_the_request_says_what_was_asked_for(cli: Run, gateway: OddGateway) -> None:
    cli(*ask(gateway, "hi", "--model", "m", "--max-tokens", "9", "--temperature", "0.5", "--seed", "7"))
    cli(*ask(gateway, "hi", "--system", "be brief"))
    assert [request.json for request in gateway.requests] == [
        {"prompt": "hi", "model": "m", "max_tokens": 9, "temperature": 0.5, "seed": 7},
        {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]},
    ]


def test_a_prompt_comes_from_stdin(gateway: OddGateway) -> None:
    command = [sys.executable, "-m", "midstream", *ask(gateway, "-")]
    done = subprocess.run(command, input="größe\n".encode(), capture_output=True, timeout=20, check=False)
    assert (done.returncode, done.stdout.decode()) == (exits.OK, gateway.text)
    assert gateway.requests[0].json == {"prompt": "größe\n"}


def test_records_come_as_one_json_object_per_line(cli: Run, gateway: OddGateway) -> None:
    _, out, _ = cli(*ask(gateway, "hi", "--json"))
    records = [orjson.loads(line) for line in out.splitlines()]
    assert [record["seq"] for record in records] == list(range(1, 10))
    assert records[1] == {"seq": 2, "event": "token", "data": {"seq": 2, "delta": " 2", "done": False}}


def test_a_pipe_gets_the_models_bytes_as_they_are(cli: Run) -> None:
    with in_thread(OddGateway(deltas=["\x1b[31m", "\u202e", "\r\n", "é"])) as gateway:
        process = start(*ask(gateway, "hi"))
        code, out, _ = finish(process)
    assert (code, out) == (exits.OK, "\x1b[31m\u202e\r\né".encode())


@pytest.mark.parametrize("cut", [0, 1, 4, 8])
def test_a_drop_is_mended_and_told_in_a_line(cli: Run, gateway: OddGateway, cut: int) -> None:
    gateway.then(stream(gateway.after(0, cut), CloseDirty()))
    code, out, err = cli(*ask(gateway, "hi"))
    assert (code, out) == (exits.OK, gateway.text)
    (told,) = [line for line in err.splitlines() if "resumed" in line]
    assert ("connection lost; resumed after token " if cut > 1 else "resumed before the first token") in told


def test_thinking_aloud_is_hidden_or_on_stderr(cli: Run, gateway: OddGateway) -> None:
    thought = frame(2, delta="", reasoning="let me see", done=False)
    gateway.frames[1] = thought
    _, out, err = cli(*ask(gateway, "hi"))
    assert "let me see" not in out + err
    _, shown, err = cli(*ask(gateway, "hi", "--show-reasoning"))
    assert shown == out
    assert "let me see\n" in err


def test_of_several_answers_the_first_is_printed(cli: Run, gateway: OddGateway) -> None:
    gateway.frames[2] = frame(3, delta="OTHER", choice=1, done=False)
    _, out, err = cli(*ask(gateway, "hi"))
    assert out == gateway.text.replace(" 3", "")
    assert "several answers" in err


def test_the_seam_of_a_continued_answer_is_told(cli: Run, gateway: OddGateway) -> None:
    gateway.frames[2] = frame(3, delta=" 3", seam={"reason": "writer_lost"}, done=False)
    _, out, err = cli(*ask(gateway, "hi"))
    assert out == gateway.text
    assert "another run of the model" in err


# --- how it ends ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        (
            frame(4, "failed", error={"code": "upstream_timeout", "message": "60 s \x1b[2J", "retryable": True}),
            exits.GENERATION_FAILED,
            "failed: upstream_timeout: 60 s \\x1b[2J (asking again may succeed)",
        ),
        (frame(4, "cancelled", done=True, reason="client"), exits.CANCELLED, "cancelled (client)"),
        (frame(4, "done", done=True, finish_reason="length"), exits.OK, "done (length)"),
    ],
)
def test_each_end_has_its_code_and_its_words(cli: Run, end: bytes, code: int, words: str) -> None:
    with in_thread(OddGateway(deltas=["a", "b"], end=end)) as gateway:
        got, out, err = cli(*ask(gateway, "hi"))
    assert (got, out) == (code, "ab")
    assert words in err


@pytest.mark.parametrize(
    ("reply", "code", "words"),
    [
        (refusal(401, b'{"error":"unauthorized"}'), exits.REFUSED, "asks for a key: set MIDSTREAM_KEY"),
        (refusal(404, b'{"error":"unknown_model","detail":"no upstream serves m"}'), exits.REFUSED, "serves m"),
        (refusal(404, b'{"error":"unknown_stream"}'), exits.REFUSED, "no such stream"),
        (
            refusal(409, b'{"error":"cursor_expired","oldest_available":7,"action":"restart"}'),
            exits.POSITION_GONE,
            f"{STREAM} --text",
        ),
        (refusal(503, retry_after="9999"), exits.UNREACHABLE, "patience"),
        (refusal(200, b"<html>", content_type="text/html"), exits.REFUSED, "Midstream gateway?"),
    ],
)
def test_each_refusal_has_its_code_and_its_words(
    cli: Run, gateway: OddGateway, reply: object, code: int, words: str
) -> None:
    gateway.then(reply)  # type: ignore[arg-type]  # parametrize gives objects
    got, out, err = cli(*ask(gateway, "--resume", Cursor(STREAM, 3).encode()))
    assert (got, out) == (code, "")
    assert words in err


def test_a_key_that_is_refused_is_told_apart_from_none(cli: Run, gateway: OddGateway) -> None:
    gateway.then(refusal(401, b'{"error":"unauthorized"}'))
    code, out, err = cli(*ask(gateway, "hi", "--key", "wrong"))
    assert (code, out, err) == (exits.REFUSED, "", "the gateway does not accept this key\n")


def test_a_gateway_whose_upstream_is_away_is_not_taken_for_one_that_does_not_run(cli: Run, gateway: OddGateway) -> None:
    body = b'{"error":"upstream_unreachable","detail":"nobody at 127.0.0.1:1"}'
    gateway.then(refusal(502, body, retry_after="9999"))
    code, out, err = cli(*ask(gateway, "hi"))
    assert (code, out) == (exits.GENERATION_FAILED, "")
    assert "nobody at 127.0.0.1:1" in err
    assert "is the gateway running" not in err


def test_a_cursor_file_that_is_not_there_is_named(cli: Run, tmp_path: Path) -> None:
    code, _, err = cli("generate", "--resume", f"@{tmp_path / 'here'}")
    assert (code, err) == (exits.USAGE, f"midstream generate: {tmp_path / 'here'}: No such file or directory\n")


def test_nobody_there_is_told_soon_with_the_address(cli: Run) -> None:
    with in_thread(OddGateway()) as gone:
        url = gone.url
    code, out, err = cli("generate", "hi", "--gateway", url)
    assert (code, out) == (exits.UNREACHABLE, "")
    told = "connection refused (4 attempts); is the gateway running, and is this its HTTP port?"
    assert err == f"no stream from {url}: {told}\n"


@pytest.mark.parametrize(
    "words",
    [
        [],
        [""],
        ["hi", "--resume", "x"],
        ["--resume", "x!"],
        ["--resume", "@/nonexistent"],
        ["--resume", Cursor(STREAM, 1).encode(), "--seed", "1"],
        ["hi", "--gateway", "nonsense"],
        ["hi", "--key", "a\nb"],
        ["\udce9"],
    ],
)
def test_a_command_line_without_sense_is_told_in_a_line(cli: Run, words: list[str]) -> None:
    code, out, err = cli("generate", *words)
    assert (code, out) == (exits.USAGE, "")
    assert err.startswith("midstream generate: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("words", [["--max-tokens", "0"], ["--ack-every", "x"], ["--unknown"], ["a", "b"]])
def test_a_wrong_flag_is_a_usage_error(cli: Run, words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli("generate", *words)
    assert caught.value.code == exits.USAGE
    assert "usage: midstream generate" in capfd.readouterr().err


# --- positions --------------------------------------------------------------------------------------------------------


def test_resume_prints_the_rest(cli: Run, gateway: OddGateway) -> None:
    code, out, err = cli(*ask(gateway, "--resume", Cursor(STREAM, 5).encode()))
    assert (code, out) == (exits.OK, " 6 7 8")
    assert "done (stop): 3 chunks in " in err


@pytest.mark.parametrize(("status", "code"), [("done", 0), ("failed", 3), ("cancelled", 4)])
def test_resume_from_the_very_end_prints_nothing_and_tells_how_it_ended(
    cli: Run, gateway: OddGateway, status: str, code: int
) -> None:
    gateway.state["status"] = status
    got, out, err = cli(*ask(gateway, "--resume", Cursor(STREAM, 9).encode()))
    assert (got, out) == (code, "")
    assert err == f"nothing follows this position: the answer has ended ({status})\n"


def test_the_position_file_follows_what_was_printed(cli: Run, gateway: OddGateway, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    cli(*ask(gateway, "hi", "--position", str(kept)))
    assert kept.read_text() == Cursor(STREAM, 9).encode() + "\n"


def test_a_position_file_that_cannot_be_written_is_told_at_once(cli: Run, gateway: OddGateway, tmp_path: Path) -> None:
    code, out, err = cli(*ask(gateway, "hi", "--position", str(tmp_path / "no" / "kept")))
    assert (code, out) == (exits.OUTPUT_FAILED, "")
    assert f"the position file {tmp_path / 'no' / 'kept'}: No such file or directory" in err
    assert resume_command(err)[-2:] == ["--resume", Cursor(STREAM, 0).encode()]


def test_acks_follow_what_was_printed(cli: Run, gateway: OddGateway) -> None:
    _, _, err = cli(*ask(gateway, "hi", "--ack-every", "4"))
    assert Cursor(STREAM, 0).encode() not in err  # the beginning has been acked away
    acks = [request.json["seq"] for request in gateway.requests if request.path.endswith("/ack")]
    assert acks == [4, 8, 9]


def test_the_key_is_sent_and_never_shown(cli: Run, gateway: OddGateway) -> None:
    gateway.then(stream(gateway.after(0, 5)), refusal(401, b'{"error":"unauthorized"}'))
    code, _, err = cli(*ask(gateway, "hi", "--key", "s3cret"))
    assert code == exits.REFUSED
    assert "s3cret" not in err
    assert "MIDSTREAM_KEY being set" in err
    assert {request.headers["authorization"] for request in gateway.requests} == {"Bearer s3cret"}


def test_the_key_comes_from_the_environment(cli: Run, gateway: OddGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDSTREAM_KEY", "s3cret\n")
    cli(*ask(gateway, "hi"))
    assert gateway.requests[0].headers["authorization"] == "Bearer s3cret"


def test_the_gateway_comes_from_the_environment(cli: Run, gateway: OddGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag wins over it, and the command that goes on names the one that was asked."""
    monkeypatch.setenv("MIDSTREAM_GATEWAY", gateway.url)
    code, out, err = cli("generate", "hi")
    assert (code, out) == (exits.OK, gateway.text)
    assert f"--gateway {gateway.url}" in err
    monkeypatch.setenv("MIDSTREAM_GATEWAY", "http://127.0.0.1:1")
    code, out, _ = cli(*ask(gateway, "hi"))
    assert (code, out) == (exits.OK, gateway.text)


# --- stopped from outside ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, exits.INTERRUPTED), (signal.SIGTERM, exits.TERMINATED)])
def test_after_a_signal_the_told_command_prints_exactly_the_rest(
    gateway: OddGateway, number: signal.Signals, code: int
) -> None:
    gateway.then(stream(gateway.after(0, 5), Stall()))
    process = start(*ask(gateway, "hi"))
    assert process.stdout is not None
    first = read_upto(process.stdout, b" 5")
    process.send_signal(number)
    got, rest, err = finish(process)
    assert got == code
    assert "the generation goes on" in err
    command = resume_command(err)
    assert command[:3] == [sys.executable, "-m", "midstream"]
    again = subprocess.run(command, capture_output=True, timeout=20, check=False)
    assert (first + rest + again.stdout).decode() == gateway.text
    assert again.returncode == exits.OK


def test_after_sigkill_the_position_file_prints_exactly_the_rest(gateway: OddGateway, tmp_path: Path) -> None:
    kept = tmp_path / "my position"
    gateway.then(stream(gateway.after(0, 5), Stall()))
    process = start(*ask(gateway, "hi", "--position", str(kept)))
    assert process.stdout is not None
    assert process.stderr is not None
    read_upto(process.stderr, b"\n")
    command = shlex.split(read_upto(process.stderr, b"\n").decode())
    first = read_upto(process.stdout, b" 5")
    holds(kept, Cursor(STREAM, 5).encode() + "\n")
    process.kill()
    finish(process)
    assert command[-2:] == [f"--position={kept}", f"--resume=@{kept}"]
    again = subprocess.run(command, capture_output=True, timeout=20, check=False)
    assert (first + again.stdout).decode() == gateway.text
    assert kept.read_text() == Cursor(STREAM, 9).encode() + "\n"


def test_a_reader_that_leaves_is_told_how_to_go_on() -> None:
    text = ["one\n", "two\n", "three\n", "four\n"]
    with in_thread(OddGateway(deltas=text)) as gateway:
        slow = [stream(gateway.after(n, n + 1)) for n in range(gateway.last)]
        gateway.then(*slow)
        line = shlex.join([sys.executable, "-m", "midstream", *ask(gateway, "hi")])
        script = f"{line} | head -n 1; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", script], capture_output=True, timeout=20, check=False)
    assert done.stdout.decode().split() == ["one", str(exits.BROKEN_PIPE)]
    err = done.stderr.decode()
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    assert "stdout was closed by its reader; the generation goes on" in err
    assert resume_command(err)[-2] == "--resume"


def test_a_reader_of_both_outputs_that_leaves_changes_no_exit_code() -> None:
    with in_thread(OddGateway(deltas=["one\n", "two\n", "three\n"])) as gateway:
        gateway.then(*[stream(gateway.after(n, n + 1)) for n in range(gateway.last)])
        line = shlex.join([sys.executable, "-m", "midstream", *ask(gateway, "hi")])
        script = f"{line} 2>&1 | head -n 1 >/dev/null; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", script], capture_output=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (exits.BROKEN_PIPE, b"")


def test_a_full_disk_is_told_and_what_it_refused_can_be_resumed(gateway: OddGateway) -> None:
    with open("/dev/full", "wb") as full:
        code, _, err = finish(start(*ask(gateway, "hi"), stdout=full))
    assert code == exits.OUTPUT_FAILED
    assert "cannot write the answer: No space left on device" in err
    again = subprocess.run(resume_command(err), capture_output=True, timeout=20, check=False)
    assert again.stdout.decode() == gateway.text


def test_a_closed_stdout_is_told(gateway: OddGateway) -> None:
    line = shlex.join([sys.executable, "-m", "midstream", *ask(gateway, "hi")])
    done = subprocess.run(["sh", "-c", f"{line} >&-"], capture_output=True, timeout=20, check=False)
    assert done.returncode == exits.OUTPUT_FAILED
    assert b"stdout is closed" in done.stderr


def test_a_gateway_that_goes_away_for_good_is_given_up_with_the_command(
    cli: Run, gateway: OddGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.client.surface.time.monotonic", lambda: float("inf"))
    gateway.then(stream(gateway.after(0, 5)), *[stream(Reset())] * 15)
    code, out, err = cli(*ask(gateway, "hi"))
    assert (code, out) == (exits.UNREACHABLE, " 2 3 4 5")
    assert "gave up after 16 attempts" in err
    assert resume_command(err)[-2:] == ["--resume", Cursor(STREAM, 5).encode()]


# --- on a terminal ----------------------------------------------------------------------------------------------------


def test_a_terminal_is_given_nothing_to_obey() -> None:
    with in_thread(OddGateway(deltas=["a\x1b]0;x\x07", "\u202eb", "\x9b2J"])) as gateway:
        terminal = on_terminal(*ask(gateway, "hi"), NO_COLOR="1")
        assert terminal.end() == exits.OK
    screen = terminal.screen.decode()
    assert "a\\x1b]0;x\\x07\\u202eb\\x9b2J\r\n" in screen
    assert not set(screen) & {"\x1b", "\x07", "\u202e", "\x9b"}


def test_a_terminal_is_given_json_that_is_safe_and_still_json() -> None:
    with in_thread(OddGateway(deltas=["\x7f\u202e"])) as gateway:
        terminal = on_terminal(*ask(gateway, "hi", "--json"), NO_COLOR="1")
        assert terminal.end() == exits.OK
    (line,) = [line for line in terminal.screen.decode().splitlines() if '"seq":2' in line and "token" in line]
    assert line.isprintable()
    assert orjson.loads(line)["data"]["delta"] == "\x7f\u202e"


def test_ctrl_c_leaves_the_answer_and_the_command_on_lines_of_their_own(gateway: OddGateway) -> None:
    gateway.then(stream(gateway.after(0, 5), Stall()))
    terminal = on_terminal(*ask(gateway, "hi"))
    terminal.see(b" 2 3 4 5")
    terminal.press(b"\x03")
    assert terminal.end() == exits.INTERRUPTED
    screen = terminal.screen.decode()
    assert "\x1b[33mstopped reading; the generation goes on\x1b[0m\r\n" in screen
    assert screen.rstrip().splitlines()[-1].startswith("  ")


def test_a_drop_on_a_terminal_stands_on_a_line_of_its_own(gateway: OddGateway) -> None:
    gateway.then(stream(gateway.after(0, 4)))
    terminal = on_terminal(*ask(gateway, "hi"), NO_COLOR="1")
    assert terminal.end() == exits.OK
    lines = terminal.screen.decode().splitlines()
    at = lines.index(" 2 3 4")
    assert lines[at + 1] == f'session="{STREAM}" last_token_index=2 (resume with --resume-from 3)'
    assert lines[at + 2].startswith("connection lost; resumed after token 2, ")
    assert lines[at + 3] == " 5 6 7 8"
