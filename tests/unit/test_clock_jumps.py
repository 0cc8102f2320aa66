"""The wall clock is corrected while streams are kept: nothing is kept for ever for it, and nothing goes early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from midstream.records import Chunk, Finish, Producer
from midstream.rules import Bounds
from midstream.streams import Streams
from midstream.testing.clock import ManualClock
from midstream.testing.patience import until
from tests.journals import new_journal

HOUR, DAY = 3600.0, 86400.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest_asyncio.fixture(params=["memory", "sqlite"])
async def streams(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> AsyncIterator[Streams]:
    streams = Streams(new_journal(request.param, tmp_path, clock, Bounds()), clock)
    await streams.start()
    yield streams
    await streams.close()


async def ended(streams: Streams) -> str:
    async def answer(_: str) -> Producer:
        yield [Chunk("a")]
        yield Finish("stop")

    opened = await streams.open("ada", "m", answer)
    await until(lambda: not streams.writers, "the stream to end")
    return opened.state.meta.stream_id


async def silent(streams: Streams, abandon_after: float | None) -> str:
    async def answer(_: str) -> Producer:
        yield [Chunk("a")]
        await asyncio.Event().wait()

    return (await streams.open("ada", "m", answer, abandon_after=abandon_after)).state.meta.stream_id


async def lives_through(streams: Streams, clock: ManualClock, seconds: float) -> None:
    for _ in range(int(seconds // 30)):
        clock.advance(30)
        await streams.pulse(0.0)


async def kept(streams: Streams) -> set[str]:
    return {state.meta.stream_id for state in await streams.list("ada")}


async def test_streams_of_a_future_that_was_not_expire_after_their_grace_time(
    streams: Streams, clock: ManualClock
) -> None:
    """Set back by a day, they are not kept a day longer; nor does the sweep wait until it is where it was."""
    stream_id = await ended(streams)
    clock.set(clock() - DAY)
    await lives_through(streams, clock, 300)
    assert stream_id in await kept(streams)
    await lives_through(streams, clock, 480)
    assert await kept(streams) == set()


async def test_sweep_goes_on_after_the_clock_was_set_back(streams: Streams, clock: ManualClock) -> None:
    """Streams that end afterwards have the grace time they always had."""
    await streams.pulse(0.0)
    clock.set(clock() - DAY)
    await ended(streams)
    await lives_through(streams, clock, 780)
    assert await kept(streams) == set()


async def test_generation_nobody_wants_is_abandoned_though_the_clock_was_set_back(
    streams: Streams, clock: ManualClock
) -> None:
    await silent(streams, abandon_after=30)
    clock.set(clock() - HOUR)
    await streams.pulse(0.0)
    assert streams.writers
    await lives_through(streams, clock, 60)
    await until(lambda: not streams.writers, "the generation to be abandoned")


async def test_generation_is_not_abandoned_for_what_the_clock_jumped_over(streams: Streams, clock: ManualClock) -> None:
    """Its reader has all the time that was promised, and not much more."""
    await silent(streams, abandon_after=60)
    await streams.pulse(0.0)
    clock.advance(30)
    clock.set(clock() + HOUR)
    await streams.pulse(0.0)
    clock.advance(29)
    await streams.pulse(0.0)
    assert streams.writers
    clock.advance(1)
    await streams.pulse(0.0)
    await until(lambda: not streams.writers, "the generation to be abandoned")


async def test_ended_stream_is_not_forgotten_for_what_the_clock_jumped_over(
    streams: Streams, clock: ManualClock
) -> None:
    """A machine that slept, or whose clock was wrong: who was reading then has his grace time still."""
    await streams.pulse(0.0)
    stream_id = await ended(streams)
    clock.set(clock() + DAY)
    await lives_through(streams, clock, 570)
    assert await kept(streams) == {stream_id}
    await lives_through(streams, clock, 120)
    assert await kept(streams) == set()


async def test_open_stream_outlives_any_jump(streams: Streams, clock: ManualClock) -> None:
    """Years forwards, as where a machine has no clock of its own; the stream goes on."""
    stream_id = await silent(streams, abandon_after=None)
    for now in (clock() + 40_000 * HOUR, 0.0, clock()):
        clock.set(now)
        await streams.pulse(0.0)
        assert (await streams.state(stream_id, "ada")).status == "open"
