"""The pool's routes on the wire: existing workers and clients, replayed request by request; keys; what is refused.

The programs are played by scripts of our own, which send what these send and act on the answers as these do.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
import pytest_asyncio
from sqlalchemy import event
from sqlalchemy.engine import Engine
from starlette.routing import Route

from midstream.testing.patience import until
from midstream.transports.openapi_pool import SCHEMAS
from midstream.transports.workers import PREFIXES
from tests.gateways import Answer, Http, router_of, site, wire
from tests.pools import ADA, BOB, CAT, MODEL, TEXT, PoolSite, asked, pool_site

UNKNOWN = str(UUID(int=5))


@pytest_asyncio.fixture
async def here(tmp_path: Path) -> AsyncIterator[PoolSite]:
    async with pool_site(tmp_path) as running:
        yield running


async def requested(here: PoolSite, **body: Any) -> str:
    """A request in the queue."""
    answer = await here.ada.post(f"{TEXT}/async", asked(**body))
    assert answer.status == 202, answer.body
    return str(answer.json["id"])


async def status(here: PoolSite, request: str) -> dict[str, Any]:
    answer = await here.http.get(f"{TEXT}/status/{request}")
    assert answer.status == 200
    return answer.json


def refusal(answer: Answer) -> tuple[int, str]:
    """Status and code of a refusal in the pool's shape."""
    assert answer.headers["content-type"] == "application/json"
    assert isinstance(answer.json["message"], str)
    return answer.status, answer.json["rc"]


# --- existing workers, replayed --------------------------------------------------------------------------------------


class KoboldBridge:
    """KoboldAI-Horde-Bridge: no state, no seed, only `apikey`; repeats a submit until it is told that it is done."""

    def __init__(self, http: Http) -> None:
        self.http = http
        self.repeats = 0

    async def pop(self) -> tuple[str, dict[str, Any]] | None:
        body = {
            "name": "My Bridge",
            "models": [MODEL],
            "max_length": 512,
            "max_context_length": 2048,
            "priority_usernames": [],
            "softprompts": [],
            "bridge_agent": "KoboldAI Bridge:10:https://github.com/db0/KoboldAI-Horde-Bridge",
        }
        answer = await self.http.post(f"{TEXT}/pop", body)
        assert answer.status == 200
        pop = answer.json
        assert pop["softprompt"] is None  # it would tell its backend to load one
        assert isinstance(pop["skipped"], dict)
        current_id, payload = pop["id"], pop["payload"]
        return None if current_id is None else (current_id, payload)

    async def submit(self, current_id: str | None, text: str, tries: int = 1) -> bool:
        """Whether it goes on to the next job.  It would repeat for ever, each ten seconds; here for `tries`."""
        for _ in range(tries):
            answer = await self.http.post(f"{TEXT}/submit", {"id": current_id, "generation": text})
            if answer.status == 404 or "already submitted" in answer.json.get("message", ""):
                return True
            if answer.status < 300:
                assert isinstance(answer.json["reward"], float)
                return True
            self.repeats += 1
        return False


async def test_kobold_bridge_pops_generates_and_submits(here: PoolSite) -> None:
    bridge = KoboldBridge(here.keyed(BOB))
    assert await bridge.pop() is None
    request = await requested(here, params={"max_length": 60, "max_context_length": 1024, "temperature": 0.8})
    job = await bridge.pop()
    assert job is not None
    assert job[1] == {
        "prompt": "Once upon a time",
        "n": 1,
        "max_length": 60,
        "max_context_length": 1024,
        "temperature": 0.8,
    }
    assert await bridge.submit(job[0], "x" * 100)
    assert bridge.repeats == 0
    found = await status(here, request)
    assert found["done"]
    assert [each["text"] for each in found["generations"]] == ["x" * 100]
    assert await here.balances() == (-25, 25, 0)


