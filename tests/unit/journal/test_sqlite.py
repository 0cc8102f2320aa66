"""What the SQLite journal adds to the contract: commits, recovery, one owner of the file, and what stays in memory."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import shutil
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from midstream.errors import (
    CursorAhead,
    JournalCorrupt,
    JournalError,
    JournalInUse,
    MidstreamError,
    StaleWriter,
    StoreLost,
    StoreUnavailable,
    StreamEnded,
    UnknownStream,
)
from midstream.journal import sqlite, sqlite_commit, sqlite_file
from midstream.journal.sqlite import SqliteJournal
from midstream.journal.sqlite_shape import UPGRADES
from midstream.records import STREAM_OVERHEAD, Frame, Record
from midstream.rules import Bounds
from midstream.testing.clock import ManualClock
from midstream.testing.journal_writer import Writer, meta, read_all, seqs, text_of, tokens, written
from midstream.testing.patience import soon

Open = Callable[..., Any]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest_asyncio.fixture
async def opened(path: Path, clock: ManualClock) -> AsyncIterator[Open]:
    """Opens a journal on `path`; closes what is still open at the end."""
    journals: list[SqliteJournal] = []

    async def open_one(bounds: Bounds | None = None) -> SqliteJournal:
        journal = SqliteJournal(str(path), clock, bounds)
        await journal.open()
        journals.append(journal)
        return journal

    yield open_one
    for journal in journals:
        await journal.close()


@contextmanager
def stalled(path: Path) -> Iterator[None]:
    """No commit gets through, as on a disk that has stopped answering for a moment."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            other.execute("ROLLBACK")


@contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """The WAL cannot grow: what SQLite hears is what a full disk says."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size(path, "-wal"), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def going(verb: Any) -> asyncio.Task[Any]:
    """The verb, started and as far as it gets by itself."""
    task = asyncio.ensure_future(verb)
    for _ in range(20):
        await asyncio.sleep(0)
    return task


def size(path: Path, suffix: str = "") -> int:
    return os.path.getsize(f"{path}{suffix}")


def bytes_of(path: Path) -> bytes:
    return path.read_bytes()


def make_noise(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:8192] + os.urandom(8192) + whole[16384:])


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def modes_beside(path: Path) -> dict[str, int]:
    return {name.name: mode(name) for name in path.parent.iterdir()}


def left_by_a_crash(path: Path) -> Path:
    """The file and its WAL as they are now, elsewhere: what the next process would find after a power cut."""
    copy = path.with_name("copy.db")
    for suffix in ("", "-wal"):
        shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
    return copy


def table(path: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


# --- commits (I1) ----------------------------------------------------------------------------------------------------


async def test_nothing_is_seen_before_its_commit(opened: Open, path: Path, clock: ManualClock) -> None:
    """While a batch is on its way its writer waits, and no verb shows it (I1)."""
    journal = await opened()
    writer = await written(journal, meta(clock), 3)
    told = await journal.state(writer.stream_id)
    with stalled(path):
        waiting = await going(journal.wait(writer.stream_id, 3))
        saying = await going(writer.say("four"))
        assert not saying.done()
        assert not waiting.done()
        assert await journal.state(writer.stream_id) == told
        assert (await journal.read(writer.stream_id, 3)).frames == []
        assert journal.peek(writer.stream_id, 3).frames == []
        assert len((await journal.snapshot(writer.stream_id)).frames) == 3
        with pytest.raises(CursorAhead):
            await journal.trim(writer.stream_id, 4, None)
    await soon(asyncio.gather(saying, waiting))
    assert seqs((await journal.read(writer.stream_id, 3)).frames) == [4]


async def test_a_stream_is_not_seen_before_its_commit(opened: Open, path: Path, clock: ManualClock) -> None:
    """A create on its way has its names, and is found under none; who asks for one of them waits for it."""
    journal = await opened()
    told = meta(clock)
    with stalled(path):
        first = await going(Writer.begin(journal, told, ["n"]))
        second = await going(journal.create(meta(clock), tokens(1, ["x"]), ["n"]))
        assert await journal.find("n") is None
        assert list(await journal.list("ada")) == []
        with pytest.raises(UnknownStream):
            await journal.state(told.stream_id)
        assert not second.done()
    await soon(first)
    created = await soon(second)
    assert (created.existed, created.state.meta) == (True, told)
    assert await journal.find("n") == told.stream_id


async def test_a_repeat_waits_for_the_commit_of_the_first(opened: Open, path: Path, clock: ManualClock) -> None:
    """A batch repeated while it is on its way is acknowledged with it, once (R3)."""
    journal = await opened()
    writer = await written(journal, meta(clock), 2)
    batch = tokens(3, ["three", "four"])
    with stalled(path):
        again = [await going(journal.append(writer.stream_id, batch, epoch=1, first_seq=3)) for _ in range(3)]
        assert not any(task.done() for task in again)
    await soon(asyncio.gather(*again))
    assert seqs(await read_all(journal, writer.stream_id)) == [1, 2, 3, 4]


async def test_the_last_batch_is_known_though_commits_joined_two(opened: Open, path: Path, clock: ManualClock) -> None:
    """Of two batches in one commit only the later may be repeated, also after another commit has failed (R3)."""
    journal = await opened()
    writer = await written(journal, meta(clock), 2)
    batches = [tokens(3, ["three"]), tokens(4, ["four"]), tokens(5, ["five", "six"])]

    async def append(batch: list[Frame]) -> None:
        await journal.append(writer.stream_id, batch, epoch=1, first_seq=Record.of(batch[0]).seq)

    with stalled(path):  # the first is on its way when the two others come
        together = [await going(append(batch)) for batch in batches]
    await soon(asyncio.gather(*together))
    with full_disk(path), pytest.raises(StoreUnavailable):
        await append(tokens(7, ["seven"]))
    await append(batches[2])
    for older in (batches[1], batches[1] + batches[2]):
        with pytest.raises(MidstreamError, match="expected seq 7, got 4"):
            await append(older)


async def test_claims_count_at_once(opened: Open, path: Path, clock: ManualClock) -> None:
    """A writer is stale from the moment of the claim, not of its commit (R2)."""
    journal = await opened()
    writer = await written(journal, meta(clock), 2)
    with stalled(path):
        claim = await going(journal.claim(writer.stream_id))
        with pytest.raises(StaleWriter):
            await writer.say("three")
        assert not claim.done()
    assert (await soon(claim)).epoch == 2


async def test_an_end_on_its_way_is_the_end(opened: Open, path: Path, clock: ManualClock) -> None:
    """Cancel and claim that come after an end wait for its commit, and find it (R4)."""
    journal = await opened()
    writer = await written(journal, meta(clock), 2)
    with stalled(path):
        end = await going(writer.finish())
        cancel = await going(journal.request_cancel(writer.stream_id, "client"))
        claim = await going(journal.claim(writer.stream_id))
        assert (await journal.state(writer.stream_id)).status == "open"
        assert not any(task.done() for task in (cancel, claim))
    await soon(end)
    assert (await soon(cancel)).status == "done"
    with pytest.raises(StreamEnded):
        await soon(claim)


async def test_an_impatient_writer_loses_nothing(opened: Open, path: Path, clock: ManualClock) -> None:
    """A batch whose caller was cancelled may be repeated, and stands once."""
    journal = await opened()
    writer = await written(journal, meta(clock), 2)
    batch = tokens(3, ["three"])
    with stalled(path):
        task = await going(journal.append(writer.stream_id, batch, epoch=1, first_seq=3))
        task.cancel()
        await asyncio.wait([task])
    await soon(writer.append(batch))
    assert seqs(await read_all(journal, writer.stream_id)) == [1, 2, 3]


async def test_an_impatient_creator_leaves_a_stream(opened: Open, path: Path, clock: ManualClock) -> None:
    """A stream whose creator was cancelled is born all the same, so that its name leads somewhere."""
    journal = await opened()
    told = meta(clock)
    with stalled(path):
        task = await going(Writer.begin(journal, told, ["n"]))
        task.cancel()
        await asyncio.wait([task])
    await soon(Writer.begin(journal, meta(clock)))
    assert await journal.find("n") == told.stream_id
    assert (await journal.state(told.stream_id)).highest_seq == 1


# --- a store that fails ----------------------------------------------------------------------------------------------


async def test_a_failed_commit_leaves_no_trace(opened: Open, path: Path, clock: ManualClock) -> None:
    """On a full disk appends are refused, nothing of them is seen, and the same batches go through afterwards."""
    journal = await opened()
    writers = [await written(journal, meta(clock), 3) for _ in range(3)]
    states = [await journal.state(writer.stream_id) for writer in writers]
    held = journal.retained_bytes()
    batches = [tokens(4, [f"lost {i}?"] * 40) for i in range(3)]

    def append_all() -> list[Any]:
        return [
            journal.append(writer.stream_id, batch, epoch=1, first_seq=4)
            for writer, batch in zip(writers, batches, strict=True)
        ]

    with full_disk(path):
        refusals = await asyncio.gather(*append_all(), return_exceptions=True)
    assert [type(refusal) for refusal in refusals] == [StoreUnavailable] * 3
    assert [await journal.state(writer.stream_id) for writer in writers] == states
    assert journal.retained_bytes() == held
    await asyncio.gather(*append_all())
    await journal.close()
    again = await opened()
    for writer, batch in zip(writers, batches, strict=True):
        assert (await read_all(again, writer.stream_id))[:-1] == writer.frames + batch


async def test_what_was_decided_on_top_fails_too(opened: Open, path: Path, clock: ManualClock) -> None:
    """Batches waiting for the next commit fail with the one before: they would leave a gap (R1)."""
    journal = await opened()
    writer = await written(journal, meta(clock), 2)
    with full_disk(path):
        with stalled(path):
            first = await going(journal.append(writer.stream_id, tokens(3, ["x" * 9000]), epoch=1, first_seq=3))
            second = await going(journal.append(writer.stream_id, tokens(4, ["y"]), epoch=1, first_seq=4))
        refusals = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(refusal) for refusal in refusals] == [StoreUnavailable] * 2
    with pytest.raises(MidstreamError, match="expected seq 3, got 4"):
        await journal.append(writer.stream_id, tokens(4, ["y"]), epoch=1, first_seq=4)
    await writer.say("something else")
    assert await read_all(journal, writer.stream_id) == writer.frames


async def test_a_failed_claim_leaves_the_writer_in_place(opened: Open, path: Path, clock: ManualClock) -> None:
    """Neither a claim nor a cancel that failed makes the writer stale: nobody else would end the stream."""
    journal = await opened()
    writer = await written(journal, meta(clock), 2)
    with full_disk(path):
        for verb in (journal.claim(writer.stream_id), journal.request_cancel(writer.stream_id, "client")):
            with pytest.raises(StoreUnavailable):
                await verb
    assert (await journal.state(writer.stream_id)).epoch == 1
    await writer.finish()
    assert (await journal.state(writer.stream_id)).status == "done"


async def test_a_failed_create_frees_its_names(opened: Open, path: Path, clock: ManualClock) -> None:
    """Nothing is left of a stream that could not be created: no name, no bytes."""
    journal = await opened()
    await written(journal, meta(clock), 2)
    held, told = journal.retained_bytes(), meta(clock, request=b'{"long":"request"}')
    with full_disk(path), pytest.raises(StoreUnavailable):
        await Writer.begin(journal, told, ["n"])
    assert await journal.find("n") is None
    assert journal.retained_bytes() == held
    await Writer.begin(journal, told, ["n"])
    assert await journal.find("n") == told.stream_id


async def test_a_full_disk_is_no_place_for_new_streams(opened: Open, path: Path, clock: ManualClock) -> None:
    """It is said where others look whether to send any, until a commit goes through or it is time to try again."""
    journal = await opened()
    writer = await written(journal, meta(clock), 2)
    assert journal.available()
    for _ in range(2):
        with full_disk(path), pytest.raises(StoreUnavailable):
            await journal.claim(writer.stream_id)
        assert not journal.available()
        await writer.say("three")
        assert journal.available()
    with full_disk(path), pytest.raises(StoreUnavailable):
        await journal.claim(writer.stream_id)
    journal._commits._failed_at -= 10
    assert journal.available()


@pytest.mark.parametrize("where", ["append", "unfiled"])
async def test_a_fault_of_ours_is_said_to_everybody(
    opened: Open, path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Memory and file may be apart then: nobody waits for ever, nothing more is taken, and a restart has it all."""
    journal = await opened()
    writers = [await written(journal, meta(clock), 2) for _ in range(2)]
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(sqlite_commit.Stored, where, broken)
        patch.setattr(sqlite_commit, "LOG_BYTES", 0)
        appends = [journal.append(writer.stream_id, tokens(3, ["x"]), epoch=1, first_seq=3) for writer in writers]
        told = await soon(asyncio.gather(*appends, return_exceptions=True))
    assert [type(refusal) for refusal in told] == [StoreUnavailable] * 2
    assert [type(fault["exception"]) for fault in faults] == [ZeroDivisionError]
    assert not journal.available()
    with pytest.raises(StoreUnavailable):
        await soon(journal.append(writers[0].stream_id, tokens(3, ["x"]), epoch=1, first_seq=3))
    await soon(journal.close())
    again = await opened()
    for writer in writers:
        assert (await read_all(again, writer.stream_id))[:2] == writer.frames[:2]


