"""Workers that post their tokens, readers who see them: leases, order, ends, cancel, settlement, reconciliation."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio

from midstream.pool.shapes import RequestView
from midstream.testing.patience import eventually, until
from midstream.wire import TERMINAL
from tests import postgres, valkeys
from tests.gateways import Answer
from tests.pools import ADA, BOB, CAT, MODEL, TEXT, Job, PoolSite, Reading, asked, pool_site

UNKNOWN = str(uuid4())
TERM = 150


@pytest_asyncio.fixture
async def here(tmp_path: Path) -> AsyncIterator[PoolSite]:
    async with pool_site(tmp_path) as running:
        yield running


@pytest_asyncio.fixture(params=["embedded", "shared"])
async def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[PoolSite]:
    """A gateway of its own on SQLite and memory; one of many, on PostgreSQL and Valkey."""
    stores = {}
    if request.param == "shared":
        stores = {"pool": postgres.shared().url(), "journal": valkeys.shared().url(f"t{uuid4().hex}")}
    async with pool_site(tmp_path, **stores) as running:
        yield running


def refusal(answer: Answer) -> tuple[int, str]:
    assert isinstance(answer.json["message"], str)
    return answer.status, answer.json["rc"]


def diverged(end: tuple[str, dict[str, Any]]) -> bool:
    event, fields = end
    return event == "failed" and fields["error"]["code"] == "ChatStreamDiverged"


async def cancel(here: PoolSite, reading: Reading) -> None:
    answer = await here.ada.post(f"/v1/stream/{reading.stream_id}/cancel")
    assert (answer.status, answer.json["status"]) == (200, "cancelled")


async def stopped(job: Job) -> None:
    """Wait until the worker's next sign of life is answered with `cancelled`."""

    async def heard() -> bool:
        answer = await job.send(seq=0)
        assert answer.status == 200
        return bool(answer.json["cancelled"])

    await eventually(heard, "the worker to hear of the cancel")


async def until_settled(here: PoolSite, units: int) -> None:
    async def settled() -> bool:
        return await here.balance(ADA) == units

    await eventually(settled, f"{units} units to be paid")


async def until_queue_is_empty(here: PoolSite) -> None:
    async def empty() -> bool:
        return await here.pool.jobs.totals() == (0, 0)

    await eventually(empty, "the queue to be empty")


# --- pop and lease ---------------------------------------------------------------------------------------------------


async def test_a_streamed_job_says_so_and_holds_a_lease(here: PoolSite) -> None:
    _, job = await here.begun(max_tokens=64, temperature=0.5)
    assert job.body["chat"] is True
    assert job.body["ttl"] == TERM
    assert job.payload["stream_progress"] is True
    assert job.payload["messages"] == [{"role": "user", "content": "Hello"}]
    assert (job.payload["max_length"], job.payload["temperature"], job.payload["top_p"]) == (64, 0.5, 1)
    lease = (await here.held())[job.id]
    assert (lease.worker, lease.model, lease.owner) == ("worker", MODEL, "bob")
    assert (lease.seq, lease.bytes, lease.cancelled) == (0, 0, False)
    assert lease.expires_at == here.clock() + TERM


async def test_what_nobody_reads_along_is_not_streamed(here: PoolSite) -> None:
    """A request that is polled for, and one with tools, whose reply comes whole."""
    hand = await here.serving(chat_features=["tools"])
    assert (await here.ada.post(f"{TEXT}/async", asked())).status == 202
    assert "stream_progress" not in (await hand.pop()).payload
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    reading = await here.read(tools=[tool])
    job = await hand.pop()
    assert "stream_progress" not in job.payload
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert (await job.submit(message=message, finish_reason="tool_calls")).status == 200
    event, fields = await reading.end()
    assert (event, fields["finish_reason"]) == ("done", "tool_calls")
    assert reading.tokens[0]["tool_calls"][0]["function"] == call["function"]


