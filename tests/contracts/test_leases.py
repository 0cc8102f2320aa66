"""The contract of leases over every back end there is."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from midstream.pool.leases import Leases
from midstream.testing.lease_contract import Another, Clock, LeaseContract, MakeLeases
from tests.leases import BACK_ENDS, LeaseStore


class TestLeases(LeaseContract):
    """`LeaseContract` is the suite; here stand only its fixtures."""

    @pytest_asyncio.fixture(params=BACK_ENDS)
    async def store(self, request: pytest.FixtureRequest) -> AsyncIterator[LeaseStore]:
        store = LeaseStore(request.param)
        yield store
        await store.close()

    @pytest.fixture
    def clock(self, store: LeaseStore) -> Clock:
        return store.clock

    @pytest.fixture
    def make_leases(self, store: LeaseStore) -> MakeLeases:
        return store.open

    @pytest.fixture
    def another(self, store: LeaseStore) -> Another:
        async def opened(leases: Leases) -> Leases:
            return await store.open()

        return opened
