"""What PROTOCOL.md says of the worker pool is what the code does."""

from __future__ import annotations

import re
from collections.abc import Iterator

from midstream import wire
from midstream.pool import errors
from midstream.pool.errors import PoolError
from tests.docs.markdown import ROOT, section, table

TEXT = section((ROOT / "PROTOCOL.md").read_text(encoding="utf-8"), "23. Pool")


def leaves(kind: type[PoolError] = PoolError) -> Iterator[type[PoolError]]:
    for child in kind.__subclasses__():
        yield child
        yield from leaves(child)


def said(under: str) -> str:
    """What stands under a heading, as one line."""
    return " ".join(section(TEXT, under).split())


def test_every_refusal_has_the_status_of_the_code() -> None:
    """Of every refusal that a caller can meet, and of no other."""
    told = {
        (rc, int(status))
        for status, cell, _ in table(section(TEXT, "Errors"))
        for rc in re.findall(r"`([A-Z]\w+)`", cell)
    }
    assert told == {(kind.rc, kind.status) for kind in leaves() if kind is not errors.PoolUnusable}


def test_routes_are_those_of_the_code() -> None:
    """The paths that workers and requesters call."""
    told = {path for cell, *_ in table(section(TEXT, "Routes")) for path in re.findall(r"`[A-Z]+ (/\S+)`", cell)}
    verbs = {f"{wire.POOL_TEXT_PATH}/{verb}" for verb in ("async", "status/{id}", "pop", "submit")}
    assert told == verbs | {*wire.POOL_PROGRESS_PATHS, wire.POOL_USER_PATH}


def test_bounds_are_those_of_the_code() -> None:
    """Of what a request asks for, of what a worker declares, and of what it posts."""
    (least, most), (narrowest, widest) = wire.POOL_LENGTHS, wire.POOL_CONTEXTS
    requester, worker = said("A requester"), said("A worker")
    assert f"`max_length` {least}–{most:,} " in requester
    assert f"`max_context_length` {narrowest}–{widest:,} " in requester
    assert f"`threads` (1–{wire.POOL_MOST_THREADS})" in worker
    assert f"over {wire.POOL_MAX_BATCHES:,} batches, or {wire.POOL_BYTES_PER_TOKEN} bytes" in worker


def test_times_are_those_of_the_code() -> None:
    """Of a lease, of what was posted, and of a request that has ended."""
    assert f"for {wire.POOL_LEASE_TERM} seconds from its last post" in said("Words")
    assert f"more than {wire.POOL_REQUEST_KEPT // 60} minutes ago" in said("Errors")
    kept, entries = wire.POOL_PROGRESS_TERM, wire.POOL_PROGRESS_KEPT
    assert f"kept for {kept} seconds after its last batch, about {entries:,} batches" in said(
        "From progress to the stream"
    )
