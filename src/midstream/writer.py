"""The writer of one stream: takes what its producer yields, numbers it, appends it.

A producer yields lists of chunks, all that one read of its source brought, and is asked for the next only when these
are journaled.  So nothing is shown that could be lost (I1), what gathers meanwhile becomes the next batch (group commit
without a timer), and a store that is slow slows the source through the source's own flow control: nothing is queued
here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import TypeVar

from midstream.codec import native
from midstream.codec.text import Mender
from midstream.errors import MidstreamError, ProducerFailed, UnknownStream, WriterError
from midstream.journal.base import Journal
from midstream.records import Chunk, Finish, Frame, StreamMeta
from midstream.wire import SLICE_BYTES, SLICE_FRAMES

_log = logging.getLogger("midstream")
_How = TypeVar("_How")

# What a producer is to the core.  It ends by yielding a Finish; it raises ProducerFailed; anything else it raises is a
# fault of ours or of the library's user, and is told as `producer_error`.
Producer = AsyncIterator[list[Chunk] | Finish]


class Writer:
    """One stream's only writer (I2).  `run` ends when the stream has its terminal record or belongs to another."""

    def __init__(
        self,
        journal: Journal,
        clock: Callable[[], float],
        meta: StreamMeta,
        epoch: int,
        next_seq: int,
        produce: Producer,
    ) -> None:
        self._clock = clock
        self.meta = meta
        self.epoch = epoch
        self.next_seq = next_seq
        # What observers read; written once or as plain integers, since this is the hot path.
        self.appended = 0
        self.outcome: str | None = None
        self.failure: ProducerFailed | None = None
        self.first_token_at: float | None = None
        self.last_seen = meta.created_at
        self._journal = journal
        self._produce = produce
        self._mender = Mender()
        self._task: asyncio.Task[None] | None = None

    def start(self, ended: Callable[[Writer], None], go: asyncio.Future[None]) -> None:
        """Run as a task that this object holds (the loop itself keeps only weak references), once `go` is set."""
        self._task = asyncio.create_task(self._run(go), name=f"writer {self.meta.stream_id}")
        self._task.add_done_callback(lambda _: ended(self))

    def stop(self) -> None:
        """Stop the producer, which closes its upstream.  The terminal record is the caller's business."""
        if self._task is not None:
            self._task.cancel()

    async def join(self) -> None:
        """Wait until the producer has let go of its source."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self, go: asyncio.Future[None]) -> None:
        try:
            try:
                await go
                await self._write_all()
            except ProducerFailed as failure:
                await self._fail(failure)
            except (WriterError, UnknownStream):
                raise
            except MidstreamError as error:
                await self._fail(ProducerFailed(error.code, error.detail, retryable=True))
            except Exception as error:  # the stream must end, whatever the producer did (I7)
                _log.exception("the producer of stream %s failed", self.meta.stream_id)
                message = f"{type(error).__name__} in the producer"
                await self._fail(ProducerFailed("producer_error", message, retryable=False))
        except (WriterError, UnknownStream) as error:
            # Cancelled, claimed by another, or forgotten: its new owner has said or will say how it ended.
            _log.debug("writer of stream %s stops: %s", self.meta.stream_id, error)

    async def _write_all(self) -> None:
        async with aclosing(self._produce) as batches:  # type: ignore[type-var]  # producers are async generators
            async for batch in batches:
                if isinstance(batch, Finish):
                    await self._end(native.done, batch, "done")
                    return
                frames = self._frames(batch)
                if frames and self.first_token_at is None:
                    self.first_token_at = self._clock()
                await self._append(frames)
        raise ProducerFailed("upstream_truncated", "the source ended without saying how", retryable=True)

    def _frames(self, chunks: list[Chunk]) -> list[Frame]:
        frames, seq = [], self.next_seq
        for chunk in chunks:
            for piece in self._valid(chunk):
                frames.append(native.token(seq, piece))
                seq += 1
        return frames

    def _valid(self, chunk: Chunk) -> list[Chunk]:
        """The chunk as records can hold it: valid Unicode, no field over its bound, nothing that says nothing."""
        if chunk.more is None:
            delta = chunk.delta
            # isascii is a flag of the string: the common chunk costs no scan and no copy here.
            if delta and len(delta) < 8192 and not self._mender.pending and delta.isascii():
                return [chunk]
        mended = self._mender.mend(chunk)
        return [] if mended is None else list(native.bounded(mended))

    async def _append(self, frames: list[Frame]) -> None:
        size = len(frames)
        if size == 1:
            await self._journal.append(self.meta.stream_id, frames, epoch=self.epoch, first_seq=self.next_seq)
            self.next_seq += 1
            self.appended += 1
            return
        at = 0
        while at < size:
            batch = _slice(frames, at)
            await self._journal.append(self.meta.stream_id, batch, epoch=self.epoch, first_seq=self.next_seq)
            self.next_seq += len(batch)
            self.appended += len(batch)
            at += len(batch)

    async def _fail(self, failure: ProducerFailed) -> None:
        self.failure = failure
        await self._end(native.failed, failure, "failed")

    async def _end(self, encode: Callable[[int, _How], Frame], how: _How, outcome: str) -> None:
        rest = [native.token(self.next_seq + at, chunk) for at, chunk in enumerate(self._mender.rest())]
        await self._append([*rest, encode(self.next_seq + len(rest), how)])
        self.outcome = outcome


def _slice(frames: list[Frame], at: int) -> list[Frame]:
    """The frames from `at` that may travel as one batch of a store."""
    batch = frames[at : at + SLICE_FRAMES]
    total = 0
    for count, frame in enumerate(batch):
        total += len(frame)
        if total > SLICE_BYTES and count:
            return batch[:count]
    return batch
