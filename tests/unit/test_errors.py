"""Every condition is one class with one stable code, its facts, and what the caller should do."""

from __future__ import annotations

import pytest

from midstream import errors
from midstream.errors import (
    Busy,
    CursorAhead,
    CursorExpired,
    MidstreamError,
    OutOfSequence,
    ProducerFailed,
    StaleWriter,
)


def classes(root: type[MidstreamError] = MidstreamError) -> list[type[MidstreamError]]:
    """All subclasses, at any depth."""
    return [found for child in root.__subclasses__() for found in (child, *classes(child))]


BRANCHES = [errors.RequestError, errors.PositionError, Busy, errors.WriterError, errors.JournalError]
LEAVES = [leaf for branch in BRANCHES for leaf in classes(branch)]


def test_tree_in_the_docstring_is_the_tree() -> None:
    """Who reads the file's head has seen every class."""
    assert errors.__doc__ is not None
    drawn = set(errors.__doc__.replace("·", " ").split())
    assert {one.__name__ for one in classes() if one.__module__ == errors.__name__} <= drawn


def test_every_leaf_has_a_code_of_its_own() -> None:
    """Code and class are one to one, so that one table maps each code."""
    assert all("code" in vars(leaf) for leaf in LEAVES)
    codes = [leaf.code for leaf in LEAVES]
    assert len(set(codes)) == len(codes)
    assert MidstreamError.code not in codes


@pytest.mark.parametrize(
    ("branch", "action"),
    [(errors.RequestError, "fix"), (errors.PositionError, "restart"), (Busy, "retry"), (errors.WriterError, "stop")],
)
def test_branch_says_what_to_do(branch: type[MidstreamError], action: str) -> None:
    """The kind of error decides, but for a stream that is gone: no mending brings it back."""
    for leaf in classes(branch):
        assert leaf.action == ("stop" if leaf is errors.UnknownStream else action)


def test_facts_go_beside_the_code() -> None:
    """Facts are what goes on the wire; the message is for people and holds them too."""
    assert CursorExpired(812).facts == {"oldest_available": 812}
    assert CursorExpired(None).facts == {"oldest_available": None}
    assert CursorAhead(640).facts == {"highest_seq": 640}
    assert "640" in str(CursorAhead(640))
    assert OutOfSequence(expected=5, got=9).facts == {"expected": 5}
    assert "5" in str(OutOfSequence(expected=5, got=9))
    assert "9" in str(OutOfSequence(expected=5, got=9))
    assert StaleWriter(3).facts == {"epoch": 3}


def test_busy_says_when_to_come_back() -> None:
    """In whole seconds, as `Retry-After` has them."""
    assert Busy().retry_after == 1
    assert errors.OutOfSpace("full", 10, limit=5).retry_after == 10
    assert errors.OutOfSpace("full", 10, limit=5).facts == {"limit": 5}


def test_failure_of_a_producer_keeps_what_its_record_will_say() -> None:
    """Code, message, and whether trying again may help; more facts stand beside them."""
    failure = ProducerFailed("upstream_error", "model is loading", retryable=True, status=503)
    assert (failure.failure, failure.detail, failure.retryable) == ("upstream_error", "model is loading", True)
    assert failure.facts == {"status": 503}


def test_message_is_never_empty() -> None:
    """An error without detail still says its code in a log."""
    assert str(errors.UnknownStream()) == "unknown_stream"
    assert str(errors.UnknownStream("no stream x")) == "no stream x"
