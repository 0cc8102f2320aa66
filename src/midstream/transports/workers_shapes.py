"""What the pool's routes take: bodies to values, or a refusal that names every wrong field (PROTOCOL.md, "Pool").

Existing clients and workers send fields of a public service that this pool has no use for: those that only state a
preference are passed over, those that would change the outcome are refused, so that nobody waits for what never comes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from midstream.codec.text import whole
from midstream.pool.errors import (
    BadPoolRequest,
    ExcessiveStopSequence,
    InvalidJob,
    MissingFullSamplerOrder,
    MissingPrompt,
    NoLease,
    TokenOverflow,
    TooManyStopSequences,
    UnknownRequest,
)
from midstream.pool.shapes import Ask, Declaration, Reply
from midstream.transports.workers_fields import (
    Check,
    Fields,
    InvalidFields,
    a_flag,
    a_list,
    a_number,
    a_text,
    a_tree,
    a_whole,
    an_object,
    anything,
    one_of,
    parse,
    shown,
)
from midstream.wire import MAX_SEQ, POOL_CONTEXTS, POOL_FINISHES, POOL_LENGTHS, POOL_MOST_THREADS

# Tokens: a worker may declare more than any request asks for.
_MOST_DECLARED: Final = 2**31 - 1
_MOST_NAMES: Final = 1000
_A_NAME = a_text(255, 1)
_NAMES = a_list(_A_NAME, _MOST_NAMES)
_MOST_STOPS: Final = 128
_MOST_STOP_CHARS: Final = 2000
# What a KoboldAI-like backend samples by, in an order that must then be whole.
_SAMPLERS: Final = 7

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")

# Sampling parameters of a prompt job; what is not named here is dropped.
_PARAMS: Final[dict[str, Check]] = {
    "temperature": a_number(0, 5),
    "top_p": a_number(0.001, 1),
    "top_k": a_whole(0, 200),
    "top_a": a_number(0, 1),
    "typical": a_number(0, 1),
    "tfs": a_number(0, 1),
    "min_p": a_number(0, 1),
    "rep_pen": a_number(1, 3),
    "rep_pen_range": a_whole(0, 4096),
    "rep_pen_slope": a_number(0, 10),
    "smoothing_factor": a_number(0, 10),
    "dynatemp_range": a_number(0, 5),
    "dynatemp_exponent": a_number(0, 5),
    "sampler_order": a_list(a_whole(0, 100), 20),
    "stop_sequence": a_list(a_text(2**20), 10_000),
    "singleline": a_flag,
    "frmttriminc": a_flag,
    "frmtrmblln": a_flag,
    "frmtrmspch": a_flag,
    "frmtadsnsp": a_flag,
    "use_default_badwordsids": a_flag,
}
# Wishes about the public service's workers, which mean nothing here.
_WISHES: Final = (
    "trusted_workers",
    "validated_backends",
    "slow_workers",
    "extra_slow_workers",
    "disable_batching",
    "allow_downgrade",
)
# What would change the outcome, and why it is refused.
_REFUSED: Final[dict[str, str]] = {
    "softprompt": "this pool has no soft prompts",
    "style": "this pool has no styles",
    "webhook": "this pool calls no webhooks; poll the status",
    "proxied_account": "this pool has no proxied accounts",
    "extra_source_images": "text requests take no images",
}

FAULTS: Final = ("prompt_overflow", "unbuildable_grammar", "tool_violation", "reply_refused", "generation_error")
_FAULTED: Final = "faulted"


def is_id(text: str) -> bool:
    """Whether this can be an id of ours at all: nothing else gets as far as a database."""
    return _UUID.fullmatch(text) is not None


def request_id(text: str) -> str:
    """The id in a status path.  Raises UnknownRequest."""
    if not is_id(text):
        raise UnknownRequest
    return text


# --- a requester's request --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a requester sent.  `dry_run`: he only wants to know what it would cost."""

    ask: Ask
    dry_run: bool

    @property
    def most(self) -> int:
        """What it can cost at most."""
        return self.ask.amount * self.ask.max_length


