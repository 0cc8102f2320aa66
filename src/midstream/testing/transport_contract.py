"""The transport contract: what every way to follow a stream must do, as one suite.  It ships for writers of transports.

    class TestMyTransport(TransportContract):
        @pytest.fixture
        def connect(self): ...         # `async with connect(gateway, key) as dial:` one owner, connected to it
        @pytest.fixture
        def journal_url(self): ...     # the journal that the gateway is to keep records in

A transport supplies a `Dial`: it dials, and decodes what comes; everything else is here.  `sse_dial.py` is one.  A
transport with a server of its own starts it in `connect`, over `gateway.streams`.

Nothing is skipped: what a wire does not show (`Wire`) is asserted to be missing.  The tests look at the gateway's core,
never at a transport's code.  The laws are those of PROTOCOL.md, cited as I1 to I9 and R1 to R10.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest_asyncio

from midstream.server.settings import Settings
from midstream.testing.gateway import RunningGateway
from midstream.testing.transport_delivery import DeliveryLaws
from midstream.testing.transport_dial import KEYS, Connect, Dial, Heard, MakeStage, Reader, Refused, Stage, Wire, staged
from midstream.testing.transport_living import LivingLaws
from midstream.testing.transport_refusals import RefusalLaws

__all__ = ["Connect", "Dial", "Heard", "MakeStage", "Reader", "Refused", "Stage", "TransportContract", "Wire"]


class TransportContract(DeliveryLaws, RefusalLaws, LivingLaws):
    """Subclass it beside the fixtures `connect` and `journal_url`."""

    @pytest_asyncio.fixture
    async def make_stage(self, connect: Connect, journal_url: str, tmp_path: Path) -> AsyncIterator[MakeStage]:
        """`await make_stage(**settings)`: a gateway with these settings; one in each test, as it may hold a file."""
        keys = tmp_path / "keys"
        keys.write_text(KEYS)
        async with AsyncExitStack() as stack:

            async def make(**settings: Any) -> Stage:
                gateway = RunningGateway(Settings(journal=journal_url, keys_file=str(keys), **settings))
                return await stack.enter_async_context(staged(gateway, connect))

            yield make

    @pytest_asyncio.fixture
    async def stage(self, make_stage: MakeStage) -> Stage:
        """A gateway with the default settings."""
        return await make_stage()
