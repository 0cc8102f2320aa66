"""OpenAI's own Python client in front of the gateway: changing `base_url` is all that its user does.

The upstream behind the gateway misbehaves on demand; what the client is told is what a client of OpenAI would be told.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from openai import (
    APIConnectionError,
    APIError,
    APIStatusError,
    AsyncOpenAI,
    AsyncStream,
    AuthenticationError,
    BadRequestError,
    InternalServerError,
    NotFoundError,
    OpenAI,
    RateLimitError,
)
from openai.types.chat import ChatCompletionChunk

from midstream.cli.model import Model
from midstream.testing.fault_proxy import FaultProxy
from midstream.testing.patience import soon
from midstream.testing.puppet import Puppets
from midstream.testing.transport_dial import ADA, KEYS
from midstream.testing.upstream import (
    DONE,
    FAULTS,
    Head,
    MisbehavingUpstream,
    Pause,
    Script,
    Stall,
    Status,
    Step,
    chat_answer,
    chat_event,
    completion_event,
    error_body,
)
from midstream.transports import openai_errors
from tests.gateways import Site, site

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


@asynccontextmanager
async def sdk(address: str, key: str = "none") -> AsyncIterator[AsyncOpenAI]:
    """The official client, which repeats nothing by itself here."""
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=30) as client:
        yield client


@pytest_asyncio.fixture
async def client(here: Site) -> AsyncIterator[AsyncOpenAI]:
    async with sdk(here.gateway.address) as official:
        yield official


async def streamed(client: AsyncOpenAI, model: str, **more: Any) -> AsyncStream[ChatCompletionChunk]:
    stream: Any = await soon(client.chat.completions.create(model=model, messages=HELLO, stream=True, **more))
    return stream


async def chunks(client: AsyncOpenAI, model: str, **more: Any) -> list[ChatCompletionChunk]:
    async with asyncio.timeout(20):
        return [chunk async for chunk in await streamed(client, model, **more)]


async def taken(stream: AsyncStream[ChatCompletionChunk], said: list[ChatCompletionChunk]) -> None:
    """Put every chunk into the list, also those before an error."""
    async with asyncio.timeout(20):
        async for chunk in stream:
            said.append(chunk)  # noqa: PERF401  # what came before an error counts


def text(said: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in said for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


# --- answers ---------------------------------------------------------------------------------------------------------


async def test_answer_streams_and_comes_whole(client: AsyncOpenAI) -> None:
    said = await chunks(client, "polite")
    assert text(said) == "Hello, world"
    assert said[0].choices[0].delta.role == "assistant"
    assert said[-1].choices[0].finish_reason == "stop"
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in said}) == 1
    whole = await soon(client.chat.completions.create(model="polite", messages=HELLO))
    assert (whole.object, whole.model, whole.choices[0].message.content) == (
        "chat.completion",
        "polite",
        "Hello, world",
    )
    assert whole.choices[0].finish_reason == "stop"


def test_the_client_without_asyncio_streams_too(tmp_path: Any) -> None:
    """In several threads at once."""

    async def run() -> list[str]:
        async with MisbehavingUpstream(FAULTS) as upstream, site(upstream=(upstream.url,)) as here:

            def ask() -> str:
                with OpenAI(base_url=f"{here.gateway.address}/v1", api_key="none", max_retries=0) as client:
                    stream = client.chat.completions.create(model="polite", messages=HELLO, stream=True)
                    return text(list(stream))

            return list(await asyncio.gather(*(asyncio.to_thread(ask) for _ in range(3))))

    assert asyncio.run(run()) == ["Hello, world"] * 3


async def test_usage_comes_to_who_asked_for_it(client: AsyncOpenAI) -> None:
    """In a chunk of its own without choices, before [DONE]."""
    asked = await chunks(client, "choices-interleaved", n=2, stream_options={"include_usage": True})
    assert asked[-1].choices == []
    assert asked[-1].usage is not None
    assert asked[-1].usage.total_tokens == 10
    assert all(chunk.usage is None for chunk in asked[:-1])
    silent = await chunks(client, "choices-interleaved", n=2)
    assert all(chunk.choices and chunk.usage is None for chunk in silent)
    whole = await soon(client.chat.completions.create(model="choices-interleaved", messages=HELLO, n=2))
    assert whole.usage is not None
    assert whole.usage.total_tokens == 10


async def test_choices_stay_apart_and_none_ends_for_the_others(client: AsyncOpenAI) -> None:
    """`0:A 1:X 0:B finish1 0:C finish0`: ABC and X, each with its role and its end."""
    said = await chunks(client, "choices-interleaved", n=2)
    assert (text(said, 0), text(said, 1)) == ("ABC", "X")
    for index in (0, 1):
        mine = [choice for chunk in said for choice in chunk.choices if choice.index == index]
        assert mine[0].delta.role == "assistant"
        assert [choice.finish_reason for choice in mine].count("stop") == 1
        assert mine[-1].finish_reason == "stop"
    whole = await soon(client.chat.completions.create(model="choices-interleaved", messages=HELLO, n=2))
    assert [choice.message.content for choice in whole.choices] == ["ABC", "X"]


async def test_empty_choices_and_null_content_are_nothing(client: AsyncOpenAI) -> None:
    said = await chunks(client, "empty-choices-and-null-content")
    assert text(said) == " "
    assert all(chunk.choices for chunk in said)


async def test_reasoning_refusal_and_logprobs_arrive(client: AsyncOpenAI, upstream: MisbehavingUpstream) -> None:
    entry = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    steps = [
        chat_event({"reasoning_content": "hm"}),
        chat_event("a", logprobs={"content": [entry]}),
        chat_event({"refusal": "no"}),
        chat_event(finish_reason="stop"),
        DONE,
    ]
    upstream.script("m", Script(steps))
    said = await chunks(client, "m", logprobs=True)
    deltas = [chunk.choices[0].delta for chunk in said]
    assert [getattr(delta, "reasoning_content", None) for delta in deltas].count("hm") == 1
    assert [delta.refusal for delta in deltas].count("no") == 1
    [logprobs] = [chunk.choices[0].logprobs for chunk in said if chunk.choices[0].logprobs]
    assert logprobs.content is not None
    assert logprobs.content[0].logprob == -0.5
    whole = (await soon(client.chat.completions.create(model="m", messages=HELLO, logprobs=True))).choices[0]
    assert (whole.message.content, whole.message.refusal) == ("a", "no")
    assert whole.message.reasoning_content == "hm"  # type: ignore[attr-defined]  # a vendor's field
    assert whole.logprobs is not None
    assert whole.logprobs.content is not None
    assert whole.logprobs.content[0].token == "a"


async def test_tools_are_called(client: AsyncOpenAI, upstream: MisbehavingUpstream) -> None:
    """The client's own assembler makes of the deltas what the upstream meant; the request went on as it was."""
    tool = {"type": "function", "function": {"name": "first", "parameters": {}, "strict": True}}
    async with client.chat.completions.stream(model="parallel-tool-calls", messages=HELLO, tools=[tool]) as stream:  # type: ignore[list-item]
        final = await soon(stream.get_final_completion())
    assert final.choices[0].finish_reason == "tool_calls"
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert [(call.id, call.function.name, call.function.arguments) for call in calls] == [
        ("call_a", "first", '{"x":"\\u00e9"}'),
        ("call_b", "second", '{"y":1}'),
    ]
    assert upstream.requests[-1].json["tools"] == [tool]
    whole = await soon(client.chat.completions.create(model="parallel-tool-calls", messages=HELLO))
    assert [call.model_dump(exclude={"type"}) for call in whole.choices[0].message.tool_calls or ()] == [
        call.model_dump(include={"id", "function"}, exclude={"function": {"parsed_arguments"}}) for call in calls
    ]


