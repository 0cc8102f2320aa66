"""What a web page may do: hosts, origins, CORS (PROTOCOL.md, section 12)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from midstream.testing.transport_dial import ADA, KEYS
from midstream.wire import CORS_ALLOW, CORS_EXPOSE, CORS_METHODS
from tests.gateways import Answer, Http, Site, cursor, site, wire

APP = "https://app.example"


@pytest_asyncio.fixture
async def here() -> AsyncIterator[Site]:
    """A gateway without keys."""
    async with site() as running:
        yield running


@pytest_asyncio.fixture
async def crossed(tmp_path: Path) -> AsyncIterator[Site]:
    """A gateway with keys that pages of one other origin may use."""
    (tmp_path / "keys").write_text(KEYS)
    async with site(keys_file=str(tmp_path / "keys"), cors_origin=(APP,), max_stream_records=3) as running:
        yield running


async def status_for(here: Site, *headers: str, path: str = "/v1/streams", method: str = "GET") -> tuple[int, str]:
    """Status and error code for a request with these header lines and no others."""
    async with wire(here.gateway) as peer:
        peer.send("\r\n".join([f"{method} {path} HTTP/1.1", *headers, "Connection: close", "", ""]).encode("latin-1"))
        status, _ = await peer.head()
        body = await peer.rest()
        return status, json.loads(body).get("error", "") if body else ""


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost",
        "localhost:8400",
        "127.0.0.1",
        "127.0.0.1:1",
        "127.8.9.10",
        "[::1]",
        "[::1]:8400",
        "app.localhost",
    ],
)
async def test_open_gateway_answers_for_this_machine(here: Site, host: str) -> None:
    assert await status_for(here, f"Host: {host}") == (200, "")


@pytest.mark.parametrize(
    "host",
    [
        "rebound.example",
        "rebound.example:8400",
        "127.0.0.1.rebound.example",
        "localhost.rebound.example",
        "notlocalhost",
        "192.168.1.5",
        "0.0.0.0",
        "[::]",
        "[::1",
        "[::1]rebound.example",
        "[::1].rebound.example",
        "::1",
        "localhost:8400@rebound.example",
        "localhost@rebound.example",
        "localhost:rebound.example",
        "localhost, rebound.example",
        "localhost/",
        "2130706433",
        "",
    ],
)
async def test_open_gateway_is_no_other_hosts(here: Site, host: str) -> None:
    """A page that points a name of its own at this machine gets nothing, on any route, before anything is looked at."""
    for path in ("/v1/streams", "/", "/healthz", "/metrics", "/nowhere", "/v1/stream/x?cursor=garbage"):
        assert await status_for(here, f"Host: {host}", path=path) == (421, "wrong_host")
    assert await status_for(here, f"Host: {host}", f"Origin: http://{host}") == (421, "wrong_host")


async def test_host_that_is_absent_or_doubled_is_refused(here: Site) -> None:
    assert (await status_for(here))[0] in (400, 421)
    assert (await status_for(here, "Host: localhost", "Host: rebound.example"))[0] == 400
    assert (await status_for(here, "Host: localhost", "Origin: http://localhost", "Origin: http://localhost"))[0] == 400


async def test_allowed_host_is_let_in() -> None:
    async with site(allowed_host=("gateway.example", "192.168.1.5")) as here:
        for host in ("gateway.example", "Gateway.Example:8400", "192.168.1.5", "localhost"):
            assert await status_for(here, f"Host: {host}") == (200, "")
        assert await status_for(here, "Host: sub.gateway.example") == (421, "wrong_host")


async def test_gateway_with_keys_answers_for_any_host(crossed: Site) -> None:
    """Whoever rebinds a name to it still has no key."""
    bearer = f"Authorization: Bearer {ADA}"
    assert await status_for(crossed, "Host: rebound.example", bearer) == (200, "")
    assert await status_for(crossed, "Host: rebound.example") == (401, "unauthorized")


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:8400", "http://localhost:8400"),
        ("localhost:8400", "https://localhost:8400"),
        ("LOCALHOST:8400", "http://localhost:8400"),
        ("localhost", "http://localhost"),
        ("localhost:80", "http://localhost"),
        ("localhost", "http://localhost:80"),
        ("localhost:443", "https://localhost"),
        ("[::1]:8400", "http://[::1]:8400"),
    ],
)
async def test_own_page_may_use_the_gateway(here: Site, host: str, origin: str) -> None:
    """TLS may end before us, so that the scheme says nothing."""
    assert await status_for(here, f"Host: {host}", f"Origin: {origin}") == (200, "")


@pytest.mark.parametrize(
    "origin",
    [
        "https://elsewhere.example",
        "http://localhost:3000",
        "http://localhost",
        "http://127.0.0.1:8400",
        "http://localhost:8400.elsewhere.example",
        "http://elsewhere.example/localhost:8400",
        "http://localhost:8400@elsewhere.example",
        "null",
        "",
        "http://",
        "http://[",
        "http://[::1",
        "http://[::1]x",
        "localhost:8400",
        "//localhost:8400",
        "file://",
        "*",
    ],
)
async def test_page_of_another_origin_is_403(here: Site, origin: str) -> None:
    """Another port of this machine is another origin; `null` is every sandboxed page's."""
    for method, path in (("GET", "/v1/streams"), ("GET", "/"), ("OPTIONS", "/v1/stream"), ("POST", "/v1/session")):
        status = await status_for(here, "Host: localhost:8400", f"Origin: {origin}", method=method, path=path)
        assert status == (403, "forbidden_origin")


