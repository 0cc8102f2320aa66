"""Readers that drop at random, of gateways that are killed, paused and replaced, on a store that comes and goes.

What is done is drawn from a seed; when it happens to whom is the machine's to say.  Every record that any reader was
given is held against what the others were given, and in the end against the text that the model says.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from random import Random
from typing import Any, Protocol

import aiohttp

from midstream.cursor import Cursor
from midstream.producers.scripted import tokens
from midstream.wire import H_STREAM_ID
from tests.replicas import Fleet, Replica, Visit

LEASE = 2.0
HEARTBEAT = 0.5
# A reader takes so many silent heartbeats for a broken connection (PROTOCOL.md, "Clients").
_SILENCE = 3 * HEARTBEAT
# How long after the last deed the last reader may still be reading: a lease, an outage, an answer.
_AFTERMATH = 30.0


class Store(Protocol):
    """What the gateways share.  `loses`: it may come back without its newest records."""

    loses: bool

    async def strike(self) -> None:
        """Go, and come back."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How much of everything, and for how many seconds."""

    seconds: float
    readers: int
    slots: int  # streams at a time
    rate: int  # tokens a second of each


@dataclass(slots=True)
class Story:
    """What a request was answered, as its readers have seen it: record N of a stream at place N − 1."""

    prompt: str
    length: int
    streams: dict[str, list[bytes]] = field(default_factory=dict)

    def witness(self, visit: Visit, *, loses: bool) -> None:
        """Nobody is given another record under a number that somebody has already (I2, I3).

        Where the store has lost what others were given, its end may stand there instead, and says so.
        """
        known = self.streams.setdefault(visit.stream_id, [])
        for place, frame in enumerate(visit.frames, visit.after):
            if place < len(known):
                instead = loses and _data(frame).get("error", {}).get("code") == "store_lost"
                assert known[place] == frame or instead, f"{known[place]!r}, then {frame!r} of {visit.stream_id}"
            else:
                assert place == len(known)
                known.append(frame)

    def judge(self) -> dict[str, int]:
        """Each of its streams is the whole answer, or the beginning of it and a loud failure; counted by its end."""
        whole = "".join(islice(tokens(self.prompt), self.length))
        ends = Counter[str]()
        for frames in self.streams.values():
            text = "".join(_data(frame).get("delta", "") for frame in frames)
            end = _data(frames[-1])
            how = end["error"]["code"] if "error" in end else "done" if end.get("done") else "open"
            assert text == whole if how == "done" else whole.startswith(text)
            ends[how] += 1
        return ends


def _data(frame: bytes) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(frame.split(b"\ndata: ", 1)[1])
    return data


