"""The fold as JSON: how a store keeps what is left of dropped records."""

from __future__ import annotations

from typing import Any

import orjson

from midstream.records import Choice, Fold, Part, ToolCall


def encode(fold: Fold) -> bytes:
    """Compact JSON of a fold."""
    return orjson.dumps(
        {
            "upto": fold.upto,
            "complete": fold.complete,
            "choices": [[index, _fields(choice)] for index, choice in fold.choices.items()],
            "items": [[part.kind, part.deltas, part.size, part.logprobs] for part in fold.parts],
            "error": fold.error,
            "usage": fold.usage,
            "src": fold.src,
        }
    )


def _fields(choice: Choice) -> dict[str, Any]:
    return {
        "text": choice.text.decode(),
        "reasoning": choice.reasoning.decode(),
        "refusal": choice.refusal.decode(),
        "logprobs": choice.logprobs.decode(),
        "tool_calls": [
            {
                "position": call.position,
                "id": call.id,
                "type": call.type,
                "name": call.name,
                "arguments": call.arguments.decode(),
                "more": call.more,
                "deltas": call.deltas,
                "late": call.late,
            }
            for call in choice.tool_calls
        ],
        "finish_reason": choice.finish_reason,
    }


def decode(data: bytes) -> Fold:
    """The fold that `encode` wrote, here or in a version before.  Raises ValueError, KeyError, TypeError for others."""
    fields = orjson.loads(data)
    return Fold(
        upto=fields["upto"],
        complete=fields["complete"],
        choices={index: _parsed(choice) for index, choice in fields["choices"]},
        parts=[Part(*part) for part in fields["items"]],
        error=fields["error"],
        usage=fields["usage"],
        src=fields.get("src"),
    )


def _parsed(fields: dict[str, Any]) -> Choice:
    return Choice(
        text=bytearray(fields["text"].encode()),
        reasoning=bytearray(fields["reasoning"].encode()),
        refusal=bytearray(fields["refusal"].encode()),
        logprobs=bytearray(fields.get("logprobs", "").encode()),
        tool_calls=[
            ToolCall(**{**call, "arguments": bytearray(call["arguments"].encode())}) for call in fields["tool_calls"]
        ],
        finish_reason=fields["finish_reason"],
    )
