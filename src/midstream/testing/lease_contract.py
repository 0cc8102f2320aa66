"""The contract of leases and progress: what every store of them must do, as one suite.

    class TestMyLeases(LeaseContract):
        @pytest.fixture
        def clock(self): ...            # the clock the leases go by: `clock()`, `clock.advance(seconds)`
        @pytest_asyncio.fixture
        async def make_leases(self, clock): ...   # `await make_leases(terms)`: opened, on an empty store of its own
        @pytest_asyncio.fixture
        async def another(self): ...    # `await another(leases)`: another gateway's, opened on the same store

The fixtures may as well stand in the module or a conftest.  They close what they made; a test may have closed it
before.  A back end that goes by its server's clock supplies a `clock` of the same shape that lets the time pass there.

Nothing is skipped: what a back end does not promise (`shared`) is asserted to be missing.
"""

from __future__ import annotations

import pytest
import pytest_asyncio

from midstream.pool.leases import Leases, Terms
from midstream.testing.lease_living import FlagLaws, LivingLaws
from midstream.testing.lease_posting import PostingLaws
from midstream.testing.lease_reading import ReadingLaws, SignalLaws
from midstream.testing.lease_worker import Another, Clock, MakeLeases

__all__ = ["Another", "Clock", "LeaseContract", "MakeLeases"]


@pytest.mark.asyncio
class LeaseContract(PostingLaws, LivingLaws, FlagLaws, ReadingLaws, SignalLaws):
    """Subclass it beside the fixtures `clock`, `make_leases` and `another`."""

    @pytest_asyncio.fixture
    async def leases(self, make_leases: MakeLeases) -> Leases:
        """Opened, under the default terms."""
        return await make_leases(Terms())
