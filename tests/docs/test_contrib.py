"""The files in contrib/ work: they pass streams on, name metrics that exist, and stand as they are on the pages.

What another program must judge is judged where that program is installed.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from midstream.client import AsyncClient
from midstream.client.steps import Record
from midstream.codec import native
from midstream.journal.memory import MemoryJournal
from midstream.journal.redis_url import Terms
from midstream.producers.scripted import tokens
from midstream.records import Chunk, StreamMeta
from midstream.server.observe import Observer
from midstream.streams import Streams
from tests.docs.markdown import ROOT, blocks
from tests.docs.test_proxies import WITHIN, free_port
from tests.replicas import Fleet, Replica, fleet
from tests.valkeys import redis_journal, shared

CONTRIB = ROOT / "contrib"
PAGE = (ROOT / "docs" / "several-gateways.md").read_text(encoding="utf-8")
GATEWAYS = ("gateway-1", "gateway-2")


def file(name: str) -> str:
    return (CONTRIB / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["nginx.conf", "haproxy.cfg", "envoy.yaml", "midstream.service"])
def test_the_page_shows_the_file(name: str) -> None:
    """What is read is what is run here."""
    assert file(name) in {block.text for block in blocks(PAGE)}


# --- proxies ----------------------------------------------------------------------------------------------------------


def nginx(text: str, directory: Path) -> list[str]:
    paths = " ".join(f"{kind}_temp_path {kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    (directory / "nginx.conf").write_text(
        f"daemon off; pid nginx.pid; error_log stderr; events {{}} http {{ access_log off; {paths}\n{text} }}",
        encoding="utf-8",
    )
    return ["nginx", "-p", str(directory), "-c", "nginx.conf", "-e", "stderr"]


def haproxy(text: str, directory: Path) -> list[str]:
    (directory / "haproxy.cfg").write_text(text, encoding="utf-8")
    return ["haproxy", "-f", str(directory / "haproxy.cfg")]


def envoy(text: str, directory: Path) -> list[str]:
    (directory / "envoy.yaml").write_text(text, encoding="utf-8")
    return ["envoy", "-c", str(directory / "envoy.yaml"), "--use-dynamic-base-id", "--concurrency", "1", "-l", "error"]


Arrange = Callable[[str, Path], list[str]]
# The file, how its proxy is started, and what stands for the port it listens at.
PROXIES: dict[str, tuple[str, Arrange, str]] = {
    "nginx": ("nginx.conf", nginx, "listen 80;"),
    "haproxy": ("haproxy.cfg", haproxy, "bind :80"),
    "envoy": ("envoy.yaml", envoy, "address: 0.0.0.0, port_value: 80 "),
}


def placed(name: str, port: int, gateways: list[Replica]) -> str:
    """The file with addresses of this machine in it, and nothing else changed."""
    file_name, _, listens = PROXIES[name]
    here = {
        "listen 80;": f"listen 127.0.0.1:{port};",
        "bind :80": f"bind 127.0.0.1:{port}",
        "address: 0.0.0.0, port_value: 80 ": f"address: 127.0.0.1, port_value: {port} ",
    }
    text = file(file_name)
    assert text.count(listens) == 1
    text = text.replace(listens, here[listens])
    for gateway, replica in zip(GATEWAYS, gateways, strict=True):
        address = replica.url.removeprefix("http://")
        host, _, at = address.partition(":")
        written = f"{gateway}, port_value: 8400" if name == "envoy" else f"{gateway}:8400"
        assert text.count(written) == 1
        text = text.replace(written, f"{host}, port_value: {at}" if name == "envoy" else address)
    return text


@contextmanager
def proxy(name: str, gateways: list[Replica], directory: Path) -> Iterator[str]:
    """The proxy in front of these gateways; its address."""
    port = free_port()
    command = PROXIES[name][1](placed(name, port, gateways), directory)
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=directory, stdout=log, stderr=log)
    try:
        end = time.monotonic() + WITHIN
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                break
            except ConnectionRefusedError:
                assert process.poll() is None, (directory / "log").read_text()
                assert time.monotonic() < end, "the proxy does not listen"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(WITHIN)


async def healthy(session: aiohttp.ClientSession, address: str) -> None:
    """Wait until the proxy has found its gateways."""
    async with asyncio.timeout(WITHIN):
        while True:
            async with session.get(f"{address}/readyz") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("name", PROXIES)
async def test_a_stream_outlives_its_gateway_behind_the_proxy(name: str, tmp_path: Path) -> None:
    """Tokens come one by one; when a gateway is replaced the reader goes on at the other one, through the same address;
    a WebSocket passes; a killed gateway is not asked again and again.
    """
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    options = ("--upstream", "scripted:", "--heartbeat", "0.5")
    async with fleet(shared().url(f"t{uuid4().hex}", lease=2), *options) as gateways:
        replicas = await gateways.gateways(2)
        with proxy(name, replicas, tmp_path) as address:
            await healthy(gateways.session, address)
            async with AsyncClient(address) as client:
                stream = await client.generate("a proxy", model="scripted-n120-r40")
                records = [record async for record in _replacing(stream, gateways, replicas)]
            assert "".join(record.text for record in records) == _whole("a proxy", 120)
            async with await _opened(gateways.session, f"{address}/v1/ws") as socket:
                await socket.send_json({"type": "generate", "ref": "a", "prompt": "x", "model": "scripted-n1-r0"})
                told = await socket.receive_json(timeout=WITHIN)
                assert (told[0] if isinstance(told, list) else told)["type"] == "record"


async def _opened(session: aiohttp.ClientSession, url: str) -> aiohttp.ClientWebSocketResponse:
    """A WebSocket through the proxy, which may still be finding out that a gateway has gone: then it says 503."""
    async with asyncio.timeout(WITHIN):
        while True:
            try:
                return await session.ws_connect(url)
            except aiohttp.WSServerHandshakeError as refused:
                if refused.status != 503:
                    raise
            await asyncio.sleep(0.05)


def _whole(prompt: str, count: int) -> str:
    words = tokens(prompt)
    return "".join(next(words) for _ in range(count))


async def _replacing(stream: object, gateways: Fleet, replicas: list[Replica]) -> AsyncIterator[Record]:
    """The records of a stream, whose writer is told to go after the thirtieth; they must not come in heaps."""
    loop = asyncio.get_running_loop()
    moments = set()
    count = 0
    async for record in stream:  # type: ignore[attr-defined]  # the client's
        count += 1
        moments.add(loop.time())
        if count == 30:
            assert len(moments) > 10, "the proxy passes tokens on in heaps"
            for replica in replicas:
                await _terminate_writer(gateways, replica)
        yield record


async def _terminate_writer(gateways: Fleet, replica: Replica) -> None:
    async with gateways.session.get(f"{replica.url}/metrics") as response:
        if b"midstream_streams_open 1.0" in await response.read():
            replica.terminate()


# --- metrics ----------------------------------------------------------------------------------------------------------


def samples() -> set[str]:
    """Every name that can be asked for, and what Prometheus adds."""
    streams = Streams(MemoryJournal(time.time), time.time)
    observer = Observer(time.time)
    observer.watch(streams)
    found = {"midstream_streams_ended_total", "midstream_resumes_total", "midstream_refused_total"}
    found.add("midstream_takeovers_total")
    for family in text_string_to_metric_families(observer.page().decode()):
        found |= {sample.name for sample in family.samples}
    return found


@pytest.mark.parametrize("name", ["alerts.yml", "grafana-dashboard.json"])
def test_the_metrics_it_asks_for_exist(name: str) -> None:
    """An alert on a metric that is not there never fires."""
    named = set(re.findall(r"midstream_\w+", file(name)))
    assert named
    assert named <= samples()


def test_every_metric_is_on_the_dashboard() -> None:
    """By one of its samples, but for those that nobody draws."""
    drawn = set(re.findall(r"midstream_\w+", file("grafana-dashboard.json")))
    undrawn = {name for name in samples() if not name.endswith(("_created", "_sum", "_count"))} - drawn
    assert undrawn == set()


def test_the_dashboard_is_one() -> None:
    """Panels that do not overlap, each with a query of the chosen source."""
    board = json.loads(file("grafana-dashboard.json"))
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in board["panels"]})
    for panel in board["panels"]:
        for target in panel["targets"]:
            assert 'job="$job"' in target["expr"]
            assert target["datasource"]["uid"] == "${datasource}"


def test_prometheus_takes_the_rules_and_the_metrics(tmp_path: Path) -> None:
    """promtool reads the rules, and each fires on the series it is meant for."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    subprocess.run(["promtool", "check", "rules", CONTRIB / "alerts.yml"], check=True, capture_output=True)
    (tmp_path / "test.yml").write_text(json.dumps(_rule_test()), encoding="utf-8")
    done = subprocess.run(["promtool", "test", "rules", tmp_path / "test.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _rule_test() -> dict:
    """An hour in which everything goes wrong at once."""
    one = 'job="midstream",instance="a"'
    series = {
        f"up{{{one}}}": "0x60",
        f"midstream_store_available{{{one}}}": "0x60",
        f"midstream_store_round_trip_seconds_sum{{{one}}}": "0+60x60",
        f"midstream_store_round_trip_seconds_count{{{one}}}": "0+600x60",
        f'midstream_streams_ended_total{{{one},status="failed"}}': "0+10x60",
        f'midstream_streams_ended_total{{{one},status="done"}}': "0+10x60",
        f'midstream_takeovers_total{{{one},outcome="ended"}}': "0+1x60",
        f'midstream_refused_total{{{one},code="out_of_space"}}': "0+1x60",
        f'midstream_refused_total{{{one},code="cursor_expired"}}': "0+1x60",
        f"midstream_reader_lag_records{{{one}}}": "9000x60",
    }
    names = re.findall(r"- alert: (\w+)", file("alerts.yml"))
    fires = [
        {"expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) > 0', "eval_time": "1h"} for name in names
    ]
    return {
        "rule_files": [str(CONTRIB / "alerts.yml")],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [fire | {"exp_samples": [{"value": 1}]} for fire in fires],
            }
        ],
    }


# --- the service ------------------------------------------------------------------------------------------------------


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """No line that systemd does not know, and more time to stop than a drain takes."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "midstream.service"
    program = shutil.which("midstream", path=str(Path(sys.executable).parent))
    assert program is not None
    unit.write_text(file("midstream.service").replace("/opt/midstream/bin/midstream", program), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
    assert "midstream.service" not in done.stderr, done.stderr


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("at_once", "kib"), [(1, 343), (16, 293)])
async def test_an_answer_takes_the_memory_on_the_page(at_once: int, kib: int) -> None:
    """4,000 tokens of 5 characters, one by one and many at once, as the store counts them."""
    assert "An answer of 4,000 tokens takes 293 to 343 KiB" in PAGE
    prefix = f"t{uuid4().hex}"
    journal = redis_journal(shared(), prefix, time.time, terms=Terms())
    await journal.open()
    meta = StreamMeta(uuid4().hex, "ada", "m", time.time(), 600.0)
    await journal.create(meta, [native.start(meta.stream_id, "m")])
    for first in range(2, 4002, at_once):
        batch = [native.token(seq, Chunk(" word")) for seq in range(first, first + at_once)]
        await journal.append(meta.stream_id, batch, epoch=1, first_seq=first)
    taken = sum(shared().ask("MEMORY", "USAGE", key, "SAMPLES", "0") for key in shared().keys(f"{prefix}:*"))
    await journal.close()
    assert taken / 1024 == pytest.approx(kib, rel=0.05)
