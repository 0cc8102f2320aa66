"""TLS to the store, and the event loop that a gateway really runs on."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from midstream.testing.clock import ManualClock
from midstream.testing.journal_writer import meta, read_all, written
from tests.sharing import Reader, processes
from tests.valkeys import redis_journal, shared


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1, signed by nobody but itself, and its key, in one file."""
    openssl = shutil.which("openssl") or pytest.skip("openssl, which makes the certificate, is not installed")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    kind = ("-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    name = ("-subj", "/CN=store", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "-")
    made = subprocess.run([openssl, "req", *kind, *name], capture_output=True, check=True)
    path.write_bytes(made.stdout)
    return path


@asynccontextmanager
async def tls_store(certificate: Path) -> AsyncIterator[int]:
    """The shared server behind TLS: the port where it listens."""

    async def forward(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                target.write(data)
        except ConnectionError:
            pass
        finally:
            target.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", shared().port)
        await asyncio.gather(forward(reader, far_writer), forward(far_reader, writer))

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_store_behind_tls_is_reached_and_verified(certificate: Path) -> None:
    """With the certificate's authority it works; without it nothing is said to whoever listens there."""
    async with tls_store(certificate) as port:
        good = redis_journal(f"rediss://127.0.0.1:{port}?prefix=tls{port}&ssl_ca_certs={certificate}", "tls")
        await good.open()
        try:
            assert good.available()
            writer = await written(good, meta(ManualClock()), 5)
            assert await read_all(good, writer.stream_id) == writer.frames
        finally:
            await good.close()
        bad = redis_journal(f"rediss://127.0.0.1:{port}?prefix=tls{port}", "tls")
        await bad.open()
        try:
            assert not bad.available()
        finally:
            await bad.close()


def test_journal_works_on_uvloop() -> None:
    """Its transports are no subclasses of asyncio's, and its timers run before its sockets."""

    async def run() -> None:
        async with processes() as several:
            a, b = await several.start(), await several.start()
            writer = await written(a, meta(several.clock), 5)
            reader = Reader(b, writer.stream_id)
            await reader.has(5)
            await writer.say("on")
            await writer.finish()
            await reader.over()
            assert reader.frames == writer.frames

    uvloop.run(run())
