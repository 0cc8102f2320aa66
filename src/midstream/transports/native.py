"""The native HTTP contract (PROTOCOL.md, "HTTP"): parse, call the core, encode."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from midstream import cursor
from midstream.cursor import Cursor
from midstream.errors import (
    BadCursor,
    BadRequest,
    CursorExpired,
    IdempotencyMismatch,
    ShuttingDown,
    UnknownModel,
)
from midstream.records import Answer as ChoiceAnswer
from midstream.records import StreamState
from midstream.streams import Answer, Opened, Streams
from midstream.transports.http import caller, header, json_response, query, read_json
from midstream.transports.sse import interrupt_when_gone, only, serve_stream
from midstream.wire import (
    FROM_START,
    H_IDEMPOTENCY,
    H_STREAM_ID,
    MAX_IDEMPOTENCY_CHARS,
    MAX_SEQ,
    Q_CURSOR,
    Q_FROM,
)
from midstream.writer import Producer

_log = logging.getLogger("midstream")


class Source(Protocol):
    """Where a model's answers come from."""

    def generate(
        self, body: Mapping[str, Any], route: Literal["chat", "completions"], headers: Mapping[str, str] | None = None
    ) -> Producer:
        """A generation for this request, not yet begun."""


class Sources(Protocol):
    """All models this gateway can be asked for."""

    def for_model(self, model: str) -> Source | None:
        """The first source whose pattern matches."""

    async def default_model(self) -> str:
        """The first source's first model.  Raises UnknownModel where it lists none, ProducerFailed on a failure."""


