"""A gateway that keeps one finished stream and misbehaves as told, on a real socket.

    async with OddGateway(last=9) as gateway:
        gateway.then(busy(503), lambda after: cut(gateway, after, 5))   # for the next requests of a stream
        ...                                                             # what follows is answered properly

The HTTP is written by hand (`midstream.testing`), so that it can lie at any byte.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import parse_qs, urlsplit

import orjson

from midstream.cursor import Cursor, decode
from midstream.testing.upstream_script import CloseDirty, Reset, Script, Send, Status, Step
from midstream.testing.upstream_wire import Answer, Inbound, Request

STREAM = "s7Kd"
# How a connection may end in the middle, by name.
ENDINGS: dict[str, list[Step]] = {
    "clean": [],
    "fin": [CloseDirty()],
    "reset": [Reset()],
    "half a record": [Send(b'id: 7\ndata: {"se')],
}
HEADERS = {"Midstream-Stream-Id": STREAM, "Midstream-Heartbeat": "5"}

Reply = Script | Callable[[int], Script]


def frame(seq: int, event: str = "token", **data: object) -> bytes:
    body = orjson.dumps({"seq": seq, **data})
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (seq, event.encode(), body)


def stream(*steps: Step, heartbeat: float = 5) -> Script:
    """An answer that carries a stream."""
    return Script(steps, headers={**HEADERS, "Midstream-Heartbeat": f"{heartbeat:g}"})


def refusal(status: int, body: bytes = b"", **headers: str) -> Script:
    """A whole answer; `retry_after="2"` becomes `Retry-After: 2`."""
    return Script([Status(status, {name.replace("_", "-"): value for name, value in headers.items()}, body)])


class OddGateway:
    """The server, an async context manager; everything it was asked stands in `requests`.

    last      the seq of the stream's terminal record: 1 is `start`, then tokens, then `end`
    deltas    what the tokens say; by default their seq
    state     what is answered to everything else that is asked of the stream; `listed` of all streams
    """

    def __init__(self, last: int = 9, *, deltas: list[str] | None = None, end: bytes | None = None) -> None:
        texts = deltas if deltas is not None else [f" {seq}" for seq in range(2, last)]
        middle = [frame(seq, delta=text, done=False) for seq, text in enumerate(texts, 2)]
        self.last = len(texts) + 2
        start = frame(1, "start", stream_id=STREAM, cursor=Cursor(STREAM, 1).encode(), model="scripted")
        done = frame(self.last, "done", done=True, finish_reason="stop", usage={"completion_tokens": len(texts)})
        self.frames = [start, *middle, end or done]
        self.text = "".join(texts)
        self.state: dict[str, object] = {"stream_id": STREAM, "status": "done", "highest_seq": self.last}
        self.listed: list[dict[str, object]] = []
        self.requests: list[Request] = []
        self.peak = 0
        self._replies: deque[Reply] = deque()
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    def then(self, *replies: Reply) -> None:
        """Answer the next requests for a stream so; a function is given the position asked for (0: a POST)."""
        self._replies.extend(replies)

    def after(self, position: int, upto: int | None = None) -> Send:
        """The records after a position, as one write."""
        return Send(b"".join(self.frames[position:upto]))

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @property
    def asked(self) -> list[str]:
        """What the streams were asked for: "POST", or the position of a GET."""
        return [str(_position(request)) if request.method == "GET" else "POST" for request in self._followed()]

    def _followed(self) -> list[Request]:
        return [request for request in self.requests if _is_stream(request)]

    async def __aenter__(self) -> OddGateway:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        self.peak = max(self.peak, len(self._connections))
        inbound = Inbound(reader)
        try:
            with suppress(EOFError, ConnectionError):
                while await self._converse(inbound, writer):
                    pass
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            self._connections.discard(connection)

    async def _converse(self, inbound: Inbound, writer: asyncio.StreamWriter) -> bool:
        request = await inbound.request()
        self.requests.append(request)
        answer = Answer(self._script(request), writer)
        tasks = {asyncio.create_task(answer.play()), asyncio.create_task(inbound.gone())}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return answer.leaves_open

    def _script(self, request: Request) -> Script:
        if not _is_stream(request):
            return refusal(200, orjson.dumps(self._told(request)))
        position = _position(request)
        if self._replies:
            reply = self._replies.popleft()
            return reply if isinstance(reply, Script) else reply(position)
        if position == self.last:
            return refusal(204)
        return stream(self.after(position))

    def _told(self, request: Request) -> dict[str, object]:
        verb = request.path.rpartition("/")[2]
        if verb == "streams":
            return {"streams": self.listed}
        return {**self.state, "text": self.text} if verb == "snapshot" else self.state


def _is_stream(request: Request) -> bool:
    path = urlsplit(request.path).path
    return (request.method, path) in {("POST", "/v1/stream"), ("GET", f"/v1/stream/{STREAM}")}


def _position(request: Request) -> int:
    (token,) = parse_qs(urlsplit(request.path).query).get("cursor", [""])
    return decode(token).seq if token else 0


@contextmanager
def in_thread(gateway: OddGateway) -> Iterator[OddGateway]:
    """Serve from a loop in another thread, for a client that blocks this one."""
    ready, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        async with gateway:
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=[serve()])
    thread.start()
    assert ready.wait(5)
    try:
        yield gateway
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(5)
