"""The playground in a real Chromium, in front of a real gateway: what a user sees after every kind of interruption."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from midstream.testing.upstream import CloseDirty, Stall, chat_answer
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
    gateway,
    halfway,
    hold,
    hold_sockets,
    keys_file,
    without_complaints,
)

pytestmark = pytest.mark.browser

Open = Callable[..., Playground]

# A reader that was cut comes back when the test says so: at the button, or with a reload.
STAYS_CUT = "?cut=600"


@pytest.fixture
def open_page(browser: Browser, served: GatewayProcess) -> Iterator[Open]:
    """Opens the page."""
    with without_complaints() as opened:

        def open_page(
            address: str = served.address, *, query: str = STAYS_CUT, width: int = 1280, dark: bool = False
        ) -> Playground:
            context = browser.new_context(
                viewport={"width": width, "height": 800}, color_scheme="dark" if dark else "light"
            )
            page = Playground(context, address, query)
            opened.append(page)
            return page

        yield open_page


def test_text_is_the_journals_after_a_cut_in_mid_answer(open_page: Open, upstream: Upstream) -> None:
    """The part that was written while the reader was away arrives once, and the seam is at its first record."""
    before = upstream.generations
    page = open_page()
    gate = halfway(page, upstream)
    page.click("Cut the connection", reader=1)
    page.is_in("waiting")
    gate.open()
    page.counts("retained", str(TERMINAL))  # the generation has gone on without a reader
    assert page.text() == "".join(FIRST)
    page.click("Reconnect now", reader=1)
    page.is_in("done")
    assert page.text() == ALL == page.get("snapshot")["text"]
    assert page.segments() == ["".join(FIRST), "".join(SECOND)]
    assert page.seams() == [FIRST_OF_SECOND]
    assert page.posts() == 1
    assert upstream.generations == before + 1


def test_a_cut_reader_comes_back_by_itself(open_page: Open, upstream: Upstream) -> None:
    page = open_page(query="?cut=0.2")
    gate = halfway(page, upstream)
    with page.page.expect_request("**/v1/stream/*cursor=*"):
        page.click("Cut the connection", reader=1)
    assert page.seams() == []  # nothing new yet, so nothing to mark
    gate.open()
    page.is_in("done")
    assert page.seams() == [FIRST_OF_SECOND]


def test_connection_facts_name_what_was_not_paid_for_again(open_page: Open, upstream: Upstream) -> None:
    """Beside the seam stand the time to the first token after it and the tokens the model need not say again."""
    page = open_page()
    gate = halfway(page, upstream)
    page.click("Cut the connection", reader=1)
    gate.open()
    page.click("Reconnect now", reader=1)
    page.is_in("done")
    first, second = page.facts()
    assert list(first) == ["first token"]
    assert second["goes on at"] == f"record {FIRST_OF_SECOND}"
    assert second["not paid for again"] == f"{len(FIRST)} tokens"
    assert re.fullmatch(r"after [\d.]+ m?s", second["first token"])
    colours = [
        segment.evaluate("(it) => getComputedStyle(it).color") for segment in page.reader().locator(".segment").all()
    ]
    assert len(set(colours)) == 2


def test_text_comes_back_after_a_reload_and_goes_on_at_the_exact_token(open_page: Open, upstream: Upstream) -> None:
    page = open_page()
    gate = halfway(page, upstream, "A question to remember")
    page.click("Reload the page")
    page.reads("".join(FIRST))
    expect(page.page.get_by_role("heading", name="A question to remember")).to_be_visible()
    gate.open()
    page.is_in("done")
    assert page.text() == ALL
    assert page.segments() == ["".join(FIRST), "".join(SECOND)]
    assert page.seams() == [FIRST_OF_SECOND]
    assert page.posts() == 1


def test_reload_after_the_end_shows_the_answer_and_resumes_nothing(open_page: Open, upstream: Upstream) -> None:
    upstream.says(*chat_answer(*FIRST))
    page = open_page()
    page.ask()
    page.is_in("done")
    page.requests.clear()
    page.click("Reload the page")
    page.reads("".join(FIRST))
    page.is_in("done")
    assert [request for request in page.requests if "cursor=" in request.url] == []
    assert page.posts() == 0


def test_reload_before_the_first_record_opens_the_same_stream(open_page: Open, upstream: Upstream) -> None:
    """The page dies between its POST and the first event: the Idempotency-Key finds the stream that was paid for."""
    upstream.says(*chat_answer(*FIRST))
    page = open_page()
    held = hold(page.page, r"/v1/stream$")
    before = upstream.generations
    with page.page.expect_request("**/v1/stream"):
        page.ask()
    page.page.evaluate("dispatchEvent(new Event('pagehide'))")
    held[0].fetch()  # it reaches the gateway, and its answer never reaches the page
    page.page.unroute_all()
    page.page.reload()
    page.reads("".join(FIRST))
    page.is_in("done")
    assert upstream.generations == before + 1


def test_second_reader_has_its_own_position_and_the_same_bytes(open_page: Open, upstream: Upstream) -> None:
    page = open_page()
    gate = halfway(page, upstream)
    page.click("Add a second reader")
    page.reads("".join(FIRST), number=2)
    page.click("Cut the connection", reader=2)
    page.is_in("waiting", number=2)
    page.is_in("live", number=1)
    gate.open()
    page.is_in("done", number=1)
    assert page.text(2) == "".join(FIRST)
    page.click("Reconnect now", reader=2)
    page.is_in("done", number=2)
    expect(page.page.locator("#verdict")).to_contain_text("Identical, byte for byte")
    assert page.text(1) == page.text(2) == ALL
    assert (page.seams(1), page.seams(2)) == ([], [FIRST_OF_SECOND])
    assert page.posts() == 1


def test_stop_cancels_the_generation_also_after_a_reload(open_page: Open, upstream: Upstream) -> None:
    """Stop needs the stream's id alone, not the connection that opened it."""
    upstream.says(*chat_answer(*FIRST)[: 1 + len(FIRST)], Stall())
    page = open_page()
    left = upstream.abandoned
    page.ask()
    page.reads("".join(FIRST))
    page.page.reload()
    page.is_in("live")
    page.click("Stop")
    page.is_in("cancelled")
    upstream.left(left + 1)
    assert page.get("state")["status"] == "cancelled"
    assert page.text() == "".join(FIRST)


