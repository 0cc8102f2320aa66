"""The official JavaScript client in Node, over each protocol that it speaks, against a gateway process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.e2e.playground import GatewayProcess
from tests.integration.test_grpc_process import free_port
from tests.javascript import node, reason

PROTOCOLS = ("connect", "connect-binary", "grpc-web", "grpc")
TOKENS = 30
MODEL = f"scripted-n{TOKENS}-r1000"
SLOW = "scripted-n100000-r100"


class Bases(NamedTuple):
    http: str
    grpc: str

    def of(self, protocol: str) -> str:
        return self.grpc if protocol == "grpc" else self.http


@pytest.fixture(scope="module")
def bases() -> Iterator[Bases]:
    port = free_port()
    flags = ("--journal", "memory:", "--upstream", "scripted:", "--grpc-port", str(port))
    process = GatewayProcess(*flags)
    yield Bases(process.address, f"http://127.0.0.1:{port}")
    process.kill()


def indices(told: dict[str, Any]) -> list[int]:
    return [index for _, index, _ in told["messages"]]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_call_that_was_left_is_gone_on_with_at_the_next_token(bases: Bases, protocol: str) -> None:
    """The first half of one call and the rest of another are what a third is given whole."""
    session = f"resumed-{protocol}"
    first, rest, whole = node(
        protocol,
        bases.of(protocol),
        {"generate": {"prompt": "Hello", "sessionId": session, "model": MODEL}, "options": {"take": 11}},
        {"generate": {"sessionId": session, "resumeFromToken": 11}},
        {"generate": {"prompt": "Hello", "sessionId": session}},
    )
    assert indices(first) == list(range(11))
    assert indices(rest) == list(range(11, TOKENS + 1))
    assert first["messages"] + rest["messages"] == whole["messages"]
    assert whole["messages"][-1] == ["", TOKENS, True]
    assert (rest["code"], whole["code"]) == ("", "")
    assert len({first["streamId"], rest["streamId"], whole["streamId"]}) == 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_refusals_arrive_with_code_and_details(bases: Bases, protocol: str) -> None:
    """As the client's own error, whose details have our code."""
    session = f"refused-{protocol}"
    unknown, _, negative, other, beyond = node(
        protocol,
        bases.of(protocol),
        {"generate": {"sessionId": "never-was", "resumeFromToken": 3}},
        {"generate": {"prompt": "Hello", "sessionId": session, "model": MODEL}, "options": {"take": 1}},
        {"generate": {"sessionId": session, "resumeFromToken": -1}},
        {"generate": {"prompt": "Other", "sessionId": session}},
        {"generate": {"sessionId": session, "resumeFromToken": 10**6}},
    )
    assert (unknown["code"], reason(unknown)) == ("NotFound", "UNKNOWN_STREAM")
    assert (negative["code"], reason(negative)) == ("InvalidArgument", "BAD_CURSOR")
    assert (other["code"], reason(other)) == ("AlreadyExists", "IDEMPOTENCY_MISMATCH")
    assert (beyond["code"], reason(beyond)) == ("OutOfRange", "CURSOR_AHEAD")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_ack_cancel_and_deadline(bases: Bases, protocol: str) -> None:
    """A deadline is the client's own affair; an ack counts; a cancel ends it for every reader."""
    session = f"slow-{protocol}"
    late, acked, cancelled, ended = node(
        protocol,
        bases.of(protocol),
        {"generate": {"prompt": "Hello", "sessionId": session, "model": SLOW}, "options": {"timeoutMs": 1000}},
        {"ack": {"sessionId": session, "ackedTokenIndex": 1}},
        {"cancel": {"sessionId": session}},
        {"generate": {"sessionId": session, "resumeFromToken": 2}},
    )
    assert late["code"] == "DeadlineExceeded"
    assert len(late["messages"]) >= 2
    assert (acked["ackedTokenIndex"], acked["firstRetainedIndex"]) == (1, 2)
    assert acked["journaledTokenCount"] >= len(late["messages"])
    assert cancelled == {"sessionId": session, "cancelled": True}
    assert (ended["code"], reason(ended)) == ("Canceled", "CANCELLED")
    assert indices(ended) == list(range(2, 2 + len(ended["messages"])))
