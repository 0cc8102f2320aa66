"""The playground over each of its transports: the same answer, cut and resumed at the exact token."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Page, WebSocket, expect

from midstream.testing.upstream import Stall, chat_answer
from tests.e2e.playground import (
    ALL,
    FIRST,
    FIRST_OF_SECOND,
    LAST_OF_FIRST,
    SECOND,
    TERMINAL,
    GatewayProcess,
    Playground,
    Upstream,
    halfway,
    without_complaints,
)

pytestmark = pytest.mark.browser

Open = Callable[..., Playground]

# As the page names them, and the path of a request that carries a stream.
WIRES = {"WebSocket": "/v1/ws", "Connect": "/inference.InferenceService/Generate", "Server-sent events": "/v1/stream"}
OVER = [name for name in WIRES if name != "Server-sent events"]


@pytest.fixture
def open_page(browser: Browser, served: GatewayProcess) -> Iterator[Open]:
    """Opens the page with a transport chosen."""
    with without_complaints() as opened:

        def open_page(wire: str = "") -> Playground:
            page = Playground(browser.new_context(), served.address, "?cut=600")
            opened.append(page)
            if wire:
                choose(page, wire)
            return page

        yield open_page


def choose(page: Playground, wire: str) -> None:
    page.page.get_by_label("Transport").select_option(wire)


def carried(page: Playground, sockets: list[WebSocket]) -> set[str]:
    """The paths of what carried streams."""
    posted = {request.url.partition("://")[2].partition("/")[2].partition("?")[0] for request in page.requests}
    paths = {path for path in WIRES.values() if path.strip("/") in posted}
    return paths | ({"/v1/ws"} if sockets else set())


@pytest.mark.parametrize("wire", OVER)
def test_text_is_the_journals_after_a_cut_in_mid_answer(open_page: Open, upstream: Upstream, wire: str) -> None:
    """What was written while the reader was away arrives once, and the seam is at its first record."""
    gate = upstream.says_in_two_parts()
    before = upstream.generations
    page = open_page(wire)
    sockets: list[WebSocket] = []
    page.page.on("websocket", lambda socket: sockets.append(socket))
    page.ask()
    page.reads("".join(FIRST))
    page.click("Cut the connection", reader=1)
    page.is_in("waiting")
    gate.open()
    page.counts("retained", str(TERMINAL))
    assert page.text() == "".join(FIRST)
    page.click("Reconnect now", reader=1)
    page.is_in("done")
    assert page.text() == ALL == page.get("snapshot")["text"]
    assert page.segments() == ["".join(FIRST), "".join(SECOND)]
    assert page.seams() == [FIRST_OF_SECOND]
    assert [fact["over"] for fact in page.facts()] == [wire, wire]
    assert upstream.generations == before + 1
    assert carried(page, sockets) == {WIRES[wire]}


def test_transport_is_switched_in_mid_answer(open_page: Open, upstream: Upstream) -> None:
    """From one to the next and back: each goes on at the exact token."""
    before = upstream.generations
    page = open_page()
    gate = halfway(page, upstream)
    for wire in WIRES:
        choose(page, wire)
        page.is_in("live")
    choose(page, "WebSocket")
    page.is_in("live")
    gate.open()
    page.is_in("done")
    assert page.text() == ALL == page.get("snapshot")["text"]
    assert page.seams() == [FIRST_OF_SECOND]
    assert page.facts()[-1]["over"] == "WebSocket"
    assert upstream.generations == before + 1


@pytest.mark.parametrize("wire", WIRES)
def test_closing_the_tab_in_mid_answer_stops_nothing(open_page: Open, upstream: Upstream, wire: str) -> None:
    """I6: the answer is whole when another page asks for it."""
    left = upstream.abandoned
    page = open_page(wire)
    gate = halfway(page, upstream)
    state = page.get("state")
    page.page.close()
    gate.open()
    url = f"{page.address}/v1/stream/{state['stream_id']}"
    expect_ended(page, f"{url}/state")
    snapshot = page.context.request.get(f"{url}/snapshot").json()
    assert (snapshot["status"], snapshot["text"]) == ("done", ALL)
    assert upstream.abandoned == left


def expect_ended(page: Playground, url: str) -> None:
    """Wait until the stream is open no more."""
    watching = page.context.new_page()
    watching.goto(f"{page.address}/healthz")
    watching.wait_for_function(
        "async (url) => (await (await fetch(url)).json()).status !== 'open'", arg=url, polling=50
    )
    watching.close()


@pytest.mark.parametrize("wire", OVER)
def test_text_comes_back_after_a_reload_over_the_same_transport(open_page: Open, upstream: Upstream, wire: str) -> None:
    before = upstream.generations
    page = open_page(wire)
    gate = halfway(page, upstream)
    page.page.reload()
    page.reads("".join(FIRST))
    page.is_in("live")
    expect(page.page.get_by_label("Transport")).to_have_value({"WebSocket": "ws", "Connect": "connect"}[wire])
    gate.open()
    page.is_in("done")
    assert page.text() == ALL
    assert upstream.generations == before + 1


@pytest.mark.parametrize("wire", OVER)
def test_ack_is_drawn_and_the_rest_still_comes(open_page: Open, upstream: Upstream, wire: str) -> None:
    """The trimmed part of the journal, as the ack arrives."""
    page = open_page(wire)
    gate = halfway(page, upstream)
    page.click("Ack what I have read")
    page.counts("acked", str(LAST_OF_FIRST))
    page.draws("acked", 1, LAST_OF_FIRST)
    gate.open()
    page.is_in("done")
    assert page.text() == ALL
    page.draws("retained", FIRST_OF_SECOND, TERMINAL - 1)


@pytest.mark.parametrize("wire", WIRES)
def test_stop_cancels_the_generation(open_page: Open, upstream: Upstream, wire: str) -> None:
    """Whatever carries the stream, Stop goes over the WebSocket: there is always room for it."""
    upstream.says(*chat_answer(*FIRST)[: 1 + len(FIRST)], Stall())
    left = upstream.abandoned
    page = open_page(wire)
    page.ask()
    page.reads("".join(FIRST))
    page.click("Stop")
    page.is_in("cancelled")
    upstream.left(left + 1)
    assert not [request for request in page.requests if request.url.endswith("/cancel")]


@pytest.mark.parametrize("wire", OVER)
def test_failure_of_the_upstream_is_shown_with_its_code(open_page: Open, upstream: Upstream, wire: str) -> None:
    upstream.says(*chat_answer(*FIRST)[: 1 + len(FIRST)])
    page = open_page(wire)
    page.ask()
    page.is_in("failed")
    expect(page.reader()).to_contain_text("upstream_truncated")
    assert page.text() == "".join(FIRST)


# --- how many connections a page holds -------------------------------------------------------------------------------

MANY = """async (count) => {
    const { Client } = await import(new URL("web/midstream.js", location.href));
    window.client ??= new Client();
    window.streams ??= [];
    const opened = Array.from({ length: count }, () => window.client.open({ prompt: "x" }));
    window.streams.push(...opened);
    const ends = opened.map(async (stream) => {
        let last;
        for await (const { event } of stream) last = event;
        return last;
    });
    window.ends = [...(window.ends ?? []), ...ends];
    while (opened.some((stream) => !stream.streamId)) await new Promise((resolve) => setTimeout(resolve, 5));
}"""
STOP = """async () => {
    await Promise.all(window.streams.map((it) => it.cancel()));
    return await Promise.all(window.ends);
}"""


class Tab:
    """A page that counts what carries its streams."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        self.sse = 0
        self.sockets: list[WebSocket] = []
        self.said: list[str] = []
        page.set_default_timeout(10_000)
        page.on("request", lambda request: self._count(request.url, request.method))
        page.on("websocket", self._opened)
        page.goto(f"{address}/")

    def _count(self, url: str, method: str) -> None:
        self.sse += bool(re.search(r"/v1/stream($|/\w+\?cursor=)", url))

    def _opened(self, socket: WebSocket) -> None:
        self.sockets.append(socket)
        socket.on("framesent", lambda payload: self.said.append(str(payload)))

    def open(self, count: int) -> None:
        """So many streams, all of which have begun."""
        self.page.evaluate(MANY, count)

    def stop(self) -> list[str]:
        """How each stream ends when all are stopped."""
        ends: list[str] = self.page.evaluate(STOP)
        return ends

    def generates(self) -> int:
        return sum('"generate"' in said for said in self.said)