@dataclass(frozen=True, slots=True)
class NativeApi:
    """The routes, over the core."""

    streams: Streams
    sources: Sources | None  # None: streams are opened elsewhere, there is no route to create them
    max_body: int

    def routes(self) -> list[Route]:
        def asgi(serve: Callable[[Scope, Receive, Send], Awaitable[None]]) -> Any:
            return _Endpoint(serve)

        stream = Route("/v1/stream/{stream_id}", asgi(self.stream), methods=["GET", "DELETE"])
        stream.methods = {"GET", "DELETE"}  # not HEAD, which comes with GET: it would follow the stream to its end
        create = [Route("/v1/stream", asgi(self.create), methods=["POST"])] if self.sources else []
        return [
            *create,
            Route("/v1/streams", self.list, methods=["GET"]),
            stream,
            Route("/v1/stream/{stream_id}/state", self.state, methods=["GET"]),
            Route("/v1/stream/{stream_id}/snapshot", self.snapshot, methods=["GET"]),
            Route("/v1/stream/{stream_id}/ack", self.ack, methods=["POST"]),
            Route("/v1/stream/{stream_id}/cancel", self.cancel, methods=["POST"]),
        ]

    # --- create -----------------------------------------------------------------------------------------------------

    async def create(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/stream: begin a generation and follow it; `stream: false` waits for the whole answer."""
        query(scope, ())
        body = await read_json(scope, receive, self.max_body)
        asked = _asked(body)
        owner = caller(scope).owner
        opened = await self._open(scope, owner, body, asked)
        stream_id = opened.state.meta.stream_id
        if not asked.stream:
            await (await self._whole(stream_id, owner, receive))(scope, receive, send)
            return
        await serve_stream(scope, receive, send, self.streams, stream_id, owner, Cursor(stream_id, 0))

    async def _open(self, scope: Scope, owner: str, body: dict[str, Any], asked: _Asked) -> Opened:
        key = header(scope, H_IDEMPOTENCY.lower().encode())
        names = [f"{owner}/idem/{_idempotency_key(key)}"] if key is not None else []
        digest, request = _kept("/v1/stream", body)
        if names and (known := await self.streams.find(names[0])) is not None:
            opened = Opened(await self.streams.owned(known, owner), existed=True)
        else:
            assert self.sources is not None
            model = asked.model or await self.sources.default_model()
            source = self.sources.for_model(model)
            if source is None:
                raise UnknownModel(f"no upstream serves {model[:200]!r}")
            upstream_body = {**asked.upstream, "model": model}
            trace = header(scope, b"traceparent")
            opened = await self.streams.open(
                owner,
                model,
                lambda: source.generate(upstream_body, "chat", {"traceparent": trace} if trace else None),
                request=request,
                names=names,
                abandon_after=asked.abandon_after,
            )
        if opened.existed and orjson.loads(opened.state.meta.request).get("digest") != digest:
            raise IdempotencyMismatch("this Idempotency-Key was used with another body; use a new key")
        return opened

    async def _whole(self, stream_id: str, owner: str, receive: Receive) -> Response:
        """Wait for the end, then answer with all of it."""
        while not await self._over(stream_id, owner, receive):
            pass
        answer = await self.streams.answer(stream_id, owner)
        if not answer.state.ended:
            raise ShuttingDown("this process ended before the answer did; resume its stream", stream_id=stream_id)
        body = answer_json(answer)
        headers = {H_STREAM_ID: stream_id, "location": f"/v1/stream/{stream_id}"}
        if answer.state.status == "done":
            return json_response(body, headers=headers)
        error = answer.fold.error or {
            "code": answer.state.status,
            "message": f"the stream is {answer.state.status}",
        }
        return json_response({"error": error["code"], "detail": error["message"], "stream_id": stream_id}, 502, headers)

    async def _over(self, stream_id: str, owner: str, receive: Receive) -> bool:
        """Wait for the end.  False: the reader was overtaken, which is nothing to who only wants the sum of it all."""
        state = await self.streams.owned(stream_id, owner)
        follow = await self.streams.follow(stream_id, owner, state.highest_seq)
        if follow is None:
            return True
        gone = asyncio.ensure_future(interrupt_when_gone(receive, follow))
        try:
            async for _ in follow:
                pass
        except CursorExpired:
            return False
        finally:
            self.streams.leave(follow)
            gone.cancel()
        return True

    # --- resume -----------------------------------------------------------------------------------------------------

    async def stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET: everything after the position, then live.  DELETE: cancel and forget."""
        stream_id = scope["path_params"]["stream_id"]
        if scope["method"] == "DELETE":
            query(scope, ())
            await self.streams.forget(stream_id, caller(scope).owner)
            await json_response({"stream_id": stream_id, "deleted": True})(scope, receive, send)
            return
        owner = caller(scope).owner
        await serve_stream(scope, receive, send, self.streams, stream_id, owner, position(scope, stream_id))

    # --- control ----------------------------------------------------------------------------------------------------

    async def list(self, request: Request) -> Response:
        query(request.scope, ())
        states = await self.streams.list(caller(request.scope).owner)
        return json_response({"streams": [self._state(state) for state in states]})

    async def state(self, request: Request) -> Response:
        query(request.scope, ())
        stream_id = request.path_params["stream_id"]
        return json_response(self._state(await self.streams.state(stream_id, caller(request.scope).owner)))

    async def snapshot(self, request: Request) -> Response:
        query(request.scope, ())
        answer = await self.streams.answer(request.path_params["stream_id"], caller(request.scope).owner)
        return json_response(answer_json(answer))

    async def ack(self, request: Request) -> Response:
        query(request.scope, ())
        body = await read_json(request.scope, request.receive, self.max_body)
        seq = body.get("seq")
        if type(seq) is not int or not 0 <= seq <= MAX_SEQ:
            raise BadRequest("'seq' must be an integer from 0 to 2^53 - 1")
        stream_id = request.path_params["stream_id"]
        return json_response(self._state(await self.streams.ack(stream_id, caller(request.scope).owner, seq)))

    async def cancel(self, request: Request) -> Response:
        query(request.scope, ())
        state = await self.streams.cancel(request.path_params["stream_id"], caller(request.scope).owner)
        return json_response({"stream_id": state.meta.stream_id, "status": state.status})

    def _state(self, state: StreamState) -> dict[str, Any]:
        return {
            "stream_id": state.meta.stream_id,
            "status": state.status,
            "model": state.meta.model,
            "highest_seq": state.highest_seq,
            "oldest_retained_seq": state.oldest_retained_seq,
            "acked_seq": state.acked_seq,
            "trimmed_seq": state.trimmed_seq,
            "retained_records": state.retained_records,
            "retained_bytes": state.retained_bytes,
            "readers": len(self.streams.readers.get(state.meta.stream_id, ())),
            "lowest_reader_seq": self.streams.lowest(state.meta.stream_id),
            "created_at": state.meta.created_at,
            "last_access": state.last_access,
        }


class _Endpoint:
    """An ASGI endpoint for a Route (which takes a plain function for a request handler)."""

    def __init__(self, serve: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(scope, receive, send)


def position(scope: Scope, stream_id: str) -> Cursor:
    """The position of a resume: `cursor`, else `Last-Event-ID`, else `from`.

    The one that is used must be good: a bad one is refused, never passed over for a lower one (I4).  Raises BadCursor.
    """
    fields = query(scope, (Q_CURSOR, Q_FROM))
    if Q_CURSOR in fields and Q_FROM in fields:
        raise BadCursor("'cursor' and 'from' exclude each other")
    try:
        last_event_id = header(scope, b"last-event-id")
    except BadRequest as error:
        raise BadCursor(error.detail) from None
    if Q_CURSOR in fields:
        used = cursor.decode(only(fields[Q_CURSOR], Q_CURSOR))
        if last_event_id is not None:
            _compare(used, last_event_id, stream_id)
        return used
    begin = only(fields[Q_FROM], Q_FROM) if Q_FROM in fields else None
    if last_event_id is not None:
        # The browser's own header wins over where the page began; that it has moved on since is no mismatch.
        return cursor.decode_last_event_id(last_event_id, stream_id)
    if begin is None:
        raise BadCursor("no position: pass ?cursor=, Last-Event-ID, or ?from=start")
    return Cursor(stream_id, 0) if begin == FROM_START else cursor.decode(begin)


def _compare(used: Cursor, last_event_id: str, stream_id: str) -> None:
    """A lower source is only compared: one line in the log when it says something else."""
    try:
        other = cursor.decode_last_event_id(last_event_id, stream_id)
    except BadCursor:
        other = None
    if other != used:
        lower = other.seq if other else "unreadable"
        _log.warning("cursor_mismatch stream=%s cursor=%d last_event_id=%s", stream_id, used.seq, lower)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A create request, taken apart: ours, and what goes on to the upstream."""

    upstream: dict[str, Any]
    model: str | None
    stream: bool
    abandon_after: float | None


def _asked(body: dict[str, Any]) -> _Asked:
    rest = dict(body)
    prompt, messages = rest.pop("prompt", None), rest.get("messages")
    if (prompt is None) == (messages is None):
        raise BadRequest("give either 'prompt' (text) or 'messages' (a list)")
    if prompt is not None:
        if not isinstance(prompt, str):
            raise BadRequest("'prompt' must be text")
        rest["messages"] = [{"role": "user", "content": prompt}]
    elif not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise BadRequest("'messages' must be a list of objects, at least one")
    model, stream = rest.pop("model", None), rest.pop("stream", True)
    if model is not None and (not isinstance(model, str) or not model):
        raise BadRequest("'model' must be text")
    if not isinstance(stream, bool):
        raise BadRequest("'stream' must be true or false")
    abandon_after = rest.pop("abandon_after", None)
    if abandon_after is not None and (
        isinstance(abandon_after, bool) or not isinstance(abandon_after, (int, float)) or not 0 < abandon_after < 1e9
    ):
        raise BadRequest("'abandon_after' must be a number of seconds above 0")
    return _Asked(rest, model, stream, abandon_after)


def _idempotency_key(key: str) -> str:
    if not key or len(key) > MAX_IDEMPOTENCY_CHARS:
        raise BadRequest(f"Idempotency-Key must have 1 to {MAX_IDEMPOTENCY_CHARS} characters")
    return key


def _kept(route: str, body: dict[str, Any]) -> tuple[str, bytes]:
    """A digest, equal for equal requests whatever the order of their fields, and what is kept with the stream.

    Raises BadRequest for a body nested so deep that nobody could pass it on.
    """
    try:
        canonical = orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
        digest = hashlib.blake2b(route.encode() + b"\0" + canonical, digest_size=16).hexdigest()
        return digest, orjson.dumps({"route": route, "body": body, "digest": digest})
    except orjson.JSONEncodeError:
        raise BadRequest("the body is nested too deep") from None


def answer_json(answer: Answer) -> dict[str, Any]:
    """A snapshot: the answer up to `seq`, and the cursor to go on from there."""
    fold, state = answer.fold, answer.state
    first = fold.choices.get(0) or ChoiceAnswer()
    body: dict[str, Any] = {
        "stream_id": state.meta.stream_id,
        "seq": state.highest_seq,
        "cursor": Cursor(state.meta.stream_id, state.highest_seq).encode(),
        "text": first.text.decode(),
        "complete": fold.complete,
        "status": state.status,
        "model": state.meta.model,
    }
    if first.reasoning:
        body["reasoning"] = first.reasoning.decode()
    if len(fold.choices) > 1 or first.tool_calls or first.refusal:
        body["choices"] = [_choice_json(at, choice) for at, choice in sorted(fold.choices.items())]
    if first.finish_reason:
        body["finish_reason"] = first.finish_reason
    if fold.usage is not None:
        body["usage"] = fold.usage
    if fold.error is not None:
        body["error"] = fold.error
    return body


def _choice_json(index: int, choice: ChoiceAnswer) -> dict[str, Any]:
    body: dict[str, Any] = {"index": index, "text": choice.text.decode()}
    if choice.reasoning:
        body["reasoning"] = choice.reasoning.decode()
    if choice.refusal:
        body["refusal"] = choice.refusal.decode()
    if choice.tool_calls:
        body["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.name, "arguments": call.arguments.decode()},
            }
            for call in choice.tool_calls
        ]
    if choice.finish_reason:
        body["finish_reason"] = choice.finish_reason
    return body
