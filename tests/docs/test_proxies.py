"""The proxy configurations on the page "Running it" pass a stream on as it comes, and tell us when a reader has gone.

Each proxy runs where it is installed.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

from midstream.client import AsyncClient
from midstream.cursor import Cursor
from tests.docs.markdown import ROOT, blocks
from tests.docs.shell import terminal

PAGE = (ROOT / "docs" / "running-it.md").read_text(encoding="utf-8")
WITHIN = 10.0

# From the page's block, the gateway's and the proxy's address and a directory: the file, and the command line.
Arrange = Callable[[str, str, int, Path], list[str]]


def shown(language: str) -> str:
    return next(block.text for block in blocks(PAGE) if block.language == language)


def nginx(block: str, gateway: str, port: int, directory: Path) -> list[str]:
    server = f"server {{ listen 127.0.0.1:{port}; {block.replace('http://127.0.0.1:8400', gateway)} }}"
    paths = " ".join(f"{kind}_temp_path {kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    (directory / "nginx.conf").write_text(
        f"daemon off; pid nginx.pid; error_log stderr; events {{}} http {{ access_log off; {paths} {server} }}",
        encoding="utf-8",
    )
    return ["nginx", "-p", str(directory), "-c", "nginx.conf", "-e", "stderr"]


def haproxy(block: str, gateway: str, port: int, directory: Path) -> list[str]:
    text = re.sub(r"bind :443 .*", f"bind 127.0.0.1:{port}", block)
    text = text.replace("127.0.0.1:8400", gateway.removeprefix("http://"))
    (directory / "haproxy.cfg").write_text(f"defaults\n    timeout connect 5s\n    timeout client 60s\n{text}")
    return ["haproxy", "-f", str(directory / "haproxy.cfg")]


def caddy(block: str, gateway: str, port: int, directory: Path) -> list[str]:
    text = block.replace("app.example", f"http://127.0.0.1:{port}")
    text = text.replace("127.0.0.1:8400", gateway.removeprefix("http://"))
    (directory / "Caddyfile").write_text(f"{{\n\tadmin off\n}}\n{text}")
    return ["caddy", "run", "--config", str(directory / "Caddyfile"), "--adapter", "caddyfile"]


ARRANGEMENTS = {"nginx": ("nginx", nginx), "haproxy": ("haproxy", haproxy), "caddy": ("caddyfile", caddy)}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def proxy(name: str, gateway: str, directory: Path) -> Iterator[str]:
    """The proxy in front of the gateway, as the page has it; its address."""
    language, arrange = ARRANGEMENTS[name]
    port = free_port()
    process = subprocess.Popen(
        arrange(shown(language), gateway, port, directory), cwd=directory, stdout=subprocess.DEVNULL
    )
    try:
        end = time.monotonic() + WITHIN
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                break
            except ConnectionRefusedError:
                assert process.poll() is None, "the proxy has not started"
                assert time.monotonic() < end, "the proxy does not listen"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(WITHIN)


@pytest.mark.parametrize("name", ARRANGEMENTS)
async def test_a_stream_passes_the_proxy_as_it_comes(name: str, tmp_path: Path) -> None:
    """Tokens one by one and not in a heap; a sign of life while there are none; a reader that leaves is noticed."""
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    with terminal(tmp_path) as shell:
        shell.serve("midstream serve --upstream scripted: --journal memory: --heartbeat 0.5")
        with proxy(name, shell.address, tmp_path) as address:
            asked = {"prompt": "a proxy", "model": "scripted-n60-r20"}
            async with aiohttp.ClientSession() as session:
                async with session.post(f"{address}/v1/stream", json=asked) as answer:
                    stream_id = answer.headers["Midstream-Stream-Id"]
                    reads = await several_reads(answer, tokens=20)
                await nobody_reads(session, shell.address, stream_id)
                slow = {"prompt": "a silence", "model": "scripted-n1-r0.5"}
                async with session.post(f"{address}/v1/stream", json=slow) as answer:
                    assert b": ping\n" in await asyncio.wait_for(answer.content.readuntil(b": ping\n"), WITHIN)
            assert reads >= 10
            async with AsyncClient(address) as client:
                stream = client.resume(Cursor(stream_id, 0))
                assert len([record async for record in stream]) == 62


async def several_reads(answer: aiohttp.ClientResponse, tokens: int) -> int:
    """Read until so many tokens have come; how many reads that took."""
    text, reads = b"", 0
    async with asyncio.timeout(WITHIN):
        while text.count(b"event: token") < tokens:
            text += await answer.content.readany()
            reads += 1
    return reads


async def nobody_reads(session: aiohttp.ClientSession, gateway: str, stream_id: str) -> None:
    """Wait until the gateway has noticed that the stream's reader has left."""
    async with asyncio.timeout(WITHIN):
        while True:
            async with session.get(f"{gateway}/v1/stream/{stream_id}/state") as answer:
                if (await answer.json())["readers"] == 0:
                    return
