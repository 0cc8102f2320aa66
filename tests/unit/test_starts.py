"""A producer begins after the readers that came with it; until then its stream can be cancelled like any other."""

from __future__ import annotations

import pytest

from midstream import rules
from midstream.codec import native
from midstream.errors import OutOfSequence, StaleWriter, StreamEnded
from midstream.journal.memory import MemoryJournal
from midstream.records import Chunk, Finish, Frame, Producer
from midstream.rules import Counters
from midstream.streams import Streams
from midstream.testing.clock import ManualClock
from midstream.testing.patience import until


async def test_stream_cancelled_before_its_turn_never_begins() -> None:
    """Its upstream is not asked, and nothing of it is left over."""
    clock, begun = ManualClock(), 0
    streams = Streams(MemoryJournal(clock), clock)
    await streams.start()

    async def answer(_: str) -> Producer:
        nonlocal begun
        begun += 1
        yield Finish("stop")

    opened = [await streams.open("ada", "m", answer) for _ in range(3)]
    assert begun == 0
    stopped = opened[1].state.meta.stream_id
    assert (await streams.cancel(stopped, "ada")).status == "cancelled"
    await until(lambda: not streams.writers, "all of them to end")
    assert begun == 2
    assert (await streams.state(stopped, "ada")).highest_seq == 2
    await streams.close()


@pytest.mark.parametrize("texts", [["a"], ["a", "b"], ["\nevent: token\n"], []])
def test_append_counts_in_what_is_admitted(texts: list[str]) -> None:
    """One token, several, and the end: as `admit` and `appended` have it (R2, R3, R4)."""

    def batch(first: int) -> list[Frame]:
        tokens = [native.token(first + at, Chunk(text)) for at, text in enumerate(texts)]
        return tokens or [native.done(first, Finish("stop"))]

    at_once, apart = Counters(), Counters()
    frames = batch(1)
    assert rules.admit(apart, frames, 1, 1)
    size = rules.appended(apart, frames, 5.0)
    assert rules.append(at_once, frames, 1, 1, lambda: 5.0) == size == rules.weight(frames)
    assert at_once == apart
    assert rules.append(at_once, list(frames), 1, 1, lambda: 6.0) == 0
    assert at_once == apart
    with pytest.raises(StaleWriter):
        rules.append(at_once, batch(len(frames) + 1), 2, len(frames) + 1, lambda: 6.0)
    with pytest.raises(OutOfSequence if texts else StreamEnded):
        rules.append(at_once, batch(len(frames) + 2), 1, len(frames) + 2, lambda: 6.0)
    assert at_once == apart
