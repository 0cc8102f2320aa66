"""The service of proto/inference.proto over the core, for every wire that carries it: gRPC, Connect, gRPC-Web.

What a wire adds is its own file's: `grpc.py`, `connect.py`.  Positions here are counted as the service counts them: a
token's index from 0, and in `resume_from_token` the first one *wanted*; the core knows only "after".

A session is its owner's name for a stream.  The stream's id stands for it everywhere, so that a stream begun over HTTP
can be gone on with here.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo

from midstream import rules
from midstream.codec.inference import index_of, position_of, resume_from, seq_of
from midstream.errors import (
    BadCursor,
    BadRequest,
    Busy,
    CursorAhead,
    IdempotencyMismatch,
    MidstreamError,
    PositionError,
    ProducerFailed,
    ShuttingDown,
    UnknownStream,
    WrongStream,
)
from midstream.follow import Follow
from midstream.records import Frame, Page, Record, StreamState
from midstream.streams import Streams
from midstream.transports.asking import Sources, asked, begin
from midstream.wire import DONE, FAILED, GRPC_DOMAIN, GRPC_ENDS, GRPC_STATUS, MAX_SESSION_CHARS

_log = logging.getLogger("midstream")

# The largest index that an int32 holds.
MAX_INDEX = 2**31 - 1
# Bytes.  A status travels as metadata, of which a client takes 8 KiB; escaped, a message is up to three times as long.
_MOST_MESSAGE = 600
_MOST_FACT = 200


@dataclass(frozen=True, slots=True)
class Request:
    """What a Generate asks for.  `stream_id`: the stream that the caller says it goes on with, if it says so."""

    prompt: str
    session: str
    resume_from: int
    model: str
    stream_id: str | None = None
    trace: str | None = None


class Begun(NamedTuple):
    """A reader of the session's stream.  The caller gives it back to `Streams.leave`."""

    stream_id: str
    follow: Follow


class Acked(NamedTuple):
    """What an Ack answers, in indices."""

    acked: int
    journaled: int
    first_retained: int


class Refusal(Exception):
    """How a call ends that does not end well: the name of a gRPC status, text for people, and google.rpc details."""

    def __init__(self, status: str, message: str, *details: ErrorInfo | RetryInfo) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = _short(message, _MOST_MESSAGE)
        self.details = [_packed(detail) for detail in details]


class Inference:
    """The three verbs, for a caller that is known."""

    def __init__(self, streams: Streams, sources: Sources) -> None:
        self.streams = streams
        self._sources = sources

    async def generate(self, owner: str, request: Request, abort: Callable[[], None]) -> Begun:
        """Begin the session's generation, or go on with it where its reader says.

        A name without a stream begins one only if everything speaks for it: the first chunk is wanted, there is a
        prompt, and the caller does not say that it has seen a stream before.  Else the stream it means is gone (I4).
        Raises BadCursor, BadRequest, UnknownStream, IdempotencyMismatch, WrongStream, and what `begin` and
        `Streams.follow` raise.
        """
        after = self._position(request)
        state, existed = await self._opened(owner, request)
        stream_id = state.meta.stream_id
        try:
            follow = await self.streams.follow(stream_id, owner, after if existed else 0, abort=abort)
            if follow is None:  # at the terminal record's position; the index that it has here is below that
                raise CursorAhead(after)
        except PositionError as error:
            raise await self._placed(error, stream_id, owner) from None
        return Begun(stream_id, follow)

    def _position(self, request: Request) -> int:
        if not 0 <= request.resume_from <= MAX_INDEX:
            raise BadCursor(f"resume_from_token is {request.resume_from}; it must not be negative")
        return position_of(request.resume_from)

    async def _opened(self, owner: str, request: Request) -> tuple[StreamState, bool]:
        """The session's stream, and whether it was there before."""
        session = request.session or request.stream_id or ""
        state = await self._find(owner, session) if session else None
        existed = state is not None
        if state is None:
            if session and (request.resume_from or not request.prompt or request.stream_id is not None):
                raise UnknownStream
            state, existed = await self._begin(owner, request)
        if request.stream_id not in (None, state.meta.stream_id):
            raise WrongStream(f"the session's stream is {state.meta.stream_id}, not {request.stream_id}")
        if existed and not request.resume_from:
            _compare(request, state)
        return state, existed

    async def _begin(self, owner: str, request: Request) -> tuple[StreamState, bool]:
        if request.resume_from:
            raise BadRequest("a resume needs the session_id: the session's name, or the stream's id")
        if not request.prompt:
            raise BadRequest("a prompt is needed to begin a generation")
        names = [_name(owner, request.session)] if request.session else []
        body = {"prompt": request.prompt} | ({"model": request.model} if request.model else {})
        opened = await begin(self.streams, self._sources, owner, asked(body), names, request.trace)
        return opened.state, opened.existed

    async def _find(self, owner: str, session: str) -> StreamState | None:
        """The state of the owner's stream of this name, or with this id."""
        try:
            return await self.streams.owned(await self.streams.find(_name(owner, session)) or session, owner)
        except UnknownStream:
            return None

    async def _known(self, owner: str, session: str) -> str:
        if not session:
            raise BadRequest("session_id is empty: give the session's name, or the stream's id")
        state = await self._find(owner, session)
        if state is None:
            raise UnknownStream
        return state.meta.stream_id

    async def ack(self, owner: str, session: str, index: int) -> Acked:
        """Let go of chunks up to this index.  Raises BadRequest, UnknownStream, CursorAhead."""
        if not 0 <= index <= MAX_INDEX:
            raise BadRequest(f"acked_token_index is {index}; it must not be negative")
        stream_id = await self._known(owner, session)
        state = await self.streams.ack(stream_id, owner, seq_of(index))
        # Neither `start` nor the terminal record is a chunk.
        journaled = index_of(state.highest_seq) if state.ended else index_of(state.highest_seq + 1)
        return Acked(index_of(state.acked_seq), journaled, max(index_of(state.oldest_retained_seq), 0))

    async def cancel(self, owner: str, session: str) -> bool:
        """Stop the generation; False when it had ended otherwise.  Raises BadRequest, UnknownStream."""
        state = await self.streams.cancel(await self._known(owner, session), owner)
        return state.status == "cancelled"

    async def _placed(self, error: PositionError, stream_id: str, owner: str) -> PositionError:
        """The error with what can be resumed from, in the service's own counting."""
        try:
            state = await self.streams.owned(stream_id, owner)
        except UnknownStream:
            return error
        low, high = (resume_from(position) for position in rules.honoured(state))
        if state.ended:  # after the final message there is none to resume with
            high -= 1
        error.detail = f"of this session resume_from_token {low} to {high} can be honoured"
        error.facts |= {"resume_from_lowest": low, "resume_from_highest": high}
        return error

    async def messages(self, begun: Begun, owner: str) -> AsyncGenerator[list[Frame], None]:
        """Frames of which each makes one message, all there are at a time.

        Raises Refusal when the stream failed or was cancelled, CursorExpired, ShuttingDown when this reader was
        interrupted, StoreUnavailable.
        """
        follow = begun.follow
        try:
            while (page := await follow.next()) is not None:
                if frames := _told(page):
                    yield frames
                if follow.ended:
                    _check_end(page.frames[-1])
        except PositionError as error:
            raise await self._placed(error, begun.stream_id, owner) from None
        if not follow.ended:
            raise ShuttingDown("this call ended before the answer did; resume it")


