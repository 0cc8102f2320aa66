"""`midstream worker` at work: what its readers see, what the pool is sent, and what the local server is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import aiohttp
import pytest

from midstream.cli.model import Model
from midstream.testing.patience import eventually, until
from midstream.testing.upstream import FAULTS, Head, Pause, Reset, Script, Send, Stall, Status, chat_answer, chat_event
from midstream.testing.upstream_script import ROLE
from midstream.wire import POOL_MAX_BATCHES
from midstream.worker.times import Times
from tests.pools import CAT, MODEL, Reading, asked
from tests.workers import TIMES, Shop, once, shop


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Shop]:
    async with shop(tmp_path) as running:
        yield running


# --- tokens ----------------------------------------------------------------------------------------------------------


async def test_what_the_model_says_is_read_while_it_says_it(here: Shop) -> None:
    more = asyncio.Event()
    here.upstream.script(
        MODEL, Script([ROLE, chat_event("The "), chat_event("cat "), Pause(more), *chat_answer("sat")])
    )
    async with here.worker() as worker:
        reading = await here.ask()
        text = ""
        while text != "The cat ":
            text += await reading.read(1)
        more.set()
        assert (await reading.end())[0] == "done"
        result = await here.over()
    assert reading.text == "The cat sat"
    once(reading)
    assert (result.outcome, result.tokens, result.reward, result.why) == ("done", 3, 20, "")
    assert (worker.tally.jobs, worker.tally.tokens, worker.tally.earned) == ({"done": 1}, 3, 20)
    assert await here.site.balances() == (-20, 20, 0)


async def test_the_longest_answer_fits_into_a_thousand_posts(here: Shop) -> None:
    """As fast as it comes; that a post waits until it holds its share of the tokens is the batcher's own test."""
    words = [f"{at} " for at in range(16_384)]
    many = (b"".join(chat_event(word).encode() for word in words[at : at + 32]) for at in range(0, len(words), 32))
    here.upstream.script(MODEL, Script([ROLE, *map(Send, many), *chat_answer()]))
    async with here.worker(times=replace(TIMES, gather=0.0)):
        reading = await here.ask(max_tokens=16_384)
        assert (await reading.end())[0] == "done"
        assert (await here.over()).outcome == "done"
    assert reading.text == "".join(words)
    once(reading)
    assert len(here.tap.batches) <= POOL_MAX_BATCHES
    assert "".join(batch["content"] for batch in here.tap.batches) == reading.text


async def test_while_the_model_is_silent_posts_without_tokens_keep_the_job(here: Shop) -> None:
    """Through more than two terms of a lease; each at least so long after the one before."""
    assert Times().alive == 0.5
    more = asyncio.Event()
    here.upstream.script(MODEL, Script([Head(), Pause(more), *chat_answer("at last")]))
    async with here.worker():
        reading = await here.ask()
        for _ in range(3):
            here.tap.seen.clear()
            await until(lambda: len(here.tap.posts) > 1, "signs of life")
            here.site.clock.advance(100)
            await here.site.sweep()
            assert {(post["seq"], post["content"]) for post in here.tap.posts} == {(0, "")}
        more.set()
        assert (await reading.end())[0] == "done"
        await here.over()
    assert reading.text == "at last"
    at = [call.at for call in here.tap.seen if call.route == "progress" and not call.body["seq"]]
    assert all(later - earlier >= TIMES.alive * 0.9 for earlier, later in pairwise(at))


@pytest.mark.parametrize(
    ("deltas", "told"),
    [
        (["rocket \ud83d", "\ude80 up"], "rocket 🚀 up"),
        (["a\ud83d", "b"], "a\ufffdb"),
        (["the end \ud83d"], "the end \ufffd"),
        (["nul \0", " and on"], "nul \ufffd and on"),
        (["two\r", "\nlines\r\n"], "two\r\nlines\r\n"),
        (["né✅你", "🚀"], "né✅你🚀"),
        ([" ", "\n"], " \n"),
    ],
    ids=["a pair in halves", "half a pair", "half a pair at the end", "NUL", "CRLF", "wide", "white space"],
)
async def test_odd_characters_arrive_and_the_reply_is_what_was_shown(here: Shop, deltas: list[str], told: str) -> None:
    here.upstream.script(MODEL, Script(chat_answer(*deltas)))
    async with here.worker(times=replace(TIMES, gather=0.0)):
        reading = await here.ask()
        assert (await reading.end())[0] == "done"
        assert (await here.over()).outcome == "done"
    assert reading.text == told


