"""OpenAI's official client in a page of another origin, in a real Chromium: it streams, where the origin is allowed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, async_playwright

from midstream.server.settings import Settings
from midstream.testing.gateway import RunningGateway
from midstream.testing.patience import soon
from midstream.testing.transport_dial import ADA, KEYS
from tests.e2e.foreign import origin
from tests.e2e.playground import LAUNCH_ARGS, WITHIN
from tests.javascript import require_clients

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]

HTML = """<!doctype html><title>A page</title>
<script type="module">
  import * as page from "/js/openai_page.js";
  window.page = page;
</script>"""
LOADED = 40.0  # seconds for the package's modules, a hundred and more, on a busy machine
TEXTS = ["Hel", "lo", " é✅", "\n你", "."]


class Tab:
    """A page, and what its browser has asked in preflights: the headers by name, of each."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.preflights: list[set[str]] = []

    async def watch(self) -> None:
        wire = await self.page.context.new_cdp_session(self.page)

        def sent(event: dict[str, Any]) -> None:
            headers = {name.lower(): value for name, value in event["headers"].items()}
            if "access-control-request-headers" in headers:
                self.preflights.append(set(headers["access-control-request-headers"].split(",")))

        wire.on("Network.requestWillBeSentExtraInfo", sent)
        await wire.send("Network.enable")

    async def ask(self, gateway: RunningGateway, how: str, cut: int | None = None) -> None:
        asked = {"how": how, "base": gateway.address, "key": ADA, "cut": cut}
        await self.page.evaluate("(asked) => void window.page.ask(asked)", asked)

    async def reads(self, text: str) -> None:
        """Wait until the answer so far is this."""
        await soon(self.page.wait_for_function("(text) => window.page.heard.text === text", arg=text))

    async def end(self) -> str | None:
        """What was thrown in the end; None: the answer is complete."""
        await soon(self.page.wait_for_function("window.page.heard.end !== undefined"))
        thrown: str | None = await self.page.evaluate("window.page.heard.end")
        return thrown


@asynccontextmanager
async def tab(chromium: str, url: str) -> AsyncIterator[Tab]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=LAUNCH_ARGS)
        page = await browser.new_page()
        page.set_default_timeout(WITHIN * 1000)
        opened = Tab(page)
        await opened.watch()
        await page.goto(url, timeout=LOADED * 1000)
        await page.wait_for_function("window.page !== undefined")
        yield opened
        await browser.close()


@asynccontextmanager
async def arranged(
    chromium: str, directory: Path, *, allowed: bool = True
) -> AsyncIterator[tuple[RunningGateway, Tab]]:
    """A gateway with keys that allows one origin, and a page of that one, or of another."""
    require_clients()
    (directory / "keys").write_text(KEYS)
    async with origin(HTML) as known, origin(HTML) as stranger:
        settings = Settings(journal="memory:", keys_file=str(directory / "keys"), cors_origin=(known,))
        async with RunningGateway(settings) as gateway, tab(chromium, known if allowed else stranger) as opened:
            yield gateway, opened


@pytest.mark.parametrize("how", ["create", "stream"])
async def test_a_chat_streams_into_a_page_of_an_allowed_origin(chromium_path: str, tmp_path: Path, how: str) -> None:
    """Each piece is there before the next is said; and what the SDK sends of itself passes the preflight."""
    async with arranged(chromium_path, tmp_path) as (gateway, page):
        await page.ask(gateway, how)
        puppet = await gateway.puppets.next()
        for count, text in enumerate(TEXTS, 1):
            await puppet.say(text)
            await page.reads("".join(TEXTS[:count]))
        await puppet.finish()
        assert await page.end() is None
        [asked] = page.preflights
        assert asked >= {"authorization", "content-type", "x-stainless-lang", "x-stainless-retry-count"}
        assert ("x-stainless-helper-method" in asked) == (how == "stream")


async def test_a_response_goes_on_in_a_page_after_the_delta_it_had(chromium_path: str, tmp_path: Path) -> None:
    """OpenAI's own resume contract, by the unchanged client: what is asked for again begins behind the cut."""
    async with arranged(chromium_path, tmp_path) as (gateway, page):
        await page.ask(gateway, "responses", cut=len("".join(TEXTS[:2])))
        puppet = await gateway.puppets.next()
        for text in TEXTS[:2]:
            await puppet.say(text)
        await soon(page.page.wait_for_function("window.page.heard.cuts === 1"))
        await puppet.say(*TEXTS[2:])
        await puppet.finish()
        assert await page.end() is None
        await page.reads("".join(TEXTS))
        assert gateway.puppets.begun == 1


async def test_a_page_of_another_origin_gets_a_network_error(chromium_path: str, tmp_path: Path) -> None:
    """Its preflight is refused: the request is never sent, no answer begins, and the page is told nothing."""
    async with arranged(chromium_path, tmp_path, allowed=False) as (gateway, page):
        await page.ask(gateway, "create")
        assert await page.end() == "APIConnectionError: Connection error."
        assert len(page.preflights) == 1
        assert gateway.puppets.begun == 0
