"""The official SDK in front of a gateway under test, for tests of the Responses routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from midstream.codec.responses_object import stream_of
from midstream.testing.patience import soon
from midstream.testing.puppet import Puppet
from tests.gateways import Site, site

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
ASKED: dict[str, Any] = {"model": "puppet", "input": "Hello"}


@dataclass(frozen=True, slots=True)
class Here:
    """A gateway whose model is a puppet, and an SDK that asks it and repeats nothing by itself."""

    site: Site
    sdk: Any  # its own types are unions of all that the vendor has

    async def begin(self, **more: Any) -> tuple[str, Any, Puppet]:
        """A streamed response that has said "Hel": its id, its stream behind the first event, and who speaks in it."""
        beginning = asyncio.create_task(self.create(stream=True, **more))
        puppet = await self.site.puppets.next()
        await puppet.say("Hel")
        stream = await soon(beginning)
        created = await soon(anext(stream))
        return created.response.id, stream, puppet

    async def told(self, *texts: str, **more: Any) -> tuple[str, list[Any]]:
        """A response that has ended well: its id, and its events."""
        response_id, stream, puppet = await self.begin(**more)
        if texts:
            await puppet.say(*texts)
        await puppet.finish(usage=USAGE)
        await every(stream)
        return response_id, await self.all(response_id)

    async def create(self, **more: Any) -> Any:
        return await soon(self.sdk.responses.create(**ASKED | more))

    async def whole(self, response_id: str) -> Any:
        return await soon(self.sdk.responses.retrieve(response_id))

    async def all(self, response_id: str) -> list[Any]:
        """Its events from the first on."""
        return await every(await soon(self.sdk.responses.retrieve(response_id, stream=True)))

    async def after(self, response_id: str, number: int) -> list[Any]:
        """Its events behind this one."""
        return await every(await soon(self.sdk.responses.retrieve(response_id, stream=True, starting_after=number)))


@asynccontextmanager
async def responding(**settings: Any) -> AsyncIterator[Here]:
    async with site(**settings) as running, sdk_of(running) as sdk:
        yield Here(running, sdk)


def sdk_of(running: Site, key: str = "none") -> Any:
    return AsyncOpenAI(base_url=f"{running.gateway.address}/v1", api_key=key, max_retries=0)


async def every(stream: Any) -> list[Any]:
    """The events up to the end of the stream."""

    async def collect() -> list[Any]:
        return [event async for event in stream]

    return await soon(collect())


def kinds(events: list[Any]) -> list[str]:
    """The types of events, without what they all begin with."""
    return [event.type.removeprefix("response.") for event in events]


def stream_id_of(response_id: str) -> str:
    stream_id = stream_of(response_id)
    assert stream_id is not None
    return stream_id


async def refused(asking: Awaitable[Any]) -> tuple[int, str | None]:
    """The status that an SDK raised, and the field it was about."""
    with pytest.raises(openai.APIStatusError) as caught:
        await soon(asking)
    error = caught.value
    assert isinstance(error.body, dict), error.body
    assert error.body.keys() == {"message", "type", "param", "code"}
    return error.status_code, error.param
