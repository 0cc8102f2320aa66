"""What can be asked for, and opening its stream once: for every transport (PROTOCOL.md, "Create", "Ack")."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import orjson

from midstream.codec.openai import Route
from midstream.errors import BadRequest, IdempotencyMismatch, UnknownModel
from midstream.records import Fold, Producer
from midstream.streams import Opened, Streams
from midstream.wire import MAX_IDEMPOTENCY_CHARS, MAX_SEQ

# A longer name no model has; some are paths.  It stands in every chunk of a chat.
_MODEL_CHARS: Final = 1024


class Source(Protocol):
    """Where a model's answers come from.

    `abandon_after` is in seconds, for requests that say nothing of it (None: it has no opinion); `continues` tells
    whether it can `proceed` at all.
    """

    @property
    def abandon_after(self) -> float | None: ...
    @property
    def continues(self) -> bool: ...

    def ask(
        self, owner: str, body: Mapping[str, Any], route: Route, headers: Mapping[str, str] | None = None
    ) -> Callable[[str], Producer]:
        """Check the request; return what generates it, given the stream's id.  Raises BadRequest."""

    async def proceed(
        self, owner: str, body: Mapping[str, Any], route: Route, stream_id: str, fold: Fold
    ) -> Producer | None:
        """Go on with a stream whose writer's process is gone, after what it says; None where that is not possible."""


class Sources(Protocol):
    """All models this gateway can be asked for."""

    @property
    def pool(self) -> Source | None:
        """Who serves models that `for_model` may not know just now, since nobody is here who takes their requests."""

    def for_model(self, model: str) -> Source | None:
        """The first source whose pattern matches."""

    async def default_model(self) -> str:
        """The first source's first model.  Raises UnknownModel where it lists none, ProducerFailed on a failure."""

    async def models(self) -> list[dict[str, Any]]:
        """Every model that a source lists, once, as it describes it: an object with at least its `id`."""


class Told(NamedTuple):
    """What the body of a create request says: to the upstream, and to us.  `abandon_after` is in seconds."""

    upstream: dict[str, Any]
    model: str | None
    stream: bool
    abandon_after: float | None


class Front(NamedTuple):
    """A route that opens streams.

    `route` is the upstream's that answers; `read` takes a body apart and raises BadRequest; `streams` is what a body
    asks for that does not say `stream`.
    """

    path: str
    route: Route
    read: Callable[[dict[str, Any]], Told]
    streams: bool


class Asked(NamedTuple):
    """A create request, taken apart: what is ours, and what goes on to the upstream by the `front`'s route.

    `request` is what is kept with the stream.
    """

    upstream: dict[str, Any]
    front: Front
    model: str | None
    stream: bool
    abandon_after: float | None
    request: bytes

    def is_of(self, kept: bytes) -> bool:
        """Whether this is the request that was `kept` with a stream, whatever the order of its fields."""
        return _canonical(self.request, self.front) == _canonical(kept, self.front)


def _native(body: dict[str, Any]) -> Told:
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
    return Told(rest, model, stream, abandonment(rest))


# Every transport that has no create route of its own asks as this one does: the same request over another transport is
# the same request.
NATIVE = Front("/v1/stream", "chat", _native, streams=True)


def abandonment(body: dict[str, Any]) -> float | None:
    """Take `abandon_after` out of a body.  Raises BadRequest."""
    seconds = body.pop("abandon_after", None)
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < 1e9:
        problem = "'abandon_after' must be a number of seconds above 0"
        raise BadRequest(problem, param="abandon_after", reason="invalid_type")
    return seconds


def asked(body: dict[str, Any], front: Front = NATIVE) -> Asked:
    """Read the body of a create request.  Raises BadRequest, also where it is so deep that nobody could pass it on."""
    told = front.read(body)
    try:
        request = orjson.dumps({"route": front.path, "body": body})
    except orjson.JSONEncodeError:
        raise BadRequest("the body is nested too deep") from None
    return Asked(told.upstream, front, told.model, told.stream, told.abandon_after, request)


def _canonical(request: bytes, front: Front) -> bytes:
    kept = orjson.loads(request)
    body = kept.get("body", {})
    # The default is as good as left out: a transport that has nothing else leaves it out.
    told = {name: value for name, value in body.items() if name != "stream" or value is not front.streams}
    return orjson.dumps([kept.get("route"), told], option=orjson.OPT_SORT_KEYS)


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
    if opened.existed and not what.is_of(opened.state.meta.request):
        raise IdempotencyMismatch("this Idempotency-Key was used with another body; use a new key")
    return opened


async def begin(
    streams: Streams, sources: Sources, owner: str, what: Asked, names: Sequence[str], trace: str | None
) -> Opened:
    """Begin the generation under these names, or find the stream that has one of them.

    Raises UnknownModel, ProducerFailed (the upstream could not be asked for its models), BadRequest (what no worker can
    be asked), and what `Streams.open` does.
    """
    model = what.model or await sources.default_model()
    source = sources.for_model(model) if len(model) <= _MODEL_CHARS else None
    if source is None:
        raise UnknownModel(f"neither an upstream nor a worker serves {model[:200]!r}")
    headers = {"traceparent": trace} if trace else None
    produce = source.ask(owner, {**what.upstream, "model": model}, what.front.route, headers)
    abandon_after = what.abandon_after
    if abandon_after is None and streams.limits.abandon_after is None:
        abandon_after = source.abandon_after
    return await streams.open(owner, model, produce, request=what.request, names=names, abandon_after=abandon_after)


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
