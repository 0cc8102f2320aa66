"""The pool's routes as a worker calls them (PROTOCOL.md, "Pool")."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import aiohttp
import orjson

from midstream.errors import MidstreamError
from midstream.wire import POOL_TEXT_PATH, POOL_USER_PATH
from midstream.worker.asking import Task
from midstream.worker.batching import Batch
from midstream.worker.reasons import why_silent
from midstream.worker.times import Times

_log = logging.getLogger("midstream")

_CONNECT: Final = 10.0
_MAX_ANSWER: Final = 16 * 2**20
# Characters of a stranger's text in a message.
_SHOWN: Final = 300
_TAG: Final = re.compile("<[^<>]*>")
# What more tries do not mend: the fields, the key, the name.
_FOR_GOOD: Final = frozenset({400, 401, 403})


class PoolRefused(MidstreamError):
    """The pool will not have this worker: its key, its name, or what it declares; or there is no pool at the address.

    Trying again is no help.  `wants_key`: it asks for a key.
    """

    code = "pool_refused"

    def __init__(self, reason: str, *, wants_key: bool = False) -> None:
        super().__init__(reason)
        self.wants_key = wants_key


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
    """An answer of the pool's: its status, its body (a message where it is no JSON object), and two of its headers."""

    status: int
    body: Mapping[str, Any]
    is_json: bool = True
    after: float = 0.0
    location: str = ""

    @property
    def message(self) -> str:
        """Why, for people, on one line."""
        errors = self.body.get("errors")
        if isinstance(errors, dict):
            told: Any = "; ".join(f"{field}: {complaint}" for field, complaint in errors.items())
        else:
            told = self.body.get("message") or self.body.get("detail") or self.body.get("error")
        return f"{' '.join(str(told or 'no reason given').split())[:_SHOWN]} (status {self.status})"

    @property
    def was_submitted(self) -> bool:
        """Whether a submit was refused because an earlier one, whose answer was lost, had been taken."""
        return self.body.get("rc") == "DuplicateGen" or "already submitted" in str(self.body.get("message"))


