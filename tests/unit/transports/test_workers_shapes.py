"""What the pool's routes take and refuse: every field, every bound, every rule between fields."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from midstream.pool.errors import InvalidJob, NoLease, NulByteInPayload, PoolError, UnknownRequest
from midstream.transports.workers_fields import MISSING, InvalidFields, Unparsable, holds_nul, parse
from midstream.transports.workers_shapes import declaration, handed, progress, request_id, wanted

ID = "0b0e6f5e-6f0e-4c5e-8f44-0d6c1b1f5a01"
POP: dict[str, Any] = {"name": "worker", "models": ["tiny"]}


def complaints(call: Any, *arguments: Any) -> dict[str, str]:
    with pytest.raises(InvalidFields) as refused:
        call(*arguments)
    assert refused.value.status == 400
    assert refused.value.body() == {"message": "Input payload validation failed", "errors": refused.value.errors}
    return refused.value.errors


def refused(call: Any, *arguments: Any) -> tuple[int, str]:
    with pytest.raises(PoolError) as error:
        call(*arguments)
    return error.value.status, error.value.rc


# --- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[1]",
        b'"text"',
        b"null",
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":1e999}',
        b"\xff{}",
        b'{"a":"\xff"}',
        b'{"a":' * 2000 + b"1" + b"}" * 2000,
        b'{"a":"\\ud800", "b":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"a":"\\ud800","b":NaN}',
    ],
)
def test_what_is_no_json_object_is_refused_with_a_message_alone(raw: bytes) -> None:
    for mend in (True, False):
        if raw == b'{"a":1e999}' and not mend:
            continue
        with pytest.raises(Unparsable) as error:
            parse(raw, mend=mend)
        assert error.value.status == 400
        assert error.value.body().keys() == {"message"}


def test_half_a_surrogate_pair_becomes_a_replacement_or_stays_as_asked() -> None:
    raw = b'{"a":"x\\ud83d","b":"\\ud83d\\ude00"}'
    assert parse(raw) == {"a": "x\ufffd", "b": "\U0001f600"}
    assert parse(raw, mend=False) == {"a": "x\ud83d", "b": "\U0001f600"}


def test_a_nul_is_found_wherever_it_stands() -> None:
    """Where none may stand; that its escape does is not enough, since a backslash before it may be a backslash."""
    for body in ({"a": [{"b": "x\0"}]}, {"a\0": 1}, {"name": "\0"}):
        raw = json.dumps(body).encode()
        with pytest.raises(NulByteInPayload) as error:
            parse(raw, nul=False)
        assert (error.value.status, error.value.rc) == (400, "NulByteInPayload")
        assert parse(raw) == body
    for good in ({"a": ["x", 1, None, {"b": True}]}, {"a": "\\u0000"}):
        assert parse(json.dumps(good).encode(), nul=False) == good
    deep: Any = "\0"
    for _ in range(100_000):
        deep = [deep]
    assert holds_nul(deep)


# --- async -----------------------------------------------------------------------------------------------------------


def test_a_request_with_a_prompt_alone_gets_the_defaults() -> None:
    want = wanted({"prompt": "Once"}, "ada")
    assert not want.dry_run
    assert want.ask.owner == "ada"
    assert want.ask.models == ()
    assert (want.ask.max_length, want.ask.max_context_length, want.ask.amount) == (80, 2048, 1)
    assert want.ask.payload == {"prompt": "Once", "max_length": 80, "max_context_length": 2048}
    assert not want.ask.streams
    assert not want.ask.chat
    assert want.most == 80


def test_known_parameters_reach_the_worker_and_others_are_dropped() -> None:
    params = {
        "n": 3,
        "max_length": 100,
        "max_context_length": 4096,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "rep_pen": 1.1,
        "sampler_order": [6, 0, 1, 3, 4, 2, 5],
        "stop_sequence": ["\n"],
        "singleline": True,
        "steps": 30,
        "stream_progress": True,
    }
    body = {"prompt": "p", "params": params, "models": ["a", "b"], "workers": list("abcdefg"), "worker_blacklist": True}
    want = wanted(body, "ada")
    assert want.ask.amount == 3
    assert want.most == 300
    assert want.ask.models == ("a", "b")
    assert want.ask.workers == tuple("abcde")
    assert want.ask.exclude_workers
    kept = {name: value for name, value in params.items() if name not in ("n", "steps", "stream_progress")}
    assert want.ask.payload == {"prompt": "p", **kept}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 21),
        ("max_length", 15),
        ("max_length", 16_385),
        ("max_length", "80"),
        ("max_length", 80.0),
        ("max_length", True),
        ("max_context_length", 79),
        ("max_context_length", 2**20 + 1),
        ("temperature", -0.1),
        ("temperature", 5.1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("top_k", 201),
        ("top_k", 1.5),
        ("top_a", 2),
        ("typical", -1),
        ("tfs", 2),
        ("min_p", 2),
        ("rep_pen", 0.9),
        ("rep_pen", 3.1),
        ("rep_pen_range", 4097),
        ("rep_pen_slope", 11),
        ("smoothing_factor", 11),
        ("dynatemp_range", 6),
        ("dynatemp_exponent", 6),
        ("sampler_order", "012"),
        ("sampler_order", [0, 1, "2"]),
        ("stop_sequence", "\n"),
        ("stop_sequence", [1]),
        ("singleline", 1),
        ("frmttriminc", "yes"),
        ("use_default_badwordsids", []),
    ],
)
def test_a_parameter_out_of_its_bounds_is_named_under_its_path(name: str, value: Any) -> None:
    assert complaints(wanted, {"prompt": "p", "params": {name: value}}, "ada").keys() == {f"params.{name}"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", 5),
        ("prompt", ["p"]),
        ("params", []),
        ("params", "x"),
        ("models", "tiny"),
        ("models", [1]),
        ("models", [""]),
        ("models", ["x" * 256]),
        ("models", ["m"] * 1001),
        ("workers", "x"),
        ("worker_blacklist", 1),
        ("dry_run", "yes"),
        ("trusted_workers", "no"),
        ("slow_workers", 0),
    ],
)
def test_a_field_of_the_wrong_type_is_named(field: str, value: Any) -> None:
    assert complaints(wanted, {"prompt": "p", field: value}, "ada").keys() == {field}


def test_complaints_have_the_words_that_existing_clients_show() -> None:
    body = {"prompt": 1, "params": {"max_length": 5, "temperature": 9}}
    assert complaints(wanted, body, "ada") == {
        "prompt": "1 is not of type 'string'",
        "params.max_length": "5 is less than the minimum of 16",
        "params.temperature": "9 is greater than the maximum of 5",
    }


def test_a_complaint_never_sends_nonsense_back_whole() -> None:
    body = {"prompt": "p", "params": {"temperature": "x" * 10_000}}
    (complaint,) = complaints(wanted, body, "ada").values()
    assert len(complaint) < 100


@pytest.mark.parametrize(
    ("body", "rc"),
    [
        ({}, "MissingPrompt"),
        ({"prompt": None}, "MissingPrompt"),
        ({"prompt": ""}, "MissingPrompt"),
        ({"prompt": " \n"}, "MissingPrompt"),
        ({"prompt": "p", "params": {"max_length": 200, "max_context_length": 100}}, "TokenOverflow"),
        ({"prompt": "p", "params": {"sampler_order": [0, 1, 2, 3, 4, 5]}}, "MissingFullSamplerOrder"),
        ({"prompt": "p", "params": {"stop_sequence": ["s"] * 129}}, "TooManyStopSequences"),
        ({"prompt": "p", "params": {"stop_sequence": ["s" * 2001]}}, "ExcessiveStopSequence"),
        ({"prompt": "p", "webhook": "https://example.org"}, "BadRequest"),
        ({"prompt": "p", "style": "noir"}, "BadRequest"),
        ({"prompt": "p", "softprompt": "x"}, "BadRequest"),
        ({"prompt": "p", "proxied_account": "x"}, "BadRequest"),
        ({"prompt": "p", "extra_source_images": [{}]}, "BadRequest"),
    ],
)
def test_rules_between_fields_have_codes_of_their_own(body: dict, rc: str) -> None:
    assert refused(wanted, body, "ada") == (400, rc)


def test_bounds_themselves_are_allowed() -> None:
    params = {"max_length": 16, "max_context_length": 16_384, "stop_sequence": ["s" * 2000] * 128, "n": 20}
    want = wanted({"prompt": "p", "params": params, "webhook": None, "style": ""}, "ada")
    assert want.ask.amount == 20
    assert wanted({"prompt": "p", "params": {"max_length": 100, "max_context_length": 100}}, "ada").most == 100


# --- pop -------------------------------------------------------------------------------------------------------------


def test_a_plain_worker_gets_the_defaults() -> None:
    worker = declaration(POP | {"bridge_agent": "Bridge:1:x", "priority_usernames": [], "softprompts": []}, "ada", "c")
    assert (worker.name, worker.owner, worker.models, worker.agent) == ("worker", "ada", ("tiny",), "Bridge:1:x")
    assert (worker.max_length, worker.max_context_length, worker.amount, worker.threads) == (512, 2048, 1, 1)
    assert worker.prompt_jobs
    assert not worker.chat_jobs
    assert declaration(POP, "ada", "client:1:x").agent == "client:1:x"


def test_a_chat_worker_declares_what_it_can_do() -> None:
    body = POP | {
        "chat_jobs": True,
        "prompt_jobs": False,
        "model_id": "tiny",
        "chat_features": ["seed", "tools"],
        "chat_limits": {"max_length": 1024, "max_context_length": 8192, "tools_max_temperature": 0.5},
        "image_transports": ["url"],
    }
    worker = declaration(body, "ada", "")
    assert worker.chat_jobs
    assert not worker.prompt_jobs
    assert worker.model_id == "tiny"
    assert (worker.chat_max_length, worker.chat_max_context_length) == (1024, 8192)
    assert worker.tools_max_temperature == 0.5
    assert worker.offers == {"seed", "tools", "image:url"}
    withdrawn = declaration(body | {"chat_jobs": False, "prompt_jobs": True}, "ada", "")
    assert withdrawn.offers == frozenset()


@pytest.mark.parametrize("name", ["max_length", "max_context_length"])
@pytest.mark.parametrize("value", [0, -1, 2**31, 2**63, 10**30, 1e300, 0.5, "512", True, [], {}])
def test_absurd_lengths_are_refused(name: str, value: Any) -> None:
    raw = json.dumps(POP | {name: value}).encode()
    assert complaints(declaration, parse(raw), "ada", "").keys() == {name}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", 5),
        ("name", ""),
        ("name", "x" * 101),
        ("models", []),
        ("models", "tiny"),
        ("models", [None]),
        ("amount", 0),
        ("amount", 21),
        ("amount", 10**30),
        ("threads", 0),
        ("threads", 51),
        ("bridge_agent", 5),
        ("priority_usernames", "x"),
        ("softprompts", {}),
        ("nsfw", "no"),
        ("require_upfront_kudos", 1),
        ("extra_slow_worker", 1),
        ("chat_jobs", "yes"),
        ("chat_features", "seed"),
        ("chat_features", ["x" * 65]),
        ("chat_limits", []),
        ("image_transports", ["pigeon"]),
        ("model_id", "other"),
    ],
)
def test_a_wrong_field_of_a_pop_is_named(field: str, value: Any) -> None:
    assert complaints(declaration, POP | {field: value}, "ada", "").keys() == {field}


@pytest.mark.parametrize("name", ["max_length", "max_context_length", "tools_max_temperature"])
def test_absurd_chat_limits_are_refused(name: str) -> None:
    body = POP | {"chat_jobs": True, "chat_limits": {name: -1}}
    assert complaints(declaration, body, "ada", "").keys() == {f"chat_limits.{name}"}


def test_what_every_pop_needs() -> None:
    assert complaints(declaration, {}, "ada", "") == {"name": MISSING, "models": MISSING}
    assert complaints(declaration, POP | {"prompt_jobs": False}, "ada", "").keys() == {"prompt_jobs"}


# --- progress --------------------------------------------------------------------------------------------------------


def posted(**fields: Any) -> tuple[str, int, str, str]:
    return progress(json.dumps({"id": ID, "seq": 1, "content": "a"} | fields).encode())


def test_a_post_is_read() -> None:
    assert posted() == (ID, 1, "a", "")
    assert posted(reasoning_content="r") == (ID, 1, "a", "r")
    assert posted(content=None, reasoning_content="r") == (ID, 1, "", "r")
    assert progress(json.dumps({"id": ID, "seq": 0}).encode()) == (ID, 0, "", "")


def test_what_a_post_may_hold_stays_as_it_is_but_for_nul() -> None:
    assert posted(content="a\r\nb\rc") == (ID, 1, "a\r\nb\rc", "")
    assert posted(content="\U0001f600") == (ID, 1, "\U0001f600", "")
    assert posted(content="x\ud83d", reasoning_content="\ude00") == (ID, 1, "x\ud83d", "\ude00")
    assert posted(content="a\0b", reasoning_content="\0") == (ID, 1, "a\ufffdb", "\ufffd")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", 5),
        ("id", None),
        ("id", [ID]),
        ("seq", None),
        ("seq", "1"),
        ("seq", "\ud83d"),
        ("seq", 1.0),
        ("seq", True),
        ("seq", -1),
        ("seq", 2**53),
        ("seq", 10**30),
        ("content", 5),
        ("content", ["\ud83d"]),
        ("content", ["a"]),
        ("content", {}),
        ("reasoning_content", 5),
    ],
)
def test_a_post_of_the_wrong_types_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidFields) as error:
        posted(**{field: value})
    assert error.value.errors.keys() == {field}
    assert orjson.dumps(error.value.body())  # half a surrogate pair in it is none of the answer's


@pytest.mark.parametrize("name", ["", "x", ID.upper(), ID + "0", "\0" * 36, "\ud800" * 36, "x" * 100_000])
def test_what_is_no_id_has_no_lease(name: str) -> None:
    with pytest.raises(NoLease) as error:
        posted(id=name)
    assert (error.value.status, error.value.rc) == (404, "InvalidJobID")
    with pytest.raises(InvalidJob):
        handed({"id": name, "generation": "a"})
    with pytest.raises(UnknownRequest):
        request_id(name)


# --- submit ----------------------------------------------------------------------------------------------------------


def test_a_prompt_reply_is_read() -> None:
    given = handed({"id": ID, "generation": "a\0\r\nb", "seed": 5, "state": "censored", "gen_metadata": [{"a": "\0"}]})
    assert given.generation == ID
    assert given.reply is not None
    assert (given.reply.content, given.reply.seed, given.reply.state) == ("a\ufffd\r\nb", 5, "censored")
    assert given.reply.metadata == [{"a": "\ufffd"}]
    assert given.reply.usage is None


def test_a_chat_reply_is_read() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\0}"}}
    body = {
        "id": ID,
        "model_id": "tiny",
        "message": {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "r"},
        "finish_reason": "tool_calls",
        "native_finish_reason": "eos",
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "reasoning_tokens": 1,
    }
    reply = handed(body).reply
    assert reply is not None
    assert (reply.content, reply.reasoning, reply.finish_reason) == (None, "r", "tool_calls")
    assert reply.tool_calls == [call | {"function": {"name": "f", "arguments": "{\ufffd}"}}]
    assert reply.usage == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "completion_tokens_details": {"reasoning_tokens": 1},
    }


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"generation": "faulted", "seed": -1}, "generation_error"),
        ({"fault_reason": "prompt_overflow", "model_id": "tiny"}, "prompt_overflow"),
        ({"generation": None}, "generation_error"),
        ({"fault_reason": "of\0its\ud800own"}, "of\ufffdits\ufffdown"),
    ],
)
def test_a_fault_needs_no_generation(body: dict, reason: str) -> None:
    given = handed({"id": ID, "state": "faulted"} | body)
    assert given.reply is None
    assert given.fault == reason


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "generation"),
        ({"generation": None}, "generation"),
        ({"generation": 5}, "generation"),
        ({"generation": "a", "message": {"content": "a"}}, "generation"),
        ({"message": "a"}, "message"),
        ({"message": {}}, "message.content"),
        ({"message": {"content": None}}, "message.content"),
        ({"message": {"content": 5}}, "message.content"),
        ({"message": {"content": "a", "role": "user"}}, "message.role"),
        ({"message": {"content": "a", "tool_calls": [1]}}, "message.tool_calls"),
        ({"message": {"content": "a", "tool_calls": []}}, "message.tool_calls"),
        ({"message": {"content": "a", "tool_calls": [{}] * 129}}, "message.tool_calls"),
        ({"message": {"content": "a", "reasoning_content": 5}}, "message.reasoning_content"),
        ({"generation": "a", "state": "lost"}, "state"),
        ({"generation": "a", "state": []}, "state"),
        ({"generation": "a", "seed": "x"}, "seed"),
        ({"generation": "a", "seed": 2**63}, "seed"),
        ({"generation": "a", "gen_metadata": {}}, "gen_metadata"),
        ({"generation": "a", "gen_metadata": [{}] * 51}, "gen_metadata"),
        ({"generation": "a", "gen_metadata": ["x"]}, "gen_metadata"),
        ({"generation": "a", "finish_reason": "bored"}, "finish_reason"),
        ({"generation": "a", "native_finish_reason": "x" * 33}, "native_finish_reason"),
        ({"generation": "a", "prompt_tokens": -1}, "prompt_tokens"),
        ({"generation": "a", "completion_tokens": 1.5}, "completion_tokens"),
        ({"generation": "a", "reasoning_tokens": 10**30}, "reasoning_tokens"),
        ({"generation": "a", "model_id": 5}, "model_id"),
    ],
)
def test_a_wrong_field_of_a_submit_is_named(body: dict, named: str) -> None:
    assert complaints(handed, {"id": ID} | body).keys() == {named}


def test_what_could_not_be_stored_again_is_refused() -> None:
    deep: Any = {}
    for _ in range(900):
        deep = {"a": deep}
    assert complaints(handed, {"id": ID, "generation": "a", "gen_metadata": [deep]}).keys() == {"gen_metadata"}
    message = {"content": "a", "tool_calls": [deep]}
    assert complaints(handed, {"id": ID, "message": message}).keys() == {"message.tool_calls"}


def test_an_id_that_is_missing_is_named_but_null_is_no_job() -> None:
    """An existing worker sends null after a fault of its own, and repeats for ever what is not answered with 404."""
    assert complaints(handed, {"generation": "a"}) == {"id": MISSING}
    assert complaints(handed, {"id": 5, "generation": "a"}).keys() == {"id"}
    assert refused(handed, {"id": None, "state": "faulted"}) == (404, "InvalidJobID")
