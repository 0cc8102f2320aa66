"""What a job asks of the local server, and what the pool is told in the end (PROTOCOL.md, "Pool"): no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from midstream.codec.openai import Route
from midstream.codec.pieces import merge_call, pieces, text_of
from midstream.records import Chunk, Finish, ToolCall
from midstream.wire import POOL_FINISHES

# A job's parameter -> what OpenAI-compatible servers call it.
_SAME: Final = {
    "max_length": "max_tokens",
    "stop_sequence": "stop",
    "temperature": "temperature",
    "top_p": "top_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "seed": "seed",
    "tools": "tools",
    "tool_choice": "tool_choice",
    "parallel_tool_calls": "parallel_tool_calls",
    "response_format": "response_format",
    "reasoning_effort": "reasoning_effort",
    "top_k": "top_k",
    "min_p": "min_p",
    "rep_pen": "repeat_penalty",
}
# Not every server knows these; at these values they change nothing, and are left out.
_IDLE: Final[dict[str, Any]] = {
    "top_k": 0,
    "min_p": 0,
    "rep_pen": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_p": 1,
}


@dataclass(frozen=True, slots=True)
class Task:
    """One job as it was popped.  `model` is the pool's name for the model, `payload` as PROTOCOL.md has it."""

    id: str
    model: str
    chat: bool
    payload: Mapping[str, Any]

    @property
    def streams(self) -> bool:
        """Whether somebody reads along."""
        return self.payload.get("stream_progress") is True

    @property
    def max_length(self) -> int:
        length = self.payload.get("max_length")
        return length if type(length) is int and length > 0 else 512

    def request(self, local_model: str) -> tuple[Route, dict[str, Any]]:
        """The local server's route and body."""
        payload = self.payload
        body: dict[str, Any] = {"model": local_model}
        for name, theirs in _SAME.items():
            value = payload.get(name)
            if value is None or value == [] or (name in _IDLE and value == _IDLE[name]):
                continue
            body[theirs] = value
        if "tools" not in body:
            body.pop("parallel_tool_calls", None)
            body.pop("tool_choice", None)
        if self.chat:
            return "chat", {**body, "messages": payload.get("messages", [])}
        return "completions", {**body, "prompt": payload.get("prompt", "")}

    def fault(self, reason: str) -> dict[str, Any]:
        """The submit that gives the job back.  Prompt jobs want a `generation` even then."""
        told: dict[str, Any] = {"id": self.id, "state": "faulted"}
        if self.chat:
            return told | {"model_id": self.model, "fault_reason": reason}
        return told | {"generation": "", "seed": -1}


@dataclass(slots=True)
class Answer:
    """What the local server has said so far."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    finish: Finish | None = None
    tokens: int = 0

    def add(self, chunk: Chunk) -> tuple[str, str]:
        """Take a chunk; returns its text and reasoning."""
        more = chunk.more or {}
        reasoning = text_of(more.get("reasoning"))
        self.tokens += 1
        self.content.append(chunk.delta)
        self.reasoning.append(reasoning)
        for piece in pieces({"tool_calls": more.get("tool_calls")}):
            merge_call(self.calls, piece)
        return chunk.delta, reasoning

    def submit(self, task: Task) -> dict[str, Any]:
        """The body that hands the whole answer in."""
        content, reasoning = "".join(self.content), "".join(self.reasoning)
        if not task.chat:
            return {"id": task.id, "generation": content, "state": "ok", "seed": _seed(task)}
        calls = [_call(call, at) for at, call in enumerate(self.calls)]
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        if calls:
            message["tool_calls"] = calls
        if reasoning:
            message["reasoning_content"] = reasoning
        native = (self.finish.finish_reason if self.finish else None) or "stop"
        body: dict[str, Any] = {
            "id": task.id,
            "model_id": task.model,
            "message": message,
            "finish_reason": native if native in POOL_FINISHES else "stop",
            "native_finish_reason": native[:32],
        }
        return body | _counted(self.finish.usage if self.finish else None)


def _call(call: ToolCall, at: int) -> dict[str, Any]:
    """Some local servers give their calls no ids, and whoever answers a call has to name it."""
    function = {"name": call.name, "arguments": call.arguments.decode()}
    return {"id": call.id or f"call_{at}", "type": call.type, "function": function}


def _seed(task: Task) -> int:
    seed = task.payload.get("seed")
    return seed if type(seed) is int else 0


def _counted(usage: Mapping[str, Any] | None) -> dict[str, int]:
    told = {name: (usage or {}).get(name) for name in ("prompt_tokens", "completion_tokens")}
    details = (usage or {}).get("completion_tokens_details")
    told["reasoning_tokens"] = details.get("reasoning_tokens") if isinstance(details, dict) else None
    return {name: count for name, count in told.items() if type(count) is int and count >= 0}
