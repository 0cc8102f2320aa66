"""Shared fixtures.  `here` is in front of an upstream that misbehaves on demand, or what a module says it is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from midstream.testing.transport_dial import ADA, BOB, KEYS
from midstream.testing.upstream import FAULTS, MisbehavingUpstream
from tests.gateways import Http, Site, site


@pytest_asyncio.fixture
async def upstream() -> AsyncIterator[MisbehavingUpstream]:
    async with MisbehavingUpstream(FAULTS) as running:
        yield running


@pytest_asyncio.fixture
async def here(upstream: MisbehavingUpstream) -> AsyncIterator[Site]:
    async with site(upstream=(upstream.url,)) as running:
        yield running


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(KEYS)
    return path


@pytest.fixture
def ada(here: Site) -> Http:
    return here.http.keyed(ADA)


@pytest.fixture
def bob(here: Site) -> Http:
    return here.http.keyed(BOB)