def test_stop_of_one_stream_leaves_the_next_alone(open_page: Open, upstream: Upstream) -> None:
    """The next question is asked before the answer to Stop has come."""
    upstream.says(*chat_answer(*FIRST)[: 1 + len(FIRST)], Stall())
    page = open_page()
    held = hold_sockets(page.page, '"cancel"')
    page.page.reload()
    page.ask("one")
    page.reads("".join(FIRST))
    page.click("Stop")
    expect(page.page.get_by_role("button", name="Stopping")).to_be_visible()
    gate = upstream.says_in_two_parts()
    page.ask("two")
    page.reads("".join(FIRST))
    expect(page.page.get_by_role("button", name="Stop", exact=True)).to_be_enabled()
    assert held
    for go_on in held:
        go_on()
    gate.open()
    page.is_in("done")
    assert page.text() == ALL


def test_a_frozen_page_posts_once_and_shows_the_text_once(open_page: Open, upstream: Upstream) -> None:
    """What a phone does to a page in the background, and back."""
    page = open_page()
    gate = halfway(page, upstream)
    session = page.context.new_cdp_session(page.page)
    for _ in range(2):
        session.send("Page.setWebLifecycleState", {"state": "frozen"})
        session.send("Page.setWebLifecycleState", {"state": "active"})
    gate.open()
    page.is_in("done")
    assert page.text() == ALL
    assert page.posts() == 1


def test_ack_is_drawn_and_the_text_stays(open_page: Open, upstream: Upstream) -> None:
    page = open_page()
    gate = halfway(page, upstream)
    page.counts("retained", str(LAST_OF_FIRST))
    page.draws("retained", 1, LAST_OF_FIRST)
    expect(page.page.locator(".tape .region.acked")).to_have_count(0)
    page.click("Ack what I have read")
    page.counts("acked", str(LAST_OF_FIRST))
    page.counts("retained", "0")
    page.draws("acked", 1, LAST_OF_FIRST)
    page.click("Reload the page")  # the text now comes from what is kept of dropped records
    page.reads("".join(FIRST))
    gate.open()
    page.is_in("done")
    page.counts("retained", str(len(SECOND) + 1))
    page.draws("terminal", TERMINAL, TERMINAL)
    assert page.text() == ALL


def test_journal_draws_each_reader_where_it_is(open_page: Open, upstream: Upstream) -> None:
    """The head moves on while a reader is away, and its marker stays."""
    page = open_page()
    gate = halfway(page, upstream)
    page.click("Add a second reader")
    page.reads("".join(FIRST), number=2)
    page.click("Cut the connection", reader=2)
    gate.open()
    page.is_in("done", number=1)
    badge = page.page.locator(".tape .badge")
    expect(badge.nth(0)).to_have_attribute("data-seq", str(TERMINAL))
    expect(badge.nth(1)).to_have_attribute("data-seq", str(LAST_OF_FIRST))
    expect(page.page.locator(".tape .behind")).to_have_text(f"{TERMINAL - LAST_OF_FIRST} behind")


