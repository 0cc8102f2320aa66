"""The journal port: what every store of records does.  Language models are unknown to it.

`memory.py` is the readable reference.  A back end is done when it passes `midstream.testing.journal_contract`,
unchanged; what it cannot promise is a declared trait, not a skipped test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from midstream.errors import ProducerFailed
from midstream.records import Fold, Frame, Page, StreamMeta, StreamState
from midstream.wire import SLICE_BYTES, SLICE_FRAMES, CancelReason


@dataclass(frozen=True, slots=True)
class Traits:
    """What a back end promises to survive, and who may share it."""

    name: str
    durable: bool  # records outlive the process that wrote them (I1); one that is not waits for nothing, in no verb
    shared: bool  # several processes may use the store at once


@dataclass(slots=True)
class RoundTrips:
    """How often a journal has waited for its store, and for how many seconds in all.

    Two plain numbers, added to once a trip and read when somebody asks for metrics.
    """

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one that took so long, whatever came of it."""
        self.count += 1
        self.seconds += seconds


class Created(NamedTuple):
    """What `create` did: the stream, and whether it stood before under one of the names."""

    state: StreamState
    existed: bool


class Snapshot(NamedTuple):
    """Fold, retained frames and state, all of one instant.  The fold is the caller's to go on with."""

    fold: Fold
    frames: list[Frame]
    state: StreamState


class Orphan(NamedTuple):
    """A stream taken over from a process that is gone.

    `intact`: everything its writer was told is kept is there.  Otherwise the store may have come back without the
    newest records, and the stream must not be written on, only ended: some reader may have seen more of it (I8).
    """

    state: StreamState
    intact: bool


# How a stream ends whose writer's process is gone, where nobody goes on with it.
WRITER_LOST = ProducerFailed("writer_lost", "the gateway that wrote this stream stopped before its end")


class Listener(Protocol):
    """Whom a shared journal tells what it notices by itself, and asks what it cannot know.

    Called on the event loop; must be cheap and must not raise.
    """

    def orphaned(self, stream_id: str) -> None:
        """Somebody here waits on a stream whose writer's process is gone: `claim_orphan` it.

        Told again with each look, about once a second, until somebody has.
        """

    def superseded(self, stream_id: str) -> None:
        """This process is not the writer of the stream any more: it was claimed, cancelled or forgotten elsewhere, or
        the lease of this process was lost.  Its producer should stop; what it still appends is refused.
        """

    def lowest(self, stream_id: str) -> int | None:
        """The lowest position of any reader of the stream connected to this process; None without one."""


