"""The sums of docs/sizing.md are those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream.codec import native
from midstream.journal import open_journal
from midstream.records import FRAME_OVERHEAD, STREAM_OVERHEAD, Chunk, Finish, StreamMeta
from midstream.rules import Bounds
from midstream.testing.clock import ManualClock
from tests.docs.markdown import ROOT, section, table

TEXT = (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")


def frames(tokens: int) -> int:
    """Bytes of the frames of an answer of so many tokens of 5 characters."""
    return sum(len(native.token(seq, Chunk(" word"))) for seq in range(2, tokens + 2))


def in_memory(tokens: int) -> int:
    return frames(tokens) + tokens * FRAME_OVERHEAD


def told(size: int) -> str:
    """A size as the page writes it."""
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 1024:.0f} KiB"


def test_the_frame_on_the_page_is_one_and_has_its_size() -> None:
    """58 + 2 × 4 + 5."""
    frame = native.token(1000, Chunk(" word"))
    assert frame.decode() in TEXT
    assert len(frame) == 58 + 2 * 4 + 5 == 71
    assert 71 + FRAME_OVERHEAD == 112


@pytest.mark.parametrize("row", table(section(TEXT, "Memory journal")), ids=lambda row: row[0])
def test_a_row_of_the_table_is_right(row: list[str]) -> None:
    """Frames and memory of an answer."""
    tokens = int(row[0].split()[0].replace(",", ""))
    assert row[1:] == [told(frames(tokens)), told(in_memory(tokens))]


def test_the_sums_over_all_streams_are_right() -> None:
    """What fits under each bound, and what is kept on a busy day."""
    bounds = Bounds()
    assert f"about {round(bounds.max_stream_bytes * 74_000 / in_memory(74_000), -3):,.0f} such tokens" in TEXT
    assert f"about {round(bounds.max_bytes / in_memory(4_000), -2):,.0f} answers of 4,000 tokens" in TEXT
    assert f"{STREAM_OVERHEAD:,} bytes" in TEXT
    assert f"200 × {in_memory(1_000) / 2**20:.1f} MiB = 20 MiB" in TEXT


async def test_an_answer_at_rest_takes_its_frames_on_disk(tmp_path: Path) -> None:
    """Ten answers of 4,000 tokens, written as they come; the file, once closed, is little more than their frames."""
    clock = ManualClock()
    journal = open_journal(f"sqlite:///{tmp_path}/journal.db", clock, Bounds())
    await journal.open()
    for number in range(10):
        meta = StreamMeta(f"stream-{number}", "ada", "m", clock(), 600.0)
        await journal.create(meta, [native.start(meta.stream_id, "m")])
        for first in range(2, 4002, 400):
            batch = [native.token(seq, Chunk(" word")) for seq in range(first, first + 400)]
            await journal.append(meta.stream_id, batch, epoch=1, first_seq=first)
        await journal.append(meta.stream_id, [native.done(4002, Finish("stop"))], epoch=1, first_seq=4002)
    await journal.close()
    assert 10 * frames(4000) < (tmp_path / "journal.db").stat().st_size < 10 * frames(4000) * 1.1
