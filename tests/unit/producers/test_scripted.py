"""The scripted producer is deterministic, keeps its rate, and says what it is."""

import asyncio
from contextlib import aclosing
from itertools import islice
from typing import Any

import pytest

from midstream.producers.scripted import Scripted, tokens
from midstream.records import Finish


async def run(model: str, **fields: Any) -> tuple[list[list[str]], Finish]:
    """The lists of deltas, and the end."""
    lists: list[list[str]] = []
    async with aclosing(Scripted().generate({"model": model, **fields}, "chat")) as parts:
        async for part in parts:
            if isinstance(part, Finish):
                return lists, part
            lists.append([chunk.delta for chunk in part])
    raise AssertionError("it ended without saying how")


async def text(model: str, **fields: Any) -> str:
    return "".join(delta for deltas in (await run(model, **fields))[0] for delta in deltas)


async def test_it_calls_itself_a_simulation() -> None:
    """In its first sentence, its name and its listing; it serves no model of another name unless that is asked."""
    assert (await text("scripted-r0")).startswith("This is a simulation: no model is running.")
    (listed,) = await Scripted().models()
    assert (listed["id"], listed["owned_by"]) == ("scripted", "simulation")
    assert [Scripted().serves(model) for model in ("scripted", "scripted-n4-r0", "gpt-4")] == [True, True, False]
    assert Scripted("gpt-*").serves("gpt-4")
    assert await Scripted("gpt-*").models() == []


async def test_the_text_is_a_function_of_prompt_and_seed() -> None:
    """Alike however it is asked for and paced, and different for another prompt or seed."""
    same = await text("scripted-n200-r0", prompt="p", seed=1)
    assert same == await text("scripted-n200-r100000", messages=[{"role": "user", "content": "p"}], seed=1)
    assert same == "".join(islice(tokens("p", 1), 200))
    assert len({same, await text("scripted-n200-r0", prompt="p"), await text("scripted-n200-r0", prompt="q")}) == 3
    assert same.count(".") > 5
    assert not same.isascii()


def test_the_text_is_the_same_on_every_machine() -> None:
    """Tests and documents may quote it."""
    assert list(islice(tokens("p", 1), 16)) == [
        *("This", " is", " a", " simulation", ":", " no", " model", " is", " running", "."),
        *(" Clock", " lantern", " signal", " clock", " paper", " after"),
    ]


@pytest.mark.parametrize(
    ("model", "fields", "count", "reason"),
    [
        ("scripted-r0", {}, 300, "stop"),
        ("scripted-r0", {"max_tokens": 7}, 7, "stop"),
        ("scripted-r0", {"max_completion_tokens": 7}, 7, "stop"),
        ("scripted-n40-r0", {}, 40, "stop"),
        ("scripted-n40-r0", {"max_tokens": 7}, 7, "length"),
        ("scripted-n40-r0", {"max_tokens": 70}, 40, "stop"),
        ("scripted-n40-r0", {"max_tokens": "x"}, 40, "stop"),
        ("scripted-n0", {}, 0, "stop"),
        ("scripted-r0", {"max_tokens": 0}, 0, "stop"),
    ],
)
async def test_the_number_of_tokens_is_what_was_asked(
    model: str, fields: dict[str, Any], count: int, reason: str
) -> None:
    """By the name, by `max_tokens`, or 300."""
    lists, finish = await run(model, prompt="two words", **fields)
    assert sum(map(len, lists)) == count
    assert finish == Finish(reason, {"prompt_tokens": 2, "completion_tokens": count, "total_tokens": 2 + count})


async def test_as_fast_as_it_is_taken_it_still_lets_others_run() -> None:
    """In lists of at most 64, with a turn of the loop between them."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(other())
    lists, _ = await run("scripted-n640-r0")
    running.cancel()
    assert [len(deltas) for deltas in lists] == [0] + [64] * 10
    assert turns >= 10


async def test_it_keeps_its_rate_on_average() -> None:
    """A consumer that was late gets what is due at once; a token is never early."""
    now = asyncio.get_running_loop().time
    started = now()
    count = 0
    async with aclosing(Scripted(rate=200, tokens=40).generate({"model": "scripted"}, "chat")) as parts:
        async for part in parts:
            if isinstance(part, list):
                count += len(part)
                assert count <= (now() - started) * 200 + 1e-6
                if count == 1:
                    await asyncio.sleep(0.05)
            else:
                assert now() - started > 0.199  # uvloop counts whole milliseconds
    assert count == 40


async def test_any_other_name_has_the_usual_rate_and_length() -> None:
    """Where the operator gave it the models of another name."""
    producer = Scripted("*", rate=0, tokens=5)
    async with aclosing(producer.generate({"model": "gpt-4"}, "chat")) as parts:
        assert [len(part) if isinstance(part, list) else part.finish_reason async for part in parts] == [0, 5, "stop"]