async def test_an_empty_answer_is_an_answer(here: Shop) -> None:
    here.upstream.script(MODEL, Script(chat_answer()))
    async with here.worker():
        assert (await (await here.ask()).end())[0] == "done"
        assert (await here.over()).outcome == "done"


async def test_reasoning_is_streamed_beside_the_text(here: Shop) -> None:
    here.upstream.script(MODEL, FAULTS["reasoning-then-text"])
    async with here.worker():
        reading = await here.ask()
        assert (await reading.end())[0] == "done"
        await here.over()
    assert "".join(fields.get("reasoning", "") for fields in reading.tokens) == "hm"
    assert reading.text == "a"


# --- what is asked of the local server -------------------------------------------------------------------------------


async def test_a_job_is_asked_under_the_local_name_with_all_its_wishes(here: Shop) -> None:
    async with here.worker(models={MODEL: "local:7b"}):
        reading = await here.ask(max_tokens=77, stop=["###", "\nUser:"], temperature=0.5, seed=3)
        assert (await reading.end())[0] == "done"
        await here.over()
    [body] = here.asked
    wishes = {"model": "local:7b", "max_tokens": 77, "stop": ["###", "\nUser:"], "temperature": 0.5, "seed": 3}
    assert wishes.items() <= body.items()
    assert "genkey" not in body


async def test_tool_calls_come_whole(here: Shop) -> None:
    here.upstream.script(MODEL, FAULTS["parallel-tool-calls"])
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
    request = {"model": MODEL, "messages": [{"role": "user", "content": "Do it"}], "tools": tools, "max_tokens": 50}
    async with here.worker(features=("tools", "parallel_tool_calls")):
        await until(lambda: here.site.pool.serves(MODEL), "a worker")
        answer = await here.site.ada.post("/v1/chat/completions", request)
        await here.over()
    [choice] = answer.json["choices"]
    said = {call["id"]: json.loads(call["function"]["arguments"]) for call in choice["message"]["tool_calls"]}
    assert said == {"call_a": {"x": "é"}, "call_b": {"y": 1}}
    assert choice["finish_reason"] == "tool_calls"
    assert here.asked[0]["tools"] == tools
    assert here.tap.posts == []


async def test_a_polled_prompt_job_is_completed_and_handed_in_whole(here: Shop) -> None:
    async with here.worker():
        await until(lambda: here.site.pool.serves(MODEL), "a worker")
        params = {"max_length": 100, "stop_sequence": ["\n"]}
        request = (await here.site.ada.post("/api/v2/generate/text/async", asked(params=params))).json["id"]
        assert (await here.over()).outcome == "done"
        status = await here.site.http.get(f"/api/v2/generate/text/status/{request}")
    assert [generation["text"] for generation in status.json["generations"]] == ["Hello, world"]
    [asking] = [request for request in here.upstream.requests if request.method == "POST"]
    assert asking.path == "/v1/completions"
    assert asking.json["prompt"] == "Once upon a time"
    assert asking.json["stop"] == ["\n"]
    assert here.tap.posts == []


async def test_threads_never_mix_jobs(here: Shop) -> None:
    """Three at a time, of three models that talk in turns."""
    models = ("one", "two", "three")
    turns = [asyncio.Event() for _ in range(4)]
    for model in models:
        steps = [step for turn in turns for step in (Pause(turn), chat_event(f"{model} "))]
        here.upstream.script(model, Script([ROLE, *steps, *chat_answer()]))
    async with here.worker(models={model: model for model in models}, threads=3) as worker:
        readings = [await here.ask(model) for model in models]
        await until(lambda: len(worker.running) == 3, "three jobs at a time")
        for turn in turns:
            turn.set()
            await asyncio.sleep(2 * TIMES.gather)
        for reading in readings:
            assert (await reading.end())[0] == "done"
            once(reading)
        await here.over(3)
    assert [reading.text for reading in readings] == [f"{model} " * 4 for model in models]
    by_job = {job.task.id: job.task.model for job, _ in here.ended}
    assert len(by_job) == 3
    for batch in here.tap.batches:
        assert set(batch["content"].split()) == {by_job[batch["id"]]}


# --- cancel ----------------------------------------------------------------------------------------------------------


async def cancel(here: Shop, reading: Reading) -> None:
    assert (await here.site.ada.post(f"/v1/stream/{reading.stream_id}/cancel")).json["status"] == "cancelled"


