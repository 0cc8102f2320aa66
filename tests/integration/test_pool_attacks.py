"""The pool under attack, through its real routes: callers that leave, stores that go, requests by the thousand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest
import pytest_asyncio

from midstream.errors import JournalError
from midstream.pool.errors import PoolUnavailable
from midstream.pool.jobs import Jobs
from midstream.pool.shapes import Generation
from midstream.server.app import Gateway
from midstream.server.settings import Settings
from midstream.testing.patience import PATIENCE, soon, until
from tests.gateways import client, wire
from tests.pools import ADA, BOB, MODEL, TEXT, PoolSite, asked, pool_site


@pytest_asyncio.fixture
async def here(tmp_path: Path) -> AsyncIterator[PoolSite]:
    async with pool_site(tmp_path) as running:
        yield running


@contextmanager
def busy(here: PoolSite) -> Iterator[None]:
    """The database's one thread has something else to do."""
    free = Event()
    threads = here.pool.jobs._db._threads
    assert threads is not None
    threads.submit(free.wait, PATIENCE)
    try:
        yield
    finally:
        free.set()


async def test_job_of_a_worker_that_left_while_it_popped_is_another_s_at_once(here: PoolSite) -> None:
    """Its connection was gone before the answer could go out."""
    hand = await here.serving()
    assert (await here.ada.post(f"{TEXT}/async", asked())).status == 202
    connections = here.site.gateway.server.server_state.connections
    body = json.dumps(hand.declared()).encode()
    async with wire(here.site.gateway) as line:
        with busy(here):
            line.request(
                "POST",
                f"{TEXT}/pop",
                f"apikey: {BOB}",
                "Content-Type: application/json",
                f"Content-Length: {len(body)}",
                body=body,
            )
            await until(lambda: here.pool._tasks, "the pop to be under way")
            before = len(connections)
            line.drop()
            await until(lambda: len(connections) < before, "the connection to be gone")
    job = await hand.pop()
    assert await job.finish("Hello") == 20


async def test_worker_ends_what_it_has_while_its_gateway_drains(tmp_path: Path) -> None:
    """Over new connections too: it posts what the open streams are waiting for.  New streams are refused."""
    async with pool_site(tmp_path, drain=PATIENCE) as here, client(here.site.gateway) as another:
        reading, job = await here.begun()
        await job.post("The ")
        draining = asyncio.create_task(here.site.gateway.drain())
        await until(lambda: not here.site.gateway.gateway.ready, "the drain to begin")
        job.http = another.sending(apikey=BOB)
        await job.post("cat ")
        refused = await another.sending(apikey=ADA).post("/v1/stream", {"model": MODEL, "prompt": "Hello"})
        assert refused.status == 503
        assert await job.finish("The cat sat.") == 20
        assert (await reading.end())[0] == "done"
        assert reading.text == "The cat sat."
        await soon(draining)


def test_pool_and_journal_in_one_file_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    """Else the pool's tables stand in it, and no gateway would take it for a journal again."""
    (tmp_path / "link.db").symlink_to(tmp_path / "one.db")
    settings = Settings(journal=f"sqlite:///{tmp_path}/one.db", pool=f"sqlite:///{tmp_path}/link.db")
    with pytest.raises(ValueError, match="a file of its own"):
        Gateway(settings, {})
    assert not (tmp_path / "one.db").exists()


async def test_gateway_that_cannot_recover_its_pool_lets_go_of_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its database went away in the middle of the start: the journal's file is free for the next one."""

    async def away(_: Jobs) -> list[Generation]:
        raise PoolUnavailable

    settings = Settings(journal=f"sqlite:///{tmp_path}/journal.db", pool=f"sqlite:///{tmp_path}/pool.db")
    with monkeypatch.context() as patched:
        patched.setattr(Jobs, "leased_here", away)
        with pytest.raises(JournalError):
            await Gateway(settings, {}).start()
    again = Gateway(settings, {})
    await again.start()
    await again.stop()
