"""The puppet speaks when told, and knows when it was heard and when it was stopped."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from midstream.errors import ProducerFailed
from midstream.records import Chunk, Finish
from midstream.testing.patience import soon
from midstream.testing.puppet import Puppets, Stopped


async def test_say_returns_when_the_next_line_is_asked_for() -> None:
    """Which a writer does once the line is journaled."""
    puppet = Puppets().generate({"model": "puppet"})
    taken = asyncio.create_task(anext(puppet))
    saying = asyncio.create_task(puppet.say("a", "b"))
    assert await soon(taken) == [Chunk("a"), Chunk("b")]
    await asyncio.sleep(0)
    assert not saying.done()
    asking = asyncio.create_task(anext(puppet))
    await soon(saying)
    puppet.push(Finish("stop"))
    assert await soon(asking) == Finish("stop")


async def test_stopped_puppet_says_so() -> None:
    """To who makes it speak too, whether before or in the middle."""
    puppet = Puppets().generate({})
    async with aclosing(puppet):
        asking = asyncio.create_task(anext(puppet))
        saying = asyncio.create_task(puppet.say("a"))
        await soon(asking)
    with pytest.raises(Stopped):
        await soon(saying)
    with pytest.raises(Stopped):
        await puppet.say("b")


async def test_failure_is_raised_where_the_line_would_come() -> None:
    puppet = Puppets().generate({})
    asking = asyncio.create_task(anext(puppet))
    failing = asyncio.create_task(puppet.fail("upstream_timeout", "slow", retryable=True))
    with pytest.raises(ProducerFailed, match="slow"):
        await soon(asking)
    await puppet.aclose()
    await soon(failing)


async def test_generations_are_handed_out_in_their_order() -> None:
    """Each once it has been asked for its first line."""
    puppets = Puppets("m", "n")
    assert await puppets.default_model() == "m"
    assert puppets.for_model("n") is puppets
    assert puppets.for_model("x") is None
    begun = [puppets.generate({"at": at}, "chat", {"a": "b"}) for at in range(3)]
    asking = [asyncio.create_task(anext(puppet)) for puppet in begun]
    assert [(await puppets.next()).body["at"] for _ in begun] == [0, 1, 2]
    assert begun[0].headers == {"a": "b"}
    assert puppets.begun == 3
    for puppet, task in zip(begun, asking, strict=True):
        puppet.push(Finish())
        await soon(task)