def wanted(body: dict[str, Any], owner: str) -> Wanted:
    """Read the body of `async`.  Raises InvalidFields, MissingPrompt, TokenOverflow and what else `_refuse` does."""
    fields = Fields(body)
    prompt = fields.take("prompt", a_text(2**31), "")
    models = fields.take("models", _NAMES, [])
    workers = fields.take("workers", a_list(_A_NAME, _MOST_NAMES), [])[:5]
    exclude = fields.take("worker_blacklist", a_flag, False)
    dry_run = fields.take("dry_run", a_flag, False)
    for name in _WISHES:
        fields.take(name, a_flag)
    params = fields.inside("params")
    amount = params.take("n", a_whole(1, 20), 1)
    max_length = params.take("max_length", a_whole(*POOL_LENGTHS), 80)
    context = params.take("max_context_length", a_whole(*POOL_CONTEXTS), 2048)
    sampling = {name: value for name, check in _PARAMS.items() if (value := params.take(name, check)) is not None}
    fields.done()
    _refuse(body, prompt, max_length, context, sampling)
    payload = {"prompt": prompt, "max_length": max_length, "max_context_length": context, **sampling}
    ask = Ask(
        owner=owner,
        models=tuple(models),
        payload=payload,
        max_length=max_length,
        max_context_length=context,
        amount=amount,
        workers=tuple(workers),
        exclude_workers=exclude,
    )
    return Wanted(ask, dry_run)


def _refuse(body: dict[str, Any], prompt: str, max_length: int, context: int, sampling: dict[str, Any]) -> None:
    for name, reason in _REFUSED.items():
        if body.get(name):
            raise BadPoolRequest(f"{name}: {reason}")
    if not prompt.strip():
        raise MissingPrompt
    if max_length > context:
        raise TokenOverflow
    if 0 < len(sampling.get("sampler_order", ())) < _SAMPLERS:
        raise MissingFullSamplerOrder
    stops = sampling.get("stop_sequence", ())
    if len(stops) > _MOST_STOPS:
        raise TooManyStopSequences
    if any(len(stop) > _MOST_STOP_CHARS for stop in stops):
        raise ExcessiveStopSequence


# --- a worker's pop ---------------------------------------------------------------------------------------------------


def declaration(body: dict[str, Any], owner: str, agent: str) -> Declaration:
    """Read the body of a pop.  `agent` is that of the header, for workers that name none in the body.

    Raises InvalidFields.
    """
    fields = Fields(body)
    name = fields.take("name", a_text(100, 1), "", required=True)
    models = fields.take("models", a_list(_A_NAME, _MOST_NAMES, 1), [], required=True)
    declared = Declaration(
        name=name,
        owner=owner,
        models=tuple(models),
        max_length=fields.take("max_length", a_whole(1, _MOST_DECLARED), 512),
        max_context_length=fields.take("max_context_length", a_whole(1, _MOST_DECLARED), 2048),
        amount=fields.take("amount", a_whole(1, 20), 1),
        threads=fields.take("threads", a_whole(1, POOL_MOST_THREADS), 1),
        agent=fields.take("bridge_agent", a_text(1000), agent)[:255],
        **_chat_declaration(fields, models),
    )
    for known, check in _POP_WISHES.items():
        fields.take(known, check)
    fields.done()
    return declared


# Of the public service: checked, so that a worker hears of its mistake, and passed over.
_POP_WISHES: Final[dict[str, Check]] = {
    "softprompts": a_list(anything, _MOST_NAMES),
    "priority_usernames": a_list(_A_NAME, _MOST_NAMES),
    "nsfw": a_flag,
    "require_upfront_kudos": a_flag,
    "extra_slow_worker": a_flag,
}


def _chat_declaration(fields: Fields, models: list[str]) -> dict[str, Any]:
    """What a worker can do with chats; nothing where it does not say that it takes any."""
    chat = fields.take("chat_jobs", a_flag, False)
    prompts = fields.take("prompt_jobs", a_flag, True)
    model_id = fields.take("model_id", _A_NAME)
    features = fields.take("chat_features", a_list(a_text(64, 1), 100), [])
    limits = fields.inside("chat_limits")
    length = limits.take("max_length", a_whole(1, _MOST_DECLARED))
    context = limits.take("max_context_length", a_whole(1, _MOST_DECLARED))
    hottest = limits.take("tools_max_temperature", a_number(0, 100))
    images = fields.take("image_transports", a_list(one_of("url", "base64", "messages_url"), 10), [])
    if model_id is not None and model_id not in models:
        fields.refuse("model_id", f"{shown(model_id)} is not one of the worker's models")
    if not chat and not prompts:
        fields.refuse("prompt_jobs", "a worker that takes neither prompt jobs nor chat jobs takes none")
    if not chat:
        return {"prompt_jobs": prompts}
    return {
        "chat_jobs": True,
        "prompt_jobs": prompts,
        "model_id": model_id,
        "chat_features": frozenset(features),
        "chat_max_length": length,
        "chat_max_context_length": context,
        "tools_max_temperature": hottest,
        "image_transports": frozenset(images),
    }


# --- a worker's progress ----------------------------------------------------------------------------------------------


