"""The page of the pool in a real Chromium, in front of a real gateway with a real worker."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.e2e.playground import WITHIN, GatewayProcess, Playground, gateway, keys_file, without_complaints

pytestmark = pytest.mark.browser

# What the worker offers; both are simulations, of a name that the gateway's own upstream does not serve.
LONG, SHORT = "long", "short"
MODELS = (f"--model={LONG}=scripted-n1000-r25", f"--model={SHORT}=scripted-n40-r0")
UPSTREAM = ("--journal", "memory:", "--upstream", "scripted:")
BOBS_KEY, ADMINS_KEY = "bob-key-1", "admin-key-1"


class PoolPage(Playground):
    """The page in a browser context of its own."""

    def part(self, name: str) -> Locator:
        return self.page.locator(f"[data-part={name}]")

    def row(self, part: str, key: str) -> Locator:
        return self.part(part).locator(f"tr[data-key^='{key}']")

    @property
    def leases(self) -> Locator:
        """Of jobs that are wanted; a cancelled one is shown for some seconds more."""
        return self.part("leases").locator("tbody tr", has_text="s left")

    def says(self, words: str) -> None:
        """Wait until the state is this."""
        expect(self.page.get_by_role("status")).to_have_text(words, timeout=WITHIN * 1000)

    def total(self, name: str) -> Locator:
        return self.page.locator(f"[data-total={name}]")

    def looks(self) -> int:
        """How often it has asked."""
        return sum(request.url.endswith("/v1/pool") for request in self.requests)

    def use_key(self, key: str) -> None:
        self.page.get_by_label("API key").or_(self.page.get_by_label(":admin")).fill(key)
        self.page.get_by_role("button", name="Use this key").click()


class Pool:
    """A gateway with a pool, and a worker that uses the gateway's own simulation as its local model."""

    def __init__(self, process: GatewayProcess) -> None:
        self.process = process
        self.address = process.address

    def post(self, path: str, body: dict[str, Any]) -> tuple[dict[str, str], bytes]:
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(self.address + path, data, headers), timeout=WITHIN) as answer:
            return dict(answer.headers), answer.read()

    def get(self, path: str) -> dict[str, Any]:
        with urlopen(self.address + path, timeout=WITHIN) as answer:
            told: dict[str, Any] = json.load(answer)
            return told

    def models(self) -> list[str]:
        """What can be asked for."""
        return [model["id"] for model in self.get("/v1/models")["data"]]

    def finish(self) -> None:
        """Have a short answer made."""
        self.post("/v1/stream", {"prompt": "Hello", "model": SHORT, "stream": False})

    @contextmanager
    def running(self) -> Iterator[str]:
        """While this lasts a long answer is being made; its stream's id."""
        body = json.dumps({"prompt": "Go on", "model": LONG, "max_tokens": 1000}).encode()
        request = Request(f"{self.address}/v1/stream", body, {"Content-Type": "application/json"})
        with urlopen(request, timeout=WITHIN) as answer:
            stream_id = answer.headers["Midstream-Stream-Id"]
            try:
                yield stream_id
            finally:
                self.post(f"/v1/stream/{stream_id}/cancel", {})


@contextmanager
def pool(directory: Path, *flags: str) -> Iterator[Pool]:
    with gateway(*UPSTREAM, "--pool", f"sqlite:///{directory}/pool.db", *flags) as process:
        yield Pool(process)


@contextmanager
def worker(address: str) -> Iterator[None]:
    command = [sys.executable, "-m", "midstream", "worker", "--gateway", address, "--name", "kitchen"]
    command += ["--upstream", f"{address}/v1", "--threads=2", *MODELS]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def empty(chromium_path: str) -> Iterator[Pool]:
    """A pool that nobody works for."""
    with tempfile.TemporaryDirectory() as directory, pool(Path(directory)) as running:
        yield running


@pytest.fixture(scope="module")
def served(chromium_path: str) -> Iterator[Pool]:
    """One that `kitchen` works for, and has done a job."""
    with tempfile.TemporaryDirectory() as directory, pool(Path(directory)) as running, worker(running.address):
        until(lambda: SHORT in running.models())
        running.finish()
        yield running


def until(holds: Callable[[], object]) -> None:
    """Wait for what happens in another process.  Raises TimeoutError."""
    end = time.monotonic() + 2 * WITHIN
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.02)


