"""Clients of a gateway, which mend dropped connections by themselves: `AsyncClient` and, blocking, `Client`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from midstream.client.answers import GaveUp, UnexpectedAnswer, Unreachable
from midstream.client.steps import Lost, Patience, Record, Resumed
from midstream.client.sync import Client, Stream
from midstream.cursor import Cursor

if TYPE_CHECKING:
    from midstream.client.aio import AsyncClient, AsyncStream

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Client",
    "Cursor",
    "GaveUp",
    "Lost",
    "Patience",
    "Record",
    "Resumed",
    "Stream",
    "UnexpectedAnswer",
    "Unreachable",
]


def __getattr__(name: str) -> Any:
    # aiohttp takes 0.2 s to import, which a blocking program such as the terminal's should not wait for.
    if name in ("AsyncClient", "AsyncStream"):
        from midstream.client import aio

        return getattr(aio, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
