"""The local server that does the work: any OpenAI-compatible one.

A generation is stopped by closing its connection.  Some servers go on for a moment all the same, and answer the next
request with "busy": where a server can be asked whether it is idle it is asked, and waited for.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import Any, Final

import aiohttp
import orjson
from yarl import URL

from midstream.errors import ProducerFailed
from midstream.producers.openai import OpenAIUpstream
from midstream.producers.upstream import UpstreamLimits
from midstream.records import Producer
from midstream.worker.asking import Task
from midstream.worker.reasons import why_silent
from midstream.worker.times import Times

_log = logging.getLogger("midstream")

_ASK_WITHIN: Final = 2.0
_ASK: Final = aiohttp.ClientTimeout(total=_ASK_WITHIN)
_MAX_ANSWER: Final = 2**20
# A machine at home may read a long prompt for minutes and write for hours; who waits for it can cancel.
_LIMITS: Final = UpstreamLimits(first_token=900.0, idle=300.0, total=6 * 3600.0)
# What stands before a server that is not there, or what it says itself while it loads its model.
_NOT_NOW: Final = frozenset({502, 503, 504})


class LocalServer:
    """One server at `url` (its base, `/v1` included).  Raises ValueError for a URL or a key that cannot be used."""

    def __init__(
        self, url: str, key: str | None = None, limits: UpstreamLimits | None = None, times: Times | None = None
    ) -> None:
        self.upstream = OpenAIUpstream(url, key=key, limits=limits or _LIMITS)
        self._base = URL(url.rstrip("/"))
        # KoboldCpp and llama.cpp have routes of their own beside `/v1`.
        self._beside = self._base.parent if self._base.name == "v1" else self._base
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._times = times or Times()
        self._kobold: bool | None = None  # not known yet
        self._running = 0

    async def models(self) -> list[str]:
        """The names of its models.  Raises ProducerFailed."""
        return [str(model["id"]) for model in await self.upstream.models()]

    async def trouble(self) -> str:
        """Why it cannot be asked for anything now; nothing where it can."""
        self._kobold = None  # by now it may be another program
        answer = await self._get(self._base / "models")
        if isinstance(answer, str):
            return answer
        return f"it says that it is not ready (status {answer[0]})" if answer[0] in _NOT_NOW else ""

    async def generate(self, task: Task, local_model: str) -> Producer:
        """Run the job: lists of chunks, then one Finish.  Raises ProducerFailed."""
        route, body = task.request(local_model)
        if await self._is_kobold():
            body["genkey"] = task.id  # names the generation, for `abort`
        self._running += 1
        try:
            async with aclosing(self.upstream.generate(body, route)) as parts:
                async for part in parts:
                    yield part
        finally:
            self._running -= 1

    # --- after a generation was cut off -----------------------------------------------------------------------------

    async def abort(self, task: Task) -> None:
        """Stop what goes on without a reader, as KoboldCpp does."""
        if not await self._is_kobold():
            return
        try:
            async with self._session.post(
                self._beside / "api/extra/abort", json={"genkey": task.id}, headers=self._headers, timeout=_ASK
            ):
                pass
        except (aiohttp.ClientError, OSError) as error:
            _log.warning("the local server was not told to stop: %s", why_silent(error, _ASK_WITHIN))

    async def idle(self) -> None:
        """Return once there is room for a generation, as far as it can be asked; after a while in any case."""
        clock = asyncio.get_running_loop().time
        give_up = clock() + self._times.idle
        while clock() < give_up:
            if await self._has_room() is not False:
                return
            await asyncio.sleep(self._times.look)

    async def _has_room(self) -> bool | None:
        """None: it has no way to say."""
        if await self._is_kobold():
            if self._running:  # it is busy with another job of ours
                return None
            perf = await self._json("api/extra/perf")
            return bool(perf["idle"]) if isinstance(perf, dict) and "idle" in perf else None
        slots = await self._json("slots")
        if isinstance(slots, list) and slots:
            return any(isinstance(slot, dict) and not slot.get("is_processing") for slot in slots)
        return None

    async def _is_kobold(self) -> bool:
        if self._kobold is None:
            answer = await self._get(self._beside / "api/extra/perf")
            if isinstance(answer, str) or answer[0] >= 500:
                return False  # and asked again the next time
            self._kobold = answer[0] == 200 and isinstance(answer[1], dict)
        return self._kobold

    async def _json(self, path: str) -> Any:
        answer = await self._get(self._beside / path)
        return answer[1] if not isinstance(answer, str) and answer[0] == 200 else None

    async def _get(self, url: URL) -> tuple[int, Any] | str:
        """Status, and the body where it is JSON; or why there is no answer."""
        try:
            async with self._session.get(url, headers=self._headers, timeout=_ASK, allow_redirects=False) as answer:
                raw = bytearray()
                async for piece in answer.content.iter_any():
                    raw += piece
                    if len(raw) > _MAX_ANSWER:
                        break
        except (aiohttp.ClientError, OSError) as error:
            return why_silent(error, _ASK_WITHIN)
        try:
            return answer.status, orjson.loads(bytes(raw))
        except orjson.JSONDecodeError:
            return answer.status, None

    @property
    def _session(self) -> aiohttp.ClientSession:
        return self.upstream.connections.session

    async def close(self) -> None:
        await self.upstream.connections.close()


def is_busy(failure: ProducerFailed) -> bool:
    """Whether the server only had no room at that moment."""
    return failure.facts.get("status") in (429, 503)