async def test_tokens_reach_the_reader_in_order_with_whence_they_came(anywhere: PoolSite) -> None:
    reading, job = await anywhere.begun()
    await job.post("The ", "cat ", "sat.")
    assert await reading.read(3) == "The cat sat."
    assert reading.sources == [[job.id, 1], [job.id, 2], [job.id, 3]]
    assert await job.finish("The cat sat.") == 20
    event, fields = await reading.end()
    assert (event, fields["finish_reason"]) == ("done", "stop")
    again = await anywhere.again(reading.stream_id)
    await again.end()
    assert again.heard == reading.heard
    assert await anywhere.balances() == (-20, 20, 0)


async def test_reasoning_is_relayed_beside_the_text(anywhere: PoolSite) -> None:
    reading, job = await anywhere.begun()
    await job.post("", reasoning_content="hm")
    await job.post("Yes.")
    message = {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}
    assert (await job.submit(message=message)).status == 200
    assert (await reading.end())[0] == "done"
    assert reading.tokens[0]["reasoning"] == "hm"
    assert reading.text == "Yes."


async def test_two_workers_posts_do_not_meet(here: PoolSite) -> None:
    hand = await here.serving()
    one, two = await here.read(prompt="one"), await here.read(prompt="two")
    first, second = await hand.pop(), await here.hand("second", CAT).pop()
    for at in range(5):
        await first.post(f"a{at}")
        await second.post(f"b{at}")
    assert await one.read(5) == "a0a1a2a3a4"
    assert await two.read(5) == "b0b1b2b3b4"
    assert await second.finish("b0b1b2b3b4") == await first.finish("a0a1a2a3a4") == 20
    assert (await one.end())[0] == (await two.end())[0] == "done"


# --- refusals: each changes nothing ----------------------------------------------------------------------------------


async def finishes(here: PoolSite, reading: Reading, job: Job, text: str) -> None:
    """After all that was refused the answer is what the worker posted, once, and paid once."""
    await job.finish(text)
    assert (await reading.end())[0] == "done"
    assert reading.text == text
    assert await here.balances() == (-20, 20, 0)


async def test_a_post_without_a_lease_is_refused(anywhere: PoolSite) -> None:
    reading, job = await anywhere.begun()
    for path in (f"{TEXT}/progress", "/v2/generate/text/progress"):
        for generation in (UNKNOWN, "x", ""):
            body = {"id": generation, "seq": 1, "content": "intruder"}
            assert refusal(await anywhere.keyed(BOB).post(path, body)) == (404, "InvalidJobID")
    await finishes(anywhere, reading, job, "mine")


async def test_a_post_with_anothers_key_is_refused_whatever_it_says(anywhere: PoolSite) -> None:
    """Before anything else is looked at: who has no right to a job learns nothing of it."""
    reading, job = await anywhere.begun()
    await job.post("a")
    for http in (
        anywhere.keyed(CAT),
        anywhere.http,
        anywhere.keyed(""),
        anywhere.keyed(BOB).sending(Authorization=f"Bearer {CAT}"),
    ):
        for seq in (0, 1, 2, 9):
            assert refusal(await job.send("b", seq, http)) == (403, "WrongCredentials")
    await job.post("c", http=anywhere.http.sending(Authorization=f"Bearer {BOB}"))
    await finishes(anywhere, reading, job, "ac")


async def test_a_post_is_repeated_skipped_and_changed(anywhere: PoolSite) -> None:
    """Once more the same is no second entry; with other content, older or newer than due it is refused by number."""
    reading, job = await anywhere.begun()
    await job.post("1", "2", "3", "4", "5")
    answer = await job.send("5", seq=5)
    assert (answer.status, answer.json) == (200, {"cancelled": False})
    for seq, content in [(5, "other"), (3, "3"), (7, "7"), (0, "0"), (2**53 - 1, "x")]:
        answer = await job.send(content, seq)
        assert refusal(answer) == (409, "ChatProgressOutOfSequence")
        assert answer.json["expected"] == 6
    assert refusal(await job.send("5", seq=5, reasoning_content="5")) == (409, "ChatProgressOutOfSequence")
    await job.post("6")
    await finishes(anywhere, reading, job, "123456")
    for _ in range(2):
        answer = await job.submit(message={"role": "assistant", "content": "123456"})
        assert refusal(answer) == (400, "DuplicateGen")
        assert "already submitted" in answer.json["message"]
    assert [event for event, _ in reading.heard].count("done") == 1


