"""`midstream bench` run as users run it: a real gateway, and a simulation or the real model behind it."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from midstream import cli
from midstream.cli import bench_plot, exits
from midstream.cli.model import available
from tests.unit.cli.program import COMMAND, PATIENCE, environment, finish, read_upto, start

QUICK = ("bench", "--upstream", "scripted:", "--rate", "0", "--gap", "0", "--max-tokens", "30", "--drop-after", "5,10")

Told = tuple[int, list[list[str]], str]


def as_told(code: int, out: str, talk: str) -> Told:
    """The exit code, the table's rows by words, and the talk."""
    return code, [line.split() for line in out.splitlines()[1:]], talk


def measured(*words: str, within: float = 40.0) -> Told:
    """A run as a process of its own."""
    done = subprocess.run(
        [*COMMAND, *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=within,
        env=environment(),
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr
    return as_told(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Callable[..., Told]:
    """The same in this process, which spares the start of one; the gateway is a process all the same."""

    def run(*words: str) -> Told:
        code = cli.main(words)
        return as_told(code, *capsys.readouterr())

    return run


@pytest.mark.parametrize(
    ("transport", "journal"), [("sse", "memory:"), ("ws", "sqlite:///bench.db"), ("grpc", "memory:")]
)
def test_resume_infers_exactly_the_tokens_fewer_that_the_reader_had(
    transport: str, journal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every transport: the table, the JSON and the exit code agree.  The journal is the one that was named."""
    monkeypatch.chdir(tmp_path)
    words = (*QUICK, "--transport", transport, "--journal", journal, "--runs", "2", "--json", "bench.json")
    code, told, talk = measured(*words)
    assert code == exits.OK, talk
    assert "SIMULATION" in talk
    assert "checked:" in talk
    expected = [
        ("5", "retry", "35", "5"),
        ("5", "resume", "30", "0"),
        ("10", "retry", "40", "10"),
        ("10", "resume", "30", "0"),
    ]
    assert [(row[0], row[1], row[-3], row[-2]) for row in told] == expected
    assert {row[-1] for row in told} == {"identical"}
    kept = json.loads((tmp_path / "bench.json").read_bytes())
    assert (kept["ok"], kept["transport"], kept["length"], len(kept["attempts"])) == (True, transport, 30, 8)
    assert (tmp_path / "bench.db").exists() is journal.startswith("sqlite:")


def test_a_limit_below_a_cut_makes_no_sense(bench: Callable[..., Told]) -> None:
    code, told, talk = bench(*QUICK, "--max-tokens", "9")
    assert (code, told) == (exits.USAGE, [])
    assert "--max-tokens 9 ends the answer before the cut at 10" in talk


@asynccontextmanager
async def upstream(*answers: list[str]) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """An OpenAI-compatible endpoint that gives these answers in turn, the last for ever, and what it was asked."""
    asked: list[dict[str, Any]] = []

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "turns"}]})

    async def chat(request: web.Request) -> web.StreamResponse:
        words = answers[min(len(asked), len(answers) - 1)]
        asked.append(await request.json())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for word in words:
            await response.write(
                b'data: {"choices":[{"index":0,"delta":{"content":%s}}]}\n\n' % json.dumps(word).encode()
            )
        await response.write(b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n')
        return response

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", asked
    finally:
        await runner.cleanup()


SHORT = ("--gap", "0", "--drop-after", "2,5")


async def test_an_upstream_is_asked_what_the_flags_say(bench: Callable[..., Told]) -> None:
    async with upstream(["a", " b", " c", " d", " e", " f"]) as (url, asked):
        words = ("bench", "--upstream", url, *SHORT, "--max-tokens", "77", "--seed", "4")
        code, told, talk = await asyncio.to_thread(bench, *words)
    assert code == exits.OK, talk
    assert [row[-3:-1] for row in told] == [["8", "2"], ["6", "0"], ["11", "5"], ["6", "0"]]
    assert {(body["max_tokens"], body["temperature"], body["seed"]) for body in asked} == {(77, 0, 4)}


async def test_a_model_that_stops_early_is_told_and_the_rest_is_measured(bench: Callable[..., Told]) -> None:
    async with upstream(["a", " b", " c"]) as (url, _):
        code, told, talk = await asyncio.to_thread(bench, "bench", "--upstream", url, *SHORT)
    assert code == exits.FAILED
    assert [row[0] for row in told] == ["2", "2"]
    assert "the model ended its answer after 3 tokens: it cannot be cut after 5" in talk


# As they are asked for: the reference, the one that is cut, the retry, the one that is resumed, and so on.
A, B = ["a", " b", " c", " d", " e", " f"], ["a", " B", " C", " D", " E"]


async def test_another_answer_at_temperature_0_fails_the_check(bench: Callable[..., Told]) -> None:
    async with upstream(A, A, B, A) as (url, _):
        code, _, talk = await asyncio.to_thread(bench, "bench", "--upstream", url, *SHORT)
    assert code == exits.FAILED
    assert "WRONG: retry after 2: another text" in talk


async def test_sampling_says_what_is_noise_and_still_checks_the_resumed_text(bench: Callable[..., Told]) -> None:
    async with upstream(A, A, B, A) as (url, _):
        words = ("bench", "--upstream", url, *SHORT, "--temperature", "0.8")
        code, told, talk = await asyncio.to_thread(bench, *words)
    assert code == exits.OK, talk
    assert "This model samples" in talk
    assert [row[-1] for row in told[:2]] == ["DIFFERENT", "identical"]


def test_an_upstream_that_is_not_there_is_told(bench: Callable[..., Told]) -> None:
    code, told, talk = bench("bench", "--upstream", "http://127.0.0.1:9/v1", "--drop-after", "2")
    assert (code, told) == (exits.FAILED, [])
    assert "WRONG: the upstream cannot be reached" in talk


def test_a_journal_that_cannot_be_opened_is_told(bench: Callable[..., Told]) -> None:
    code, told, talk = bench("bench", "--upstream", "scripted:", "--drop-after", "2", "--journal", "nonsense:")
    assert (code, told) == (exits.FAILED, [])
    assert "the gateway did not start" in talk


def test_the_plot_is_drawn_as_png_and_as_svg(tmp_path: Path, bench: Callable[..., Told]) -> None:
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")
    code, _, talk = bench(*QUICK, "--plot", str(tmp_path / "plot"))
    assert code == exits.OK, talk
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert ET.parse(tmp_path / "plot.svg").getroot().tag.endswith("svg")


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert bench_plot.missing() == "--plot needs matplotlib: pip install 'midstream[bench]'"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="what runs is read from Linux's /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_gateway_too(number: signal.Signals) -> None:
    """Nothing is left running, and nothing that was half measured is shown as a figure."""
    run = start("bench", "--upstream", "scripted:", "--rate", "20", "--drop-after", "5", "--max-tokens", "1000")
    assert run.stderr is not None
    read_upto(run.stderr, b"running\n")
    (gateway,) = children(run.pid)
    run.send_signal(number)
    code, out, talk = finish(run)
    assert (code, out) == (128 + number, b""), talk
    assert not Path(f"/proc/{gateway}").exists()


def children(pid: int) -> list[int]:
    """Waits for the first."""
    found: list[str] = []
    until = time.monotonic() + PATIENCE
    while not found and time.monotonic() < until:
        time.sleep(0.01)
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return [int(child) for child in found]


@pytest.mark.model
@pytest.mark.timeout(150)
def test_the_real_model_resumes_without_inferring_anything_again() -> None:
    if (reason := available()) is not None:
        pytest.skip(f"no model: {reason}")
    code, told, talk = measured("bench", "--drop-after", "3,6", "--max-tokens", "9", within=120.0)
    assert code == exits.OK, talk
    assert [(row[0], row[1], row[-3], row[-2]) for row in told] == [
        ("3", "retry", "12", "3"),
        ("3", "resume", "9", "0"),
        ("6", "retry", "15", "6"),
        ("6", "resume", "9", "0"),
    ]
    assert {row[-1] for row in told} == {"identical"}