async def test_kobold_bridge_is_never_left_repeating_a_submit(here: PoolSite) -> None:
    """Twice, too late, for a cancelled job, for none at all: it goes on at the first answer."""
    bridge = KoboldBridge(here.keyed(BOB))
    await requested(here)
    twice = await bridge.pop()
    assert twice is not None
    assert await bridge.submit(twice[0], "text")
    assert await bridge.submit(twice[0], "text")
    await requested(here)
    late = await bridge.pop()
    assert late is not None
    here.clock.advance(210)
    await here.sweep()
    assert await bridge.submit(late[0], "text")
    again = await bridge.pop()
    assert again is not None
    assert again[0] != late[0]
    assert await bridge.submit(again[0], "text")
    assert await bridge.submit(late[0], "text")
    cancelled = await requested(here)
    job = await bridge.pop()
    assert job is not None
    await here.http.ask("DELETE", f"{TEXT}/status/{cancelled}")
    assert await bridge.submit(job[0], "text")
    assert await bridge.submit(job[0], "text")
    assert await bridge.submit(UNKNOWN, "text")
    assert await bridge.submit(None, "faulted")  # its own fault, after a backend that failed three times
    assert bridge.repeats == 0


async def test_scribe_says_who_it_is_pops_and_submits(here: PoolSite) -> None:
    """AI-Horde-Worker's scribe: `threads` in the pop, a seed with the reply, `message` read in every error."""
    http = here.keyed(BOB)
    user = await http.get("/api/v2/find_user")
    assert user.json == {"username": "bob", "kudos": 0}
    pop = {
        "name": "An Awesome Scribe",
        "models": [MODEL],
        "max_length": 80,
        "max_context_length": 1024,
        "softprompts": [],
        "bridge_agent": "AI Horde Worker~aphrodite~oai:24:https://github.com/TeaSitta/AI-Horde-Worker",
        "threads": 1,
    }
    empty = await http.post(f"{TEXT}/pop", pop)
    assert empty.status == 200
    assert not empty.json.get("id")
    request = await requested(here, params={"max_length": 80, "max_context_length": 1024})
    job = (await http.post(f"{TEXT}/pop", pop)).json
    assert job["payload"].get("softprompt") is None
    assert not {"width", "length", "steps"} & job["payload"].keys()
    told = f"{job['payload']['max_length']}:{job['payload']['max_context_length']} {len(job['payload']['prompt'])}"
    assert told == "80:1024 16"
    done = await http.post(f"{TEXT}/submit", {"id": job["id"], "generation": "A tale.", "seed": 0})
    assert (done.status, done.json) == (200, {"reward": 20.0})
    assert (await status(here, request))["generations"][0]["seed"] == 0
    for body in ({"id": job["id"], "generation": "A tale.", "seed": 0}, {"id": UNKNOWN, "generation": "", "seed": 0}):
        answer = await http.post(f"{TEXT}/submit", body)
        assert answer.status in (400, 404)  # it abandons the job at once
        assert answer.json["message"]
    assert (await http.post(f"{TEXT}/pop", pop | {"max_length": "x"})).json["errors"].keys() == {"max_length"}


async def test_scribe_hands_a_job_back_that_its_backend_could_not_do(here: PoolSite) -> None:
    http = here.keyed(BOB)
    request = await requested(here)
    scribe = here.hand("scribe")
    for attempt in range(3):
        job = await scribe.pop(chat_jobs=False, threads=1)
        body = {"id": job.id, "generation": "faulted", "seed": -1, "state": "faulted"}
        answer = await http.post(f"{TEXT}/submit", body)
        assert (answer.status, answer.json) == (200, {"reward": 0.0})
        found = await status(here, request)
        assert found["restarted"] == attempt + 1
        assert found["done"] is found["faulted"] is (attempt == 2)
    assert found["generations"] == []
    assert await scribe.look() is None
    assert await here.balances() == (0, 0, 0)


async def test_koboldcpp_works_as_it_is(here: PoolSite) -> None:
    """Its header has another case, its submit comes from a thread of its own while it may pop already."""
    headers = [
        ("Apikey", BOB),
        ("User-Agent", "KoboldCppEmbeddedWorkerV2"),
        ("Client-Agent", "KoboldCppEmbedWorker:2"),
        ("Content-Type", "application/json"),
    ]
    pop = {
        "name": "kcpp",
        "models": [f"koboldcpp/{MODEL}"],
        "max_length": 400,
        "max_context_length": 4096,
        "priority_usernames": [],
        "softprompts": [],
        "bridge_agent": "KoboldCppEmbedWorker:2:https://github.com/LostRuins/koboldcpp",
    }

    async def post(route: str, body: Any) -> dict[str, Any]:
        answer = await here.http.ask("POST", f"{TEXT}/{route}", headers, data=json.dumps(body).encode())
        assert answer.status == 200
        return answer.json

    await requested(here, models=[])
    await requested(here, models=[f"koboldcpp/{MODEL}", "another"])
    first = await post("pop", pop)
    second, reward = await asyncio.gather(
        post("pop", pop), post("submit", {"id": first["id"], "generation": "y" * 400, "state": "ok"})
    )
    assert reward == {"reward": 100.0}
    assert first["model"] == second["model"] == f"koboldcpp/{MODEL}"
    assert await post("submit", {"id": second["id"], "generation": "z", "state": "ok"}) == {"reward": 20.0}
    assert (await post("pop", pop))["id"] is None


