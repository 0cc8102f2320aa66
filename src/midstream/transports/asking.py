"""What can be asked for, and opening its stream once: for every transport (PROTOCOL.md, "Create", "Ack")."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from midstream.codec.openai import Route
from midstream.errors import BadRequest, IdempotencyMismatch, UnknownModel
from midstream.streams import Opened, Streams
from midstream.wire import MAX_IDEMPOTENCY_CHARS, MAX_SEQ
from midstream.writer import Producer

# A digest is over this and the body: the same request over another transport is the same request.
_ROUTE = "/v1/stream"


class Source(Protocol):
    """Where a model's answers come from."""

    def generate(self, body: Mapping[str, Any], route: Route, headers: Mapping[str, str] | None = None) -> Producer:
        """A generation for this request, not yet begun."""


class Sources(Protocol):
    """All models this gateway can be asked for."""

    def for_model(self, model: str) -> Source | None:
        """The first source whose pattern matches."""

    async def default_model(self) -> str:
        """The first source's first model.  Raises UnknownModel where it lists none, ProducerFailed on a failure."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A create request, taken apart: what is ours, and what goes on to the upstream.

    `digest` is equal for equal requests, whatever the order of their fields; `request` is what is kept with the stream.
    """

    upstream: dict[str, Any]
    model: str | None
    stream: bool
    abandon_after: float | None
    digest: str
    request: bytes


def asked(body: dict[str, Any]) -> Asked:
    """Read the body of a create request.  Raises BadRequest."""
    rest = dict(body)
    prompt, messages = rest.pop("prompt", None), rest.get("messages")
    if (prompt is None) == (messages is None):
        raise BadRequest("give either 'prompt' (text) or 'messages' (a list)")
    if prompt is not None:
        if not isinstance(prompt, str):
            raise BadRequest("'prompt' must be text")
        rest["messages"] = [{"role": "user", "content": prompt}]
    elif not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise BadRequest("'messages' must be a list of objects, at least one")
    model, stream = rest.pop("model", None), rest.pop("stream", True)
    if model is not None and (not isinstance(model, str) or not model):
        raise BadRequest("'model' must be text")
    if not isinstance(stream, bool):
        raise BadRequest("'stream' must be true or false")
    abandon_after = rest.pop("abandon_after", None)
    if abandon_after is not None and (
        isinstance(abandon_after, bool) or not isinstance(abandon_after, (int, float)) or not 0 < abandon_after < 1e9
    ):
        raise BadRequest("'abandon_after' must be a number of seconds above 0")
    return Asked(rest, model, stream, abandon_after, *_kept(body))


def _kept(body: dict[str, Any]) -> tuple[str, bytes]:
    """Digest and what is kept.  Raises BadRequest for a body nested so deep that nobody could pass it on."""
    # `stream: true` is the default: a transport that has nothing else leaves it out.
    told = {name: value for name, value in body.items() if name != "stream" or value is not True}
    try:
        canonical = orjson.dumps(told, option=orjson.OPT_SORT_KEYS)
        digest = hashlib.blake2b(_ROUTE.encode() + b"\0" + canonical, digest_size=16).hexdigest()
        return digest, orjson.dumps({"route": _ROUTE, "body": body, "digest": digest})
    except orjson.JSONEncodeError:
        raise BadRequest("the body is nested too deep") from None


async def open_stream(
    streams: Streams,
    sources: Sources,
    owner: str,
    what: Asked,
    *,
    idempotency_key: str | None = None,
    trace: str | None = None,
) -> Opened:
    """Begin the generation; under a key that was used before, find the stream of the first try.

    `trace` is the caller's `traceparent`.  Raises BadRequest, UnknownModel, IdempotencyMismatch, ProducerFailed (the
    upstream could not be asked for its models), and what `Streams.open` does.
    """
    names = [f"{owner}/idem/{_checked(idempotency_key)}"] if idempotency_key is not None else []
    if names and (known := await streams.find(names[0])) is not None:
        opened = Opened(await streams.owned(known, owner), existed=True)
    else:
        opened = await begin(streams, sources, owner, what, names, trace)
    if opened.existed and orjson.loads(opened.state.meta.request).get("digest") != what.digest:
        raise IdempotencyMismatch("this Idempotency-Key was used with another body; use a new key")
    return opened


async def begin(
    streams: Streams, sources: Sources, owner: str, what: Asked, names: Sequence[str], trace: str | None
) -> Opened:
    """Begin the generation under these names, or find the stream that has one of them.

    Raises UnknownModel, ProducerFailed (the upstream could not be asked for its models), and what `Streams.open` does.
    """
    model = what.model or await sources.default_model()
    source = sources.for_model(model)
    if source is None:
        raise UnknownModel(f"no upstream serves {model[:200]!r}")
    body = {**what.upstream, "model": model}
    return await streams.open(
        owner,
        model,
        lambda: source.generate(body, "chat", {"traceparent": trace} if trace else None),
        request=what.request,
        names=names,
        abandon_after=what.abandon_after,
    )


def _checked(key: str) -> str:
    if not key or len(key) > MAX_IDEMPOTENCY_CHARS:
        raise BadRequest(f"Idempotency-Key must have 1 to {MAX_IDEMPOTENCY_CHARS} characters")
    return key


def acked(fields: dict[str, Any]) -> int:
    """The seq that an ack names.  Raises BadRequest."""
    seq = fields.get("seq")
    if type(seq) is not int or not 0 <= seq <= MAX_SEQ:
        raise BadRequest("'seq' must be an integer from 0 to 2^53 - 1")
    return seq
