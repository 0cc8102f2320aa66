"""Continuing a stream whose writer's process is gone: out of what was kept with it, and nothing else."""

from __future__ import annotations

from typing import Any

import orjson

from midstream.errors import BadRequest
from midstream.producers.continuation import Continued, can_continue, written_of
from midstream.records import StreamState
from midstream.streams import Streams
from midstream.transports.asking import Sources, asked
from midstream.writer import Producer


async def proceed(streams: Streams, sources: Sources, state: StreamState) -> Producer | None:
    """A producer that goes on with the answer so far; None where that is off, or not possible for this answer."""
    source: Any = sources.for_model(state.meta.model)
    kept = orjson.loads(state.meta.request)
    if not isinstance(source, Continued) or "body" not in kept:
        return None
    try:
        body = {**asked(kept["body"]).upstream, "model": state.meta.model}
    except BadRequest:  # kept by a version that took more than this one
        return None
    answer = await streams.answer(state.meta.stream_id, state.meta.owner)
    written = written_of(answer.fold)
    if written is None or not can_continue(body, written):
        return None
    return source.proceed(body, "chat", written)
