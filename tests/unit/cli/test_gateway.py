"""What is said of an address at which no gateway answers, or not over HTTP: what happened, where, what to write."""

from __future__ import annotations

import pytest

from midstream.cli import exits
from midstream.cli.gateway import code_of
from midstream.client import GaveUp, UnexpectedAnswer
from midstream.errors import (
    CursorAhead,
    CursorExpired,
    MidstreamError,
    ProducerFailed,
    StoreUnavailable,
    Unauthorized,
)
from tests.unit.cli.elsewhere import GRPC, SMTP, TLS, answering, page, whole
from tests.unit.cli.program import Run, finish, read_upto, start

NO_ROUTE = whole("404 Not Found", b'{"error":"not_found","detail":"no such route; see /openapi.json","action":"fix"}')
MODELS = whole("200 OK", b'{"object":"list","data":[{"id":"m"}]}')
HTTP_PORT = "give --gateway the HTTP port, 8400 where nothing else was chosen"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Unauthorized(), exits.REFUSED),
        (UnexpectedAnswer(), exits.REFUSED),
        (CursorExpired(3), exits.POSITION_GONE),
        (CursorAhead(9), exits.POSITION_GONE),
        (GaveUp("reset", 3, None), exits.UNREACHABLE),
        (StoreUnavailable(), exits.REFUSED),
        (ProducerFailed("upstream_error", ""), exits.GENERATION_FAILED),
    ],
)
def test_each_error_of_a_client_has_its_code(error: MidstreamError, code: int) -> None:
    assert code_of(error) == code


@pytest.mark.parametrize(
    ("scheme", "raw", "told"),
    [
        (
            "http",
            GRPC,
            f"what listens there speaks HTTP/2 alone, as a gRPC port does{{}}; {HTTP_PORT}",
        ),
        ("http", TLS, "what listens there speaks TLS{}; write https://"),
        ("http", SMTP, "what listens there does not speak HTTP{}; is this the address of a Midstream gateway?"),
        (
            "http",
            b"",
            "the connection was closed without an answer{}; is the gateway running, and is this its HTTP port?",
        ),
        ("https", page("400 Bad Request"), "what listens there speaks no TLS{}; write http://"),
    ],
)
def test_a_port_that_speaks_something_else_is_told_with_what_to_write(
    cli: Run, scheme: str, raw: bytes, told: str
) -> None:
    with answering(raw) as place:
        url = f"{scheme}://{place}"
        asked = cli("generate", "--gateway", url, "hi")
        looked = cli("inspect", "--gateway", url)
    assert asked == (exits.UNREACHABLE, "", f"no stream from {url}: {told.format(' (4 attempts)')}\n")
    assert looked == (exits.UNREACHABLE, "", f"no answer from {url}: {told.format('')}\n")


@pytest.mark.parametrize("words", [["generate", "hi"], ["inspect"], ["inspect", "pool"]])
def test_an_address_with_the_path_of_an_sdk_is_told_without_it(cli: Run, words: list[str]) -> None:
    with answering(NO_ROUTE) as place:
        code, out, err = cli(*words, "--gateway", f"http://{place}/v1/")
    assert (code, out) == (exits.REFUSED, "")
    assert err == (
        f"http://{place}/v1/ does not answer as a gateway does: no such route; see /openapi.json; "
        f"write it without /v1: --gateway http://{place}\n"
    )


def test_a_worker_with_the_path_of_an_sdk_is_told_without_it() -> None:
    with answering(NO_ROUTE) as place, answering(MODELS) as local:
        code, _, err = finish(start("worker", "--gateway", f"http://{place}/v1", "--upstream", f"http://{local}/v1"))
    assert code == exits.REFUSED
    assert err.endswith(
        f"the pool at http://{place}/v1 refuses this worker: there is no pool at this address: no such route; "
        f"see /openapi.json (status 404); write it without /v1: --gateway http://{place}\n"
    )


def test_a_web_server_is_told_by_the_title_of_its_page(cli: Run) -> None:
    answer = page("400 Bad Request", "400 The plain HTTP request was sent to HTTPS port")
    with answering(answer) as place:
        code, out, err = cli("generate", "hi", "--gateway", f"http://{place}")
    assert (code, out) == (exits.REFUSED, "")
    assert err == (
        f"http://{place} does not answer as a gateway does: status 400: "
        "400 The plain HTTP request was sent to HTTPS port; is this the address of a Midstream gateway?\n"
    )


def test_a_web_server_is_told_to_a_worker_without_its_markup() -> None:
    with answering(page("404 Not Found")) as place, answering(MODELS) as local:
        code, _, err = finish(start("worker", "--gateway", f"http://{place}", "--upstream", f"http://{local}/v1"))
    assert code == exits.REFUSED
    assert err.endswith("there is no pool at this address: 404 Not Found nginx (status 404)\n")


@pytest.mark.parametrize(
    ("scheme", "raw", "told"),
    [
        ("http", GRPC, "what listens at {} does not speak HTTP/1.1; is it a gRPC port?\n"),
        ("https", page("400 Bad Request"), "{} speaks no TLS as it should ("),
    ],
)
def test_a_port_that_speaks_something_else_is_told_to_a_worker(scheme: str, raw: bytes, told: str) -> None:
    with answering(raw) as place, answering(MODELS) as local:
        process = start("worker", "--gateway", f"{scheme}://{place}", "--upstream", f"http://{local}/v1")
        assert process.stderr is not None
        try:
            read_upto(process.stderr, f"the pool does not answer: {told.format(place)}".encode())
        finally:
            process.terminate()
            finish(process)


def test_over_grpc_the_place_that_is_told_is_that_of_grpc(cli: Run) -> None:
    with answering(b"") as gone:
        pass
    words = ["--gateway", "http://127.0.0.1:1", "--transport", "grpc", "--grpc", gone]
    code, out, err = cli("generate", "hi", *words)
    assert (code, out) == (exits.UNREACHABLE, "")
    assert err == (
        f"no stream over gRPC from {gone}: connection refused (4 attempts); "
        "does the gateway's gRPC port stand there? --grpc HOST:PORT names another\n"
    )
