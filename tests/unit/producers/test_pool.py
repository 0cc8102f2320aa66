"""Streams of the pool: what workers post is relayed, the reply completes it, and whoever stops it stops the worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from midstream.codec import fold as folds
from midstream.errors import BadRequest, UnknownModel
from midstream.journal.sqlite import SqliteJournal
from midstream.pool.errors import InvalidJob, NoLease, PoolUnavailable
from midstream.pool.leases_memory import MemoryLeases
from midstream.pool.shapes import Generation, Reply
from midstream.records import Fold
from midstream.rules import fold
from midstream.testing.clock import ManualClock
from midstream.testing.patience import eventually, until
from midstream.wire import POOL_ABANDONED
from tests.houses import KEY, OWNER, WORKER, House, house

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CHATTY = replace(WORKER, name="chatty", chat_features=frozenset({"tools", "json_object"}))


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[House]:
    async with house(tmp_path) as running:
        yield running


async def begun(here: House, **body: Any) -> tuple[str, Generation]:
    """A stream, and the generation that a worker has for it."""
    stream_id = await here.ask(**body)
    return stream_id, await here.pop()


async def shown(here: House, **body: Any) -> tuple[str, Generation]:
    """A stream whose readers have seen `The ca`."""
    stream_id, generation = await begun(here, **body)
    await here.post(generation, ["The", " ca"])
    await here.told(stream_id, 2)
    return stream_id, generation


async def status(here: House, stream_id: str) -> str:
    request = await here.jobs.by_stream(stream_id)
    assert request is not None
    return request.status


# --- relaying ---------------------------------------------------------------------------------------------------------


async def test_batches_become_records_that_say_whose_they_are(here: House) -> None:
    stream_id, generation = await begun(here)
    await here.post(generation, ["The", " ca"])
    assert [fields for _, fields in await here.told(stream_id, 2)] == [
        {"seq": 2, "delta": "The", "src": [generation.id, 1], "done": False},
        {"seq": 3, "delta": " ca", "src": [generation.id, 2], "done": False},
    ]
    await here.post(generation, ["t"], 3)
    await here.finish(generation, "The cat sat.", finish_reason="length", usage={"completion_tokens": 4})
    event, fields = await here.end(stream_id)
    assert (event, fields["finish_reason"], fields["usage"]) == ("done", "length", {"completion_tokens": 4})
    sources = [fields["src"] for event, fields in await here.records(stream_id) if event == "token"]
    assert sources == [[generation.id, seq] for seq in (1, 2, 3, 0)]
    assert await here.text(stream_id) == "The cat sat."


async def test_no_entry_before_the_reply_is_lost(here: House) -> None:
    """The signal may be heard before any of them has been read."""
    for _ in range(10):
        stream_id, generation = await begun(here)
        texts = [f"{at} " for at in range(20)]
        await here.post(generation, texts)
        await here.finish(generation, "".join(texts).strip())
        assert (await here.end(stream_id))[0] == "done"
        assert await here.text(stream_id) == "".join(texts)


async def test_worker_s_reasoning_is_relayed_beside_the_text(here: House) -> None:
    stream_id, generation = await begun(here)
    await here.pool.progress(generation.id, KEY, 1, "", "hm")
    await here.pool.progress(generation.id, KEY, 2, "Yes", "")
    await here.finish(generation, "Yes", reasoning="hm")
    await here.end(stream_id)
    first, second, _ = [fields for _, fields in await here.records(stream_id)]
    assert (first["reasoning"], first["delta"], second["delta"]) == ("hm", "", "Yes")


async def test_worker_that_posts_nothing_is_delivered_whole(here: House) -> None:
    stream_id, generation = await begun(here)
    assert await here.finish(generation, "All at once", reasoning="hm") == 20
    assert (await here.end(stream_id))[0] == "done"
    [token, _] = await here.records(stream_id)
    assert (token[1]["delta"], token[1]["reasoning"], token[1]["src"]) == ("All at once", "hm", [generation.id, 0])


@pytest.mark.parametrize(
    "more", [{"tools": TOOLS}, {"response_format": {"type": "json_object"}}], ids=["tools", "json"]
)
async def test_what_workers_do_not_stream_comes_whole(here: House, more: dict[str, Any]) -> None:
    await here.look(CHATTY)
    stream_id = await here.ask(**more)
    assert await here.look() == []  # it has not declared that
    generation = await here.pop(CHATTY)
    assert not generation.streams
    with pytest.raises(NoLease):
        await here.pool.progress(generation.id, KEY, 1, "x", "")
    calls = [CALL] if "tools" in more else None
    await here.pool.submit(generation.id, "bob", Reply(None if calls else "{}", tool_calls=calls))
    event, fields = await here.end(stream_id)
    assert (event, fields["finish_reason"]) == ("done", "tool_calls" if calls else "stop")
    [token, _] = await here.records(stream_id)
    assert token[1].get("tool_calls") == ([{"index": 0, **CALL}] if calls else None)


async def test_prompt_worker_s_own_end_of_turn_is_no_part_of_the_answer(here: House) -> None:
    """The messages were rendered to a prompt, with a stop string that not every worker cuts off."""
    stream_id, generation = await begun(here)
    await here.finish(generation, "Hello.\nUser:")
    await here.end(stream_id)
    assert await here.text(stream_id) == "Hello."


async def test_reply_makes_up_for_progress_that_its_store_has_lost(here: House) -> None:
    """The worker is told that its lease is gone, goes on silently and hands in the whole."""
    stream_id, generation = await shown(here)
    assert isinstance(here.leases, MemoryLeases)
    here.leases._asked.clear()
    here.leases._index.clear()
    with pytest.raises(NoLease):
        await here.pool.progress(generation.id, KEY, 3, "t sa", "")
    await here.finish(generation, "The cat sat.")
    assert (await here.end(stream_id))[0] == "done"
    assert await here.text(stream_id) == "The cat sat."


@pytest.mark.parametrize("stop", [None, "###"])
async def test_reply_may_lack_what_workers_trim(here: House, stop: str | None) -> None:
    stream_id, generation = await begun(here, **({"stop": stop} if stop else {}))
    await here.post(generation, ["The cat", stop or " \n"])
    await here.told(stream_id, 2)
    await here.finish(generation, "The cat")
    assert (await here.end(stream_id))[0] == "done"


# --- losing a worker --------------------------------------------------------------------------------------------------


async def test_attempt_that_died_unseen_leaves_one_start_and_clean_text(here: House) -> None:
    stream_id, first = await begun(here)
    await here.pool.fault(first.id, "bob", "generation_error")
    second = await here.pop()
    await here.post(second, ["The dog"])
    await here.finish(second, "The dog")
    assert (await here.end(stream_id))[0] == "done"
    assert await here.text(stream_id) == "The dog"
    assert [event for event, _ in await here.records(stream_id)] == ["token", "done"]
    assert await here.balances() == (-20, 20)


async def test_attempt_that_was_seen_ends_the_stream_when_it_dies(here: House) -> None:
    """Nothing of the request may be popped once readers are told."""
    stream_id, generation = await shown(here)
    await here.pool.fault(generation.id, "bob", "generation_error")
    event, fields = await here.end(stream_id)
    assert (event, fields["error"]["code"], fields["error"]["retryable"]) == ("failed", "ChatStreamDiverged", True)
    assert "the worker was lost" in fields["error"]["message"]
    assert await status(here, stream_id) == "cancelled"
    assert await here.look() == []
    assert await here.balances() == (0, 0)


@pytest.mark.parametrize("second", ["The dog", "The cat"])
async def test_second_attempt_is_never_spliced_into_the_first(here: House, second: str, monkeypatch: Any) -> None:
    """Even where the marker of the first one's end is lost, and the second begins with the same text."""
    stream_id, first = await shown(here)
    with monkeypatch.context() as patched:
        patched.setattr(here.leases, "end", away)
        await here.pool.fault(first.id, "bob", "generation_error")
    if given := await here.look():  # unless the relay was quicker
        other = given[0][0]
        await here.pool.progress(other.id, KEY, 1, second, "")
    await here.pool.poll()
    event, fields = await here.end(stream_id)
    assert (event, fields["error"]["code"]) == ("failed", "ChatStreamDiverged")
    assert await here.text(stream_id) == "The ca"


