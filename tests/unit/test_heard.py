"""When a stream's source has been heard of: it has accepted the request, has said something, or is done with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from midstream.errors import ProducerFailed
from midstream.journal.memory import MemoryJournal
from midstream.records import Chunk, Finish
from midstream.streams import Streams
from midstream.testing.clock import ManualClock
from midstream.testing.patience import soon
from midstream.testing.puppet import Puppet, Puppets

LONG = 60.0


@pytest_asyncio.fixture
async def streams() -> AsyncIterator[Streams]:
    clock = ManualClock()
    running = Streams(MemoryJournal(clock), clock)
    await running.start()
    yield running
    await running.close()


async def begun(streams: Streams) -> tuple[str, Puppet]:
    puppets = Puppets()
    opened = await streams.open("ada", "puppet", lambda _: puppets.generate({}))
    return opened.state.meta.stream_id, await puppets.next()


@pytest.mark.parametrize(
    "word", [[], [Chunk("a")], Finish("stop"), ProducerFailed("upstream_error", "no"), RuntimeError("of ours")]
)
async def test_any_word_of_the_source_is_heard(streams: Streams, word: Any) -> None:
    """And an end is in the journal by then."""
    stream_id, puppet = await begun(streams)
    waiting = asyncio.ensure_future(streams.heard(stream_id, LONG))
    await asyncio.sleep(0)
    assert not waiting.done()
    puppet.push(word)
    await soon(waiting)
    state = await streams.owned(stream_id, "ada")
    assert state.ended is isinstance(word, Exception | Finish)


async def test_a_cancelled_stream_is_not_waited_for(streams: Streams) -> None:
    stream_id, _ = await begun(streams)
    waiting = asyncio.ensure_future(streams.heard(stream_id, LONG))
    await streams.cancel(stream_id, "ada")
    await soon(waiting)
    await soon(streams.heard(stream_id, LONG))


async def test_accepting_adds_nothing_to_the_stream(streams: Streams) -> None:
    """It takes no number."""
    stream_id, puppet = await begun(streams)
    await puppet.say_chunks([])
    assert (await streams.owned(stream_id, "ada")).highest_seq == 1
    await puppet.say("a")
    assert (await streams.owned(stream_id, "ada")).highest_seq == 2


async def test_silence_is_waited_for_so_long_and_no_longer(streams: Streams) -> None:
    stream_id, _ = await begun(streams)
    await soon(streams.heard(stream_id, 0.01))
