"""I1 on SQLite, with the real file: what a reader was given is on the disk, whatever happens to the process then."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest

from midstream.codec import native
from midstream.errors import JournalInUse
from midstream.follow import Follow
from midstream.journal import sqlite_commit
from midstream.journal.sqlite import SqliteJournal
from midstream.records import Chunk, Finish, Frame, Record
from midstream.testing.clock import ManualClock
from midstream.testing.journal_writer import Writer, meta, read_all
from midstream.testing.patience import soon

HERE = Path(__file__)
WAL_HEADER, FRAME_HEADER, PAGE = 32, 24, 4096  # https://sqlite.org/fileformat2.html#the_write_ahead_log


def text(stream_id: str, seq: int) -> str:
    """What the record says: nothing else in the file reads like it."""
    return f"<{stream_id}/{seq}>"


def told(stream_id: str, upto: int) -> list[Frame]:
    """The records 1 to `upto` of a stream in these tests."""
    tokens = [native.token(seq, Chunk(text(stream_id, seq))) for seq in range(2, upto + 1)]
    return [native.start(stream_id, "m"), *tokens]


# --- synced before seen ----------------------------------------------------------------------------------------------

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

/* Writes down, in their order, every write to a WAL (W, with its bytes) and every sync of one (S, once it is done). */

static int is_wal(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    return length > 4 && memcmp(path + length - 4, "-wal", 4) == 0;
}

static void note(char what, const void *data, size_t length) {
    static int log = -1;
    if (log < 0) log = atoi(getenv("SHIM_LOG"));
    char *entry = malloc(length + 32);
    int head = sprintf(entry, "%c%zu\n", what, length);
    memcpy(entry + head, data, length);
    if (write(log, entry, head + length) != (ssize_t)(head + length)) abort();
    free(entry);
}

#define REAL(name) static __typeof__(&name) real; if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name)

ssize_t pwrite64(int fd, const void *data, size_t length, off64_t at) {
    REAL(pwrite64);
    if (is_wal(fd)) note('W', data, length);
    return real(fd, data, length, at);
}

ssize_t pwrite(int fd, const void *data, size_t length, off_t at) {
    REAL(pwrite);
    if (is_wal(fd)) note('W', data, length);
    return real(fd, data, length, at);
}

int fsync(int fd) {
    REAL(fsync);
    int result = real(fd);
    if (result == 0 && is_wal(fd)) note('S', "", 0);
    return result;
}

int fdatasync(int fd) {
    REAL(fdatasync);
    int result = real(fd);
    if (result == 0 && is_wal(fd)) note('S', "", 0);
    return result;
}
"""


def a_compiler() -> str:
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("the order of writes, syncs and wake-ups is watched by a shim that needs Linux and a C compiler")
    return compiler


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = a_compiler()
    source = tmp_path_factory.mktemp("shim") / "shim.c"
    source.write_text(SHIM)
    library = source.with_suffix(".so")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


class Event(NamedTuple):
    """W: a write to the WAL. S: a sync of it, done. M: a mark of the process: a record was seen."""

    kind: str
    data: bytes


def events(log: bytes) -> list[Event]:
    found, at = [], 0
    while at < len(log):
        end = log.index(b"\n", at)
        length = int(log[at + 1 : end])
        found.append(Event(chr(log[at]), log[end + 1 : end + 1 + length]))
        at = end + 1 + length
    return found


def test_every_record_is_synced_before_it_is_seen(shim: Path, tmp_path: Path) -> None:
    """Between the write that holds a record and the wake-up of its writer and its reader the WAL was synced (I1)."""
    log = tmp_path / "events"
    with log.open("ab") as shared:
        environment = os.environ | {"LD_PRELOAD": str(shim), "SHIM_LOG": str(shared.fileno())}
        child = [sys.executable, str(HERE), "seen", str(tmp_path / "journal.db"), str(shared.fileno())]
        subprocess.run(child, env=environment, pass_fds=[shared.fileno()], check=True, timeout=30)
    written: list[bytes] = []
    synced = 0  # how many of the writes were on the disk
    seen = []
    for event in events(log.read_bytes()):
        if event.kind == "W":
            written.append(event.data)
        elif event.kind == "S":
            synced = len(written)
        else:
            who, record = event.data.split()
            assert record in b"".join(written[:synced]), f"{record!r} was seen by the {who!r} before it was synced"
            seen.append((who, record))
    streams = [f"s{i}" for i in range(4)]
    records = [text(stream_id, seq).encode() for stream_id in streams for seq in range(2, 32)]
    assert sorted(seen) == sorted((who, record) for who in (b"reader", b"writer") for record in records)


