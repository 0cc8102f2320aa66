"""A bare stream on uvicorn: what a start costs anybody who answers with events, and has nothing else to do.

The gateway's server with the protocol class it comes with, and one application: a body is read, an id is made, and the
head and a first event go out.  No router, no keys, no journal, nothing that the stream could be resumed from.
"""

from __future__ import annotations

import asyncio
import secrets

import orjson
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from bench.bare_socket import PortServer
from midstream.server.serving import bound, doubled
from midstream.transports.sse import stream_headers

# As long as the benchmark's upstream takes to say its first word.
_SILENT = 0.04


async def _answer(_: Scope, receive: Receive, send: Send) -> None:
    body = b""
    more = True
    while more:
        message = await receive()
        body += message["body"]
        more = message["more_body"]
    orjson.loads(body)
    stream_id = secrets.token_hex(16)
    await send({"type": "http.response.start", "status": 200, "headers": stream_headers(stream_id, 15, None)})
    data = orjson.dumps({"seq": 1, "stream_id": stream_id})
    start = b"id: 1\nevent: start\ndata: %b\n\n" % data
    await send({"type": "http.response.body", "body": start, "more_body": True})
    await asyncio.sleep(_SILENT)
    await send({"type": "http.response.body", "body": b'id: 2\nevent: done\ndata: {"seq":2,"done":true}\n\n'})


async def _run() -> None:
    config = uvicorn.Config(_answer, lifespan="off", access_log=False, log_config=None, timeout_graceful_shutdown=1)
    with bound("127.0.0.1", 0) as listener, doubled(listener) as sockets:
        await PortServer(config).serve(sockets)


if __name__ == "__main__":
    uvloop.run(_run())
