"""The OpenAI producer in front of an upstream that does, on a real socket, all that upstreams have been seen to do."""

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, NamedTuple

import pytest

from midstream.codec.openai import Route
from midstream.errors import ProducerFailed, UnknownModel
from midstream.producers.openai import OpenAIUpstream, Upstreams
from midstream.producers.scripted import Scripted
from midstream.producers.upstream import UpstreamLimits
from midstream.records import Chunk, Finish
from midstream.testing.patience import until
from midstream.testing.upstream import (
    DONE,
    FAULTS,
    CloseDirty,
    Comment,
    Event,
    Head,
    MisbehavingUpstream,
    Pause,
    Raw,
    Reset,
    Script,
    Send,
    Stall,
    Status,
    Step,
    chat_answer,
    chat_event,
    completion_event,
    error_body,
    json_event,
    redirect,
)

KEY = "sk-never-to-be-seen-0123456789"
QUICK = UpstreamLimits(connect=5, first_token=0.4, idle=0.25, total=5)
PATIENT = UpstreamLimits(
    connect=5, first_token=10, idle=10, total=20
)  # no part of a test, but its end if something hangs
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
ABC = (chat_event("a"), chat_event("b"), chat_event("c"))
STOP = chat_event(finish_reason="stop")


class Told(NamedTuple):
    """What a generation came to: its chunks, and a Finish or the failure."""

    chunks: list[Chunk]
    end: Finish | ProducerFailed

    @property
    def text(self) -> str:
        return "".join(chunk.delta for chunk in self.chunks)

    @property
    def outcome(self) -> str:
        """`done`, or the failure's code."""
        return "done" if isinstance(self.end, Finish) else self.end.failure

    @property
    def failure(self) -> ProducerFailed:
        assert isinstance(self.end, ProducerFailed), self.end
        return self.end


async def run(
    upstream: OpenAIUpstream, model: str = "m", route: Route = "chat", pause: float = 0, **fields: Any
) -> Told:
    """One generation, to its end; `pause` is how many seconds its consumer takes over each list."""
    chunks: list[Chunk] = []
    asked = {"model": model, "messages": [{"role": "user", "content": "hi"}], **fields}
    try:
        async with aclosing(upstream.generate(asked, route)) as parts:
            async for part in parts:
                if isinstance(part, Finish):
                    return Told(chunks, part)
                chunks += part
                await asyncio.sleep(pause)
    except ProducerFailed as failure:
        return Told(chunks, failure)
    raise AssertionError("it ended without saying how")


@asynccontextmanager
async def facing(
    url: str, limits: UpstreamLimits = PATIENT, key: str | None = KEY, **options: Any
) -> AsyncIterator[OpenAIUpstream]:
    """A producer for the upstream at `url`; afterwards it has let go of everything."""
    upstream = OpenAIUpstream(url, None, key, limits, **options)
    try:
        yield upstream
    finally:
        await upstream.connections.close()
        gc.collect()  # a response or connection that was not closed warns, and warnings are errors


@asynccontextmanager
async def answering(
    *steps: Step, limits: UpstreamLimits = PATIENT, **dialect: Any
) -> AsyncIterator[tuple[MisbehavingUpstream, OpenAIUpstream]]:
    """An upstream that answers with these steps, and a producer for it."""
    async with MisbehavingUpstream(default=Script(steps, **dialect)) as wire, facing(wire.url, limits) as upstream:
        yield wire, upstream
        await upstream.connections.close()
        await wire.idle(within=1.0)


# --- the catalogue -----------------------------------------------------------------------------------------------

