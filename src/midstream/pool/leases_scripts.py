"""The scripts that change leases and progress in a store, one file each in `lua/`, and what they answer.

    P:{T}:pool:request:REQUEST    hash     generation -> its lease, as JSON; `flagged` once the request is cancelled
    P:{T}:pool:progress:REQUEST   stream   what was posted for it: an entry per batch
    P:{T}:pool:held               zset     requests that have leases, by when these were last renewed
    P:{T}:pool:control:PROCESS    stream   interrupts that process's reading
    P:{T}:pool:signal             channel  what became of a request
    P:pool:generation:GENERATION  string   its request

P is the journal's prefix and T one of TAGS hash tags, found from the request's id.  All keys of a request carry one
tag, so that one script can change them together on a cluster too.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from importlib.resources import files
from zlib import crc32

from midstream.journal.redis_keys import Space
from midstream.journal.redis_scripts import Script
from midstream.pool.leases import Ended, Terms, packed

# On a cluster each tag in use costs a process one connection that waits for progress.
TAGS = 16


class Answer(IntEnum):
    """What a script's answer begins with."""

    OK = 0
    CANCELLED = 1
    NO_LEASE = 2
    WRONG_KEY = 3
    SEQUENCE = 4  # the expected number follows
    TOO_LARGE = 5


def tag_of(request: str) -> int:
    """The number of a request's hash tag."""
    return crc32(packed(request)) % TAGS


class PoolSpace(Space):
    """The pool's keys under the journal's prefix."""

    def of_request(self, request: str) -> tuple[bytes, bytes, bytes]:
        """What every script about one request is given, in this order."""
        tag = tag_of(request)
        return self._key(tag, b"pool:request", request), self.progress(request), self.held(tag)

    def progress(self, request: str) -> bytes:
        return self._key(tag_of(request), b"pool:progress", request)

    def held(self, tag: int) -> bytes:
        return self._key(tag, b"pool:held")

    def control(self, tag: int, process: str) -> bytes:
        return self._key(tag, b"pool:control", process)

    def channel(self, shard: int) -> bytes:
        return self._key(shard, b"pool:signal")

    def generation(self, generation: str) -> bytes:
        return b"%b:pool:generation:%b" % (self.prefix, packed(generation))


def _source(name: str) -> str:
    return (files("midstream.pool") / "lua" / f"{name}.lua").read_text("utf-8")


class Scripts:
    """The scripts under given terms."""

    def __init__(self, terms: Terms) -> None:
        self._head = "".join(f"local {answer.name} = {answer.value}\n" for answer in Answer)
        self._head += "".join(f"local ENDED_{kind.name} = {kind.value}\n" for kind in Ended) + _constants(terms)
        self._head += _source("prelude")
        self.grant = self._script("grant")
        self.post = self._script("post")
        self.flag = self._script("flag")
        self.end = self._script("end")
        self.lost = self._script("lost")

    def _script(self, name: str) -> Script:
        return Script(name, self._head + _source(name))

    def all(self) -> Sequence[Script]:
        return self.grant, self.post, self.flag, self.end, self.lost


def _constants(terms: Terms) -> str:
    times = {"TERM": terms.term, "THIRD": terms.third, "LINGER": terms.linger, "RETAIN": terms.retain}
    numbers = {name: int(seconds * 1000) for name, seconds in times.items()}
    numbers |= {"BATCHES": terms.batches, "ENTRIES": terms.entries}
    return "".join(f"local {name} = {number}\n" for name, number in numbers.items())