def test_expired_position_offers_the_snapshot(open_page: Open, upstream: Upstream) -> None:
    """Another reader's ack dropped what this one had not read: an error with two ways out, never a gap."""
    page = open_page()
    gate = halfway(page, upstream)
    page.click("Cut the connection", reader=1)
    gate.open()
    page.counts("retained", str(TERMINAL))
    page.post("ack", {"seq": TERMINAL})
    page.click("Reconnect now", reader=1)
    page.is_in("refused")
    assert page.text() == "".join(FIRST)
    expect(page.reader()).to_have_attribute("data-code", "cursor_expired")
    expect(page.reader().locator(".notice")).to_contain_text(f"Records before {TERMINAL} are no longer kept")
    page.complained_of("409")
    page.click("Take the snapshot", reader=1)
    page.is_in("done")
    assert page.text() == ALL
    assert page.posts() == 1


def test_expired_position_offers_to_start_again(open_page: Open, upstream: Upstream) -> None:
    """A second reader that wants records which are gone; starting again asks the model again, and says so by a POST."""
    upstream.says(*chat_answer(*FIRST))
    page = open_page()
    page.ask()
    page.is_in("done")
    page.click("Ack what I have read")
    page.counts("retained", "1")
    page.click("Add a second reader")
    page.is_in("refused", number=2)
    page.complained_of("409")
    page.click("Start again", reader=2)
    page.is_in("done")
    assert page.text() == "".join(FIRST)
    assert page.posts() == 2
    assert page.reader(2).count() == 0


def test_failure_of_the_upstream_is_shown_with_its_code(open_page: Open, upstream: Upstream) -> None:
    upstream.says(*chat_answer(*FIRST)[: 1 + len(FIRST)], CloseDirty())
    page = open_page()
    page.ask()
    page.is_in("failed")
    expect(page.reader().locator(".notice code")).to_have_text("upstream_truncated")
    assert page.text() == "".join(FIRST)


def test_upstream_that_is_not_there_is_named_and_asked_again_when_its_user_says(open_page: Open) -> None:
    """The gateway is well, and "connection lost" would send its user looking in the wrong place."""
    with gateway("--journal", "memory:", "--upstream", "http://127.0.0.1:1/v1") as process:
        page = open_page(process.address)
        page.ask()
        expect(page.reader().locator(".state")).to_have_text("Upstream unreachable")
        expect(page.reader().locator(".notice-text")).to_contain_text("The upstream at 127.0.0.1:1 cannot be reached")
        assert page.posts() == 1
        with page.page.expect_response(lambda response: response.status == 502):
            page.click("Start again")
        assert page.posts() == 2
        expect(page.reader().locator(".state")).to_have_text("Upstream unreachable")
        page.leave()
        page.complained_of("502")


def test_gateway_that_cannot_answer_now_is_asked_again_and_says_why(open_page: Open, upstream: Upstream) -> None:
    """A store that is away comes back, and its user has nothing to do."""
    upstream.says(*chat_answer(*FIRST))
    page = open_page()
    away = '{"error":"store_unavailable","detail":"the store is away"}'
    page.page.route("**/v1/stream", lambda route: route.fulfill(status=503, body=away))
    page.ask()
    expect(page.reader().locator(".state")).to_have_text("Gateway cannot answer")
    expect(page.reader().locator(".notice-text")).to_contain_text("The store is away. Trying again")
    page.page.unroute("**/v1/stream")
    page.is_in("done")
    assert page.text() == "".join(FIRST)
    page.complained_of("503")


def test_page_outlives_a_killed_gateway(open_page: Open, upstream: Upstream, tmp_path: Path) -> None:
    """It says that the gateway is away, and goes on by itself with the one that comes back on the same journal."""
    flags = ("--journal", f"sqlite:///{tmp_path}/journal.db", "--upstream", upstream.url)
    gate = upstream.says_in_two_parts()
    with gateway(*flags) as first:
        page = open_page(first.address)
        page.ask()
        page.reads("".join(FIRST))
        first.kill()
        expect(page.reader().locator(".state")).to_have_text("Gateway unreachable")
    with gateway(*flags, port=first.port):
        page.is_in("failed")
        expect(page.reader()).to_have_attribute("data-code", "writer_lost")
        assert page.text() == "".join(FIRST)
        assert page.posts() == 1
        page.leave()
        page.complained_of("ERR_")
    gate.open()


