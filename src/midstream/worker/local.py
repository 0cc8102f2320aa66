"""The local server that does the work: any OpenAI-compatible one.

A generation is stopped by closing its connection.  Some servers go on for a moment all the same, and answer the next
request with "busy": where a server can be asked whether it is idle it is asked, and waited for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

import aiohttp
import orjson
from yarl import URL

from midstream.errors import ProducerFailed
from midstream.producers.intake import UpstreamLimits
from midstream.producers.openai import OpenAIUpstream
from midstream.records import Chunk, Finish
from midstream.worker.asking import Task

_log = logging.getLogger("midstream")

_ASK: Final = aiohttp.ClientTimeout(total=2.0)
# Seconds that a stopped server may take to become idle; and between two looks.
_IDLE_WITHIN: Final = 30.0
_LOOK_EVERY: Final = 0.1
_MAX_ANSWER: Final = 2**20


class LocalServer:
    """One server at `url` (its base, `/v1` included)."""

    def __init__(self, url: str, key: str | None = None, limits: UpstreamLimits | None = None) -> None:
        self.upstream = OpenAIUpstream(url, key=key, limits=limits)
        # KoboldCpp and llama.cpp have routes of their own beside `/v1`.
        self._root = URL(url.rstrip("/")).origin()
        self._kobold: bool | None = None

    async def models(self) -> list[str]:
        """The names of its models.  Raises ProducerFailed."""
        return [str(model["id"]) for model in await self.upstream.models()]

    async def generate(self, task: Task, local_model: str) -> AsyncGenerator[list[Chunk] | Finish, None]:
        """Run the job: lists of chunks, then one Finish.  Raises ProducerFailed."""
        route, body = task.request(local_model)
        if await self._is_kobold():
            body["genkey"] = task.id  # names the generation, for `stopped`
        async with aclosing(self.upstream.generate(body, route)) as parts:
            async for part in parts:
                yield part

    async def stopped(self, task: Task) -> None:
        """After a generation was cut off: return once the server has room again, as far as it can be asked."""
        if await self._is_kobold():
            await self._abort(task.id)
        clock = asyncio.get_running_loop().time
        give_up = clock() + _IDLE_WITHIN
        while clock() < give_up:
            if await self._is_idle() is not False:
                return
            await asyncio.sleep(_LOOK_EVERY)

    async def _is_kobold(self) -> bool:
        if self._kobold is None:
            self._kobold = isinstance(await self._get("api/extra/perf"), dict)
        return self._kobold

    async def _abort(self, generation: str) -> None:
        """KoboldCpp goes on without a reader; this stops it."""
        try:
            async with self._session.post(
                self._root / "api/extra/abort", json={"genkey": generation}, timeout=_ASK, allow_redirects=False
            ):
                pass
        except (aiohttp.ClientError, OSError) as error:
            _log.info("the local server was not told to stop: %s", error)

    async def _is_idle(self) -> bool | None:
        """Whether there is room for a generation.  None: it has no way to say."""
        if await self._is_kobold():
            perf = await self._get("api/extra/perf")
            return bool(perf["idle"]) if isinstance(perf, dict) and "idle" in perf else None
        slots = await self._get("slots")
        if isinstance(slots, list) and slots:
            return any(isinstance(slot, dict) and not slot.get("is_processing") for slot in slots)
        return None

    async def _get(self, path: str) -> Any:
        try:
            async with self._session.get(self._root / path, timeout=_ASK, allow_redirects=False) as answer:
                if answer.status != 200:
                    return None
                return orjson.loads(await answer.content.read(_MAX_ANSWER))
        except (aiohttp.ClientError, OSError, orjson.JSONDecodeError):
            return None

    @property
    def _session(self) -> aiohttp.ClientSession:
        return self.upstream.connections.session

    async def close(self) -> None:
        await self.upstream.connections.close()


def is_busy(failure: ProducerFailed) -> bool:
    """Whether the server only had no room at that moment."""
    return failure.facts.get("status") in (429, 503) or failure.failure == "upstream_unreachable"