async def mark_what_is_seen(path: str, log: int) -> None:
    """The child of that test: four streams with a reader each, which mark every record as they come to know of it."""
    journal = SqliteJournal(path, ManualClock())
    await journal.open()

    def mark(who: str, stream_id: str, seq: int) -> None:
        data = f"{who} {text(stream_id, seq)}".encode()
        os.write(log, b"M%d\n%b" % (len(data), data))

    async def read(stream_id: str) -> None:
        async for page in Follow(journal, stream_id, 1):
            for record in page.records():
                if record.event == "token":
                    mark("reader", stream_id, record.seq)

    async def write(stream_id: str) -> None:
        writer = await Writer.begin(journal, meta(ManualClock(), stream_id))
        reader = asyncio.ensure_future(read(stream_id))
        for seq in range(2, 32):
            await writer.say(text(stream_id, seq))
            mark("writer", stream_id, seq)
        await writer.finish()
        await reader

    await asyncio.gather(*(write(f"s{i}") for i in range(4)))
    await journal.close()


# --- a power cut after any frame of the WAL --------------------------------------------------------------------------


class Delivered(NamedTuple):
    """What readers had been given, and callers been told, when the WAL was this long."""

    wal_bytes: int
    frames: dict[str, list[Frame]]
    acked: dict[str, int]


class Witness:
    """Streams with readers; remembers what was delivered when."""

    def __init__(self, journal: SqliteJournal, path: Path) -> None:
        self.journal = journal
        self.wal = Path(f"{path}-wal")
        self.writers: list[Writer] = []
        self.readers: list[asyncio.Task[None]] = []
        self.seen: dict[str, list[Frame]] = {}
        self.acked: dict[str, int] = {}
        self.delivered: list[Delivered] = []

    async def begin(self, stream_id: str, clock: ManualClock) -> None:
        self.writers.append(await Writer.begin(self.journal, meta(clock, stream_id), [f"name of {stream_id}"]))
        self.seen[stream_id] = []
        self.readers.append(asyncio.ensure_future(self.read(stream_id)))

    async def read(self, stream_id: str) -> None:
        async for page in Follow(self.journal, stream_id, 0):
            self.seen[stream_id] += page.frames
            self.note()

    async def ack(self, stream_id: str, seq: int) -> None:
        await self.journal.trim(stream_id, seq, None)
        self.acked[stream_id] = seq
        self.note()

    def note(self) -> None:
        frames = {stream_id: list(seen) for stream_id, seen in self.seen.items()}
        self.delivered.append(Delivered(self.wal.stat().st_size, frames, dict(self.acked)))

    def at(self, wal_bytes: int) -> Delivered:
        """The most that had been delivered while the WAL was at most this long."""
        so_far = [delivered for delivered in self.delivered if delivered.wal_bytes <= wal_bytes]
        return so_far[-1] if so_far else Delivered(0, {}, {})


async def a_few_lives(witness: Witness, clock: ManualClock) -> None:
    """Streams that begin, write together and alone, are acked, end, are cancelled and are taken over."""
    for round_ in range(8):
        if round_ in (0, 1, 4):
            await witness.begin(f"s{round_}", clock)
        for texts in (["one "], ["two ", "three "]):
            await asyncio.gather(*(writer.say(*texts) for writer in witness.writers))
        await witness.writers[0].say("alone " * 100)
    first, second, third = witness.writers
    await witness.ack(first.stream_id, 9)
    await first.finish(Finish("stop", {"total_tokens": 40}))
    await witness.ack(first.stream_id, 11)
    await witness.journal.request_cancel(second.stream_id, "client")
    third.epoch = (await witness.journal.claim(third.stream_id)).epoch
    await third.say("after the claim")
    await soon(asyncio.gather(*witness.readers[:2]))


@pytest.mark.parametrize("log_bytes", [sqlite_commit.LOG_BYTES, 1500], ids=["log only", "log and segments"])
async def test_whatever_frame_was_the_last_nothing_delivered_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_bytes: int
) -> None:
    """For each frame of the WAL, the file with a WAL that ends there holds all that had been delivered by then (I1)."""
    monkeypatch.setattr(sqlite_commit, "LOG_BYTES", log_bytes)
    clock, path = ManualClock(), tmp_path / "journal.db"
    journal = SqliteJournal(str(path), clock)
    await journal.open()
    witness = Witness(journal, path)
    await a_few_lives(witness, clock)
    database, wal = bytes_of(path), bytes_of(witness.wal)
    await journal.close()
    for reader in witness.readers:
        reader.cancel()
    ends = range(WAL_HEADER, len(wal) + 1, FRAME_HEADER + PAGE)
    assert len(ends) > 50
    assert ends[-1] == len(wal)
    assert len({len(witness.at(end).frames) for end in ends}) == 4
    for end in ends:
        copy = tmp_path / f"cut-{end}.db"
        put(copy, database)
        put(Path(f"{copy}-wal"), wal[:end])
        await holds_at_least(copy, witness.at(end), clock)