async def away(*_: object, **__: object) -> Any:
    """What every verb of a store does that does not answer."""
    raise PoolUnavailable


async def test_reply_of_another_text_ends_the_stream(here: House) -> None:
    stream_id, generation = await shown(here)
    await here.finish(generation, "The dog")
    event, fields = await here.end(stream_id)
    assert (event, fields["error"]["code"]) == ("failed", "ChatStreamDiverged")
    assert await here.text(stream_id) == "The ca"


async def test_third_fault_fails_a_stream_that_has_shown_nothing(here: House) -> None:
    stream_id = await here.ask()
    for _ in range(3):
        await here.pool.fault((await here.pop()).id, "bob", "prompt_overflow")
    event, fields = await here.end(stream_id)
    assert (event, fields["error"]["code"]) == ("failed", "pool_faulted")
    assert "prompt_overflow" in fields["error"]["message"]


async def test_request_that_nobody_takes_fails_its_stream(here: House) -> None:
    stream_id = await here.ask(abandon_after=10_000)
    here.clock.advance(1201)
    await here.sweep()
    event, fields = await here.end(stream_id)
    assert (event, fields["error"]["code"]) == ("failed", "pool_expired")


async def test_lost_signal_costs_a_second(here: House, monkeypatch: Any) -> None:
    """The look at the database, which every gateway takes each second for all its streams, makes up for it."""

    async def lost(*_: object) -> None:
        return

    stream_id, generation = await begun(here)
    monkeypatch.setattr(here.leases, "signal", lost)
    await here.finish(generation, "x")
    await here.pool.poll()
    assert (await here.end(stream_id))[0] == "done"


