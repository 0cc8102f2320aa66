"""An OpenAI-compatible upstream that misbehaves on demand, for tests of whatever stands in front of one.

    async with MisbehavingUpstream(FAULTS) as upstream:     # each fault is a model of that name
        upstream.script("flaky", Script([*start, Reset()]), Script(chat_answer("second", " try")))
        ...  # send requests to upstream.url
        await upstream.disconnected(1, within=1.0)          # whoever read it closed the connection mid-answer

It listens on a free loopback port and writes HTTP/1.1 by hand, since no HTTP library lets one lie at any
byte. It runs in the test's own event loop, so that a test can pause it on an `asyncio.Event`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from midstream.testing.upstream_faults import FAULTS
from midstream.testing.upstream_script import (
    DONE,
    CloseClean,
    CloseDirty,
    Comment,
    Event,
    Head,
    Pause,
    Raw,
    Reset,
    Script,
    Send,
    Stall,
    Status,
    Step,
    chat_answer,
    chat_event,
    completion_answer,
    completion_event,
    error_body,
    json_event,
    redirect,
)
from midstream.testing.upstream_wire import Answer, Inbound, Request

__all__ = [
    "DONE",
    "FAULTS",
    "CloseClean",
    "CloseDirty",
    "Closed",
    "Comment",
    "Event",
    "Head",
    "MisbehavingUpstream",
    "Pause",
    "Raw",
    "Request",
    "Reset",
    "Script",
    "Send",
    "Stall",
    "Status",
    "Step",
    "chat_answer",
    "chat_event",
    "completion_answer",
    "completion_event",
    "error_body",
    "json_event",
    "redirect",
]

POLITE_CHAT = Script(chat_answer("Hello", ", ", "world"))
POLITE_COMPLETION = Script(completion_answer("Hello", ", ", "world"))


@dataclass(frozen=True, slots=True)
class Closed:
    """The end of a connection, other than by the upstream's stop. `at` is the event loop's time in seconds.

    by_client    the client closed or reset it; otherwise a script did
    mid_answer   the client left before the script's end
    """

    at: float
    by_client: bool
    mid_answer: bool


class MisbehavingUpstream:
    """The server, an async context manager. Everything it has seen is in its attributes.

    scripts   by model name, see `script`
    default   for models without one; None is a polite answer in the shape of the route
    """

    def __init__(self, scripts: Mapping[str, Script] | None = None, *, default: Script | None = None) -> None:
        self.requests: list[Request] = []
        self.closed: list[Closed] = []
        self._scripts = {model: [script] for model, script in (scripts or {}).items()}
        self._default = default
        self._conversations: set[asyncio.Task[None]] = set()
        self._failures: list[BaseException] = []
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._port = 0

    def script(self, model: str, *scripts: Script) -> None:
        """Answer `model` with these scripts, one for each request; the last one stays. Needs at least one."""
        if not scripts:
            raise ValueError(f"no script for {model!r}")
        self._scripts[model] = list(scripts)

    @property
    def url(self) -> str:
        """The base URL that an OpenAI client is given, `/v1` included."""
        return f"http://127.0.0.1:{self._port}/v1"

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1."""
        return self._port

    @property
    def open_connections(self) -> int:
        """How many connections are open now, idle ones included."""
        return len(self._conversations)

    async def requested(self, count: int = 1, *, within: float = 5.0) -> None:
        """Wait for the `count`th request since the start. Raises TimeoutError after `within` seconds."""
        await self._until(lambda: len(self.requests) >= count, within, f"{count} requests")

    async def disconnected(self, count: int = 1, *, within: float = 1.0) -> None:
        """Wait until the client has closed `count` connections in the middle of an answer, since the start.

        Raises TimeoutError, saying what was seen, after `within` seconds.
        """
        await self._until(lambda: self._left() >= count, within, f"{count} connections closed mid-answer")

    def _left(self) -> int:
        return sum(closed.by_client and closed.mid_answer for closed in self.closed)

    async def idle(self, *, within: float = 1.0) -> None:
        """Wait until no connection is open. Raises TimeoutError after `within` seconds."""
        await self._until(lambda: not self._conversations, within, "no open connection")

    async def _until(self, holds: Callable[[], bool], within: float, what: str) -> None:
        try:
            async with asyncio.timeout(within):
                while not holds():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            seen = f"{len(self.requests)} requests, {self.open_connections} open connections, {self.closed}"
            raise TimeoutError(f"waited {within} s for {what}; saw {seen}") from None

    async def __aenter__(self) -> MisbehavingUpstream:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close every connection. Raises what a conversation failed of (no HTTP, say), unless the test has failed."""
        assert self._server is not None
        self._server.close()
        for conversation in self._conversations:
            conversation.cancel()
        await asyncio.gather(*self._conversations, return_exceptions=True)
        await self._server.wait_closed()
        if kind is None and self._failures:
            raise self._failures[0]

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Not a coroutine: asyncio would run it in a task of its own, and log that this task was cancelled.
        conversation = asyncio.create_task(self._serve(reader, writer))
        self._conversations.add(conversation)
        conversation.add_done_callback(self._ended)

    def _ended(self, conversation: asyncio.Task[None]) -> None:
        self._conversations.discard(conversation)
        self._changed.set()
        failure = None if conversation.cancelled() else conversation.exception()
        if failure is not None:
            self._failures.append(failure)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Nothing may stay in this process's own buffer: a reset would throw it away.
        writer.transport.set_write_buffer_limits(high=0)
        try:
            by_client, mid_answer = await self._converse(Inbound(reader), writer)
            self.closed.append(Closed(asyncio.get_running_loop().time(), by_client, mid_answer))
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _converse(self, inbound: Inbound, writer: asyncio.StreamWriter) -> tuple[bool, bool]:
        """Answer requests until the connection ends; return (by_client, mid_answer) of `Closed`."""
        while True:
            try:
                request = await inbound.request()
            except (EOFError, ConnectionError):
                return True, False
            self.requests.append(request)
            self._changed.set()
            answer = Answer(self._script_for(request), writer)
            if await _whichever_first(answer.play(), inbound.gone()):
                return True, True
            if not answer.leaves_open:
                return False, False

    def _script_for(self, request: Request) -> Script:
        if request.method == "GET" and request.path.endswith("/models"):
            return self._models()
        if request.method != "POST":
            return Script([Status(404, body=error_body(f"no route {request.method} {request.path}"))])
        with suppress(ValueError, TypeError, KeyError):
            turns = self._scripts[request.json["model"]]
            return turns.pop(0) if len(turns) > 1 else turns[0]
        chat = request.path.endswith("/chat/completions")
        return self._default or (POLITE_CHAT if chat else POLITE_COMPLETION)

    def _models(self) -> Script:
        names = list(self._scripts) or ["scripted"]
        models = [{"id": name, "object": "model", "created": 1_700_000_000, "owned_by": "test"} for name in names]
        return Script([Status(200, body=json.dumps({"object": "list", "data": models}).encode())])


async def _whichever_first(playing: Coroutine[Any, Any, None], leaving: Coroutine[Any, Any, None]) -> bool:
    """Run both until one ends; return whether the client left, of which a failed write is a sign too."""
    play, leave = asyncio.create_task(playing), asyncio.create_task(leaving)
    try:
        await asyncio.wait({play, leave}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        play.cancel()
        leave.cancel()
        await asyncio.gather(play, leave, return_exceptions=True)
    if play.cancelled():
        return True
    failure = play.exception()
    if failure is not None and not isinstance(failure, ConnectionError):
        raise failure
    return failure is not None
