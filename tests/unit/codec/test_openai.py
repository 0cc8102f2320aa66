"""What OpenAI-compatible servers say is read into chunks: nothing lost, nothing made up."""

import json
import time
from typing import Any

import pytest

from midstream.codec import native
from midstream.codec.openai import ChatReader, Route
from midstream.codec.text import Mender
from midstream.errors import ProducerFailed
from midstream.records import Chunk, Finish

ENVELOPE = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
FIRST = {"upstream": {"chunk": {"id": "c1", "created": 1, "model": "m"}}}


def chunk(delta: Any = None, *, index: int = 0, reason: str | None = None, **extra: Any) -> bytes:
    """A chat chunk; a string is its content, `extra` belongs to the choice."""
    said = {"content": delta} if isinstance(delta, str) else delta or {}
    choice = {"index": index, "delta": said, "logprobs": None, "finish_reason": reason, **extra}
    return json.dumps({**ENVELOPE, "choices": [choice]}).encode()


def envelope(**fields: Any) -> bytes:
    return json.dumps({**ENVELOPE, "choices": [], **fields}).encode()


def read(*events: bytes, route: Route = "chat", asked: int = 1) -> list[Chunk]:
    reader = ChatReader(route, asked)
    return [said for event in events for said in reader.read(event)]


def finish(*events: bytes, asked: int = 1) -> Finish:
    reader = ChatReader(asked=asked)
    for event in events:
        reader.read(event)
    return reader.finish()


def spoken(chunks: list[Chunk]) -> list[tuple[str, dict[str, Any] | None]]:
    """Text and fields of each chunk, without the envelope that the first one carries."""
    told = []
    for said in chunks:
        more = dict(said.more or {})
        more["upstream"] = {k: v for k, v in more.get("upstream", {}).items() if k != "chunk"}
        told.append((said.delta, {k: v for k, v in more.items() if v} or None))
    return told


def test_text_is_text_and_the_first_chunk_carries_the_envelope() -> None:
    """A plain answer: role, three deltas, the reason, usage, the end."""
    reader = ChatReader()
    events = [chunk({"role": "assistant", "content": ""}), chunk("a"), chunk(" b"), chunk("c"), chunk(reason="stop")]
    chunks = [said for event in events for said in reader.read(event)]
    assert chunks == [Chunk("a", FIRST), Chunk(" b"), Chunk("c")]
    assert reader.complete
    assert not reader.done
    assert reader.read(envelope(usage=USAGE)) == []
    assert reader.read(b"[DONE]") == []
    assert reader.done
    assert reader.finish() == Finish("stop", USAGE)


@pytest.mark.parametrize(
    "silent",
    [
        chunk({"role": "assistant", "content": None}),
        chunk({"role": "assistant"}),
        chunk(""),
        chunk({}),
        chunk({"content": None, "tool_calls": [], "refusal": None, "reasoning_content": ""}),
        chunk(None, content_filter_results={}),
        envelope(),
        envelope(usage=USAGE),
        envelope(choices=None),
        b'{"choices":[{"delta":null}]}',
        b'{"choices":[{}]}',
        b"{}",
        b"",
        b"  ",
    ],
)
def test_what_says_nothing_makes_no_chunk(silent: bytes) -> None:
    """Nor does it print "null" or "None", before or between what says something."""
    assert [said.delta for said in read(silent, chunk(" "), silent, chunk("x"), silent)] == [" ", "x"]


@pytest.mark.parametrize("text", [" ", "\n", "  two", "\t", "\ufeff", "null", "né✅你🚀", "\0\r\n"])
def test_text_is_kept_as_it_is(text: str) -> None:
    """White space, marks and anything else; alike when the shape is met for the first and the second time."""
    assert [said.delta for said in read(chunk(text), chunk(text))] == [text, text]


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "x"},
        {"role": "assistant", "content": "x"},
        {"content": "x", "reasoning_content": None},
        {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None},
    ],
)
def test_shapes_of_plain_text_make_plain_chunks(delta: dict[str, Any]) -> None:
    """A role repeated in each chunk and fields that are null are no news."""
    assert read(*[chunk(delta)] * 3)[1:] == [Chunk("x"), Chunk("x")]


