"""Upstreams as the operator writes them, `[PATTERN=]URL`, in the order in which they are asked for a model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from midstream.errors import UnknownModel
from midstream.producers.continuation import Continuation, Continued, Mode
from midstream.producers.openai import OpenAIUpstream, Upstreams
from midstream.producers.scripted import Scripted
from midstream.producers.upstream import Direct, Upstream, UpstreamLimits

if TYPE_CHECKING:  # its database library takes a while to load, and most gateways have no pool
    from midstream.producers.pool import PoolSource

# A pattern may hold any character a model's name may; it ends where `=` and a scheme follow.
_SPEC = re.compile(r"(?:(?P<pattern>.+?)=)?(?P<url>https?://.+|scripted:)", re.IGNORECASE)


def upstreams(specs: Sequence[str], keys: Sequence[str | None], limits: UpstreamLimits) -> Upstreams:
    """The upstreams of `--upstream` and their keys.  Raises ValueError that names the one that is not good."""
    return Upstreams([_upstream(spec, key, limits) for spec, key in zip(specs, keys, strict=True)])


def _upstream(spec: str, key: str | None, limits: UpstreamLimits) -> Upstream:
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise ValueError(f"--upstream {spec!r}: write [PATTERN=]http(s)://HOST[:PORT]/v1, or scripted:")
    pattern, url = match["pattern"], match["url"]
    if url.lower() == "scripted:":
        return Scripted(pattern)
    return OpenAIUpstream(url, pattern, key, limits)


class ModelSources:
    """All models of a gateway: its upstreams', then those that workers of the pool offer.

    Upstreams that are continued are wrapped so that their broken connections are gone over.
    """

    def __init__(
        self, upstreams: Upstreams, continuations: Sequence[Continuation] = (), pool: PoolSource | None = None
    ) -> None:
        self._upstreams = upstreams
        self._continuations = continuations
        self.pool = pool

    def for_model(self, model: str) -> Direct | PoolSource | None:
        """The first upstream whose pattern matches, else the pool where a worker offers the model now."""
        source = self._upstreams.for_model(model)
        if source is None and self.pool is not None and self.pool.serves(model):
            return self.pool
        modes = (mode for pattern, mode in self._continuations if fnmatchcase(model, pattern))
        mode: Mode = next(modes, "off")
        if source is None or mode == "off":
            return source
        return Continued(source, mode)

    async def default_model(self) -> str:
        """The first model that the first upstream lists, or, without upstreams, one of the worker that was here last.

        Raises UnknownModel, ProducerFailed.
        """
        if self.pool is not None and not len(self._upstreams):
            if (model := self.pool.freshest()) is None:
                raise UnknownModel("no worker of the pool is here now")
            return model
        return await self._upstreams.default_model()

    async def models(self) -> list[dict[str, Any]]:
        """All models that can be asked for by a name that is known, as who serves them describes them."""
        listed = await self._upstreams.models()
        if self.pool is not None:
            listed += [model for model in await self.pool.models() if self._upstreams.for_model(model["id"]) is None]
        return listed

    async def close(self) -> None:
        await self._upstreams.close()