def bytes_of(path: Path) -> bytes:
    return path.read_bytes()


def put(path: Path, data: bytes) -> None:
    path.write_bytes(data)


async def holds_at_least(path: Path, delivered: Delivered, clock: ManualClock) -> None:
    journal = SqliteJournal(str(path), clock)
    await journal.open()
    for stream_id, frames in delivered.frames.items():
        state = await journal.state(stream_id)
        assert state.status != "open"
        assert state.acked_seq >= delivered.acked.get(stream_id, 0)
        assert state.oldest_retained_seq <= 12
        kept = await read_all(journal, stream_id, state.oldest_retained_seq - 1)
        assert kept[: len(frames) - state.oldest_retained_seq + 1] == frames[state.oldest_retained_seq - 1 :]
        assert await journal.find(f"name of {stream_id}") == stream_id
    await journal.close()


# --- SIGKILL ---------------------------------------------------------------------------------------------------------


class Child:
    """A process that appends to the journal without pause, and reports each append once it is durable."""

    def __init__(self, path: Path, life: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE), "append", str(path), str(life)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.lines = self.process.stdout
        self.reported: dict[str, int] = {}

    def listen(self, lines: int) -> None:
        for line in self.lines:
            stream_id, seq = line.split()
            self.reported[stream_id] = int(seq)
            lines -= 1
            if lines == 0:
                return
        raise AssertionError("the child ended by itself")

    def kill(self) -> None:
        """SIGKILL, and take what it has still reported."""
        self.process.send_signal(signal.SIGKILL)
        rest, _ = self.process.communicate(timeout=10)
        for line in rest.splitlines(keepends=True):
            if line.endswith("\n"):
                stream_id, seq = line.split()
                self.reported[stream_id] = int(seq)


async def append_for_ever(path: str, life: int) -> None:
    """The child: one stream after another is finished at seq 12, three more go on until the kill."""
    journal = SqliteJournal(path, ManualClock())
    await journal.open()

    async def write(stream_id: str, upto: int) -> None:
        writer = await Writer.begin(journal, meta(ManualClock(), stream_id))
        report(stream_id, 1)
        for seq in range(2, upto):
            await writer.say(text(stream_id, seq))
            report(stream_id, seq)
        await writer.append([native.done(upto, Finish("stop"))])
        report(stream_id, upto)

    def report(stream_id: str, seq: int) -> None:
        os.write(1, f"{stream_id} {seq}\n".encode())

    async def short_ones() -> None:
        for number in count():
            await write(f"short-{life}-{number}", 12)

    await asyncio.gather(short_ones(), *(write(f"long-{life}-{i}", 1 << 40) for i in range(3)))


async def opened_by_another(path: Path) -> int | None:
    try:
        await SqliteJournal(str(path), ManualClock()).open()
    except JournalInUse as refusal:
        pid: int = refusal.facts["pid"]
        return pid
    return None


async def test_a_killed_process_loses_nothing_it_reported(tmp_path: Path) -> None:
    """After each of ten kills every reported record is there, its stream has ended, and ended ones are unchanged."""
    path = tmp_path / "journal.db"
    ended: dict[str, list[Frame]] = {}
    for life, lines in enumerate((1, 2, 5, 13, 40, 41, 90, 150, 300, 700)):
        child = Child(path, life)
        try:
            child.listen(lines)
            assert await opened_by_another(path) == child.process.pid
        finally:
            child.kill()
        assert sum(child.reported.values()) >= lines / 4
        ended = await after_the_kill(path, child.reported, ended)
    assert len(ended) >= 40


async def after_the_kill(path: Path, reported: dict[str, int], ended: dict[str, list[Frame]]) -> dict[str, list[Frame]]:
    """Checks what a new process finds; returns all streams, which have ended, and their records."""
    journal = SqliteJournal(str(path), ManualClock())
    await journal.open()
    for stream_id, frames in ended.items():
        assert await read_all(journal, stream_id) == frames
    for stream_id, seq in reported.items():
        frames = await read_all(journal, stream_id)
        last = Record.of(frames[-1])
        assert frames[:-1] == told(stream_id, len(frames) - 1)
        assert len(frames) >= seq
        if last.event == "done":
            assert (stream_id[:6], frames[-1]) == ("short-", native.done(12, Finish("stop")))
        else:
            assert (last.event, last.json()["error"]["code"]) == ("failed", "writer_lost")
            assert seq < len(frames)
        ended[stream_id] = frames
    await journal.close()
    return ended


if __name__ == "__main__":
    what, where, number = sys.argv[1:]
    asyncio.run({"seen": mark_what_is_seen, "append": append_for_ever}[what](where, int(number)))