def test_the_envelope_is_told_again_only_where_it_changes() -> None:
    """And what came on a chunk that made none goes with the next one that does."""
    chunks = read(
        envelope(prompt_filter_results=[{"index": 0}], system_fingerprint=None),
        chunk("a"),
        chunk("b"),
        chunk("c").replace(b'"created": 1', b'"created": 2'),
        chunk("d").replace(b'"created": 1', b'"created": 2'),
        envelope(service_tier="flex"),
        chunk("e").replace(b'"created": 1', b'"created": 2'),
    )
    assert [said.more and said.more["upstream"]["chunk"] for said in chunks] == [
        {"id": "c1", "created": 1, "model": "m", "prompt_filter_results": [{"index": 0}]},
        None,
        {"created": 2},
        None,
        {"created": 1, "service_tier": "flex"} | {"created": 2},
    ]


def test_padding_against_traffic_analysis_is_not_kept() -> None:
    """It is random in every chunk, and would make a large record of every token."""
    padded = [b'{"obfuscation":"%d",' % number + chunk("x")[1:] for number in range(3)]
    assert read(*padded)[1:] == [Chunk("x"), Chunk("x")]


def test_what_comes_after_the_last_chunk_stands_in_the_finish() -> None:
    """Timings, a service tier, why a stop token stopped it: told, though no chunk is left to carry it."""
    last = chunk(reason="stop", stop_reason=128001)
    told = finish(chunk("a"), last, envelope(timings={"predicted_ms": 3}, usage=USAGE), b"[DONE]")
    assert told.more == {"upstream": {"chunk": {"timings": {"predicted_ms": 3}}, "choice": {"stop_reason": 128001}}}


def test_unknown_fields_are_kept_where_they_stood() -> None:
    """Of the choice and of the delta; a legacy function_call is one of them."""
    (said,) = read(chunk({"content": "a", "function_call": {"name": "f"}, "audio": None}, token_ids=[3], empty=[]))
    assert said.more == {
        "upstream": {
            **FIRST["upstream"],
            "choice": {"token_ids": [3]},
            "delta": {"function_call": {"name": "f"}},
        }
    }


def test_a_delta_of_only_unknown_fields_is_a_chunk() -> None:
    """It may be the answer itself: audio, images, whatever comes next."""
    assert spoken(read(chunk({"audio": {"data": "QQ=="}}))) == [
        ("", {"upstream": {"delta": {"audio": {"data": "QQ=="}}}})
    ]


@pytest.mark.parametrize(
    "delta",
    [{"reasoning_content": "hm"}, {"reasoning": "hm"}, {"reasoning_content": "hm", "reasoning": "hm"}],
)
def test_reasoning_goes_by_several_names(delta: dict[str, Any]) -> None:
    """And is told once where a server sends it under two of them."""
    assert spoken(read(chunk(delta))) == [("", {"reasoning": "hm"})]


def test_two_different_reasonings_are_both_kept() -> None:
    """Nothing is thrown away for looking like something else."""
    (said,) = spoken(read(chunk({"reasoning_content": "hm", "reasoning": "ah"})))
    assert said == ("", {"reasoning": "hm", "upstream": {"delta": {"reasoning": "ah"}}})


def test_refusals_are_kept() -> None:
    """As a field of their own."""
    assert spoken(read(chunk({"refusal": "no"}))) == [("", {"refusal": "no"})]


def test_tool_calls_pass_unchanged_and_in_order() -> None:
    """Also two calls under one index, arguments cut inside an escape, and no id on later deltas."""
    deltas: list[list[dict[str, Any]]] = [
        [{"index": 0, "id": "call_a", "type": "function", "function": {"name": "f", "arguments": ""}}],
        [{"index": 0, "function": {"arguments": '{"x":"\\u00'}}],
        [{"index": 0, "function": {"arguments": 'e9"}'}}, {"index": 0, "id": "call_b", "function": {"name": "g"}}],
    ]
    chunks = read(*(chunk({"tool_calls": calls}) for calls in deltas))
    assert spoken(chunks) == [("", {"tool_calls": calls}) for calls in deltas]


def test_not_a_number_becomes_null() -> None:
    """NaN and the infinities are no JSON, though Python writes them; what we write a strict parser reads."""
    logprobs = {"content": [{"token": "a", "logprob": value} for value in (float("-inf"), float("nan"), -0.5)]}
    (said,) = read(chunk("a", logprobs=logprobs))
    assert said.more is not None
    assert [token["logprob"] for token in said.more["logprobs"]["content"]] == [None, None, -0.5]
    frame = native.token(2, said)
    json.loads(frame.split(b"data: ")[1], parse_constant=lambda name: pytest.fail(f"{name} in {frame!r}"))


