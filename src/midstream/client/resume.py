"""How a reader keeps its place: the client's half of the protocol, without I/O.

A shell (`aio`, `sync`) does what `step` says and tells what came of it.  The laws (PROTOCOL.md, the checklist for
client writers):

- The position is the last record that was *dispatched*, that is returned by `step`: not the last one received.  What
  was received and not dispatched is fetched again after a drop, and whoever dies has lost nothing he was not given.
- Until the first record has arrived the request is the POST, under one Idempotency-Key, so that trying again never pays
  for a second generation; from then on it is a GET with the cursor.
- A dropped connection (reset, time-out, 5xx, 408, 429, silence, an end without a terminal record) is tried again from
  the same position after a wait that doubles, is jittered and capped, and is never shorter than `Retry-After`.  Only
  *progress*, a dispatched record, brings the wait back to the shortest: a gateway that takes each connection and says
  nothing must not be asked for ever.
- A position that cannot be honoured is raised, never mended here: to begin again, or to take the snapshot, is the
  caller's choice (I4).  So is every other refusal, once.
- The end is a terminal record.  A 204 is one only where the position itself was handed in: then its owner claims to
  have had the terminal record before.
- Only an event with an id is a record.  A repeated one is dropped, a gap is an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import orjson

from midstream.client.answers import Answer, GaveUp, UnexpectedAnswer, error_of, retry_after, silence
from midstream.client.steps import (
    Connect,
    Creation,
    Lost,
    Patience,
    Read,
    Record,
    Request,
    Resumed,
    Step,
    Wait,
    stream_path,
)
from midstream.codec.sse import Decoder, Event, EventTooLarge
from midstream.cursor import Cursor
from midstream.errors import MidstreamError, ProducerFailed
from midstream.wire import EXPIRED, H_IDEMPOTENCY, H_STREAM_ID, Q_CURSOR


class State(Enum):
    """Where a reader stands."""

    IDLE = "idle"
    CONNECTING = "connecting"
    STREAMING = "streaming"
    BACKING_OFF = "backing off"
    ENDED = "ended"
    FAILED = "failed"


# From each state, the ones that may follow.  Back to idle leads only the user's own leaving.
TRANSITIONS: dict[State, frozenset[State]] = {
    State.IDLE: frozenset({State.CONNECTING}),
    State.CONNECTING: frozenset({State.STREAMING, State.BACKING_OFF, State.ENDED, State.FAILED, State.IDLE}),
    State.STREAMING: frozenset({State.BACKING_OFF, State.ENDED, State.FAILED, State.IDLE}),
    State.BACKING_OFF: frozenset({State.CONNECTING}),
    State.ENDED: frozenset(),
    State.FAILED: frozenset(),
}


@dataclass(slots=True)
class _Failures:
    """Failed attempts since the last progress."""

    count: int = 0
    since: float = 0.0


@dataclass(slots=True)
class _Arrivals:
    """What one connection has brought and nobody has taken; errors stand behind the records that came before them."""

    last_seq: int
    decoder: Decoder = field(default_factory=Decoder)
    waiting: deque[Record | MidstreamError] = field(default_factory=deque)


class Reader:
    """One reader of one stream.

    origin   what to create, or the cursor to resume from
    clock    seconds, of any steady origin
    random   numbers in [0, 1), for the jitter
    notify   is told `Lost` and `Resumed`
    """

    def __init__(
        self,
        origin: Creation | Cursor,
        *,
        clock: Callable[[], float],
        random: Callable[[], float],
        patience: Patience | None = None,
        notify: Callable[[Lost | Resumed], None] | None = None,
    ) -> None:
        self.state = State.IDLE
        self.stream_id: str | None = None if isinstance(origin, Creation) else origin.stream_id
        self.outcome: Record | None = None
        self._seq = 0 if isinstance(origin, Creation) else origin.seq
        self._creation = origin if isinstance(origin, Creation) else None
        self._clock, self._random = clock, random
        self._patience = patience or Patience()
        self._notify = notify
        self._arrivals = _Arrivals(self._seq)
        self._failures = _Failures()
        self._arrived = self._creation is None
        self._reached = False
        self._moved = False
        self._due = 0.0
        self._silence = silence({})
        self._error: MidstreamError | None = None

    @property
    def position(self) -> Cursor | None:
        """What has been dispatched; None while the stream has no id yet."""
        return Cursor(self.stream_id, self._seq) if self.stream_id is not None else None

    @property
    def opened(self) -> bool:
        """Whether records of a stream with a name may come: before that a position could not even be told."""
        return self.state is State.STREAMING and self.stream_id is not None

    @property
    def waiting(self) -> int:
        """How many records have been received and not dispatched."""
        return len(self._arrivals.waiting)

    # --- what to do next --------------------------------------------------------------------------------------------

    def step(self) -> Step:
        """A record for the user, what the shell must do, or None at the end.

        Raises the error that ended the reader, each time: CursorExpired, CursorAhead, what else the gateway refused,
        GaveUp, UnexpectedAnswer.
        """
        if self._arrivals.waiting:
            return self._dispatch(self._arrivals.waiting.popleft())
        match self.state:
            case State.STREAMING:
                return Read(self._silence)
            case State.ENDED:
                return None
            case State.FAILED:
                assert self._error is not None
                raise self._error
            case State.BACKING_OFF if (left := self._due - self._clock()) > 0:
                return Wait(left)
            case State.CONNECTING:  # the shell was interrupted before it got an answer
                return Connect(self._request())
        self._go(State.CONNECTING)
        return Connect(self._request())

    def _dispatch(self, item: Record | MidstreamError) -> Record:
        if isinstance(item, MidstreamError):
            raise self._fail(item)
        self._seq = item.seq
        self._moved = True
        if self._failures.count:
            self._tell_resumed()
        if item.terminal:
            self.outcome = item
            self._go(State.ENDED)
        return item

    def _tell_resumed(self) -> None:
        failures, self._failures = self._failures, _Failures()
        position = self.position
        if self._notify is not None and position is not None:
            self._notify(Resumed(self._clock() - failures.since, position, failures.count))

    def _request(self) -> Request:
        headers = {"accept": "text/event-stream", "accept-encoding": "identity", "cache-control": "no-store"}
        if self._creation is not None and not self._arrived:
            headers["content-type"] = "application/json"
            headers[H_IDEMPOTENCY.lower()] = self._creation.idempotency_key
            return Request("POST", "/v1/stream", headers, self._creation.body, self._creation)
        position = self.position
        assert position is not None
        return Request(
            "GET", f"{stream_path(position.stream_id)}?{Q_CURSOR}={position.encode()}", headers, None, position
        )

    def _go(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"a reader that is {self.state.value} cannot become {state.value}")
        self.state = state

    # --- what came of it --------------------------------------------------------------------------------------------

    def answered(self, answer: Answer) -> None:
        """The gateway answered the request of `Connect`."""
        self._reached = True
        if answer.is_stream:
            self._open(answer)
        elif answer.worth_retrying:
            reason = error_of(answer)
            if isinstance(reason, ProducerFailed):
                self._fail(reason)
            else:
                self._retry(str(reason), retry_after(answer.headers))
        elif answer.status == 204 and self._arrived:
            self._nothing_more()
        elif answer.status in (200, 204):
            kind = answer.headers.get("content-type", "no content")
            self._fail(UnexpectedAnswer(f"status {answer.status} with {kind}: is this a Midstream gateway?"))
        else:
            self._fail(error_of(answer))

    def _open(self, answer: Answer) -> None:
        stream_id = answer.headers.get(H_STREAM_ID.lower())
        if self._arrived and stream_id not in (None, self.stream_id):
            self._fail(UnexpectedAnswer(f"asked for stream {self.stream_id}, got {stream_id}"))
            return
        # A POST that is repeated gets the same stream, or a new one when the first has been forgotten: nothing of it
        # had been dispatched.
        self.stream_id = stream_id or self.stream_id
        self._silence = silence(answer.headers)
        self._arrivals = _Arrivals(self._seq)
        self._go(State.STREAMING)

    def _nothing_more(self) -> None:
        if self._moved:
            told = f"status 204 after seq {self._seq}, which was no terminal record; take the snapshot"
            self._fail(UnexpectedAnswer(told))
        else:
            self._go(State.ENDED)

    def received(self, data: bytes) -> None:
        """Bytes of the open answer."""
        try:
            self._take(self._arrivals.decoder.feed(data))
        except EventTooLarge as error:
            self._take(error.events)
            self._arrivals.waiting.append(UnexpectedAnswer(str(error)))

    def _take(self, events: list[Event]) -> None:
        for event in events:
            try:
                record = self._record(event)
            except MidstreamError as error:
                self._arrivals.waiting.append(error)
                return
            if record is not None:
                self._arrivals.last_seq = record.seq
                self._arrivals.waiting.append(record)
                self._arrived = True

    def _record(self, event: Event) -> Record | None:
        """The record in an event; None for what is none or has been had.  Raises PositionError, UnexpectedAnswer."""
        if not event.id:
            if event.event == EXPIRED:
                raise error_of(Answer(409, body=event.data))
            return None
        data = _object(event.data)
        seq = data.get("seq")
        if type(seq) is not int or event.id != str(seq):
            raise UnexpectedAnswer(f"an event whose id is {event.id[:40]!r} holds seq {str(seq)[:40]!r}")
        expected = self._arrivals.last_seq + 1
        if seq < expected:
            return None
        if seq > expected:
            raise UnexpectedAnswer(f"seq {seq} came where {expected} was due: records are missing")
        if self.stream_id is None:
            self.stream_id = _stream_id(data)
        return Record(seq, event.event, data)

    def lost(self, reason: str) -> None:
        """The connection could not be made, broke, was silent for too long, or ended: all but a terminal record."""
        self._retry(reason, None)

    def _retry(self, reason: str, told_to_wait: float | None) -> None:
        self._failures.count += 1
        if self._failures.count == 1:
            self._failures.since = self._clock()
        patience, count = self._patience, self._failures.count
        if told_to_wait is not None and told_to_wait > patience.longest:
            self._give_up(f"{reason} (asks for {told_to_wait:g} s of patience)")
            return
        if count >= (patience.attempts if self._reached else patience.unreached):
            self._give_up(reason)
            return
        wait = patience.wait(count, self._random, told_to_wait or 0.0)
        self._due = self._clock() + wait
        self._go(State.BACKING_OFF)
        if self._notify is not None:
            self._notify(Lost(reason, self.position, count, wait))

    def _give_up(self, reason: str) -> None:
        position = self.position
        self._fail(GaveUp(reason, self._failures.count, position.encode() if position else None))

    def _fail(self, error: MidstreamError) -> MidstreamError:
        self._error = error
        self._go(State.FAILED)
        return error

    def left(self) -> None:
        """The user stopped reading, or the shell its waiting.  The next `step` connects again, from the position."""
        self._arrivals = _Arrivals(self._seq)
        if self.state in (State.CONNECTING, State.STREAMING):
            self._go(State.IDLE)


def _stream_id(start: dict[str, Any]) -> str:
    """For gateways behind a proxy that strips headers it does not know."""
    stream_id = start.get("stream_id")
    if not isinstance(stream_id, str) or not stream_id:
        raise UnexpectedAnswer("neither the headers nor the first record name the stream")
    return stream_id


def _object(data: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(data)
    except orjson.JSONDecodeError:
        fields = None
    if not isinstance(fields, dict):
        raise UnexpectedAnswer(f"a record that is not a JSON object: {data[:80]!r}")
    return fields
