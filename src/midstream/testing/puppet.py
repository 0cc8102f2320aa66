"""A model whose every chunk a test speaks, and that shows when it was stopped.

    puppets = Puppets()                                  # what a gateway is given for its upstreams
    ...                                                  # ask the gateway for an answer
    puppet = await puppets.next()
    await puppet.say("Hel", "lo")                        # journaled when this returns
    await puppet.finish()

A test so steers, chunk by chunk, when a stream grows and how it ends; nothing in it takes time of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from typing import Any, NoReturn

from midstream.codec.openai import Route
from midstream.errors import ProducerFailed
from midstream.producers.upstream import Direct
from midstream.records import Chunk, Finish
from midstream.testing.patience import soon


class Stopped(AssertionError):
    """The gateway has let go of this generation: nobody takes what it says."""


class Puppet(AsyncGenerator[list[Chunk] | Finish, None]):
    """One generation.  It is silent until told to speak, and stops when the gateway stops it.

    `body` and `headers` are what an upstream would have been sent; `stopped` is set once the gateway has let go of it,
    for whatever reason.
    """

    def __init__(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        self.body = dict(body)
        self.headers = dict(headers)
        self.stopped = asyncio.Event()
        self.asked = asyncio.Event()
        self._lines: asyncio.Queue[list[Chunk] | Finish | Exception] = asyncio.Queue()
        self._spoken = 0
        self._taken = 0
        self._changed = asyncio.Event()

    # What the gateway calls.

    async def asend(self, _: None) -> list[Chunk] | Finish:
        # It is asked for the next line only when the one before is in the journal.
        self._taken = self._spoken
        self.asked.set()
        self._changed.set()
        line = await self._lines.get()
        self._spoken += 1
        if isinstance(line, Exception):
            raise line
        return line

    async def athrow(self, *_: Any) -> NoReturn:
        raise AssertionError("the gateway throws nothing into a generation")

    async def aclose(self) -> None:
        self.stopped.set()
        self._changed.set()

    # What the test calls.

    def push(self, line: list[Chunk] | Finish | Exception) -> None:
        """Say a line, and do not wait until anybody has heard it."""
        self._lines.put_nowait(line)

    async def say(self, *texts: str) -> None:
        """One chunk per text, as one batch; they are journaled on return.  Raises Stopped."""
        await self.say_chunks([Chunk(text) for text in texts])

    async def say_chunks(self, chunks: list[Chunk]) -> None:
        """Chunks as they are.  Raises Stopped."""
        if self.stopped.is_set():
            raise Stopped("the gateway has let go of this generation")
        due = self._spoken + self._lines.qsize() + 1
        self.push(chunks)
        await soon(self._until_taken(due))

    async def finish(self, finish_reason: str = "stop", usage: dict[str, Any] | None = None) -> None:
        """End well; `done` is journaled on return."""
        self.push(Finish(finish_reason, usage))
        await soon(self.stopped.wait())

    async def fail(self, code: str = "upstream_error", message: str = "no more", *, retryable: bool = True) -> None:
        """End badly: the stream's `failed` record is about to be written on return."""
        self.push(ProducerFailed(code, message, retryable=retryable))
        await soon(self.stopped.wait())

    async def _until_taken(self, count: int) -> None:
        while self._taken < count:
            if self.stopped.is_set():
                raise Stopped("the gateway has let go of this generation")
            self._changed.clear()
            await self._changed.wait()


class Puppets(Direct):
    """The models of a gateway under test: what it is given for its upstreams.  `begun` counts the generations."""

    pool = None

    def __init__(self, *models: str) -> None:
        self.names = models or ("puppet",)
        self.begun = 0
        self._waiting: deque[Puppet] = deque()
        self._changed = asyncio.Event()

    def for_model(self, model: str) -> Puppets | None:
        return self if model in self.names else None

    async def default_model(self) -> str:
        return self.names[0]

    async def models(self) -> list[dict[str, Any]]:
        return [{"id": name, "object": "model", "created": 0, "owned_by": "puppets"} for name in self.names]

    def generate(
        self,
        body: Mapping[str, Any],
        route: Route = "chat",
        headers: Mapping[str, str] | None = None,
    ) -> Puppet:
        """A generation; the gateway calls this."""
        puppet = Puppet(body, headers or {})
        self.begun += 1
        self._waiting.append(puppet)
        self._changed.set()
        return puppet

    async def next(self) -> Puppet:
        """The oldest generation not yet handed out, once it has been asked for its first chunk."""
        while not self._waiting:
            self._changed.clear()
            await soon(self._changed.wait())
        puppet = self._waiting.popleft()
        await soon(puppet.asked.wait())
        return puppet
