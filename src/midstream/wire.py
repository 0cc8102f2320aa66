"""Every constant of the protocol, once.  PROTOCOL.md holds the same names; a test compares the two."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

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
    "store_unavailable": True,
    "upstream_unreachable": True,
    "upstream_timeout": True,
    "upstream_truncated": True,
    "upstream_lost": True,
    "upstream_malformed": False,
    "upstream_too_large": False,
    "upstream_error": False,  # the upstream's own word: its status decides
    "producer_error": False,
    # The worker pool's: what readers have is one worker's, and its generation cannot go on.
    "ChatStreamDiverged": True,
    "pool_faulted": True,
    "pool_expired": True,
    "pool_cancelled": False,
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
    "Connect-Protocol-Version, Connect-Timeout-Ms, X-Grpc-Web, X-User-Agent, Grpc-Timeout, "
    "Client-Agent, "  # clients of a pool
    # What OpenAI's SDK sends from a page.
    "OpenAI-Beta, OpenAI-Organization, OpenAI-Project, X-Stainless-Arch, X-Stainless-Helper-Method, X-Stainless-Lang, "
    "X-Stainless-OS, X-Stainless-Package-Version, X-Stainless-Poll-Helper, X-Stainless-Retry-Count, "
    "X-Stainless-Runtime, X-Stainless-Runtime-Version, X-Stainless-Timeout"
)
CORS_EXPOSE: Final = (
    "Midstream-Stream-Id, Midstream-Heartbeat, Location, Retry-After, "
    "Grpc-Status, Grpc-Message, Grpc-Status-Details-Bin"
)

# Query fields of a resume.
Q_CURSOR: Final = "cursor"
Q_FROM: Final = "from"
FROM_START: Final = "start"
# Another look of a stream than its records: the chunks that OpenAI's clients take.
Q_FORMAT: Final = "format"
FORMAT_OPENAI: Final = "openai"
# The routes that OpenAI's clients know.  What they answer has that vendor's shape, errors too.
CHAT_PATH: Final = "/v1/chat/completions"
COMPLETIONS_PATH: Final = "/v1/completions"
MODELS_PATH: Final = "/v1/models"
RESPONSES_PATH: Final = "/v1/responses"
# Their headers wait so long, in seconds, for the upstream's status.
STATUS_PATIENCE: Final = 10.0

CURSOR_VERSION: Final = 1
MAX_SEQ: Final = 2**53 - 1  # the largest integer every JSON reader holds exactly (RFC 8259, section 6)
MAX_CURSOR_CHARS: Final = 4096
MAX_IDEMPOTENCY_CHARS: Final = 255
# A request's line and headers, in bytes; and requests that wait on one connection for those before them.
MAX_HEAD_BYTES: Final = 64 * 1024
MAX_PIPELINED: Final = 64

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
# While the store is away an upstream is kept waiting for so long, in seconds; then its generation is given up.
STORE_PATIENCE: Final = 30.0
# Take-overs of one stream: a request that kills each process that takes it up must not kill them all.
MOST_TAKEOVERS: Final = 2
SESSION_TERM: Final = 12 * 3600


class Statuses(NamedTuple):
    """What a code is called by each kind of wire."""

    http: int
    grpc: str


# One table: code -> HTTP status (RFC 9110; 421: section 15.5.20; 429: RFC 6585) and the name of its gRPC status, which
# Connect and gRPC-Web use too.
STATUS: Final[dict[str, Statuses]] = {
    "bad_request": Statuses(400, "INVALID_ARGUMENT"),
    "bad_cursor": Statuses(400, "INVALID_ARGUMENT"),
    "unauthorized": Statuses(401, "UNAUTHENTICATED"),
    "forbidden": Statuses(403, "PERMISSION_DENIED"),
    "forbidden_origin": Statuses(403, "PERMISSION_DENIED"),
    "wrong_stream": Statuses(403, "FAILED_PRECONDITION"),
    "not_found": Statuses(404, "UNIMPLEMENTED"),
    "unknown_stream": Statuses(404, "NOT_FOUND"),
    "unknown_model": Statuses(404, "NOT_FOUND"),
    "method_not_allowed": Statuses(405, "UNIMPLEMENTED"),
    "cursor_expired": Statuses(409, "OUT_OF_RANGE"),
    "cursor_ahead": Statuses(409, "OUT_OF_RANGE"),
    "too_large": Statuses(413, "RESOURCE_EXHAUSTED"),
    "unsupported_media_type": Statuses(415, "INVALID_ARGUMENT"),
    "wrong_host": Statuses(421, "PERMISSION_DENIED"),
    "idempotency_mismatch": Statuses(422, "ALREADY_EXISTS"),
    "too_many_streams": Statuses(429, "RESOURCE_EXHAUSTED"),
    "out_of_space": Statuses(429, "RESOURCE_EXHAUSTED"),
    "internal_error": Statuses(500, "INTERNAL"),
    "store_lost": Statuses(500, "DATA_LOSS"),
    "store_unavailable": Statuses(503, "UNAVAILABLE"),
    "shutting_down": Statuses(503, "UNAVAILABLE"),
}
HTTP_STATUS: Final[dict[str, int]] = {code: statuses.http for code, statuses in STATUS.items()}
GRPC_STATUS: Final[dict[str, str]] = {code: statuses.grpc for code, statuses in STATUS.items()}
# How the end of a stream is called where a call ends with a status; `done` is OK.
GRPC_ENDS: Final[dict[str, str]] = {FAILED: "ABORTED", CANCELLED: "CANCELLED"}
# The service of proto/inference.proto, and whose errors the details of a status speak of.
GRPC_SERVICE: Final = "inference.InferenceService"
GRPC_DOMAIN: Final = "midstream"
MAX_SESSION_CHARS: Final = 255
# Bodies of these errors are exact: the code and its facts, no text for people.
BARE_ERRORS: Final = frozenset({"unauthorized", "wrong_stream", "unknown_stream"})
POSITION_ERRORS: Final = frozenset({"cursor_expired", "cursor_ahead"})

# A WebSocket: where it is, and its messages' `type`s, the client's and the gateway's.
WS_PATH: Final = "/v1/ws"
WS_ASKS: Final = ("auth", "generate", "resume", "leave", "ack", "cancel")
WS_TELLS: Final = ("record", "heartbeat", "journal_state", "error")
# Why the gateway closes one -> close code (RFC 6455, section 7.4; 4000 and up are an application's own).  The reason is
# also the code of an error that is said before; after every other error the socket stays open.
WS_CLOSE: Final[dict[str, int]] = {
    "shutting_down": 1001,  # without the error: what was followed has been told its end
    "not_a_frame": 1002,  # what is no WebSocket frame
    "not_utf8": 1007,
    "too_large": 1009,
    "unauthorized": 4401,
}
# Seconds in which a key must come where the handshake brought none.
AUTH_WITHIN: Final = 5.0
# Streams that one socket may follow at a time.
WS_STREAMS: Final = 100
MAX_REF_CHARS: Final = 128

# The worker pool (PROTOCOL.md, "Pool"): its routes, of which existing workers know progress by a second path too.
POOL_TEXT_PATH: Final = "/api/v2/generate/text"
POOL_PROGRESS_PATHS: Final = (f"{POOL_TEXT_PATH}/progress", "/v2/generate/text/progress")
POOL_USER_PATH: Final = "/api/v2/find_user"
# The least and the most tokens that a request may ask for: of answer, and of prompt and answer together.
POOL_LENGTHS: Final = (16, 16_384)
POOL_CONTEXTS: Final = (80, 1_048_576)
# Jobs at a time, at most, that a worker may declare.
POOL_MOST_THREADS: Final = 50
# How a chat job's reply may have ended.
POOL_FINISHES: Final = ("stop", "length", "content_filter", "tool_calls")
# A worker's lease on a generation, in seconds, renewed by every post.
POOL_LEASE_TERM: Final = 150
# Posts for one generation, and bytes (UTF-8, text and reasoning) for each token that it may have.
POOL_MAX_BATCHES: Final = 1000
POOL_BYTES_PER_TOKEN: Final = 16
# What is kept of a request's progress: so many entries, for so many seconds after the last.
POOL_PROGRESS_KEPT: Final = 4000
POOL_PROGRESS_TERM: Final = 900
# Lost generations that fail a request; seconds after which one that nobody took expires, and for which one that has
# ended can still be asked for.
POOL_MOST_FAULTS: Final = 3
POOL_REQUEST_TERM: Final = 1200
POOL_REQUEST_KEPT: Final = 1200
# The least tokens that a generation is paid for, and the characters that make a token.
POOL_FLOOR_TOKENS: Final = 20
POOL_CHARS_PER_TOKEN: Final = 4
# Seconds: without a reader, after which a request counts as cancelled; of silence, after which a worker counts as gone.
POOL_ABANDONED: Final = 30.0
POOL_WORKER_GONE: Final = 300.0
# How often gateways look for what has run out or was left undone, and at what a lost signal would have told; seconds.
POOL_SWEEP_EVERY: Final = 10.0
POOL_POLL_EVERY: Final = 1.0
