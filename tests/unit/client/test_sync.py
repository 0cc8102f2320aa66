"""The blocking client against a gateway that misbehaves on a real socket."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from midstream.client import Client, Cursor, GaveUp, Lost, Patience, Resumed, UnexpectedAnswer, Unreachable
from midstream.client.sync import Stream
from midstream.errors import CursorExpired, Unauthorized
from midstream.testing.upstream_script import Head, Script, Send, Stall
from tests.unit.client.odd_gateway import ENDINGS, STREAM, OddGateway, in_thread, refusal, stream

HASTE = Patience(base=0.001, cap=0.002, attempts=5, unreached=2)
WHOLE = list(range(1, 10))


@pytest.fixture
def gateway() -> Iterator[OddGateway]:
    with in_thread(OddGateway(last=9)) as gateway:
        yield gateway


@pytest.fixture
def client(gateway: OddGateway) -> Client:
    return Client(gateway.url, patience=HASTE)


def seqs(stream: Stream) -> list[int]:
    return [record.seq for record in stream]


def test_an_answer_is_read_to_its_end(client: Client, gateway: OddGateway) -> None:
    answer = client.generate(messages=[{"role": "user", "content": "hi"}], seed=7)
    assert "".join(record.text for record in answer) == gateway.text
    assert answer.outcome is not None
    assert answer.outcome.event == "done"
    assert gateway.requests[0].json == {"messages": [{"role": "user", "content": "hi"}], "seed": 7}


@pytest.mark.parametrize("cut", range(9))
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("framing", ["chunked", "close"])
def test_a_connection_cut_after_any_record_is_mended(
    client: Client, gateway: OddGateway, cut: int, ending: str, framing: str
) -> None:
    """I3 for every position: what was dispatched before and after the cut is the whole, once each."""
    script = stream(Send(b"retry: 2000\n"), gateway.after(0, cut), *ENDINGS[ending])
    gateway.then(Script(script.steps, headers=script.headers, framing="chunked" if framing == "chunked" else "close"))
    assert seqs(client.generate("hi")) == WHOLE
    again = "POST" if cut == 0 else str(cut)
    assert gateway.asked[1:] == [again] or ending == "reset"


def test_what_may_pass_is_waited_out(client: Client, gateway: OddGateway) -> None:
    gateway.then(refusal(503, retry_after="0"), stream(gateway.after(0, 3)), refusal(502, b"<html>"), refusal(429))
    assert seqs(client.generate("hi")) == WHOLE
    assert gateway.asked == ["POST", "POST", "3", "3", "3"]


def test_only_heartbeats_are_given_up_in_the_end(client: Client, gateway: OddGateway) -> None:
    gateway.then(stream(gateway.after(0, 4)), *[stream(Send(b": ping\n"))] * 100)
    answer = client.generate("hi")
    with pytest.raises(GaveUp, match="5 attempts") as caught:
        seqs(answer)
    assert caught.value.cursor == Cursor(STREAM, 4).encode()


def test_silence_counts_as_a_drop(client: Client, gateway: OddGateway) -> None:
    gateway.then(stream(gateway.after(0, 5), Stall(), heartbeat=0.02))
    assert seqs(client.generate("hi")) == WHOLE
    assert gateway.asked == ["POST", "5"]


def test_204_too_early_is_an_error(client: Client, gateway: OddGateway) -> None:
    gateway.then(stream(gateway.after(0, 5)), refusal(204))
    with pytest.raises(UnexpectedAnswer, match="204 after seq 5"):
        seqs(client.generate("hi"))


def test_a_position_that_has_gone_is_the_callers_to_decide_on(client: Client, gateway: OddGateway) -> None:
    gateway.then(refusal(409, b'{"error":"cursor_expired","oldest_available":7,"action":"restart"}'))
    answer = client.resume(Cursor(STREAM, 3))
    with pytest.raises(CursorExpired):
        seqs(answer)
    assert answer.snapshot()["text"] == gateway.text


def test_the_key_is_asked_for_at_each_attempt_and_stays_at_home(gateway: OddGateway) -> None:
    keys = iter(["old", "new", "newer", "newest"])
    gateway.then(stream(gateway.after(0, 5)), Script([Head(302, {"Location": "http://127.0.0.1:1/"})]))
    client = Client(gateway.url, key=lambda: next(keys), patience=HASTE)
    with pytest.raises(UnexpectedAnswer, match="302"):
        seqs(client.generate("hi"))
    client.ack(STREAM, 5)
    assert [request.headers["authorization"] for request in gateway.requests] == [
        "Bearer old",
        "Bearer new",
        "Bearer newer",
    ]


def test_a_refused_key_is_raised_once(client: Client, gateway: OddGateway) -> None:
    gateway.then(refusal(401, b'{"error":"unauthorized"}'))
    with pytest.raises(Unauthorized):
        client.generate("hi")
    assert len(gateway.requests) == 1


def test_nobody_there_is_told_soon() -> None:
    with in_thread(OddGateway()) as gone:
        client = Client(gone.url, patience=HASTE)
    with pytest.raises(GaveUp, match="connection refused"):
        client.generate("hi")
    with pytest.raises(Unreachable, match="connection refused"):
        client.streams()


def test_fifty_loops_left_early_leave_no_connection(client: Client, gateway: OddGateway) -> None:
    gateway.then(*[stream(gateway.after(0, 4), Stall())] * 50)
    kept = []
    for _ in range(50):
        answer = client.generate("hi")
        kept.append(answer)
        for record in answer:
            assert record.seq == 1
            break
    assert seqs(client.generate("hi")) == WHOLE
    assert gateway.peak <= 5  # closed ones may be seen as open for a moment
    assert seqs(kept[0]) == WHOLE[1:]
    del answer, kept
    gc.collect()


def test_a_later_loop_takes_over(client: Client, gateway: OddGateway) -> None:
    answer = client.generate("hi")
    first = iter(answer)
    assert next(first).seq == 1
    assert seqs(answer) == WHOLE[1:]
    with pytest.raises(RuntimeError, match="later loop"):
        next(first)


def test_one_client_serves_several_threads(client: Client) -> None:
    given: list[list[int]] = []
    threads = [threading.Thread(target=lambda: given.append(seqs(client.generate("hi")))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert given == [WHOLE] * 4


def test_losses_and_the_return_are_told(gateway: OddGateway) -> None:
    told: list[Lost | Resumed] = []
    gateway.then(stream(gateway.after(0, 3)))
    seqs(Client(gateway.url, patience=HASTE, notify=told.append).generate("hi"))
    assert [type(each) for each in told] == [Lost, Resumed]
