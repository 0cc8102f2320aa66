"""Every constant of the protocol, once.  PROTOCOL.md holds the same names; a test compares the two."""

from __future__ import annotations

from typing import Final, Literal

# Events of a record (PROTOCOL.md, "Records").
START: Final = "start"
TOKEN: Final = "token"
DONE: Final = "done"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
TERMINAL: Final = frozenset({DONE, FAILED, CANCELLED})
# Connection talk, never a record: the last thing a reader hears when its position has gone.
EXPIRED: Final = "expired"

Status = Literal["open", "done", "failed", "cancelled"]
OPEN: Final = "open"
CancelReason = Literal["client", "abandoned", "shutdown"]

# Why a generation failed: `error.code` of a `failed` record -> may the same request succeed later?
FAILURES: Final[dict[str, bool]] = {
    "writer_lost": True,
    "store_lost": True,
    "upstream_unreachable": True,
    "upstream_timeout": True,
    "upstream_truncated": True,
    "upstream_lost": True,
    "upstream_malformed": False,
    "upstream_too_large": False,
    "upstream_error": False,  # the upstream's own word: its status decides
    "producer_error": False,
}
UPSTREAM_RETRYABLE: Final = frozenset({408, 429}) | frozenset(range(500, 600))

# Headers of our own and those we read.
H_STREAM_ID: Final = "Midstream-Stream-Id"
H_HEARTBEAT: Final = "Midstream-Heartbeat"
H_IDEMPOTENCY: Final = "Idempotency-Key"
H_LAST_EVENT_ID: Final = "Last-Event-ID"
SESSION_COOKIE: Final = "midstream_session"

CORS_METHODS: Final = "GET, POST, DELETE"
CORS_ALLOW: Final = (
    "Authorization, apikey, Content-Type, Last-Event-ID, Idempotency-Key, Midstream-Stream-Id, Model, "
    "Connect-Protocol-Version, Connect-Timeout-Ms, X-Grpc-Web, X-User-Agent, Grpc-Timeout"
)
CORS_EXPOSE: Final = (
    "Midstream-Stream-Id, Midstream-Heartbeat, Location, Retry-After, "
    "Grpc-Status, Grpc-Message, Grpc-Status-Details-Bin"
)

# Query fields of a resume.
Q_CURSOR: Final = "cursor"
Q_FROM: Final = "from"
FROM_START: Final = "start"

CURSOR_VERSION: Final = 1
MAX_SEQ: Final = 2**53 - 1  # the largest integer every JSON reader holds exactly (RFC 8259, section 6)
MAX_CURSOR_CHARS: Final = 4096
MAX_IDEMPOTENCY_CHARS: Final = 255

# One write to a reader, and one batch in a store: enough to amortise the system call, not enough to hold up
# the loop or overrun a socket buffer.
SLICE_FRAMES: Final = 512
SLICE_BYTES: Final = 256 * 1024
# Text above this is journaled as several records; any other field that big fails the stream.
MAX_FIELD_BYTES: Final = 256 * 1024
# A send that makes no progress for this long, in seconds, ends the connection (never the stream).
SEND_STALL: Final = 60.0
# Access moves the end of a stream's grace period on at most this often, in seconds.
TOUCH_EVERY: Final = 60.0
# A stream is forgotten this long after its terminal record whatever its readers do, in seconds.
RETAIN_CAP: Final = 24 * 3600.0
SWEEP_EVERY: Final = 60.0
SESSION_TERM: Final = 12 * 3600

# code -> HTTP status (RFC 9110; 421: section 15.5.20; 429: RFC 6585).  One table; gRPC and WebSocket add columns.
HTTP_STATUS: Final[dict[str, int]] = {
    "bad_request": 400,
    "bad_cursor": 400,
    "unauthorized": 401,
    "forbidden_origin": 403,
    "wrong_stream": 403,
    "not_found": 404,
    "unknown_stream": 404,
    "unknown_model": 404,
    "method_not_allowed": 405,
    "cursor_expired": 409,
    "cursor_ahead": 409,
    "too_large": 413,
    "unsupported_media_type": 415,
    "wrong_host": 421,
    "idempotency_mismatch": 422,
    "too_many_streams": 429,
    "out_of_space": 429,
    "internal_error": 500,
    "store_lost": 500,
    "store_unavailable": 503,
    "shutting_down": 503,
}
# Bodies of these errors are exact: the code and its facts, no text for people.
BARE_ERRORS: Final = frozenset({"unauthorized", "wrong_stream", "unknown_stream"})
POSITION_ERRORS: Final = frozenset({"cursor_expired", "cursor_ahead"})
