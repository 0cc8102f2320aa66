"""What stands between the gateway under `midstream bench` and its model, and counts what the model writes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import orjson
from aiohttp import web

# Of one connection alone, or set by whoever sends it on.
_NOT_PASSED: Final = {
    "host",
    "content-length",
    "connection",
    "transfer-encoding",
    "accept-encoding",
    "content-encoding",
}


@dataclass(slots=True)
class Written:
    """One answer of the upstream: how many chunks with text it has sent so far."""

    chunks: int = 0
    usage: int | None = None  # the upstream's own count of tokens, where it tells one
    ended: threading.Event = field(default_factory=threading.Event)
    _line: bytes = b""

    def take(self, data: bytes) -> None:
        """Bytes of server-sent events as they passed."""
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (event := line[5:].strip()) != b"[DONE]":
                self._event(event)

    def _event(self, event: bytes) -> None:
        try:
            said = orjson.loads(event)
        except orjson.JSONDecodeError:
            return
        if not isinstance(said, dict):
            return
        choices = said.get("choices") or [{}]
        delta = choices[0].get("delta") or choices[0]
        self.chunks += bool(delta.get("content") or delta.get("text"))
        usage = said.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            self.usage = usage["completion_tokens"]


class Relay:
    """An HTTP server in front of an OpenAI-compatible endpoint.  `written` has an entry for each answer asked of it.

    `fields` are put into every request for an answer: so each transport asks the same, also one whose own requests have
    no room for them.
    """

    def __init__(self, upstream: str, fields: Mapping[str, Any]) -> None:
        self._upstream = upstream.rstrip("/")
        self._fields = fields
        self.written: list[Written] = []
        self.url = ""

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None), cookie_jar=aiohttp.DummyCookieJar()
        )
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/v1/{path:.*}", self._pass)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def reach(self) -> None:
        """Raises aiohttp.ClientError when nobody answers at the upstream's address."""
        async with self._session.get(f"{self._upstream}/models"):
            pass

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        written = None
        if request.method == "POST":
            body = orjson.dumps(orjson.loads(body) | self._fields)
            written = Written()
            self.written.append(written)
        try:
            return await self._answer(request, body, written)
        except aiohttp.ClientConnectionError as error:
            raise web.HTTPBadGateway(text=f"the upstream cannot be reached: {error}") from None
        finally:
            if written is not None:
                written.ended.set()

    async def _answer(self, request: web.Request, body: bytes, written: Written | None) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _NOT_PASSED}
        url = f"{self._upstream}/{request.match_info['path']}"
        # What was written and not yet read here would be passed on when its reader has gone: leaving the block closes.
        async with self._session.request(
            request.method, url, data=body, headers=headers | {"Accept-Encoding": "identity"}, allow_redirects=False
        ) as said:
            kept = {name: value for name, value in said.headers.items() if name.lower() not in _NOT_PASSED}
            answer = web.StreamResponse(status=said.status, headers=kept)
            await answer.prepare(request)
            async for data in said.content.iter_any():
                if written is not None:
                    written.take(data)
                await answer.write(data)
            await answer.write_eof()
            return answer