async def test_what_is_forgotten_stays_so_though_the_disk_is_full(opened: Open, path: Path, clock: ManualClock) -> None:
    """A delete that could not be written holds in memory, and reaches the file with the next commit."""
    journal = await opened()
    gone, kept = await written(journal, meta(clock), 2), await written(journal, meta(clock), 2)
    with full_disk(path), pytest.raises(StoreUnavailable):
        await journal.expire(gone.stream_id)
    with pytest.raises(UnknownStream):
        await journal.state(gone.stream_id)
    await kept.say("three")
    assert table(path, "SELECT id FROM stream") == [(kept.stream_id,)]


# --- the next process ------------------------------------------------------------------------------------------------


async def test_orphans_end_at_once(opened: Open, clock: ManualClock) -> None:
    """Every stream that was open ends `failed` `writer_lost`, under the next epoch, before `open` returns (I7)."""
    journal = await opened()
    writers = [await written(journal, meta(clock), upto) for upto in (1, 5)]
    await journal.close()
    clock.advance(60)
    again = await opened()
    for writer in writers:
        state = await again.state(writer.stream_id)
        assert (state.status, state.epoch, state.highest_seq) == ("failed", 2, writer.next_seq)
        assert state.ended_at == state.last_access == clock()
        frames = await read_all(again, writer.stream_id)
        assert frames[:-1] == writer.frames
        last = Record.of(frames[-1])
        assert last.event == "failed"
        assert last.json()["error"] | {"message": ""} == {"code": "writer_lost", "message": "", "retryable": True}
        with pytest.raises(StaleWriter):
            await again.append(writer.stream_id, tokens(writer.next_seq, ["x"]), epoch=1, first_seq=writer.next_seq)
    await again.close()
    third = await opened()
    assert [(await third.state(writer.stream_id)).epoch for writer in writers] == [2, 2]