async def test_a_pop_that_finds_nothing_has_every_key_that_workers_read(here: PoolSite) -> None:
    answer = await here.hand().ask()
    assert answer.status == 200
    told = answer.json
    assert told["id"] is told["model"] is told["softprompt"] is None
    assert told["ids"] == told["messages"] == []
    assert told["skipped"] == {}
    assert told["payload"] == {"prompt": "", "n": 1, "max_length": 80, "max_context_length": 2048}


async def test_a_pop_says_why_jobs_were_passed_over(here: PoolSite) -> None:
    await requested(here, params={"max_length": 500, "max_context_length": 4096})
    await requested(here, models=["other"])
    skipped = (await here.hand().ask(max_length=499)).json["skipped"]
    assert skipped == {"max_length": 1, "models": 1}


async def test_generations_of_one_request_can_be_popped_together(here: PoolSite) -> None:
    request = await requested(here, params={"n": 3, "max_length": 100})
    job = await here.hand().pop(amount=2)
    assert job.body["id"] == job.body["ids"][0]
    assert len(set(job.body["ids"])) == 2
    assert job.body["ttl"] == 150
    assert job.payload["n"] == 1
    found = await status(here, request)
    assert (found["waiting"], found["processing"], found["finished"]) == (1, 2, 0)


# --- a requester -----------------------------------------------------------------------------------------------------


async def test_a_requester_polls_until_his_text_is_there(here: PoolSite) -> None:
    """As existing clients do: the id from the first answer, then the status without a key, until `done`."""
    http = here.ada.sending(Client_Agent="tests:1:x")
    answer = await http.post(f"{TEXT}/async", asked(params={"n": 2, "max_length": 100}))
    assert answer.status == 202
    assert answer.json["kudos"] == 200
    assert "expire in 20 minutes" in answer.json["message"]
    request = answer.json["id"]
    found = await status(here, request)
    assert found == {
        "finished": 0,
        "processing": 0,
        "restarted": 0,
        "waiting": 2,
        "done": False,
        "faulted": False,
        "wait_time": 0,
        "queue_position": 0,
        "kudos": 0,
        "is_possible": False,
        "generations": [],
    }
    hand = here.hand()
    job = await hand.pop()
    found = await status(here, request)
    assert (found["waiting"], found["processing"], found["is_possible"]) == (1, 1, True)
    assert (await job.submit("a" * 100, seed=7, gen_metadata=[{"type": "note", "value": "x"}])).status == 200
    found = await status(here, request)
    assert (found["finished"], found["done"]) == (1, False)
    job = await hand.pop()
    assert (await job.submit("b" * 10, state="censored")).status == 200
    found = await status(here, request)
    assert (found["done"], found["finished"], found["kudos"], found["queue_position"]) == (True, 2, 45, 0)
    worker = {"worker_id": found["generations"][0]["worker_id"], "worker_name": "worker", "model": MODEL}
    assert str(UUID(worker["worker_id"])) == worker["worker_id"]
    assert found["generations"] == [
        {"text": "a" * 100, "seed": 7, "state": "ok", "gen_metadata": [{"type": "note", "value": "x"}], **worker},
        {"text": "b" * 10, "seed": 0, "state": "censored", "gen_metadata": [], **worker},
    ]
    assert await here.balances() == (-45, 45, 0)
    answer = await http.post(f"{TEXT}/async", asked())
    assert "message" not in answer.json


async def test_nothing_partial_is_ever_seen(here: PoolSite) -> None:
    """A lost attempt is counted, and shows neither text nor an end."""
    request = await requested(here)
    hand = here.hand()
    for _ in range(2):
        await (await hand.pop()).fault()
    await hand.pop()
    found = await status(here, request)
    assert (found["restarted"], found["processing"], found["done"], found["faulted"]) == (2, 1, False, False)
    assert found["generations"] == []


