"""Server-sent events without I/O: a decoder that takes bytes as they come, and the lines a server adds between frames.

Decoding follows WHATWG HTML, "Interpreting an event stream", with three laws that many decoders break:

- Only a blank line dispatches, and only a block with a `data` line.  A comment, a lone `id:` or `retry:`, and a block
  cut off by the end of the connection dispatch nothing.
- What comes out does not depend on where the bytes were cut: not inside a character, a CRLF or the byte order mark.
- Time is linear in the bytes, whatever their cuts: a line of megabytes arrives in thousands of pieces.

Data stays bytes: a character is never decoded before all of it is there, and JSON wants bytes anyway.
"""

from __future__ import annotations

from typing import Final, NamedTuple

_BOM: Final = b"\xef\xbb\xbf"
# More digits than any reconnection time; int() of a long string is quadratic, then an error.
_MAX_RETRY_DIGITS: Final = 15


class Event(NamedTuple):
    """One dispatched event.

    `event` is its type, "message" where the stream names none; `data` its lines joined by LF; `id` and `retry` (in
    milliseconds) what its own block said, else None.
    """

    event: str
    data: bytes
    id: str | None = None
    retry: int | None = None


_MESSAGE: Final = "message"
_new = tuple.__new__  # half the price of Event(…), and one is made per token


class EventTooLarge(ValueError):
    """One event is over `limit` bytes.  `events` are the whole ones that came before it in the same bytes."""

    def __init__(self, limit: int, events: list[Event]) -> None:
        super().__init__(f"an event is over {limit} bytes")
        self.limit = limit
        self.events = events


class Decoder:
    """Feed it bytes, take events.

    `last_event_id` and `retry` (milliseconds; None: never said) are the stream's as of the last whole block.  Bytes
    that make no event may still be a comment, a server's sign of life: the caller sees that bytes came.
    """

    __slots__ = ("_after_cr", "_fresh", "_head", "_max", "_parts", "_size", "_started", "last_event_id", "retry")

    def __init__(self, max_event_bytes: int = 16 * 2**20) -> None:
        self.last_event_id = ""
        self.retry: int | None = None
        self._max = max_event_bytes
        self._head = b""  # the beginning of what may become a byte order mark
        self._started = False
        self._after_cr = False
        self._parts: list[bytes] = []  # the unfinished block; line ends are LF in here
        self._size = 0
        self._fresh = False  # nothing is pending: the next byte begins a block

    def feed(self, data: bytes) -> list[Event]:
        """Take the next bytes; return the events they complete.  Raises EventTooLarge; feed nothing after that."""
        # What honest servers send: whole blocks with LF, most often a single `data: {…}`.
        if self._fresh and data.endswith(b"\n\n") and b"\r" not in data and len(data) <= self._max:
            if data.startswith(b"data: ") and data.find(b"\n") == len(data) - 2:
                return [_new(Event, (_MESSAGE, data[6:-2], None, None))]
            return self._blocks(data[:-2])
        return self._feed(data)

    def close(self) -> bytes:
        """The connection has ended: the bytes of an event that was not finished, b"" if there are none.

        Comments and `retry:` lines are complete in themselves and no part of an event.
        """
        rest = b"".join((*self._parts, self._head))
        self._parts, self._head, self._size, self._fresh = [], b"", 0, False
        lines = rest.split(b"\n")
        for line in lines[:-1]:
            if line.startswith(b"retry:"):
                self._block(line)
        begun = any(line and not line.startswith((b":", b"retry:")) for line in lines)
        return rest if begun else b""

    def _feed(self, data: bytes) -> list[Event]:
        data = self._plain(data)
        if not data:
            return []
        if self._parts:
            if not self._completes(data):
                self._keep(data)
                return []
            data = b"".join((*self._parts, data))
            self._parts, self._size = [], 0
        cut = data.rfind(b"\n\n")
        events = self._blocks(data[:cut]) if cut >= 0 else []
        self._keep(_without_comments(data[cut + 2 :] if cut >= 0 else data), events)
        return events

    def _plain(self, data: bytes) -> bytes:
        """The bytes without the byte order mark, every line end a LF."""
        if not self._started:
            data = self._head + data
            if len(data) < len(_BOM) and _BOM.startswith(data):
                self._head = data
                return b""
            self._started, self._head = True, b""
            data = data.removeprefix(_BOM)
        if self._after_cr and data:
            # The CR has already ended its line: waiting for a LF that may not come would hold an event back.
            data = data.removeprefix(b"\n")
            self._after_cr = False
        if b"\r" in data:
            self._after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        self._fresh = not self._parts and not self._after_cr
        return data

    def _completes(self, data: bytes) -> bool:
        """Whether the unfinished block, which is only joined then, ends in these bytes (or begins with a comment)."""
        if self._parts[0].startswith(b":") and b"\n" in data:
            return True
        return b"\n\n" in data or (data.startswith(b"\n") and self._parts[-1].endswith(b"\n"))

    def _keep(self, rest: bytes, events: list[Event] | None = None) -> None:
        if rest:
            self._parts.append(rest)
            self._size += len(rest)
        self._fresh = not self._parts and not self._after_cr
        if self._size > self._max + 1:  # a whole block of that size is allowed: its last line end is in here
            raise EventTooLarge(self._max, events or [])

    def _blocks(self, text: bytes) -> list[Event]:
        events: list[Event] = []
        large = len(text) > self._max
        for block in text.split(b"\n\n"):
            if large and len(block) > self._max:
                raise EventTooLarge(self._max, events)
            if block.startswith(b"data: ") and b"\n" not in block:
                events.append(_new(Event, (_MESSAGE, block[6:], None, None)))
            elif block and (event := self._block(block)) is not None:
                events.append(event)
        return events

    def _block(self, block: bytes) -> Event | None:
        data: list[bytes] = []
        kind, event_id, retry = b"", None, None
        for line in block.split(b"\n"):
            name, _, value = line.partition(b":")
            if value.startswith(b" "):
                value = value[1:]
            if name == b"data":
                data.append(value)
            elif name == b"event":
                kind = value
            elif name == b"id" and b"\0" not in value:
                event_id = value.decode("utf-8", "replace")
            elif name == b"retry" and value.isdigit() and len(value) <= _MAX_RETRY_DIGITS:
                retry = int(value)
        if event_id is not None:
            self.last_event_id = event_id
        if retry is not None:
            self.retry = retry
        if not data:
            return None
        return Event(kind.decode("utf-8", "replace") or _MESSAGE, b"\n".join(data), event_id, retry)


def _without_comments(rest: bytes) -> bytes:
    """What is left of the beginning of a block.  Else hours of bare `: ping` lines would add up to a large event."""
    start = 0
    while rest.startswith((b"\n", b":"), start) and (end := rest.find(b"\n", start)) >= 0:
        start = end + 1
    return rest[start:]


def ping() -> bytes:
    """A comment line that shows life.

    Like `retry`, one line without a blank line after it, to stand between frames: a block of its own makes the official
    OpenAI SDK and others dispatch an empty event.
    """
    return b": ping\n"


def retry(milliseconds: int) -> bytes:
    """The line that tells a browser's EventSource how long to wait before it reconnects."""
    return b"retry: %d\n" % milliseconds
