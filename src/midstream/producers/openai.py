"""The producer in front of an OpenAI-compatible endpoint: chat and completions, streamed.

    upstreams = Upstreams([OpenAIUpstream("http://localhost:8000/v1")])
    upstream = upstreams.for_model("m")
    async for part in upstream.generate({"model": "m", "messages": […]}, "chat"):
        …   # lists of Chunk, in order; at last one Finish

One list is all that one read from the network held.  Nothing is read from the socket while the consumer is busy with a
list, beyond one bounded buffer: the consumer's journal is the back-pressure.  To stop, cancel the task that iterates,
or `aclose()`: the connection is closed at once, before the first token too.
"""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiohttp
import orjson
from yarl import URL

from midstream.codec.openai import ChatReader, Route
from midstream.codec.upstream_errors import error_in, malformed, upstream_error
from midstream.errors import ProducerFailed, UnknownModel
from midstream.producers.body import Body, Inflate
from midstream.producers.connections import Connections
from midstream.producers.intake import Intake, overdue
from midstream.producers.upstream import Upstream, UpstreamLimits
from midstream.records import Producer

_log = logging.getLogger("midstream")

_PATHS: Final[dict[Route, str]] = {"chat": "chat/completions", "completions": "completions"}
_ERROR_BODY: Final = 64 * 1024
_ERROR_PATIENCE: Final = 5.0
_MODELS_PATIENCE: Final = 5.0
_MODELS_FRESH: Final = 5.0
_MODELS_BYTES: Final = 4 * 2**20
# The trace goes on; nothing else of the caller's request does (W3C Trace Context).
_PASSED_ON: Final = frozenset({"traceparent", "tracestate"})
# A shorter key is a placeholder ("none", "EMPTY"), and a word that messages may well contain.
_SECRET_CHARS: Final = 8


