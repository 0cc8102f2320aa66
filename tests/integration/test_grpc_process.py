"""`midstream serve` with its gRPC port: by clients that are not ours, over TLS, at its start and at its end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc import aio

from midstream.testing.patience import soon
from midstream.wire import GRPC_SERVICE
from tests.calls import Client, Said

BUF = shutil.which("buf", path=str(Path(sys.executable).parent))


def free_port() -> int:
    """A port that nobody listened on a moment ago: to the gateway itself 0 means that gRPC is off."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Serving:
    """The process, what it has said, and where it listens."""

    def __init__(self, process: asyncio.subprocess.Process, said: str) -> None:
        self.process = process
        self.said = said
        self.grpc = re.search(r"^  gRPC +(\S+)", said, re.MULTILINE)

    @property
    def address(self) -> str:
        assert self.grpc is not None, f"nothing is said of gRPC: {self.said}"
        return self.grpc[1]


async def start(*flags: str) -> asyncio.subprocess.Process:
    words = ("serve", "--port", "0", "--upstream", "scripted:", "--journal", "memory:", *flags)
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "midstream", *words, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
    )


@asynccontextmanager
async def served(*flags: str) -> AsyncIterator[Serving]:
    """Started, and killed at the end if it still runs."""
    process = await start(*flags)
    assert process.stderr is not None
    try:
        async with asyncio.timeout(20):
            said = ""
            while "  keys " not in said:
                line = await process.stderr.readline()
                assert line, f"it did not start: {said}"
                said += line.decode()
        yield Serving(process, said)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def buf(*words: str) -> str:
    assert BUF is not None, "buf is among the development packages"
    return subprocess.run([BUF, "curl", *words], check=True, capture_output=True, text=True, timeout=20).stdout


async def test_a_stranger_lists_and_streams_by_reflection_alone() -> None:
    """`buf curl` knows nothing of the service but what the gateway tells of it, and resumes by hand."""
    async with served("--grpc-port", str(free_port())) as gateway:
        base = f"http://{gateway.address}"
        common = ("--protocol", "grpc", "--http2-prior-knowledge")
        methods = await asyncio.to_thread(buf, *common, "--list-methods", base)
        assert {f"{GRPC_SERVICE}/{name}" for name in ("Generate", "Ack", "Cancel")} <= set(methods.split())
        for reflection in ("grpc-v1", "grpc-v1alpha"):
            ask = '{"prompt":"Hello","session_id":"demo","model":"scripted-n5-r1000"}'
            words = (*common, "--reflect-protocol", reflection, "-d", ask, f"{base}/{GRPC_SERVICE}/Generate")
            told = _messages(await asyncio.to_thread(buf, *words))
            assert [message.get("tokenIndex", 0) for message in told] == [0, 1, 2, 3, 4, 5]
            assert told[-1] == {"tokenIndex": 5, "isFinal": True}
        ask = '{"session_id":"demo","resume_from_token":3}'
        rest = _messages(await asyncio.to_thread(buf, *common, "-d", ask, f"{base}/{GRPC_SERVICE}/Generate"))
        assert rest == told[3:]


