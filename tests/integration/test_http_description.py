"""What the gateway says of itself: OpenAPI, health, metrics, and a log line per stream end."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from midstream.testing.transport_dial import ADA, KEYS
from midstream.wire import FAILURES, HTTP_STATUS
from tests.gateways import Http, Site, cursor, router_of, site

METHODS = {"get", "put", "post", "delete", "options", "head", "patch", "trace"}


@pytest_asyncio.fixture
async def here(tmp_path: Path) -> AsyncIterator[Site]:
    (tmp_path / "keys").write_text(KEYS)
    async with site(keys_file=str(tmp_path / "keys"), max_stream_records=50) as running:
        yield running


# --- OpenAPI ---------------------------------------------------------------------------------------------------------


async def described(here: Site) -> dict[str, Any]:
    answer = await here.http.get("/openapi.json")
    assert answer.status == 200
    document: dict[str, Any] = answer.json
    return document


def everything_in(node: Any) -> Iterator[dict[str, Any]]:
    """Every object in a document."""
    if isinstance(node, dict):
        yield node
    for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from everything_in(inner)


def operations_of(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any], list[dict[str, Any]]]]:
    """Path, method, operation, and the parameters that hold for it."""
    for path, item in document["paths"].items():
        for method in METHODS & item.keys():
            yield path, method, item[method], [*item.get("parameters", ()), *item[method].get("parameters", ())]


async def test_openapi_document_is_well_formed(here: Site) -> None:
    """What OpenAPI 3.1 requires of each of its objects, and no reference into nothing."""
    document = await described(here)
    assert re.fullmatch(r"3\.1\.\d+", document["openapi"])
    assert document["info"]["title"]
    assert document["info"]["version"]
    for node in everything_in(document):
        if "$ref" in node:
            target: Any = document
            for step in node["$ref"].removeprefix("#/").split("/"):
                target = target[step]
    for path, _, operation, parameters in operations_of(document):
        assert path.startswith("/")
        assert operation["summary"]
        assert operation["responses"]
        for status, answer in operation["responses"].items():
            assert re.fullmatch(r"[1-5]\d\d|default", status)
            assert answer["description"]
            for kind in answer.get("content", {}):
                assert "/" in kind
        for parameter in parameters:
            assert parameter["name"]
            assert parameter["in"] in ("path", "query", "header", "cookie")
            assert "schema" in parameter
            assert parameter["in"] != "path" or parameter["required"] is True
        named = {parameter["name"] for parameter in parameters if parameter["in"] == "path"}
        assert named == set(re.findall(r"\{(\w+)\}", path))
        for requirement in operation.get("security", ()):
            assert requirement.keys() <= document["components"]["securitySchemes"].keys()


async def test_openapi_knows_every_route_and_no_other(here: Site) -> None:
    """The pages and their files are for browsers, not for tools."""
    document = await described(here)
    routes = {
        (re.sub(r":\w+}", "}", route.path), method.lower())
        for route in router_of(here.gateway.gateway).routes
        if isinstance(route, Route) and route.path not in ("/", "/pool")
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert {(path, method) for path, method, _, _ in operations_of(document)} == routes


async def test_openapi_knows_every_error(here: Site) -> None:
    """Each code of the protocol by its name, and each status; 405 is of no operation."""
    document = await described(here)
    codes = set(document["components"]["schemas"]["Error"]["properties"]["error"]["enum"])
    assert codes == HTTP_STATUS.keys() | FAILURES.keys() | {"cancelled"}
    statuses = {status for _, _, operation, _ in operations_of(document) for status in operation["responses"]}
    assert {str(status) for status in HTTP_STATUS.values()} - {"405"} <= statuses


async def test_openapi_schemas_hold_for_what_is_answered(here: Site, ada: Http) -> None:
    """No field is missing, none is unheard of, each is of its type."""
    schemas = (await described(here))["components"]["schemas"]
    stream_id = await here.told(*"abc", http=ada)
    lost = await here.told(*["x"] * 60, http=ada)
    answers = [
        ("State", (await ada.get(f"/v1/stream/{stream_id}/state")).json),
        ("State", (await ada.get("/v1/streams")).json["streams"][0]),
        ("State", (await ada.post(f"/v1/stream/{stream_id}/ack", {"seq": 2})).json),
        ("Snapshot", (await ada.get(f"/v1/stream/{stream_id}/snapshot")).json),
        ("Error", (await ada.get(f"/v1/stream/{lost}?from=start")).json),
        ("Error", (await ada.get(f"/v1/stream/{lost}?cursor={cursor(lost, 99)}")).json),
        ("Error", (await ada.get("/v1/stream/x?from=garbage")).json),
        ("Error", (await ada.get("/nowhere")).json),
    ]
    for name, body in answers:
        schema = schemas[name]
        assert set(schema["required"]) <= body.keys() <= schema["properties"].keys()
        if name == "State":
            assert body.keys() == schema["properties"].keys()
        for field, value in body.items():
            assert fits(value, schema["properties"][field]), (name, field, value)


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value has the type, the bounds and the choice that a schema gives it."""
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    types: dict[str, Any] = {
        "integer": int,
        "number": (int, float),
        "string": str,
        "boolean": bool,
        "object": dict,
        "array": list,
    }
    of_kind = any(value is None if kind == "null" else isinstance(value, types[kind]) for kind in kinds)
    within = value is None or value >= schema["minimum"] if "minimum" in schema else True
    return of_kind and within and value in schema.get("enum", [value])


