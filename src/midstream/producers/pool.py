"""The producer in front of the worker pool: puts a request into the queue and relays what workers post.

An entry of progress becomes a chunk whose `src` says whose it is; the reply, once every entry before it has been read,
completes the stream.  Whoever stops listening (a reader's cancel, abandonment, a shutdown) ends the writer of the
stream, and with it this generator: the request is cancelled where the stream has ended, and left to the replica that
takes it over where it is still open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from midstream.codec.openai import Route
from midstream.errors import MidstreamError, ProducerFailed
from midstream.pool import payload
from midstream.pool.attending import Attendance
from midstream.pool.errors import PoolUnavailable, UnknownRequest
from midstream.pool.pool import Outcome, Pool
from midstream.pool.relay import Relay
from midstream.pool.shapes import Ask, Request
from midstream.pool.sweep import HasEnded, forget_leases
from midstream.records import Choice, Fold, Producer
from midstream.wire import POOL_ABANDONED, POOL_MOST_FAULTS, STORE_PATIENCE

_log = logging.getLogger("midstream")
_T = TypeVar("_T")


class PoolSource:
    """Every model that workers offer.  `has_ended`: whether a stream has ended, or is gone."""

    # Seconds without a reader after which a request counts as cancelled; its own word on that comes first.
    abandon_after = POOL_ABANDONED
    # Leases and ledger outlive this process.
    continues = True

    def __init__(self, pool: Pool, has_ended: HasEnded) -> None:
        self._pool = pool
        self._has_ended = has_ended

    def serves(self, model: str) -> bool:
        """Whether a worker offers it now."""
        return self._pool.serves(model)

    async def models(self) -> list[dict[str, Any]]:
        """The models that workers offer now, as OpenAI lists them."""
        return [{"id": model, "object": "model", "created": 0, "owned_by": "pool"} for model in self._pool.models()]

    def freshest(self) -> str | None:
        """The model to take where none was named; None while no worker is here."""
        return self._pool.freshest()

    def ask(
        self, owner: str, body: Mapping[str, Any], route: Route, headers: Mapping[str, str] | None = None
    ) -> Callable[[str], Producer]:
        """Check the request now, and generate when a stream's id is there.  Raises BadRequest, with `param`."""
        ask = payload.ask_for(owner, str(body["model"]), body, route)
        return lambda stream_id: self.generate(ask, stream_id)

    async def generate(self, ask: Ask, stream_id: str) -> Producer:
        """Put the request into the queue; yield an empty list, lists of chunks, then one Finish.

        Raises ProducerFailed: `ChatStreamDiverged` where what was shown cannot go on, `pool_faulted` where workers were
        lost before anything was shown, `pool_expired` where none took it, `store_unavailable`.
        """
        enqueued = asyncio.ensure_future(self._pool.enqueue(payload.on_stream(ask, stream_id)))
        try:
            request = await asyncio.shield(enqueued)
        except asyncio.CancelledError:
            self._pool.later(self._withdraw(enqueued, stream_id))
            raise
        except PoolUnavailable as away:
            raise ProducerFailed("store_unavailable", str(away)) from None
        yield []
        async for part in self._relayed(request, Relay(payload.stops(ask)), stream_id):
            yield part

    async def proceed(
        self, owner: str, body: Mapping[str, Any], route: Route, stream_id: str, fold: Fold
    ) -> Producer | None:
        """Go on with a stream whose writer's process is gone; None where that is not possible.

        Raises BadRequest, PoolUnavailable.
        """
        request = await self._pool.jobs.by_stream(stream_id)
        if request is None:  # it was not in the queue yet, or has been forgotten
            return self.ask(owner, body, route)(stream_id) if not fold.choices else None
        if not fold.complete or (fold.src is None and fold.choices):
            await self._pool.cancel(request.id)
            return None
        if not self._pool.shared and request.status == "waiting":
            await forget_leases(self._pool, request, shown(fold))
            if fold.src is not None:
                return None
        relay = Relay(payload.stops(request.ask))
        if fold.src is not None:
            answer = fold.choices.get(0, Choice())
            generation, seq = fold.src
            called = bool(answer.tool_calls)
            relay.resume(generation, seq, answer.text.decode(), answer.reasoning.decode(), called=called)
        return self._relayed(request, relay, stream_id)

    # --- the relay --------------------------------------------------------------------------------------------------

    async def _relayed(self, request: Request, relay: Relay, stream_id: str) -> Producer:
        attendance = self._pool.attend(request.id)
        if relay.state == "exposed":
            attendance.pinned = relay.pinned
        over = False
        try:
            after = ""
            while not relay.ended:
                after = await self._look(attendance, relay, after)
                if chunks := relay.take():
                    attendance.pinned = relay.pinned
                    yield chunks
                if not relay.ended:
                    await attendance.wait()
            over = True
            if relay.finish is None:
                # First of all: nothing of it may be offered or popped again.
                await _patiently(lambda: self._pool.cancel(request.id))
                raise _diverged(relay)
            yield relay.finish
        except ProducerFailed:
            over = True
            raise
        finally:
            attendance.close()
            if not over:
                await self._left(request.id, stream_id)

    async def _look(self, attendance: Attendance, relay: Relay, after: str) -> str:
        """Take what is new: first what became of the request, then the entries before that; returns their position."""
        outcome = None
        if attendance.look:
            attendance.look = False
            outcome = await _patiently(lambda: self._outcome(attendance.request))
        entries = await _patiently(lambda: self._pool.entries(attendance.request, after))
        for position, entry in entries:
            relay.feed(entry)
            after = position
        if outcome is not None:
            _apply(outcome, relay)
        return after

    async def _outcome(self, request: str) -> Outcome:
        try:
            return await self._pool.outcome(request)
        except UnknownRequest:
            raise ProducerFailed("pool_expired", "the pool has forgotten the request") from None

    async def _left(self, request: str, stream_id: str) -> None:
        """The writer was stopped: where its stream has ended so has the request; else another replica goes on."""
        await asyncio.shield(self._pool.later(self._cancel_if_ended(request, stream_id)))

    async def _cancel_if_ended(self, request: str, stream_id: str) -> None:
        with suppress(MidstreamError):  # the journal does not answer: the sweep asks again
            if await self._has_ended(stream_id):
                await self._pool.cancel(request)

    async def _withdraw(self, enqueued: asyncio.Future[Request], stream_id: str) -> None:
        """Its stream was stopped while the request was on its way into the queue."""
        await self._cancel_if_ended((await enqueued).id, stream_id)