class PoolRoutes:
    """A pool at `url`, by one key.  `session` is the caller's to close."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, key: str | None, agent: str, times: Times | None = None
    ) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json", "Client-Agent": agent}
        if key is not None:
            self._headers["apikey"] = key
        self.times = times or Times()
        self._misses = 0  # tries in a row that brought no answer
        self._reason = ""
        self._is_pool = False  # it has answered as one

    @property
    def trouble(self) -> str:
        """Why the pool does not answer; nothing while it does, or has been silent once: connections break."""
        return self._reason if self._misses > 1 else ""

    async def pop(self, declaration: Mapping[str, Any]) -> list[Task]:
        """Ask for work.  Raises PoolAway, PoolRefused."""
        told = await self._post("pop", declaration, self.times.answer)
        if told.status != 200 or "id" not in told.body:
            raise self._no_pop(told)
        self._is_pool = True
        self._heard()
        body = told.body
        ids = [job for job in body.get("ids") or [body.get("id")] if isinstance(job, str)]
        payload = body.get("payload")
        return [
            Task(job, str(body.get("model")), body.get("chat") is True, payload if isinstance(payload, dict) else {})
            for job in ids
        ]

    def _no_pop(self, told: Told) -> MidstreamError:
        """What it means that a pop was not answered as a pool does.

        A pool that was one yesterday is one again tomorrow, whatever a proxy says in its place meanwhile.
        """
        reason = told.message
        if 300 <= told.status < 400:
            where, _, _ = told.location.partition(POOL_TEXT_PATH)
            reason = f"it redirects to {where[:_SHOWN] or 'elsewhere'}: give that address"
        elif told.status == 404:
            reason = f"there is no pool at this address: {reason}"
        elif told.status < 300:
            reason = f"what answers at this address is no pool (status {told.status})"
        if self._is_pool and told.status not in _FOR_GOOD:
            return self._away(reason)
        errors = told.body.get("errors")
        return PoolRefused(reason, wants_key=isinstance(errors, dict) and "apikey" in errors)

    async def progress(self, job: str, batch: Batch) -> Heard:
        """Post tokens, or (seq 0, nothing) a sign of life, until the pool has them.

        A post whose answer was lost is repeated under its number, which the pool takes once.
        """
        fields: dict[str, Any] = {"id": job, "seq": batch.seq, "content": batch.content}
        if batch.reasoning:
            fields["reasoning_content"] = batch.reasoning
        try:
            told = await self._until_answered("progress", fields, self.times.post, self.times.lease)
        except PoolAway:
            return Heard.GONE
        if told.status == 200 and "cancelled" in told.body:
            return Heard.STOP if told.body["cancelled"] is True else Heard.GO_ON
        return Heard.MUTED if told.status in (409, 413) and batch.seq else Heard.GONE

    async def submit(self, body: Mapping[str, Any]) -> Told:
        """Hand an answer or a fault in, until the pool has it.  Raises PoolAway after a long while."""
        return await self._until_answered("submit", body, self.times.answer, self.times.submit)

    async def earned(self) -> int | None:
        """The account's balance; None where it cannot be had now."""
        try:
            async with self._session.get(
                self._url + POOL_USER_PATH,
                headers=self._headers,
                timeout=_patience(self.times.answer),
                allow_redirects=False,
            ) as answer:
                kudos = (await _told(answer)).body.get("kudos")
        except (aiohttp.ClientError, OSError):
            return None
        return int(kudos) if isinstance(kudos, (int, float)) else None

    async def _until_answered(self, route: str, body: Mapping[str, Any], each: float, patience: float) -> Told:
        clock = asyncio.get_running_loop().time
        give_up, wait = clock() + patience, 0.1
        while True:
            try:
                told = await self._post(route, body, each)
                if not told.is_json:  # a proxy's word, which a finished answer must not be thrown away for
                    raise self._away(told.message)
                self._heard()
                return told
            except PoolAway as away:
                pause = max(away.after, min(wait, self.times.most) * random.uniform(0.5, 1.0))
                if clock() + pause >= give_up:
                    raise
            await asyncio.sleep(pause)
            wait = min(2 * wait, 5.0)

    async def _post(self, route: str, body: Mapping[str, Any], patience: float) -> Told:
        """One try.  Raises PoolAway."""
        try:
            async with self._session.post(
                f"{self._url}{POOL_TEXT_PATH}/{route}",
                data=orjson.dumps(body),
                headers=self._headers,
                timeout=_patience(patience),
                allow_redirects=False,
            ) as answer:
                told = await _told(answer)
        except (aiohttp.ClientError, OSError) as error:
            raise self._away(why_silent(error, patience)) from None
        if told.status == 429 or told.status >= 500:
            raise self._away(told.message, min(told.after, self.times.most))
        return told

    def _heard(self) -> None:
        if self.trouble:
            _log.warning("the pool answers again")
        self._misses = 0

    def _away(self, reason: str, after: float = 0.0) -> PoolAway:
        self._misses += 1
        self._reason = reason
        if self._misses == 2:
            _log.warning("the pool does not answer: %s", reason)
        return PoolAway(reason, after)


def _patience(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds, connect=min(seconds, _CONNECT))


async def _told(answer: aiohttp.ClientResponse) -> Told:
    raw = bytearray()
    async for piece in answer.content.iter_any():
        raw += piece
        if len(raw) > _MAX_ANSWER:
            raise aiohttp.ClientPayloadError(f"an answer of over {_MAX_ANSWER} bytes")
    try:
        body = orjson.loads(bytes(raw))
    except orjson.JSONDecodeError:
        body = None
    is_json = isinstance(body, dict)
    after = answer.headers.get("Retry-After", "")
    wait = float(after) if after.isascii() and after.isdecimal() else 0.0
    location = answer.headers.get("Location", "")
    told = body if is_json else {"message": _TAG.sub(" ", raw[: 8 * _SHOWN].decode("utf-8", "replace"))}
    return Told(answer.status, told, is_json, wait, location)
