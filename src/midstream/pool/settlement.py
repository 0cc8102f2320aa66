"""What a generation costs, and who pays whom.  Pure: no database, no clock.

One unit per token, counted in characters, so that every gateway comes to the same sum whatever the model's tokenizer.
A transfer is two postings that sum to zero: the requester pays, the worker's owner is paid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from midstream.wire import POOL_CHARS_PER_TOKEN, POOL_FLOOR_TOKENS

Side = Literal["debit", "credit"]


def tokens(chars: int, max_length: int) -> int:
    """Tokens that are paid for `chars` characters of output: at least the floor, since a prompt read is work too, but
    never more than were asked for.

    Raises ValueError where one of the two is negative.
    """
    if chars < 0 or max_length < 0:
        raise ValueError(f"no output has {chars} characters of at most {max_length} tokens")
    return min(max_length, max(POOL_FLOOR_TOKENS, -(-chars // POOL_CHARS_PER_TOKEN)))


@dataclass(frozen=True, slots=True)
class Posting:
    """One side of a transfer: `units` is negative for the one who pays."""

    generation: str
    side: Side
    owner: str
    units: int


def transfer(generation: str, payer: str, payee: str, units: int) -> tuple[Posting, Posting]:
    """The two postings for one generation.  Their sum is zero."""
    return Posting(generation, "debit", payer, -units), Posting(generation, "credit", payee, units)


def changes(postings: tuple[Posting, ...]) -> list[tuple[str, int]]:
    """What the postings change, by owner: (owner, units), each owner once.

    Sorted, since two transactions that take the same two accounts in different orders would wait for each other.
    """
    sums: dict[str, int] = {}
    for posting in postings:
        sums[posting.owner] = sums.get(posting.owner, 0) + posting.units
    return sorted(sums.items())