Open = Callable[..., PoolPage]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens the page."""
    with without_complaints() as opened:

        def open_page(address: str, *, width: int = 1280, dark: bool = False, clock: bool = False) -> PoolPage:
            context = browser.new_context(
                viewport={"width": width, "height": 800}, color_scheme="dark" if dark else "light"
            )
            if clock:
                context.clock.install()
            page = PoolPage(context, address, "pool")
            opened.append(page)
            return page

        yield open_page


# --- what there is ----------------------------------------------------------------------------------------------------


def test_a_pool_without_workers_says_how_to_start_one(open_page: Open, empty: Pool) -> None:
    page = open_page(empty.address)
    page.says("Live")
    command = page.page.locator(".recruit code")
    expect(command).to_have_text(
        f"midstream worker --gateway {empty.address} --upstream http://127.0.0.1:8080/v1", timeout=WITHIN * 1000
    )
    for words in ("Nothing runs.", "Nothing waits.", "Nothing has been paid yet.", "Sum of all accounts: 0"):
        expect(page.page.get_by_text(words)).to_be_visible()
    # From this gateway alone; that its strict policy was kept shows in the console's silence.
    assert {request.url.startswith(page.address) for request in page.requests} == {True}


def test_a_gateway_without_a_pool_says_how_to_have_one(open_page: Open) -> None:
    with gateway(*UPSTREAM) as process:
        page = open_page(process.address)
        page.says("No pool")
        expect(page.page.get_by_text("midstream serve --pool")).to_be_visible()
        page.leave()
        page.complained_of("404")


def test_a_job_is_shown_while_it_runs_and_in_the_ledger_when_it_is_paid(open_page: Open, served: Pool) -> None:
    page = open_page(served.address)
    page.says("Live")
    kitchen = page.row("workers", "kitchen")
    expect(kitchen).to_contain_text("waits")
    expect(page.page.locator("#recruit")).to_be_hidden()
    with served.running():
        expect(kitchen.locator("td").nth(1)).to_have_text(f"{LONG}1 of 2 threads", timeout=WITHIN * 1000)
        lease = page.leases
        expect(lease).to_have_count(1)
        expect(lease).to_contain_text("for open")
        expect(lease).to_contain_text("of 1,000 tokens")
        expect(lease).to_contain_text("s left")
        expect(page.total("running")).to_have_text("1")
        posts = lease.locator("td", has_text="B").last.locator(".text")
        first = posts.text_content() or ""
        expect(posts).not_to_have_text(first, timeout=WITHIN * 1000)
        expect(page.total("rate")).not_to_have_text("0", timeout=WITHIN * 1000)
    expect(kitchen).to_contain_text("waits", timeout=WITHIN * 1000)
    newest = served.get("/v1/pool")["ledger"]["transfers"][0]
    paid = page.row("transfers", newest["generation"])
    expect(paid).to_contain_text(LONG, timeout=WITHIN * 1000)
    expect(paid).to_contain_text("kitchen")
    expect(page.part("transfers").locator(".part-note")).to_have_text("Sum of all accounts: 0")


def test_what_nobody_can_do_waits_in_its_place(open_page: Open, served: Pool) -> None:
    page = open_page(served.address)
    asks = [
        json.loads(
            served.post(
                "/api/v2/generate/text/async",
                {"prompt": "Hello", "models": [model], "params": {"n": count, "max_length": 64}},
            )[1]
        )["id"]
        for model, count in (("huge", 1), ("larger", 3))
    ]
    try:
        cells = page.row("queue", asks[1][:8]).locator("td")
        expect(cells.nth(0)).to_have_text("2", timeout=WITHIN * 1000)
        expect(cells.nth(1)).to_contain_text("larger")
        expect(cells.nth(4)).to_contain_text("3 times")
        expect(page.total("waiting")).to_have_text("2")
    finally:
        for ask in asks:
            with urlopen(Request(f"{served.address}/api/v2/generate/text/status/{ask}", method="DELETE")):
                pass
    expect(page.part("queue").locator("tbody tr")).to_have_count(0, timeout=WITHIN * 1000)


def test_nothing_jumps_when_a_job_comes_and_goes(open_page: Open, served: Pool) -> None:
    """Every part keeps its place and its height, and a worker's row stays the same element."""
    page = open_page(served.address)
    kitchen = page.row("workers", "kitchen")
    expect(kitchen).to_be_visible(timeout=WITHIN * 1000)
    kitchen.evaluate("(row) => { row.marked = true }")
    expect(page.part("leases").locator("tbody tr")).to_have_count(0, timeout=WITHIN * 1000)
    before = boxes(page.page)
    with served.running():
        expect(page.leases).to_have_count(1, timeout=WITHIN * 1000)
        assert boxes(page.page) == before
    expect(kitchen).to_contain_text("waits", timeout=WITHIN * 1000)
    assert kitchen.evaluate("(row) => row.marked") is True