def test_key_is_asked_for_once_the_gateway_wants_one(open_page: Open, upstream: Upstream, tmp_path: Path) -> None:
    """No field where none is needed; a wrong key is asked for again; the key is in no address and survives a reload."""
    upstream.says(*chat_answer(*FIRST))
    keys = keys_file(tmp_path, ["alice:correct-horse"])
    field = "This gateway asks for an API key"
    expect(open_page().page.get_by_label(field)).to_be_hidden()
    with gateway("--journal", "memory:", "--upstream", upstream.url, "--keys-file", str(keys)) as process:
        page = open_page(process.address)
        page.ask()
        for key in ("wrong", "correct-horse"):
            page.is_in("refused")
            page.page.get_by_label(field).fill(key)
            page.click("Use this key")
        page.is_in("done")
        expect(page.page.get_by_label(field)).to_be_hidden()
        page.page.reload()
        page.is_in("done")
        assert [request.url for request in page.requests if "horse" in request.url] == []
        page.leave()
        page.complained_of("401")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_phone_width_never_scrolls_sideways(open_page: Open, upstream: Upstream, dark: bool) -> None:
    """In every state, with words longer than the screen."""
    upstream.says(*chat_answer("w" * 400, *FIRST))
    page = open_page(width=360, dark=dark)

    def fits() -> None:
        assert page.page.evaluate("document.documentElement.scrollWidth") <= 360

    fits()
    page.ask("p" * 200)
    page.is_in("done")
    page.click("Add a second reader")
    page.is_in("done", number=2)
    fits()
    page.click("Ack what I have read")
    page.counts("retained", "1")
    page.click("Reload the page")
    page.is_in("done", number=1)
    page.is_in("done", number=2)
    fits()
    upstream.says(*chat_answer("x")[:2], CloseDirty())
    page.ask()
    page.is_in("failed")
    fits()


def test_keyboard_alone_asks_cuts_and_reads_the_journal(open_page: Open, upstream: Upstream) -> None:
    gate = upstream.says_in_two_parts()
    page = open_page()
    keyboard = page.page.keyboard
    keyboard.press("Tab")
    keyboard.type("By keyboard")
    keyboard.press("Control+Enter")
    page.reads("".join(FIRST))
    wire = page.reader().get_by_role("button", name="Cut the connection")
    wire.focus()
    keyboard.press("Enter")
    page.is_in("waiting")
    gate.open()
    keyboard.press("Enter")
    page.is_in("done")
    page.page.get_by_role("slider", name="Journal, record by record").focus()
    keyboard.press("Home")
    keyboard.press("ArrowRight")
    expect(page.page.locator("#journal-readout")).to_have_text('Record 2 · " one0" · retained')
    assert page.text() == ALL


def test_only_changes_of_state_are_announced(open_page: Open, upstream: Upstream) -> None:
    """A live region on the text would read every token aloud."""
    page = open_page()
    gate = halfway(page, upstream)
    live = page.page.locator("[aria-live], [role=status], [role=log], [role=alert]")
    assert live.count() == 1
    expect(live).to_have_text("Live")
    page.click("Cut the connection", reader=1)
    expect(live).to_have_text("Cut, reconnecting")
    gate.open()
    page.click("Reconnect now", reader=1)
    page.is_in("done")
    expect(live).to_have_text(f"Done, {len(FIRST + SECOND)} tokens")


def test_simulation_says_that_it_is_one(open_page: Open) -> None:
    """The scripted producer itself, from the example that a visitor clicks first."""
    with gateway("--journal", "memory:", "--upstream", "scripted:") as process:
        page = open_page(process.address)
        banner = page.page.get_by_text("Simulation: scripted text, no model.")
        expect(banner).to_be_hidden()
        page.page.locator(".example").first.click()
        expect(banner).to_be_visible()
        expect(page.reader().locator(".transcript")).to_contain_text("This is a simulation")
        page.click("Stop")
        page.is_in("cancelled")
        assert page.text() == page.get("snapshot")["text"]
        page.leave()


def test_page_is_served_under_a_strict_policy_and_loads_from_its_gateway_alone(open_page: Open) -> None:
    """No inline script or style, nothing from elsewhere; that the policy was kept shows in the console's silence."""
    page = open_page()
    answer = page.context.request.get(page.address + "/")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert {request.url.startswith(page.address) for request in page.requests} == {True}
