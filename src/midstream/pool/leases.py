"""The port to where leases and live progress are kept: `leases_memory` and `leases_redis` speak it.

A lease is a worker's right to one generation.  It runs out a term after its worker's last post, by the store's clock,
and nobody but the store says whether it has.  Posts are authenticated from it alone, checked and appended in one
atomic step; what was posted for a request is one retained list of entries, which relays read.

Text comes back as it was posted, NUL, CRLF and halves of surrogate pairs included: a batch may end in the middle of a
pair whose other half begins the next one.  Whoever makes records of entries mends them (`codec.text.Mender`).  For
sizes and digests a half counts as the three bytes that UTF-8 would give it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from typing import Protocol

from midstream.pool.shapes import Entry, Lease, Posted, SignalKind
from midstream.wire import POOL_LEASE_TERM, POOL_MAX_BATCHES, POOL_PROGRESS_KEPT, POOL_PROGRESS_TERM

Wake = Callable[[], None]
Hear = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Terms:
    """Bounds of leases and progress; times in seconds.  The defaults are PROTOCOL.md's; tests shorten them."""

    term: float = POOL_LEASE_TERM  # how long a lease lasts after its worker's last post
    batches: int = POOL_MAX_BATCHES  # per generation
    entries: int = POOL_PROGRESS_KEPT  # kept per request, about
    retain: float = POOL_PROGRESS_TERM  # entries go this long after the last one was appended
    linger: float = 3600.0  # a flag, and what is known of leases that have run out, go this long after the last change

    @property
    def third(self) -> float:
        """The SQL side is renewed at most once in this time."""
        return self.term / 3


@dataclass(frozen=True, slots=True)
class LeaseView:
    """A live lease as an admin sees it.  `seq` is its last batch, `bytes` and `chars` what was posted; times in
    seconds since 1970 by the store's clock.
    """

    generation: str
    request: str
    worker: str
    model: str
    owner: str
    seq: int
    bytes: int
    chars: int
    cancelled: bool
    expires_at: float


class Ended(IntEnum):
    """What a lease was when it was removed."""

    NONE = 0  # it had run out, or there was none
    LIVE = 1
    CANCELLED = 2  # it had been flagged


class Leases(Protocol):
    """Leases and progress of all requests.  Every verb but `watch` and `listen` raises PoolUnavailable when the store
    does not answer; each may then be repeated as it was, since none does twice what it has done.
    """

    @property
    def shared(self) -> bool:
        """Do leases outlive this process, and do other gateways see them?"""
        ...

    async def open(self) -> None:
        """Be ready.  A store that is away is tried again and again; one that refuses us raises JournalError."""
        ...

    async def close(self) -> None:
        """Let go of the store.  Closing twice is harmless."""
        ...

    async def grant(self, lease: Lease) -> bool:
        """Give a worker its lease, for a term from now.  False: the request was flagged, or the generation ended.

        Granting again what is held changes nothing of it.
        """
        ...

    async def post(self, generation: str, key_digest: bytes, seq: int, content: str, reasoning: str) -> Posted:
        """Check one batch and append it, in one atomic step.  The checks, in their order:

        no live lease -> NoLease; another key -> WrongKey; flagged -> `cancelled`; seq 0 without text -> nothing is
        appended; the last batch once more, same text -> nothing is appended; not the next, or the last one's number
        with other text -> ProgressOutOfSequence; over `Terms.batches` or the lease's `max_bytes` -> ProgressTooLarge.

        Whatever is answered with a Posted, and ProgressTooLarge, renews the lease.  `renew` is set once in a third of
        a term, whichever gateway was posted to.  NoLease is also the answer to a gap that a store left which was
        restarted or replaced and came back without the newest batches; the lease is over then.
        """
        ...

    async def flag(self, request: str) -> dict[str, int | None]:
        """Cancel a request: from now on its posts are told so, and grants for it refused.

        Returns, for each live lease, how many characters it has posted (content and reasoning), those of the same
        instant: nothing is posted in between.  Doing it again returns the same, whatever has become of the lease since.
        None where a lease was given back, or found run out, before the first flag: that is to be taken down as a fault,
        since who flags may be quicker at the database.
        """
        ...

    async def end(self, generation: str, *, marker: bool) -> Ended:
        """Remove a lease, for a submit (no marker) or a fault (with an `ended` entry).  Where it has been removed, what
        it was then is told again.

        An expired one that still stands is removed as well, with the marker where one is wanted.
        """
        ...

    async def lost(self, generation: str) -> bool:
        """Is there no live lease any more?  One that has run out is removed, and its `ended` entry appended, in the
        same step; so of several who ask one writes the entry, and a submit that came first leaves none to write.
        """
        ...

    async def entries(self, request: str, after: str) -> list[tuple[str, Entry]]:
        """The entries after a position, each with its own, in order; "" is before the first.

        For a request that is watched here it may lag behind what was posted elsewhere; a wake-up follows.
        """
        ...

    def watch(self, request: str, wake: Wake) -> Callable[[], None]:
        """Have `wake` called whenever there may be new entries, until what this returns is called.

        Wake-ups carry nothing, may come too often, and never too seldom.  An append before the watch began may wake.
        `wake` must be cheap.
        """
        ...

    async def signal(self, request: str, kind: SignalKind) -> None:
        """Tell every gateway what became of a request, after the commit.  It may be lost; it never raises for that."""
        ...

    def listen(self, heard: Hear) -> None:
        """Have `heard(request, kind)` called for each signal, from now on; some are lost, some come twice."""
        ...

    async def held(self) -> list[LeaseView]:
        """All live leases."""
        ...


def packed(text: str) -> bytes:
    """The text as bytes, halves of surrogate pairs included."""
    return text.encode("utf-8", "surrogatepass")


def unpacked(data: bytes) -> str:
    """What `packed` was given."""
    return data.decode("utf-8", "surrogatepass")


def digest(content: bytes, reasoning: bytes) -> bytes:
    """What tells two batches of one number apart; 16 bytes.  No text moves between content and reasoning unseen."""
    return blake2b(b"%d:%b%b" % (len(content), content, reasoning), digest_size=16).digest()


def open_leases(journal_url: str, clock: Callable[[], float], terms: Terms | None = None) -> Leases:
    """The leases that belong to a `--journal` URL, still to be opened: in its Redis, else in this process's memory.

    `clock` gives seconds since 1970; in Redis the server's counts.  Raises ValueError where the URL's options are bad.
    """
    from midstream.journal.redis_url import SCHEMES, parse

    scheme, separator, _ = journal_url.partition("://")
    if separator and scheme in SCHEMES:
        from midstream.pool.leases_redis import RedisLeases

        return RedisLeases(parse(journal_url), terms)
    from midstream.pool.leases_memory import MemoryLeases

    return MemoryLeases(clock, terms)
