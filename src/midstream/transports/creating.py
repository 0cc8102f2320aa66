"""A POST that opens a stream: the same of every create route over HTTP."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from starlette.types import Receive, Scope

from midstream.streams import Streams
from midstream.transports.asking import NATIVE, Asked, Front, Sources, asked, open_stream
from midstream.transports.http import caller, header, query, read_json
from midstream.wire import H_IDEMPOTENCY

_KEY: Final = H_IDEMPOTENCY.lower().encode()
_TRACE: Final = b"traceparent"


class Created(NamedTuple):
    """What was asked for, by whom, and the stream that answers it; `keyed`: under an Idempotency-Key."""

    body: dict[str, Any]
    asked: Asked
    owner: str
    stream_id: str
    keyed: bool


async def create(
    scope: Scope, receive: Receive, streams: Streams, sources: Sources, max_body: int, front: Front = NATIVE
) -> Created:
    """Open the stream that the request asks for, or find that of its key.

    `max_body` is in bytes.  Raises BadRequest, what `read_body` does, and what `open_stream` does.
    """
    query(scope, ())
    body = await read_json(scope, receive, max_body)
    what, owner = asked(body, front), caller(scope).owner
    key, trace = header(scope, _KEY), header(scope, _TRACE)
    opened = await open_stream(streams, sources, owner, what, idempotency_key=key, trace=trace)
    return Created(body, what, owner, opened.state.meta.stream_id, key is not None)