@pytest.mark.parametrize("number", ["1e999", "9" * 30, "9" * 5000, "-1e400"])
def test_numbers_beyond_all_bounds_do_no_harm(number: str) -> None:
    """What we make of them can be written again."""
    (said,) = read(chunk("a").replace(b'"created": 1', b'"created": ' + number.encode()))
    assert native.token(2, said)


def test_half_a_surrogate_pair_waits_for_the_writer() -> None:
    """The reader passes halves on, since only what follows can tell whether they belong together."""
    chunks = read(chunk("a\ud83d"), chunk("\ude80b"))
    mender = Mender()
    mended = [mender.mend(said) for said in chunks]
    assert "".join(said.delta for said in mended if said) == "a🚀b"


def test_a_terminal_record_has_no_half_pairs() -> None:
    """There, no other half can come."""
    told = finish(chunk("a"), chunk(reason="stop", note="\ud83d"), envelope(usage={"n\ude80": "\ud83d"}), b"[DONE]")
    assert native.done(3, told)
    with pytest.raises(ProducerFailed) as caught:
        read(b'{"error":{"message":"\\ud83d","type":"\\ude80"}}')
    assert native.failed(3, caught.value)


def test_bytes_that_are_no_utf_8_are_replaced() -> None:
    """A gap would be worse than a replacement character that shows."""
    assert read(chunk("ab").replace(b"ab", b"a\xffb"))[0].delta == "a\ufffdb"


# --- several choices ---------------------------------------------------------------------------------------------


def test_choices_are_told_apart_and_each_has_its_own_end() -> None:
    """Not one text, and not at an end before [DONE] when the first of them is."""
    reader = ChatReader(asked=2)
    events = [chunk("A"), chunk("X", index=1), chunk("B"), chunk(index=1, reason="length"), chunk("C")]
    chunks = [said for event in events for said in reader.read(event)]
    assert not reader.complete
    chunks += reader.read(chunk(reason="stop"))
    assert reader.complete
    assert spoken(chunks) == [
        ("A", None),
        ("X", {"choice": 1}),
        ("B", None),
        ("", {"choice": 1, "finish_reason": "length"}),
        ("C", None),
        ("", {"finish_reason": "stop"}),
    ]
    reader.read(envelope(usage=USAGE))
    assert reader.finish() == Finish(None, USAGE)


def test_a_choice_that_turns_out_not_to_be_the_only_one_gets_its_end_too() -> None:
    """One after the other: the first one's finish_reason was held for the `done` record."""
    chunks = read(chunk("A"), chunk(reason="stop", stop_reason=7), chunk("X", index=1), chunk(index=1, reason="length"))
    assert spoken(chunks) == [
        ("A", None),
        ("", {"finish_reason": "stop", "upstream": {"choice": {"stop_reason": 7}}}),
        ("X", {"choice": 1}),
        ("", {"choice": 1, "finish_reason": "length"}),
    ]


def test_several_choices_in_one_chunk_are_several_chunks() -> None:
    """In the order of the upstream."""
    both = {"choices": [{"index": 1, "delta": {"content": "X"}}, {"index": 0, "delta": {"content": "A"}}]}
    assert spoken(read(json.dumps(both).encode())) == [("X", {"choice": 1}), ("A", None)]


def test_a_choice_that_was_asked_for_and_never_came_is_missing() -> None:
    """Unless [DONE] says that this was all."""
    with pytest.raises(ProducerFailed):
        finish(chunk("A"), chunk(reason="stop"), asked=2)
    assert finish(chunk("A"), chunk(reason="stop"), b"[DONE]", asked=2).finish_reason == "stop"


# --- ends --------------------------------------------------------------------------------------------------------


