"""SDKs that people have in their code stream through the gateway unchanged, and raise when an answer fails midway."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from midstream.testing.upstream import (
    CloseClean,
    MisbehavingUpstream,
    Pause,
    Script,
    chat_answer,
    chat_event,
    json_event,
)
from midstream.wire import CORS_ALLOW
from tests.gateways import Site, site
from tests.javascript import FOLDER, require_clients

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it looks for one where nothing can be reached

WITHIN = 50.0
PIECES = ["Hel", "lo", " th", "ere", "."]
BROKEN = {"error": {"message": "the GPU fell off the bus", "type": "server_error", "code": 500}}
Heard = tuple[str, str | None]

# Importing LiteLLM, and running Node, take seconds on a busy machine.
pytestmark = pytest.mark.timeout(120)


@pytest_asyncio.fixture
async def here() -> AsyncIterator[Site]:
    scripts = {
        "whole": Script(chat_answer(*PIECES)),
        # Silent for many heartbeats.
        "slow": Script([chat_event("Hel"), Pause(0.4), chat_event("lo"), Pause(0.4), *chat_answer(" there.")]),
        "failing": Script([chat_event("Hel"), chat_event("lo"), json_event(BROKEN)]),
        "cut": Script([chat_event("Hel"), chat_event("lo"), CloseClean()]),
    }
    async with MisbehavingUpstream(scripts) as upstream, site(upstream=(upstream.url,), heartbeat=0.05) as running:
        yield running


async def node(sdk: str, here: Site, model: str, cut: int | None = None) -> Heard:
    """The text that the SDK gave, and what it threw."""
    require_clients()
    program = shutil.which("node") or pytest.skip("no node is installed")
    told = {"sdk": sdk, "base": f"{here.gateway.address}/v1", "model": model} | (
        {"cut": cut} if cut is not None else {}
    )
    process = await asyncio.create_subprocess_exec(
        program, str(Path(FOLDER) / "sdk.js"), json.dumps(told), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), WITHIN)
    lines = [json.loads(line) for line in out.splitlines()]
    assert "end" in lines[-1], lines
    return "".join(line.get("text", "") for line in lines), lines[-1]["end"]


def collected(pieces: Iterator[Any]) -> Heard:
    text = ""
    try:
        for piece in pieces:
            text += piece
    except Exception as error:  # noqa: BLE001  # whatever class the SDK has for it
        return text, str(error)
    return text, None


def langchain(address: str, model: str) -> Heard:
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    gc.freeze()  # half a million objects, for the collector of all tests that follow
    chat = ChatOpenAI(base_url=f"{address}/v1", api_key=SecretStr("none"), model=model, max_retries=0)
    return collected(chunk.content for chunk in chat.stream("Hello"))


def litellm(address: str, model: str) -> Heard:
    import litellm as sdk

    gc.freeze()

    def pieces() -> Iterator[str]:
        stream = sdk.completion(
            model=f"openai/{model}",
            api_base=f"{address}/v1",
            api_key="none",
            messages=[{"role": "user", "content": "Hello"}],
            stream=True,
            num_retries=0,
        )
        for chunk in stream:
            yield chunk.choices[0].delta.content or ""

    return collected(pieces())


async def ask(client: str, here: Site, model: str) -> Heard:
    if client in ("chat", "responses", "vercel"):
        return await node(client, here, model)
    return await asyncio.to_thread({"langchain": langchain, "litellm": litellm}[client], here.gateway.address, model)


CLIENTS = ["langchain", "litellm", "chat", "responses", "vercel"]


@pytest.mark.parametrize("client", CLIENTS)
async def test_an_answer_streams_through_an_unchanged_client(client: str, here: Site) -> None:
    assert await ask(client, here, "whole") == ("Hello there.", None)


@pytest.mark.parametrize("client", CLIENTS)
async def test_signs_of_life_in_a_silence_do_not_make_a_client_raise(client: str, here: Site) -> None:
    assert await ask(client, here, "slow") == ("Hello there.", None)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("model", ["failing", "cut"])
async def test_an_answer_that_fails_midway_makes_the_client_raise(client: str, model: str, here: Site) -> None:
    text, thrown = await ask(client, here, model)
    assert "Hello".startswith(text)
    assert thrown is not None
    if model == "failing":
        assert "the GPU fell off the bus" in thrown


@pytest.mark.parametrize("cut", range(1, len(PIECES) + 1))
async def test_the_node_sdk_goes_on_after_any_delta_of_a_response(cut: int, here: Site) -> None:
    assert await node("responses", here, "whole", cut) == ("Hello there.", None)


async def test_a_page_of_a_configured_origin_may_send_what_the_node_sdk_sends(here: Site) -> None:
    """A browser asks first, and sends nothing where one of them is not allowed."""
    sent, thrown = await node("headers", here, "whole")
    assert thrown is None
    assert "x-stainless-lang" in sent.split()
    simple = {"accept", "user-agent"}  # the Fetch standard's, and one that browsers set themselves
    assert {name.strip().lower() for name in CORS_ALLOW.split(",")} | simple >= set(sent.split())
