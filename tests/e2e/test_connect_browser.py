"""A page of another origin, in a real Chromium, with the official client: Connect and gRPC-Web without a bridge."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, async_playwright

from midstream.server.settings import Settings
from midstream.testing.fault_proxy import FaultProxy
from midstream.testing.gateway import RunningGateway
from midstream.testing.patience import soon
from midstream.testing.transport_dial import ADA, KEYS
from tests.e2e.foreign import origin
from tests.e2e.playground import LAUNCH_ARGS, WITHIN
from tests.javascript import DEFINITION, import_map, require_clients

pytestmark = pytest.mark.browser

HTML = """<!doctype html><title>A page</title>
<script type="importmap">{imports}</script>
<script type="module">
  import {{ heard, read }} from "/js/page.js";
  window.heard = heard;
  window.read = (asked) => {{ read(asked).catch((error) => (window.failed = String(error))); }};
</script>"""


@asynccontextmanager
async def chromium(path: str, url: str) -> AsyncIterator[Page]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=LAUNCH_ARGS)
        page = await browser.new_page()
        page.set_default_timeout(WITHIN * 1000)
        await page.goto(url)
        await page.wait_for_function("window.read !== undefined")
        yield page
        await browser.close()


async def has_heard(page: Page, count: int) -> None:
    await page.wait_for_function("(count) => window.failed || window.heard.messages.length >= count", arg=count)
    assert await page.evaluate("window.failed") is None


@pytest.mark.parametrize("protocol", ["connect", "grpc-web"])
async def test_a_page_goes_on_after_a_cut_at_the_next_token(chromium_path: str, tmp_path: Path, protocol: str) -> None:
    """Twice cut off by a reset in mid-answer, it is given every token once, of one generation."""
    require_clients()
    (tmp_path / "keys").write_text(KEYS)
    async with origin(HTML.format(imports=import_map("/modules"))) as known:
        settings = Settings(journal="memory:", keys_file=str(tmp_path / "keys"), cors_origin=(known,))
        gateway = RunningGateway(settings)
        async with gateway, FaultProxy("127.0.0.1", gateway.port) as proxy, chromium(chromium_path, known) as page:
            asked: dict[str, Any] = {"protocol": protocol, "base": f"http://127.0.0.1:{proxy.port}"}
            asked |= {"definition": DEFINITION, "prompt": "Hello", "session": "page", "key": ADA}
            await page.evaluate("(asked) => window.read(asked)", asked)
            puppet = await gateway.puppets.next()
            await puppet.say(*"abcde")
            await has_heard(page, 5)
            proxy.reset()
            await puppet.say("é✅", "\n", "你")
            await has_heard(page, 8)
            proxy.reset()
            await puppet.say("x", "y")
            await puppet.finish()
            await soon(page.wait_for_function("window.failed || window.heard.done"))
            heard = await page.evaluate("window.heard")
            texts = [*"abcde", "é✅", "\n", "你", "x", "y", ""]
            assert heard["messages"] == [[text, at, at == 10] for at, text in enumerate(texts)]
            assert len(heard["breaks"]) >= 2
            assert heard["streamId"] in {state.meta.stream_id for state in await gateway.streams.list("ada")}
            assert gateway.puppets.begun == 1


async def test_a_page_that_is_closed_stops_nothing(chromium_path: str, tmp_path: Path) -> None:
    """The generation goes on, and another client is given all of it."""
    require_clients()
    async with origin(HTML.format(imports=import_map("/modules"))) as known:
        gateway = RunningGateway(Settings(journal="memory:", cors_origin=(known,)))
        async with gateway:
            async with chromium(chromium_path, known) as page:
                asked = {"protocol": "connect", "base": gateway.address, "definition": DEFINITION}
                asked |= {"prompt": "Hello", "session": "page", "key": ADA}
                await page.evaluate("(asked) => window.read(asked)", asked)
                puppet = await gateway.puppets.next()
                await puppet.say("a")
                await has_heard(page, 1)
            [state] = await gateway.streams.list("open")
            await gateway.unread(state.meta.stream_id)
            assert not puppet.stopped.is_set()
            await puppet.say("b")
            await puppet.finish()
            answer = await gateway.streams.answer(state.meta.stream_id, "open")
            assert answer.fold.choices[0].text == b"ab"
