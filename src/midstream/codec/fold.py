"""The fold as JSON: how a store keeps what is left of dropped records."""

from __future__ import annotations

from typing import Any

import orjson

from midstream.records import Answer, Fold, ToolCall


def encode(fold: Fold) -> bytes:
    """Compact JSON of a fold."""
    return orjson.dumps(
        {
            "upto": fold.upto,
            "complete": fold.complete,
            "choices": [[choice, _answer(answer)] for choice, answer in fold.choices.items()],
            "items": fold.items,
            "error": fold.error,
            "usage": fold.usage,
        }
    )


def _answer(answer: Answer) -> dict[str, Any]:
    return {
        "text": answer.text.decode(),
        "reasoning": answer.reasoning.decode(),
        "refusal": answer.refusal.decode(),
        "tool_calls": [
            {
                "position": call.position,
                "id": call.id,
                "type": call.type,
                "name": call.name,
                "arguments": call.arguments.decode(),
            }
            for call in answer.tool_calls
        ],
        "finish_reason": answer.finish_reason,
    }


def decode(data: bytes) -> Fold:
    """The fold that `encode` wrote.  Raises ValueError, KeyError or TypeError for anything else."""
    fields = orjson.loads(data)
    return Fold(
        upto=fields["upto"],
        complete=fields["complete"],
        choices={choice: _parsed(answer) for choice, answer in fields["choices"]},
        items=[(kind, deltas) for kind, deltas in fields["items"]],
        error=fields["error"],
        usage=fields["usage"],
    )


def _parsed(fields: dict[str, Any]) -> Answer:
    return Answer(
        text=bytearray(fields["text"].encode()),
        reasoning=bytearray(fields["reasoning"].encode()),
        refusal=bytearray(fields["refusal"].encode()),
        tool_calls=[
            ToolCall(**{**call, "arguments": bytearray(call["arguments"].encode())}) for call in fields["tool_calls"]
        ],
        finish_reason=fields["finish_reason"],
    )
