"""The pool's routes as a worker calls them (PROTOCOL.md, "Pool")."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import aiohttp
import orjson

from midstream.errors import MidstreamError
from midstream.wire import POOL_LEASE_TERM
from midstream.worker.asking import Task
from midstream.worker.batching import Batch

_PATIENCE: Final = aiohttp.ClientTimeout(total=30, connect=10)
_MAX_ANSWER: Final = 16 * 2**20
# An answer handed in is the work of minutes: the pool may be away for so long, in seconds.
SUBMIT_PATIENCE: Final = 600.0
# A lost lease ends a job at the pool: after so long, in seconds, a post would not be taken any more.
POST_PATIENCE: Final = float(POOL_LEASE_TERM)


class PoolRefused(MidstreamError):
    """The pool will not have this worker: its key, its name, or what it declares.  Trying again is no help."""

    code = "pool_refused"


class PoolAway(MidstreamError):
    """No usable answer: connection refused or reset, timed out, 429 or 5xx.  `after`: seconds it asked to wait."""

    code = "pool_away"

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


class Heard(Enum):
    """What a post brought back."""

    GO_ON = "go on"
    STOP = "stop"  # cancelled: nobody wants the rest
    MUTED = "muted"  # too much, or not what was due: signs of life still keep the lease
    GONE = "gone"  # no lease any more; what is handed in may reconcile all the same


@dataclass(frozen=True, slots=True)
class Told:
    """An answer of the pool's: its status, and its body where that is a JSON object."""

    status: int
    body: Mapping[str, Any]
    after: float = 0.0

    @property
    def message(self) -> str:
        told = self.body.get("errors") or self.body.get("message") or self.body.get("detail") or self.body.get("error")
        return f"{told or 'no reason given'} (status {self.status})"


class PoolRoutes:
    """A pool at `url`, by one key.  `session` is the caller's to close."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str | None, agent: str) -> None:
        self._session = session
        self._url = url.rstrip("/") + "/api/v2/"
        self._headers = {"Content-Type": "application/json", "Client-Agent": agent}
        if key is not None:
            self._headers["apikey"] = key

    async def pop(self, declaration: Mapping[str, Any]) -> list[Task]:
        """Ask for work.  Raises PoolAway, PoolRefused."""
        told = await self._post("generate/text/pop", declaration)
        if told.status != 200:
            raise PoolRefused(told.message)
        body = told.body
        ids = [job for job in body.get("ids") or [body.get("id")] if isinstance(job, str)]
        payload = body.get("payload")
        return [
            Task(job, str(body.get("model")), body.get("chat") is True, payload if isinstance(payload, dict) else {})
            for job in ids
        ]

    async def progress(self, job: str, batch: Batch) -> Heard:
        """Post tokens, or (seq 0, nothing) a sign of life, until the pool has them.

        A post whose answer was lost is repeated under its number, which the pool takes once.
        """
        fields: dict[str, Any] = {"id": job, "seq": batch.seq, "content": batch.content}
        if batch.reasoning:
            fields["reasoning_content"] = batch.reasoning
        try:
            told = await self._until_answered("generate/text/progress", fields, POST_PATIENCE)
        except PoolAway:
            return Heard.GONE
        if told.status == 200:
            return Heard.STOP if told.body.get("cancelled") is True else Heard.GO_ON
        return Heard.MUTED if told.status in (409, 413) and batch.seq else Heard.GONE

    async def submit(self, body: Mapping[str, Any]) -> Told:
        """Hand an answer or a fault in, until the pool has it.  Raises PoolAway after a long while."""
        return await self._until_answered("generate/text/submit", body, SUBMIT_PATIENCE)

    async def earned(self) -> int | None:
        """The account's balance; None where it cannot be had now."""
        try:
            async with self._session.get(
                self._url + "find_user", headers=self._headers, timeout=_PATIENCE, allow_redirects=False
            ) as answer:
                kudos = (await _told(answer)).body.get("kudos")
        except (aiohttp.ClientError, OSError):
            return None
        return int(kudos) if isinstance(kudos, (int, float)) else None

    async def _until_answered(self, route: str, body: Mapping[str, Any], patience: float) -> Told:
        clock = asyncio.get_running_loop().time
        give_up, wait = clock() + patience, 0.1
        while True:
            try:
                return await self._post(route, body)
            except PoolAway as away:
                pause = max(away.after, wait * random.uniform(0.5, 1.0))
                if clock() + pause >= give_up:
                    raise
            await asyncio.sleep(pause)
            wait = min(2 * wait, 5.0)

    async def _post(self, route: str, body: Mapping[str, Any]) -> Told:
        """One try.  Raises PoolAway."""
        try:
            async with self._session.post(
                self._url + route,
                data=orjson.dumps(body),
                headers=self._headers,
                timeout=_PATIENCE,
                allow_redirects=False,
            ) as answer:
                told = await _told(answer)
        except (aiohttp.ClientError, OSError) as error:
            raise PoolAway(str(error) or type(error).__name__) from None
        if told.status == 429 or told.status >= 500:
            raise PoolAway(told.message, told.after)
        return told


async def _told(answer: aiohttp.ClientResponse) -> Told:
    raw = bytearray()
    async for piece in answer.content.iter_any():
        raw += piece
        if len(raw) > _MAX_ANSWER:
            raise aiohttp.ClientPayloadError(f"an answer of over {_MAX_ANSWER} bytes")
    try:
        body = orjson.loads(bytes(raw))
    except orjson.JSONDecodeError:
        body = {"message": raw[:200].decode("utf-8", "replace")}
    after = answer.headers.get("Retry-After", "")
    return Told(answer.status, body if isinstance(body, dict) else {}, float(after) if after.isdecimal() else 0.0)