def progress(raw: bytes) -> tuple[str, int, str, str]:
    """Read a post: generation, seq, content, reasoning.  Halves of surrogate pairs stay: a worker may cut there.

    Raises Unparsable, InvalidFields, NoLease (for what is no id of ours).
    """
    fields = parse(raw, mend=False)
    generation, seq, content = fields.get("id"), fields.get("seq"), fields.get("content")
    reasoning = fields.get("reasoning_content")
    # Thousands of these come each second: the table below says what is wrong, once something is.
    if content is None:
        content = ""
    if reasoning is None:
        reasoning = ""
    if (
        type(generation) is not str
        or type(seq) is not int
        or not 0 <= seq <= MAX_SEQ
        or type(content) is not str
        or type(reasoning) is not str
    ):
        raise _wrong_post(fields)
    if _UUID.fullmatch(generation) is None:
        raise NoLease
    return generation, seq, _without_nul(content), _without_nul(reasoning)


def _wrong_post(given: dict[str, Any]) -> InvalidFields:
    fields = Fields(given)
    fields.take("id", a_text(2**31), required=True)
    fields.take("seq", a_whole(0, MAX_SEQ), required=True)
    fields.take("content", a_text(2**31))
    fields.take("reasoning_content", a_text(2**31))
    return InvalidFields(fields.errors)


def _without_nul(text: str) -> str:
    """NUL is replaced and not refused: the text is paid for, and PostgreSQL cannot store it."""
    return text.replace("\0", "\ufffd") if "\0" in text else text


# --- a worker's submit ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Handed:
    """What a worker hands in: a reply, or why there is none (`fault`)."""

    generation: str
    reply: Reply | None
    fault: str = ""


def handed(body: dict[str, Any]) -> Handed:
    """Read the body of a submit.  Raises InvalidFields, InvalidJob (for what is no id of ours)."""
    if (
        "id" in body and body["id"] is None
    ):  # an existing worker's, which repeats for ever what is not answered with 404
        raise InvalidJob
    fields = Fields(body)
    generation = fields.take("id", a_text(2**31), "", required=True)
    state = fields.take("state", one_of("ok", "censored", "csam", _FAULTED), "ok")
    fault = fields.take("fault_reason", a_text(255), "generation_error")
    fields.take("model_id", _A_NAME)
    faulted = state == _FAULTED
    reply = None if faulted else _reply(fields, body, state)
    fields.done()
    if not is_id(generation):
        raise InvalidJob
    return Handed(generation, reply, whole(_without_nul(fault)) if faulted else "")


def _reply(fields: Fields, body: dict[str, Any], state: str) -> Reply:
    seed = fields.take("seed", a_whole(-(2**63), 2**63 - 1))
    metadata = fields.take("gen_metadata", a_list(a_tree, 50), [])
    finish = fields.take("finish_reason", one_of(*POOL_FINISHES))
    fields.take("native_finish_reason", a_text(32))
    usage = _usage(fields)
    if body.get("message") is not None:
        content, reasoning, calls = _message(fields, body)
    else:
        content = fields.take("generation", a_text(2**31), "", required=True)
        reasoning, calls = "", None
    return Reply(
        content=None if content is None else _without_nul(content),
        reasoning=_without_nul(reasoning),
        tool_calls=calls,
        finish_reason=finish,
        usage=usage,
        state=state,
        seed=seed,
        metadata=_stored(metadata),
    )


def _message(fields: Fields, body: dict[str, Any]) -> tuple[str | None, str, list[dict[str, Any]] | None]:
    """A chat job's reply: content, reasoning, tool calls.  Content may be missing only beside tool calls."""
    if body.get("generation") is not None:
        fields.refuse("generation", "a reply is either 'generation' or 'message'")
    if (complaint := an_object(body["message"])) is not None:
        fields.refuse("message", complaint)
        return "", "", None
    message = fields.inside("message")
    message.take("role", one_of("assistant"))
    calls = message.take("tool_calls", a_list(a_tree, 128, 1))
    content = message.take("content", a_text(2**31), required=calls is None)
    return content, message.take("reasoning_content", a_text(2**31), ""), _stored(calls)


def _usage(fields: Fields) -> dict[str, Any] | None:
    """Tokens as the worker counted them, in the words of a `done` record; they pay for nothing."""
    count = a_whole(0, _MOST_DECLARED)
    prompt, completion = fields.take("prompt_tokens", count), fields.take("completion_tokens", count)
    reasoning = fields.take("reasoning_tokens", count)
    if prompt is None or completion is None:
        return None
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return usage if reasoning is None else usage | {"completion_tokens_details": {"reasoning_tokens": reasoning}}


def _stored(value: Any) -> Any:
    """The value without NUL anywhere."""
    if type(value) is str:
        return _without_nul(value)
    if type(value) is list:
        return [_stored(inner) for inner in value]
    if type(value) is dict:
        return {_without_nul(name): _stored(inner) for name, inner in value.items()}
    return value
