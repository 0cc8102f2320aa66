"""The writer of one stream: takes what its producer yields, numbers it, appends it.

A producer yields lists of chunks, all that one read of its source brought, and is asked for the next only when these
are journaled.  So nothing is shown that could be lost (I1), what gathers meanwhile becomes the next batch (group commit
without a timer), and a store that is slow slows the source through the source's own flow control: nothing is queued
here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from typing import TypeVar

from midstream.codec import native
from midstream.codec.text import Mender
from midstream.errors import MidstreamError, ProducerFailed, StoreUnavailable, UnknownStream, WriterError
from midstream.journal.base import Journal
from midstream.records import Chunk, Finish, Frame, Producer, StreamMeta, within
from midstream.wire import SLICE_BYTES, SLICE_FRAMES, STORE_PATIENCE

_log = logging.getLogger("midstream")
_How = TypeVar("_How")


class _Superseded(Exception):
    """Cancelled, claimed by another, or forgotten: its new owner has said or will say how the stream ended."""


class Writer:
    """One stream's only writer (I2).  `run` ends when the stream has its terminal record or belongs to another.

    For `patience` seconds the store may be away; then the source is let go, and the end is owed.
    """

    def __init__(
        self,
        journal: Journal,
        clock: Callable[[], float],
        meta: StreamMeta,
        epoch: int,
        next_seq: int,
        produce: Producer,
        patience: float = STORE_PATIENCE,
    ) -> None:
        self._clock = clock
        self._patience = patience
        self.meta = meta
        self.epoch = epoch
        self.next_seq = next_seq
        # What observers read; written once or as plain integers, since this is the hot path.
        self.appended = 0
        self.outcome: str | None = None
        self.failure: ProducerFailed | None = None
        self.first_token_at: float | None = None
        self.last_seen = meta.created_at
        # Set once the source has accepted the request, has said something, or is done with.
        self.heard = asyncio.Event()
        self._journal = journal
        self._produce = produce
        self._mender = Mender()
        # A batch that the store did not confirm, if any: it is repeated, unchanged, before anything newer (R3).
        self._doubted: list[Frame] = []
        self._seam = 0
        self._unwanted = False
        self._task: asyncio.Task[None] | None = None
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, ended: Callable[[Writer], None]) -> None:
        """Run as a task that this object holds (the loop itself keeps only weak references); `ended` hears of its end.

        One that was stopped before ends without its producer having begun.
        """
        if self._unwanted:
            asyncio.get_running_loop().call_soon(self._stopped, ended)
            return
        self._task = asyncio.create_task(self._run(), name=f"writer {self.meta.stream_id}")
        self._task.add_done_callback(lambda _: self._stopped(ended))

    def _stopped(self, ended: Callable[[Writer], None]) -> None:
        self.heard.set()
        self._over.set_result(None)
        ended(self)

    def stop(self) -> None:
        """Stop the producer, which closes its upstream.  The terminal record is the caller's business."""
        self._unwanted = True
        if self._task is not None:
            self._task.cancel()

    async def join(self) -> None:
        """Wait until the producer has let go of its source."""
        await asyncio.wait([self._over])

    async def _run(self) -> None:
        try:
            try:
                await self._write_all()
            except ProducerFailed as failure:
                await self._fail(failure)
            except _Superseded:
                raise
            except (Exception, asyncio.CancelledError) as error:  # the stream must end, whatever the producer did (I7)
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                    raise  # by `stop`, or with the loop; else something that the producer waited for was cancelled
                _log.exception("the producer of stream %s failed", self.meta.stream_id)
                await self._fail(ProducerFailed("producer_error", f"{type(error).__name__} in the producer"))
        except _Superseded as superseded:
            _log.debug("writer of stream %s stops: %s", self.meta.stream_id, superseded)
        except ProducerFailed as failure:
            _log.error("stream %s could not be ended: %s", self.meta.stream_id, failure)

    async def _write_all(self) -> None:
        async with aclosing(self._produce) as batches:
            async for batch in batches:
                self.heard.set()
                if isinstance(batch, Finish):
                    if self._seam:  # the usage is that of the last run, which began there
                        batch.more = {**(batch.more or {}), "usage_from_seq": self._seam}
                    await self._end(native.done, batch, "done")
                    return
                frames = self._frames(batch)
                if frames and self.first_token_at is None:
                    self.first_token_at = self._clock()
                await self._append(frames, self._patience)
        raise ProducerFailed("upstream_truncated", "the source ended without saying how")

    def _frames(self, chunks: list[Chunk]) -> list[Frame]:
        frames, seq = [], self.next_seq
        for chunk in chunks:
            for piece in self._valid(chunk):
                if piece.more is not None and "seam" in piece.more:
                    self._seam = seq
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

    async def _append(self, frames: list[Frame], patience: float | None) -> None:
        """Raises _Superseded, and ProducerFailed where the store has lost records, or is away for longer than
        `patience` (in seconds; None: for ever)."""
        at, size = 0, len(frames)
        try:
            while at < size:
                batch = frames if size == 1 else within(frames[at : at + SLICE_FRAMES], SLICE_BYTES)
                try:
                    await self._journal.append(self.meta.stream_id, batch, epoch=self.epoch, first_seq=self.next_seq)
                except StoreUnavailable as away:
                    await self._append_later(batch, patience, away)
                count = len(batch)
                self.next_seq += count
                self.appended += count
                at += count
        except (WriterError, UnknownStream) as error:
            raise _Superseded(str(error)) from error
        except MidstreamError as error:
            if isinstance(error, StoreUnavailable):
                raise ProducerFailed("store_unavailable", str(error)) from error
            # A store that has lost what it had confirmed says where the end can still be written (I8).
            self._doubted, self.next_seq = [], error.facts.get("expected", self.next_seq)
            raise ProducerFailed("store_lost", str(error)) from error

    async def _append_later(self, batch: list[Frame], patience: float | None, away: StoreUnavailable) -> None:
        """Ask again while the store is away.  Meanwhile the source is not read: its own flow control slows it."""
        self._doubted = batch
        clock = asyncio.get_running_loop().time
        give_up = None if patience is None else clock() + patience
        pause = 0.05
        while give_up is None or clock() < give_up:
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)
            try:
                await self._journal.append(self.meta.stream_id, batch, epoch=self.epoch, first_seq=self.next_seq)
            except StoreUnavailable as still:
                away = still
            else:
                self._doubted = []
                return
        raise away

    async def _fail(self, failure: ProducerFailed) -> None:
        self.failure = failure
        try:
            native.failed(self.next_seq, failure)
        except TypeError:  # facts that are no JSON: the stream ends without them
            failure = ProducerFailed("producer_error", failure.detail)
        await self._end(native.failed, failure, "failed")

    async def _end(self, encode: Callable[[int, _How], Frame], how: _How, outcome: str) -> None:
        """Append the terminal record.  While the store is away it is owed, for as long as this process lives."""
        frames = list(self._doubted)
        for chunk in self._mender.rest():
            frames.append(native.token(self.next_seq + len(frames), chunk))
        frames.append(encode(self.next_seq + len(frames), how))
        await self._append(frames, patience=None)
        self.outcome = outcome


class Starts:
    """Lets producers start one per turn of the loop, and while requests keep arriving lets these go first.

    A start is a request to an upstream, a third of a millisecond of work: twenty at once would hold up the first byte
    of every reader that came with them.  None waits longer than `_PATIENCE` seconds for others.
    """

    _PATIENCE = 0.010

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._since = 0.0
        self._arrived = False

    def add(self, start: Callable[[], None]) -> None:
        """Call `start` when it is its turn."""
        if not self._waiting:
            loop = asyncio.get_running_loop()
            self._since = loop.time()
            loop.call_soon(self._next)
        self._waiting.append(start)
        self._arrived = True

    def _next(self) -> None:
        loop = asyncio.get_running_loop()
        if self._arrived and loop.time() - self._since < self._PATIENCE:
            self._arrived = False
        else:
            self._waiting.popleft()()
        if self._waiting:
            loop.call_soon(self._next)
