"""What a generation costs, and that a transfer leaves the sum at zero."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.pool import settlement

lengths = st.integers(0, 100_000)


@pytest.mark.parametrize(
    ("chars", "max_length", "tokens"),
    [
        (0, 512, 20),  # the floor
        (80, 512, 20),
        (81, 512, 21),  # a part of a token counts
        (84, 512, 21),
        (85, 512, 22),
        (10_000, 512, 512),  # never more than was asked for
        (0, 16, 16),  # not even by the floor
        (0, 0, 0),
    ],
)
def test_four_characters_are_a_token_within_floor_and_what_was_asked_for(
    chars: int, max_length: int, tokens: int
) -> None:
    assert settlement.tokens(chars, max_length) == tokens


@given(lengths, lengths, lengths)
def test_more_output_is_never_paid_less(chars: int, more: int, max_length: int) -> None:
    assert settlement.tokens(chars, max_length) <= settlement.tokens(chars + more, max_length) <= max_length


@pytest.mark.parametrize(("chars", "max_length"), [(-1, 10), (1, -10)])
def test_there_is_no_negative_output(chars: int, max_length: int) -> None:
    with pytest.raises(ValueError, match="no output has"):
        settlement.tokens(chars, max_length)


@given(st.text(), st.text(), lengths)
def test_a_transfer_sums_to_zero(payer: str, payee: str, units: int) -> None:
    postings = settlement.transfer("g", payer, payee, units)
    assert sum(posting.units for posting in postings) == 0
    assert [posting.side for posting in postings] == ["debit", "credit"]
    assert sum(change for _, change in settlement.changes(postings)) == 0


def test_accounts_are_taken_in_one_order_whoever_pays() -> None:
    there = settlement.changes(settlement.transfer("g", "alice", "bob", 5))
    back = settlement.changes(settlement.transfer("h", "bob", "alice", 5))
    assert there == [("alice", -5), ("bob", 5)]
    assert back == [("alice", 5), ("bob", -5)]


def test_who_pays_himself_is_changed_once_and_by_nothing() -> None:
    assert settlement.changes(settlement.transfer("g", "alice", "alice", 5)) == [("alice", 0)]
