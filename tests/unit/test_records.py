"""A record is its frame, and comes out of it unchanged."""

from __future__ import annotations

import sys

import pytest

from midstream.codec import native
from midstream.records import FRAME_OVERHEAD, Chunk, Finish, Page, Record, StreamMeta
from midstream.rules import Counters

FRAMES = [
    native.start("abc", "m"),
    native.token(2, Chunk("a\r\nid: 9\n\nevent: done\x00\u2028")),
    native.token(10**15, Chunk("", {"reasoning": "r", "tool_calls": [{"index": 0}]})),
    native.done(3, Finish("stop", {"total_tokens": 3})),
    native.cancelled(2**53 - 1, "client"),
]


@pytest.mark.parametrize("frame", FRAMES)
def test_record_of_a_frame_round_trips(frame: bytes) -> None:
    """Seq, event and JSON are cut out, and make the same bytes again."""
    record = Record.of(frame)
    assert record.frame == frame
    assert Record.of(record.frame) == record


@pytest.mark.parametrize("frame", FRAMES)
def test_seq_travels_twice(frame: bytes) -> None:
    """In the frame's `id` and in the JSON, the same number."""
    record = Record.of(frame)
    assert record.json()["seq"] == record.seq


@pytest.mark.parametrize("frame", FRAMES)
def test_a_frame_is_three_lines_and_an_empty_one(frame: bytes) -> None:
    """Nothing in a text can begin a line of its own: no CR, LF or NUL survives in the JSON."""
    lines = frame.split(b"\n")
    assert [line.partition(b": ")[0] for line in lines] == [b"id", b"event", b"data", b"", b""]
    assert b"\r" not in frame
    assert b"\x00" not in frame


def test_overhead_is_what_a_frame_costs_beyond_its_bytes() -> None:
    """The header of a bytes object, and its pointer in a list."""
    assert sys.getsizeof(b"x" * 100) + 8 == 100 + FRAME_OVERHEAD


@pytest.mark.parametrize(
    ("status", "last", "highest", "ends"),
    [("open", 5, 5, False), ("done", 5, 5, True), ("done", 4, 5, False), ("failed", 5, 5, True)],
)
def test_page_ends_with_the_terminal_record(status: str, last: int, highest: int, ends: bool) -> None:
    """Being the newest is not enough, nor is the status alone."""
    assert Page([], last, highest, 1, status).ends is ends  # type: ignore[arg-type]


def test_page_parses_its_records() -> None:
    """For transports that do not send frames."""
    assert Page(FRAMES[:2], 2, 2, 1, "open").records() == [Record.of(frame) for frame in FRAMES[:2]]


def test_state_counts_what_is_retained() -> None:
    """From the oldest to the highest; none when all was acked."""
    meta = StreamMeta("abc", "ada", "m", 0.0, 600.0)
    assert Counters(highest=9, oldest=5).state(meta).retained_records == 5
    assert Counters(highest=9, oldest=10).state(meta).retained_records == 0
    assert not Counters(highest=9).state(meta).ended
    assert Counters(status="failed").state(meta).ended
