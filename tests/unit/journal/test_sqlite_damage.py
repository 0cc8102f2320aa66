"""What a SQLite journal does with a file whose parts do not fit: it says so, at start or at the read.

Each file is first a good one, as a killed gateway leaves it: streams that have ended and that have not, in segments, in
the log, with records dropped.
"""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from midstream.errors import JournalCorrupt, JournalError, StoreLost
from midstream.journal import sqlite, sqlite_commit
from midstream.journal.sqlite import SqliteJournal
from midstream.records import Frame
from midstream.rules import Bounds
from midstream.testing.clock import ManualClock
from midstream.testing.journal_writer import Writer, meta, read_all

REQUEST = b'{"route":"/v1/stream","body":{"prompt":"a"}}'


class Listening:
    """Whoever decides about orphans, so that these are not ended at once."""

    def orphaned(self, stream_id: str) -> None: ...
    def superseded(self, stream_id: str) -> None: ...
    def lowest(self, stream_id: str) -> int | None:
        return None


class Killed:
    """The file of a gateway that was killed.

    `ended`, `open` and `dropped` are in segments, of which the first four records of `dropped` are in its fold too, and
    count no more; `logged` (which has ended) and `fresh` are in the log alone.
    """

    def __init__(self, path: Path, clock: ManualClock) -> None:
        self.path = path
        self.clock = clock
        self.frames: dict[str, list[Frame]] = {}

    async def made(self, monkeypatch: pytest.MonkeyPatch) -> Killed:
        """Written by a journal that is still running; then copied, as by a power cut."""
        source = self.path.with_name("source.db")
        journal = SqliteJournal(str(source), self.clock)
        await journal.open()
        with monkeypatch.context() as eager:
            eager.setattr(sqlite_commit, "LOG_BYTES", 0)
            for name in ("ended", "open", "dropped"):
                writer = await self._begin(journal, name)
                await writer.say(*"abcde")
                await writer.say(*"fghij")
                if name != "open":
                    await writer.finish()
            eager.setattr(sqlite_commit, "LOOSE_BYTES", 0)
            await journal.trim("dropped", 4, None)
        logged = await self._begin(journal, "logged")
        await logged.finish()
        await (await self._begin(journal, "fresh")).say("a")
        for suffix in ("", "-wal", ".lock"):
            shutil.copyfile(f"{source}{suffix}", f"{self.path}{suffix}")
        await journal.close()
        return self

    async def _begin(self, journal: SqliteJournal, name: str) -> Writer:
        told = meta(self.clock, name, request=REQUEST)
        writer = await Writer.begin(journal, told, [f"ada/idem/{name}"])
        self.frames[name] = writer.frames
        return writer

    def damage(self, statement: str) -> None:
        with closing(sqlite3.connect(self.path)) as connection:
            connection.executescript(statement)
            connection.commit()
        Path(f"{self.path}-wal").touch()  # which is empty now, and gone

    def take_away(self, suffix: str) -> bytes:
        """Delete one of the files, and return what was in it."""
        path = Path(f"{self.path}{suffix}")
        content = path.read_bytes()
        path.unlink()
        return content

    def put(self, suffix: str, content: bytes) -> None:
        Path(f"{self.path}{suffix}").write_bytes(content)

    def files(self) -> set[str]:
        """The suffixes of what lies there."""
        return {path.name.removeprefix(self.path.name) for path in self.path.parent.glob(f"{self.path.name}*")}

    async def opened(self, bounds: Bounds | None = None) -> SqliteJournal:
        journal = SqliteJournal(str(self.path), self.clock, bounds)
        journal.listen(Listening())
        await journal.open()
        return journal


@pytest_asyncio.fixture
async def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Killed]:
    yield await Killed(tmp_path / "journal.db", ManualClock()).made(monkeypatch)