async def test_a_cancel_closes_the_local_connection_and_hands_nothing_in(here: Shop) -> None:
    """Also while the model says nothing; the worker then takes the next job."""
    here.upstream.script(MODEL, Script([ROLE, *map(chat_event, "123"), Stall()]), Script(chat_answer("next")))
    async with here.worker():
        reading = await here.ask()
        while reading.text != "123":
            await reading.next()
        await cancel(here, reading)
        await here.upstream.disconnected(1, within=10)
        assert (await here.over()).outcome == "cancelled"
        assert here.tap.submits == []
        another = await here.ask()
        assert (await another.end())[0] == "done"
        assert another.text == "next"
        assert (await here.over(2)).outcome == "done"
    assert (await here.site.balances())[1] == 40


async def test_a_cancel_before_the_first_token_is_heard(here: Shop) -> None:
    here.upstream.script(MODEL, Script([Stall()]))
    async with here.worker():
        reading = await here.ask()
        await until(lambda: here.tap.posts, "a sign of life")
        await cancel(here, reading)
        await here.upstream.disconnected(1, within=10)
        assert (await here.over()).outcome == "cancelled"
    assert here.tap.submits == []


@pytest.mark.model
async def test_the_real_model_stops_at_a_cancel_and_answers_the_next(here: Shop) -> None:
    """What is read is what the model says when it is asked directly, by greedy decoding."""
    async with Model() as model, aiohttp.ClientSession() as session:

        async def idle() -> bool:
            async with session.get(f"{model.url.removesuffix('/v1')}/slots") as answer:
                return not any(slot["is_processing"] for slot in await answer.json())

        asking = {"messages": [{"role": "user", "content": "Tell me about the sea."}], "temperature": 0}
        async with here.worker(models={Model.name: Model.name}, local=model.url):
            reading = await here.ask(Model.name, **asking, prompt=None, max_tokens=1_500)
            await reading.read(3)
            assert not await idle()
            await cancel(here, reading)
            assert (await here.over()).outcome == "cancelled"
            await eventually(idle)
            assert (await reading.end())[0] == "cancelled"
            another = await here.ask(Model.name, **asking, prompt=None, max_tokens=24)
            assert (await another.end())[0] == "done"
            await here.over(2)
        asked_directly = {**asking, "model": Model.name, "max_tokens": 24}
        async with session.post(f"{model.url}/chat/completions", json=asked_directly) as answer:
            said = (await answer.json())["choices"][0]["message"]["content"]
    assert another.text == said
    assert said.startswith(reading.text[:20])
    assert here.tap.submits[-1]["completion_tokens"] == 24


# --- refusals --------------------------------------------------------------------------------------------------------


def refused_batch(here: Shop, status: int) -> asyncio.Event:
    """The first batch will be refused so; the model then waits for the event."""
    more = asyncio.Event()
    here.upstream.script(MODEL, Script([ROLE, chat_event("one "), Pause(more), *chat_answer("two ", "three")]))
    here.tap.answer("progress", status, {"message": "no"}, lambda call: call.body["seq"] > 0)
    return more


@pytest.mark.parametrize("status", [400, 403, 404])
async def test_a_worker_without_a_lease_goes_on_silently_and_hands_in(here: Shop, status: int) -> None:
    more = refused_batch(here, status)
    async with here.worker():
        reading = await here.ask()
        await until(lambda: here.tap.batches, "a batch")
        await asyncio.sleep(3 * TIMES.alive)
        more.set()
        assert (await reading.end())[0] == "done"
        assert (await here.over()).outcome == "done"
    assert reading.text == "one two three"
    assert len(here.tap.batches) == 1
    assert here.tap.posts[-1] is here.tap.batches[-1]


@pytest.mark.parametrize("status", [409, 413])
async def test_a_worker_whose_batch_is_refused_shows_life_and_hands_in(here: Shop, status: int) -> None:
    more = refused_batch(here, status)
    async with here.worker():
        reading = await here.ask()
        await until(lambda: here.tap.batches and not here.tap.posts[-1]["seq"], "a sign of life after the batch")
        more.set()
        assert (await reading.end())[0] == "done"
        assert (await here.over()).outcome == "done"
    assert reading.text == "one two three"
    assert len(here.tap.batches) == 1


