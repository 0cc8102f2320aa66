"""What the pool's routes answer: values to bodies, with every key that existing workers and clients read.

A worker is handed `messages` in a chat job, else a `prompt`, to which a chat is rendered where its worker takes only
prompts (PROTOCOL.md, "Pool").
"""

from __future__ import annotations

from typing import Any, Final

from midstream.pool.payload import TURN, text_of
from midstream.pool.shapes import Account, Ask, Generation, Popped, Request, RequestView, worker_id
from midstream.wire import POOL_LEASE_TERM

# Of the payload where there is no job: existing workers read it before they look at `id`.
_NO_PAYLOAD: Final[dict[str, Any]] = {"prompt": "", "n": 1, "max_length": 80, "max_context_length": 2048}
# What a prompt job has no word for.
_CHAT_ONLY: Final = (
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "reasoning_effort",
    "frequency_penalty",
    "presence_penalty",
)
_ROLES: Final = {
    "system": "System",
    "developer": "System",
    "assistant": "Assistant",
    "tool": "Tool",
    "function": "Tool",
}


def accepted(request: Request, most: int, *, served: bool) -> dict[str, Any]:
    """`async`'s answer: what it will cost at most, and a warning where no worker is there now."""
    body: dict[str, Any] = {"id": request.id, "kudos": most}
    if not served:
        minutes = round((request.expires_at - request.created_at) / 60)
        body["message"] = (
            "No worker that is here now serves this request. "
            f"It will expire in {minutes} minutes unless one comes; change what it asks for to have it sooner."
        )
    return body


# --- pop --------------------------------------------------------------------------------------------------------------


def popped(found: Popped) -> dict[str, Any]:
    """A pop's answer.  All generations of one pop are of one request, and share its payload.

    Where there is nothing, the keys stand all the same: existing workers read them before they look at `id`.
    """
    if not found.given:
        nothing: dict[str, Any] = {"id": None, "ids": [], "model": None, "payload": _NO_PAYLOAD}
        return nothing | {"softprompt": None, "skipped": found.skipped, "messages": []}
    generation, request = found.given[0]
    body = {
        "id": generation.id,
        "ids": [each.id for each, _ in found.given],
        "model": generation.model,
        "ttl": POOL_LEASE_TERM,
        "softprompt": None,
        "skipped": {},
        "messages": [],
    }
    if found.chat:
        body["chat"] = True
    return body | {"payload": _payload(generation, request.ask, chat=found.chat)}


def _payload(generation: Generation, ask: Ask, *, chat: bool) -> dict[str, Any]:
    if chat:
        payload = dict(ask.payload)
    else:
        payload = {**(_as_prompt(ask.payload) if ask.chat else ask.payload), "n": 1}
    if generation.streams:
        payload["stream_progress"] = True
    return payload


def _as_prompt(payload: dict[str, Any]) -> dict[str, Any]:
    """A chat's payload for a worker that takes prompts alone."""
    kept = {name: value for name, value in payload.items() if name not in _CHAT_ONLY}
    return kept | {
        "prompt": rendered(payload["messages"]),
        "stop_sequence": [*payload.get("stop_sequence", ()), TURN],
    }


def rendered(messages: list[dict[str, Any]]) -> str:
    """A chat as one prompt: a transcript that ends where the assistant is to speak, or, if it spoke last, to go on."""
    turns = [
        f"{_ROLES.get(str(message.get('role')), 'User')}: {text_of(message.get('content'))}" for message in messages
    ]
    if messages[-1].get("role") != "assistant":
        turns.append("Assistant:")
    return "\n".join(turns)


# --- status -----------------------------------------------------------------------------------------------------------


def status(view: RequestView) -> dict[str, Any]:
    """How a request stands.  Nothing partial shows here: only replies that are whole."""
    request = view.request
    states = [generation.status for generation in view.generations]
    whole = [] if request.status == "failed" else [each for each in view.generations if each.reply is not None]
    return {
        "finished": states.count("done"),
        "processing": states.count("leased"),
        "restarted": request.faults,
        "waiting": request.open_slots,
        "done": request.status != "waiting",
        "faulted": request.status == "failed",
        "wait_time": 0,
        "queue_position": view.queue_position,
        "kudos": view.kudos,
        "is_possible": view.possible,
        "generations": [_generation(each) for each in whole],
    }


def _generation(generation: Generation) -> dict[str, Any]:
    reply = generation.reply
    assert reply is not None
    body: dict[str, Any] = {
        "text": reply.content or "",
        "seed": reply.seed or 0,
        "worker_id": worker_id(generation.worker),
        "worker_name": generation.worker,
        "model": generation.model,
        "state": reply.state,
        "gen_metadata": reply.metadata,
    }
    if reply.tool_calls:
        body["tool_calls"] = reply.tool_calls
    return body


def account(found: Account) -> dict[str, Any]:
    """`find_user`'s answer."""
    return {"username": found.username, "kudos": found.kudos}
