"""The native HTTP contract (PROTOCOL.md, "HTTP"): parse, call the core, encode."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from midstream import cursor
from midstream.codec.chat_whole import tool_calls
from midstream.cursor import Cursor
from midstream.errors import BadCursor, BadRequest
from midstream.records import Choice, StreamState
from midstream.streams import Answer, Streams
from midstream.transports.asking import Sources, acked
from midstream.transports.creating import create
from midstream.transports.http import Endpoint, caller, header, json_response, query, read_json
from midstream.transports.openai_chat import chat_rendering
from midstream.transports.sse import location, serve_stream
from midstream.transports.whole import whole_answer
from midstream.turns import in_steps
from midstream.wire import (
    FORMAT_OPENAI,
    FROM_START,
    H_LAST_EVENT_ID,
    H_STREAM_ID,
    Q_CURSOR,
    Q_FORMAT,
    Q_FROM,
)

_log = logging.getLogger("midstream")

_LAST_EVENT_ID: Final = H_LAST_EVENT_ID.lower().encode()
# States of a list made before the loop gets its turn.
_STATES_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class NativeApi:
    """The routes, over the core."""

    streams: Streams
    sources: Sources | None  # None: streams are opened elsewhere, there is no route to create them
    max_body: int

    def routes(self) -> list[Route]:
        stream = Route("/v1/stream/{stream_id}", Endpoint(self.stream), methods=["GET", "DELETE"])
        stream.methods = {"GET", "DELETE"}  # not HEAD, which comes with GET: it would follow the stream to its end
        create = [Route("/v1/stream", Endpoint(self.create), methods=["POST"])] if self.sources else []
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
        assert self.sources is not None
        created = await create(scope, receive, self.streams, self.sources, self.max_body)
        owner, stream_id = created.owner, created.stream_id
        if not created.asked.stream:
            await (await self._whole(stream_id, owner, scope, receive))(scope, receive, send)
            return
        await serve_stream(scope, receive, send, self.streams, stream_id, owner, Cursor(stream_id, 0))

    async def _whole(self, stream_id: str, owner: str, scope: Scope, receive: Receive) -> Response:
        """Wait for the end, then answer with all of it."""
        answer = await whole_answer(self.streams, stream_id, owner, receive)
        body = answer_json(answer)
        headers = {H_STREAM_ID: stream_id, "location": location(scope, stream_id)}
        if answer.state.status == "done":
            return json_response(body, headers=headers)
        error = answer.fold.error or {
            "code": answer.state.status,
            "message": f"the stream is {answer.state.status}",
        }
        return json_response({"error": error["code"], "detail": error["message"], "stream_id": stream_id}, 502, headers)

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
        resumed_at = location(scope, stream_id)
        rendered = chat_rendering(resumed_at, self.streams, owner) if in_openai_format(scope) else None
        at = position(scope, stream_id)
        await serve_stream(scope, receive, send, self.streams, stream_id, owner, at, rendered)

    # --- control ----------------------------------------------------------------------------------------------------

    async def list(self, request: Request) -> Response:
        query(request.scope, ())
        states = await self.streams.list(caller(request.scope).owner)
        told: list[dict[str, Any]] = []
        async for some in in_steps(states, _STATES_AT_ONCE):
            told += [state_json(self.streams, state) for state in some]
        return json_response({"streams": told})

    async def state(self, request: Request) -> Response:
        query(request.scope, ())
        state = await self.streams.state(request.path_params["stream_id"], caller(request.scope).owner)
        return json_response(state_json(self.streams, state))

    async def snapshot(self, request: Request) -> Response:
        query(request.scope, ())
        answer = await self.streams.answer(request.path_params["stream_id"], caller(request.scope).owner)
        return json_response(answer_json(answer))

    async def ack(self, request: Request) -> Response:
        query(request.scope, ())
        body = await read_json(request.scope, request.receive, self.max_body)
        stream_id = request.path_params["stream_id"]
        state = await self.streams.ack(stream_id, caller(request.scope).owner, acked(body))
        return json_response(state_json(self.streams, state))

    async def cancel(self, request: Request) -> Response:
        query(request.scope, ())
        state = await self.streams.cancel(request.path_params["stream_id"], caller(request.scope).owner)
        return json_response({"stream_id": state.meta.stream_id, "status": state.status})


def position(scope: Scope, stream_id: str) -> Cursor:
    """The position of a resume: `cursor`, else `Last-Event-ID`, else `from`.

    The one that is used must be good: a bad one is refused, never passed over for a lower one (I4).  Raises BadCursor.
    """
    fields = query(scope, (Q_CURSOR, Q_FROM, Q_FORMAT))
    if Q_CURSOR in fields and Q_FROM in fields:
        raise BadCursor("'cursor' and 'from' exclude each other")
    try:
        last_event_id = header(scope, _LAST_EVENT_ID)
    except BadRequest as error:
        raise BadCursor(error.detail) from None
    if Q_CURSOR in fields:
        used = cursor.decode(_only(fields[Q_CURSOR], Q_CURSOR))
        if last_event_id is not None:
            _compare(used, last_event_id, stream_id)
        return used
    begin = _only(fields[Q_FROM], Q_FROM) if Q_FROM in fields else None
    if last_event_id is not None:
        # The browser's own header wins over where the page began; that it has moved on since is no mismatch.
        return cursor.decode_last_event_id(last_event_id, stream_id)
    if begin is None:
        raise BadCursor("no position: pass ?cursor=, Last-Event-ID, or ?from=start")
    return Cursor(stream_id, 0) if begin == FROM_START else cursor.decode(begin)


def in_openai_format(scope: Scope) -> bool:
    """Whether a resume asks for chunks instead of records.  Raises BadRequest for a format there is not."""
    formats = query(scope, (Q_CURSOR, Q_FROM, Q_FORMAT)).get(Q_FORMAT)
    if formats is not None and formats != [FORMAT_OPENAI]:
        raise BadRequest(f"'{Q_FORMAT}' can only be {FORMAT_OPENAI}, once")
    return formats is not None


def _only(values: list[str], name: str) -> str:
    """The one value of a query field that names a position."""
    if len(values) > 1:
        raise BadCursor(f"{name} stands {len(values)} times")
    return values[0]


def _compare(used: Cursor, last_event_id: str, stream_id: str) -> None:
    """A lower source is only compared: one line in the log when it says something else."""
    try:
        other = cursor.decode_last_event_id(last_event_id, stream_id)
    except BadCursor:
        other = None
    if other != used:
        lower = other.seq if other else "unreadable"
        # As it stood in the path: it is the caller's word, and must not become a line of its own.
        shown = quote(stream_id, safe="")[:100]
        _log.warning("cursor_mismatch stream=%s cursor=%d last_event_id=%s", shown, used.seq, lower)


def state_json(streams: Streams, state: StreamState) -> dict[str, Any]:
    """The state as PROTOCOL.md, "State", has it; readers are those of this process."""
    stream_id = state.meta.stream_id
    return {
        "stream_id": stream_id,
        "status": state.status,
        "model": state.meta.model,
        "highest_seq": state.highest_seq,
        "oldest_retained_seq": state.oldest_retained_seq,
        "acked_seq": state.acked_seq,
        "trimmed_seq": state.trimmed_seq,
        "retained_records": state.retained_records,
        "retained_bytes": state.retained_bytes,
        "readers": len(streams.readers.get(stream_id, ())),
        "lowest_reader_seq": streams.lowest(stream_id),
        "created_at": state.meta.created_at,
        "last_access": state.last_access,
    }


def answer_json(answer: Answer) -> dict[str, Any]:
    """A snapshot: the answer up to `seq`, and the cursor to go on from there."""
    fold, state = answer.fold, answer.state
    first = fold.choices.get(0) or Choice()
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


def _choice_json(index: int, choice: Choice) -> dict[str, Any]:
    body: dict[str, Any] = {"index": index, "text": choice.text.decode()}
    if choice.reasoning:
        body["reasoning"] = choice.reasoning.decode()
    if choice.refusal:
        body["refusal"] = choice.refusal.decode()
    if choice.tool_calls:
        body["tool_calls"] = tool_calls(choice)
    if choice.finish_reason:
        body["finish_reason"] = choice.finish_reason
    return body
