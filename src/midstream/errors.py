"""Every failure a caller can cause or meet, one class each.

    MidstreamError
    ├── RequestError            the caller's to mend; the same request fails again
    │   ├── Unauthorized · Forbidden · ForbiddenOrigin · WrongHost
    │   ├── BadRequest · BadCursor · UnsupportedMediaType · TooLarge · MethodNotAllowed · NotFound
    │   ├── WrongStream · UnknownStream · UnknownModel · IdempotencyMismatch
    ├── PositionError           the position cannot be honoured: restart, or take the snapshot
    │   ├── CursorExpired · CursorAhead
    ├── Busy                    right request, wrong moment: retry after `retry_after` seconds
    │   ├── TooManyStreams · OutOfSpace · StoreUnavailable · ShuttingDown
    ├── WriterError             what a journal answers a writer
    │   ├── OutOfSequence · StaleWriter · StreamEnded
    ├── JournalError            the store itself
    │   ├── JournalInUse · JournalCorrupt · StoreLost
    └── ProducerFailed          the generation went wrong: becomes the stream's `failed` record

`code` is stable and public: `wire.STATUS` maps it for each transport.  `facts` go on the wire beside the code,
`detail` is for people: what happened, the facts, what to do next.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from midstream.wire import FAILURES

Action = Literal["fix", "restart", "retry", "stop"]


class MidstreamError(Exception):
    """Base of all.  `code` names the condition, `action` what the caller should do about it."""

    code: ClassVar[str] = "internal_error"
    action: ClassVar[Action] = "stop"

    def __init__(self, detail: str = "", **facts: Any) -> None:
        self.detail = detail
        self.facts = facts
        super().__init__(detail or self.code)


class RequestError(MidstreamError):
    """The caller's to mend: the same request fails again."""

    action: ClassVar[Action] = "fix"


class Unauthorized(RequestError):
    """No key, an unknown one, or two that differ."""

    code = "unauthorized"


class Forbidden(RequestError):
    """A good key, but not one marked `:admin`, which this route is for."""

    code = "forbidden"


class ForbiddenOrigin(RequestError):
    """A web page of another origin that is not configured."""

    code = "forbidden_origin"


class WrongHost(RequestError):
    """The `Host` header names a host this open gateway does not answer for (DNS rebinding)."""

    code = "wrong_host"


class BadRequest(RequestError):
    """The body, the query or a field is not what the route takes.

    `param` names the field, `reason` says in a word what is wrong with it: some clients are told both (OpenAI's).
    """

    code = "bad_request"

    def __init__(self, detail: str = "", *, param: str | None = None, reason: str | None = None) -> None:
        super().__init__(detail)
        self.param = param
        self.reason = reason


class BadCursor(RequestError):
    """The position does not decode, is doubled, or is absent where one is needed."""

    code = "bad_cursor"


class UnsupportedMediaType(RequestError):
    """A body that is not `application/json`."""

    code = "unsupported_media_type"


class TooLarge(RequestError):
    """A body over `--max-body`."""

    code = "too_large"


class NotFound(RequestError):
    """No such route."""

    code = "not_found"


class MethodNotAllowed(RequestError):
    """The route exists, not with this method."""

    code = "method_not_allowed"


class WrongStream(RequestError):
    """The cursor is of another stream than the path names."""

    code = "wrong_stream"


class UnknownStream(RequestError):
    """No such stream, no longer, or another owner's: the three look alike (I9)."""

    code = "unknown_stream"
    action: ClassVar[Action] = "stop"


class UnknownModel(RequestError):
    """No upstream serves this model."""

    code = "unknown_model"


class IdempotencyMismatch(RequestError):
    """The Idempotency-Key was used before with another body."""

    code = "idempotency_mismatch"


class PositionError(MidstreamError):
    """The position cannot be honoured exactly (I4): start again, or take the snapshot."""

    action: ClassVar[Action] = "restart"


class CursorExpired(PositionError):
    """What follows the position is no longer retained.  Facts: `oldest_available`, None when all is gone."""

    code = "cursor_expired"

    def __init__(self, oldest_available: int | None) -> None:
        super().__init__("records after this position are gone; restart", oldest_available=oldest_available)
        self.oldest_available = oldest_available


class CursorAhead(PositionError):
    """A position nobody can have reached.  Facts: `highest_seq`."""

    code = "cursor_ahead"

    def __init__(self, highest_seq: int) -> None:
        super().__init__(f"the stream ends at {highest_seq} so far; restart", highest_seq=highest_seq)
        self.highest_seq = highest_seq


class Busy(MidstreamError):
    """Right request, wrong moment.  `retry_after` is in seconds."""

    action: ClassVar[Action] = "retry"

    def __init__(self, detail: str = "", retry_after: int = 1, **facts: Any) -> None:
        super().__init__(detail, **facts)
        self.retry_after = retry_after


class TooManyStreams(Busy):
    """The limit of open streams, in all or of this owner, is reached."""

    code = "too_many_streams"


class OutOfSpace(Busy):
    """All retained bytes belong to open streams, which are never evicted for a new one."""

    code = "out_of_space"


class StoreUnavailable(Busy):
    """The store does not answer."""

    code = "store_unavailable"


class ShuttingDown(Busy):
    """This process is draining; another will answer."""

    code = "shutting_down"


class WriterError(MidstreamError):
    """What a journal answers a writer."""


class OutOfSequence(WriterError):
    """The batch does not begin at the next number.  Facts: `expected`."""

    code = "out_of_sequence"

    def __init__(self, expected: int, got: int) -> None:
        super().__init__(f"expected seq {expected}, got {got}", expected=expected)
        self.expected = expected


class StaleWriter(WriterError):
    """Another writer has claimed the stream since (I2).  Facts: `epoch`, the one now in force."""

    code = "stale_writer"

    def __init__(self, epoch: int) -> None:
        super().__init__(f"the stream was claimed under epoch {epoch}", epoch=epoch)
        self.epoch = epoch


class StreamEnded(WriterError):
    """The terminal record stands; nothing follows it (I7)."""

    code = "stream_ended"


class JournalError(MidstreamError):
    """The store itself."""


class JournalInUse(JournalError):
    """Another gateway holds this SQLite file."""

    code = "journal_in_use"


class JournalCorrupt(JournalError):
    """The file is not a journal of ours, is damaged, or is of a newer version."""

    code = "journal_corrupt"


class StoreLost(JournalError):
    """The store lacks what its own counters say it holds."""

    code = "store_lost"


class ProducerFailed(MidstreamError):
    """A generation went wrong.  It becomes the stream's `failed` record, word for word.

    `code` is one of `wire.FAILURES`; `retryable` says whether the same request may well succeed later, and is left to
    that table where nothing more is known.
    """

    def __init__(self, code: str, message: str, *, retryable: bool | None = None, **facts: Any) -> None:
        # What an upstream sent in a header may be no text; it is to be journaled, logged and sent all the same.
        super().__init__(message.encode("utf-8", "replace").decode(), **facts)
        self.failure = code
        self.retryable = FAILURES.get(code, False) if retryable is None else retryable
