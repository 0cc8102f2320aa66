"""The asyncio client: `resume.Reader` over aiohttp.

    async with AsyncClient("http://127.0.0.1:8400", key="…") as client:
        stream = await client.generate("Tell me a story")
        async for record in stream:
            print(record.text, end="", flush=True)

A dropped connection is mended inside the loop; `stream.cursor` is where to go on in another process, by
`client.resume(cursor)`.  Leaving the loop early closes the connection and stops nothing but the reading (I6); a second
loop over the same stream goes on where the first one stopped.
"""

from __future__ import annotations

import asyncio
import inspect
import uuid
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp

from midstream.client.answers import MAX_ANSWER, Answer, Unreachable, object_in
from midstream.client.resume import Reader
from midstream.client.steps import Connect, Lost, Patience, Read, Record, Request, Resumed, Wait
from midstream.client.surface import DEFAULT_GATEWAY, Call, Gateway, Handle, creation, why
from midstream.cursor import Cursor

Key = str | Callable[[], str | Awaitable[str]]
Reply = Coroutine[Any, Any, dict[str, Any]]

_BROKEN = (aiohttp.ClientError, OSError)  # TimeoutError is an OSError


class AsyncClient(Gateway[Reply]):
    """A client of one gateway.  Usable in several event loops and threads; `async with` closes what this loop opened.

    base_url     of the gateway, such as "http://127.0.0.1:8400"
    key          the caller's key, or what returns it (or an awaitable of it): asked for at each attempt
    patience     how long dropped connections are mended
    timeout      seconds for an answer to begin (for a whole one, where it is not a stream)
    connections  how many streams may be connected at a time; further ones wait. None: any number
    notify       is told `Lost` and `Resumed`, as they happen
    """

    def __init__(
        self,
        base_url: str = DEFAULT_GATEWAY,
        *,
        key: Key | None = None,
        patience: Patience | None = None,
        timeout: float = 30.0,
        connections: int | None = None,
        notify: Callable[[Lost | Resumed], None] | None = None,
    ) -> None:
        super().__init__(base_url, patience, timeout, notify)
        self._key = key
        self._connections = connections or 0
        self._here: dict[asyncio.AbstractEventLoop, _Here] = {}

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[dict[str, Any]] | None = None,
        model: str | None = None,
        idempotency_key: str | None = None,
        **options: Any,
    ) -> AsyncStream:
        """Begin a generation.  Returns once the gateway has taken it, before the model has said anything.

        `options` go into the request as they are: max_tokens, temperature, stop, seed, abandon_after, ….
        """
        key = idempotency_key or uuid.uuid4().hex
        reader = self._reader(creation(prompt, messages, key, {"model": model, **options}))
        reading = _Reading(self, reader)
        await reading.open()
        return AsyncStream(self, reader, reading)

    def resume(self, cursor: str | Cursor) -> AsyncStream:
        """Go on after a position; connects when it is iterated.  Raises BadCursor."""
        return AsyncStream(self, self._reader(cursor))

    async def _call(self, call: Call) -> dict[str, Any]:
        headers = call.headers | await self.authorization()
        try:
            async with asyncio.timeout(self.timeout):
                response = await self.send(call.method, call.path, call.body, headers)
                answer = _answer(response, await _whole(response))
        except _BROKEN as error:
            raise Unreachable(why(error)) from error
        return object_in(answer)

    async def authorization(self) -> dict[str, str]:
        """The header that says whose call it is; the key may have changed since the last one."""
        key = self._key() if callable(self._key) else self._key
        if inspect.isawaitable(key):
            key = await key
        return {} if key is None else {"authorization": f"Bearer {key}"}

    async def send(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], *, stream: bool = False
    ) -> aiohttp.ClientResponse:
        """The answer as soon as its head is there; the caller closes it.  Raises what aiohttp does."""
        here = self.here()
        session = here.streams if stream else here.calls
        # A redirect is an answer like any other: the key must not follow it.
        url = self.address.url + path
        return await session.request(method, url, data=body, headers=headers, allow_redirects=False)

    def here(self) -> _Here:
        """What belongs to the running loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._here:
            for other in [loop for loop in self._here if loop.is_closed()]:
                del self._here[other]
            self._here[loop] = _Here(_new_session(self._connections), _new_session(0))
        return self._here[loop]

    async def aclose(self) -> None:
        """Close the connections that this event loop opened, those of streams too; a next loop over one goes on."""
        here = self._here.pop(asyncio.get_running_loop(), None)
        if here is not None:
            for reading in list(here.readings):
                reading.close()
            await here.streams.close()
            await here.calls.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncStream(Handle["_Reading", Reply]):
    __doc__ = Handle.__doc__

    _gateway: AsyncClient

    def __aiter__(self) -> _Reading:
        return self._begin(lambda: _Reading(self._gateway, self._reader))


class _Reading:
    """One loop over a stream.

    An object of its own, and not a generator, so that its connection is closed as soon as the loop is left: a `for`
    statement is all that holds it.
    """

    def __init__(self, client: AsyncClient, reader: Reader) -> None:
        self._client = client
        self._reader = reader
        self._response: aiohttp.ClientResponse | None = None
        self._loop = asyncio.get_running_loop()
        self.closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Record:
        while True:
            if self.closed:
                raise RuntimeError("this stream was closed, or is being read by a later loop")
            try:
                step = self._reader.step()
            except BaseException:
                self._hang_up()
                raise
            if isinstance(step, Record):
                return step
            if step is None:
                self._hang_up()
                raise StopAsyncIteration
            await self._do(step)

    async def open(self) -> None:
        """Connect, so that a refusal is raised here and not in the loop."""
        while not self._reader.opened:
            step = self._reader.step()
            assert not isinstance(step, Record)
            assert step is not None
            await self._do(step)

    async def _do(self, step: Connect | Read | Wait) -> None:
        match step:
            case Connect(request):
                await self._connect(request)
            case Read(within):
                await self._read(within)
            case Wait(seconds):
                await asyncio.sleep(seconds)

    async def _connect(self, request: Request) -> None:
        self._hang_up()
        headers = request.headers | await self._client.authorization()
        try:
            async with asyncio.timeout(self._client.timeout):
                response = await self._client.send(request.method, request.path, request.body, headers, stream=True)
                if (answer := _answer(response)).is_stream:
                    self._response = response
                    self._client.here().readings.add(self)
                else:
                    answer = _answer(response, await _whole(response))
        except _BROKEN as error:
            self._drop(why(error))
        else:
            if not self.closed:
                self._reader.answered(answer)

    async def _read(self, within: float) -> None:
        assert self._response is not None
        try:
            async with asyncio.timeout(within):
                data = await self._response.content.readany()
        except TimeoutError:
            self._drop(f"nothing was heard for {within:g} s")
        except _BROKEN as error:
            self._drop(why(error))
        else:
            if not data:
                self._drop("the connection ended before the answer")
            elif not self.closed:
                self._reader.received(data)

    def _drop(self, reason: str) -> None:
        self._hang_up()
        if not self.closed:  # else what broke is what `close` has closed
            self._reader.lost(reason)

    def _hang_up(self) -> None:
        response, self._response = self._response, None
        if response is not None:
            response.close()

    def close(self) -> None:
        self.closed = True
        self._hang_up()

    def __del__(self) -> None:
        # From whatever thread drops the last reference; the response's own end would warn, and keep the connection.
        if self._response is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._response.close)


class _Here:
    """What a client has in one event loop: a connection belongs to the loop that made it.

    Streams and calls have sessions of their own: a cancel or an ack must never wait behind streams for a connection.
    """

    def __init__(self, streams: aiohttp.ClientSession, calls: aiohttp.ClientSession) -> None:
        self.streams = streams
        self.calls = calls
        self.readings: weakref.WeakSet[_Reading] = weakref.WeakSet()


def _new_session(connections: int) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=connections),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(),  # none: a stream lasts as long as it lasts; see `within` and `timeout`
    )


def _answer(response: aiohttp.ClientResponse, body: bytes = b"") -> Answer:
    return Answer(response.status, {name.lower(): value for name, value in response.headers.items()}, body)


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async with response:
        async for part in response.content.iter_any():
            body += part
            if len(body) > MAX_ANSWER:
                raise aiohttp.ClientPayloadError(f"an answer of more than {MAX_ANSWER} bytes")
    return bytes(body)