# --- health ----------------------------------------------------------------------------------------------------------


async def test_health_and_readiness(here: Site) -> None:
    """Alive as long as it answers; ready as long as streams can be opened."""
    assert (await here.http.get("/healthz")).json == {"status": "alive"}
    answer = await here.http.get("/readyz")
    assert (answer.status, answer.json) == (200, {"status": "ready", "journal": "memory"})
    await here.gateway.gateway.drain()
    answer = await here.http.get("/readyz")
    assert (answer.status, answer.json["status"]) == (503, "not ready")
    assert "retry-after" in answer.headers
    assert (await here.http.get("/healthz")).status == 200


# --- metrics ---------------------------------------------------------------------------------------------------------


async def sampled(here: Site) -> dict[str, float]:
    """Every sample of /metrics, by its name and labels."""
    answer = await here.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return {
        sample.name + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
    }


async def test_metrics_count_what_happened(here: Site, ada: Http) -> None:
    stream_id, puppet, reader = await here.begin(ada)
    await puppet.say("a", "b", "c")
    await here.gateway.idle(stream_id)
    slow = await here.http.keyed(ADA).open("GET", f"/v1/stream/{stream_id}?cursor={cursor(stream_id, 2)}")
    await here.gateway.idle(stream_id, readers=2)
    found = await sampled(here)
    assert found["midstream_streams_open"] == 1
    assert found["midstream_readers"] == 2
    assert found["midstream_reader_lag_records"] == 0
    assert found["midstream_records_appended_total"] == 3
    assert found["midstream_records_delivered_total"] == 4 + 2
    assert found["midstream_streams_opened_total"] == 1
    assert found["midstream_retained_bytes"] > 0
    assert found["midstream_resumes_total live"] == 1
    slow.close()
    await puppet.finish()
    await reader.read()
    await ada.get(f"/v1/stream/{stream_id}?cursor={cursor(stream_id, 2)}")
    await ada.get(f"/v1/stream/{stream_id}?cursor={cursor(stream_id, 5)}")
    await ada.get(f"/v1/stream/{stream_id}?cursor={cursor(stream_id, 99)}")
    await ada.get(f"/v1/stream/{stream_id}?cursor=garbage")
    await here.http.get("/v1/streams")
    found = await sampled(here)
    assert found["midstream_streams_open"] == found["midstream_readers"] == 0
    assert found["midstream_records_appended_total"] == 4
    assert found["midstream_streams_ended_total done"] == 1
    assert found["midstream_resumes_total replay"] == found["midstream_resumes_total at the end"] == 1
    assert found["midstream_refused_total cursor_ahead"] == found["midstream_refused_total bad_cursor"] == 1
    assert found["midstream_refused_total unauthorized"] == 1
    assert found["midstream_upstream_first_token_seconds_count"] == 1