async def test_text_completions(client: AsyncOpenAI, upstream: MisbehavingUpstream) -> None:
    """Streamed and whole, of several prompts."""
    steps = [completion_event("Hel"), completion_event("x", choice=1), completion_event("lo")]
    ends = [completion_event(choice=index, finish_reason="stop") for index in (1, 0)]
    upstream.script("m", Script([*steps, *ends, DONE]))
    stream = await soon(client.completions.create(model="m", prompt=["a", "b"], stream=True))
    said = [choice async for chunk in stream for choice in chunk.choices]
    assert "".join(choice.text for choice in said if choice.index == 0) == "Hello"
    assert [choice.finish_reason for choice in said][-2:] == ["stop", "stop"]
    whole = await soon(client.completions.create(model="m", prompt=["a", "b"]))
    assert (whole.object, [choice.text for choice in whole.choices]) == ("text_completion", ["Hello", "x"])
    assert upstream.requests[-1].path == "/v1/completions"
    assert upstream.requests[-1].json["prompt"] == ["a", "b"]


async def test_models_are_listed_and_found(client: AsyncOpenAI, upstream: MisbehavingUpstream) -> None:
    """By names with slashes too."""
    upstream.script("org/m", Script(chat_answer("a")))
    names = [model.id async for model in client.models.list()]
    assert {"polite", "org/m"} <= set(names)
    assert (await soon(client.models.retrieve("org/m"))).id == "org/m"
    with pytest.raises(NotFoundError) as caught:
        await soon(client.models.retrieve("nobody"))
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


