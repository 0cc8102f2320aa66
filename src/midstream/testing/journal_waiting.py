"""The journal contract, part 3: how readers are woken.  `wait` is level-triggered; wake-ups carry no data."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from midstream.codec import native
from midstream.journal.base import Journal
from midstream.records import Finish
from midstream.testing.journal_writer import Clock, Writer, meta, read_all, tokens, written
from midstream.testing.patience import soon

# Turns of the event loop in which a reader with nothing to read must not spin.
TURNS = 200


class WaitingLaws:
    """A wait may return early, never too late."""

    async def test_wait_returns_at_once_when_there_is_more(self, journal: Journal, clock: Clock) -> None:
        """Level-triggered: what came before the wait began counts."""
        writer = await written(journal, meta(clock), 3)
        for position in (0, 1, 2):
            await soon(journal.wait(writer.stream_id, position))
        await writer.finish()
        for position in (0, 3, 4, 9):
            await soon(journal.wait(writer.stream_id, position))

    async def test_wait_may_wake_early_but_never_misses(self, journal: Journal, clock: Clock) -> None:
        """An append that falls before, into or after the beginning of a wait ends it."""
        writer = await Writer.begin(journal, meta(clock))
        for turn in range(30):
            position = len(writer.frames)
            waits = [asyncio.create_task(soon(journal.wait(writer.stream_id, position))) for _ in range(turn % 3)]
            for _ in range(turn % 5):
                await asyncio.sleep(0)
            await asyncio.gather(writer.say("x"), soon(journal.wait(writer.stream_id, position)), *waits)
            assert len(await read_all(journal, writer.stream_id, position)) == 1

    async def test_one_append_wakes_everybody(self, journal: Journal, clock: Clock) -> None:
        """A thousand readers of one stream, and none stays behind."""
        writer = await written(journal, meta(clock), 2)
        waits = [asyncio.create_task(journal.wait(writer.stream_id, 2)) for _ in range(1000)]
        await asyncio.sleep(0)
        await writer.say("x")
        await soon(asyncio.gather(*waits))

    async def test_wait_returns_on_close(self, journal: Journal, clock: Clock) -> None:
        """The end of a stream, by its writer, by a cancel, or by being forgotten, ends every wait on it."""

        async def finish(stream_id: str) -> None:
            await journal.append(stream_id, [native.done(3, Finish())], epoch=1, first_seq=3)

        async def cancel(stream_id: str) -> None:
            await journal.request_cancel(stream_id, "client")

        for end in (finish, cancel, journal.expire):
            writer = await written(journal, meta(clock), 2)
            waits = await begun(journal, writer.stream_id, 2)
            await end(writer.stream_id)
            await soon(waits)

    async def test_wait_on_an_unknown_stream_returns(self, journal: Journal) -> None:
        """It raises nothing: the read that follows will say that the stream is unknown."""
        await soon(journal.wait("never-was", 0))

    async def test_wake_ends_every_wait_on_its_stream(self, journal: Journal, clock: Clock) -> None:
        """For heartbeats and for shutting down; on a stream that is not there it does nothing."""
        writer = await written(journal, meta(clock), 2)
        waits = await begun(journal, writer.stream_id, 2)
        journal.wake("never-was")
        journal.wake(writer.stream_id)
        await soon(waits)

    async def test_callback_is_a_wait_without_a_task(self, journal: Journal, clock: Clock) -> None:
        """Called once, when there may be more; refused when there is already, so that nothing is missed between."""
        writer = await written(journal, meta(clock), 2)
        called = Called()
        assert not journal.call_when(writer.stream_id, 1, called)
        assert not journal.call_when("never-was", 0, called)
        assert journal.call_when(writer.stream_id, 2, called)
        await writer.say("x")
        await called.soon()
        await writer.say("y")
        await writer.finish()
        assert called.times == 1
        assert not journal.call_when(writer.stream_id, 5, called)

    async def test_callback_comes_at_every_kind_of_end(self, journal: Journal, clock: Clock) -> None:
        """Cancelled, forgotten, woken by hand, or the journal closed."""

        async def cancel(stream_id: str) -> None:
            await journal.request_cancel(stream_id, "client")

        async def wake(stream_id: str) -> None:
            journal.wake(stream_id)

        async def close(_: str) -> None:
            await journal.close()

        for end in (cancel, journal.expire, wake, close):
            writer = await written(journal, meta(clock), 2)
            called = Called()
            assert journal.call_when(writer.stream_id, 2, called)
            await end(writer.stream_id)
            await called.soon()

    async def test_closing_the_journal_wakes_every_wait(self, journal: Journal, clock: Clock) -> None:
        """A process that shuts down finds no reader asleep.  Closing twice is harmless."""
        writer = await written(journal, meta(clock), 2)
        waits = await begun(journal, writer.stream_id, 2)
        await journal.close()
        await soon(waits)
        await journal.close()

    async def test_waiting_reader_sleeps(self, journal: Journal, clock: Clock) -> None:
        """While nothing comes, waits do not return again and again: an idle reader costs nothing."""
        writer = await written(journal, meta(clock), 2)
        woken = 0

        async def idle() -> None:
            nonlocal woken
            while True:
                await journal.wait(writer.stream_id, 2)
                woken += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(idle())
        for _ in range(TURNS):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert woken < TURNS / 10

    async def test_cancelled_wait_leaks_nothing(self, journal: Journal, clock: Clock) -> None:
        """A thousand readers that leave while they wait leave nothing behind, and wake nobody else."""
        writer = await written(journal, meta(clock), 2)
        await abandon_waits(journal, writer.stream_id, 10)  # what a back end sets up once
        before = await futures_alive()
        await abandon_waits(journal, writer.stream_id, 1000)
        assert await futures_alive() < before + 100
        waits = await begun(journal, writer.stream_id, 2)
        await abandon_waits(journal, writer.stream_id, 10)
        await writer.say("x")
        await soon(waits)

    async def test_reader_waiting_through_a_claim_is_served(self, journal: Journal, clock: Clock) -> None:
        """A reader that waits while the stream changes hands is served by the new writer."""
        writer = await written(journal, meta(clock), 2)
        waits = await begun(journal, writer.stream_id, 2)
        state = await journal.claim(writer.stream_id)
        await journal.append(writer.stream_id, tokens(3, ["x"]), epoch=state.epoch, first_seq=3)
        await soon(waits)

    async def test_streams_do_not_wait_for_each_other(self, journal: Journal, clock: Clock) -> None:
        """A hundred streams, each read live while all are written at once: everybody gets all of his own."""
        writers = [await Writer.begin(journal, meta(clock)) for _ in range(100)]

        async def write(writer: Writer) -> None:
            await writer.say("a", "b")
            await writer.finish()

        async def read(writer: Writer) -> None:
            position = 0
            while not (page := await journal.read(writer.stream_id, position)).ends:
                position = page.last_seq
                await journal.wait(writer.stream_id, position)

        verbs: list[Callable[[Writer], Awaitable[Any]]] = [read, write]
        await soon(asyncio.gather(*(verb(writer) for verb in verbs for writer in writers)))


class Called:
    """A callback that counts."""

    def __init__(self) -> None:
        self.times = 0
        self._event = asyncio.Event()

    def __call__(self) -> None:
        self.times += 1
        self._event.set()

    async def soon(self) -> None:
        """Return when it has been called; TimeoutError when it is not."""
        await soon(self._event.wait())


async def begun(journal: Journal, stream_id: str, after: int) -> Awaitable[Any]:
    """Several waits that have begun, as one awaitable."""
    waits = [asyncio.create_task(journal.wait(stream_id, after)) for _ in range(3)]
    await asyncio.sleep(0)
    return asyncio.gather(*waits)


async def abandon_waits(journal: Journal, stream_id: str, count: int) -> None:
    """Begin that many waits on a stream of two records, and cancel them."""
    waits = [asyncio.create_task(journal.wait(stream_id, 2)) for _ in range(count)]
    await asyncio.sleep(0)
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)


async def futures_alive() -> int:
    """Futures and tasks that something still holds."""
    await asyncio.sleep(0)  # the loop lets go of what it has just run
    gc.collect()
    return sum(isinstance(thing, asyncio.Future) for thing in gc.get_objects())
