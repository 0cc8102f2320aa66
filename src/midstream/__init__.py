"""Resumable token streams for LLM inference.

Every token of an answer is kept in a sequenced journal, so that a reader that drops picks up at the exact token.
`midstream serve` is a gateway in front of any OpenAI-compatible endpoint; `Midstream` puts the same into an ASGI app of
your own; `midstream.client` reads streams; `midstream.testing` has what tests need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from midstream.admission import Limits
from midstream.cursor import Cursor
from midstream.errors import MidstreamError, ProducerFailed
from midstream.records import Chunk, Finish, Record
from midstream.rules import Bounds

if TYPE_CHECKING:
    from midstream.library import Midstream

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
    """The part that brings a web framework along, when it is first asked for: the terminal client needs none."""
    if name == "Midstream":
        from midstream.library import Midstream

        return Midstream
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
