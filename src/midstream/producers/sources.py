"""Upstreams as the operator writes them: `[PATTERN=]URL`, in the order in which they are asked for a model."""

from __future__ import annotations

import re
from collections.abc import Sequence

from midstream.producers.intake import Limits
from midstream.producers.openai import OpenAIUpstream, Upstreams
from midstream.producers.scripted import Scripted

# A pattern may hold any character a model's name may; it ends where `=` and a scheme follow.
_SPEC = re.compile(r"(?:(?P<pattern>.+?)=)?(?P<url>https?://.+|scripted:)", re.IGNORECASE)


def upstreams(specs: Sequence[str], keys: Sequence[str | None], limits: Limits) -> Upstreams:
    """The upstreams of `--upstream` and their keys.  Raises ValueError that names the one that is not good."""
    return Upstreams([_upstream(spec, key, limits) for spec, key in zip(specs, keys, strict=True)])


def _upstream(spec: str, key: str | None, limits: Limits) -> OpenAIUpstream | Scripted:
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise ValueError(f"--upstream {spec!r}: write [PATTERN=]http(s)://HOST[:PORT]/v1, or scripted:")
    pattern, url = match["pattern"], match["url"]
    if url.lower() == "scripted:":
        return Scripted(pattern)
    return OpenAIUpstream(url, pattern, key, limits)