async def test_acks_evictions_and_accesses_survive(opened: Open, clock: ManualClock) -> None:
    """Acked, trimmed and oldest seq, bytes and the time of the last access come back as they were."""
    journal = await opened(Bounds(max_stream_records=10))
    writer = await written(journal, meta(clock), 12)
    await journal.trim(writer.stream_id, 6, None)
    await writer.finish()
    clock.advance(100)
    await journal.touch(writer.stream_id)
    state, held = await journal.state(writer.stream_id), journal.retained_bytes()
    assert (state.oldest_retained_seq, state.trimmed_seq, state.last_access) == (7, 6, clock())
    await journal.close()
    again = await opened()
    assert await again.state(writer.stream_id) == state
    assert again.retained_bytes() == held
    assert text_of(await again.snapshot(writer.stream_id)) == "word " * 11
    assert again.retained_bytes() == held


async def test_numbers_in_the_file_are_not_mixed_up(opened: Open, clock: ManualClock) -> None:
    """Streams forgotten and begun across restarts never get each other's records."""
    kept: dict[str, list[Frame]] = {}
    for _ in range(4):
        journal = await opened()
        for upto in (2, 3, 4):
            writer = await written(journal, meta(clock), upto)
            await writer.finish()
            kept[writer.stream_id] = writer.frames
        newest = list(kept)[-1]
        await journal.expire(newest)
        del kept[newest]
        await journal.close()
    journal = await opened()
    assert {state.meta.stream_id for state in await journal.list("ada")} == set(kept)
    for stream_id, frames in kept.items():
        assert await read_all(journal, stream_id) == frames


