"""The transport contract over every transport and every journal there is."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from midstream.testing import connect_dial, grpc_dial, sse_dial, ws_dial
from midstream.testing.transport_contract import Connect, TransportContract
from tests import narrow_dial
from tests.valkeys import shared

JOURNALS = ("memory", "sqlite", "valkey")


@pytest.fixture(params=JOURNALS)
def journal_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    urls = {
        "memory": "memory:",
        "sqlite": f"sqlite:///{tmp_path}/journal.db",
        "valkey": shared().url(f"t{uuid4().hex}"),
    }
    return urls[request.param]


class TestSse(TransportContract):
    """`TransportContract` is the suite; here stands only how to dial."""

    @pytest.fixture
    def connect(self) -> Connect:
        return sse_dial.connect


class TestWebSocket(TransportContract):
    """One socket per reader; several streams on one are tests/integration/test_websocket.py."""

    @pytest.fixture
    def connect(self) -> Connect:
        return ws_dial.connect


class TestGrpc(TransportContract):
    """grpcio's own client, on a port of its own."""

    @pytest.fixture
    def connect(self) -> Connect:
        return grpc_dial.connect


class TestConnect(TransportContract):
    """With JSON, as browsers do; on the HTTP port."""

    @pytest.fixture
    def connect(self) -> Connect:
        return connect_dial.connect


class TestGrpcWeb(TransportContract):
    """With protobuf's binary form; on the HTTP port."""

    @pytest.fixture
    def connect(self) -> Connect:
        return connect_dial.connect_web


class TestNarrow(TransportContract):
    """The contract can be kept by a wire that shows none of what `Wire` lets it leave out."""

    @pytest.fixture
    def connect(self) -> Connect:
        return narrow_dial.connect

    @pytest.fixture
    def journal_url(self) -> str:
        return "memory:"