async def test_file_of_a_killed_gateway_is_whole(killed: Killed) -> None:
    """What the other tests damage: every record is there."""
    journal = await killed.opened()
    for name in ("ended", "open", "logged", "fresh"):
        assert await read_all(journal, name) == killed.frames[name]
    assert (await journal.read("dropped", 4)).frames == killed.frames["dropped"][4:]
    await journal.close()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("DELETE FROM counters WHERE stream = 1", "stream 1: .* counters are missing"),
        ("DELETE FROM stream WHERE number = 1", "stream 1 has rows"),
        ("DELETE FROM stream WHERE number = 5; DELETE FROM counters WHERE stream > 5", "stream 5 has rows"),
        ("UPDATE stream SET id = 'ended' WHERE number = 2", "another one"),
        ("UPDATE stream SET id = '' WHERE number = 2", "is no text"),
        ("UPDATE stream SET id = x'00' WHERE number = 2", "is no text"),
        ("UPDATE stream SET owner = x'00'", "is no text"),
        ("UPDATE stream SET names = '[1]'", "is no text"),
        ("UPDATE stream SET names = '{}'", "no list"),
        ("UPDATE stream SET created_at = 'soon'", "time"),
        ("UPDATE stream SET retain = 'long'", "time"),
        ("UPDATE stream SET retain = 9e999", "time"),
        ("UPDATE counters SET last_access = x'00'", "time"),
        ("UPDATE stream SET request = 'text'", "request"),
        ("UPDATE stream SET request = CAST('[]' AS BLOB)", "request"),
        ("UPDATE stream SET request = CAST('{\"a' AS BLOB)", "request"),
        ("UPDATE counters SET status = 'paused'", "status is 'paused'"),
        ("UPDATE counters SET ended_at = NULL", "status is 'done'"),
        ("UPDATE counters SET status = 'open', ended_at = NULL WHERE stream = 4", "last record says otherwise"),
        ("UPDATE counters SET status = 'open', ended_at = NULL WHERE stream = 1", "last record says otherwise"),
        ("UPDATE counters SET epoch = 9223372036854775807", "no count"),
        ("UPDATE counters SET acked = -1", "no count"),
        ("UPDATE counters SET filed = 'many'", "counters are missing"),
        ("UPDATE counters SET bytes = 1.5", "no count"),
        ("UPDATE counters SET oldest = 100", "contradict"),
        ("UPDATE counters SET acked = 100", "contradict"),
        ("UPDATE counters SET trimmed = 100", "contradict"),
        ("UPDATE counters SET filed = filed + 1000000 WHERE stream = 1", "more than is in the file"),
        ("UPDATE counters SET bytes = 1 << 40", "more than is in the file"),
        ("UPDATE counters SET fold_bytes = 1 << 40", "more than is in the file"),
        ("UPDATE counters SET filed = filed + 1 WHERE stream = 2", "up to 11, and should up to 12"),
        ("DELETE FROM segment WHERE stream = 2 AND first = 1", "record 1 is missing"),
        ("DELETE FROM segment WHERE stream = 2 AND first > 6", "up to"),
        ("UPDATE segment SET first = first + 50 WHERE stream = 2", "stream 2 .'open'.: record 51 is not"),
        (
            "UPDATE segment SET frames = (SELECT frames FROM segment WHERE stream = 1 AND first = 2) WHERE stream = 2",
            "not what",
        ),
        ("UPDATE segment SET frames = CAST(frames AS TEXT) WHERE stream = 2", "cut off"),
        ("UPDATE segment SET frames = x'00' WHERE stream = 2", "cut off"),
        ("DELETE FROM log", "contradict"),
        ("INSERT INTO log SELECT * FROM log", "lacks"),
        ("UPDATE log SET entries = '{}'", "whose its records are"),
        ("UPDATE log SET entries = '[4,1,-1]'", "whose its records are"),
        ("UPDATE log SET entries = '[4,1]'", "not whole"),
        ("UPDATE log SET frames = CAST(frames AS TEXT)", "cut off"),
        ("UPDATE log SET frames = CAST('nothing' || x'0a0a' AS BLOB)", "not what stands in its place"),
        ("ALTER TABLE log ADD COLUMN more", "'log' is not as"),
        ("DROP TABLE fold", "'fold' is not as"),
        ("DROP TABLE segment; CREATE TABLE segment (stream, first)", "'segment' is not as"),
        ("PRAGMA user_version = 0", "version is 0"),
        ("PRAGMA user_version = -1", "version is -1"),
    ],
)
async def test_file_that_contradicts_itself_is_refused_at_start(killed: Killed, damage: str, says: str) -> None:
    """I4: what is wrong, where, and what to do; before any reader, and without a stream left out in silence."""
    killed.damage(damage)
    with pytest.raises(JournalCorrupt, match=says) as refusal:
        await killed.opened()
    assert str(killed.path) in refusal.value.detail
    assert "put a copy in its place" in refusal.value.detail


