"""The SQLite journal and the memory journal, told the same, say the same; also when the file is opened anew."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.codec import native
from midstream.errors import MidstreamError
from midstream.journal import sqlite, sqlite_commit
from midstream.journal.base import Journal
from midstream.journal.memory import MemoryJournal
from midstream.journal.sqlite import SqliteJournal
from midstream.records import Chunk, Finish, Frame
from midstream.rules import Bounds
from midstream.testing.clock import ManualClock
from midstream.testing.journal_writer import answers, meta, read_all

BOUNDS = Bounds(max_stream_records=9, max_stream_bytes=3000, max_bytes=9000)
IDS = ("s0", "s1", "s2")
STREAM = st.integers(0, len(IDS) - 1)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("create"), STREAM),
        st.tuples(st.just("append"), STREAM, st.integers(1, 4), st.integers(0, 150)),
        st.tuples(st.just("finish"), STREAM),
        st.tuples(st.just("ack"), STREAM, st.integers(0, 12), st.none() | st.integers(0, 12)),
        st.tuples(st.just("claim"), STREAM),
        st.tuples(st.just("cancel"), STREAM),
        st.tuples(st.just("touch"), STREAM),
        st.tuples(st.just("expire"), STREAM),
        st.tuples(st.just("sweep"), st.integers(0, 400)),
        st.tuples(st.just("reopen")),
    ),
    min_size=8,
    max_size=40,
)


@pytest.fixture(autouse=True)
def _everything_soon_goes_to_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments, folds and cold reads, which otherwise take megabytes, after a few records."""
    monkeypatch.setattr(sqlite_commit, "LOG_BYTES", 400)
    monkeypatch.setattr(sqlite_commit, "LOOSE_BYTES", 200)
    monkeypatch.setattr(sqlite, "WARM_BYTES", 500)
    monkeypatch.setattr(sqlite, "WARM_STREAM_BYTES", 400)


class Pair:
    """One journal of each kind, and the clock of both."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = ManualClock()
        self.memory = MemoryJournal(self.clock, BOUNDS)
        self.sqlite = SqliteJournal(str(path), self.clock, BOUNDS)

    async def do(self, step: tuple[Any, ...]) -> None:
        verb, *facts = step
        if verb == "reopen":
            await self.reopen()
            return
        if verb == "sweep":
            self.clock.advance(facts[0])
            assert await self.memory.sweep() == await self.sqlite.sweep()
            return
        said = [await answer(told(journal, self.clock, verb, *facts)) for journal in (self.memory, self.sqlite)]
        assert said[0] == said[1]

    async def reopen(self) -> None:
        """What a new process finds: streams without a writer have ended, as they now do in memory too."""
        await self.sqlite.close()
        self.sqlite = SqliteJournal(str(self.path), self.clock, BOUNDS)
        await self.sqlite.open()
        for state in await self.memory.list("ada"):
            if not state.ended:
                epoch = (await self.memory.claim(state.meta.stream_id)).epoch
                last = (await self.sqlite.read(state.meta.stream_id, state.highest_seq)).frames
                assert len(last) == 1
                await self.memory.append(state.meta.stream_id, last, epoch=epoch, first_seq=state.highest_seq + 1)

    async def compare(self) -> None:
        listed = [await journal.list("ada") for journal in (self.memory, self.sqlite)]
        assert listed[0] == listed[1]
        assert self.memory.retained_bytes() == self.sqlite.retained_bytes()
        for state in listed[0]:
            stream_id, after = state.meta.stream_id, state.oldest_retained_seq - 1
            pages = [await read_all(journal, stream_id, after, limit=3) for journal in (self.memory, self.sqlite)]
            assert pages[0] == pages[1]
            both = [await journal.snapshot(stream_id) for journal in (self.memory, self.sqlite)]
            assert both[0] == both[1]
            assert answers(both[0]) == answers(both[1])
        assert self.memory.retained_bytes() == self.sqlite.retained_bytes()


async def told(journal: Journal, clock: ManualClock, verb: str, at: int, *facts: Any) -> Any:
    stream_id = IDS[at]
    if verb == "create":
        start = native.start(stream_id, "m")
        return await journal.create(meta(clock, stream_id), [start], [f"ada/session/{stream_id}"])
    state = await journal.state(stream_id)
    next_seq = state.highest_seq + 1
    frames: list[Frame] = []
    match verb:
        case "append":
            frames = [native.token(next_seq + i, Chunk(f"{i}" * facts[1])) for i in range(facts[0])]
        case "finish":
            frames = [native.done(next_seq, Finish("stop"))]
        case "ack":
            return await journal.trim(stream_id, *facts)
        case "cancel":
            return await journal.request_cancel(stream_id, "client")
        case _:
            return await getattr(journal, verb)(stream_id)
    return await journal.append(stream_id, frames, epoch=state.epoch, first_seq=next_seq)


async def answer(verb: Any) -> Any:
    try:
        return await verb
    except MidstreamError as refusal:
        return type(refusal), refusal.facts


@settings(max_examples=60)
@given(steps=STEPS, looking=st.booleans())
def test_a_file_tells_what_memory_tells(steps: list[tuple[Any, ...]], looking: bool) -> None:
    """Every verb answers alike, and every state, page and fold is equal, in the end and (`looking`) all along."""

    async def run(path: Path) -> None:
        pair = Pair(path)
        await pair.sqlite.open()
        try:
            for step in steps:
                await pair.do(step)
                if looking:
                    await pair.compare()
            await pair.compare()
            await pair.reopen()
            await pair.compare()
        finally:
            await pair.sqlite.close()

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(Path(directory) / "journal.db"))
