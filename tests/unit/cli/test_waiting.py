"""A wait is told once, where a person looks, and not when it is over."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from midstream.cli import exits
from midstream.cli.waiting import Waiting
from midstream.testing.upstream_script import Script, Stall
from tests.unit.cli.program import on_terminal
from tests.unit.client.odd_gateway import OddGateway, in_thread, stream

LONG = 3600.0
PATIENCE = 20.0


@pytest.fixture
def gateway() -> Iterator[OddGateway]:
    with in_thread(OddGateway()) as gateway:
        yield gateway


def test_a_wait_is_told_once() -> None:
    said = threading.Semaphore(0)
    with Waiting(0.0, said.release):
        assert said.acquire(timeout=PATIENCE)
    assert not said.acquire(blocking=False)


def test_a_wait_that_is_over_leaves_no_thread_that_may_still_speak() -> None:
    before = threading.active_count()
    waiting = Waiting(LONG, lambda: pytest.fail("it was over"))
    with waiting:
        assert threading.active_count() == before + 1
        waiting.over()
        waiting._timer.join(PATIENCE)
        assert threading.active_count() == before
        waiting._due()


def test_what_is_being_said_is_said_to_its_end_before_it_is_over() -> None:
    """Or it would stand in the middle of the answer's first line."""
    speaking, go_on = threading.Event(), threading.Event()
    lines: list[str] = []

    def say() -> None:
        speaking.set()
        assert go_on.wait(PATIENCE)
        lines.append("waiting")

    with Waiting(0.0, say) as waiting:
        assert speaking.wait(PATIENCE)
        threading.Timer(0.05, go_on.set).start()
        waiting.over()
        lines.append("answer")
    assert lines == ["waiting", "answer"]


def test_where_nobody_looks_there_is_no_thread() -> None:
    before = threading.active_count()
    with Waiting(0.0, None):
        assert threading.active_count() == before


def test_a_person_who_waits_for_the_first_token_is_told_so(gateway: OddGateway) -> None:
    gateway.then(stream(gateway.after(0, 1), Stall()))
    terminal = on_terminal("generate", "--gateway", gateway.url, "hi", NO_COLOR="1")
    terminal.see("waiting for the first token …\r\n".encode())
    terminal.press(b"\x03")
    assert terminal.end() == exits.INTERRUPTED
    assert terminal.screen.count(b"waiting for") == 1


def test_a_person_whose_gateway_does_not_answer_is_told_so(gateway: OddGateway) -> None:
    gateway.then(Script([Stall()]))
    terminal = on_terminal("generate", "--gateway", gateway.url, "hi", NO_COLOR="1")
    terminal.see(f"waiting for {gateway.url} to answer …\r\n".encode())
    terminal.press(b"\x03")
    assert terminal.end() == exits.INTERRUPTED
    assert b"stopped before any answer\r\n" in terminal.screen
