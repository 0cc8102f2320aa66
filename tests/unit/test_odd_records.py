"""A producer of a library's user may put anything into a record: no journal stumbles over it, for any stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from midstream.codec import native
from midstream.journal import sqlite_commit
from midstream.journal.base import Journal
from midstream.records import Chunk, Finish, Record
from midstream.rules import Bounds
from midstream.testing.clock import ManualClock
from midstream.testing.journal_writer import Writer, meta
from midstream.testing.patience import soon
from tests.journals import new_journal

ODD: list[dict[str, Any]] = [
    {"reasoning": 5},
    {"reasoning": ["a"]},
    {"refusal": {"a": 1}},
    {"choice": [1]},
    {"choice": "0"},
    {"choice": None},
    {"choice": -1},
    {"choice": True},
    {"tool_calls": "none"},
    {"tool_calls": [None, 5, "x", {"index": [0], "id": 7, "function": {"name": 1, "arguments": 2}}]},
    {"finish_reason": {"a": [1]}},
    {"delta": 7},
    {"seq": 99, "done": "maybe"},
]


@pytest_asyncio.fixture(params=["memory", "sqlite"])
async def journal(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Journal]:
    journal = new_journal(request.param, tmp_path, ManualClock(), Bounds(max_stream_records=4))
    await journal.open()
    yield journal
    await journal.close()


@pytest.mark.parametrize("more", ODD, ids=str)
async def test_odd_record_is_kept_evicted_and_folded(
    journal: Journal, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_commit, "LOG_BYTES", 0)  # everything goes to its place in the file at once
    clock = ManualClock()
    told, other = meta(clock), await Writer.begin(journal, meta(clock))
    await journal.create(told, [native.start(told.stream_id, "m")])
    for seq in range(2, 12):
        frame = native.token(seq, Chunk("a", more))
        said = Record.of(frame).json()
        assert (said["seq"], said["delta"], said["done"]) == (seq, "a", False)
        await soon(journal.append(told.stream_id, [frame], epoch=1, first_seq=seq))
        await soon(other.say("b"))
    await soon(journal.append(told.stream_id, [native.done(12, Finish("stop"))], epoch=1, first_seq=12))
    await soon(journal.trim(told.stream_id, 12, None))
    snapshot = await soon(journal.snapshot(told.stream_id))
    assert snapshot.state.status == "done"
    assert snapshot.fold.upto == 11
    await soon(other.finish())
