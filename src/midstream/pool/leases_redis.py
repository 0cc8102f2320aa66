"""Leases and progress in the journal's Redis or Valkey, for every gateway that shares it.

Each verb is one script, in one atomic step by the server's clock; `leases_scripts` has the keys, `leases_tail` reads.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeVar

import orjson

from midstream.codec.text import whole
from midstream.errors import JournalError, MidstreamError, StoreUnavailable
from midstream.journal.base import RoundTrips
from midstream.journal.redis_node import Node
from midstream.journal.redis_scripts import Script, command
from midstream.journal.redis_store import Store
from midstream.journal.redis_url import Access
from midstream.journal.redis_url import Terms as StoreTerms
from midstream.pool.errors import NoLease, PoolUnavailable, ProgressOutOfSequence, ProgressTooLarge, WrongKey
from midstream.pool.leases import Ended, Hear, LeaseView, Terms, Wake, digest, packed
from midstream.pool.leases_scripts import TAGS, Answer, PoolSpace, Scripts, tag_of
from midstream.pool.leases_tail import START, Tail, entry_of, position
from midstream.pool.leases_wakes import Hearers, Wakes
from midstream.pool.shapes import Entry, Lease, Posted, SignalKind

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Generations whose request this process remembers.  What a generation belongs to never changes.
_REMEMBERED = 10_000
# No generation has a longer id, in characters: others are not looked for.
_LONGEST_ID = 64


class RedisLeases:
    """`ahead` is how many seconds to be ahead of the server's clock: tests let time pass by it."""

    shared = True

    def __init__(
        self,
        access: Access,
        terms: Terms | None = None,
        store_terms: StoreTerms | None = None,
        ahead: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._access = access
        self._terms = terms or Terms()
        self._store_terms = store_terms or access.terms
        self._ahead = ahead
        self._scripts = Scripts(self._terms)
        self._space = PoolSpace(access.prefix)
        self._linger = int(self._terms.linger * 1000)
        self._requests: dict[str, str] = {}
        self._wakes = Wakes()
        self._hearers = Hearers()
        self.trips = RoundTrips()
        self._running = False
        self._store: Store
        self._tail: Tail

    # --- life -------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        store = self._store = Store(self._access, self._space, self._store_terms, self.trips, self._scripts.all())
        tail = self._tail = Tail(store, self._space, self._wakes)
        store.on_up, store.on_down, store.on_restart = self._up, tail.lost, tail.lost
        store.on_moved, store.on_message = self._moved, self._message
        self._running = True
        if not await store.open():
            if refusal := store.refusal():
                await self.close()
                raise JournalError(refusal)
            logger.error("the store at %s does not answer; it is tried again and again", self._access.place)

    async def close(self) -> None:
        if self._running:
            self._running = False
            await self._tail.close()
            await self._store.close()

    def _up(self, node: Node) -> None:
        self._tail.up(node)
        if self._hearers:
            self._hear(self._store.shards_of(node))

    def _moved(self, tags: list[int]) -> None:
        self._tail.moved(tags)
        if self._hearers:
            self._hear(tags)

    # --- leases -----------------------------------------------------------------------------------------------------

    async def grant(self, lease: Lease) -> bool:
        fields = {
            "key": lease.key_digest.hex(),
            "worker": whole(lease.worker),
            "model": whole(lease.model),
            "owner": whole(lease.owner),
            "max_bytes": lease.max_bytes,
        }
        await self._index(lease.generation, lease.request)
        run = self._store.node(tag_of(lease.request)).run_id
        told = await self._run(
            self._scripts.grant, lease.request, lease.generation, lease.request, orjson.dumps(fields), run
        )
        return bool(told == Answer.OK)

    async def post(self, generation: str, key_digest: bytes, seq: int, content: str, reasoning: str) -> Posted:
        request = await self._request_of(generation)
        if request is None:
            raise NoLease
        answer, fact = await self._post(request, generation, key_digest, seq, content, reasoning)
        if answer == Answer.OK:
            if fact:
                await self._renew(generation, request)
            return Posted(cancelled=False, renew=bool(fact))
        if answer == Answer.CANCELLED:
            return Posted(cancelled=True)
        if answer == Answer.SEQUENCE:
            raise ProgressOutOfSequence(fact)
        if answer == Answer.WRONG_KEY:
            raise WrongKey
        if answer == Answer.TOO_LARGE:
            raise ProgressTooLarge
        raise NoLease

    async def _post(
        self, request: str, generation: str, key_digest: bytes, seq: int, content: str, reasoning: str
    ) -> tuple[int, int]:
        said, thought = packed(content), packed(reasoning)
        size, chars = len(said) + len(thought), len(content) + len(reasoning)
        arguments = (key_digest.hex(), seq, digest(said, thought).hex(), size, chars, said, thought)
        tag = tag_of(request)
        while True:
            run = self._store.node(tag).run_id
            script = self._called(self._scripts.post, request, generation, *arguments, run)
            answer, fact = await _answered(self._store.append(tag, script))
            # It may have waited for another server than the one that it names; then the gap is to be judged anew.
            if answer != Answer.SEQUENCE or run == self._store.node(tag).run_id:
                return answer, fact

    async def flag(self, request: str) -> dict[str, int | None]:
        told = await self._run(self._scripts.flag, request, "")
        posted = zip(told[::2], told[1::2], strict=True)
        return {generation.decode(): None if chars < 0 else chars for generation, chars in posted}

    async def end(self, generation: str, *, marker: bool) -> Ended:
        request = await self._request_of(generation)
        if request is None:
            return Ended.NONE
        return Ended(await self._run(self._scripts.end, request, generation, int(marker)))

    async def lost(self, generation: str) -> bool:
        request = await self._request_of(generation)
        return request is None or bool(await self._run(self._scripts.lost, request, generation))

    async def held(self) -> list[LeaseView]:
        told = await _answered(
            self._store.each((tag, command("ZRANGE", self._space.held(tag), 0, -1)) for tag in range(TAGS))
        )
        requests = [request.decode() for of_tag in told for request in of_tag]
        keys = [(tag_of(request), self._space.of_request(request)[0]) for request in requests]
        hashes = await _answered(self._store.each((tag, command("HGETALL", key)) for tag, key in keys))
        seconds, micros = await _answered(self._store.run(0, command("TIME")))
        now = int(seconds) + int(micros) / 1e6 + self._ahead()
        views = [view for told, request in zip(hashes, requests, strict=True) for view in _views(request, told)]
        return [view for view in views if now < view.expires_at]

    # --- progress ---------------------------------------------------------------------------------------------------

    async def entries(self, request: str, after: str) -> list[tuple[str, Entry]]:
        since = position(after) if after else START
        if (known := self._tail.entries(request, since)) is not None:
            return known
        first = f"({after}" if after else "-"
        xrange = command("XRANGE", self._space.progress(request), first, "+")
        told = await _answered(self._store.run(tag_of(request), xrange))
        return [(entry_id.decode(), entry_of(fields)) for entry_id, fields in told]

    def watch(self, request: str, wake: Wake) -> Callable[[], None]:
        if request not in self._wakes:
            self._tail.watch(request)
        return self._wakes.add(request, wake, lambda: self._tail.forget(request))

    # --- signals ----------------------------------------------------------------------------------------------------

    async def signal(self, request: str, kind: SignalKind) -> None:
        self._hearers.tell(request, kind)
        tag = tag_of(request)
        publish = "SPUBLISH" if self._store.clustered else "PUBLISH"
        message = orjson.dumps({"request": request, "kind": kind})
        try:
            await self._store.run(tag, command(publish, self._space.channel(tag), message))
        except MidstreamError as error:
            logger.debug("no signal: %s", error)

    def listen(self, heard: Hear) -> None:
        self._hearers.add(heard)
        if self._running:
            self._hear(range(TAGS))

    def _hear(self, tags: Iterable[int]) -> None:
        """Hear the channels of these tags, at the servers that have been met: others are heard once they are."""
        for tag in tags:
            if tag < TAGS and self._store.node(tag).calls.open:
                self._store.listen(tag)

    def _message(self, _: bytes, message: bytes) -> None:
        try:
            told = orjson.loads(message)
            self._hearers.tell(told["request"], told["kind"])
        except (ValueError, TypeError, KeyError):
            logger.warning("a signal that is none: %r", message[:100])

    # --- how the store is asked -------------------------------------------------------------------------------------

    def _called(self, script: Script, request: str, generation: str, *arguments: bytes | str | int) -> bytes:
        return script.call(self._space.of_request(request), int(self._ahead() * 1000), packed(generation), *arguments)

    async def _run(self, script: Script, request: str, generation: str, *arguments: bytes | str | int) -> Any:
        packed_call = self._called(script, request, generation, *arguments)
        return await _answered(self._store.run(tag_of(request), packed_call))

    async def _request_of(self, generation: str) -> str | None:
        """The request of a generation; None where the store knows none."""
        if (known := self._requests.get(generation)) is not None:
            return known
        if len(generation) > _LONGEST_ID:
            return None
        key = self._space.generation(generation)
        told = await _answered(self._store.run_on(key, command("GET", key)))
        return None if told is None else self._remember(generation, told.decode())

    def _remember(self, generation: str, request: str) -> str:
        if len(self._requests) >= _REMEMBERED:
            del self._requests[next(iter(self._requests))]
        self._requests[generation] = request
        return request

    async def _index(self, generation: str, request: str) -> None:
        """Have the generation found for as long as its lease can be."""
        key = self._space.generation(generation)
        await _answered(self._store.run_on(key, command("SET", key, request, "PX", self._linger)))
        self._remember(generation, request)

    async def _renew(self, generation: str, request: str) -> None:
        try:
            await self._index(generation, request)
        except PoolUnavailable as error:
            logger.debug("the index of a generation was not renewed: %s", error)  # the next third of a term does it


async def _answered(reply: Awaitable[T]) -> T:
    """The store's reply.  Raises PoolUnavailable."""
    try:
        return await reply
    except StoreUnavailable as error:
        raise PoolUnavailable(str(error)) from error


def _views(request: str, told: list[bytes]) -> Iterator[LeaseView]:
    """The leases in a request's hash."""
    for generation, fields in zip(told[::2], told[1::2], strict=True):
        if generation == b"flagged" or "over" in (lease := orjson.loads(fields)):
            continue
        yield LeaseView(
            generation=generation.decode(),
            request=request,
            worker=lease["worker"],
            model=lease["model"],
            owner=lease["owner"],
            seq=lease["seq"],
            bytes=lease["bytes"],
            chars=lease["chars"],
            cancelled=lease["cancelled"],
            expires_at=lease["expires"] / 1000,
        )