class OpenAIUpstream(Upstream):
    """One endpoint.

    `url` is its base, `/v1` included; `pattern` a glob over model names (None: every model); `key` is sent as a bearer
    token and appears nowhere else.  Raises ValueError for a URL that is not http(s) or holds credentials, and for a key
    that no header can carry.
    """

    def __init__(
        self,
        url: str,
        pattern: str | None = None,
        key: str | None = None,
        limits: UpstreamLimits | None = None,
        *,
        max_event_bytes: int = 16 * 2**20,
        connections: Connections | None = None,
    ) -> None:
        self._url = URL(url.rstrip("/"))
        if self._url.scheme not in ("http", "https") or not self._url.host:
            raise ValueError(f"an upstream is an http:// or https:// URL, not {url!r}")
        if self._url.user or self._url.password:
            raise ValueError("an upstream's URL must not hold credentials; configure its key instead")
        if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key):
            raise ValueError(f"the key for {self._url.authority} has characters that no header can carry")
        self.pattern = pattern
        self.limits = limits or UpstreamLimits()
        self.connections = connections or Connections()
        self._key = key
        self._max_event_bytes = max_event_bytes
        self._knows_usage = True
        self._listing: asyncio.Future[list[dict[str, Any]]] | None = None
        self._listed: tuple[float, list[dict[str, Any]]] | None = None

    @property
    def name(self) -> str:
        """Host and port, for messages."""
        return self._url.authority

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.pattern or '*'}={self._url}>"

    async def generate(
        self, body: Mapping[str, Any], route: Route, headers: Mapping[str, str] | None = None
    ) -> Producer:
        """Run the request; yield lists of chunks, the first one empty, then one Finish.  Raises ProducerFailed.

        `body` is the caller's, sent on with `stream` on and usage asked for; of `headers` only the trace is passed on.
        """
        started = asyncio.get_running_loop().time()
        response = await self._ask(body, route, headers or {}, started)
        intake, ended = None, False
        try:
            yield []  # accepted: its status is that of a success
            answer = Body(
                ChatReader(route, _choices_asked(body, route)),
                _inflate(response),
                response.headers.get("Content-Type", ""),
                self._max_event_bytes,
            )
            intake = Intake(response, answer, self.limits, started)
            while not answer.done and (data := await intake.read()):
                if chunks := answer.take(data):
                    yield chunks
                if answer.failure is not None:
                    raise self._without_key(answer.failure)
                if answer.complete:
                    intake.finishing()
            chunks, finish = answer.end()
            if chunks:
                yield chunks
            # Now, not after the yield: whoever takes the Finish need not come back.
            ended = True
            intake.stop()
            self.connections.linger(response)
            yield finish
        finally:
            if intake is not None:
                intake.stop()
            if not ended:
                response.close()

    async def models(self) -> list[dict[str, Any]]:
        """The models it lists and its pattern matches, as it describes them; kept for 5 s.  Raises ProducerFailed."""
        if self._listed is not None and asyncio.get_running_loop().time() - self._listed[0] <= _MODELS_FRESH:
            return self._listed[1]
        if self._listing is None:
            self._listing = asyncio.ensure_future(self._list())
            self._listing.add_done_callback(self._note_listing)
        # Shared by all who ask meanwhile, its failure too: one after the other they would queue for it.
        return await asyncio.shield(self._listing)

    def _note_listing(self, listing: asyncio.Future[list[dict[str, Any]]]) -> None:
        self._listing = None
        if not listing.cancelled() and listing.exception() is None:
            self._listed = asyncio.get_running_loop().time(), listing.result()

    async def _list(self) -> list[dict[str, Any]]:
        patience = aiohttp.ClientTimeout(total=_MODELS_PATIENCE, connect=self.limits.connect)
        try:
            async with self.connections.session.get(
                self._at("models"), headers=self._headers({}), allow_redirects=False, timeout=patience
            ) as response:
                if response.status != 200:
                    raise await self._refusal(response)
                text = await _bounded(response, _MODELS_BYTES)
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(error, "did not list its models within", _MODELS_PATIENCE) from None
        try:
            listed = orjson.loads(text)["data"]
            return [model for model in listed if isinstance(model["id"], str) and self.serves(model["id"])]
        except (orjson.JSONDecodeError, LookupError, TypeError):
            raise malformed(f"the upstream at {self.name} does not list its models as OpenAI does") from None

    async def _ask(
        self, body: Mapping[str, Any], route: Route, headers: Mapping[str, str], started: float
    ) -> aiohttp.ClientResponse:
        """Send the request; return the response once it is known to be a success."""
        asked = self._streamed(body)
        response = await self._post(asked, route, headers, started)
        if 200 <= response.status < 300:
            return response
        failure = await self._refusal(response)
        if asked.get("stream_options") == body.get("stream_options") or "stream_options" not in failure.detail:
            raise failure
        # A server so strict that it refuses the field that only we wanted: without it, then.
        response = await self._post({**body, "stream": True}, route, headers, started)
        if not 200 <= response.status < 300:
            raise await self._refusal(response)
        self._knows_usage = False
        return response

    def _streamed(self, body: Mapping[str, Any]) -> dict[str, Any]:
        asked = {**body, "stream": True}
        options = body.get("stream_options") or {}
        if self._knows_usage and isinstance(options, dict) and "include_usage" not in options:
            asked["stream_options"] = {**options, "include_usage": True}
        return asked

    async def _post(
        self, asked: dict[str, Any], route: Route, headers: Mapping[str, str], started: float
    ) -> aiohttp.ClientResponse:
        patience = min(self.limits.first_token, self.limits.total)
        try:
            async with asyncio.timeout_at(started + patience):
                return await self.connections.session.post(
                    self._at(_PATHS[route]),
                    data=_payload(asked),
                    headers=self._headers(headers),
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=None, connect=self.limits.connect),
                )
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(error, "answered nothing within", patience) from None

    def _at(self, path: str) -> URL:
        return (self._url / path).with_query(self._url.query)

    def _headers(self, passed: Mapping[str, str]) -> dict[str, str]:
        headers = {name: value for name, value in passed.items() if name.lower() in _PASSED_ON}
        headers |= {
            "Accept": "text/event-stream, application/json",
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
            "User-Agent": "midstream",
        }
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        return headers

    def _unreachable(self, error: Exception, what: str, patience: float) -> ProducerFailed:
        """Name what kept us from an answer.  OSError's own words only: others may hold the request, and so the key."""
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return overdue(f"at {self.name} took no connection within", self.limits.connect)
        if isinstance(error, TimeoutError):
            return overdue(what, patience)
        if isinstance(error, aiohttp.ClientResponseError):
            return malformed(f"what answers at {self.name} does not speak HTTP")
        reason = "it closed the connection"
        if isinstance(error, OSError):
            reason = error.strerror or type(error).__name__
        return ProducerFailed("upstream_unreachable", f"the upstream at {self.name} cannot be reached: {reason}")

    async def _refusal(self, response: aiohttp.ClientResponse) -> ProducerFailed:
        """What an answer other than a success says.  Closes it."""
        try:
            if 300 <= response.status < 400:
                return self._redirected(response)
            failure = error_in(await _bounded(response, _ERROR_BODY), response.status)
        except ProducerFailed as odd:
            failure = upstream_error(odd.detail, response.status)
        finally:
            response.close()
        if (wait := response.headers.get("Retry-After", "")).isdecimal() and len(wait) < 6:
            failure.facts["retry_after"] = int(wait)
        return self._without_key(failure)

    def _redirected(self, response: aiohttp.ClientResponse) -> ProducerFailed:
        location = response.headers.get("Location", "elsewhere")[:500]
        return self._without_key(
            upstream_error(
                f"the upstream at {self.name} redirects to {location}; redirects are not followed, since the key would "
                "follow: configure that address",
                response.status,
            )
        )

    def _without_key(self, failure: ProducerFailed) -> ProducerFailed:
        if self._key is None or len(self._key) < _SECRET_CHARS or self._key not in failure.detail:
            return failure
        detail = failure.detail.replace(self._key, "***")
        return ProducerFailed(failure.failure, detail, retryable=failure.retryable, **failure.facts)