async def test_stream_waits_for_a_store_that_is_away(here: House, monkeypatch: Any) -> None:
    stream_id, generation = await begun(here)
    outcome = here.pool.outcome
    asked = asyncio.Event()

    async def not_yet(request: str) -> Any:
        asked.set()
        raise PoolUnavailable

    monkeypatch.setattr(here.pool, "outcome", not_yet)
    await here.finish(generation, "x")
    await asked.wait()
    monkeypatch.setattr(here.pool, "outcome", outcome)
    assert (await here.end(stream_id))[0] == "done"


# --- stopping ---------------------------------------------------------------------------------------------------------


async def until_status(here: House, stream_id: str, wanted: str) -> None:
    async def there() -> bool:
        return await status(here, stream_id) == wanted

    await eventually(there)
    await here.quiet()


async def test_cancel_reaches_the_worker_through_its_next_post(here: House) -> None:
    stream_id, generation = await begun(here)
    await here.post(generation, ["x" * 100])
    await here.streams.cancel(stream_id, OWNER)
    await until_status(here, stream_id, "cancelled")
    assert (await here.pool.progress(generation.id, KEY, 2, "y", "")).cancelled
    assert await here.balances() == (-25, 25)
    assert (await here.end(stream_id))[0] == "cancelled"


async def test_cancel_before_any_worker_costs_nothing(here: House) -> None:
    stream_id = await here.ask()
    await here.streams.cancel(stream_id, OWNER)
    await until_status(here, stream_id, "cancelled")
    assert await here.look() == []
    assert await here.balances() == (0, 0)