async def test_posts_of_the_wrong_shape_are_refused(here: PoolSite) -> None:
    reading, job = await here.begun()
    for field, value in [("seq", "1"), ("seq", 1.5), ("seq", -1), ("seq", True), ("content", 5), ("content", ["a"])]:
        fields: dict[str, Any] = {"content": "a", "seq": 1}
        answer = await job.send(**fields | {field: value})
        assert answer.status == 400
        assert answer.json["errors"].keys() == {field}
    assert (await job.send("a", seq=1, reasoning_content={})).json["errors"].keys() == {"reasoning_content"}
    assert (await here.keyed(BOB).post(f"{TEXT}/progress", {})).json["errors"].keys() == {"id", "seq"}
    await finishes(here, reading, job, "mine")


async def test_more_than_a_job_may_say_is_refused_but_its_reply_still_counts(here: PoolSite) -> None:
    """16 bytes a token, in UTF-8; what is refused renews the lease all the same."""
    reading, job = await here.begun(max_tokens=16)
    await job.post("é" * 100)
    here.clock.advance(100)
    assert refusal(await job.send("x" * 57)) == (413, "ChatProgressTooLarge")
    assert refusal(await job.send("x" * 28, reasoning_content="y" * 29)) == (413, "ChatProgressTooLarge")
    assert (await here.held())[job.id].expires_at == here.clock() + TERM
    await job.post("x" * 56)
    assert refusal(await job.send("x")) == (413, "ChatProgressTooLarge")
    reward = await job.finish("é" * 100 + "x" * 56 + "and the rest")
    assert reward == 16
    assert (await reading.end())[0] == "done"
    assert reading.text == "é" * 100 + "x" * 56 + "and the rest"


async def test_more_batches_than_a_job_may_post_are_refused(here: PoolSite) -> None:
    reading, job = await here.begun(max_tokens=1024)
    for _ in range(1000):
        await job.post("ab")
    assert refusal(await job.send("ab")) == (413, "ChatProgressTooLarge")
    await job.finish("ab" * 1000 + "!")
    assert (await reading.end())[0] == "done"
    assert reading.text == "ab" * 1000 + "!"


async def test_odd_characters_come_through_whole(anywhere: PoolSite) -> None:
    """NUL is replaced, CR and LF stay, half a surrogate pair waits for its other half, and a lone one is replaced."""
    reading, job = await anywhere.begun()
    await job.post("a\r\nb\rc\n\n", "x\0y", "\ud83d", "\ude00", "z\ud83d", "!")
    final = "a\r\nb\rc\n\nx\0y\U0001f600z\ud83d!"
    raw = json.dumps({"id": job.id, "message": {"role": "assistant", "content": final}}).encode()
    answer = await anywhere.keyed(BOB).ask("POST", f"{TEXT}/submit", {"Content-Type": "application/json"}, data=raw)
    assert answer.status == 200
    assert (await reading.end())[0] == "done"
    assert reading.text == "a\r\nb\rc\n\nx\ufffdy\U0001f600z\ufffd!"


# --- the end ---------------------------------------------------------------------------------------------------------


async def test_nothing_follows_the_reply(anywhere: PoolSite) -> None:
    reading, job = await anywhere.begun()
    await job.post("all")
    await job.finish("all")
    assert (await reading.end())[0] == "done"
    for seq in (0, 1, 2):
        assert refusal(await job.send("more" if seq else "", seq)) == (404, "InvalidJobID")
    again = await anywhere.again(reading.stream_id)
    await again.end()
    assert again.text == "all"
    assert await anywhere.held() == {}