class Upstreams:
    """The upstreams of a process, in the order in which they are asked for a model, on one pool of connections."""

    def __init__(self, upstreams: Sequence[Upstream]) -> None:
        self._upstreams = list(upstreams)
        self._connections = Connections()
        for upstream in self._upstreams:
            if isinstance(upstream, OpenAIUpstream):
                upstream.connections = self._connections

    def __len__(self) -> int:
        return len(self._upstreams)

    def for_model(self, model: str) -> Upstream | None:
        """The first whose pattern matches."""
        return next((upstream for upstream in self._upstreams if upstream.serves(model)), None)

    async def models(self) -> list[dict[str, Any]]:
        """What all list, each model once, from the upstream that would serve it.  One that fails is left out, but for a
        model that its pattern names in full."""
        listings = await asyncio.gather(*map(self._listing, self._upstreams))
        merged: dict[str, dict[str, Any]] = {}
        for upstream, listing in zip(self._upstreams, listings, strict=True):
            for model in listing:
                if self.for_model(model["id"]) is upstream:
                    merged.setdefault(model["id"], model)
        return list(merged.values())

    async def _listing(self, upstream: Upstream) -> list[dict[str, Any]]:
        try:
            return await upstream.models()
        except ProducerFailed as failure:
            _log.warning("models of %s: %r", upstream.name, failure.detail)
        if _is_name(upstream.pattern):
            return [{"id": upstream.pattern, "object": "model", "created": 0, "owned_by": upstream.name}]
        return []

    async def default_model(self) -> str:
        """The first model that the first upstream lists.  Raises UnknownModel where there is none, ProducerFailed where
        the upstream does not say."""
        if not self._upstreams:
            raise UnknownModel("no upstream is configured")
        first = self._upstreams[0]
        if first.pattern is not None and _is_name(first.pattern):
            return first.pattern
        for model in await first.models():
            return str(model["id"])
        raise UnknownModel(f"the upstream at {first.name} lists no model; name one in the request")

    async def close(self) -> None:
        """Close every connection, those in use too."""
        await self._connections.close()


def _is_name(pattern: str | None) -> bool:
    return pattern is not None and not set(pattern) & set("*?[")


def _choices_asked(body: Mapping[str, Any], route: Route) -> int:
    """How many choices the answer has: `n` of them, for each prompt where there are several."""
    asked = body.get("n")
    prompts = body.get("prompt") if route == "completions" else None
    several = isinstance(prompts, list) and prompts and not isinstance(prompts[0], int)
    return (asked if type(asked) is int and asked > 0 else 1) * (len(prompts) if prompts and several else 1)


def _payload(asked: dict[str, Any]) -> bytes | io.BytesIO:
    body = orjson.dumps(asked)
    # aiohttp writes bytes in one go, and warns of what that does to the loop above this size.
    return body if len(body) <= 2**20 else io.BytesIO(body)


def _inflate(response: aiohttp.ClientResponse) -> Inflate | None:
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    return None if encoding in ("", "identity") else Inflate(encoding)


async def _bounded(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The body's first `limit` bytes, uncompressed: as many as come within 5 s.  Raises ProducerFailed where they
    cannot be read."""
    inflate = _inflate(response)
    body = bytearray()
    try:
        async with asyncio.timeout(_ERROR_PATIENCE):
            while len(body) < limit and (data := await response.content.read(4096)):
                for piece in (data,) if inflate is None else inflate.feed(data):
                    body += piece
                    if len(body) >= limit:
                        break
    except (aiohttp.ClientError, OSError):
        pass  # what has come is better than nothing
    return bytes(body[:limit])