async def test_stream_that_is_stopped_before_it_is_queued_leaves_no_job(here: House) -> None:
    """The request is on its way into the database."""
    enqueue, queued = here.pool.enqueue, asyncio.Event()

    async def slow(ask: Any) -> Any:
        request = await enqueue(ask)
        queued.set()
        await asyncio.sleep(0)
        return request

    here.pool.enqueue = slow  # type: ignore[method-assign]
    opened = await here.streams.open(
        OWNER, "m", here.source.ask(OWNER, {"model": "m", "messages": [{"role": "user", "content": "x"}]}, "chat")
    )
    stream_id = opened.state.meta.stream_id
    writer = here.streams.writers[stream_id]
    await until(
        lambda: queued.is_set() or (writer._task is not None and writer._task.done()), "the request to be queued"
    )
    await here.streams.cancel(stream_id, OWNER)
    await until_status(here, stream_id, "cancelled")
    assert await here.look() == []


async def test_reader_that_leaves_has_its_grace_and_then_counts_as_a_cancel(here: House) -> None:
    stream_id, generation = await begun(here)
    await here.post(generation, ["x" * 100])
    reader = await here.streams.follow(stream_id, OWNER, 1)
    assert reader is not None
    here.streams.leave(reader)
    here.clock.advance(POOL_ABANDONED - 1)
    await here.streams.pulse(0)
    assert not (await here.pool.progress(generation.id, KEY, 2, "y" * 20, "")).cancelled
    here.clock.advance(2)
    await here.streams.pulse(0)
    await until_status(here, stream_id, "cancelled")
    assert (await here.pool.progress(generation.id, KEY, 3, "z", "")).cancelled
    assert await here.balances() == (-30, 30)
    event, fields = await here.end(stream_id)
    assert (event, fields["reason"]) == ("cancelled", "abandoned")


async def test_request_s_own_word_on_abandonment_comes_first(here: House) -> None:
    stream_id, _ = await begun(here, abandon_after=100)
    here.clock.advance(POOL_ABANDONED + 1)
    await here.streams.pulse(0)
    assert await status(here, stream_id) == "waiting"


async def test_request_whose_stream_has_ended_elsewhere_is_cancelled_by_the_sweep(here: House) -> None:
    """The process that wrote it stopped between the two."""
    stream_id, generation = await shown(here)
    writer = here.streams.writers[stream_id]
    writer.stop()
    await writer.join()
    await here.sweep()
    assert await status(here, stream_id) == "waiting"  # open, and perhaps about to be taken over
    await here.journal.request_cancel(stream_id, "client")
    await here.sweep()
    assert await status(here, stream_id) == "cancelled"
    assert await here.balances() == (-20, 20)
    assert (await here.pool.progress(generation.id, KEY, 3, "t", "")).cancelled


async def test_request_cancelled_in_the_pool_ends_its_stream(here: House) -> None:
    stream_id, _ = await begun(here)
    request = await here.jobs.by_stream(stream_id)
    assert request is not None
    await here.pool.cancel(request.id)
    event, fields = await here.end(stream_id)
    assert (event, fields["error"]["code"]) == ("failed", "pool_cancelled")


# --- what can be asked for --------------------------------------------------------------------------------------------


async def test_models_are_those_that_workers_offer_now(here: House) -> None:
    assert [model["id"] for model in await here.sources.models()] == ["m"]
    assert await here.sources.default_model() == "m"
    with pytest.raises(UnknownModel):
        await here.ask(model="n")
    here.clock.advance(301)
    await here.pool.refresh()
    assert here.sources.for_model("m") is None
    with pytest.raises(UnknownModel):
        await here.sources.default_model()


async def test_what_no_worker_can_be_asked_is_refused_before_there_is_a_stream(here: House) -> None:
    with pytest.raises(BadRequest) as refused:
        await here.ask(n=2)
    assert refused.value.param == "n"
    assert await here.streams.list(OWNER) == []


async def test_the_fold_keeps_the_newest_src(here: House) -> None:
    """Acked records are gone from the journal, and still a replica must know where to go on."""
    stream_id, generation = await shown(here)
    _, frames, _ = await here.journal.snapshot(stream_id)
    kept = Fold()
    fold(kept, frames)
    assert kept.src == [generation.id, 2]
    assert folds.decode(folds.encode(kept)) == kept


# --- starting again ---------------------------------------------------------------------------------------------------