def shared(answer: Answer) -> None:
    """What every answer to a configured origin says."""
    assert answer.headers["access-control-allow-origin"] == APP
    assert answer.headers["access-control-allow-credentials"] == "true"
    assert answer.headers["access-control-expose-headers"] == CORS_EXPOSE
    assert answer.headers["vary"] == "Origin"


async def test_cors_headers_are_on_every_answer(crossed: Site) -> None:
    """Errors included: without them a page sees a 409 as a network failure, and comes back for ever."""
    page = crossed.http.sending(Origin=APP)
    ada: Http = page.keyed(ADA)
    stream_id = await crossed.told(*"abcdef", http=ada)
    answers = {
        200: await ada.get("/v1/streams"),
        204: await ada.get(f"/v1/stream/{stream_id}?cursor={cursor(stream_id, 8)}"),
        400: await ada.get(f"/v1/stream/{stream_id}?cursor=garbage"),
        401: await page.get("/v1/streams"),
        403: await ada.get(f"/v1/stream/{stream_id}?cursor={cursor('x', 1)}"),
        404: await ada.get("/v1/stream/x/state"),
        405: await ada.ask("PUT", "/v1/streams"),
        409: await ada.get(f"/v1/stream/{stream_id}?cursor={cursor(stream_id, 2)}"),
        415: await ada.ask("POST", "/v1/stream", data=b"x"),
    }
    for status, answer in answers.items():
        assert answer.status == status
        shared(answer)
    created = await ada.create()
    assert created.headers["Access-Control-Allow-Origin"] == APP
    for name in ("Midstream-Stream-Id", "Midstream-Heartbeat", "Location", "Retry-After"):
        assert name in created.headers["Access-Control-Expose-Headers"]
    created.close()


async def test_preflight_of_a_configured_origin_allows_what_a_resume_sends(crossed: Site) -> None:
    """No key: a browser sends none with a preflight."""
    for path in ("/v1/stream", "/v1/stream/x", "/v1/stream/x/ack", "/v1/session"):
        asked = {
            "Origin": APP,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization, last-event-id, content-type",
        }
        answer = await crossed.http.ask("OPTIONS", path, asked)
        assert (answer.status, answer.body) == (204, b"")
        shared(answer)
        assert answer.headers["access-control-allow-methods"] == CORS_METHODS == "GET, POST, DELETE"
        allowed = {name.strip().lower() for name in answer.headers["access-control-allow-headers"].split(",")}
        assert allowed >= {"authorization", "apikey", "last-event-id", "content-type", "idempotency-key"}
        assert answer.headers["access-control-allow-headers"] == CORS_ALLOW
        assert answer.headers["access-control-max-age"] == "600"


async def test_foreign_origin_is_told_nothing_that_lets_it_in(crossed: Site) -> None:
    """By preflight and by plain request alike."""
    for origin in ("https://elsewhere.example", "https://app.example.elsewhere.example", "http://app.example", "null"):
        for method in ("OPTIONS", "GET"):
            answer = await crossed.http.keyed(ADA).ask(method, "/v1/streams", {"Origin": origin})
            assert (answer.status, answer.error) == (403, "forbidden_origin")
            assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_answers_without_an_origin_vary_all_the_same(crossed: Site) -> None:
    """Else a cache between gives the answer of one origin to another."""
    answer = await crossed.http.keyed(ADA).get("/v1/streams")
    assert answer.headers["vary"] == "Origin"
    assert "access-control-allow-origin" not in answer.headers


async def test_own_page_needs_no_cors(here: Site) -> None:
    own = here.gateway.address
    answer = await here.http.get("/v1/streams", {"Origin": own})
    assert answer.status == 200
    assert "access-control-allow-origin" not in answer.headers


async def test_page_may_be_framed_by_nobody(here: Site) -> None:
    for path in ("/", "/web/app.js"):
        answer = await here.http.get(path)
        assert answer.status == 200
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
