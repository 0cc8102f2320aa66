"""What the journal contract is told with: a writer that remembers what it wrote, and readers that take all there is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol
from uuid import uuid4

from midstream import rules
from midstream.codec import native
from midstream.journal.base import Journal, Snapshot
from midstream.records import Choice, Chunk, Finish, Frame, Record, StreamMeta
from midstream.rules import Bounds


class Clock(Protocol):
    """The time a journal goes by, in seconds since 1970, and how to let some of it pass."""

    def __call__(self) -> float: ...

    def advance(self, seconds: float) -> None: ...


class MakeJournal(Protocol):
    """Opens a journal on an empty store of its own; without `bounds`, under the default ones."""

    async def __call__(self, bounds: Bounds | None = None) -> Journal: ...


class Reopen(Protocol):
    """Lets go of a journal and opens another on the same store, as the next process would."""

    async def __call__(self, journal: Journal) -> Journal: ...


def meta(clock: Clock, stream_id: str | None = None, **fields: Any) -> StreamMeta:
    """A stream to be created, with an id of its own unless one is given."""
    told: dict[str, Any] = {"owner": "ada", "model": "m", "created_at": clock(), "retain": 600.0, **fields}
    return StreamMeta(stream_id=stream_id or uuid4().hex, **told)


def tokens(first_seq: int, texts: Iterable[str]) -> list[Frame]:
    """One `token` record per text."""
    return [native.token(seq, Chunk(text)) for seq, text in enumerate(texts, first_seq)]


class Writer:
    """Writes one stream.  `frames` are all records that it wrote, `epoch` is the one it writes under."""

    def __init__(self, journal: Journal, stream_id: str, frames: Sequence[Frame] = (), epoch: int = 1) -> None:
        self.journal = journal
        self.stream_id = stream_id
        self.frames = list(frames)
        self.epoch = epoch

    @classmethod
    async def begin(cls, journal: Journal, told: StreamMeta, names: Sequence[str] = ()) -> Writer:
        """Create the stream with its `start` record, which is seq 1."""
        start = native.start(told.stream_id, told.model)
        created = await journal.create(told, [start], names)
        assert not created.existed
        assert created.state.meta == told
        return cls(journal, told.stream_id, [start], created.state.epoch)

    @property
    def next_seq(self) -> int:
        return len(self.frames) + 1

    async def append(self, frames: list[Frame]) -> None:
        """Append one batch at the next number."""
        await self.journal.append(self.stream_id, frames, epoch=self.epoch, first_seq=self.next_seq)
        self.frames += frames

    async def say(self, *texts: str) -> None:
        """Append one token per text, as one batch."""
        await self.append(tokens(self.next_seq, texts))

    async def say_one_by_one(self, count: int, text: str = "word ") -> None:
        for _ in range(count):
            await self.say(text)

    async def finish(self, finish: Finish | None = None) -> None:
        """Append `done`."""
        await self.append([native.done(self.next_seq, finish or Finish("stop"))])


async def written(journal: Journal, told: StreamMeta, upto: int) -> Writer:
    """A stream whose records are 1 to `upto`, appended one at a time; the last one is a token."""
    writer = await Writer.begin(journal, told)
    await writer.say_one_by_one(upto - 1)
    return writer


async def read_all(journal: Journal, stream_id: str, after: int = 0, **limits: int) -> list[Frame]:
    """Every frame after a position, page by page, until a page is empty."""
    frames: list[Frame] = []
    while True:
        page = await journal.read(stream_id, after + len(frames), **limits)
        assert page.last_seq == after + len(frames) + len(page.frames)
        if not page.frames:
            return frames
        frames += page.frames


async def resumed(journal: Journal, stream_id: str, position: int) -> list[int]:
    """Seqs that a reader resuming at `position` is given.  Raises CursorExpired, CursorAhead (R5)."""
    rules.honour(await journal.state(stream_id), position)
    return seqs(await read_all(journal, stream_id, position))


def seqs(frames: Iterable[Frame]) -> list[int]:
    return [Record.of(frame).seq for frame in frames]


def answers(snapshot: Snapshot) -> dict[int, Choice]:
    """The whole answer by choice: what was dropped, and what is retained."""
    rules.fold(snapshot.fold, snapshot.frames)
    return snapshot.fold.choices


def text_of(snapshot: Snapshot) -> str:
    """The text of the first choice so far."""
    answer = answers(snapshot).get(0)
    return answer.text.decode() if answer else ""
