"""A bare grpcio.aio server: what anybody would write who has these messages in a list, and nothing else to do.

A shared list of encoded messages per stream, a future per reader, `write` for each.  No journal, no checks, no limits,
and none of grpcio's settings.  Commands come over HTTP, as to the others; calls over a port of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from typing import Any

import grpc
import orjson
import uvicorn
import uvloop
from grpc import aio
from starlette.types import Receive, Scope, Send

from bench.ticker import Ticker, chunk_text, now_us
from midstream.codec.inference import message
from midstream.codec.native import token
from midstream.codec.pb import inference_pb2 as pb
from midstream.records import Chunk
from midstream.server.serving import bound
from midstream.wire import GRPC_SERVICE


class Stream:
    """Messages as they go onto the wire, and who waits for more."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.waiting: list[asyncio.Future[None]] = []

    def chunk(self) -> None:
        self.messages.append(message(token(len(self.messages) + 2, Chunk(chunk_text(now_us())))))
        waiting, self.waiting = self.waiting, []
        for reader in waiting:
            if not reader.done():
                reader.set_result(None)


class Bare:
    """The handler of Generate, and the ASGI application of the controls below `/bench/`."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}
        self._names = itertools.count(10**31)  # as long as the gateway's ids
        self._ticker: Ticker | None = None

    async def generate(self, request: pb.GenerateRequest, context: Any) -> None:
        stream, at = self._streams[request.session_id], request.resume_from_token
        while True:
            for told in stream.messages[at:]:
                await context.write(told)
                at += 1
            if at == len(stream.messages):
                more = asyncio.get_running_loop().create_future()
                stream.waiting.append(more)
                await more

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while (event := await receive()).get("more_body"):
            body += event["body"]
        answer = self._control(scope["path"].removeprefix("/bench/"), orjson.loads(body + event["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": orjson.dumps(answer)})

    def _control(self, verb: str, fields: dict[str, Any]) -> object:
        streams = [self._streams[name] for name in fields.get("streams", "").split(",") if name]
        if verb == "streams":
            made = [f"{next(self._names):032d}" for _ in range(fields["count"])]
            for name in made:
                stream = self._streams[name] = Stream()
                for _ in range(fields["chunks"]):
                    stream.chunk()
            return made
        if verb == "feed":
            self._ticker = Ticker(lambda at: streams[at].chunk(), len(streams), fields["rate"])
            self._ticker.start()
        elif verb == "fed" and self._ticker is not None:
            return self._ticker.stats()
        return {}


class _Server(uvicorn.Server):
    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)


async def _run(grpc_port: int) -> None:
    bare = Bare()
    calls = aio.server()
    handler = grpc.unary_stream_rpc_method_handler(bare.generate, request_deserializer=pb.GenerateRequest.FromString)
    calls.add_registered_method_handlers(GRPC_SERVICE, {"Generate": handler})
    calls.add_insecure_port(f"127.0.0.1:{grpc_port}")
    await calls.start()
    config = uvicorn.Config(bare, lifespan="off", access_log=False, log_config=None, timeout_graceful_shutdown=1)
    with bound("127.0.0.1", 0) as listener:
        await _Server(config).serve([listener])
    await calls.stop(None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="A bare grpcio.aio server, which the gateway's figures are divided by."
    )
    parser.add_argument("--grpc-port", type=int, required=True)
    uvloop.run(_run(parser.parse_args().grpc_port))