def test_an_end_with_neither_reason_nor_done_is_truncated() -> None:
    """A clean close is no end of an answer."""
    with pytest.raises(ProducerFailed) as caught:
        finish(chunk("a"), chunk("b"))
    assert (caught.value.failure, caught.value.retryable) == ("upstream_truncated", True)


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([chunk("a"), chunk(reason="stop")], "stop"),
        ([chunk("a"), b"[DONE]"], None),
        ([chunk("a"), b" [DONE] "], None),
        ([chunk("a", reason="length"), b"[DONE]"], "length"),
        ([chunk("a"), chunk(reason="insufficient_system_resource"), b"[DONE]"], "insufficient_system_resource"),
        ([chunk("a"), chunk(reason="stop"), chunk(reason="stop"), b"[DONE]"], "stop"),
        ([chunk("a"), chunk(reason=""), b"[DONE]"], None),
    ],
)
def test_ends_that_real_servers_make(events: list[bytes], reason: str | None) -> None:
    """With either sign of the end, and any reason, also one nobody has heard of."""
    assert finish(*events).finish_reason == reason
    assert [said.delta for said in read(*events)] == ["a"]


def test_nothing_is_read_after_done() -> None:
    """Whatever it is."""
    assert read(b"[DONE]", chunk("a"), b"garbage", b'{"error":"late"}') == []


def test_usage_in_every_chunk_is_no_news_but_the_last_one_counts() -> None:
    """Some servers send a running count."""
    counted = [chunk("x")[:-1] + b',"usage":{"completion_tokens":%d}}' % number for number in (1, 2, 3)]
    assert read(*counted)[1:] == [Chunk("x"), Chunk("x")]
    assert finish(*counted, b"[DONE]").usage == {"completion_tokens": 3}


def test_usage_beside_a_choice_is_found() -> None:
    """Where one vendor puts it."""
    assert finish(chunk("a"), chunk(reason="stop", usage=USAGE)).usage == USAGE