def durable(tmp_path: Path, clock: ManualClock) -> dict[str, Any]:
    return {"clock": clock, "journal": SqliteJournal(str(tmp_path / "journal.db"), clock)}


async def test_restart_ends_what_was_shown_and_pays_for_it(tmp_path: Path) -> None:
    """Leases in memory are gone with the process; the journal knows how much was shown."""
    clock = ManualClock()
    async with house(tmp_path, **durable(tmp_path, clock)) as before:
        stream_id, generation = await begun(before)
        await before.post(generation, ["x" * 100, "y" * 20])
        await before.told(stream_id, 2)
    async with house(tmp_path, **durable(tmp_path, clock)) as after:
        event, fields = await after.end(stream_id)
        assert (event, fields["error"]["code"]) == ("failed", "writer_lost")
        assert await status(after, stream_id) == "cancelled"
        assert await after.balances() == (-30, 30)
        with pytest.raises(NoLease):
            await after.pool.progress(generation.id, KEY, 3, "z", "")
        with pytest.raises(InvalidJob):
            await after.finish(generation, "x")
        assert await after.look() == []


async def test_restart_offers_again_what_nobody_has_seen(tmp_path: Path) -> None:
    """Through nobody's fault: no fault is counted, and the stream goes on."""
    clock = ManualClock()
    async with house(tmp_path, **durable(tmp_path, clock)) as before:
        stream_id, first = await begun(before)
        waiting = await before.ask("And this")
    async with house_with_jobs(tmp_path, clock) as after:
        again, other = await after.pop(), await after.pop()
        assert {again.request, other.request} == {
            (await after.queued(stream_id)).id,
            (await after.queued(waiting)).id,
        }
        with pytest.raises(InvalidJob):
            await after.finish(first, "late")
        for generation in (again, other):
            await after.post(generation, ["in time"])
            await after.finish(generation, "in time")
        for each in (stream_id, waiting):
            assert (await after.end(each))[0] == "done"
            assert await after.text(each) == "in time"
        request = await after.jobs.by_stream(stream_id)
        assert request is not None
        assert request.faults == 0


def house_with_jobs(tmp_path: Path, clock: ManualClock) -> Any:
    """One to which no worker has come yet, since jobs wait in it."""
    return house(tmp_path, look=False, **durable(tmp_path, clock))


async def test_restart_completes_what_was_handed_in_meanwhile(tmp_path: Path) -> None:
    """The reply is in the database, though the process stopped before its stream said so."""
    clock = ManualClock()
    async with house(tmp_path, **durable(tmp_path, clock)) as before:
        stream_id, generation = await shown(before)
        writer = before.streams.writers[stream_id]
        writer.stop()
        await writer.join()
        await before.finish(generation, "The cat sat.")
    async with house(tmp_path, **durable(tmp_path, clock)) as after:
        assert (await after.end(stream_id))[0] == "done"
        assert await after.text(stream_id) == "The cat sat."
        assert await after.balances() == (-20, 20)


async def test_restart_without_a_journal_pays_the_floor(tmp_path: Path) -> None:
    """Nobody can read on, and nobody knows how much was shown."""
    clock = ManualClock()
    async with house(tmp_path, clock=clock) as before:
        stream_id, _ = await shown(before)
    async with house(tmp_path, clock=clock) as after:
        assert await status(after, stream_id) == "cancelled"
        assert await after.balances() == (-20, 20)


async def test_restart_leaves_what_does_not_stream_to_its_worker(tmp_path: Path) -> None:
    """Its worker needs no lease: the reply counts whenever it comes within its time."""
    clock = ManualClock()
    async with house(tmp_path, **durable(tmp_path, clock)) as before:
        await before.look(CHATTY)
        stream_id = await before.ask(tools=TOOLS)
        generation = await before.pop(CHATTY)
    async with house(tmp_path, **durable(tmp_path, clock)) as after:
        await after.pool.submit(generation.id, "bob", Reply(None, tool_calls=[CALL]))
        event, fields = await after.end(stream_id)
        assert (event, fields["finish_reason"]) == ("done", "tool_calls")
