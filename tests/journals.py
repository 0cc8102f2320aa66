"""The back ends that journal tests run over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from hashlib import sha1
from pathlib import Path
from typing import Any, TypeVar

from midstream.journal import open_journal
from midstream.journal.base import Journal
from midstream.rules import Bounds
from midstream.testing.clock import ManualClock
from tests.valkeys import clustered, shared

T = TypeVar("T")

BACK_ENDS = ("memory", "sqlite", "valkey", "valkey-cluster")


def new_journal(back_end: str, directory: Path, clock: Callable[[], float], bounds: Bounds | None = None) -> Journal:
    """A journal not opened yet; two of one directory are on one store, where the back end has one."""
    if back_end.startswith("valkey"):
        server = shared() if back_end == "valkey" else clustered()
        return open_journal(server.url(prefix=sha1(str(directory).encode()).hexdigest()), clock, bounds)
    urls = {"memory": "memory:", "sqlite": f"sqlite:///{directory}/journal.db"}
    return open_journal(urls[back_end], clock, bounds)


@contextmanager
def running(
    back_end: str, directory: Path, bounds: Bounds | None = None
) -> Iterator[tuple[Callable[[Coroutine[Any, Any, T]], T], Journal]]:
    """An opened journal, and what runs coroutines on its loop: for tests that hypothesis calls many times."""
    with asyncio.Runner() as runner:
        journal = new_journal(back_end, directory, ManualClock(), bounds)
        runner.run(journal.open())
        try:
            yield runner.run, journal
        finally:
            runner.run(journal.close())
