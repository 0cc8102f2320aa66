"""The values that the pool's parts pass around.  Ids are UUIDs as text; times are seconds since 1970.

A *request* is what somebody wants generated; a *generation* is one run of a model for it, at one worker, under one
lease.  A request asks for `amount` generations (one, where it is relayed live); a lost one is offered again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import UUID, uuid5

_WORKERS = UUID("5b6a44c6-2f0e-4c63-9d5f-7f6f3c7d0a11")  # the name space of worker ids

RequestStatus = Literal["waiting", "done", "failed", "cancelled"]
# `leased`: a worker has it.  Every other state is final; `settled` on a generation says whether it has been paid.
GenerationStatus = Literal["leased", "done", "faulted", "cancelled", "ended"]


@dataclass(frozen=True, slots=True)
class Ask:
    """What somebody wants generated.

    `payload` is what a worker is handed: `prompt`, or `messages` in a chat job, and the sampling parameters.  `models`
    may be empty: any will do.  `features` are what a chat worker must have declared.  `streams`: workers are asked to
    post progress, which is relayed to the stream `stream_id`.  Lengths are in tokens.
    """

    owner: str
    models: tuple[str, ...]
    payload: dict[str, Any]
    max_length: int
    max_context_length: int
    chat: bool = False
    features: frozenset[str] = frozenset()
    streams: bool = False
    stream_id: str | None = None
    amount: int = 1
    workers: tuple[str, ...] = ()
    exclude_workers: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it stands in the queue.

    `open_slots` counts generations still to be offered, `leased` those that workers have, `finished` those handed in,
    `faults` the lost ones.  `reason` says why it failed.  `place` names the lease store that its streaming generations
    have to be popped at: other gateways hand it over as one that does not stream.
    """

    id: str
    ask: Ask
    status: RequestStatus
    open_slots: int
    faults: int
    created_at: float
    expires_at: float
    leased: int = 0
    finished: int = 0
    ended_at: float | None = None
    reason: str = ""
    place: str = ""


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a worker says of itself with each pop: whom it belongs to, what it can do, how much it wants.

    `chat_features` are features and guarantees.  The chat limits hold for chat jobs in place of the two lengths.
    `image_transports`: how images may come to it (`url`, `base64`); none given means both, where it has `vision`.
    """

    name: str
    owner: str
    models: tuple[str, ...]
    max_length: int
    max_context_length: int
    amount: int = 1
    threads: int = 1
    agent: str = ""
    chat_jobs: bool = False
    prompt_jobs: bool = True
    model_id: str | None = None
    chat_features: frozenset[str] = frozenset()
    chat_max_length: int | None = None
    chat_max_context_length: int | None = None
    tools_max_temperature: float | None = None
    image_transports: frozenset[str] = frozenset()

    @property
    def id(self) -> str:
        """The worker's id on the wire: it follows from the name, which is unique."""
        return worker_id(self.name)

    @property
    def offers(self) -> frozenset[str]:
        """What `Ask.features` is held against: features, guarantees and, as `image:…`, image transports."""
        transports = self.image_transports or (("url", "base64") if "vision" in self.chat_features else ())
        return self.chat_features.union(f"image:{name}" for name in transports)


@dataclass(frozen=True, slots=True)
class Generation:
    """One run for a request.

    `model` is the one that the worker was given; `settled` whether it has been paid, with `units`.  `reason` says why
    it was lost.
    """

    id: str
    request: str
    worker: str
    worker_owner: str
    model: str
    status: GenerationStatus
    streams: bool
    popped_at: float
    expires_at: float
    settled: bool = False
    reply: Reply | None = None
    units: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Standing:
    """How a request stands, in short: its status, and which of its generations workers have."""

    status: RequestStatus
    leased: frozenset[str]


@dataclass(frozen=True, slots=True)
class Reply:
    """What a worker hands in.  `content` may be None only beside `tool_calls`."""

    content: str | None
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    state: str = "ok"
    seed: int | None = None
    metadata: list[dict[str, Any]] = field(default_factory=list)

    @property
    def chars(self) -> int:
        """Characters of output, which are what is paid for."""
        return len(self.content or "") + len(self.reasoning)


@dataclass(frozen=True, slots=True)
class Popped:
    """What a pop got: generations, all of one request, or none, and why others were passed over (reason -> count).

    `chat`: the job is handed over as a chat; else a chat job's messages are to be rendered to one prompt.
    """

    given: list[tuple[Generation, Request]]
    skipped: dict[str, int]
    chat: bool = False


@dataclass(frozen=True, slots=True)
class Submitted:
    """What became of a submit: the reward in units, and the request after it."""

    units: int
    request: Request


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker as the database knows it, for people.  `earned` is in units."""

    name: str
    owner: str
    models: tuple[str, ...]
    agent: str
    threads: int
    seen_at: float
    finished: int
    lost: int
    earned: int


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request for who polls it.  `kudos` is what it has cost; `possible`: a worker that is here could take it."""

    request: Request
    generations: list[Generation]
    queue_position: int
    kudos: int
    possible: bool


@dataclass(frozen=True, slots=True)
class Account:
    """An owner's account, in units; it may be below 0."""

    username: str
    kudos: int


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One transfer: `payer` paid `payee` `units` for the generation that `worker` made."""

    generation: str
    payer: str
    payee: str
    units: int
    worker: str
    model: str
    at: float


@dataclass(frozen=True, slots=True)
class Lease:
    """A worker's right to one generation, as it is granted at pop."""

    generation: str
    request: str
    worker: str
    model: str
    owner: str
    key_digest: bytes
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Posted:
    """What became of a post: `cancelled` tells the worker to stop; `renew` that the SQL side is due a renewal."""

    cancelled: bool
    renew: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a request's progress.  `ended`: the generation is over without a reply (seq 0, no content)."""

    generation: str
    seq: int
    content: str
    reasoning: str
    worker: str
    model: str
    ended: bool = False


SignalKind = Literal["done", "failed", "cancelled"]


def worker_id(name: str) -> str:
    """The id of the worker of this name."""
    return str(uuid5(_WORKERS, name))