class Havoc:
    """The world: `run` lives through it, and raises what any reader was told that is not so."""

    def __init__(self, fleet: Fleet, replicas: list[Replica], store: Store, shape: Shape, seed: int) -> None:
        self.fleet, self.replicas, self.store, self.shape = fleet, replicas, store, shape
        self.random = Random(seed)
        self.seed = seed
        self.stories: dict[str, Story] = {}
        self.seen: Counter[str] = Counter()
        self.over = asyncio.Event()
        self._idle: asyncio.Queue[int] = asyncio.Queue()
        for at in self.random.sample(range(len(replicas)), len(replicas)):
            self._idle.put_nowait(at)

    async def run(self) -> None:
        readers = [asyncio.create_task(self._read_on(number)) for number in range(self.shape.readers)]
        deeds = asyncio.create_task(self._do())
        try:
            async with asyncio.timeout(self.shape.seconds + _AFTERMATH):
                await asyncio.gather(deeds, *readers)  # the first that was told something wrong ends it all
        finally:
            for task in (deeds, *readers):
                task.cancel()
            await asyncio.wait([deeds, *readers])

    # --- what is done to them ---------------------------------------------------------------------------------------

    async def _do(self) -> None:
        """Everything at least once, and again until the time is over; what takes long overlaps with what follows."""
        clock = asyncio.get_running_loop().time
        until = clock() + self.shape.seconds
        deeds: list[Callable[[], Awaitable[None]]] = [self._kill, self._pause, self._replace, self._strike, self._nod]
        self.random.shuffle(deeds)
        try:
            async with asyncio.TaskGroup() as doing:
                for count, deed in enumerate(cycle(deeds)):
                    if clock() >= until and count >= len(deeds):
                        return
                    doing.create_task(deed())  # type: ignore[arg-type]  # they are coroutines
                    await asyncio.sleep(self.random.uniform(0.5, 2.0))
        finally:
            self.over.set()

    @asynccontextmanager
    async def _victim(self, deed: str) -> AsyncIterator[int]:
        """The place of a gateway that nothing is done to at the moment."""
        at = await self._idle.get()
        self.seen[deed] += 1
        try:
            yield at
        finally:
            self._idle.put_nowait(at)

    async def _kill(self) -> None:
        async with self._victim("killed") as at:
            self.replicas[at].kill()
            await self.replicas[at].start()

    async def _pause(self) -> None:
        """For longer than its lease."""
        await self._stop(LEASE + 1.0)

    async def _nod(self) -> None:
        """For less."""
        await self._stop(LEASE / 4)

    async def _stop(self, seconds: float) -> None:
        async with self._victim("paused") as at:
            self.replicas[at].pause()
            await asyncio.sleep(seconds)
            self.replicas[at].go_on()

    async def _replace(self) -> None:
        """As a deploy does: another one first, then the old one is told to go."""
        async with self._victim("replaced") as at:
            old, (self.replicas[at],) = self.replicas[at], await self.fleet.grow(1)
            old.terminate()

    async def _strike(self) -> None:
        self.seen["struck"] += 1
        await self.store.strike()

    # --- readers ----------------------------------------------------------------------------------------------------

    async def _read_on(self, number: int) -> None:
        """Read one answer after another; who comes first to a story begins it."""
        draw = Random(f"{self.seed} {number}")
        slot, turn = number % self.shape.slots, 0
        while not self.over.is_set():
            story = self._story(f"{self.seed}-{slot}-{turn}")
            await self._read(draw, story)
            turn += 1

    def _story(self, name: str) -> Story:
        if name not in self.stories:
            length = self.random.randrange(2, 6) * self.shape.rate
            self.stories[name] = Story(name, length)
        return self.stories[name]

    async def _read(self, draw: Random, story: Story) -> None:
        """Until the end, or a loud error, however often it takes."""
        stream_id, position = "", 0
        while True:
            visit = Visit(stream_id, position)
            most = draw.choice([1, 5, 20, 10_000, 10_000])
            try:
                async with self._asked(draw, story, visit) as response:
                    visit.status = response.status
                    stream_id = visit.stream_id = response.headers.get(H_STREAM_ID, stream_id)
                    await self._take(response, visit, most)
            except (aiohttp.ClientError, OSError):  # TimeoutError among them: of a paused gateway, say
                self.seen["broken"] += 1
            if visit.frames:
                story.witness(visit, loses=self.store.loses)
            if self._told(story, visit):
                return
            position = visit.seq
            if visit.status != 200:
                await asyncio.sleep(draw.uniform(0.05, 0.3))

    def _asked(self, draw: Random, story: Story, visit: Visit) -> Any:
        url = draw.choice(self.replicas).url
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENCE, sock_read=_SILENCE)
        if visit.stream_id:
            cursor = Cursor(visit.stream_id, visit.after).encode()
            return self.fleet.session.get(f"{url}/v1/stream/{visit.stream_id}?cursor={cursor}", timeout=timeout)
        asked = {"prompt": story.prompt, "model": f"scripted-n{story.length}-r{self.shape.rate}"}
        headers = {"Idempotency-Key": story.prompt}
        return self.fleet.session.post(f"{url}/v1/stream", json=asked, headers=headers, timeout=timeout)

    async def _take(self, response: aiohttp.ClientResponse, visit: Visit, most: int) -> None:
        while len(visit.frames) < most and (data := await response.content.readany()):
            visit.take(data)

    def _told(self, story: Story, visit: Visit) -> bool:
        """Is the reader at its end?  Whatever it was told otherwise must be one of the few things that may be said."""
        if visit.ended:
            self.seen[_data(visit.frames[-1]).get("error", {}).get("code", "done")] += 1
            return True
        match visit.status:
            case 0 | 503:
                self.seen["sent away"] += visit.status == 503
            case 200 if b"event: " not in visit.rest:
                self.seen["dropped"] += 1
            case 200 if self.store.loses and b"event: expired" in visit.rest:  # the whole stream is gone
                self.seen["expired"] += 1
                return True
            case 404 | 409 | 500 if self.store.loses:  # it came back without what this reader has
                error = json.loads(visit.rest)["error"]
                assert error in ("unknown_stream", "cursor_ahead", "store_lost")
                self.seen[error] += 1
                return True
            case _:
                raise AssertionError(f"{visit.status} {visit.rest!r} after {visit.after} of {visit.stream_id}")
        return False

    # --- what must be true in the end -------------------------------------------------------------------------------

    def judge(self) -> None:
        """Every stream ended as streams may end, and where the store loses nothing no request began two."""
        ends = Counter[str]()
        for story in self.stories.values():
            ends.update(story.judge())
            if not self.store.loses:
                assert len(story.streams) <= 1, f"one key began two generations: {story.streams.keys()}"
        assert ends.keys() <= {"done", "writer_lost", "store_lost"} | ({"open"} if self.store.loses else set()), ends
        assert ends["done"], "no answer ended well"