async def test_what_is_forgotten_takes_nothing_any_more(here: PoolSite) -> None:
    """After stream, progress and request have expired: as if they had never been."""
    reading, job = await here.begun()
    await job.post("all")
    await job.finish("all")
    await reading.end()
    for _ in range(2):
        here.clock.advance(1201)
        await here.site.gateway.streams.pulse(60.0)
        await here.sweep()
    assert (await here.ada.get(f"/v1/stream/{reading.stream_id}/state")).status == 404
    assert refusal(await job.send("more", 2)) == (404, "InvalidJobID")
    assert refusal(await job.submit(message={"role": "assistant", "content": "all"})) == (404, "InvalidJobID")
    assert await here.balances() == (-20, 20, 0)


async def test_a_fault_after_exposure_ends_the_stream(anywhere: PoolSite) -> None:
    """Loud, and not offered again: text of two generations never meets."""
    reading, job = await anywhere.begun()
    await job.post("The ca")
    await reading.read(1)
    await job.fault()
    assert diverged(await reading.end())
    assert reading.text == "The ca"
    assert await anywhere.hand("second").look() is None
    assert refusal(await job.send("t")) == (404, "InvalidJobID")
    assert (await job.submit(message={"role": "assistant", "content": "The cat"})).status == 404
    assert await anywhere.held() == {}


