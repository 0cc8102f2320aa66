"""Resumable token streams for LLM inference.

Every token of an answer is kept in a sequenced journal, so that a reader that drops picks up at the exact token.
`midstream serve` is a gateway in front of any OpenAI-compatible endpoint; `Midstream` puts the same into an ASGI app of
your own; `midstream.client` reads streams; `midstream.testing` has what tests need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from midstream.cursor import Cursor
from midstream.errors import MidstreamError, ProducerFailed
from midstream.records import Chunk, Finish, Record
from midstream.rules import Bounds

if TYPE_CHECKING:
    from midstream.library import Midstream
    from midstream.streams import Limits

__all__ = [
    "Bounds",
    "Chunk",
    "Cursor",
    "Finish",
    "Limits",
    "Midstream",
    "MidstreamError",
    "ProducerFailed",
    "Record",
]


def __getattr__(name: str) -> Any:
    """The parts that bring a web framework along, when they are first asked for: the terminal client needs none."""
    if name == "Midstream":
        from midstream.library import Midstream

        return Midstream
    if name == "Limits":
        from midstream.streams import Limits

        return Limits
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
