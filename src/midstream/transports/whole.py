"""Whole answers: waiting for the end of a stream on behalf of a client that wants nothing before it."""

from __future__ import annotations

import asyncio

from starlette.types import Receive

from midstream.errors import PositionError, ShuttingDown
from midstream.streams import Answer, Streams
from midstream.transports.sse import interrupt_when_gone


async def whole_answer(streams: Streams, stream_id: str, owner: str, receive: Receive) -> Answer:
    """The answer, once its stream has ended in whatever way.

    Its client counts as a reader meanwhile.  Raises ShuttingDown where this process (or the client) goes first, and
    what `Streams.answer` does.
    """
    while not await _over(streams, stream_id, owner, receive):
        pass
    answer = await streams.answer(stream_id, owner)
    if not answer.state.ended:
        raise ShuttingDown("this process ended before the answer did; resume its stream", stream_id=stream_id)
    return answer


async def _over(streams: Streams, stream_id: str, owner: str, receive: Receive) -> bool:
    """Wait for the end.  False: the position is none any more, which is nothing to who only wants the sum of it all."""
    state = await streams.owned(stream_id, owner)
    follow = await streams.follow(stream_id, owner, state.highest_seq)
    if follow is None:
        return True
    gone = asyncio.ensure_future(interrupt_when_gone(receive, follow))
    try:
        async for _ in follow:
            pass
    except PositionError:
        return False
    finally:
        streams.leave(follow)
        gone.cancel()
    return True
