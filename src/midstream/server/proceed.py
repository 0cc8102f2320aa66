"""Continuing a stream whose writer's process is gone: out of what was kept with it, and what the pool knows of it."""

from __future__ import annotations

from typing import Final

import orjson

from midstream.errors import BadRequest
from midstream.records import Producer, StreamState
from midstream.streams import Streams
from midstream.transports.asking import NATIVE, Front, Sources, asked
from midstream.transports.openai_asking import CHAT, COMPLETIONS
from midstream.transports.openai_responses import RESPONSES

# Every route that opens streams, by its path, which is kept with them.
FRONTS: Final[dict[str, Front]] = {front.path: front for front in (NATIVE, CHAT, COMPLETIONS, RESPONSES)}


async def proceed(streams: Streams, sources: Sources, state: StreamState) -> Producer | None:
    """A producer that goes on with the answer so far; None where that is off, or not possible for this answer."""
    source = sources.for_model(state.meta.model) or sources.pool  # whose workers may be away just now
    kept = orjson.loads(state.meta.request)
    front = FRONTS.get(kept.get("route"))
    if source is None or not source.continues or front is None:
        return None
    try:
        body = {**asked(kept["body"], front).upstream, "model": state.meta.model}
    except BadRequest:  # kept by a version that took more than this one
        return None
    answer = await streams.answer(state.meta.stream_id, state.meta.owner)
    return await source.proceed(state.meta.owner, body, front.route, state.meta.stream_id, answer.fold)