@pytest.mark.parametrize("text", ["The dog", "The ca", "The cat"])
async def test_a_second_attempt_never_goes_on_with_what_was_shown(
    anywhere: PoolSite, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Popped between the fault and the cancel that follows from it; also where it begins with the same words."""
    reading, job = await anywhere.begun()
    await job.post("The ca")
    await reading.read(1)
    held, cancel_it = asyncio.Event(), anywhere.pool.cancel

    async def later(request: str) -> RequestView:
        await held.wait()
        return await cancel_it(request)

    monkeypatch.setattr(anywhere.pool, "cancel", later)
    await job.fault()
    other = await anywhere.hand("second", CAT).pop()
    await other.post(text, "!")
    held.set()
    assert diverged(await reading.end())
    assert reading.text == "The ca"
    assert reading.sources == [[job.id, 1]]
    await stopped(other)
    assert (await other.submit(message={"role": "assistant", "content": text + "!"})).status == 404
    assert await anywhere.balances() == (-20, 0, 20)
    assert await anywhere.hand("third", CAT).look() is None


async def test_a_fault_before_exposure_leaves_no_trace(anywhere: PoolSite) -> None:
    reading, job = await anywhere.begun()
    await job.send(seq=0)
    await job.fault()
    second = await anywhere.hand("second", CAT).pop()
    assert second.id != job.id
    assert refusal(await job.send("The ca", seq=1)) == (404, "InvalidJobID")
    await second.post("The dog")
    assert await second.finish("The dog") == 20
    assert (await reading.end())[0] == "done"
    assert reading.text == "The dog"
    assert [event for event, _ in reading.heard].count("start") == 1
    assert await anywhere.balances() == (-20, 0, 20)


async def test_three_faults_fail_the_request(here: PoolSite) -> None:
    hand = await here.serving()
    reading = await here.read()
    for _ in range(3):
        await (await hand.pop()).fault()
    event, fields = await reading.end()
    assert event == "failed"
    assert fields["error"]["code"] != "ChatStreamDiverged"
    assert await hand.look() is None
    assert await here.balances() == (0, 0, 0)


async def test_a_dead_worker_is_replaced_within_a_term_and_a_third(here: PoolSite) -> None:
    reading, job = await here.begun()
    here.clock.advance(TERM + TERM / 3 - 1)
    await here.sweep()
    second_hand = here.hand("second", CAT)
    assert await second_hand.look() is None
    here.clock.advance(1.5)
    await here.sweep()
    second = await second_hand.pop()
    assert refusal(await job.send("late")) == (404, "InvalidJobID")
    assert refusal(await job.submit(message={"role": "assistant", "content": "late"})) == (404, "InvalidJobID")
    await second.finish("in time")
    assert (await reading.end())[0] == "done"
    assert reading.text == "in time"


async def test_a_post_after_the_lease_has_run_out_is_refused_before_anybody_has_noticed(here: PoolSite) -> None:
    _, job = await here.begun()
    here.clock.advance(TERM + 1)
    assert refusal(await job.send("late")) == (404, "InvalidJobID")


async def test_a_dead_worker_whose_text_was_shown_ends_the_stream(here: PoolSite) -> None:
    reading, job = await here.begun()
    await job.post("The ca")
    await reading.read(1)
    here.clock.advance(TERM + TERM / 3 + 1)
    await here.sweep()
    assert diverged(await reading.end())
    assert await here.hand("second").look() is None
    assert refusal(await job.send("t")) == (404, "InvalidJobID")


@pytest.mark.parametrize("silent", [False, True])
async def test_a_slow_worker_that_shows_life_keeps_its_job(here: PoolSite, silent: bool) -> None:
    """Three terms of steady batches, or of nothing but signs of life: one run."""
    reading, job = await here.begun()
    told = ""
    for _ in range(12):
        here.clock.advance(TERM / 4)
        if silent:
            assert (await job.send(seq=0)).json == {"cancelled": False}
        else:
            await job.post("a")
            told += "a"
        await here.sweep()
        assert await here.hand("second").look() is None
    await job.finish(told + "b")
    assert (await reading.end())[0] == "done"
    assert reading.text == told + "b"


# --- cancel and settlement -------------------------------------------------------------------------------------------


async def test_a_cancel_reaches_the_worker_with_its_next_post(anywhere: PoolSite) -> None:
    """And is settled at once, on what was posted."""
    reading, job = await anywhere.begun()
    await job.post("x" * 130, "y" * 70)
    await reading.read(2)
    await cancel(anywhere, reading)
    assert (await reading.end())[0] == "cancelled"
    await stopped(job)
    for seq, text in [(3, "more"), (0, ""), (99, "gap"), (2, "y" * 70)]:
        answer = await job.send(text, seq)
        assert (answer.status, answer.json) == (200, {"cancelled": True})
    assert refusal(await job.send("b", 3, anywhere.keyed(CAT))) == (403, "WrongCredentials")
    await until_settled(anywhere, -50)
    assert await anywhere.balances() == (-50, 50, 0)
    assert reading.text == "x" * 130 + "y" * 70


async def test_a_cancelled_job_pays_the_floor_at_least(anywhere: PoolSite) -> None:
    reading, job = await anywhere.begun()
    await cancel(anywhere, reading)
    await stopped(job)
    await until_settled(anywhere, -20)
    assert await anywhere.balances() == (-20, 20, 0)


async def test_no_more_is_paid_than_was_asked_for(here: PoolSite) -> None:
    """Less than the floor, where less was asked for."""
    reading, job = await here.begun(max_tokens=16)
    await job.post("x" * 200)
    await reading.read(1)
    await cancel(here, reading)
    await until_settled(here, -16)
    assert await here.balances() == (-16, 16, 0)


@pytest.mark.parametrize("how", ["submit", "fault"])
async def test_what_comes_after_a_cancel_changes_nothing(anywhere: PoolSite, how: str) -> None:
    reading, job = await anywhere.begun()
    await job.post("x" * 200)
    await reading.read(1)
    await cancel(anywhere, reading)
    await until_settled(anywhere, -50)
    if how == "submit":
        answer = await job.submit(message={"role": "assistant", "content": "x" * 400})
    else:
        answer = await job.submit(state="faulted")
    assert refusal(answer) == (404, "InvalidJobID")
    assert await anywhere.hand("second").look() is None
    assert await anywhere.balances() == (-50, 50, 0)
    assert (await reading.end())[0] == "cancelled"


async def test_a_cancel_after_a_lost_attempt_settles_the_one_that_runs(anywhere: PoolSite) -> None:
    reading, first = await anywhere.begun()
    await first.fault()
    second = await anywhere.hand("second", CAT).pop()
    await second.post("x" * 100)
    await reading.read(1)
    await cancel(anywhere, reading)
    await stopped(second)
    assert refusal(await first.send("x")) == (404, "InvalidJobID")
    await until_settled(anywhere, -25)
    assert await anywhere.balances() == (-25, 0, 25)


async def test_a_cancel_before_any_worker_costs_nothing(here: PoolSite) -> None:
    hand = await here.serving()
    reading = await here.read()
    await cancel(here, reading)
    assert (await reading.end())[0] == "cancelled"
    await until_queue_is_empty(here)
    assert await hand.look() is None
    assert await here.balances() == (0, 0, 0)


async def lived(here: PoolSite, seconds: float) -> None:
    here.clock.advance(seconds)
    await here.site.gateway.streams.pulse(0.0)


async def test_a_reader_that_leaves_for_good_is_a_cancel(here: PoolSite) -> None:
    """After the grace in which it may come back."""
    reading, job = await here.begun()
    await job.post("x" * 100)
    await reading.read(1)
    reading.leave()
    await here.site.gateway.unread(reading.stream_id)
    await lived(here, 20)
    await job.post("y" * 100)
    back = await here.again(reading.stream_id)
    assert await back.read(2) == "x" * 100 + "y" * 100
    back.leave()
    await here.site.gateway.unread(reading.stream_id)
    await lived(here, 31)
    await stopped(job)
    await until_settled(here, -50)
    again = await here.again(reading.stream_id)
    event, fields = await again.end()
    assert (event, fields["reason"]) == ("cancelled", "abandoned")


async def test_an_expired_request_tells_its_reader(here: PoolSite) -> None:
    hand = await here.serving()
    reading = await here.read()
    here.clock.advance(1201)
    await here.sweep()
    event, fields = await reading.end()
    assert event == "failed"
    assert fields["error"]["retryable"] is True
    assert await hand.look() is None


# --- reconciliation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("posted", "reply", "told"),
    [
        ("The cat", "The cat sat.", "The cat sat."),
        ("", "The cat sat.", "The cat sat."),
        ("The cat ", "The cat", "The cat "),
        ("The cat\n\n", "The cat", "The cat\n\n"),
        ("The cat\nUser:", "The cat", "The cat\nUser:"),
        ("The cat###", "The cat", "The cat###"),
        ("The\r\ncat", "The\ncat sat", "The\r\ncat sat"),
    ],
)
async def test_a_reply_that_begins_with_what_was_shown_completes_it(
    here: PoolSite, posted: str, reply: str, told: str
) -> None:
    """Or lacks no more than white space or a stop string at the end of it, which workers trim."""
    reading, job = await here.begun(stop=["###", "\nUser:"])
    if posted:
        await job.post(posted)
        await reading.read(1)
    await job.finish(reply)
    assert (await reading.end())[0] == "done"
    assert reading.text == told


@pytest.mark.parametrize("reply", ["The dog", "The ca", "", "the cat sat", "A"])
async def test_any_other_reply_diverges(here: PoolSite, reply: str) -> None:
    reading, job = await here.begun()
    await job.post("The cat")
    await reading.read(1)
    answer = await job.submit(message={"role": "assistant", "content": reply})
    assert answer.status == 200
    assert diverged(await reading.end())
    assert reading.text == "The cat"
    assert await here.hand("second").look() is None


async def test_a_reply_whose_last_post_was_lost_brings_the_rest(anywhere: PoolSite) -> None:
    """A worker that was refused posts goes on silently: what it hands in has it all."""
    reading, job = await anywhere.begun()
    await job.post("one ")
    assert refusal(await job.send("three", seq=3)) == (409, "ChatProgressOutOfSequence")
    await job.finish("one two three")
    assert (await reading.end())[0] == "done"
    assert reading.text == "one two three"


async def test_a_worker_that_posts_nothing_is_one_too(here: PoolSite) -> None:
    """An existing worker gets the chat as a prompt, and hands the reply in whole."""
    hand = here.hand("plain")
    hand.declares = {"max_length": 1024}
    assert await hand.look() is None
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    reading = await here.read(messages=messages, prompt=None)
    job = await hand.pop()
    assert "chat" not in job.body
    assert job.payload["prompt"] == "System: Be brief.\nUser: Hello\nAssistant:"
    assert job.payload["stop_sequence"] == ["\nUser:"]
    assert "messages" not in job.payload
    assert (await job.submit(" Hi.\nUser:")).status == 200
    assert (await reading.end())[0] == "done"
    assert reading.text == " Hi."


async def test_the_openai_front_streams_a_pool_model(here: PoolSite) -> None:
    """Its headers go out before a worker has come."""
    hand = await here.serving()
    response = await here.ada.open(
        "POST",
        "/v1/chat/completions",
        json={"model": MODEL, "stream": True, "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]},
    )
    assert response.status == 200
    job = await hand.pop()
    await job.post("Good ", "day")
    await job.finish("Good day")
    body = (await response.read()).decode()
    chunks = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "Good day"
    assert body.rstrip().endswith("data: [DONE]")


async def test_refused_posts_wake_nobody_and_leave_the_lease_as_it_was(here: PoolSite) -> None:
    reading, job = await here.begun()
    await job.post("a")
    await reading.read(1)
    before = (await here.held())[job.id]
    here.clock.advance(10)
    for http, seq in [(here.keyed(CAT), 2), (here.keyed(BOB), 5), (here.http, 0)]:
        assert (await job.send("x", seq, http)).status >= 400
    assert (await here.held())[job.id] == before
    await until(lambda: here.site.gateway.readers(reading.stream_id), "the reader")


# --- races -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_races_a_generation_ends_once_and_is_paid_once(anywhere: PoolSite, seed: int) -> None:
    """Posts, submit, fault, cancel and another's attempts, all at once and in any order."""
    dice = random.Random(seed)
    hand = await anywhere.serving()
    for _ in range(5):
        reading = await anywhere.read()
        job = await hand.pop()
        await job.post("x" * 100)
        calls = [
            job.send("y" * 100, 2),
            job.send("y" * 100, 2),
            job.send(seq=0),
            job.send("z", 9),
            job.submit(message={"role": "assistant", "content": "x" * 100 + "y" * 100}),
            job.submit(state="faulted"),
            job.submit(message={"role": "assistant", "content": "theirs"}, http=anywhere.keyed(CAT)),
            anywhere.ada.post(f"/v1/stream/{reading.stream_id}/cancel"),
        ]
        dice.shuffle(calls)
        answers = await asyncio.gather(*calls)
        assert {answer.status for answer in answers} <= {200, 400, 403, 404, 409}
        await reading.end()
        await until_queue_is_empty(anywhere)
        assert await hand.look() is None
        assert [event for event, _ in reading.heard if event in TERMINAL] == [reading.heard[-1][0]]
    await anywhere.sweep()
    overview = await anywhere.pool.overview()
    transfers = overview.ledger
    assert len({row.generation for row in transfers}) == len(transfers) <= 5
    # One or two batches, the reply; or the floor, where a worker gave the job back in the instant of the cancel.
    assert {row.units for row in transfers} <= {25, 50, 20}
    ada, bob, cat = await anywhere.balances()
    assert (ada, cat) == (-bob, 0)
    assert bob == sum(row.units for row in transfers)
    assert not overview.running


# --- a store that is away --------------------------------------------------------------------------------------------


async def test_tokens_go_on_while_the_database_is_away(tmp_path: Path) -> None:
    """Posts and the reader do not need it; what needs it is told to come again, and then works."""
    with postgres.postgres() as server:
        async with pool_site(tmp_path, pool=server.url()) as here:
            reading, job = await here.begun()
            await job.post("The ")
            await reading.read(1)
            await asyncio.to_thread(server.stop)
            await job.post("cat ", "sat.")
            assert await reading.read(2) == "cat sat."
            message = {"role": "assistant", "content": "The cat sat."}
            for answer in await asyncio.gather(here.hand("second").ask(), job.submit(message=message)):
                assert refusal(answer) == (503, "StoreUnavailable")
                assert answer.headers["retry-after"] == "1"
            await asyncio.to_thread(server.start)
            assert await job.finish("The cat sat.") == 20
            assert (await reading.end())[0] == "done"
            assert await here.balances() == (-20, 20, 0)
