"""Who may have which job.  Pure: no database, no clock.

`unmet` is the rule.  A pop asks the database for the first job that fits, with the same rule as a WHERE clause over
`bounds` of the worker (`queries.py`); a test holds the two against each other.

A chat job goes to a worker that has declared chat jobs and every feature that the job needs, within its chat limits.
One that needs no feature may also go to a worker that takes prompts: its messages are rendered to one prompt then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from midstream.pool.shapes import Ask, Declaration

# In a bit mask in the database: the order is part of its schema.  Only ever append.
FEATURES = (
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "vision",
    "tools",
    "json_object",
    "json_schema",
    "tools_with_response_format",
    "reasoning_effort",
    "tool_choice_enforced",
    "single_tool_call_enforced",
    "structured_output_enforced",
    "prompt_overflow_refused",
    "image:url",
    "image:base64",
)
_BITS = {name: 1 << at for at, name in enumerate(FEATURES)}
_ALL = (1 << len(FEATURES)) - 1
_NO_LENGTH = -1


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of a worker.  `tools_temperature` is None where there are no tools."""

    models: tuple[str, ...]
    max_length: int
    max_context_length: int
    chat: bool = False
    features: frozenset[str] = frozenset()
    tools_temperature: float | None = None
    workers: tuple[str, ...] = ()
    exclude_workers: bool = False


def demand(ask: Ask) -> Demand:
    """What the ask demands."""
    temperature = ask.payload.get("temperature", 1) if ask.payload.get("tools") else None
    return Demand(
        ask.models,
        ask.max_length,
        ask.max_context_length,
        ask.chat,
        ask.features,
        float(temperature) if temperature is not None else None,
        ask.workers,
        ask.exclude_workers,
    )


def unmet(demand: Demand, worker: Declaration) -> str | None:
    """Why the worker may not have the job, as `skipped` names it; None where it may.

    `models`, `worker_id` (the requester's list), `max_length`, `max_context_length`, and for chat jobs `chat_jobs`
    (none are taken), `chat_features`, `chat_limits` (temperature with tools); `prompt_jobs` where only chats are taken.
    """
    if demand.models and not set(demand.models).intersection(worker.models):
        return "models"
    if demand.workers and demand.exclude_workers is not set(demand.workers).isdisjoint((worker.name, worker.id)):
        return "worker_id"
    as_prompt = _unmet_as_prompt(demand, worker)
    if as_prompt is None or not demand.chat:
        return as_prompt
    as_chat = _unmet_as_chat(demand, worker)
    # Of two ways that are closed, the one is named that the worker meant to take.
    return as_chat if as_chat is None or worker.chat_jobs or not worker.prompt_jobs else as_prompt


def _unmet_as_prompt(demand: Demand, worker: Declaration) -> str | None:
    if not worker.prompt_jobs:
        return "prompt_jobs"
    if demand.features:
        return "chat_jobs"
    return _too_long(demand, worker.max_length, worker.max_context_length)


def _unmet_as_chat(demand: Demand, worker: Declaration) -> str | None:
    if not worker.chat_jobs:
        return "chat_jobs"
    if not demand.features <= worker.offers:
        return "chat_features"
    if demand.tools_temperature is not None and demand.tools_temperature > _hottest(worker):
        return "chat_limits"
    return _too_long(demand, *chat_lengths(worker))


def _too_long(demand: Demand, max_length: int, max_context_length: int) -> str | None:
    if demand.max_length > max_length:
        return "max_length"
    return "max_context_length" if demand.max_context_length > max_context_length else None


def _hottest(worker: Declaration) -> float:
    limit = worker.tools_max_temperature
    return math.inf if limit is None else limit


def chat_lengths(worker: Declaration) -> tuple[int, int]:
    """The longest reply and context that the worker takes in a chat job."""
    reply, context = worker.chat_max_length, worker.chat_max_context_length
    return (
        worker.max_length if reply is None else reply,
        worker.max_context_length if context is None else context,
    )


def as_chat(ask: Ask, worker: Declaration) -> bool:
    """Whether a job that fits is handed over as a chat, and not as a prompt rendered from it."""
    return ask.chat and _unmet_as_chat(demand(ask), worker) is None


def choose_model(ask: Ask, worker: Declaration) -> str:
    """The model that the worker is to run: of those asked for, the one it has loaded, or the first it offers."""
    asked = set(ask.models)
    offered = worker.models if worker.model_id is None else (worker.model_id, *worker.models)
    return next((model for model in offered if not asked or model in asked), "")


def mask(features: Iterable[str]) -> int:
    """Features as a bit mask.  Raises ValueError for one that is not in `FEATURES`."""
    total = 0
    for name in features:
        if name not in _BITS:
            raise ValueError(f"{name!r} is no feature of chat jobs")
        total |= _BITS[name]
    return total


def unmask(bits: int) -> frozenset[str]:
    """The features of a bit mask."""
    return frozenset(name for name, bit in _BITS.items() if bits & bit)


def bounds(worker: Declaration) -> dict[str, Any]:
    """The worker's side of the WHERE clause.  A way that it does not take has a length below every job's."""
    chat_length, chat_context = chat_lengths(worker)
    return {
        "models": list(worker.models),
        "names": [worker.name, worker.id],
        "prompt_length": _column(worker.max_length) if worker.prompt_jobs else _NO_LENGTH,
        "prompt_context": _column(worker.max_context_length),
        "chat_length": _column(chat_length) if worker.chat_jobs else _NO_LENGTH,
        "chat_context": _column(chat_context),
        "lacks": _ALL & ~mask(worker.offers.intersection(FEATURES)),
        "tools_temperature": _hottest(worker),
    }


def _column(length: int) -> int:
    """A length as the database can hold it against a column: workers say what they like."""
    return max(_NO_LENGTH, min(length, 2**31 - 1))


def needs(payload: dict[str, Any], *, strict: bool = False) -> frozenset[str]:
    """The features that a worker must have declared for this chat payload.

    `strict` is the conformance of the same name: the guarantees too, and every parameter that would be passed over in
    silence.  Otherwise (best effort) only that without which the reply would be of another kind.
    """
    found = _kinds(payload)
    return found | _promises(payload, found) if strict else found


def _kinds(payload: dict[str, Any]) -> frozenset[str]:
    found = _images(payload.get("messages") or [])
    kind = (payload.get("response_format") or {}).get("type")
    if kind in ("json_object", "json_schema"):
        found.add(kind)
    if payload.get("tools"):
        found.add("tools")
        if "json_object" in found or "json_schema" in found:
            found.add("tools_with_response_format")
    return frozenset(found)


def _images(messages: list[dict[str, Any]]) -> set[str]:
    found = set()
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part.get("type") == "image_url":
                image = part.get("image_url")
                url = image.get("url", "") if isinstance(image, dict) else str(image)
                found |= {"vision", "image:base64" if url.startswith("data:") else "image:url"}
    return found


def _promises(payload: dict[str, Any], kinds: frozenset[str]) -> frozenset[str]:
    found = {"prompt_overflow_refused"}
    if payload.get("seed") is not None:
        found.add("seed")
    if payload.get("reasoning_effort") is not None:
        found.add("reasoning_effort")
    found.update(name for name in ("presence_penalty", "frequency_penalty") if payload.get(name))
    if "tools" in kinds:
        if payload.get("tool_choice", "auto") not in ("auto", "none"):
            found.add("tool_choice_enforced")
        if payload.get("parallel_tool_calls") is False:
            found.add("single_tool_call_enforced")
    if "json_object" in kinds or "json_schema" in kinds:
        found.add("structured_output_enforced")
    return frozenset(found)
