"""What a job asks of the local server, and what the pool is told in the end."""

from __future__ import annotations

from typing import Any

import pytest

from midstream.records import Chunk, Finish
from midstream.worker.asking import Answer, Task


def task(*, chat: bool = True, **payload: Any) -> Task:
    return Task("job", "pool-model", chat, payload)


def test_a_chat_job_is_asked_as_chat_under_the_local_name() -> None:
    route, body = task(messages=[{"role": "user", "content": "hi"}], max_length=80, temperature=0.5).request("local")
    assert route == "chat"
    assert body == {
        "model": "local",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 80,
        "temperature": 0.5,
    }


def test_a_prompt_job_is_asked_as_a_completion() -> None:
    route, body = task(chat=False, prompt="Once", max_length=80, stop_sequence=["\n"]).request("local")
    assert route == "completions"
    assert body == {"model": "local", "prompt": "Once", "max_tokens": 80, "stop": ["\n"]}


@pytest.mark.parametrize(
    ("name", "idle", "theirs", "value"),
    [
        ("top_k", 0, "top_k", 40),
        ("min_p", 0.0, "min_p", 0.05),
        ("rep_pen", 1.0, "repeat_penalty", 1.1),
        ("top_p", 1, "top_p", 0.9),
        ("presence_penalty", 0, "presence_penalty", 1),
    ],
)
def test_a_parameter_at_the_value_that_changes_nothing_is_left_out_for_strict_servers(
    name: str, idle: Any, theirs: str, value: Any
) -> None:
    assert theirs not in task(**{name: idle}).request("m")[1]
    assert task(**{name: value}).request("m")[1][theirs] == value


def test_temperature_0_is_asked_for() -> None:
    assert task(temperature=0).request("m")[1]["temperature"] == 0


def test_parallel_tool_calls_without_tools_is_not_asked_for() -> None:
    assert "parallel_tool_calls" not in task(parallel_tool_calls=True).request("m")[1]
    assert task(parallel_tool_calls=True, tools=[{}]).request("m")[1]["parallel_tool_calls"] is True


def test_the_answer_is_the_sum_of_what_was_posted() -> None:
    answer = Answer()
    posted = [answer.add(chunk) for chunk in (Chunk("a"), Chunk("", {"reasoning": "hm"}), Chunk("b "))]
    answer.finish = Finish("length", {"prompt_tokens": 3, "completion_tokens": 2})
    body = answer.submit(task())
    assert posted == [("a", ""), ("", "hm"), ("b ", "")]
    assert body["message"] == {"role": "assistant", "content": "ab ", "reasoning_content": "hm"}
    assert (body["finish_reason"], body["prompt_tokens"], body["completion_tokens"]) == ("length", 3, 2)


def test_a_prompt_job_is_handed_in_as_a_generation() -> None:
    answer = Answer()
    answer.add(Chunk("text"))
    answer.finish = Finish("stop")
    assert answer.submit(task(chat=False, seed=7)) == {"id": "job", "generation": "text", "state": "ok", "seed": 7}


def test_a_finish_reason_that_the_pool_does_not_know_is_told_as_the_servers_own() -> None:
    answer = Answer(finish=Finish("eos_" * 20))
    body = answer.submit(task())
    assert body["finish_reason"] == "stop"
    assert body["native_finish_reason"] == ("eos_" * 20)[:32]


@pytest.mark.parametrize(
    "deltas",
    [
        [
            {"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x"'}},
            {"index": 1, "id": "b", "function": {"name": "g", "arguments": "{}"}},
            {"index": 0, "function": {"arguments": ":1}"}},
        ],
        [
            {"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x":1}'}},
            {"index": 0, "id": "b", "function": {"name": "g", "arguments": "{"}},
            {"index": 0, "function": {"arguments": "}"}},
        ],
    ],
    ids=["each has its index", "all have index 0"],
)
def test_tool_calls_are_put_together_from_their_deltas(deltas: list[dict[str, Any]]) -> None:
    answer = Answer()
    for delta in deltas:
        answer.add(Chunk("", {"tool_calls": [delta]}))
    answer.finish = Finish("tool_calls")
    message = answer.submit(task())["message"]
    assert message["content"] is None
    said = {call["id"]: call["function"] for call in message["tool_calls"]}
    assert said == {"a": {"name": "f", "arguments": '{"x":1}'}, "b": {"name": "g", "arguments": "{}"}}
    assert [call["id"] for call in message["tool_calls"]] == ["a", "b"]


def test_a_fault_names_its_job_and_a_prompt_job_has_a_generation_even_then() -> None:
    assert task().fault("generation_error") == {
        "id": "job",
        "state": "faulted",
        "model_id": "pool-model",
        "fault_reason": "generation_error",
    }
    assert task(chat=False).fault("generation_error")["generation"] == ""
