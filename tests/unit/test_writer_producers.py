"""A stream ends whatever its producer does, also what no producer should do (I7)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from midstream.codec import native
from midstream.errors import ProducerFailed
from midstream.journal.memory import MemoryJournal
from midstream.records import Chunk, Finish, Producer, Record
from midstream.testing.clock import ManualClock
from midstream.testing.journal_writer import meta, read_all
from midstream.testing.patience import soon
from midstream.writer import Writer


async def written(producer: Producer) -> list[Record]:
    """What is kept of a stream that this producer wrote."""
    clock = ManualClock()
    journal = MemoryJournal(clock)
    told = meta(clock)
    created = await journal.create(told, [native.start(told.stream_id, told.model)])
    writer = Writer(journal, clock, told, created.state.epoch, 2, producer)
    ended = asyncio.Event()
    writer.start(lambda _: ended.set())
    await soon(ended.wait())
    return [Record.of(frame) for frame in await read_all(journal, told.stream_id)]


async def after_a(*lines: Any) -> Producer:
    yield [Chunk("a")]
    for line in lines:
        if isinstance(line, BaseException):
            raise line
        yield line


async def waits_for_a_cancelled_task() -> Producer:
    """A library's own task was cancelled, by itself or a time limit of it; nobody has cancelled the generation."""
    yield [Chunk("a")]
    task = asyncio.ensure_future(asyncio.sleep(10))
    asyncio.get_running_loop().call_soon(task.cancel)
    await task


@pytest.mark.parametrize(
    "producer",
    [
        lambda: after_a(asyncio.CancelledError()),
        waits_for_a_cancelled_task,
        lambda: after_a(ProducerFailed("upstream_error", "said \ud800", upstream="\ud800", when=object())),
        lambda: after_a(Finish("stop", {"tokens": object()})),
        lambda: after_a(Finish("\ud800", None)),
        lambda: after_a([Chunk("b", {"logprobs": {1: object()}})]),
        lambda: after_a("text"),
        lambda: after_a(None),
    ],
    ids=[
        "cancelled error",
        "cancelled task",
        "failure that is no JSON",
        "usage that is no JSON",
        "reason that is no text",
        "field that is no JSON",
        "text for chunks",
        "nothing for chunks",
    ],
)
async def test_stream_of_an_odd_producer_ends_failed(producer: Any) -> None:
    records = await written(producer())
    assert [record.event for record in records] == ["start", "token", "failed"]
    assert records[-1].json()["error"]["code"] in ("producer_error", "upstream_error")