async def test_a_dry_run_says_what_it_would_cost_at_most(here: PoolSite) -> None:
    answer = await here.ada.post(f"{TEXT}/async", asked(dry_run=True, params={"n": 3, "max_length": 50}))
    assert (answer.status, answer.json) == (200, {"kudos": 150})
    assert await here.hand().look() is None


async def test_who_waits_for_too_many_generations_is_told_in_the_words_that_clients_know(tmp_path: Path) -> None:
    """Until one of them has come; what asks for nothing yet is answered all the same."""
    async with pool_site(tmp_path, max_jobs_per_owner=2) as here:
        request = await requested(here, params={"n": 2, "max_length": 50})
        answer = await here.ada.post(f"{TEXT}/async", asked())
        assert refusal(answer) == (429, "TooManyPrompts")
        assert answer.json["limit"] == 2
        assert answer.headers["retry-after"] == "5"
        assert (await here.ada.post(f"{TEXT}/async", asked(dry_run=True))).status == 200
        assert (await here.keyed(BOB).post(f"{TEXT}/async", asked())).status == 202
        assert (await here.http.ask("DELETE", f"{TEXT}/status/{request}")).status == 200
        await requested(here)


async def test_a_cancelled_request_is_popped_no_more(here: PoolSite) -> None:
    request = await requested(here)
    for _ in range(2):
        answer = await here.http.ask("DELETE", f"{TEXT}/status/{request}")
        assert answer.status == 200
        assert (answer.json["waiting"], answer.json["done"], answer.json["faulted"]) == (0, True, False)
    assert await here.hand().look() is None
    assert await here.balances() == (0, 0, 0)


async def test_a_worker_that_could_not_hear_the_cancel_is_paid_and_its_text_discarded(here: PoolSite) -> None:
    request = await requested(here)
    job = await here.hand().pop()
    assert "stream_progress" not in job.payload
    answer = await here.http.ask("DELETE", f"{TEXT}/status/{request}")
    assert (answer.json["processing"], answer.json["kudos"]) == (1, 0)
    answer = await job.submit("a" * 200)
    assert (answer.status, answer.json) == (200, {"reward": 50.0})
    found = await status(here, request)
    assert (found["processing"], found["generations"], found["kudos"]) == (0, [], 50)
    assert refusal(await job.submit("a" * 200)) == (400, "DuplicateGen")
    assert await here.balances() == (-50, 50, 0)


async def test_a_request_that_nobody_takes_fails_when_it_expires(here: PoolSite) -> None:
    request = await requested(here)
    here.clock.advance(1201)
    await here.sweep()
    found = await status(here, request)
    assert (found["done"], found["faulted"]) == (True, True)
    assert await here.hand().look() is None


@pytest.mark.parametrize("request_id", [UNKNOWN, "x", "%00", "%ff%fe", "..%2f..", UNKNOWN.replace("-", ""), "5" * 3000])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_an_unknown_request_is_not_found(here: PoolSite, request_id: str, method: str) -> None:
    answer = await here.http.ask(method, f"{TEXT}/status/{request_id}")
    if "%2f" in request_id:
        assert refusal(answer) == (404, "NotFound")
    else:
        assert refusal(answer) == (404, "RequestNotFound")


# --- keys ------------------------------------------------------------------------------------------------------------


ROUTES = [("POST", "async"), ("POST", "pop"), ("POST", "submit"), ("GET", "find_user")]


async def called(http: Http, method: str, route: str) -> Answer:
    """A call that would be good with a good key."""
    bodies = {
        "async": asked(),
        "pop": {"name": "w", "models": [MODEL]},
        "submit": {"id": UNKNOWN, "generation": "a"},
    }
    if route == "find_user":
        return await http.get("/api/v2/find_user")
    return await http.post(f"{TEXT}/{route}", bodies[route])


@pytest.mark.parametrize(("method", "route"), ROUTES)
async def test_a_missing_key_is_a_missing_field(here: PoolSite, method: str, route: str) -> None:
    """What existing clients and workers know: 400 with `errors`, not 401."""
    answer = await called(here.http, method, route)
    assert answer.status == 400
    assert answer.json == {
        "message": "Input payload validation failed",
        "errors": {"apikey": "Missing required parameter in the HTTP headers"},
    }


