"""The pages that docs/clients.md shows work in a browser, as they stand there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, Route, expect, sync_playwright

from midstream.client import Client
from tests.docs.markdown import ROOT, blocks
from tests.docs.shell import terminal

pytestmark = pytest.mark.browser

MODULE, EVENT_SOURCE = (
    block.text
    for block in blocks((ROOT / "docs" / "clients.md").read_text(encoding="utf-8"))
    if block.language == "html"
)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a gateway with a simulated model."""
    with terminal(tmp_path_factory.mktemp("gateway")) as shell:
        shell.serve("midstream serve --upstream scripted: --journal memory:")
        yield shell.address


@pytest.fixture
def page(chromium_path: str, gateway: str) -> Iterator[Page]:
    """A tab of a real browser in which `gateway`/example can be made to be anything."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path, args=["--no-sandbox"])
        yield browser.new_page()
        browser.close()


def show(page: Page, gateway: str, block: str) -> None:
    """Open the block as a page of the gateway's own origin."""
    body = block.replace("http://127.0.0.1:8400", gateway)

    def fulfill(route: Route) -> None:
        route.fulfill(body=f"<!doctype html><meta charset=utf-8>{body}", content_type="text/html")

    page.route("**/example", fulfill)
    page.goto(f"{gateway}/example")


def whole(gateway: str) -> str:
    """The newest answer, from the gateway itself, once it is complete."""
    client = Client(gateway)
    newest = client.streams()["streams"][0]["stream_id"]
    for _ in client.resume(client.snapshot(newest)["cursor"]):
        pass
    text: str = client.snapshot(newest)["text"]
    return text


def test_the_module_goes_on_after_a_reload(page: Page, gateway: str) -> None:
    """Half before, half after; together the answer."""
    show(page, gateway, MODULE)
    answer = page.locator("#answer")
    expect(answer).to_contain_text("This is a simulation")
    page.reload()
    complete = whole(gateway)
    page.wait_for_function("text => document.querySelector('#answer').textContent === text", arg=complete)


def test_the_event_source_reads_to_the_end_and_stops(page: Page, gateway: str) -> None:
    """The whole answer, once, over one connection."""
    resumes: list[str] = []
    page.on("request", lambda request: resumes.append(request.url) if "/v1/stream/" in request.url else None)
    show(page, gateway, EVENT_SOURCE)
    complete = whole(gateway)
    page.wait_for_function("text => document.querySelector('#answer').textContent === text", arg=complete)
    assert len(resumes) == 1