# --- failures --------------------------------------------------------------------------------------------------------

BROKEN = (
    "error-after-three-tokens",
    "clean-end-without-finish",
    "cut-without-finish",
    "event-broken-in-the-middle",
    "error-then-done",
)


@pytest.mark.parametrize("fault", BROKEN)
async def test_failure_in_the_middle_raises_in_the_client(client: AsyncOpenAI, fault: str) -> None:
    """It never ends quietly; what was said before has arrived."""
    said: list[ChatCompletionChunk] = []
    with pytest.raises(APIError) as caught:
        await taken(await streamed(client, fault), said)
    assert not isinstance(caught.value, APIStatusError)
    assert caught.value.message
    assert isinstance(caught.value.body, dict)
    assert caught.value.body.keys() == {"message", "type", "param", "code"}
    if fault == "error-after-three-tokens":
        assert text(said) == "abc"
        assert "quota" in caught.value.message


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("gzip-error", BadRequestError, "no such parameter: 'stop'"),
        ("unauthorized", AuthenticationError, "Incorrect API key provided"),
        ("rate-limited", RateLimitError, "slow down"),
        ("bad-gateway-page", InternalServerError, "502 Bad Gateway"),
        ("redirect", InternalServerError, "redirects"),
        ("empty-body", InternalServerError, "empty body"),
    ],
)
async def test_upstreams_refusal_is_the_clients(
    client: AsyncOpenAI, fault: str, error: type[APIStatusError], message: str, stream: bool
) -> None:
    """With its status and its words, before the first byte of an answer."""
    with pytest.raises(error) as caught:
        await soon(client.chat.completions.create(model=fault, messages=HELLO, stream=stream))
    assert message in caught.value.message
    assert "midstream-stream-id" in caught.value.response.headers
    if fault == "rate-limited":
        assert caught.value.response.headers["retry-after"] == "7"
        assert caught.value.type == "rate_limit_error"
    if fault == "redirect":
        assert caught.value.response.headers["x-should-retry"] == "false"


async def test_failed_whole_answer_raises(client: AsyncOpenAI) -> None:
    """Also after some of it was said."""
    for fault in ("clean-end-without-finish", "event-broken-in-the-middle"):
        with pytest.raises(InternalServerError) as caught:
            await soon(client.chat.completions.create(model=fault, messages=HELLO))
        assert caught.value.code in ("upstream_truncated", "upstream_malformed")