@pytest.mark.parametrize("loose_bytes", [0, 1000, 10**9])
async def test_dropped_records_leave_the_file(
    opened: Open, path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, loose_bytes: int
) -> None:
    """A reader that acks all along keeps the file short; the answer stays whole in the fold (R9)."""
    monkeypatch.setattr(sqlite_commit, "LOG_BYTES", 2000)
    monkeypatch.setattr(sqlite_commit, "LOOSE_BYTES", loose_bytes)
    journal = await opened()
    writer = await Writer.begin(journal, meta(clock))
    for _ in range(60):
        await writer.say(*["some words "] * 5)
        await journal.trim(writer.stream_id, writer.next_seq - 1, None)
    await writer.finish()
    whole = "some words " * 300
    assert text_of(await journal.snapshot(writer.stream_id)) == whole
    await journal.close()
    ((left,),) = table(
        path, "SELECT sum(length(frames)) FROM (SELECT frames FROM segment UNION ALL SELECT frames FROM log)"
    )
    assert left < 6000
    again = await opened()
    assert text_of(await again.snapshot(writer.stream_id)) == whole
    assert seqs(await read_all(again, writer.stream_id, 301)) == [302]


async def test_a_late_ack_empties_the_file_too(
    opened: Open, path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an ack lets go of a stream that is all in segments leaves the file, and only that."""
    monkeypatch.setattr(sqlite_commit, "LOG_BYTES", 500)
    monkeypatch.setattr(sqlite_commit, "LOOSE_BYTES", 1000)
    journal = await opened()
    writer = await written(journal, meta(clock), 101)
    await writer.finish()
    for acked in range(3, 90, 3):
        await journal.trim(writer.stream_id, acked, None)
    await journal.close()
    ((first, rows),) = table(path, "SELECT min(first), count(*) FROM segment")
    assert 60 < first <= 88
    assert rows < 12
    again = await opened()
    assert await read_all(again, writer.stream_id, 87) == writer.frames[87:]
    assert text_of(await again.snapshot(writer.stream_id)) == "word " * 100


async def test_a_stream_forgotten_with_records_on_the_way_leaves_nothing(
    opened: Open, path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a forgotten stream had on its way is not moved into segments later."""
    journal = await opened()
    gone, kept = await written(journal, meta(clock), 3), await written(journal, meta(clock), 3)
    with stalled(path):
        verbs = [journal.append(gone.stream_id, tokens(seq, ["x"]), epoch=1, first_seq=seq) for seq in (4, 5)]
        tasks = [await going(verb) for verb in (*verbs, journal.expire(gone.stream_id))]
    await soon(asyncio.gather(*tasks))
    monkeypatch.setattr(sqlite_commit, "LOG_BYTES", 0)
    await kept.say("all to segments")
    for name in ("segment", "counters", "fold"):
        assert table(path, f"SELECT * FROM {name} WHERE stream NOT IN (SELECT number FROM stream)") == []
    of_records = (await journal.state(kept.stream_id)).retained_bytes
    assert journal.retained_bytes() == of_records + STREAM_OVERHEAD + len(b"{}")


# --- one owner -------------------------------------------------------------------------------------------------------


async def test_a_second_owner_is_refused_by_name(opened: Open, path: Path, tmp_path: Path, clock: ManualClock) -> None:
    """While one journal holds the file another is told who holds it, under any name of the file."""
    await opened()
    other_name = tmp_path / "link.db"
    other_name.symlink_to(path)
    threads = threading.active_count()
    for name in (path, other_name):
        with pytest.raises(JournalInUse, match=f"in use by process {os.getpid()}") as refusal:
            await SqliteJournal(str(name), clock).open()
        assert refusal.value.facts == {"path": str(name), "pid": os.getpid()}
    assert threading.active_count() == threads


async def test_the_file_is_free_after_close(opened: Open, clock: ManualClock) -> None:
    """Close lets go of the lock, the threads and the WAL, twice if need be."""
    threads = threading.active_count()
    for _ in range(3):
        journal = await opened()
        await written(journal, meta(clock), 2)
        await journal.close()
        await journal.close()
    assert threading.active_count() == threads


async def test_close_waits_for_what_was_appended(opened: Open, path: Path, clock: ManualClock) -> None:
    """Batches on their way are in the file when `close` returns; later ones are refused, and readers woken."""
    journal = await opened()
    writer = await written(journal, meta(clock), 2)
    waiting = await going(journal.wait(writer.stream_id, 3))
    with stalled(path):
        saying = await going(writer.say("three"))
        closing_ = await going(journal.close())
        assert not closing_.done()
        with pytest.raises(StoreUnavailable):
            await journal.append(writer.stream_id, tokens(4, ["late"]), epoch=1, first_seq=4)
    await soon(asyncio.gather(saying, closing_, waiting))
    assert (await read_all(await opened(), writer.stream_id))[:-1] == writer.frames


async def test_only_its_owner_can_read_the_files(opened: Open, path: Path, clock: ManualClock) -> None:
    """Prompts are private: file, WAL, shared memory and lock have mode 0600 whatever the umask; an older file too."""
    mask = os.umask(0)
    try:
        os.close(os.open(path, os.O_CREAT, 0o644))
        journal = await opened()
        await written(journal, meta(clock), 2)
        modes = modes_beside(path)
    finally:
        os.umask(mask)
    assert modes == dict.fromkeys(["journal.db", "journal.db-wal", "journal.db-shm", "journal.db.lock"], 0o600)


# --- files that are none of ours -------------------------------------------------------------------------------------


def not_a_database(path: Path) -> None:
    path.write_bytes(b"Dear diary, " * 1000)


def of_another_program(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE shopping (list TEXT); INSERT INTO shopping VALUES ('milk')")


@pytest.mark.parametrize(
    ("make", "says"), [(not_a_database, "not a journal"), (of_another_program, "of another program")]
)
async def test_a_foreign_file_is_refused_and_not_touched(
    path: Path, clock: ManualClock, make: Callable[[Path], None], says: str
) -> None:
    """A file that is not a journal is named as such, and stays as it was."""
    make(path)
    before = bytes_of(path), mode(path)
    with pytest.raises(JournalCorrupt, match=says):
        await SqliteJournal(str(path), clock).open()
    assert (bytes_of(path), mode(path)) == before


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("UPDATE log SET entries = '[1,3,1]' WHERE rowid = 2", "lacks 2"),
        ("UPDATE log SET entries = '[1,2,9]' WHERE rowid = 2", "not whole"),
        ("UPDATE log SET entries = 'x'", "damaged"),
        ("UPDATE stream SET names = 7", "damaged"),
        ("DROP TABLE counters", "damaged"),
    ],
)
async def test_rows_that_do_not_fit_are_damage(
    opened: Open, path: Path, clock: ManualClock, damage: str, says: str
) -> None:
    """A journal whose parts contradict each other is refused: it would hand out a gap (I4)."""
    journal = await opened()
    await written(journal, meta(clock), 4)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(damage)
        connection.commit()
    with pytest.raises(JournalCorrupt, match=says):
        await SqliteJournal(str(left_by_a_crash(path)), clock).open()