# --- what cannot be read -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "broken",
    [
        b'{"choices":[{"del',
        b"hello",
        b"null",
        b"[1]",
        b'"text"',
        b'{"choices":{"delta":{}}}',
        b'{"choices":["x"]}',
        b'{"choices":[{"delta":"x"}]}',
        b'{"choices":[{"index":"0","delta":{}}]}',
        b'{"choices":[{"delta":{"content":5}}]}',
        b'{"x":' + b"[" * 100_000,
        b'{"x":' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"choices":[{"delta":{"tool_calls":' + b"[" * 100 + b"]" * 100 + b"}}]}",
    ],
)
def test_what_cannot_be_read_fails_and_is_not_skipped(broken: bytes) -> None:
    """A gap that nobody can see would be worse than a failure."""
    reader = ChatReader()
    reader.read(chunk("a"))
    with pytest.raises(ProducerFailed) as caught:
        reader.read(broken)
    assert (caught.value.failure, caught.value.retryable) == ("upstream_malformed", False)
    assert len(caught.value.detail) < 300


@pytest.mark.parametrize("event", ["ping", "heartbeat", "keepalive"])
@pytest.mark.parametrize("data", [b"", b"{}", b"pong", b'{"type":"ping"}'])
def test_keep_alive_events_say_nothing(event: str, data: bytes) -> None:
    """Whatever they carry."""
    assert ChatReader().read(data, event) == []


def test_an_event_of_any_other_name_is_read() -> None:
    """Some servers name their chunks."""
    assert spoken(ChatReader().read(chunk("a"), "completion")) == [("a", None)]


@pytest.mark.parametrize(
    ("error", "message", "status", "retryable"),
    [
        ({"error": {"message": "quota", "code": 429}}, "quota", 429, True),
        ({"error": {"message": "quota", "code": "429"}}, "quota", 429, True),
        ({"error": {"message": "bad", "type": "invalid_request_error", "code": None}}, "bad", None, False),
        ({"error": {"message": "down", "status": 503}}, "down", 503, True),
        ({"error": "out of memory"}, "out of memory", None, False),
        ({"error": {"code": "context_length_exceeded"}}, '{"code": "context_length_exceeded"}', None, False),
        ({"object": "error", "message": "old vLLM", "code": 400}, "old vLLM", 400, False),
        ({**json.loads(chunk("x")), "error": {"message": "provider", "code": 502}}, "provider", 502, True),
    ],
)
def test_an_error_in_the_stream_is_a_failure(
    error: dict[str, Any], message: str, status: int | None, retryable: bool
) -> None:
    """Never an empty success, and in the upstream's own words."""
    with pytest.raises(ProducerFailed) as caught:
        read(chunk("a"), json.dumps(error).encode())
    failure = caught.value
    assert (failure.failure, failure.detail) == ("upstream_error", message)
    assert (failure.facts.get("status"), failure.retryable) == (status, retryable)


@pytest.mark.parametrize("data", [b'{"error":{"message":"quota"}}', b'{"message":"quota"}', b"quota"])
def test_an_event_named_error_is_one_whatever_its_data(data: bytes) -> None:
    """An object, or just words."""
    with pytest.raises(ProducerFailed, match="quota") as caught:
        ChatReader().read(data, "error")
    assert caught.value.failure == "upstream_error"


def test_no_error_is_no_error() -> None:
    """A null in every chunk."""
    assert read(chunk("a")[:-1] + b',"error":null}') == [Chunk("a", FIRST)]


def test_more_tool_calls_than_anybody_asks_for_are_refused() -> None:
    """However few come at a time: each is looked through for whose a delta is."""
    events = [chunk({"tool_calls": [{"index": number % 2, "id": f"c{number}"}]}) for number in range(3000)]
    with pytest.raises(ProducerFailed, match="tool calls"):
        read(*events)


# --- completions, and answers that are no stream -----------------------------------------------------------------


def completion(text: str, reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
    return json.dumps({**ENVELOPE, "object": "text_completion", "choices": [choice]}).encode()


def test_completions_are_read_alike() -> None:
    """Their text is in another place, and the last of it comes with the reason."""
    reader = ChatReader("completions")
    events = [completion("a"), completion(""), completion(" b"), completion("c", "length")]
    assert [said for event in events for said in reader.read(event)] == [Chunk("a", FIRST), Chunk(" b"), Chunk("c")]
    assert reader.finish() == Finish("length")


def test_completions_told_as_deltas_are_read_alike() -> None:
    """By servers that know one shape of chunk, whatever they are asked: none of it is passed over."""
    reader = ChatReader("completions")
    events = [chunk("a"), chunk(" b"), chunk(" c"), chunk(reason="stop")]
    assert "".join(said.delta for event in events for said in reader.read(event)) == "a b c"


def test_a_whole_chat_completion_is_one_chunk_and_an_end() -> None:
    """For a server that ignores `stream`: text, reasoning, tool calls with the index that only deltas have."""
    call = {"id": "call_a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": "Hello", "reasoning_content": "hm", "tool_calls": [call, call]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "stop_reason": None}
    reader = ChatReader()
    body = {**ENVELOPE, "object": "chat.completion", "choices": [choice], "usage": USAGE}
    chunks = reader.read_whole(json.dumps(body).encode())
    assert chunks == [
        Chunk("Hello", {"reasoning": "hm", "tool_calls": [{"index": 0, **call}, {"index": 1, **call}], **FIRST})
    ]
    assert reader.finish() == Finish("tool_calls", USAGE)


def test_a_whole_completion_may_have_several_choices() -> None:
    """Each with its own end."""
    choices = [{"index": at, "text": text, "finish_reason": "stop"} for at, text in enumerate("AB")]
    reader = ChatReader("completions", asked=2)
    assert spoken(reader.read_whole(json.dumps({"choices": choices}).encode())) == [
        ("A", None),
        ("", {"finish_reason": "stop"}),
        ("B", {"choice": 1, "finish_reason": "stop"}),
    ]
    assert reader.finish() == Finish()


@pytest.mark.parametrize("body", [b'{"detail":"ok"}', b'{"choices":[]}', b'{"choices":[{'])
def test_json_that_is_no_completion_is_refused_by_name(body: bytes) -> None:
    """Not an answer of no tokens."""
    with pytest.raises(ProducerFailed) as caught:
        ChatReader().read_whole(body)
    assert caught.value.failure == "upstream_malformed"


def test_a_whole_error_is_an_error() -> None:
    """Also when it comes with 200."""
    with pytest.raises(ProducerFailed, match="busy"):
        ChatReader().read_whole(b'{"error":{"message":"busy"}}')


def test_an_event_of_megabytes_is_read_without_holding_up_the_loop() -> None:
    """Six of them in one content."""
    event = chunk("x" * (6 * 2**20))
    started = time.process_time()
    assert len(read(event)[0].delta) == 6 * 2**20
    assert time.process_time() - started < 0.5