async def test_the_client_repeats_what_may_succeed_and_nothing_else(here: Site, upstream: MisbehavingUpstream) -> None:
    """Its own retries: an upstream that was away for a moment is no failure to its user."""
    busy = Script([Status(503, {"Retry-After": "0"}, error_body("busy"))])
    upstream.script("m", busy, Script(chat_answer("there")))
    async with AsyncOpenAI(base_url=f"{here.gateway.address}/v1", api_key="none", max_retries=2) as client:
        assert text(await chunks(client, "m")) == "there"
        begun = len(upstream.requests)
        with pytest.raises(InternalServerError):
            await soon(client.chat.completions.create(model="event-broken-in-the-middle", messages=HELLO))
        assert len(upstream.requests) == begun + 1
        key = {"Idempotency-Key": "k"}
        with pytest.raises(InternalServerError) as caught:
            await soon(client.chat.completions.create(model="cut-without-finish", messages=HELLO, extra_headers=key))
        assert caught.value.response.headers["x-should-retry"] == "false", "the key stands for this failure"
        assert len(upstream.requests) == begun + 2


async def test_cancel_raises_in_the_client(here: Site, client: AsyncOpenAI, upstream: MisbehavingUpstream) -> None:
    upstream.script("m", Script([chat_event("Hel"), Stall()]))
    stream = await streamed(client, "m")
    whole = asyncio.ensure_future(client.chat.completions.create(model="m", messages=HELLO))
    await upstream.requested(2)
    for state in (await here.http.get("/v1/streams")).json["streams"]:
        await here.http.post(f"/v1/stream/{state['stream_id']}/cancel")
    with pytest.raises(APIError, match="cancelled") as caught:
        await taken(stream, [])
    assert caught.value.code == "cancelled"
    with pytest.raises(APIStatusError) as refused:
        await soon(whole)
    assert (refused.value.status_code, refused.value.code) == (409, "cancelled")


async def test_connection_that_is_cut_raises_in_the_client(here: Site, upstream: MisbehavingUpstream) -> None:
    upstream.script("m", Script([chat_event("Hel"), Stall()]))
    async with FaultProxy("127.0.0.1", here.gateway.port) as proxy, sdk(f"http://127.0.0.1:{proxy.port}") as client:
        stream = await streamed(client, "m")
        chunk = await soon(anext(stream))
        while not text([chunk]):
            chunk = await soon(anext(stream))
        proxy.reset()
        with pytest.raises((APIConnectionError, OSError)):
            await taken(stream, [])


async def test_reader_that_is_let_go_is_told_so(here: Site, client: AsyncOpenAI, upstream: MisbehavingUpstream) -> None:
    """A clean end would be taken for that of the answer: as when a gateway hands its streams on to others."""
    upstream.script("m", Script([chat_event("Hel"), Stall()]))
    stream = await streamed(client, "m")
    stream_id = stream.response.headers["midstream-stream-id"]
    await here.gateway.idle(stream_id)
    for follow in here.gateway.readers(stream_id):
        follow.interrupt()
    with pytest.raises(APIError) as caught:
        await taken(stream, [])
    assert caught.value.code == "interrupted"
    assert f"/v1/stream/{stream_id}?format=openai" in caught.value.message


async def test_heartbeats_are_nothing_to_the_client(upstream: MisbehavingUpstream) -> None:
    """Dozens of them before, between and after tokens."""
    steps: list[Step] = [
        Head(),
        Pause(0.3),
        chat_event("a"),
        Pause(0.3),
        chat_event("b"),
        chat_event(finish_reason="stop"),
    ]
    upstream.script("m", Script([*steps, Pause(0.3), DONE]))
    async with site(upstream=(upstream.url,), heartbeat=0.05) as here, sdk(here.gateway.address) as client:
        raw = asyncio.ensure_future(
            here.http.ask("POST", "/v1/chat/completions", json={"model": "m", "messages": HELLO, "stream": True})
        )
        assert text(await chunks(client, "m")) == "ab"
        body = (await soon(raw)).body
        assert body.count(b": ping\n") > 3
        assert b": ping\n\n" not in body
        assert b"retry:" not in body


# --- when the headers come -------------------------------------------------------------------------------------------


