"""A real Chromium, and in it the browser client, for tests that look at it without the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from midstream.testing.upstream import chat_answer
from tests.e2e.playground import LAUNCH_ARGS, GatewayProcess, Upstream, gateway

TOLD_GATEWAY = "".join((Path(__file__).parent / name).read_text() for name in ("told_gateway.js", "told_sockets.js"))

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def browser(chromium_path: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path, args=LAUNCH_ARGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    with Upstream() as upstream:
        upstream.says(*chat_answer("unasked"))
        yield upstream


@pytest.fixture(scope="module")
def served(upstream: Upstream) -> Iterator[GatewayProcess]:
    """A gateway in front of that upstream."""
    with gateway("--journal", "memory:", "--upstream", upstream.url) as process:
        yield process


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    with gateway("--journal", "memory:", "--upstream", "scripted:") as process:
        page = browser.new_page()
        page.goto(process.address + "/")
        yield page
        page.context.close()


@pytest.fixture
def run(page: Page) -> Run:
    """Runs JavaScript that sees the module as `midstream`, and the told gateway; gives back what it returns."""

    def run(script: str, argument: Any = None) -> Any:
        whole = f"""async (argument) => {{
            const midstream = await import(new URL("web/midstream.js", location.href));
            {TOLD_GATEWAY}
            {script}
        }}"""
        return page.evaluate(whole, argument)

    return run