@pytest.mark.parametrize(("method", "route"), ROUTES)
async def test_an_unknown_key_is_refused(here: PoolSite, method: str, route: str) -> None:
    for key in ("0000000000", "", ADA + "x"):
        assert refusal(await called(here.keyed(key), method, route)) == (401, "InvalidAPIKey")
    twice = here.keyed(BOB).sending(Authorization=f"Bearer {ADA}")
    assert refusal(await called(twice, method, route)) == (401, "InvalidAPIKey")


async def test_both_ways_to_send_a_key_are_read(here: PoolSite) -> None:
    bearer = here.http.sending(Authorization=f"Bearer {ADA}")
    assert (await bearer.get("/api/v2/find_user")).json["username"] == "ada"
    assert (await here.http.sending(APIKEY=ADA).get("/api/v2/find_user")).json["username"] == "ada"


async def test_an_open_gateway_asks_for_no_key_and_ignores_any(tmp_path: Path) -> None:
    """The key of a pop is not the one of a post, nor of the submit: nobody minds."""
    async with pool_site(tmp_path, keys=None) as here:
        hand = here.hand(key="0000000000")
        assert await hand.look() is None
        request = (await here.http.post(f"{TEXT}/async", asked())).json["id"]
        reading = await here.read(here.http)
        whole = await hand.pop()
        job = await hand.pop()
        assert (await job.send("a", http=here.http)).status == 200
        assert (await job.send("b", seq=2, http=here.keyed("another"))).status == 200
        assert (await job.submit("ab", http=here.keyed("a-third"))).status == 200
        assert (await reading.end())[0] == "done"
        assert reading.text == "ab"
        assert (await whole.submit("text", http=here.http)).status == 200
        assert (await status(here, request))["done"]
        assert (await here.http.get("/api/v2/find_user")).json == {"username": "open", "kudos": 0}


async def test_an_open_gateway_lets_no_web_page_use_its_pool(tmp_path: Path) -> None:
    async with pool_site(tmp_path, keys=None) as here:
        for method, path in (("POST", f"{TEXT}/progress"), ("GET", "/api/v2/find_user")):
            answer = await here.http.ask(method, path, {"Host": "evil.example"}, json={})
            assert refusal(answer) == (421, "WrongHost")
            answer = await here.http.ask(method, path, {"Origin": "https://evil.example"}, json={})
            assert refusal(answer) == (403, "ForbiddenOrigin")


async def test_a_requester_in_a_page_of_a_configured_origin_is_let_in(tmp_path: Path) -> None:
    """With the headers that existing ones send; what is refused can be read there too."""
    page = {"Origin": "https://lite.example"}
    async with pool_site(tmp_path, cors_origin=("https://lite.example",)) as here:
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "apikey,client-agent"}
        answer = await here.http.ask("OPTIONS", f"{TEXT}/async", page | asks)
        allowed = {name.strip().lower() for name in answer.headers["access-control-allow-headers"].split(",")}
        assert (answer.status, allowed >= {"apikey", "client-agent", "content-type"}) == (204, True)
        accepted = await here.ada.ask("POST", f"{TEXT}/async", page | {"Client-Agent": "Lite:1:x"}, json=dict(asked()))
        gone = await here.http.ask("DELETE", f"{TEXT}/status/{UNKNOWN}", page)
        assert (accepted.status, gone.status) == (202, 404)
        for told in (accepted, gone):
            assert told.headers["access-control-allow-origin"] == "https://lite.example"


async def test_a_workers_name_belongs_to_its_owner(here: PoolSite) -> None:
    assert await here.hand("mine", key=BOB).look() is None
    assert refusal(await here.hand("mine", key=CAT).ask()) == (403, "WrongCredentials")
    assert await here.hand("mine", key=BOB).look() is None


# --- refusals --------------------------------------------------------------------------------------------------------


async def test_submits_of_what_is_not_yours_to_submit(here: PoolSite) -> None:
    """Unknown, another's, and yours at last; twice.  Nobody else's attempt changes anything."""
    request = await requested(here)
    job = await here.hand().pop()
    for state in ("ok", "faulted"):
        assert refusal(await job.submit("b", state=state, http=here.keyed(CAT))) == (403, "WrongCredentials")
        assert refusal(await job.submit("b", state=state, http=here.http.sending(apikey="x"))) == (401, "InvalidAPIKey")
    assert (await status(here, request))["processing"] == 1
    assert (await job.submit("mine")).status == 200
    for state in ("ok", "faulted"):
        answer = await job.submit("again", state=state)
        assert refusal(answer) == (400, "DuplicateGen")
        assert "already submitted" in answer.json["message"]
    found = await status(here, request)
    assert [each["text"] for each in found["generations"]] == ["mine"]
    assert await here.balances() == (-20, 20, 0)


