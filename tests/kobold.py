"""A local server with KoboldCpp's ways: one generation at a time, which goes on unread until it is aborted."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

from aiohttp import web

# Seconds for a token, and for an aborted generation to end.
_PACE = 0.01
_LINGERS = 0.1


class Kobold:
    """An async context manager; `url` is its base for OpenAI clients.

    length    tokens of an answer; may be changed while one runs
    slots     generations at a time; to who comes then it answers 503
    stubborn  what is aborted goes on all the same
    """

    def __init__(self, *, length: int = 10_000, slots: int = 1, stubborn: bool = False) -> None:
        self.length = length
        self.aborted: list[str] = []
        self.busy = 0
        self.running: dict[str, asyncio.Event] = {}
        self.failures: list[BaseException] = []
        self.url = ""
        self._slots = slots
        self._stubborn = stubborn
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Kobold:
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.post("/v1/chat/completions", self._generate),
                web.get("/api/extra/perf", self._perf),
                web.post("/api/extra/abort", self._abort),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await self._runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "koboldcpp"}]})

    async def _perf(self, _: web.Request) -> web.Response:
        return web.json_response({"idle": int(not self.running), "queue": 0})

    async def _abort(self, request: web.Request) -> web.Response:
        key = (await request.json())["genkey"]
        self.aborted.append(key)
        if key in self.running and not self._stubborn:
            self.running[key].set()
        return web.json_response({"success": True, "done": "true"})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if len(self.running) >= self._slots:
            self.busy += 1
            return web.json_response({"detail": {"msg": "Server is busy", "type": "service_unavailable"}}, status=503)
        key = (await request.json())["genkey"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self.running[key] = asyncio.Event()
        said: asyncio.Queue[str | None] = asyncio.Queue()
        task = asyncio.create_task(self._speak(key, said))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        with suppress(ConnectionResetError):  # its reader may leave
            await response.prepare(request)
            while (text := await said.get()) is not None:
                await response.write(_event({"delta": {"content": text}, "finish_reason": None}))
            await response.write(_event({"delta": {}, "finish_reason": "stop"}) + b"data: [DONE]")
        return response

    async def _speak(self, key: str, said: asyncio.Queue[str | None]) -> None:
        """Generate, whether or not anybody reads."""
        try:
            at = 0
            while at < self.length and not self.running[key].is_set():
                said.put_nowait(f"{at} ")
                at += 1
                await asyncio.sleep(_PACE)
            if self.running[key].is_set():
                await asyncio.sleep(_LINGERS)
            said.put_nowait(None)
        finally:
            del self.running[key]

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self.failures.append(failure)


def _event(choice: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, **choice}]}).encode() + b"\n\n"
