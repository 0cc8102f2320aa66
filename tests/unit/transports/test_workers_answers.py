"""What the pool's routes answer: jobs as workers get them, statuses as requesters do, errors in the pool's shape."""

from __future__ import annotations

import json
from typing import Any

import pytest

from midstream.errors import BadRequest, ShuttingDown, TooLarge, Unauthorized
from midstream.pool.errors import PoolError, PoolUnavailable, ProgressOutOfSequence
from midstream.pool.shapes import Ask, Generation, Popped, Reply, Request, RequestView, worker_id
from midstream.server.auth import read_keys
from midstream.transports.workers import refusal
from midstream.transports.workers_answers import accepted, popped, rendered, status
from midstream.transports.workers_fields import InvalidFields, Unparsable

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "Look:"}, {"type": "image_url"}, {"type": "text", "text": "?"}],
    },
]


def request(**asked: Any) -> Request:
    fields: dict[str, Any] = {"owner": "ada", "models": ("tiny",), "payload": {"prompt": "p"}, "max_length": 80}
    ask = Ask(**fields | {"max_context_length": 2048} | asked)
    return Request("r", ask, "waiting", 0, 0, 1000.0, 2200.0)


def generation(**known: Any) -> Generation:
    fields: dict[str, Any] = {
        "id": "g",
        "request": "r",
        "worker": "w",
        "worker_owner": "bob",
        "model": "tiny",
        "status": "leased",
    }
    return Generation(**fields | {"streams": False, "popped_at": 0.0, "expires_at": 200.0} | known)


# --- rendering -------------------------------------------------------------------------------------------------------


def test_a_chat_is_rendered_as_a_transcript() -> None:
    assert rendered(MESSAGES) == "System: Be brief.\nUser: Look:\n?\nAssistant:"
    tool: list[dict[str, Any]] = [{"role": "tool", "content": "42"}, {"role": "developer", "content": None}]
    assert rendered(tool) == "Tool: 42\nSystem: \nAssistant:"


def test_a_chat_whose_last_turn_is_the_assistants_is_gone_on_with() -> None:
    last = [*MESSAGES[:1], {"role": "assistant", "content": "Once"}]
    assert rendered(last) == "System: Be brief.\nAssistant: Once"


# --- pop -------------------------------------------------------------------------------------------------------------


def test_a_prompt_job_has_its_parameters_and_no_more() -> None:
    body = popped(Popped([(generation(), request(payload={"prompt": "p", "top_k": 5}))], {}))
    assert body["payload"] == {"prompt": "p", "top_k": 5, "n": 1}
    assert "chat" not in body
    assert (body["id"], body["ids"], body["model"], body["ttl"]) == ("g", ["g"], "tiny", 150)


def test_a_chat_job_is_a_chat_or_a_prompt_rendered_from_it() -> None:
    payload = {
        "messages": MESSAGES[:1],
        "max_length": 80,
        "frequency_penalty": 0.5,
        "stop_sequence": ["#"],
        "seed": 3,
    }
    asked = request(chat=True, payload=payload)
    body = popped(Popped([(generation(streams=True), asked)], {}, chat=True))
    assert body["chat"] is True
    assert body["payload"] == payload | {"stream_progress": True}
    body = popped(Popped([(generation(streams=True), asked)], {}))
    assert "chat" not in body
    assert body["payload"] == {
        "prompt": "System: Be brief.\nAssistant:",
        "n": 1,
        "max_length": 80,
        "stop_sequence": ["#", "\nUser:"],
        "seed": 3,
        "stream_progress": True,
    }
    assert asked.ask.payload == payload


def test_a_pop_whose_grant_was_refused_is_one_that_found_nothing() -> None:
    body = popped(Popped([], {}, chat=True))
    assert body["id"] is None
    assert "chat" not in body


# --- status ----------------------------------------------------------------------------------------------------------


def test_a_failed_request_shows_no_reply() -> None:
    done = generation(status="done", reply=Reply("text"))
    failed = Request("r", request().ask, "failed", 0, 3, 0.0, 1.0)
    body = status(RequestView(failed, [done, generation(status="faulted")], 0, 20, possible=False))
    assert (body["done"], body["faulted"], body["generations"], body["finished"]) == (True, True, [], 1)


def test_a_chats_reply_has_its_tool_calls() -> None:
    reply = Reply(None, tool_calls=[{"id": "c"}])
    done = Request("r", request().ask, "done", 0, 0, 0.0, 1.0)
    (told,) = status(RequestView(done, [generation(status="done", reply=reply)], 0, 20, possible=True))["generations"]
    assert (told["text"], told["tool_calls"]) == ("", [{"id": "c"}])
    assert told["worker_id"] == worker_id("w") != worker_id("W")


def test_a_request_that_nobody_serves_is_warned() -> None:
    assert accepted(request(), 80, served=True) == {"id": "r", "kudos": 80}
    assert "20 minutes" in accepted(request(), 80, served=False)["message"]


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "body"),
    [
        (ProgressOutOfSequence(6), 409, {"rc": "ChatProgressOutOfSequence", "expected": 6}),
        (PoolError(), 500, {"rc": "InternalServerError"}),
        (InvalidFields({"a": "b"}), 400, {"errors": {"a": "b"}}),
        (Unparsable("no"), 400, {}),
        (TooLarge("big"), 413, {"message": "big", "rc": "TooLarge"}),
        (BadRequest("twice"), 400, {"message": "twice", "rc": "BadRequest"}),
        (Unauthorized(), 401, {"message": "unauthorized", "rc": "Unauthorized"}),
    ],
)
def test_every_error_is_a_message_and_a_code(error: Any, code: int, body: dict) -> None:
    response = refusal(error)
    told = json.loads(bytes(response.body))
    assert response.status_code == code
    assert isinstance(told.pop("message"), str)
    assert told == {name: value for name, value in body.items() if name != "message"}
    assert response.headers["cache-control"] == "no-store"


def test_where_waiting_helps_it_says_how_long() -> None:
    assert refusal(PoolUnavailable()).headers["retry-after"] == "1"
    assert refusal(ShuttingDown("bye", retry_after=5)).headers["retry-after"] == "5"
    assert "retry-after" not in refusal(PoolError()).headers


# --- what a lease is bound to ----------------------------------------------------------------------------------------


def test_a_lease_is_bound_to_the_key_that_was_sent(tmp_path: Any) -> None:
    """However it was sent, good or not; two that differ are none."""
    (tmp_path / "keys").write_text("ada:ada-key-1\nada:ada-key-2\n")
    keys = read_keys(tmp_path / "keys")
    sent = keys.digest(None, "ada-key-1")
    assert len(sent) == 32
    assert sent == keys.digest("Bearer ada-key-1", None) == keys.digest("bearer ada-key-1", "ada-key-1")
    assert keys.digest(None, "ada-key-2") != sent
    assert keys.digest("Bearer ada-key-2", "ada-key-1") == keys.digest(None, None) == b""
