"""A `--journal` URL names a back end, or says what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream.journal import open_journal
from midstream.testing.clock import ManualClock
from midstream.testing.journal_writer import Writer, meta


async def test_memory_is_a_journal_that_promises_little() -> None:
    """`memory:` survives nothing and says so."""
    journal = open_journal("memory:", ManualClock())
    assert (journal.traits.name, journal.traits.durable, journal.traits.shared) == ("memory", False, False)


async def test_three_slashes_are_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sqlite:///journal.db` stands in the working directory."""
    monkeypatch.chdir(tmp_path)
    await used("sqlite:///journal.db")
    assert (tmp_path / "journal.db").exists()


async def test_four_slashes_are_an_absolute_path(tmp_path: Path) -> None:
    """What follows the third slash is the path as it stands, odd characters and all."""
    path = tmp_path / "a journal?%20#1.db"
    await used(f"sqlite:///{path}")
    assert path.exists()


async def used(url: str) -> None:
    clock = ManualClock()
    journal = open_journal(url, clock)
    await journal.open()
    await Writer.begin(journal, meta(clock))
    assert journal.traits.durable
    await journal.close()


@pytest.mark.parametrize("url", ["redis://localhost/0", "rediss://h", "valkey://h"])
def test_redis_and_valkey_are_shared_journals(url: str) -> None:
    """Any replica serves any stream; nothing is asked of the server before it is opened."""
    traits = open_journal(url, ManualClock()).traits
    assert (traits.durable, traits.shared) == (True, True)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "memory",
        "memory://",
        "sqlite:",
        "sqlite://",
        "sqlite:///",
        "sqlite://journal.db",
        "sqlite:////tmp/",
        "x:y",
        "sqlite:///:memory:",
    ],
)
def test_anything_else_is_refused_with_the_forms_there_are(url: str) -> None:
    """A URL that names no journal is quoted back, with what would be one."""
    with pytest.raises(ValueError, match=r"does not name a journal; use memory:, sqlite:///FILE") as refusal:
        open_journal(url, ManualClock())
    assert repr(url) in str(refusal.value)