class Journal(Protocol):
    """The store of records.  Unless said otherwise a verb raises UnknownStream for a stream that does not exist, and
    StoreUnavailable when the store does not answer; then nothing is known of what it did."""

    traits: Traits

    async def open(self) -> None:
        """Make the store ready.  Streams whose writer is gone are ended `failed` `writer_lost` first, but where a
        listener is there to decide: then they are `orphans`.

        A shared store that does not answer now is no error: verbs raise StoreUnavailable until it does.  Raises
        JournalInUse, JournalCorrupt, JournalError when the store will never let us in.
        """

    def available(self) -> bool:
        """Whether verbs can be expected to work: the store answers and, where it is shared, our lease holds."""

    async def close(self) -> None:
        """Let go of the store.  Waits for what was appended; wakes every `wait`."""

    async def create(self, meta: StreamMeta, frames: list[Frame], names: Sequence[str] = ()) -> Created:
        """Begin a stream under epoch 1 with these records (its `start`), and bind the names to it.

        Exactly one of several racing creates wins a name; the others get the winner's stream with `existed` set, and
        nothing is created.  A name lives as long as its stream.  Raises OutOfSpace.
        """

    async def append(self, stream_id: str, frames: list[Frame], *, epoch: int, first_seq: int) -> None:
        """Add consecutive records; on return they are kept as `traits` says, and readers are woken (R1–R4).

        Raises StaleWriter, StreamEnded, OutOfSequence.  The batch that was appended last may be repeated unchanged.
        After StoreUnavailable it should be: as it was, or with more records behind it.

        On a shared store only the process that created or claimed the stream may append.  A store that has lost the
        newest records is given them again, byte for byte, as far as this process still holds them; otherwise StoreLost,
        whose fact `expected` is the seq at which the stream can still be ended.
        """

    async def read(self, stream_id: str, after: int, limit: int = SLICE_FRAMES, max_bytes: int = SLICE_BYTES) -> Page:
        """Records after `after`, oldest first, at most `limit` and, past the first, at most `max_bytes`.

        Records and state are of one instant.  Where the record after `after` is no longer retained the page is empty
        and its `oldest_retained_seq` tells (R8).  Raises StoreLost where it should be there and is not; on a shared
        store CursorAhead, to a reader that was given records which the store has lost since.
        """

    def peek(self, stream_id: str, after: int) -> Page | None:
        """What `read` would give, if it is at hand in this process; None: ask `read`.

        Readers at the live end are served by this, without suspending.
        """

    async def wait(self, stream_id: str, after: int) -> None:
        """Return once there may be something after `after`, at once if there is or the stream has ended or gone.

        Level-triggered; may return for no reason.  Raises nothing for a stream that does not exist: the read will.
        """

    def call_when(self, stream_id: str, after: int, callback: Callable[[], None]) -> bool:
        """Call back, once, when there may be something after `after`.  False: there is already, look again.

        `wait` without a task to switch to.  The callback must be cheap and must not raise.
        """

    def wake(self, stream_id: str) -> None:
        """Make every `wait` on this stream return."""

    async def state(self, stream_id: str) -> StreamState:
        """The stream's state now."""

    async def snapshot(self, stream_id: str) -> Snapshot:
        """Fold, every retained record and the state, of one instant."""

    async def trim(self, stream_id: str, acked: int, floor: int | None) -> StreamState:
        """Take an ack and drop what it lets go: at or below both `acked` and `floor`, the lowest connected reader (R6).

        `floor` is of this process; what others `hold` is respected besides.  Also called with the ack of before when
        readers have moved.  Raises CursorAhead.
        """

    async def claim(self, stream_id: str) -> StreamState:
        """Take over writing: raise the epoch, so that the writer before is refused (R2).  Raises StreamEnded."""

    async def claim_orphan(self, stream_id: str) -> Orphan | None:
        """Take over writing from a process that is gone, in one step: of several that try exactly one gets the stream.

        None when it has ended, somebody else has it, its writer is alive, or that cannot be known yet (the store was
        away for so long that the living could not renew their leases).  The epoch counts take-overs: it is 1 without.
        """

    async def orphans(self) -> Sequence[str]:
        """Open streams whose writer's process is gone, as far as that can be known now."""

    def listen(self, listener: Listener) -> None:
        """Tell this listener, and no other one any more.  Before `open`, so that it hears of everything."""

    async def hold(self, stream_id: str, position: int | None) -> None:
        """Let other processes know the lowest position of this one's readers, so that their acks respect it (R6).

        To be called before a new reader's position is checked.  It counts for half a minute and is renewed by the
        journal, which asks its listener, until that has no reader any more; None ends it at once.
        """

    async def lowest_elsewhere(self, stream_id: str) -> int | None:
        """The lowest position that other processes tell of their readers; None when nobody reads elsewhere."""

    async def request_cancel(self, stream_id: str, reason: CancelReason) -> StreamState:
        """Claim, append `cancelled`, wake: one step.  After the end it changes nothing and returns the state."""

    async def touch(self, stream_id: str) -> None:
        """Note an access, which pushes the grace period on (R10); cheap when one was noted lately."""

    async def expire(self, stream_id: str) -> None:
        """Forget the stream, its names and its fold.  Unknown streams are no error."""

    async def sweep(self) -> list[str]:
        """Forget what has expired, and finished streams past the total of bytes.  Returns the ids forgotten."""

    async def find(self, name: str) -> str | None:
        """The stream a name is bound to."""

    async def list(self, owner: str) -> Sequence[StreamState]:
        """The owner's streams, newest first."""

    def retained_bytes(self) -> int:
        """Bytes held for all streams, as last known (for metrics)."""

    def round_trips(self) -> RoundTrips:
        """What this process has waited for: commits, pipelines, reads.  None where there is no store (for metrics)."""