async def test_only_one_of_many_submits_at_once_is_taken(here: PoolSite) -> None:
    request = await requested(here)
    job = await here.hand().pop()
    answers = await asyncio.gather(*(job.submit(f"text {at}") for at in range(8)))
    assert sorted(answer.status for answer in answers) == [200] + [400] * 7
    assert len((await status(here, request))["generations"]) == 1
    assert await here.balances() == (-20, 20, 0)


async def test_text_is_stored_as_it_was_sent_but_for_what_no_store_takes(here: PoolSite) -> None:
    """CR, LF, emoji and NUL, which is replaced in a reply; half a surrogate pair becomes a replacement character."""
    for sent, kept in [
        ("a\r\nb\rc\n", "a\r\nb\rc\n"),
        ("x\U0001f600", "x\U0001f600"),
        ("a\0b", "a\ufffdb"),
        ("a\ud83db\ude00", "a\ufffdb\ufffd"),
        ("\ud83d\ude00", "\U0001f600"),
    ]:
        request = await requested(here)
        job = await here.hand().pop()
        raw = json.dumps({"id": job.id, "generation": sent}).encode()
        headers = {"Content-Type": "application/json"}
        answer = await here.keyed(BOB).ask("POST", f"{TEXT}/submit", headers, data=raw)
        assert answer.status == 200
        assert (await status(here, request))["generations"][0]["text"] == kept


@pytest.mark.parametrize("route", ["async", "pop", "submit", "progress"])
async def test_bodies_that_are_none(here: PoolSite, route: str) -> None:
    """No JSON: a message alone.  Not said to be JSON: 415.  Too large: 413, whether it says so or not."""
    http = here.keyed(BOB)
    kind = {"Content-Type": "application/json"}
    for raw in (b"", b"{", b"[]", b"\xff", b'{"a":NaN}', b'{"a":' * 5000):
        answer = await http.ask("POST", f"{TEXT}/{route}", kind, data=raw)
        assert answer.status == 400
        assert answer.json.keys() == {"message"}
    answer = await http.ask("POST", f"{TEXT}/{route}", {"Content-Type": "text/plain"}, data=b"{}")
    assert refusal(answer) == (415, "UnsupportedMediaType")


async def test_huge_bodies_are_refused_without_being_read(tmp_path: Path) -> None:
    async with pool_site(tmp_path, max_body=10_000) as here:
        for route in ("async", "pop", "submit", "progress"):
            answer = await here.keyed(BOB).post(f"{TEXT}/{route}", {"prompt": "x" * 20_000})
            assert refusal(answer) == (413, "TooLarge")
            async with wire(here.site.gateway) as raw:
                head = ["Content-Type: application/json", f"apikey: {BOB}", "Content-Length: 99999999999"]
                raw.request("POST", f"{TEXT}/{route}", *head)
                assert (await raw.head())[0] == 413


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_length", 10**30),
        ("max_length", -1),
        ("max_context_length", 1e300),
        ("max_context_length", 2**31),
        ("amount", 2**63),
        ("threads", -(2**63)),
    ],
)
async def test_absurd_numbers_in_a_pop_are_named(here: PoolSite, field: str, value: Any) -> None:
    await requested(here)
    answer = await here.hand().ask(**{field: value})
    assert answer.status == 400
    assert answer.json["message"] == "Input payload validation failed"
    assert answer.json["errors"].keys() == {field}
    await here.hand().pop()


async def test_the_largest_numbers_of_a_pop_are_taken(here: PoolSite) -> None:
    await requested(here)
    await here.hand().pop(max_length=2**31 - 1, max_context_length=2**31 - 1, amount=20, threads=50)


async def test_what_does_not_exist_is_told_in_the_same_shape(here: PoolSite) -> None:
    """With or without a key: workers read `message`."""
    for http in (here.http, here.ada):
        assert refusal(await http.get("/api/v2/generate/image/async")) == (404, "NotFound")
        assert refusal(await http.post("/v2/generate/text/pop", {})) == (404, "NotFound")
        answer = await http.get(f"{TEXT}/pop")
        assert refusal(answer) == (405, "MethodNotAllowed")
        assert answer.headers["allow"] == "POST"


