"""`GET /v1/pool`: who may see the pool, and that what is told is true, bounded and harmless."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from midstream.testing.patience import eventually
from midstream.transports.openapi_pool_view import VIEW_SCHEMAS
from midstream.wire import POOL_LEASE_TERM, POOL_WORKER_GONE
from tests.gateways import Http, site
from tests.pools import ADA, BOB, CAT, MODEL, TEXT, PoolSite, asked, pool_site

PROMPT = "a prompt that nobody else may read"


@pytest_asyncio.fixture
async def here(tmp_path: Path) -> AsyncIterator[PoolSite]:
    async with pool_site(tmp_path) as running:
        yield running


async def seen(here: PoolSite, http: Http | None = None) -> dict[str, Any]:
    answer = await (http or here.keyed(CAT)).get("/v1/pool")
    assert answer.status == 200, answer.body
    told: dict[str, Any] = answer.json
    complaints = list(wrong(told, VIEW_SCHEMAS["Pool"], "pool"))
    assert complaints == []
    return told


TYPES: dict[str, Any] = {
    "integer": int,
    "number": (int, float),
    "string": str,
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}


def wrong(value: Any, schema: dict[str, Any], where: str) -> Iterator[str]:
    """Where a value is not what its schema says: as much of JSON Schema as this one uses."""
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    fits = not kinds or any(isinstance(value, TYPES[kind]) for kind in kinds)
    flag = isinstance(value, bool) and "boolean" not in kinds  # which is an int to Python
    if not fits or flag or value != schema.get("const", value):
        yield f"{where} is {value!r}"
    elif isinstance(value, dict):
        yield from (f"{where}.{name} is not as described" for name in value.keys() ^ schema["properties"].keys())
        for name in value.keys() & schema["properties"].keys():
            yield from wrong(value[name], schema["properties"][name], f"{where}.{name}")
    elif isinstance(value, list):
        if len(value) > schema.get("maxItems", 1000):
            yield f"{where} has {len(value)} items"
        for at, inner in enumerate(value):
            yield from wrong(inner, schema["items"], f"{where}[{at}]")
    elif isinstance(value, (int, float)) and value < schema.get("minimum", value):
        yield f"{where} is {value}"


# --- who may see it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [ADA, BOB])
async def test_keys_that_are_not_marked_admin_see_nothing(here: PoolSite, key: str) -> None:
    answer = await here.keyed(key).get("/v1/pool")
    assert (answer.status, answer.error) == (403, "forbidden")
    assert answer.json.keys() == {"error", "detail"}
    assert ":admin" in answer.json["detail"]


async def test_without_a_good_key_there_is_nothing_to_see(here: PoolSite) -> None:
    for http in (here.http, here.keyed("nobody-has-this"), here.keyed(CAT).sending(Authorization=f"Bearer {ADA}")):
        answer = await http.get("/v1/pool")
        assert (answer.status, answer.error) == (401, "unauthorized")


async def test_the_session_cookie_of_an_admin_is_no_key_here(here: PoolSite) -> None:
    """It is for a stream and a WebSocket alone."""
    answer = await here.keyed(CAT).post("/v1/session")
    cookie = answer.headers["set-cookie"].partition(";")[0]
    assert (await here.http.get("/v1/pool", {"Cookie": cookie})).status == 401


async def test_an_open_gateway_shows_its_one_owner_all(tmp_path: Path) -> None:
    async with pool_site(tmp_path, keys=None) as here:
        assert (await seen(here, here.http))["workers"] == []
        answer = await here.http.get("/v1/pool", {"Origin": "http://evil.example"})
        assert (answer.status, answer.error) == (403, "forbidden_origin")


async def test_a_gateway_without_a_pool_has_no_such_route_but_a_page_that_says_so() -> None:
    async with site() as here:
        answer = await here.http.get("/v1/pool")
        assert (answer.status, answer.error) == (404, "not_found")
        assert (await here.http.get("/pool")).status == 200


async def test_the_page_needs_no_key_and_lets_nothing_in_from_elsewhere(here: PoolSite) -> None:
    answer = await here.http.get("/pool")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/html")
    playground = await here.http.get("/")
    assert answer.headers["content-security-policy"] == playground.headers["content-security-policy"]
    assert (await here.http.post("/pool")).status == 405


async def test_a_query_is_refused(here: PoolSite) -> None:
    answer = await here.keyed(CAT).get("/v1/pool?limit=1000000")
    assert (answer.status, answer.error) == (400, "bad_request")


async def test_a_database_that_is_away_is_worth_another_try(here: PoolSite) -> None:
    await here.pool.jobs.close()
    answer = await here.keyed(CAT).get("/v1/pool")
    assert (answer.status, answer.error) == (503, "store_unavailable")
    assert "retry-after" in answer.headers
    await here.pool.jobs.open()
    assert (await seen(here))["workers"] == []


# --- what is told -----------------------------------------------------------------------------------------------------


async def test_an_admin_sees_who_works_what_waits_and_runs_and_who_was_paid(here: PoolSite) -> None:
    now = here.clock()
    reading, job = await here.begun(prompt=PROMPT)
    await job.post("x" * 100)
    await job.finish("x" * 200)
    await reading.end()
    reading = await here.read(prompt=PROMPT)
    job = await here.hand(threads=2).pop()
    await job.post("abcde", "é", reasoning_content="hm")
    await here.ada.post(f"{TEXT}/async", asked(models=["huge", "larger"], params={"n": 3, "max_length": 64}))
    here.clock.advance(10.0)
    told = await seen(here)
    assert told["at"] == now + 10
    assert told["totals"] == {
        "workers": 1,
        "waiting": 1,
        "running": 1,
        "posts": 3,
        "units": 50,
        "done": 1,
        "faulted": 0,
        "cancelled": 0,
    }
    [worker] = told["workers"]
    assert worker == {
        "name": "worker",
        "owner": "bob",
        "models": [MODEL],
        "more_models": 0,
        "agent": "Hand:1:x",
        "threads": worker["threads"],
        "seen_at": now,
        "here": True,
        "finished": 1,
        "lost": 0,
        "earned": 50,
        "running": [{"generation": job.id[:8], "model": MODEL}],
    }
    [lease] = told["leases"]
    assert lease == {
        "generation": job.id[:8],
        "request": lease["request"],
        "payer": "ada",
        "worker": "worker",
        "model": MODEL,
        "max_length": 100,
        "streams": True,
        "began_at": now,
        "cancelled": False,
        "posts": 2,
        "bytes": 5 + 2 + 2 * 2,
        "chars": 5 + 1 + 2 * 2,
        "seconds_left": POOL_LEASE_TERM - 10,
    }
    [waiting] = told["queue"]
    assert waiting == {
        "request": waiting["request"],
        "position": 0,
        "owner": "ada",
        "models": ["huge", "larger"],
        "more_models": 0,
        "max_length": 64,
        "streams": False,
        "waiting": 3,
        "running": 0,
        "faults": 0,
        "created_at": now,
    }
    ledger = told["ledger"]
    assert (ledger["sum"], ledger["accounts"]) == (0, 2)
    assert sorted(ledger["balances"], key=lambda row: row["units"]) == [
        {"owner": "ada", "units": -50},
        {"owner": "bob", "units": 50},
    ]
    [transfer] = ledger["transfers"]
    assert [transfer[name] for name in ("payer", "payee", "units", "worker", "at")] == ["ada", "bob", 50, "worker", now]
    reading.leave()


async def test_nothing_that_is_told_gives_a_right_to_anything(here: PoolSite) -> None:
    """No prompt and no answer, no key or its digest, no whole id: with one, replies can be read and jobs stopped."""
    reading, job = await here.begun(prompt=PROMPT)
    await job.post("an answer")
    request = (await here.ada.post(f"{TEXT}/async", asked(prompt=PROMPT))).json["id"]
    body = (await here.keyed(CAT).get("/v1/pool")).body.decode()
    assert request[:8] in body
    assert job.id[:8] in body
    for secret in (PROMPT, "an answer", request, reading.stream_id, ADA, BOB, CAT, job.id):
        assert secret not in body
    reading.leave()


async def test_a_busy_worker_was_seen_when_it_posted(here: PoolSite) -> None:
    """It does not look for jobs meanwhile, which alone is in the database."""
    reading, job = await here.begun()
    here.clock.advance(POOL_LEASE_TERM - 1)
    await job.post("x")
    here.clock.advance(20.0)
    posted = here.clock() - 20
    [worker] = (await seen(here))["workers"]
    assert (worker["seen_at"], worker["here"]) == (posted, True)
    reading.leave()


async def test_a_worker_that_left_stays_listed_as_gone(here: PoolSite) -> None:
    await here.serving()
    here.clock.advance(POOL_WORKER_GONE + 1)
    told = await seen(here)
    assert [(worker["name"], worker["here"]) for worker in told["workers"]] == [("worker", False)]
    assert told["totals"]["workers"] == 0


async def test_a_job_that_comes_whole_has_a_lease_without_progress(here: PoolSite) -> None:
    await here.ada.post(f"{TEXT}/async", asked())
    job = await here.hand(chat_jobs=False).pop()
    [lease] = (await seen(here))["leases"]
    assert (lease["generation"], lease["streams"]) == (job.id[:8], False)
    assert [lease[name] for name in ("posts", "bytes", "chars")] == [None] * 3


async def test_a_cancelled_job_is_told_while_its_worker_may_not_have_heard(here: PoolSite) -> None:
    """It has been paid, but its worker hears of it only when it posts, and its lease stands."""
    reading, job = await here.begun()
    await job.post("x")
    await here.ada.post(f"/v1/stream/{reading.stream_id}/cancel")
    await reading.end()

    async def cancelled() -> bool:
        told = await seen(here)
        return [(row["generation"], row["cancelled"], row["posts"]) for row in told["leases"]] == [
            (job.id[:8], True, 1)
        ] and told["totals"]["cancelled"] == 1

    await eventually(cancelled)
    told = await seen(here)
    assert told["totals"]["running"] == 0
    assert told["ledger"]["sum"] == 0
    here.clock.advance(10.0)
    assert job.id in await here.held()
    assert (await seen(here))["leases"] == []


async def test_long_lists_and_long_names_are_cut_and_counted(here: PoolSite) -> None:
    """A worker may name a thousand models, and a queue may be of any length."""
    models = [f"model-{number}" for number in range(50)]
    await here.hand(name="much").look(models=models)
    for _ in range(205):
        await here.ada.post(f"{TEXT}/async", asked(models=["huge"]))
    told = await seen(here)
    [worker] = told["workers"]
    assert (worker["models"], worker["more_models"]) == (models[:20], 30)
    assert (len(told["queue"]), told["totals"]["waiting"]) == (200, 205)
    assert [row["position"] for row in told["queue"]] == list(range(200))
