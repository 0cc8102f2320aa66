"""Who may have which job: the rule, and that the database chooses by the same one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from midstream.pool import matching
from midstream.pool.jobs import Jobs
from midstream.pool.matching import Demand, needs, unmet
from midstream.pool.shapes import Ask, Declaration, worker_id
from midstream.testing.clock import ManualClock
from tests.postgres import DATABASES, database_url

PROMPT = Demand(models=("small",), max_length=100, max_context_length=2048)
CHAT = replace(PROMPT, chat=True)
WORKER = Declaration("home", "bob", ("small", "large"), max_length=512, max_context_length=4096)
CHATTER = replace(WORKER, chat_jobs=True, prompt_jobs=False, chat_features=frozenset({"tools", "json_object"}))


def test_a_job_within_everything_declared_fits() -> None:
    assert unmet(PROMPT, WORKER) is None
    assert unmet(CHAT, CHATTER) is None


@pytest.mark.parametrize(
    ("demand", "reason"),
    [
        (replace(PROMPT, models=("other",)), "models"),
        (replace(PROMPT, max_length=513), "max_length"),
        (replace(PROMPT, max_context_length=4097), "max_context_length"),
        (replace(PROMPT, workers=("elsewhere",)), "worker_id"),
        (replace(PROMPT, workers=("home",), exclude_workers=True), "worker_id"),
        (replace(CHAT, features=frozenset({"tools"})), "chat_jobs"),
        (replace(PROMPT, models=()), None),  # any model will do
        (replace(PROMPT, models=("other", "large")), None),
        (replace(PROMPT, max_length=512, max_context_length=4096), None),
        (replace(PROMPT, workers=("elsewhere", "home")), None),
        (replace(PROMPT, workers=(worker_id("home"),)), None),  # its id says the same as its name
        (replace(PROMPT, workers=("elsewhere",), exclude_workers=True), None),
        (replace(PROMPT, exclude_workers=True), None),  # nobody is excluded
        (CHAT, None),  # its messages are rendered to a prompt
    ],
)
def test_what_a_worker_for_prompts_may_have(demand: Demand, reason: str | None) -> None:
    assert unmet(demand, WORKER) == reason


@pytest.mark.parametrize(
    ("demand", "reason"),
    [
        (PROMPT, "prompt_jobs"),
        (replace(CHAT, features=frozenset({"seed"})), "chat_features"),
        (replace(CHAT, features=frozenset({"tools", "json_object"})), None),
        (replace(CHAT, max_length=512), None),
        (replace(CHAT, max_length=513), "max_length"),
        (replace(CHAT, max_context_length=4097), "max_context_length"),
        (replace(CHAT, tools_temperature=99.0), None),  # it named no limit
    ],
)
def test_what_a_worker_for_chats_may_have(demand: Demand, reason: str | None) -> None:
    assert unmet(demand, CHATTER) == reason


def test_chat_limits_stand_in_for_the_lengths_in_chats_alone() -> None:
    worker = replace(CHATTER, prompt_jobs=True, chat_max_length=50, chat_max_context_length=1024)
    assert unmet(replace(CHAT, features=frozenset({"tools"})), worker) == "max_length"
    assert unmet(PROMPT, worker) is None
    assert unmet(CHAT, worker) is None  # as a prompt
    ask = Ask("alice", (), {}, 50, 1024, chat=True)
    assert matching.as_chat(ask, worker)
    assert not matching.as_chat(replace(ask, max_length=51), worker)


def test_tools_hotter_than_the_workers_limit_are_not_for_it() -> None:
    worker = replace(CHATTER, tools_max_temperature=0.0)
    assert unmet(replace(CHAT, tools_temperature=0.0), worker) is None
    assert unmet(replace(CHAT, tools_temperature=0.1), worker) == "chat_limits"
    assert unmet(CHAT, worker) is None


def test_images_go_to_workers_that_take_them_the_way_they_come() -> None:
    by_url = replace(CHAT, features=frozenset({"vision", "image:url"}))
    sees = replace(CHATTER, chat_features=frozenset({"vision"}), image_transports=frozenset({"base64"}))
    assert unmet(by_url, sees) == "chat_features"
    assert unmet(by_url, replace(sees, image_transports=frozenset({"url"}))) is None
    assert unmet(by_url, CHATTER) == "chat_features"


def test_a_pop_without_chat_jobs_withdraws_what_was_declared_for_chats() -> None:
    withdrawn = replace(CHATTER, chat_jobs=False)
    assert unmet(CHAT, withdrawn) == "chat_jobs"


def test_the_model_is_the_one_that_the_worker_has_loaded_where_that_is_asked_for() -> None:
    ask = Ask("alice", ("large", "small"), {}, 100, 2048)
    assert matching.choose_model(ask, WORKER) == "small"
    assert matching.choose_model(ask, replace(WORKER, model_id="large")) == "large"
    assert matching.choose_model(replace(ask, models=("small",)), replace(WORKER, model_id="large")) == "small"
    assert matching.choose_model(replace(ask, models=()), WORKER) == "small"


TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}


@pytest.mark.parametrize(
    ("payload", "kinds", "promises"),
    [
        ({}, set(), set()),
        ({"seed": 0}, set(), {"seed"}),
        ({"presence_penalty": 0, "frequency_penalty": 0.5}, set(), {"frequency_penalty"}),
        ({"reasoning_effort": "low"}, set(), {"reasoning_effort"}),
        ({"response_format": {"type": "text"}}, set(), set()),
        ({"response_format": {"type": "json_object"}}, {"json_object"}, {"structured_output_enforced"}),
        ({"response_format": {"type": "json_schema"}}, {"json_schema"}, {"structured_output_enforced"}),
        (TOOLS, {"tools"}, set()),
        (TOOLS | {"tool_choice": "auto"}, {"tools"}, set()),
        (TOOLS | {"tool_choice": "required"}, {"tools"}, {"tool_choice_enforced"}),
        (TOOLS | {"parallel_tool_calls": False}, {"tools"}, {"single_tool_call_enforced"}),
        (
            TOOLS | {"response_format": {"type": "json_object"}},
            {"tools", "json_object", "tools_with_response_format"},
            {"structured_output_enforced"},
        ),
        ({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}]}, set(), set()),
        (
            {"messages": [{"content": [{"type": "text"}, {"type": "image_url", "image_url": {"url": "https://x/y"}}]}]},
            {"vision", "image:url"},
            set(),
        ),
        (
            {"messages": [{"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}]},
            {"vision", "image:base64"},
            set(),
        ),
    ],
)
def test_what_a_chat_payload_needs(payload: dict[str, Any], kinds: set[str], promises: set[str]) -> None:
    assert needs(payload) == kinds
    assert needs(payload, strict=True) == kinds | promises | {"prompt_overflow_refused"}
    assert matching.unmask(matching.mask(needs(payload, strict=True))) == needs(payload, strict=True)


def test_a_feature_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="'telepathy' is no feature"):
        matching.mask({"telepathy"})


def test_the_bits_of_features_are_those_in_released_databases() -> None:
    """They are part of the schema: new ones go to the end."""
    assert matching.mask({"seed"}) == 1
    assert matching.mask({"tools"}) == 16
    assert matching.mask({"prompt_overflow_refused"}) == 4096
    assert matching.mask({"image:base64"}) == 16384


ONE_MODEL_MORE = (*(f"m{number}" for number in range(20)), "small")  # than are sought one by one
few_models = st.sets(st.sampled_from(("small", "large", "other", "")), max_size=2).map(sorted).map(tuple)
few_lengths = st.sampled_from((16, 50, 100, 512, 2**31 - 1))
few_features = st.sets(st.sampled_from(("seed", "tools", "vision", "image:url")), max_size=2).map(frozenset)


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    chat = draw(st.booleans())
    tools = draw(st.sampled_from(({}, TOOLS)))
    payload = tools | draw(st.sampled_from(({}, {"temperature": 0.5}, {"temperature": 2})))
    return Ask(
        owner=draw(st.sampled_from(("alice", "bob"))),
        models=draw(few_models),
        payload=payload,
        max_length=draw(few_lengths),
        max_context_length=draw(few_lengths),
        chat=chat,
        features=draw(few_features) if chat else frozenset(),
        workers=draw(st.sampled_from(((), ("home",), ("elsewhere",), (worker_id("home"), "elsewhere")))),
        exclude_workers=draw(st.booleans()),
    )


@st.composite
def workers(draw: st.DrawFn) -> Declaration:
    return Declaration(
        name=draw(st.sampled_from(("home", "elsewhere"))),
        owner="bob",
        models=draw(few_models | st.sampled_from((("",), ("large", "", "large"), ONE_MODEL_MORE))),
        max_length=draw(few_lengths | st.just(10**30)),
        max_context_length=draw(few_lengths | st.just(-(10**30))),
        chat_jobs=draw(st.booleans()),
        prompt_jobs=draw(st.booleans()),
        chat_features=draw(few_features),
        chat_max_length=draw(st.none() | few_lengths),
        chat_max_context_length=draw(st.none() | few_lengths),
        tools_max_temperature=draw(st.sampled_from((None, 0.0, 0.5, 1.0))),
        image_transports=draw(st.sampled_from((frozenset(), frozenset({"url"})))),
    )


@pytest.fixture(params=DATABASES)
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[asyncio.Runner, Jobs]]:
    """A queue that is empty, on a database of each kind, and what runs its verbs."""
    with asyncio.Runner() as runner:
        jobs = Jobs(database_url(request.param, tmp_path), ManualClock())
        runner.run(jobs.open())
        yield runner, jobs
        runner.run(jobs.close())


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(asks(), min_size=1, max_size=4), workers())
def test_the_database_chooses_by_the_rule(
    queue: tuple[asyncio.Runner, Jobs], asked: list[Ask], worker: Declaration
) -> None:
    """Its owner's own first, then the oldest, of those that the rule lets it have; else every reason is counted."""
    runner, jobs = queue

    async def check() -> None:
        requests = [await jobs.enqueue(ask) for ask in asked]
        try:
            reasons = [unmet(matching.demand(ask), worker) for ask in asked]
            fit = [request for request, reason in zip(requests, reasons, strict=True) if reason is None]
            popped = await jobs.pop(worker)
            given = [request.id for _, request in popped.given]
            assert given == [one.id for one in sorted(fit, key=lambda one: one.ask.owner != worker.owner)][:1]
            if not fit:
                assert popped.skipped == {reason: reasons.count(reason) for reason in set(reasons)}
        finally:
            for request in requests:
                await jobs.cancel(request.id)

    runner.run(check())
