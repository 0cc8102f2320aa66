"""The journal contract over every back end there is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from midstream.journal.base import Journal
from midstream.rules import Bounds
from midstream.testing.clock import ManualClock
from midstream.testing.journal_contract import JournalContract, MakeJournal, Reopen
from tests.journals import BACK_ENDS, new_journal


class Stores:
    """Journals that a test has opened, each with the directory and the bounds it was made with."""

    def __init__(self, back_end: str, root: Path, clock: ManualClock) -> None:
        self._back_end = back_end
        self._root = root
        self._clock = clock
        self._made: dict[int, tuple[Journal, Path, Bounds | None]] = {}

    async def make(self, bounds: Bounds | None = None) -> Journal:
        directory = self._root / f"store-{len(self._made)}"
        directory.mkdir()
        return await self._open(directory, bounds)

    async def reopen(self, journal: Journal) -> Journal:
        _, directory, bounds = self._made[id(journal)]
        await journal.close()
        return await self._open(directory, bounds)

    async def _open(self, directory: Path, bounds: Bounds | None) -> Journal:
        journal = new_journal(self._back_end, directory, self._clock, bounds)
        await journal.open()
        self._made[id(journal)] = (journal, directory, bounds)
        return journal

    async def close(self) -> None:
        async with AsyncExitStack() as stack:
            for journal, _, _ in self._made.values():
                stack.push_async_callback(journal.close)


class TestJournal(JournalContract):
    """`JournalContract` is the suite; here stand only its fixtures."""

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock()

    @pytest_asyncio.fixture(params=BACK_ENDS)
    async def stores(self, request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> AsyncIterator[Stores]:
        stores = Stores(request.param, tmp_path, clock)
        yield stores
        await stores.close()

    @pytest.fixture
    def make_journal(self, stores: Stores) -> MakeJournal:
        return stores.make

    @pytest.fixture
    def reopen(self, stores: Stores) -> Reopen:
        return stores.reopen
