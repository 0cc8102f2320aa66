"""What a transport supplies to the transport contract, to dial and to decode, and what its tests stand on."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import orjson

from midstream.records import Record, StreamState
from midstream.testing.gateway import RunningGateway
from midstream.testing.patience import soon
from midstream.testing.puppet import Puppet
from midstream.wire import MAX_SEQ

# The two owners of every gateway under test, and their keys.
ADA, BOB = "ada-key-1", "bob-key-1"
KEYS = f"ada:{ADA}\nbob:{BOB}\n"

# What an error of a position says beside its code.
FACTS = ("oldest_available", "highest_seq")


def narrow(address: tuple[Any, ...]) -> socket.socket:
    """A socket whose kernel holds little of what its reader has not taken, for `getaddrinfo`'s description of a peer.

    Left to itself it grows to tens of megabytes (tcp(7), `tcp_rmem`), and a reader that takes nothing is long in need.
    """
    family, kind, protocol, *_ = address
    opened = socket.socket(family, kind, protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
    return opened


class Refused(Exception):
    """The wire said no, before the first record or after some.

    `code` is the protocol's own (PROTOCOL.md, "Errors"), whatever the wire calls it; `facts` stand beside it:
    `oldest_available`, `highest_seq`.
    """

    def __init__(self, code: str, facts: dict[str, Any] | None = None) -> None:
        super().__init__(f"{code} {facts or ''}")
        self.code = code
        self.facts = facts or {}


class Heard(NamedTuple):
    """One record as it arrived.

    `data` is JSON: the record's own bytes where the wire carries them (`Wire.native_records`), else what the wire says
    put into the record's shape, with `seq` and `delta` at least.  `outer_seq` is the number that the wire carries
    beside the data; None where it carries one alone.
    """

    seq: int
    event: str
    data: bytes
    outer_seq: int | None = None

    @property
    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = orjson.loads(self.data)
        return fields


@runtime_checkable
class Reader(Protocol):
    """One connection that follows a stream.  It takes no more from the wire than it is asked for."""

    stream_id: str
    heartbeats: int  # signs of life that came before the record heard last
    clean: bool | None  # how the wire ended: in order, or broken off; None while it is open

    async def next(self) -> Heard | None:
        """The next record; None when the wire has ended.  Raises Refused when the last thing it said was an error."""

    async def drop(self) -> None:
        """Be gone, as a phone is that lost its network; nothing is said to the other side."""


class Dial(Protocol):
    """The transport as one owner uses it.  Every verb raises Refused."""

    wire: Wire
    # Positions that the wire can carry, that are none, and that `resume` takes for `after`.
    garbage: Sequence[Any]

    async def generate(self, prompt: str) -> Reader:
        """Ask the gateway's only model, and follow."""

    async def resume(self, stream_id: str, after: Any, *, of: str | None = None) -> Reader:
        """Everything after seq `after`; `of`: the stream for which the position was given out, if it is another."""

    async def ack(self, stream_id: str, seq: int) -> None:
        """Records up to `seq` may go."""

    async def cancel(self, stream_id: str) -> None:
        """Stop the generation."""

    async def state(self, stream_id: str) -> dict[str, Any]:
        """The stream's state, named as in PROTOCOL.md.  Raises NotImplementedError without `Wire.has_state`."""


@dataclass(frozen=True, slots=True)
class Wire:
    """What a transport's wire shows.  What it does not show is asserted to be missing, not skipped.

    native_records   every record travels, `start` too, with its JSON byte for byte; else chunks and how it ended
    seq_twice        a record's number stands in its data and beside it
    heartbeats       a reader sees that the gateway is alive while its stream is silent
    has_state        there is a verb for the state
    rests_at_end     the position of the terminal record is one: resuming there ends at once, in order and empty
    max_position     the highest position that it can say
    """

    name: str
    native_records: bool
    seq_twice: bool
    heartbeats: bool
    has_state: bool
    rests_at_end: bool
    max_position: int = MAX_SEQ

    @property
    def first_position(self) -> int:
        """The lowest position that the wire can say."""
        return 0 if self.native_records else 1

    def shows(self, records: Sequence[Record], after: int) -> list[int]:
        """The seqs of those records that a reader who resumes after `after` is to be given."""
        return [record.seq for record in records if record.seq > after and (self.native_records or record.seq > 1)]


Connect = Callable[[RunningGateway, str], AbstractAsyncContextManager[Dial]]


class Begun(NamedTuple):
    """A generation that has begun: its reader from the start, and who speaks in it."""

    reader: Reader
    puppet: Puppet

    @property
    def stream_id(self) -> str:
        return self.reader.stream_id


@dataclass(frozen=True, slots=True)
class Stage:
    """A running gateway with two owners, each with the transport under test in his hand."""

    gateway: RunningGateway
    ada: Dial
    bob: Dial

    async def begin(self, prompt: str = "Hello") -> Begun:
        """Ada asks."""
        reader = await soon(self.ada.generate(prompt))
        return Begun(reader, await self.gateway.puppets.next())

    async def told(self, *texts: str) -> str:
        """The id of a stream of Ada's that said this, a record each, and has ended well; nobody reads it."""
        reader, puppet = await self.begin()
        await reader.drop()
        await puppet.say(*texts)
        await puppet.finish()
        await self.gateway.unread(reader.stream_id)
        return reader.stream_id

    async def records(self, stream_id: str) -> list[Record]:
        """What the journal retains."""
        journal, frames = self.gateway.streams.journal, []
        after = (await journal.state(stream_id)).oldest_retained_seq - 1
        while page := (await journal.read(stream_id, after)).records():
            frames += page
            after = page[-1].seq
        return frames

    async def state(self, stream_id: str) -> StreamState:
        """What the journal knows of the stream."""
        return await self.gateway.streams.journal.state(stream_id)


class MakeStage(Protocol):
    """Starts a gateway with these settings besides the defaults; once in a test."""

    async def __call__(self, **settings: Any) -> Stage: ...


@asynccontextmanager
async def staged(gateway: RunningGateway, connect: Connect) -> AsyncIterator[Stage]:
    """The gateway running, both owners connected; all of it is closed at the end."""
    async with gateway, connect(gateway, ADA) as ada, connect(gateway, BOB) as bob:
        yield Stage(gateway, ada, bob)


async def hear(reader: Reader, count: int) -> list[Heard]:
    """The next `count` records.  Fails when the wire ends before."""
    heard: list[Heard] = []
    for _ in range(count):
        record = await soon(reader.next())
        assert record is not None, f"the wire ended after {len(heard)} of {count} records"
        heard.append(record)
    return heard


async def hear_all(reader: Reader) -> list[Heard]:
    """Every record until the wire ends, which it must do in order."""
    heard: list[Heard] = []
    while (record := await soon(reader.next())) is not None:
        heard.append(record)
    assert reader.clean, "the connection broke off"
    return heard


def seqs(heard: Sequence[Heard]) -> list[int]:
    return [record.seq for record in heard]


async def refused(verb: Awaitable[Any], code: str, **facts: Any) -> None:
    """The verb must be refused with this code and these facts, and a reader must not be given one record before."""
    answer: Any = None
    try:
        answer = await soon(verb)
        if isinstance(answer, Reader):
            answer = await soon(answer.next())
    except Refused as error:
        answer = error
    assert isinstance(answer, Refused), f"answered {answer!r} instead of {code}"
    assert (answer.code, answer.facts) == (code, facts)
