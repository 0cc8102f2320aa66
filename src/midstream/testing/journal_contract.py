"""The journal contract: what every store of records must do, as one suite.  It ships for writers of back ends.

    class TestMyJournal(JournalContract):
        @pytest.fixture
        def clock(self): ...            # the clock the journals are made with: `clock()`, `clock.advance(seconds)`
        @pytest_asyncio.fixture
        async def make_journal(self, clock): ...   # `await make_journal(bounds)`: opened, on an empty store of its own
        @pytest_asyncio.fixture
        async def reopen(self): ...     # `await reopen(journal)`: closed, and opened again on the same store

The fixtures may as well stand in the module or a conftest.  They close what they made; a test may have closed it
before, so closing twice must be harmless.  A back end that goes by the clock of its server supplies a `clock` of the
same shape that lets the time pass there.

It needs pytest and pytest-asyncio, in either of its modes; `pytest.register_assert_rewrite("midstream.testing")` in the
conftest makes failures say what was compared.

Nothing is skipped: what a back end does not promise (`traits`) is asserted to be missing.  Nothing looks inside a back
end, or expects a verb to be done without suspending.  The laws are those of PROTOCOL.md, cited as R1 to R10.
"""

from __future__ import annotations

import pytest
import pytest_asyncio

from midstream.journal.base import Journal
from midstream.testing.journal_appending import AppendingLaws
from midstream.testing.journal_dropping import DroppingLaws
from midstream.testing.journal_living import LivingLaws
from midstream.testing.journal_naming import NamingLaws
from midstream.testing.journal_reading import ReadingLaws
from midstream.testing.journal_waiting import WaitingLaws
from midstream.testing.journal_writer import Clock, MakeJournal, Reopen

__all__ = ["Clock", "JournalContract", "MakeJournal", "Reopen"]


@pytest.mark.asyncio
class JournalContract(AppendingLaws, ReadingLaws, WaitingLaws, DroppingLaws, NamingLaws, LivingLaws):
    """Subclass it beside the fixtures `clock`, `make_journal` and `reopen`."""

    @pytest_asyncio.fixture
    async def journal(self, make_journal: MakeJournal) -> Journal:
        """An opened journal under the default bounds."""
        return await make_journal()
