"""Upstreams as the operator writes them: `[PATTERN=]URL`, in the order in which they are asked for a model, and
`[PATTERN=]MODE`, how the answers of a model are continued when a connection or a writer is lost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, cast

from midstream.producers.continuation import MODES, Continued, Mode
from midstream.producers.intake import UpstreamLimits
from midstream.producers.openai import OpenAIUpstream, Upstreams
from midstream.producers.scripted import Scripted

# A pattern may hold any character a model's name may; it ends where `=` and a scheme follow.
_SPEC = re.compile(r"(?:(?P<pattern>.+?)=)?(?P<url>https?://.+|scripted:)", re.IGNORECASE)


def upstreams(specs: Sequence[str], keys: Sequence[str | None], limits: UpstreamLimits) -> Upstreams:
    """The upstreams of `--upstream` and their keys.  Raises ValueError that names the one that is not good."""
    return Upstreams([_upstream(spec, key, limits) for spec, key in zip(specs, keys, strict=True)])


def _upstream(spec: str, key: str | None, limits: UpstreamLimits) -> OpenAIUpstream | Scripted:
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise ValueError(f"--upstream {spec!r}: write [PATTERN=]http(s)://HOST[:PORT]/v1, or scripted:")
    pattern, url = match["pattern"], match["url"]
    if url.lower() == "scripted:":
        return Scripted(pattern)
    return OpenAIUpstream(url, pattern, key, limits)


class Continuation(NamedTuple):
    """How the models that a pattern matches are continued."""

    pattern: str
    mode: Mode


def continuation(spec: str) -> Continuation:
    """Read one `[PATTERN=]MODE`.  Raises ValueError."""
    pattern, _, mode = spec.rpartition("=")
    if mode not in MODES:
        raise ValueError(f"write [PATTERN=]MODE, the mode being one of {', '.join(MODES)}")
    return Continuation(pattern or "*", mode)


class Sources:
    """All models of a gateway, those that are continued wrapped so that their broken connections are gone over."""

    def __init__(self, upstreams: Upstreams, continuations: Sequence[Continuation] = ()) -> None:
        self._upstreams = upstreams
        self._continuations = continuations

    def for_model(self, model: str) -> OpenAIUpstream | Scripted | Continued | None:
        """The first upstream whose pattern matches."""
        source = self._upstreams.for_model(model)
        modes = (mode for pattern, mode in self._continuations if fnmatchcase(model, pattern))
        mode: Mode = next(modes, "off")
        if source is None or mode == "off":
            return cast("OpenAIUpstream | Scripted | None", source)
        return Continued(source, mode)

    async def default_model(self) -> str:
        """The first model that the first upstream lists.  Raises UnknownModel, ProducerFailed."""
        return await self._upstreams.default_model()

    async def close(self) -> None:
        await self._upstreams.close()