@pytest.fixture
def endless(upstream: Upstream) -> None:
    upstream.says(*chat_answer(*FIRST)[: 1 + len(FIRST)], Stall())


@pytest.mark.usefixtures("endless")
def test_streams_of_all_tabs_hold_four_connections_and_share_a_socket(browser: Browser, served: GatewayProcess) -> None:
    """Browsers allow six: a Stop and other requests must get through however many answers are read."""
    context = browser.new_context()
    first, second = Tab(context.new_page(), served.address), Tab(context.new_page(), served.address)
    first.open(3)
    second.open(3)
    first.open(2)
    assert (first.sse, second.sse) == (3, 1)
    assert (first.generates(), second.generates()) == (2, 2)
    for tab in (first, second):
        assert tab.page.evaluate("async () => (await fetch('healthz')).status") == 200
        assert set(tab.stop()) == {"cancelled"}
        assert len(tab.sockets) == 1
    second.open(2)
    assert second.sse == 3, "a connection that is over makes room"
    assert set(second.stop()) == {"cancelled"}
    context.close()


@pytest.mark.usefixtures("endless")
def test_tab_that_cannot_ask_the_others_holds_two(browser: Browser, served: GatewayProcess) -> None:
    """Outside secure contexts there are no locks."""
    context = browser.new_context()
    page = context.new_page()
    page.add_init_script("Object.defineProperty(navigator, 'locks', { value: undefined })")
    tab = Tab(page, served.address)
    tab.open(5)
    assert (tab.sse, tab.generates()) == (2, 3)
    assert tab.stop() == ["cancelled"] * 5
    context.close()


@pytest.mark.usefixtures("endless")
def test_cancel_goes_over_http_where_no_socket_can_be_had(browser: Browser, served: GatewayProcess) -> None:
    """A proxy in between may know nothing of WebSockets."""
    context = browser.new_context()
    page = context.new_page()
    page.add_init_script("""
        window.WebSocket = class {
            constructor() { setTimeout(() => this.onclose({ code: 1006 })); }
            close() {}
        };
    """)
    tab = Tab(page, served.address)
    tab.open(1)
    assert tab.stop() == ["cancelled"]
    context.close()