@pytest.mark.parametrize("in_pages", [False, True])
@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE segment SET first = first + 50",
        "UPDATE segment SET frames = CAST(frames AS TEXT)",
        "UPDATE segment SET frames = frames || CAST('x' AS BLOB)",
        "UPDATE segment SET frames = CAST(substr(frames, 1, length(frames) - 9) AS BLOB)",
        "UPDATE segment SET frames = (SELECT frames FROM segment AS other WHERE other.first <> segment.first LIMIT 1)",
        "UPDATE segment SET frames = CAST(replace(CAST(frames AS TEXT), 'event: done', 'event: token') AS BLOB)",
        "UPDATE segment SET frames = CAST(replace(CAST(frames AS TEXT), 'data: {', 'data: ') AS BLOB)",
        "DELETE FROM segment",
        "DELETE FROM segment WHERE first > 1",
        "UPDATE counters SET filed = filed - 1",
        "UPDATE counters SET filed = filed + 1",
        "UPDATE counters SET status = 'failed'",
    ],
)
async def test_ended_stream_that_is_damaged_is_told_to_its_reader_alone(
    killed: Killed, damage: str, in_pages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`store_lost`, never another token and never a shorter answer; every other stream is what it was."""
    monkeypatch.setattr(sqlite, "WARM_STREAM_BYTES", 0 if in_pages else sqlite.WARM_STREAM_BYTES)
    conjunction = "AND" if " WHERE first > 1" in damage else "WHERE"
    killed.damage(f"{damage} {conjunction} stream = 1")
    journal = await killed.opened()
    with pytest.raises(StoreLost):
        await read_all(journal, "ended")
    with pytest.raises(StoreLost):
        await journal.snapshot("ended")
    for name in ("open", "logged", "fresh"):
        assert await read_all(journal, name) == killed.frames[name]
    await journal.close()


@pytest.mark.parametrize(
    "fold",
    ["x'00'", "7", "CAST('{}' AS BLOB)", 'replace(json, \'"upto":4\', \'"upto":"4"\')']
    + [f"replace(json, '\"upto\":4', '\"upto\":{upto}')" for upto in ("-1", "3.0", "9", "true")]
    + ['CAST(\'{"upto":4,"complete":true,"choices":[[0,{}]],"items":[],"error":null,"usage":null}\' AS BLOB)'],
)
async def test_fold_that_is_damaged_is_told_to_who_needs_it(killed: Killed, fold: str) -> None:
    """The rest of an answer is not taken for all of it."""
    killed.damage(f"UPDATE fold SET json = {fold}")
    journal = await killed.opened()
    with pytest.raises(StoreLost):
        await journal.snapshot("dropped")
    assert await read_all(journal, "ended") == killed.frames["ended"]
    await journal.close()


@pytest.mark.parametrize("said", [0, 1, 5000])
async def test_bytes_that_the_file_miscounts_are_counted_anew(killed: Killed, said: int) -> None:
    """A wrong sum would let acks count below nothing, or take the room of others."""
    before = await killed.opened()
    right, total = (await before.snapshot("ended")).state.retained_bytes, before.retained_bytes()
    await before.close()
    killed.damage(f"UPDATE counters SET bytes = {said} WHERE stream = 1")
    journal = await killed.opened()
    assert (await journal.snapshot("ended")).state.retained_bytes == right
    assert journal.retained_bytes() == total
    await journal.close()


async def test_name_stays_with_the_newest_stream_that_has_it(killed: Killed) -> None:
    """A crash may bring back a forgotten stream whose name is another one's since; to forget it again frees nothing."""
    killed.damage("UPDATE stream SET names = (SELECT names FROM stream WHERE number = 4) WHERE number = 1")
    journal = await killed.opened()
    assert await journal.find("ada/idem/logged") == "logged"
    await journal.expire("ended")
    assert await journal.find("ada/idem/logged") == "logged"
    await journal.close()


# --- a WAL that is gone ----------------------------------------------------------------------------------------------


async def test_wal_that_was_taken_away_is_missed(killed: Killed) -> None:
    """The newest records of a killed gateway are in it: without it readers would be ahead, or be told another end."""
    wal = killed.take_away("-wal")
    for _ in range(2):
        with pytest.raises(JournalCorrupt, match="-wal with the newest records is gone"):
            await killed.opened()
    killed.put("-wal", wal)
    journal = await killed.opened()
    assert await read_all(journal, "fresh") == killed.frames["fresh"]
    await journal.close()


async def test_wal_that_was_taken_away_can_be_done_without(killed: Killed) -> None:
    """Whoever deletes the lock as told goes on with what there is."""
    killed.take_away("-wal")
    killed.take_away(".lock")
    await (await killed.opened()).close()


async def test_file_that_was_emptied_is_missed(killed: Killed) -> None:
    """SQLite would take it for a new one, and delete the WAL that belongs to it."""
    killed.put("", b"")
    with pytest.raises(JournalCorrupt, match="has nothing to belong to"):
        await killed.opened()
    assert killed.take_away("-wal")


async def test_no_wal_is_missed_after_an_orderly_end(killed: Killed) -> None:
    """Also where the start before has failed: it has left no WAL behind either."""
    await (await killed.opened()).close()
    assert killed.files() == {"", ".lock"}
    version = killed.take_away("")
    killed.put("", version)
    killed.damage("UPDATE counters SET status = 'paused'")
    for _ in range(2):
        with pytest.raises(JournalCorrupt, match="paused"):
            await killed.opened()
        assert killed.files() == {"", ".lock"}
    killed.put("", version)
    await (await killed.opened()).close()


# --- a place that cannot be written ----------------------------------------------------------------------------------


@contextmanager
def no_file_may_grow() -> Iterator[None]:
    """What SQLite hears is what a full disk says."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_what_is_no_file_is_left_as_it_is(killed: Killed) -> None:
    """A device, above all: SQLite would open it, and make it ours alone."""
    device = killed.path.with_name("device")
    os.mkfifo(device, 0o666)
    before = device.stat()
    with pytest.raises(JournalError, match="it is no file"):
        await SqliteJournal(str(device), killed.clock).open()
    assert device.stat() == before
    assert not device.with_name("device.lock").exists()


@pytest.mark.parametrize("bounds", [None, Bounds(max_stream_records=3)], ids=["as it was", "lower bounds"])
async def test_full_disk_at_start_is_said(killed: Killed, bounds: Bounds | None) -> None:
    """A start that cannot write ends with the file, the reason and what it needs; later, with room, all is there."""
    with no_file_may_grow(), pytest.raises(JournalError, match="on a disk with space") as refusal:
        await killed.opened(bounds)
    assert str(killed.path) in refusal.value.detail
    journal = await killed.opened()
    assert await read_all(journal, "open") == killed.frames["open"]
    await journal.close()


async def test_wal_that_a_failed_start_has_left_is_still_missed(killed: Killed) -> None:
    """A start that could not move it into the file must not pass for an orderly end."""
    with no_file_may_grow(), pytest.raises(JournalError):
        await killed.opened()
    assert killed.take_away("-wal")
    with pytest.raises(JournalCorrupt, match="-wal with the newest records is gone"):
        await killed.opened()