def _messages(text: str) -> list[dict[str, object]]:
    """JSON objects, one after the other."""
    decoder, at, found = json.JSONDecoder(), 0, []
    while at < len(text.rstrip()):
        message, at = decoder.raw_decode(text, at)
        found.append(message)
        at += len(text[at:]) - len(text[at:].lstrip())
    return found


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for localhost and its key, good for a day."""
    openssl = shutil.which("openssl") or pytest.skip("openssl, which makes the certificate, is not installed")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"]
    words += [
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=DNS:localhost",
        "-keyout",
        str(key),
        "-out",
        str(cert),
    ]
    subprocess.run([openssl, *words], check=True, capture_output=True)
    return cert, key


async def test_the_port_speaks_tls_where_it_has_a_certificate(certificate: tuple[Path, Path]) -> None:
    """And then nothing else: a client without TLS is not served in the clear."""
    cert, key = certificate
    flags = ("--grpc-port", str(free_port()), "--grpc-tls-cert", str(cert), "--grpc-tls-key", str(key))
    async with served(*flags) as gateway:
        assert "(TLS)" in gateway.said
        address = gateway.address.replace("127.0.0.1", "localhost")
        async with aio.secure_channel(address, grpc.ssl_channel_credentials(cert.read_bytes())) as channel:
            said = await Client(channel).said(prompt="Hello", model="scripted-n3-r1000")
            assert (len(said.messages), said.status) == (4, "OK")
        async with aio.insecure_channel(gateway.address) as channel:
            assert (await Client(channel).said(prompt="Hello")).status == "UNAVAILABLE"


async def test_one_half_of_tls_is_an_error(certificate: tuple[Path, Path]) -> None:
    """Rather than a port that speaks in the clear what was meant to be secret."""
    process = await start("--grpc-port", str(free_port()), "--grpc-tls-cert", str(certificate[0]))
    _, said = await soon(process.communicate())
    assert process.returncode == 2
    assert b"--grpc-tls-key" in said


async def test_a_taken_port_is_said_and_leaves_the_journal_alone(tmp_path: Path) -> None:
    """Before the journal is opened: its owner may be the gateway that has the port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = await start("--grpc-port", str(port), "--journal", f"sqlite:///{tmp_path}/journal.db")
        _, said = await soon(process.communicate())
    assert process.returncode == 1
    assert f"127.0.0.1:{port}" in said.decode()
    assert os.listdir(tmp_path) == []


async def test_zero_is_off() -> None:
    """Nothing listens, and nothing is said of it."""
    async with served("--grpc-port", "0") as gateway:
        assert gateway.grpc is None


async def test_sigterm_lets_calls_end_by_themselves() -> None:
    """A new call is sent elsewhere while an open one has its time; then the process ends well."""
    async with served("--grpc-port", str(free_port())) as gateway, aio.insecure_channel(gateway.address) as channel:
        client = Client(channel)
        call = client.generate(prompt="Hello", session_id="demo", model="scripted-n40-r100")
        await call.take(1)
        gateway.process.send_signal(signal.SIGTERM)
        said = await call.rest()
        assert (said.messages[-1], said.status) == (("", 40, True), "OK")
        assert await soon(gateway.process.wait()) == 0


async def test_sigterm_ends_calls_after_their_time_with_a_status() -> None:
    """The stream is `cancelled` for the shutdown, which its reader hears; new calls are UNAVAILABLE meanwhile."""
    flags = ("--grpc-port", str(free_port()), "--drain", "1")
    async with served(*flags) as gateway, aio.insecure_channel(gateway.address) as channel:
        client = Client(channel)
        call = client.generate(prompt="Hello", session_id="demo", model="scripted-n100000-r50")
        first = await call.take(1)
        gateway.process.send_signal(signal.SIGTERM)
        late = Said([], "OK")
        while late.status != "UNAVAILABLE":
            late = await client.generate(session_id="demo", resume_from_token=1, timeout=0.2).rest()
        said = await call.rest()
        count = len(first) + len(said.messages)
        facts = {"token_index": str(count), "reason": "shutdown"}
        assert (said.status, said.reason, said.facts) == ("CANCELLED", "CANCELLED", facts)
        assert await soon(gateway.process.wait()) == 0


async def test_a_second_signal_is_at_once_and_readers_are_told_to_resume() -> None:
    """No final message, no `cancelled`: UNAVAILABLE, since the stream is still what it was."""
    async with served("--grpc-port", str(free_port())) as gateway, aio.insecure_channel(gateway.address) as channel:
        call = Client(channel).generate(prompt="Hello", session_id="demo", model="scripted-n100000-r50")
        await call.take(1)
        gateway.process.send_signal(signal.SIGTERM)
        while (await Client(channel).generate(session_id="demo", timeout=0.2).rest()).status != "UNAVAILABLE":
            pass
        gateway.process.send_signal(signal.SIGTERM)
        said = await call.rest()
        assert (said.status, said.reason) == ("UNAVAILABLE", "SHUTTING_DOWN")
        assert await soon(gateway.process.wait()) == 0