async def test_more_than_a_job_may_say_is_still_handed_in(here: Shop) -> None:
    """Sixteen bytes for each token, and the pool takes no more posts."""
    more = asyncio.Event()
    here.upstream.script(MODEL, Script([ROLE, chat_event("x" * 200), Pause(more), *chat_answer("y" * 200, "z")]))
    async with here.worker():
        reading = await here.ask(max_tokens=16)
        assert await reading.read(1) == "x" * 200
        more.set()
        assert (await reading.end())[0] == "done"
        assert (await here.over()).outcome == "done"
    assert reading.text == "x" * 200 + "y" * 200 + "z"


async def test_a_lost_lease_ends_the_job_here_and_not_for_its_reader(here: Shop) -> None:
    """What comes too late is dropped; the reader, who has seen nothing yet, gets the next generation."""
    more = asyncio.Event()
    here.upstream.script(MODEL, Script([Head(), Pause(more), *chat_answer("too late")]), Script(chat_answer("in time")))
    async with here.worker(times=replace(TIMES, alive=60.0)):
        reading = await here.ask()
        await until(lambda: here.asked, "the job to be running")
        here.site.clock.advance(201)
        await here.site.sweep()
        more.set()
        late = await here.over()
        assert (late.outcome, late.reward) == ("refused", 0)
        assert "404" in late.why
        assert (await reading.end())[0] == "done"
        assert (await here.over(2)).outcome == "done"
    assert reading.text == "in time"


async def test_a_fault_of_the_local_server_gives_the_job_back(here: Shop) -> None:
    """Its reader has seen nothing: the next try answers."""
    here.upstream.script(MODEL, FAULTS["reset-before-headers"], Script(chat_answer("second ", "try")))
    async with here.worker():
        reading = await here.ask()
        assert (await reading.end())[0] == "done"
        await here.over(2)
    assert reading.text == "second try"
    assert here.outcomes == ["faulted", "done"]
    assert "cannot be reached" in here.results[0].why


async def test_what_had_gathered_when_the_local_server_failed_is_not_shown(here: Shop) -> None:
    """Else the next try could not answer any more."""
    here.upstream.script(MODEL, Script([ROLE, chat_event("half"), Pause(0.02), Reset()]), Script(chat_answer("whole")))
    async with here.worker(times=replace(TIMES, gather=60.0)):
        reading = await here.ask()
        assert (await reading.end())[0] == "done"
        await here.over(2)
    assert here.outcomes == ["faulted", "done"]
    assert here.results[0].tokens == 1
    assert reading.text == "whole"


async def test_a_fault_after_something_was_shown_ends_the_stream_loudly(here: Shop) -> None:
    shown = asyncio.Event()
    here.upstream.script(MODEL, Script([ROLE, chat_event("The cat"), Pause(shown), Reset()]))
    async with here.worker():
        reading = await here.ask()
        assert await reading.read(1) == "The cat"
        shown.set()
        event, fields = await reading.end()
        assert (event, fields["error"]["code"]) == ("failed", "ChatStreamDiverged")
        assert (await here.over()).outcome == "faulted"


@pytest.mark.parametrize("status", [503, 429])
async def test_a_local_server_that_is_busy_for_a_moment_is_waited_for(here: Shop, status: int) -> None:
    busy = Script([Status(status, body=b'{"detail":{"msg":"Server is busy; please try again later."}}')])
    here.upstream.script(MODEL, busy, busy, Script(chat_answer("now")))
    async with here.worker():
        reading = await here.ask()
        assert (await reading.end())[0] == "done"
        await here.over()
    assert here.outcomes == ["done"]
    assert reading.text == "now"


async def test_a_local_server_that_stays_busy_gives_the_job_back(here: Shop) -> None:
    here.upstream.script(MODEL, Script([Status(503)]))
    async with here.worker(times=replace(TIMES, busy=0.1)):
        event, _ = await (await here.ask()).end()
        assert event == "failed"  # at the third
    assert here.outcomes[:3] == ["faulted"] * 3


async def test_another_worker_goes_on_with_what_one_gives_back(here: Shop) -> None:
    here.upstream.script("mute", Script([Stall()]))
    async with here.worker("mute", models={MODEL: "mute"}):
        reading = await here.ask()
        await until(lambda: here.tap.posts, "the job to be running")
    assert here.outcomes == ["faulted"]
    assert here.results[0].why == "the worker stops"
    await here.upstream.disconnected(1, within=10)
    async with here.worker("second", key=CAT):
        assert (await reading.end())[0] == "done"
        await here.over(2)
    assert reading.text == "Hello, world"