def boxes(page: Page) -> list[Any]:
    """Where the parts above the ledger are, which grows."""
    return [page.locator(f"[data-part={name}]").bounding_box() for name in ("workers", "leases", "queue")]


# --- keys -------------------------------------------------------------------------------------------------------------


def test_an_admins_key_is_asked_for_and_no_other_shows_anything(open_page: Open, tmp_path: Path) -> None:
    """It is kept in the tab, survives a reload, and is in no address."""
    keys = keys_file(tmp_path, [f"bob:{BOBS_KEY}", f"ops:{ADMINS_KEY}:admin"])
    with pool(tmp_path, "--keys-file", str(keys)) as running:
        page = open_page(running.address)
        field = page.page.locator("#key")
        page.says("Key needed")
        expect(field).to_be_focused()
        page.use_key("nobody-has-this")
        page.says("Key needed")
        page.use_key(BOBS_KEY)
        page.says("Key refused")
        expect(page.page.locator("#key-form")).to_contain_text("not marked :admin")
        expect(page.page.locator("#pool")).to_be_hidden()
        page.use_key(ADMINS_KEY)
        page.says("Live")
        expect(field).to_be_hidden()
        expect(page.page.locator(".recruit code")).to_contain_text("MIDSTREAM_KEY=… midstream worker")
        page.page.reload()
        page.says("Live")
        assert [request.url for request in page.requests if "key-1" in request.url] == []
        assert ADMINS_KEY not in page.page.content()
        keys_file(tmp_path, [f"bob:{BOBS_KEY}"])
        running.process.reload()
        page.says("Key needed")  # what was shown to the key that is gone is shown no more
        expect(page.page.locator("#pool")).to_be_hidden()
        page.leave()
        page.complained_of("401", "403")


# --- the wire ---------------------------------------------------------------------------------------------------------


def test_a_page_that_is_not_seen_does_not_ask(open_page: Open, empty: Pool) -> None:
    """And asks at once when it is seen again."""
    page = open_page(empty.address, clock=True)
    page.says("Live")
    looks = page.looks()
    with page.page.expect_response("**/v1/pool"):
        page.page.clock.run_for(1100)
    assert page.looks() == looks + 1
    hide = "(hidden) => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true}) }"
    page.page.evaluate(hide, True)
    page.page.clock.run_for(20_000)
    assert page.looks() == looks + 1
    page.page.evaluate(hide, False)
    with page.page.expect_request("**/v1/pool"):
        page.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def test_the_page_outlives_a_lost_network(open_page: Open, empty: Pool) -> None:
    """It says so, keeps what it has shown, and goes on by itself."""
    page = open_page(empty.address)
    page.says("Live")
    page.context.set_offline(True)
    page.says("Gateway unreachable, trying again")
    expect(page.part("workers")).to_be_visible()
    page.context.set_offline(False)
    page.says("Live")
    page.complained_of("ERR_INTERNET_DISCONNECTED")


# --- everybody --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_phone_width_never_scrolls_sideways(open_page: Open, served: Pool, dark: bool) -> None:
    """Whatever strangers have called their models and workers."""
    body = {"name": "w" * 100, "models": ["m" * 255, "n"], "bridge_agent": "x"}
    served.post("/api/v2/generate/text/pop", body)
    page = open_page(served.address, width=360, dark=dark)
    with served.running():
        expect(page.row("workers", "wwww")).to_be_visible(timeout=WITHIN * 1000)
        expect(page.leases).to_have_count(1, timeout=WITHIN * 1000)
        assert page.page.evaluate("document.documentElement.scrollWidth") <= 360
        name = page.leases.locator("td.main")
        assert name.bounding_box()["width"] > 200  # type: ignore[index]


def test_keyboard_alone_reaches_every_list(open_page: Open, served: Pool) -> None:
    page = open_page(served.address)
    page.says("Live")
    reached = []
    for _ in range(5):
        page.page.keyboard.press("Tab")
        reached.append(page.page.evaluate("document.activeElement.getAttribute('aria-labelledby')"))
    assert reached == [f"{name}-title" for name in ("workers", "leases", "queue", "transfers", "balances")]
    table = page.page.get_by_role("region", name="Workers").get_by_role("table")
    expect(table.get_by_role("columnheader")).to_have_count(7)


def test_only_changes_of_state_are_announced(open_page: Open, served: Pool) -> None:
    """A live region on the numbers would read them aloud each second."""
    page = open_page(served.address)
    page.says("Live")
    assert page.page.locator("[aria-live], [role=status], [role=log], [role=alert]").count() == 1