async def test_resumes_that_had_missed_something_are_timed_to_their_first_record(here: Site, ada: Http) -> None:
    """Not those that have had all there is: the next record is the model's to give.  Nor a reader from the start."""
    stream_id, puppet = await here.open_stream("a", "b", http=ada)
    timed = "midstream_resume_first_record_seconds"
    assert (await sampled(here))[f"{timed}_count"] == 0
    behind = await ada.open("GET", f"/v1/stream/{stream_id}?cursor={cursor(stream_id, 2)}")
    await ada.open("GET", f"/v1/stream/{stream_id}?cursor={cursor(stream_id, 3)}")
    await ada.open("GET", f"/v1/stream/{stream_id}?from=start")
    await here.gateway.idle(stream_id, readers=3)
    await puppet.say("c")
    await here.gateway.idle(stream_id, readers=3)
    found = await sampled(here)
    assert found[f"{timed}_count"] == 1
    assert 0 < found[f"{timed}_sum"] < 5
    await puppet.finish()
    assert (await behind.read()).count(b"\nid: ") == 3
    assert (await sampled(here))[f"{timed}_count"] == 1


async def test_waits_for_the_store_are_counted(tmp_path: Path) -> None:
    """One for each commit; none where there is no store to wait for."""
    async with site(journal=f"sqlite:///{tmp_path}/journal.db") as durable:
        before = await sampled(durable)
        await durable.told("a", "b")
        after = await sampled(durable)
        trip = "midstream_store_round_trip_seconds"
        assert after[f"{trip}_count"] >= before[f"{trip}_count"] + 3
        assert 0 < after[f"{trip}_sum"] - before[f"{trip}_sum"] < 5
    async with site() as here:
        await here.told("a", "b")
        found = await sampled(here)
        assert (found[f"{trip}_count"], found[f"{trip}_sum"]) == (0, 0)


async def test_metrics_name_no_owner_stream_or_client(here: Site, ada: Http) -> None:
    """Labels come from lists of our own: nothing a client sent can make a new time series."""
    stream_id = await here.told("a", http=ada.sending(Idempotency_Key="my-idempotency-key"))
    await ada.post("/v1/stream", {"prompt": "a", "model": "my-model"})
    await ada.get("/my-path?my-field=1")
    await ada.ask("PROPFIND", f"/v1/stream/{stream_id}")
    body = (await here.http.get("/metrics")).body.decode()
    for name in ("ada", "bob", stream_id, "my-", "puppet", "PROPFIND", ADA):
        assert name not in body
    for family in text_string_to_metric_families(body):
        assert family.documentation
        assert family.name.startswith("midstream_")


# --- logs ------------------------------------------------------------------------------------------------------------


async def test_each_end_of_a_stream_is_one_structured_line(
    here: Site, ada: Http, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "midstream"):
        done = await here.told("a", "b", http=ada)
        failed, puppet = await here.open_stream("a", http=ada)
        await puppet.fail("upstream_error", "line\nbreak")
        cancelled, puppet = await here.open_stream(http=ada)
        await ada.post(f"/v1/stream/{cancelled}/cancel")
        await puppet.stopped.wait()
    lines = [json.loads(message) for message in caplog.messages if '"stream_end"' in message]
    assert all("\n" not in message for message in caplog.messages)
    assert [(line["stream_id"], line["status"]) for line in lines] == [
        (done, "done"),
        (failed, "failed"),
        (cancelled, "cancelled"),
    ]
    assert lines[0] == {
        "event": "stream_end",
        "stream_id": done,
        "model": "puppet",
        "status": "done",
        "records": 4,
        "seconds": 0.0,
    }
    assert (lines[1]["code"], lines[1]["message"]) == ("upstream_error", "line\nbreak")
