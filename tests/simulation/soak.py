"""A small world around one gateway: models that speak, readers that come, leave, crawl and return, acks, cancels,
deletes, time that passes.  What happens is drawn from a seed; what every reader was told is held against what was
appended (I3, I4, I7).
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

from midstream.codec import native
from midstream.errors import UnknownStream
from midstream.journal.base import Created, Journal
from midstream.records import Frame, Record, StreamMeta, StreamState
from midstream.server.connection import HttpConnection
from midstream.streams import Answer
from midstream.testing.gateway import RunningGateway
from midstream.testing.patience import until
from midstream.testing.puppet import Puppet, Stopped
from midstream.wire import TERMINAL, CancelReason
from tests.gateways import Wire, cursor, wire

T = TypeVar("T")

OWNER = "open"
_TALK = re.compile(rb"(?:retry: [0-9]+\n|: ping\n)*")
_SYLLABLES = ("a", " the", "né", "✅", "🚀", "\r\n", "\0", "\n\nid: 7\n", " word" * 50)


class Witness:
    """All that was ever appended, by stream: frame N at place N − 1.  Stands between the gateway and its journal.

    `gone` are the streams that were deleted or have expired.
    """

    def __init__(self, journal: Journal) -> None:
        self._append, self._create = journal.append, journal.create
        self._cancel, self._sweep = journal.request_cancel, journal.sweep
        self.frames: dict[str, list[Frame]] = {}
        self.gone: set[str] = set()
        self._tried: dict[tuple[str, int], Frame] = {}
        for verb in ("append", "create", "request_cancel", "sweep"):
            setattr(journal, verb, getattr(self, verb))

    def settle(self) -> None:
        """A writer that was stopped in the middle of an append does not hear that it was kept."""
        for stream_id, frames in self.frames.items():
            for at, frame in enumerate(frames):
                frames[at] = frame or self._tried[stream_id, at + 1]
            while Record.of(frames[-1]).event not in TERMINAL and (stream_id, len(frames) + 1) in self._tried:
                frames.append(self._tried[stream_id, len(frames) + 1])

    def text(self, stream_id: str, upto: int) -> bytes:
        """The answer as of a record."""
        return "".join(Record.of(frame).json().get("delta", "") for frame in self.frames[stream_id][:upto]).encode()

    async def create(self, meta: StreamMeta, frames: list[Frame], names: Sequence[str] = ()) -> Created:
        created = await self._create(meta, frames, names)
        if not created.existed:
            self.frames[meta.stream_id] = list(frames)
        return created

    async def append(self, stream_id: str, frames: list[Frame], *, epoch: int, first_seq: int) -> None:
        self._tried.update({(stream_id, first_seq + at): frame for at, frame in enumerate(frames)})
        await self._append(stream_id, frames, epoch=epoch, first_seq=first_seq)
        self._see(stream_id, first_seq, frames)

    async def request_cancel(self, stream_id: str, reason: CancelReason) -> StreamState:
        state = await self._cancel(stream_id, reason)
        known = self.frames[stream_id]
        if state.status == "cancelled" and Record.of(known[-1]).event != "cancelled":
            self._see(stream_id, state.highest_seq, [native.cancelled(state.highest_seq, reason)])
        return state

    async def sweep(self) -> list[str]:
        gone = await self._sweep()
        self.gone.update(gone)
        return gone

    def _see(self, stream_id: str, first_seq: int, frames: list[Frame]) -> None:
        known = self.frames[stream_id]
        at = first_seq - 1
        known += [b""] * (at + len(frames) - len(known))
        assert not any(known[at : at + len(frames)]), "one seq was given out twice"
        known[at : at + len(frames)] = frames


@dataclass(slots=True)
class Visit:
    """What one connection to a stream was told.  `how`: `whole` (its body came to its end), `left` (by the reader),
    `broken` (by the gateway)."""

    stream_id: str
    position: int
    status: int = 0
    body: bytearray = field(default_factory=bytearray)
    how: str = "whole"

    def told(self) -> tuple[list[Frame], Any]:
        """The frames of records, and the data of a last word that is none."""
        *parts, rest = bytes(self.body).split(b"\n\n")
        assert _TALK.fullmatch(rest), f"a piece of a frame: {rest!r}"
        frames = [_TALK.sub(b"", part, count=1) + b"\n\n" for part in parts]
        last = None
        if frames and frames[-1].startswith(b"event: expired\n"):
            last = json.loads(frames.pop().partition(b"data: ")[2])
        return frames, last


@dataclass(frozen=True, slots=True)
class Shape:
    """How large the world is.  `evicts`: its streams outgrow their bounds while they are read."""

    streams: int = 12
    readers: int = 6
    visits: int = 12
    batches: int = 40
    crowd: int = 50
    evicts: bool = False


class World:
    """One run.  `visits` are all the connections there were; `acked` the highest ack of each stream; `denied` those
    that the gateway said it does not know; `answers` the snapshots that were asked for."""

    def __init__(self, gateway: RunningGateway, shape: Shape, seed: int) -> None:
        self.gateway = gateway
        self.shape = shape
        self.random = Random(seed)
        self.witness = Witness(gateway.streams.journal)
        self.visits: list[Visit] = []
        self.acked: dict[str, int] = {}
        self.denied: set[str] = set()
        self.answers: list[Answer] = []
        self._passing = asyncio.Lock()

    async def run(self) -> None:
        """Tell all stories, some at a time, until nobody speaks or reads any more."""
        room = asyncio.Semaphore(4)

        async def story() -> None:
            async with room:
                await self._story()

        async with asyncio.TaskGroup() as group:
            for _ in range(self.shape.streams):
                group.create_task(story())
        await until(lambda: not self.gateway.streams.readers, "the last reader to go")
        await until(lambda: not self.gateway.streams.writers, "the last writer to stop")

    # --- what happens ------------------------------------------------------------------------------------------------

    async def _story(self) -> None:
        stream_id, puppet = await self._begin()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._speak(puppet))
            for _ in range(self.shape.readers):
                group.create_task(self._read(stream_id))
            group.create_task(self._meddle(stream_id))
        if self.random.random() < 0.2:
            await self._crowd(stream_id)

    async def _begin(self) -> tuple[str, Puppet]:
        async with self._passing, wire(self.gateway) as peer:
            body = json.dumps({"prompt": "x", "abandon_after": self.random.choice([5, 1000, 1000])}).encode()
            peer.request(
                "POST", "/v1/stream", "Content-Type: application/json", f"Content-Length: {len(body)}", body=body
            )
            status, headers = await peer.head()
            assert status == 200
            peer.drop()
            return dict(headers)["midstream-stream-id"], await self.gateway.puppets.next()

    async def _speak(self, puppet: Puppet) -> None:
        draw = self.random
        try:
            for _ in range(draw.randrange(self.shape.batches)):
                await puppet.say(*(draw.choice(_SYLLABLES) for _ in range(draw.choice([1, 1, 3, 40]))))
                await self._pause(6)
            await (puppet.finish() if draw.random() < 0.8 else puppet.fail())
        except Stopped:
            pass  # somebody has cancelled or deleted the stream, or nobody has read it for too long

    async def _read(self, stream_id: str) -> None:
        """Come back again and again, most often to where one was, until everything was read."""
        position = 0
        for _ in range(self.shape.visits):
            known, acked = len(self.witness.frames[stream_id]), self.acked.get(stream_id, 0)
            start = position if self.random.random() < 0.5 else self.random.randint(max(acked - 2, 0), known + 1)
            visit = await self._visit(stream_id, start)
            frames, _ = visit.told() if visit.status == 200 else ([], None)
            position = max(position, start + len(frames)) if start <= position else position
            if visit.status == 404:
                return
            await self._pause(12)

    async def _visit(self, stream_id: str, position: int) -> Visit:
        visit = Visit(stream_id, position)
        self.visits.append(visit)
        crawls = self.random.random() < 0.3
        async with self._narrow() if crawls else wire(self.gateway) as peer:
            self._ask(peer, stream_id, position)
            visit.status, headers = await peer.head()
            if visit.status != 200:
                length = int(dict(headers).get("content-length", 0))
                visit.body += await peer.take(length)
                return visit
            await self._listen(peer, visit, crawls=crawls)
        return visit

    @asynccontextmanager
    async def _narrow(self) -> AsyncIterator[Wire]:
        """A connection whose buffers hold next to nothing: who reads slowly on it is behind at once."""
        with socket.socket() as local:
            local.setblocking(False)
            local.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            # Else a window may be stuck below one segment: the sender then sends what fits, some 300 bytes, each time
            # that its persist timer has run out, five times a second (RFC 9293, section 3.8.6.2.1).
            local.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 256)
            await asyncio.get_running_loop().sock_connect(local, ("127.0.0.1", self.gateway.port))
            reader, writer = await asyncio.open_connection(sock=local.dup(), limit=512)
            port = local.getsockname()[1]
        await until(lambda: self._squeeze(port), "the other end of the connection")
        try:
            yield Wire(reader, writer)
        finally:
            writer.transport.abort()

    def _squeeze(self, port: int) -> bool:
        for connection in self.gateway.server.server_state.connections:
            assert isinstance(connection, HttpConnection)
            if connection.client is not None and connection.client[1] == port:
                connection.transport.set_write_buffer_limits(high=512)
                connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1024)
                return True
        return False

    def _ask(self, peer: Wire, stream_id: str, position: int) -> None:
        path, token = f"/v1/stream/{stream_id}", cursor(stream_id, position)
        ways = [(f"{path}?cursor={token}", []), (f"{path}?from={token}", []), (path, [f"Last-Event-ID: {position}"])]
        if position == 0:
            ways.append((f"{path}?from=start", []))
        where, headers = self.random.choice(ways)
        peer.request("GET", where, *headers)
        if self.random.random() < 0.1:  # a request behind it must not hide that its reader goes
            peer.request("GET", "/healthz")

    async def _listen(self, peer: Wire, visit: Visit, *, crawls: bool) -> None:
        draw = self.random
        chunks = draw.choice([0, 1, 3, 10, 10_000, 10_000])
        try:
            while chunks and (chunk := await peer.chunk()):
                visit.body += chunk
                chunks -= 1
                await self._pause(50 if crawls else 2)
        except (asyncio.IncompleteReadError, ConnectionError):
            visit.how = "broken"
            return
        if not chunks:
            visit.how = "left"
            if draw.random() < 0.5:
                peer.drop()

    async def _meddle(self, stream_id: str) -> None:
        deeds: list[Callable[[str], Awaitable[None]]] = [self._ack, self._ask_for_all, self._pass_time]
        for _ in range(self.shape.batches // 2):
            await self._pause(30)
            await self.random.choices([*deeds, self._cancel, self._forget], [50, 20, 30, 1, 1])[0](stream_id)

    async def _ack(self, stream_id: str) -> None:
        acked = self.acked.get(stream_id, 0)
        seq = self.random.choice([acked, self.random.randint(acked, len(self.witness.frames[stream_id])), acked // 2])
        self.acked[stream_id] = max(self.acked.get(stream_id, 0), seq)
        await self._unless_gone(stream_id, self.gateway.streams.ack(stream_id, OWNER, seq))

    async def _ask_for_all(self, stream_id: str) -> None:
        answer = await self._unless_gone(stream_id, self.gateway.streams.answer(stream_id, OWNER))
        if answer is not None:
            self.answers.append(answer)

    async def _pass_time(self, _: str) -> None:
        """Heartbeats for idle readers, abandonment of streams without any, the sweep."""
        async with self._passing:
            seconds = self.random.choice([0.1, 1, 2, 16, 70])
            self.gateway.clock.advance(seconds)
            await self.gateway.streams.pulse(min(seconds, 16))

    async def _cancel(self, stream_id: str) -> None:
        await self._unless_gone(stream_id, self.gateway.streams.cancel(stream_id, OWNER))

    async def _forget(self, stream_id: str) -> None:
        self.witness.gone.add(stream_id)
        await self._unless_gone(stream_id, self.gateway.streams.forget(stream_id, OWNER))

    async def _unless_gone(self, stream_id: str, verb: Awaitable[T]) -> T | None:
        try:
            return await verb
        except UnknownStream:
            self.denied.add(stream_id)
            return None

    async def _crowd(self, stream_id: str) -> None:
        """Many come at once, hear the first bytes, and leave in the same moment."""
        async with AsyncExitStack() as stack:
            peers = [await stack.enter_async_context(wire(self.gateway)) for _ in range(self.shape.crowd)]
            for peer in peers:
                self._ask(peer, stream_id, 0)
            for peer in peers:
                await peer.head()
            for peer in peers:
                peer.drop()

    async def _pause(self, turns: int) -> None:
        for _ in range(self.random.randrange(turns + 1)):
            await asyncio.sleep(0)


# --- what must be true of it ------------------------------------------------------------------------------------------


def judge_all(world: World) -> None:
    """Nobody was told anything that is not so."""
    world.witness.settle()
    for visit in world.visits:
        judge(world, visit)
    broken = sum(visit.how == "broken" for visit in world.visits)
    assert broken <= world.gateway.streams.totals.stalled, "a connection broke that had not stalled"
    for answer in world.answers:  # whole at any moment, whatever was acked or evicted (R9)
        assert answer.fold.complete
        text = answer.fold.choices[0].text if answer.fold.choices else b""
        assert text == world.witness.text(answer.state.meta.stream_id, answer.state.highest_seq)
    assert world.denied <= world.witness.gone


def judge(world: World, visit: Visit) -> None:
    """Exactly what follows the position, or an error that says what there is (I3, I4)."""
    frames = world.witness.frames[visit.stream_id]
    highest = len(frames)
    match visit.status:
        case 200:
            _judge_stream(world, visit, frames)
        case 204:
            assert Record.of(frames[visit.position - 1]).event in TERMINAL
        case 404:
            assert visit.stream_id in world.witness.gone
        case 409:
            told = json.loads(visit.body)
            if told["error"] == "cursor_ahead":
                assert told["highest_seq"] < visit.position
            else:
                assert visit.position < told["oldest_available"] <= highest
                assert world.shape.evicts or visit.position < world.acked[visit.stream_id]
        case _:
            raise AssertionError(f"{visit.status} {bytes(visit.body)!r}")


def _judge_stream(world: World, visit: Visit, frames: list[Frame]) -> None:
    told, last = visit.told()
    upto = visit.position + len(told)
    assert told == frames[visit.position : upto], f"from {visit.position}"
    ended = bool(told) and Record.of(told[-1]).event in TERMINAL
    if last is not None:
        assert not ended
        if last["oldest_available"] is None:
            assert visit.stream_id in world.witness.gone
        else:
            # An ack never takes anything from who is connected (R6): only eviction may have overtaken it (R8).
            assert world.shape.evicts
            assert upto + 1 < last["oldest_available"] <= len(frames)
    elif visit.how == "whole":
        assert ended, f"the stream went silent after {upto} of {len(frames)}"
    else:
        assert visit.how == "left" or world.gateway.streams.totals.stalled