async def test_headers_come_as_soon_as_the_upstream_has_accepted(
    client: AsyncOpenAI, upstream: MisbehavingUpstream
) -> None:
    """A model may think for minutes: nothing on the way may take that for a dead connection."""
    upstream.script("m", Script([Head(), Stall()]))
    stream = await streamed(client, "m")
    assert (await soon(anext(stream))).choices[0].delta.role == "assistant"


async def test_headers_wait_so_long_and_no_longer(
    client: AsyncOpenAI, upstream: MisbehavingUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then a refusal comes inside the stream."""
    refuse = asyncio.Event()
    upstream.script("m", Script([Pause(refuse), Status(400, body=error_body("too long"))]))
    monkeypatch.setattr(openai_errors, "STATUS_PATIENCE", 0.05)
    stream = await streamed(client, "m")
    refuse.set()
    with pytest.raises(APIError, match="too long") as caught:
        await taken(stream, [])
    assert not isinstance(caught.value, APIStatusError)


async def test_source_that_accepts_at_once_is_not_waited_for() -> None:
    """As a queue does; what it has nothing to say is no refusal."""
    puppets = Puppets()
    async with site(puppets=puppets) as here, sdk(here.gateway.address) as client:
        asking = asyncio.ensure_future(streamed(client, "puppet"))
        puppet = await puppets.next()
        puppet.push([])
        stream = await soon(asking)
        await puppet.say("a")
        await puppet.finish()
        assert text([chunk async for chunk in stream]) == "a"


# --- resume ----------------------------------------------------------------------------------------------------------


async def test_the_client_itself_resumes(client: AsyncOpenAI, upstream: MisbehavingUpstream) -> None:
    """Its low-level verb takes the place named in Location, and goes on after the id it names."""
    stream = await streamed(client, "polite", stream_options={"include_usage": True})
    assert text([chunk async for chunk in stream]) == "Hello, world"
    place = stream.response.headers["location"].removeprefix("/v1")
    rest = await soon(
        client.get(
            place,
            cast_to=ChatCompletionChunk,
            stream=True,
            stream_cls=AsyncStream[ChatCompletionChunk],
            options={"headers": {"Last-Event-ID": "2"}},
        )
    )
    assert text([chunk async for chunk in rest]) == ", world"
    assert len(upstream.requests) == 1


# --- keys ------------------------------------------------------------------------------------------------------------


async def test_key_that_is_not_known_is_an_authentication_error(upstream: MisbehavingUpstream, tmp_path: Any) -> None:
    (tmp_path / "keys").write_text(KEYS)
    async with site(upstream=(upstream.url,), keys_file=str(tmp_path / "keys")) as here:
        async with sdk(here.gateway.address, "wrong") as client:
            for ask in (client.models.list, lambda: client.chat.completions.create(model="polite", messages=HELLO)):
                with pytest.raises(AuthenticationError) as caught:
                    await soon(ask())
                assert caught.value.code == "invalid_api_key"
        async with sdk(here.gateway.address, ADA) as client:
            assert text(await chunks(client, "polite")) == "Hello, world"


# --- a real model ----------------------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.timeout(180)
async def test_a_real_model_streams_through() -> None:
    """Chunk by chunk what it says whole, with its usage; and again from the middle, without being asked again."""
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "seed": 1}
    async with Model() as model, site(upstream=(model.url,)) as here, sdk(here.gateway.address) as client:
        name = (await soon(client.models.list())).data[0].id
        said = await chunks(client, name, stream_options={"include_usage": True}, **asked)
        whole = await soon(client.chat.completions.create(model=name, messages=HELLO, **asked))
        assert text(said) == whole.choices[0].message.content != ""
        assert said[-1].usage is not None
        assert whole.usage is not None
        assert said[-1].usage.completion_tokens == whole.usage.completion_tokens > 5
        place = f"/v1/stream/{said[0].id.removeprefix('chatcmpl-')}?format=openai&from=start"
        again = await here.http.get(place)
        assert again.body.count(b"\ndata: ") == len(said) + 1