async def test_a_gateway_without_a_pool_has_none_of_these_routes(tmp_path: Path) -> None:
    async with site() as running:
        async with wire(running.gateway) as raw:
            raw.request("POST", f"{TEXT}/pop", "Content-Type: application/json", "Content-Length: 2", body=b"{}")
            assert (await raw.head())[0] == 404
        paths = (await running.http.get("/openapi.json")).json["paths"]
        assert not any(path.startswith("/api/") for path in paths)


# --- cost ------------------------------------------------------------------------------------------------------------


class Statements:
    """Counts what is said to databases."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def note(self, connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        self.seen.append(statement)

    def __enter__(self) -> Statements:
        event.listen(Engine, "before_cursor_execute", self.note)
        return self

    def __exit__(self, *_: object) -> None:
        event.remove(Engine, "before_cursor_execute", self.note)


async def test_a_pop_takes_the_same_few_statements_however_long_the_queue_is(here: PoolSite) -> None:
    hand = here.hand()
    await hand.look()
    costs = []
    for more in (5, 60):
        for _ in range(more):
            await requested(here)
        with Statements() as statements:
            await hand.pop()
        costs.append(len(statements.seen))
        with Statements() as statements:
            assert await hand.look(models=["other"]) is None
        costs.append(len(statements.seen))
    assert costs[:2] == costs[2:]
    assert max(costs) <= 8


def updates(statements: Statements) -> list[str]:
    return [statement for statement in statements.seen if statement.lstrip().upper().startswith("UPDATE")]


async def test_posts_say_nothing_to_the_database(here: PoolSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in a third of a term the lease is renewed there; else a post reads and writes none of it."""

    async def no_look() -> None:
        """The pool's own look, every few seconds, is no post's."""

    monkeypatch.setattr(here.pool, "poll", no_look)
    reading, job = await here.begun()
    await job.post("a")
    await reading.read(1)
    with Statements() as statements:
        for _ in range(20):
            await job.post("b")
        for http, body in [
            (here.http, {"id": job.id, "seq": 1, "content": "x"}),
            (here.keyed(BOB), {"id": str(uuid4()), "seq": 1, "content": "x"}),
            (here.keyed(BOB), {"id": job.id, "seq": 50, "content": "x"}),
        ]:
            assert (await http.post(f"{TEXT}/progress", body)).status >= 400
        await reading.read(20)
        assert statements.seen == []
    here.clock.advance(51)
    with Statements() as statements:
        await job.post("c")
        await until(lambda: updates(statements), "the renewal")
        await job.post("d", "e")
    assert len(updates(statements)) == 1


async def test_what_is_answered_fits_its_description(here: PoolSite) -> None:
    """No field is missing, none is unheard of."""
    schemas = (await here.http.get("/openapi.json")).json["components"]["schemas"]
    answer = await here.ada.post(f"{TEXT}/async", asked())
    told = [("PoolAccepted", answer.json), ("PoolStatus", await status(here, answer.json["id"]))]
    hand = here.hand()
    told += [("PoolJob", (await hand.ask()).json), ("PoolJob", (await hand.ask()).json)]
    await here.read()
    job = await hand.pop()
    told += [
        ("PoolJob", job.body),
        ("PoolError", (await job.send("x", 5)).json),
        ("PoolError", (await job.send(5)).json),
    ]
    told += [("PoolError", (await here.http.get(f"{TEXT}/status/{UNKNOWN}")).json)]
    for name, body in told:
        assert set(schemas[name]["required"]) <= body.keys() <= schemas[name]["properties"].keys(), (name, body)
    assert hand.declared().keys() <= schemas["PoolPop"]["properties"].keys()


async def test_the_description_knows_every_route_of_the_pool_and_no_other(here: PoolSite) -> None:
    document = (await here.http.get("/openapi.json")).json
    described = {
        (path, method)
        for path, item in document["paths"].items()
        if path.startswith(PREFIXES)
        for method in item
        if method != "parameters"
    }
    routes = {
        (route.path, method.lower())
        for route in router_of(here.site.gateway.gateway).routes
        if isinstance(route, Route) and route.path.startswith(PREFIXES)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert described == routes
    assert len(routes) == 8
    told = json.dumps(document)
    for name in SCHEMAS:
        assert f"#/components/schemas/{name}" in told
        assert name in document["components"]["schemas"]
