"""Leases and progress in this process's memory: gone with it, and seen by no other gateway."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from hmac import compare_digest

from midstream.clock import Clock
from midstream.pool.errors import NoLease, ProgressOutOfSequence, ProgressTooLarge, WrongKey
from midstream.pool.leases import Ended, Hear, LeaseView, Terms, Wake, digest, packed
from midstream.pool.leases_wakes import Hearers, Wakes
from midstream.pool.shapes import Entry, Lease, Posted, SignalKind

# How often what has run out is looked for, in seconds.  Nothing is answered from it before that either.
_TIDY_EVERY = 60.0


class _Held:
    """A lease and how far its generation has come.  `noted` is when the SQL side was last due a renewal."""

    __slots__ = ("bytes", "cancelled", "chars", "digest", "expires_at", "lease", "noted", "seq")

    def __init__(self, lease: Lease, now: float, term: float) -> None:
        self.lease = lease
        self.seq = self.bytes = self.chars = 0
        self.digest = b""
        self.cancelled = False
        self.noted = now
        self.expires_at = now + term


class _Asked:
    """A request: its leases, the generations that are over, and its entries.  `touched` is the last change."""

    __slots__ = ("appended", "entries", "flagged", "leases", "over", "position", "posted", "touched")

    def __init__(self, kept: int) -> None:
        self.flagged = False
        self.leases: dict[str, _Held] = {}
        # What they were when they were removed, and what `flag` tells of them.
        self.over: dict[str, Ended] = {}
        self.posted: dict[str, int | None] = {}
        self.entries: deque[tuple[int, Entry]] = deque(maxlen=kept)
        self.position = 0
        self.appended = self.touched = float("-inf")


class MemoryLeases:
    """`clock` gives seconds since 1970.  By how much it jumps does not matter: nothing here outlives the process."""

    shared = False

    def __init__(self, clock: Callable[[], float], terms: Terms | None = None) -> None:
        self._wall = Clock.of(clock)
        self._clock = self._wall.steady
        self._terms = terms or Terms()
        self._asked: dict[str, _Asked] = {}
        self._index: dict[str, str] = {}
        self._wakes = Wakes()
        self._hearers = Hearers()
        self._tidied = float("-inf")

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    # --- leases -----------------------------------------------------------------------------------------------------

    async def grant(self, lease: Lease) -> bool:
        now = self._clock()
        self._tidy(now)
        asked = self._of(lease.request, now)
        if asked.flagged or lease.generation in asked.over:
            return False
        if not self._live(asked, lease.generation, now):
            asked.leases[lease.generation] = _Held(lease, now, self._terms.term)
            self._index[lease.generation] = lease.request
        return True

    async def post(self, generation: str, key_digest: bytes, seq: int, content: str, reasoning: str) -> Posted:
        now = self._clock()
        asked, held = self._find(generation, now)
        if asked is None or held is None:
            raise NoLease
        if not compare_digest(held.lease.key_digest, key_digest):
            raise WrongKey
        if held.cancelled:
            self._renew(asked, held, now)
            return Posted(cancelled=True)
        said, thought = packed(content), packed(reasoning)
        mark = digest(said, thought)
        if not (seq == 0 and not said and not thought) and not (seq == held.seq > 0 and mark == held.digest):
            if seq != held.seq + 1:
                raise ProgressOutOfSequence(held.seq + 1)
            size = held.bytes + len(said) + len(thought)
            if seq > self._terms.batches or size > held.lease.max_bytes:
                self._renew(asked, held, now)
                raise ProgressTooLarge
            held.seq, held.digest, held.bytes = seq, mark, size
            held.chars += len(content) + len(reasoning)
            self._append(held.lease, Entry(generation, seq, content, reasoning, held.lease.worker, held.lease.model))
        self._renew(asked, held, now)
        return Posted(cancelled=False, renew=self._note(held, now))

    def _renew(self, asked: _Asked, held: _Held, now: float) -> None:
        held.expires_at = now + self._terms.term
        asked.touched = now

    def _note(self, held: _Held, now: float) -> bool:
        """Is the SQL side due a renewal?  If so, it is noted as done."""
        due = now - held.noted >= self._terms.third
        if due:
            held.noted = now
        return due

    async def flag(self, request: str) -> dict[str, int | None]:
        now = self._clock()
        asked = self._of(request, now)
        asked.flagged = True
        for held in asked.leases.values():
            held.cancelled = held.cancelled or now < held.expires_at
        return asked.posted | {name: held.chars for name, held in asked.leases.items() if held.cancelled}

    async def end(self, generation: str, *, marker: bool) -> Ended:
        asked, live = self._find(generation, self._clock())
        if asked is None:
            return Ended.NONE
        if generation in asked.leases:
            self._remove(asked, generation, Ended.NONE if live is None else Ended.LIVE, marker=marker)
        return asked.over.get(generation, Ended.NONE)

    async def lost(self, generation: str) -> bool:
        asked, live = self._find(generation, self._clock())
        if live is not None:
            return False
        if asked is not None and generation in asked.leases:
            self._remove(asked, generation, Ended.NONE, marker=True)
        return True

    def _remove(self, asked: _Asked, generation: str, kind: Ended, *, marker: bool) -> None:
        held = asked.leases.pop(generation)
        lease = held.lease
        asked.over[generation] = Ended.CANCELLED if held.cancelled else kind
        asked.touched = self._clock()
        if held.cancelled:
            asked.posted[generation] = held.chars
        elif marker:
            asked.posted[generation] = None
        if marker:
            self._append(lease, Entry(generation, 0, "", "", lease.worker, lease.model, ended=True))

    async def held(self) -> list[LeaseView]:
        now = self._clock()
        self._tidy(now)
        leases = [held for asked in self._asked.values() for held in asked.leases.values()]
        ahead = self._wall() - now
        return [_view(held, ahead) for held in leases if now < held.expires_at]

    def _of(self, request: str, now: float) -> _Asked:
        asked = self._asked.get(request)
        if asked is None:
            asked = self._asked[request] = _Asked(self._terms.entries)
        asked.touched = now
        return asked

    def _find(self, generation: str, now: float) -> tuple[_Asked | None, _Held | None]:
        """The request of a generation, and its lease where that is live."""
        asked = self._asked.get(self._index.get(generation, ""))
        return asked, self._live(asked, generation, now) if asked is not None else None

    def _live(self, asked: _Asked, generation: str, now: float) -> _Held | None:
        held = asked.leases.get(generation)
        return held if held is not None and now < held.expires_at else None

    # --- progress ---------------------------------------------------------------------------------------------------

    def _append(self, lease: Lease, entry: Entry) -> None:
        asked = self._asked[lease.request]
        now = self._clock()
        if now - asked.appended >= self._terms.retain:
            asked.entries.clear()
        asked.position += 1
        asked.appended = now
        asked.entries.append((asked.position, entry))
        self._wakes.wake(lease.request)

    async def entries(self, request: str, after: str) -> list[tuple[str, Entry]]:
        asked = self._asked.get(request)
        if asked is None or self._clock() - asked.appended >= self._terms.retain:
            return []
        return [(str(position), entry) for position, entry in _since(asked.entries, int(after or 0))]

    def watch(self, request: str, wake: Wake) -> Callable[[], None]:
        return self._wakes.add(request, wake, lambda: self._unread(request))

    def _unread(self, request: str) -> None:
        """No relay reads it any more.  Where no worker has it either that was the last one, since no other process
        could go on; and at thousands of posts a second what is over would soon be most of what is held.
        """
        asked, now = self._asked.get(request), self._clock()
        if asked is not None and not any(self._live(asked, generation, now) for generation in asked.leases):
            asked.entries.clear()

    # --- signals ----------------------------------------------------------------------------------------------------

    async def signal(self, request: str, kind: SignalKind) -> None:
        self._hearers.tell(request, kind)

    def listen(self, heard: Hear) -> None:
        self._hearers.add(heard)

    # --- tidiness ---------------------------------------------------------------------------------------------------

    def _tidy(self, now: float) -> None:
        """Forget what has run out."""
        if 0 <= now - self._tidied < _TIDY_EVERY:
            return
        self._tidied = now
        for request, asked in list(self._asked.items()):
            if asked.entries and now - asked.appended >= self._terms.retain:
                asked.entries.clear()
            if now - asked.touched >= self._terms.linger and not asked.entries and request not in self._wakes:
                del self._asked[request]
                for generation in (*asked.leases, *asked.over):
                    self._index.pop(generation, None)


def _since(entries: deque[tuple[int, Entry]], after: int) -> Iterator[tuple[int, Entry]]:
    """From the newest back: a reader that keeps up looks at what is new alone."""
    new: list[tuple[int, Entry]] = []
    for item in reversed(entries):
        if item[0] <= after:
            break
        new.append(item)
    return reversed(new)


def _view(held: _Held, ahead: float) -> LeaseView:
    lease = held.lease
    return LeaseView(
        generation=lease.generation,
        request=lease.request,
        worker=lease.worker,
        model=lease.model,
        owner=lease.owner,
        seq=held.seq,
        bytes=held.bytes,
        chars=held.chars,
        cancelled=held.cancelled,
        expires_at=held.expires_at + ahead,
    )