def _name(owner: str, session: str) -> str:
    if len(session) > MAX_SESSION_CHARS or not session.isprintable():
        raise BadRequest(f"session_id must have at most {MAX_SESSION_CHARS} printable characters")
    return f"{owner}/session/{session}"


def _compare(request: Request, state: StreamState) -> None:
    """A retry finds its stream; a new request under an old name must not be taken for one (I4)."""
    body: dict[str, Any] = orjson.loads(state.meta.request).get("body", {})
    other_prompt = request.prompt and request.prompt != body.get("prompt")
    other_model = request.prompt and request.model and request.model != state.meta.model
    if other_prompt or other_model:
        raise IdempotencyMismatch("this session has a stream for another prompt or model; use a new session_id")


def _told(page: Page) -> list[Frame]:
    """The frames that are messages: `start` tells nothing that the metadata does not, other ends are statuses."""
    frames = page.frames
    if frames and frames[0].startswith(b"id: 1\n"):
        frames = frames[1:]
    if page.ends and frames and rules.event_of(frames[-1]) != DONE:
        frames = frames[:-1]
    return frames


def _check_end(frame: Frame) -> None:
    """Raises Refusal when the terminal record tells of anything but a complete answer."""
    record = Record.of(frame)
    if record.event == DONE:
        return
    data, status, index = record.json(), GRPC_ENDS[record.event], index_of(record.seq)
    if record.event == FAILED:
        error = data["error"]
        facts = {name: value for name, value in error.items() if name not in ("code", "message")}
        raise Refusal(status, error["message"], _info(error["code"], {"token_index": index, **facts}))
    reason = data["reason"]
    facts = {"token_index": index, "reason": reason}
    raise Refusal(status, f"the generation was cancelled ({reason})", _info(record.event, facts))


def refusal(error: Exception, refused: dict[str, int]) -> Refusal:
    """What a call ends with for this error, which is counted in `refused` by its code.

    The cause of a fault of ours is for the log, not for the caller.
    """
    if isinstance(error, Refusal):
        return error
    if not isinstance(error, MidstreamError):
        _log.error("a call failed", exc_info=error)
        error = MidstreamError("an internal error; the log has the cause")
    refused[error.code] = refused.get(error.code, 0) + 1
    message = error.detail or error.code
    if isinstance(error, ProducerFailed):  # before there was a stream that could say so itself
        facts = {"retryable": error.retryable, **error.facts}
        return Refusal(GRPC_ENDS[FAILED], message, _info(error.failure, facts))
    status, info = GRPC_STATUS.get(error.code, "INTERNAL"), _info(error.code, error.facts)
    if isinstance(error, Busy):
        return Refusal(status, message, info, RetryInfo(retry_delay=Duration(seconds=error.retry_after)))
    return Refusal(status, message, info)


def _info(code: str, facts: dict[str, Any]) -> ErrorInfo:
    """google.rpc.ErrorInfo: our code in capitals, as that message wants it, and the facts as text."""
    told = {name: _text(value) for name, value in facts.items() if isinstance(value, (str, int, float))}
    return ErrorInfo(reason=code.upper(), domain=GRPC_DOMAIN, metadata=told)


def _text(value: str | float) -> str:
    return _short(value, _MOST_FACT) if isinstance(value, str) else orjson.dumps(value).decode()


def _short(text: str, most: int) -> str:
    """The text in at most so many bytes of UTF-8, cut between characters."""
    raw = text.encode()
    return text if len(raw) <= most else raw[:most].decode(errors="ignore") + "…"


def _packed(detail: ErrorInfo | RetryInfo) -> Packed:
    packed = Packed()
    packed.Pack(detail)
    return packed