def shown(fold: Fold) -> tuple[str, int] | None:
    """Whose words a stream's readers have, and how many characters; None where they have none."""
    if fold.src is None:
        return None
    answer = fold.choices.get(0, Choice())
    return str(fold.src[0]), len(answer.text.decode()) + len(answer.reasoning.decode())


def _apply(outcome: Outcome, relay: Relay) -> None:
    """What the database says, once the entries before it have been fed.  Raises ProducerFailed."""
    request = outcome.request
    if outcome.done is not None and outcome.done.reply is not None:
        reply = outcome.done.reply
        relay.reply(outcome.done.id, payload.without_turn(reply) if request.ask.chat else reply)
    elif relay.state == "exposed" and relay.pinned is not None and relay.pinned not in outcome.leased:
        relay.lost(relay.pinned)
    elif request.status == "failed":
        code = "pool_faulted" if request.faults >= POOL_MOST_FAULTS else "pool_expired"
        raise ProducerFailed(code, request.reason)
    elif request.status == "cancelled":
        raise ProducerFailed("pool_cancelled", "the request was cancelled in the pool")


def _diverged(relay: Relay) -> ProducerFailed:
    return ProducerFailed("ChatStreamDiverged", f"the answer cannot go on: {relay.why}; ask again")


async def _patiently(call: Callable[[], Awaitable[_T]]) -> _T:
    """Ask again while the pool's stores do not answer.  Raises ProducerFailed when that takes too long."""
    clock = asyncio.get_running_loop().time
    give_up, pause = clock() + STORE_PATIENCE, 0.05
    while True:
        try:
            return await call()
        except PoolUnavailable as away:
            if clock() >= give_up:
                raise ProducerFailed("store_unavailable", str(away)) from None
        await asyncio.sleep(pause)
        pause = min(2 * pause, 1.0)
