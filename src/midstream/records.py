"""The values the core passes around.

A *record* is kept as its SSE **frame**: the bytes `id: 7\\nevent: token\\ndata: {…}\\n\\n`, built once at append.  One
object of about 140 bytes per token serves the journal and every reader; a parsed record would cost three times that
and be encoded again per reader.  Seq, event and JSON are cut back out of the frame where a transport needs them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from midstream.wire import OPEN, Status

Frame = bytes

# What a frame costs beyond its bytes: the header of a bytes object and its pointer in the list.
FRAME_OVERHEAD = 41
# What a stream costs beyond its frames, its fold, its request and its names: counters, lists and entries of tables.
STREAM_OVERHEAD = 1664


class Record(NamedTuple):
    """One journal entry.  `data` is compact JSON that carries `seq` again."""

    seq: int
    event: str
    data: bytes

    @property
    def frame(self) -> Frame:
        """The bytes that are kept and sent."""
        return b"id: %d\nevent: %b\ndata: %b\n\n" % (self.seq, self.event.encode(), self.data)

    @classmethod
    def of(cls, frame: Frame) -> Record:
        """Cut a frame of ours back into its parts (not a parser for foreign SSE)."""
        first = frame.index(b"\n")
        second = frame.index(b"\n", first + 1)
        return cls(int(frame[4:first]), frame[first + 8 : second].decode(), frame[second + 7 : -2])

    def json(self) -> dict[str, Any]:
        """`data`, parsed."""
        fields: dict[str, Any] = orjson.loads(self.data)
        return fields


@dataclass(slots=True)
class Chunk:
    """Model output on its way into the journal: what one upstream chunk said about one choice.

    `delta` is its text.  `more` holds, only when present: `reasoning`, `refusal` (text), `tool_calls` (list of raw
    deltas), `choice` (index, when not 0), `logprobs`, `finish_reason` (where several choices are running), and
    `upstream` (what else the upstream sent, under `chunk`, `choice`, `delta`).
    """

    delta: str
    more: dict[str, Any] | None = None


@dataclass(slots=True)
class Finish:
    """How a generation ended by itself: the fields of the `done` record."""

    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    more: dict[str, Any] | None = None


# What a source yields of a generation.  An empty list says that the source has accepted the request, though it has said
# nothing yet.  It ends by yielding a Finish; it raises ProducerFailed; anything else it raises is a fault of ours or of
# the library's user, and is told as `producer_error`.
Producer = AsyncGenerator[list[Chunk] | Finish, None]


class StreamMeta(NamedTuple):
    """What is known of a stream before its first record, and never changes.

    `request` is JSON of what the first request asked (route and body), so that every rendering on every replica is a
    pure function of it and the records.  `retain` and `abandon_after` are seconds; None: never abandoned.
    """

    stream_id: str
    owner: str
    model: str
    created_at: float
    retain: float
    abandon_after: float | None = None
    request: bytes = b"{}"


class StreamState(NamedTuple):
    """A stream at one instant.  Times are seconds since 1970; `retained_bytes` is memory, overhead counted."""

    meta: StreamMeta
    status: Status
    epoch: int
    highest_seq: int
    oldest_retained_seq: int
    acked_seq: int
    trimmed_seq: int
    retained_bytes: int
    last_access: float
    ended_at: float | None = None

    @property
    def ended(self) -> bool:
        return self.status != OPEN

    @property
    def retained_records(self) -> int:
        return self.highest_seq - self.oldest_retained_seq + 1


class Page:
    """Records after a position and the stream's state, of one instant.

    `frames` are consecutive; `last_seq` is the seq of the last one (the position asked for when there are none).
    A plain class, not a frozen dataclass: one is made per reader per wake-up.
    """

    __slots__ = ("frames", "highest_seq", "last_seq", "oldest_retained_seq", "status")

    def __init__(
        self, frames: list[Frame], last_seq: int, highest_seq: int, oldest_retained_seq: int, status: Status
    ) -> None:
        self.frames = frames
        self.last_seq = last_seq
        self.highest_seq = highest_seq
        self.oldest_retained_seq = oldest_retained_seq
        self.status = status

    @property
    def ends(self) -> bool:
        """Whether the last record of this page is the terminal one."""
        return self.status != OPEN and self.last_seq == self.highest_seq

    def records(self) -> list[Record]:
        """For transports that do not send frames."""
        return [Record.of(frame) for frame in self.frames]


def within(frames: list[Frame], max_bytes: int) -> list[Frame]:
    """The first of these frames, as many as fit into `max_bytes`, at least one."""
    total = 0
    for count, frame in enumerate(frames):
        total += len(frame)
        if total > max_bytes and count:
            return frames[:count]
    return frames


@dataclass(slots=True)
class ToolCall:
    """A tool call as far as its deltas have come.  `position` is the upstream's own `index`.

    `deltas` is how many of them added to its arguments; `late` that the first one did not bring its id.
    """

    position: int
    id: str = ""
    type: str = "function"
    name: str = ""
    arguments: bytearray = field(default_factory=bytearray)
    more: dict[str, Any] | None = None
    deltas: int = 0
    late: bool = False


@dataclass(slots=True)
class Choice:
    """The sum of one choice's deltas.  Text is UTF-8 in a bytearray: appending is amortised O(1), a byte per ASCII.

    `logprobs` is JSON of its text's entries, each with a comma before it.
    """

    text: bytearray = field(default_factory=bytearray)
    reasoning: bytearray = field(default_factory=bytearray)
    refusal: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(slots=True)
class Part:
    """A stretch of the first choice's output: deltas of one kind with none of another kind of text between them.

    `kind` is `reasoning`, `text`, `refusal` or `call`; `deltas` counts them, `size` and `logprobs` are the bytes they
    added to the choice's fields.  A call is one part however its deltas come: the n-th such part is the choice's n-th
    call, which has its own counts.
    """

    kind: str
    deltas: int = 0
    size: int = 0
    logprobs: int = 0


@dataclass(slots=True)
class Fold:
    """What is kept of dropped records: the answer they told, though readers can no longer have them one by one.

    `upto` is the seq of the last record folded in.  `parts` tells in what order and out of how many deltas the first
    choice was said, on which the numbers of later Responses events depend.  `complete` is False once even the fold had
    to go.  `src` is the newest one of a pool stream: whose words these are, and up to which of its batches.
    """

    upto: int = 0
    complete: bool = True
    choices: dict[int, Choice] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    error: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    src: list[Any] | None = None