async def test_a_damaged_page_is_found_at_start(opened: Open, path: Path, clock: ManualClock) -> None:
    """Pages of noise are damage, said at start and not at some read."""
    journal = await opened()
    writer = await Writer.begin(journal, meta(clock))
    await writer.say(*["x" * 500] * 200)
    await writer.finish()
    await journal.close()
    make_noise(path)
    with pytest.raises(JournalCorrupt, match="damaged"):
        await opened()


async def test_a_record_missing_in_the_file_is_loud(
    opened: Open, path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader never gets past a hole in the file: it is `store_lost`, page by page and whole (I4)."""
    monkeypatch.setattr(sqlite_commit, "LOG_BYTES", 200)
    journal = await opened()
    writer = await written(journal, meta(clock), 30)
    await writer.finish()
    await journal.close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM segment WHERE first = (SELECT max(first) FROM segment WHERE first < 15)")
        connection.commit()
    for limit in (0, sqlite.WARM_STREAM_BYTES):
        monkeypatch.setattr(sqlite, "WARM_STREAM_BYTES", limit)
        again = await opened()
        with pytest.raises(StoreLost):
            await read_all(again, writer.stream_id)
        await again.close()


@pytest.mark.parametrize("name", ["missing/journal.db", "."])
async def test_a_place_that_cannot_hold_a_file_is_named(tmp_path: Path, clock: ManualClock, name: str) -> None:
    """A directory that is missing, or is meant as the file, is an error with the path in it."""
    with pytest.raises(JournalError, match="cannot be opened") as refusal:
        await SqliteJournal(str(tmp_path / name), clock).open()
    assert refusal.value.facts["path"].startswith(str(tmp_path))


# --- versions of the file --------------------------------------------------------------------------------------------


async def test_an_older_file_is_brought_up(
    opened: Open, path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later version adds its steps to a file with streams in it; this one then refuses the file."""
    journal = await opened()
    writer = await written(journal, meta(clock), 3)
    await writer.finish()
    await journal.close()
    with monkeypatch.context() as later:
        later.setattr(sqlite_file, "UPGRADES", (*UPGRADES, "CREATE TABLE note (text TEXT);"))
        for _ in range(2):
            again = await opened()
            assert await read_all(again, writer.stream_id) == writer.frames
            await again.close()
        assert table(path, "SELECT count(*) FROM note") == [(0,)]
    with pytest.raises(JournalCorrupt, match="newer Midstream") as refusal:
        await opened()
    assert refusal.value.facts["version"] == len(UPGRADES) + 1


async def test_an_upgrade_that_fails_changes_nothing(
    opened: Open, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade is one transaction: half of one would be a file that nobody can read."""
    journal = await opened()
    writer = await written(journal, meta(clock), 3)
    await writer.finish()
    await journal.close()
    with monkeypatch.context() as later:
        later.setattr(sqlite_file, "UPGRADES", (*UPGRADES, "DROP TABLE segment; CREATE nonsense;"))
        with pytest.raises(JournalError):
            await opened()
    assert await read_all(await opened(), writer.stream_id) == writer.frames


# --- memory and disk -------------------------------------------------------------------------------------------------


async def test_finished_streams_leave_memory(opened: Open, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last read of finished streams stay in memory, up to a bound; the others replay from the file (I5)."""
    monkeypatch.setattr(sqlite_commit, "LOG_BYTES", 1000)
    monkeypatch.setattr(sqlite, "WARM_BYTES", 40_000)
    journal = await opened()
    writers = [await Writer.begin(journal, meta(clock)) for _ in range(8)]
    for writer in writers:
        await writer.say(*["x" * 60] * 100)
        await writer.finish()

    def at_hand() -> list[bool]:
        return [journal.peek(writer.stream_id, 0) is not None for writer in writers]

    assert 0 < sum(at_hand()) <= 3  # two fit, and the last one may be on its way into a segment
    for writer in writers:
        assert await read_all(journal, writer.stream_id) == writer.frames
        assert sum(at_hand()) <= 3
        assert journal.peek(writer.stream_id, 50).frames == writer.frames[50:]
        assert journal.peek(writer.stream_id, 102).frames == []


async def test_a_page_from_the_file_is_the_page_from_memory(
    opened: Open, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every position and limit the file gives what memory gave (I3)."""
    monkeypatch.setattr(sqlite_commit, "LOG_BYTES", 500)
    monkeypatch.setattr(sqlite, "WARM_STREAM_BYTES", 0)
    journal = await opened()
    writer = await Writer.begin(journal, meta(clock))
    for size in range(12):
        await writer.say(*["é" * size] * 3)
    asked = [
        (after, *limits)
        for after in range(writer.next_seq)
        for limits in ((1, 9999), (5, 9999), (512, 1), (512, 300), (512, 9999))
    ]
    from_memory = [await journal.read(writer.stream_id, *position) for position in asked]
    await writer.finish()
    await journal.close()
    again = await opened()
    for position, page in zip(asked, from_memory, strict=True):
        later = await again.read(writer.stream_id, *position)
        assert (later.frames or [writer.frames[-1]])[: len(page.frames)] == page.frames
        assert later.last_seq == position[0] + len(later.frames)
        assert len(later.frames) - len(page.frames) in (0, 1)
    assert again.peek(writer.stream_id, 5) is None


async def test_a_stream_forgotten_while_it_is_read(
    opened: Open, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader whose stream is deleted under it hears that it is unknown, not that the store is broken."""
    journal = await opened()
    writers = [await written(journal, meta(clock), 20) for _ in range(2)]
    await journal.close()
    again = await opened()
    for writer, limit in zip(writers, (0, sqlite.WARM_STREAM_BYTES), strict=True):
        monkeypatch.setattr(sqlite, "WARM_STREAM_BYTES", limit)
        reading = asyncio.ensure_future(again.read(writer.stream_id, 0))
        await asyncio.sleep(0)
        await again.expire(writer.stream_id)
        with pytest.raises(UnknownStream):
            await reading


async def test_the_wal_and_the_file_stay_short(opened: Open, path: Path, clock: ManualClock) -> None:
    """Under steady load the WAL is emptied again and again, and space of forgotten streams is used again."""
    journal = await opened()
    sizes = []
    for _ in range(6):
        writer = await Writer.begin(journal, meta(clock))
        for _ in range(6):
            await writer.say(*["x" * 1000] * 300)
            assert size(path, "-wal") < 12 * 1024 * 1024
        await writer.finish()
        await journal.expire(writer.stream_id)
        sizes.append(size(path))
    assert sizes[-1] < sizes[1] * 1.5


async def test_free_space_goes_back_to_the_disk(
    opened: Open, path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sweeps give back, little by little, what a large load has left free."""
    monkeypatch.setattr(sqlite_file, "SPARE_PAGES", 50)
    journal = await opened()
    writer = await Writer.begin(journal, meta(clock))
    await writer.say(*["x" * 5000] * 900)
    await writer.finish()
    await journal.expire(writer.stream_id)
    full = table(path, "PRAGMA page_count")[0][0]
    await journal.sweep()
    once = table(path, "PRAGMA page_count")[0][0]
    await journal.sweep()
    assert full - once > sqlite_file.SHRINK_PAGES // 2
    assert once > table(path, "PRAGMA page_count")[0][0]
    await journal.close()
    assert size(path) < full * 4096


async def test_many_streams_are_forgotten_in_several_commits(
    opened: Open, path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep that forgets a lot is written in parts, all of them before it returns."""
    monkeypatch.setattr(sqlite_commit, "FORGET_AT_ONCE", 3)
    journal = await opened()
    for _ in range(10):
        await (await Writer.begin(journal, meta(clock))).finish()
    kept = await Writer.begin(journal, meta(clock))
    clock.advance(601)
    assert len(await journal.sweep()) == 10
    assert table(path, "SELECT id FROM stream") == [(kept.stream_id,)]


# --- threads and loops -----------------------------------------------------------------------------------------------


async def test_idle_readers_take_no_threads(opened: Open, clock: ManualClock) -> None:
    """A hundred readers that wait hold up neither a thread nor a verb."""
    journal = await opened()
    writer = await written(journal, meta(clock), 3)
    await journal.read(writer.stream_id, 0)
    threads = threading.active_count()
    waiting = [await going(journal.wait(writer.stream_id, 3)) for _ in range(100)]
    assert threading.active_count() == threads
    assert (await soon(journal.state(writer.stream_id))).highest_seq == 3
    await soon(writer.say("four"))
    await soon(asyncio.gather(*waiting))


def test_each_loop_may_have_its_journal(tmp_path: Path, clock: ManualClock) -> None:
    """Journals made outside any loop serve two loops in two threads at the same time."""
    journals = [SqliteJournal(str(tmp_path / f"{name}.db"), clock) for name in "ab"]
    both = threading.Barrier(2, timeout=10)
    read: list[int] = []

    async def serve(journal: SqliteJournal) -> None:
        await journal.open()
        both.wait()
        writer = await written(journal, meta(clock), 20)
        both.wait()
        read.extend(seqs(await read_all(journal, writer.stream_id)))
        await journal.close()

    threads = [threading.Thread(target=asyncio.run, args=(serve(journal),)) for journal in journals]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(read) == sorted([*range(1, 21)] * 2)


async def test_nothing_is_left_behind_for_the_collector(opened: Open, path: Path, clock: ManualClock) -> None:
    """Refused callers that nobody listens to any more leave no exception unretrieved."""
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    journal = await opened()
    writer = await written(journal, meta(clock), 2)
    with full_disk(path):
        with stalled(path):
            create = await going(Writer.begin(journal, meta(clock), ["n"]))
            append = await going(writer.say("x" * 9000))
            for task in (create, append):
                task.cancel()
            await asyncio.wait([create, append])
        with pytest.raises(StoreUnavailable):
            await journal.claim(writer.stream_id)
    gc.collect()
    await going(asyncio.sleep(0))
    assert complaints == []
    assert await journal.find("n") is None
