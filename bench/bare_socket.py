"""A bare WebSocket on uvicorn: what anybody would write who has these frames in a list, and nothing else to do.

The same server, protocol class and settings as the gateway's; a shared list per stream, a future per reader, one
message per chunk, sent as ASGI has it.  No journal, no checks, no limits.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import orjson
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from bench.ticker import Ticker, chunk_text, now_us
from midstream.cursor import decode
from midstream.server.serving import bound


class Stream:
    """Messages as they go onto the wire, and who waits for more."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.messages: list[str] = []
        self.waiting: list[asyncio.Future[None]] = []

    def append(self, event: str, data: bytes) -> None:
        head = f'{{"type":"record","ref":"a","stream_id":"{self.name}","event":"{event}","data":'
        self.messages.append(f"{head}{data.decode()}}}")
        waiting, self.waiting = self.waiting, []
        for reader in waiting:
            if not reader.done():
                reader.set_result(None)

    def chunk(self) -> None:
        seq = len(self.messages) + 1
        delta = orjson.dumps(chunk_text(now_us()))
        self.append("token", b'{"seq":%d,"delta":%b,"done":false}' % (seq, delta))


class Bare:
    """The ASGI application: readers on WebSockets, and the controls below `/bench/`."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}
        self._names = itertools.count(10**31)  # as long as the gateway's ids
        self._ticker: Ticker | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._follow(receive, send)
            return
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        answer = self._control(scope["path"].removeprefix("/bench/"), orjson.loads(body + message["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": orjson.dumps(answer)})

    async def _follow(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        said = orjson.loads((await receive())["text"])
        stream, at = self._streams[said["stream_id"]], decode(said["cursor"]).seq
        while True:
            for message in stream.messages[at:]:
                await send({"type": "websocket.send", "text": message})
                at += 1
            if at == len(stream.messages):
                more = asyncio.get_running_loop().create_future()
                stream.waiting.append(more)
                await more

    def _control(self, verb: str, fields: dict[str, Any]) -> object:
        streams = [self._streams[name] for name in fields.get("streams", "").split(",") if name]
        if verb == "streams":
            made = [Stream(f"{next(self._names):032d}") for _ in range(fields["count"])]
            for stream in made:
                self._streams[stream.name] = stream
                stream.append("start", b'{"seq":1}')
                for _ in range(fields["chunks"]):
                    stream.chunk()
            return [stream.name for stream in made]
        if verb == "feed":
            self._ticker = Ticker(lambda at: streams[at].chunk(), len(streams), fields["rate"])
            self._ticker.start()
        elif verb == "fed" and self._ticker is not None:
            return self._ticker.stats()
        return {}


class PortServer(uvicorn.Server):
    """Prints its port once it listens."""

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)


async def _run() -> None:
    config = uvicorn.Config(
        Bare(),
        ws="websockets-sansio",
        ws_per_message_deflate=False,
        ws_ping_timeout=None,
        lifespan="off",
        access_log=False,
        log_config=None,
        backlog=4096,
        timeout_graceful_shutdown=1,
    )
    with bound("127.0.0.1", 0) as listener:
        await PortServer(config).serve([listener])


if __name__ == "__main__":
    uvloop.run(_run())