# What an honest reader makes of each fault: the text that stays, and how it ended.
OUTCOMES = {
    "polite": ("Hello, world", "done"),
    "lines-end-in-cr": ("ab", "done"),
    "lines-end-in-crlf": ("ab", "done"),
    "characters-cut-at-every-byte": ("né✅你🚀!", "done"),
    "byte-order-mark": ("ab\ufeffc", "done"),
    "byte-order-mark-in-pieces": ("a\ufeffb", "done"),
    "comments-while-the-prompt-is-read": ("ab", "done"),
    "data-without-space": ("a two", "done"),
    "only-whitespace-tokens": (" \n  two\tthree ", "done"),
    "data-in-several-lines": ("a", "done"),
    "line-of-six-mebibytes": ("x" * 6 * 2**20, "done"),
    "unknown-finish-reason": ("ab", "done"),
    "finish-without-done": ("abc", "done"),
    "done-then-silence": ("abc", "done"),
    "done-then-reset": ("abc", "done"),
    "empty-choices-and-null-content": (" ", "done"),
    "infinite-logprob": ("ab", "done"),
    "surrogate-pair-in-halves": ("a\ud83d\ude80blone \ud83dc", "done"),
    "reasoning-then-text": ("a", "done"),
    "parallel-tool-calls": ("", "done"),
    "choices-interleaved": ("AXBC", "done"),
    "json-instead-of-stream": ("Hello", "done"),
    "gzip-with-length": ("Hello, world", "done"),
    "ended-by-the-close": ("ab", "done"),
    "cut-in-a-character": ("", "upstream_truncated"),
    "clean-end-in-a-character": ("", "upstream_truncated"),
    "plain-text-events": ("", "upstream_malformed"),
    "line-without-end": ("", "upstream_too_large"),
    "error-then-done": ("", "upstream_error"),
    "error-event": ("", "upstream_error"),
    "error-after-three-tokens": ("abc", "upstream_error"),
    "clean-end-without-finish": ("abcd", "upstream_truncated"),
    "cut-without-finish": ("abc", "upstream_truncated"),
    "reset-without-finish": ("abc", "upstream_truncated"),
    "reset-before-headers": ("", "upstream_unreachable"),
    "closed-before-headers": ("", "upstream_unreachable"),
    "shorter-than-its-length": ("abc", "upstream_truncated"),
    "longer-than-its-length": ("ab", "upstream_truncated"),
    "event-broken-in-the-middle": (" 0 1 2 3 4 5 6 7 8 9", "upstream_malformed"),
    "html-instead-of-stream": ("", "upstream_malformed"),
    "empty-body": ("", "upstream_truncated"),
    "empty-stream": ("", "upstream_truncated"),
    "gzip-error": ("", "upstream_error"),
    "gzip-bomb": ("", "upstream_error"),
    "endless-error-body": ("", "upstream_error"),
    "unauthorized": ("", "upstream_error"),
    "rate-limited": ("", "upstream_error"),
    "bad-gateway-page": ("", "upstream_error"),
    "redirect": ("", "upstream_error"),
    "silent-before-headers": ("", "upstream_timeout"),
    "silent-before-first-token": ("", "upstream_timeout"),
    "comments-for-ever": ("", "upstream_timeout"),
    "silent-mid-stream": ("abc", "upstream_timeout"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_every_fault_has_its_own_clear_end(fault: str) -> None:
    """What was good is kept, the rest is named, nothing hangs, and no connection is left behind."""
    limits = QUICK if OUTCOMES[fault][1] == "upstream_timeout" else PATIENT
    async with MisbehavingUpstream(FAULTS) as wire, facing(wire.url, limits) as upstream:
        async with asyncio.timeout(5):
            told = await run(upstream, fault)
        await upstream.connections.close()
        await wire.idle(within=1.0)
    assert (told.text, told.outcome) == OUTCOMES[fault]


def test_the_catalogue_is_covered() -> None:
    """A fault that is added to it needs its outcome here."""
    assert OUTCOMES.keys() == FAULTS.keys()


# --- what is sent ------------------------------------------------------------------------------------------------


async def test_the_request_is_the_callers_streamed_with_usage_and_nothing_else_of_his() -> None:
    """His headers, his key above all, stay here; the trace goes on."""
    headers = {"Authorization": "Bearer caller", "Cookie": "c=1", "Traceparent": "00-1", "X-Forwarded-For": "1.2.3.4"}
    async with answering(*chat_answer("a")) as (wire, upstream):
        async with aclosing(upstream.generate({"model": "m", "messages": [], "seed": 3}, "chat", headers)) as parts:
            assert isinstance([part async for part in parts][-1], Finish)
        (request,) = wire.requests
    assert request.path == "/v1/chat/completions"
    assert request.json == {
        "model": "m",
        "messages": [],
        "seed": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent = dict(request.headers)
    assert sent.pop("host") == f"127.0.0.1:{wire.port}"
    assert sent.pop("content-length") == str(len(request.body))
    assert sent == {
        "connection": "close",
        "traceparent": "00-1",
        "accept": "text/event-stream, application/json",
        "accept-encoding": "identity",
        "content-type": "application/json",
        "user-agent": "midstream",
        "authorization": f"Bearer {KEY}",
    }


async def test_no_key_sends_no_authorization() -> None:
    """Local servers want none."""
    async with MisbehavingUpstream() as wire, facing(wire.url, key=None) as upstream:
        assert (await run(upstream)).outcome == "done"
        assert "authorization" not in wire.requests[0].headers


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (None, {"include_usage": True}),
        ({"include_usage": False}, {"include_usage": False}),
        ({"other": 1}, {"other": 1, "include_usage": True}),
    ],
)
async def test_usage_is_asked_for_unless_the_caller_said_otherwise(given: object, sent: object) -> None:
    """It is wanted for the last record."""
    async with answering(*chat_answer("a")) as (wire, upstream):
        await run(upstream, stream_options=given, stream=False)
        assert wire.requests[0].json["stream_options"] == sent
        assert wire.requests[0].json["stream"] is True


async def test_a_server_too_strict_for_the_wish_for_usage_is_asked_without_it() -> None:
    """The model has not run for the request that was refused; later requests do not try again."""
    refusal = Status(400, body=error_body("Unrecognized request argument supplied: stream_options"))
    async with MisbehavingUpstream() as wire, facing(wire.url) as upstream:
        wire.script("m", Script([refusal]), Script(chat_answer("a")))
        assert (await run(upstream)).text == "a"
        assert (await run(upstream)).text == "a"
        assert ["stream_options" in request.json for request in wire.requests] == [True, False, False]


async def test_a_refusal_of_the_callers_own_stream_options_is_told() -> None:
    """Only what we added may be left out."""
    async with answering(Status(400, body=error_body("bad stream_options"))) as (wire, upstream):
        told = await run(upstream, stream_options={"include_usage": True})
        assert (told.outcome, len(wire.requests)) == ("upstream_error", 1)


async def test_completions_have_a_route_of_their_own() -> None:
    """Read by their own shape."""
    async with answering(completion_event("a"), completion_event("b", finish_reason="length"), DONE) as (
        wire,
        upstream,
    ):
        told = await run(upstream, route="completions", prompt="x")
        assert (told.text, told.end) == ("ab", Finish("length"))
        assert wire.requests[0].path == "/v1/completions"


async def test_two_prompts_have_two_choices() -> None:
    """The end of one of them is not the end of the answer."""
    async with answering(completion_event("a", finish_reason="stop")) as (_, upstream):
        assert (await run(upstream, route="completions", prompt=["x", "y"])).outcome == "upstream_truncated"
        assert (await run(upstream, route="completions", prompt=[1, 2, 3])).outcome == "done"


@pytest.mark.parametrize(
    "url", ["ftp://x/v1", "localhost:8000/v1", "http://", "http://user:secret@x/v1", "http://:secret@x/v1"]
)
def test_a_url_that_cannot_be_an_upstream_is_refused_at_start(url: str) -> None:
    """Credentials too, without repeating them: URLs get into logs."""
    with pytest.raises(ValueError, match="upstream") as caught:
        OpenAIUpstream(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("key", ["a\nb", "é", " a", "a\x7f"])
def test_a_key_that_no_header_carries_is_refused_at_start(key: str) -> None:
    """Without repeating it."""
    with pytest.raises(ValueError, match="no header can carry") as caught:
        OpenAIUpstream("http://x/v1", key=key)
    assert key not in str(caught.value)


# --- the key and redirects ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_the_key_does_not_follow_a_redirect(status: int) -> None:
    """It is an error that names where it points."""
    async with MisbehavingUpstream() as elsewhere, MisbehavingUpstream() as wire, facing(wire.url) as upstream:
        wire.script("m", redirect(f"{elsewhere.url}/chat/completions?key={KEY}", status))
        told = await run(upstream)
        assert elsewhere.requests == []
    assert (told.failure.failure, told.failure.retryable) == ("upstream_error", False)
    assert told.failure.facts == {"status": status}
    assert f"redirects to {elsewhere.url}/chat/completions" in told.failure.detail
    assert KEY not in told.failure.detail


@pytest.mark.parametrize(
    "script",
    [
        Script([Status(401, body=error_body(f"Incorrect API key provided: {KEY}"))]),
        Script([Status(500, body=f"Authorization: Bearer {KEY}".encode())]),
        Script([chat_event("a"), json_event({"error": {"message": f"bad key {KEY}"}})]),
        Script([Head(), Event(f"plain {KEY}")]),
        Script([Reset()]),
        Script([Raw(b"no http\r\n\r\n"), CloseDirty()]),
        Script([Stall()]),
    ],
)
async def test_the_key_is_in_no_message_and_no_log(script: Script, caplog: pytest.LogCaptureFixture) -> None:
    """Even where the upstream itself repeats it."""
    caplog.set_level(logging.DEBUG)
    async with MisbehavingUpstream(default=script) as wire, facing(wire.url, QUICK) as upstream:
        failure = (await run(upstream)).failure
        shown = f"{failure!r} {failure.detail} {failure.facts} {failure.__cause__!r} {upstream!r} {caplog.text}"
    assert KEY not in shown


# --- endings -----------------------------------------------------------------------------------------------------


async def test_usage_after_the_end_of_the_choice_is_kept() -> None:
    """In a chunk of its own, before [DONE]."""
    async with answering(*ABC, STOP, chat_event(choices=[], usage=USAGE), DONE) as (_, upstream):
        assert (await run(upstream)).end == Finish("stop", USAGE)


async def test_done_ends_it_though_the_socket_stays_open_and_nothing_leaks() -> None:
    """The connection gets a moment to come to its end, then it is closed from here."""
    async with answering(*ABC, STOP, DONE, Stall()) as (wire, upstream):
        started = time.perf_counter()
        assert (await run(upstream)).outcome == "done"
        assert time.perf_counter() - started < PATIENT.idle / 2
        await wire.disconnected(1, within=1.5)


async def test_done_before_a_reset_counts_also_for_a_slow_consumer() -> None:
    """What came before the reset is not lost because it was not yet read."""
    async with answering(*ABC, Pause(0.02), STOP, DONE, Pause(0.02), Reset()) as (_, upstream):
        told = await run(upstream, pause=0.1)
        assert (told.text, told.end) == ("abc", Finish("stop"))


async def test_an_answer_is_whole_when_its_choices_have_finished_even_if_nothing_more_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No [DONE], no end of the connection: after a short while, not the idle limit's, that is the end."""
    monkeypatch.setattr("midstream.producers.intake._AFTER_FINISH", 0.1)
    async with answering(*ABC, STOP, Stall()) as (_, upstream):
        started = time.perf_counter()
        assert (await run(upstream)).end == Finish("stop")
        assert time.perf_counter() - started < PATIENT.idle / 2


@pytest.mark.parametrize("ending", [b"data: [DONE]", b"data: [DONE]\n", b"data:[DONE]\r\n"])
async def test_done_without_its_blank_line_counts(ending: bytes) -> None:
    """No beginning of it is one."""
    async with answering(*ABC, Send(ending)) as (_, upstream):
        assert (await run(upstream)).end == Finish(None)


async def test_a_last_event_without_its_blank_line_counts_if_it_is_whole() -> None:
    """No beginning of a JSON object is a JSON object, so it was not cut."""
    last = chat_event("d", finish_reason="stop").encode().rstrip(b"\n")
    async with answering(*ABC, Send(last)) as (_, upstream):
        assert (await run(upstream)).text == "abcd"
    async with answering(*ABC, Send(last[:-1])) as (_, upstream):
        told = await run(upstream)
        assert (told.text, told.outcome) == ("abc", "upstream_truncated")


async def test_a_body_that_is_cut_at_any_byte_is_truncated_or_whole_never_wrong() -> None:
    """Every cut of a short answer: the text is a beginning of the answer, and `done` only with all of it."""
    answer = Script([*ABC, STOP, DONE]).body()
    async with MisbehavingUpstream() as wire, facing(wire.url) as upstream:
        for cut in range(1, len(answer), 7):
            wire.script("m", Script([Send(answer[:cut]), CloseDirty()]))
            told = await run(upstream)
            assert "abc".startswith(told.text)
            assert told.outcome in ("done", "upstream_truncated"), (cut, told.end)
            assert told.outcome == "upstream_truncated" or told.text == "abc"


async def test_a_broken_framing_is_truncated() -> None:
    """Bytes that are no chunk of a chunked body."""
    async with answering(*ABC, Pause(0.02), Raw(b"zzz\r\n"), Stall()) as (_, upstream):
        told = await run(upstream)
        assert (told.text, told.outcome) == ("abc", "upstream_truncated")


async def test_what_does_not_speak_http_is_malformed() -> None:
    """Something else listens there."""
    async with answering(Raw(b"220 smtp.example ESMTP\r\n\r\n"), Stall()) as (_, upstream):
        told = await run(upstream)
        assert (told.outcome, "does not speak HTTP" in told.failure.detail) == ("upstream_malformed", True)


@pytest.mark.parametrize("kind", ["text/html", "application/json", "application/octet-stream", None])
async def test_a_stream_is_a_stream_whatever_its_type_says(kind: str | None) -> None:
    """Content types lie; the bytes do not."""
    async with answering(*chat_answer("a"), content_type=kind) as (_, upstream):
        assert (await run(upstream)).text == "a"


@pytest.mark.parametrize("kind", ["text/event-stream", "text/plain"])
async def test_a_completion_is_one_whatever_its_type_says(kind: str) -> None:
    """White space before it, as a sign of life, is none of it."""
    body = b' \n{"choices":[{"message":{"content":"Hello"},"finish_reason":"stop"}]}\n'
    async with answering(Send(b"\n"), Pause(0.01), Send(body), content_type=kind) as (_, upstream):
        told = await run(upstream)
        assert (told.text, told.end) == ("Hello", Finish("stop"))


@pytest.mark.parametrize(
    ("body", "outcome", "said"),
    [
        (b"<!doctype html><title>Sign in</title>", "upstream_malformed", "web page (Content-Type text/plain)"),
        (b"OK", "upstream_malformed", "no event stream and no completion"),
        (b'{"detail":"moved"}', "upstream_malformed", "no completion"),
        (b'{"choices":[{"message":{"con', "upstream_truncated", "ended in its middle"),
        (b'{"error":{"message":"busy","code":503}}', "upstream_error", "busy"),
        (b"  \n", "upstream_truncated", "empty body"),
        (b": nothing\n\n", "upstream_malformed", "no event stream"),
    ],
)
async def test_a_200_that_is_no_answer_is_named(body: bytes, outcome: str, said: str) -> None:
    """Never a success of no tokens."""
    async with answering(Send(body), content_type="text/plain") as (_, upstream):
        told = await run(upstream)
    assert (told.text, told.outcome) == ("", outcome)
    assert said in told.failure.detail


# --- refusals and compression ------------------------------------------------------------------------------------


async def test_a_refusal_keeps_status_message_and_when_to_try_again() -> None:
    """The upstream's own words."""
    body = error_body("slow down", "rate_limit_error", "rate_limit_exceeded")
    async with answering(Status(429, {"Retry-After": "7"}, body)) as (_, upstream):
        failure = (await run(upstream)).failure
    assert (failure.failure, failure.detail, failure.retryable) == ("upstream_error", "slow down", True)
    fields = {"type": "rate_limit_error", "code": "rate_limit_exceeded"}
    assert failure.facts == {"status": 429, "retry_after": 7, "upstream": fields}


async def test_a_compressed_refusal_is_read() -> None:
    """Though we asked for none to be compressed."""
    async with answering(Status(400, body=error_body("no such parameter")), gzip=True) as (_, upstream):
        assert (await run(upstream)).failure.detail == "no such parameter"


async def test_an_unknown_compression_is_named() -> None:
    """It cannot be read."""
    async with answering(*chat_answer("a"), headers={"Content-Encoding": "br"}) as (_, upstream):
        told = await run(upstream)
        assert told.outcome == "upstream_malformed"
        assert "'br'" in told.failure.detail
    async with answering(Status(418, {"Content-Encoding": "br"}, b"xx")) as (_, upstream):
        assert (await run(upstream)).failure.facts == {"status": 418}


async def test_broken_compression_is_malformed() -> None:
    """Not an end, and not a crash."""
    async with answering(*chat_answer("a"), headers={"Content-Encoding": "gzip"}) as (_, upstream):
        assert (await run(upstream)).outcome == "upstream_malformed"


async def test_a_compressed_stream_comes_as_it_is_made() -> None:
    """Each token when it is sent, not at the end."""
    goes_on = asyncio.Event()
    async with (
        answering(chat_event("a"), Pause(goes_on), *ABC, STOP, DONE, gzip=True) as (_, upstream),
        aclosing(upstream.generate({"model": "m"}, "chat")) as parts,
    ):
        assert await anext(parts) == []  # accepted
        first = await anext(parts)
        assert isinstance(first, list)
        assert first[0].delta == "a"
        goes_on.set()
        assert [part async for part in parts][-1] == Finish("stop")


async def test_a_compressed_flood_stops_at_the_cap() -> None:
    """An event that inflates without end."""
    async with (
        MisbehavingUpstream(default=Script([Send(b"data: "), Send(b" " * 65_536, 1024)], gzip=True)) as wire,
        facing(wire.url, max_event_bytes=2**20) as upstream,
    ):
        assert (await run(upstream)).outcome == "upstream_too_large"


# --- limits ------------------------------------------------------------------------------------------------------


async def test_comments_do_not_put_off_the_first_token() -> None:
    """But they are a sign of life between bytes: it is the first token's limit that runs out."""
    pings: list[Step] = [Comment(" ping"), Pause(0.05)]
    steps = [Head(), *pings * 100]
    async with answering(*steps, limits=UpstreamLimits(first_token=1.0, idle=0.9)) as (_, upstream):
        assert "no first token within 1 s" in (await run(upstream)).failure.detail


async def test_comments_put_off_the_idle_limit() -> None:
    """Between tokens."""
    pings: list[Step] = [Comment(), Pause(0.2)]
    steps = [chat_event("a"), *pings * 6, *ABC, STOP, DONE]
    async with answering(*steps, limits=UpstreamLimits(first_token=5, idle=1.0)) as (_, upstream):
        assert (await run(upstream)).outcome == "done"


@pytest.mark.parametrize(
    ("limits", "steps", "said"),
    [
        (UpstreamLimits(first_token=0.1), [Stall()], "answered nothing within 0.1 s"),
        (UpstreamLimits(first_token=0.1), [Head(), Stall()], "no first token within 0.1 s"),
        (UpstreamLimits(first_token=0.1), [chat_event({"role": "assistant"}), Stall()], "no first token within 0.1 s"),
        (UpstreamLimits(idle=0.1), [Comment(), Stall()], "silent for 0.1 s"),
        (UpstreamLimits(idle=0.1), [*ABC, Stall()], "silent for 0.1 s"),
        (UpstreamLimits(idle=0.1), [Send(b'data: {"choices'), Stall()], "silent for 0.1 s"),
        (UpstreamLimits(total=0.2), [*ABC, *[chat_event("."), Pause(0.02)] * 50], "did not finish within 0.2 s"),
        (UpstreamLimits(total=0.1), [Head(), Stall()], "did not finish within 0.1 s"),
    ],
)
async def test_each_limit_has_its_own_words(limits: UpstreamLimits, steps: list[Step], said: str) -> None:
    """And closes the connection."""
    async with answering(*steps, limits=limits) as (wire, upstream):
        failure = (await run(upstream)).failure
        await wire.disconnected(1, within=1.0)
    assert (failure.failure, failure.retryable) == ("upstream_timeout", True)
    assert said in failure.detail


async def test_a_slow_consumer_is_not_the_upstreams_fault() -> None:
    """The idle limit is about the upstream: what it has sent in time may wait."""
    steps: list[Step] = [chat_event("a"), Pause(0.05), *ABC, Pause(0.05), STOP, DONE]
    async with answering(*steps, limits=UpstreamLimits(idle=0.5)) as (_, upstream):
        assert (await run(upstream, pause=0.7)).outcome == "done"


async def test_a_handshake_that_never_ends_is_a_connection_that_timed_out() -> None:
    """TLS to a server that accepts and says nothing."""
    async with (
        MisbehavingUpstream() as wire,
        facing(f"https://127.0.0.1:{wire.port}/v1", UpstreamLimits(connect=0.1)) as upstream,
    ):
        told = await run(upstream)
    assert told.outcome == "upstream_timeout"
    assert "no connection within 0.1 s" in told.failure.detail


async def test_nobody_listening_is_unreachable() -> None:
    """Named with its address, and worth trying again."""
    async with MisbehavingUpstream() as wire:
        url, port = wire.url, wire.port
    async with facing(url) as upstream:
        failure = (await run(upstream)).failure
    assert (failure.failure, failure.retryable) == ("upstream_unreachable", True)
    assert f"127.0.0.1:{port}" in failure.detail


# --- cancel and back-pressure ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "steps", [[Stall()], [Head(), Stall()], [Comment(), Stall()], [*ABC, Stall()]], ids=["head", "body", "token", "mid"]
)
async def test_cancel_closes_the_upstream_at_once(steps: list[Step]) -> None:
    """Before the headers, before the first token, in the middle: the model stops working for nobody."""
    async with answering(*steps) as (wire, upstream):
        running = asyncio.create_task(run(upstream))
        await wire.requested()
        await asyncio.sleep(0.05)  # the other end has sent what it will send
        running.cancel()
        await wire.disconnected(1, within=0.5)
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_leaving_between_two_lists_closes_the_upstream() -> None:
    """`aclose` of the generator, where nothing is being awaited."""
    async with answering(*ABC, Stall()) as (wire, upstream):
        parts = upstream.generate({"model": "m"}, "chat")
        assert isinstance(await anext(parts), list)
        await parts.aclose()
        await wire.disconnected(1, within=0.5)


async def test_leaving_at_the_finish_is_no_cancel() -> None:
    """Whoever has taken the Finish need not ask again: the connection ends by itself, after the answer."""
    async with answering(*chat_answer("a")) as (wire, upstream):
        for _ in range(3):
            assert (await run(upstream)).outcome == "done"
        await until(lambda: wire.open_connections == 0, "the connections to have come to their end")
        assert not any(closed.mid_answer for closed in wire.closed)


@asynccontextmanager
async def serving(
    handler: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[OpenAIUpstream]:
    """A server that is nothing but this handler, and a producer for it."""
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, facing(f"http://127.0.0.1:{port}/v1") as upstream:
        yield upstream


async def test_cancel_does_not_wait_for_a_request_that_nobody_reads() -> None:
    """A large one, to a server that has stopped reading: else its connection would stay for ever."""
    size = 2**24
    received: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    cancelled = asyncio.Event()

    async def stuck(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await cancelled.wait()
        count = 0
        with suppress(ConnectionError):
            while data := await reader.read(2**20):
                count += len(data)
        received.set_result(count)
        writer.close()

    async with serving(stuck) as upstream:
        running = asyncio.create_task(run(upstream, prompt="x" * size))
        await asyncio.sleep(0.2)
        running.cancel()
        await asyncio.wait([running])
        cancelled.set()
        assert await asyncio.wait_for(received, 1.0) < size


async def test_a_consumer_that_takes_nothing_stops_the_upstream() -> None:
    """What is buffered here does not grow: the journal's slowness becomes the upstream's."""
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        event = chat_event("x" * 64_000).encode()
        with suppress(ConnectionError):
            while True:
                writer.write(event)
                await writer.drain()
                sent += len(event)
        writer.close()

    async with serving(flood) as upstream, aclosing(upstream.generate({"model": "m"}, "chat")) as parts:
        await anext(parts)
        await asyncio.sleep(0.1)
        before = sent
        await asyncio.sleep(0.1)
        assert sent == before
        assert sent < 32 * 2**20  # what the kernel's socket buffers hold


async def test_a_failure_comes_after_the_tokens_before_it() -> None:
    """Also when all of it came in one read."""
    body = Script([*ABC, json_event({"error": {"message": "quota", "code": 429}}), DONE]).body()
    async with answering(Send(body)) as (_, upstream):
        told = await run(upstream)
        assert (told.text, told.failure.detail) == ("abc", "quota")


# --- several upstreams -------------------------------------------------------------------------------------------


@asynccontextmanager
async def pooled(*upstreams: OpenAIUpstream | Scripted) -> AsyncIterator[Upstreams]:
    pool = Upstreams(upstreams)
    try:
        yield pool
    finally:
        await pool.close()


async def test_a_model_goes_to_the_first_upstream_whose_pattern_matches() -> None:
    """And to none where none does."""
    first, second, rest = (OpenAIUpstream("http://x/v1", pattern) for pattern in ("gpt-*", "gpt-4*", "[lm]lama"))
    async with pooled(first, second, rest) as pool:
        assert [pool.for_model(model) for model in ("gpt-4", "llama", "GPT-4", "mistral")] == [first, rest, None, None]
    async with pooled(first, OpenAIUpstream("http://y/v1")) as pool:
        assert pool.for_model("anything") is not None


async def test_models_are_listed_from_whom_they_would_be_served_by() -> None:
    """Each once; one that is down is left out, but for a model that its pattern names."""
    one, two = (
        MisbehavingUpstream({"a": Script([]), "b": Script([])}),
        MisbehavingUpstream({"b": Script([]), "c": Script([])}),
    )
    async with one, two:
        down = OpenAIUpstream("http://127.0.0.1:1/v1", "named")
        async with pooled(OpenAIUpstream(one.url, "a"), OpenAIUpstream(two.url), down, Scripted()) as pool:
            assert [model["id"] for model in await pool.models()] == ["a", "b", "c"]
            assert await pool.default_model() == "a"
            await pool.models()
            assert len(two.requests) == 1
        async with pooled(down, Scripted()) as pool:
            assert [model["id"] for model in await pool.models()] == ["named", "scripted"]


async def test_the_default_model_is_the_first_that_the_first_upstream_lists() -> None:
    """Or says why there is none."""
    async with MisbehavingUpstream({"b": Script([]), "a": Script([])}) as wire:
        async with pooled(OpenAIUpstream(wire.url), Scripted()) as pool:
            assert await pool.default_model() == "b"
        async with pooled(OpenAIUpstream(wire.url, "z*")) as pool:
            with pytest.raises(UnknownModel):
                await pool.default_model()
    async with pooled() as pool:
        with pytest.raises(UnknownModel):
            await pool.default_model()
    async with pooled(OpenAIUpstream("http://127.0.0.1:1/v1")) as pool:
        with pytest.raises(ProducerFailed) as caught:
            await pool.default_model()
        assert caught.value.failure == "upstream_unreachable"
