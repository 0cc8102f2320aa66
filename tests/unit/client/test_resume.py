"""The reader's state machine, driven by hand: no socket, no loop, a clock that stands still."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.client.answers import Answer, GaveUp, UnexpectedAnswer
from midstream.client.resume import TRANSITIONS, Reader, State
from midstream.client.steps import Connect, Creation, Lost, Patience, Read, Record, Request, Resumed, Wait
from midstream.cursor import Cursor, decode
from midstream.errors import (
    BadCursor,
    CursorAhead,
    CursorExpired,
    IdempotencyMismatch,
    MidstreamError,
    ProducerFailed,
    Unauthorized,
    UnknownModel,
    UnknownStream,
    WrongStream,
)
from midstream.testing.clock import ManualClock
from midstream.wire import FAILURES, STATUS

STREAM = "s7Kd"
CREATION = Creation(b'{"prompt":"hi"}', "key-1")
OPENED = Answer(
    200,
    {"content-type": "text/event-stream; charset=utf-8", "midstream-stream-id": STREAM, "midstream-heartbeat": "5"},
)


def frame(seq: int, event: str = "token", **data: object) -> bytes:
    body = orjson.dumps({"seq": seq, **data})
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (seq, event.encode(), body)


def frames(last: int) -> list[bytes]:
    """A whole stream of `last` records: start, tokens, done."""
    middle = [frame(seq, delta=f" {seq}", done=False) for seq in range(2, last)]
    return [frame(1, "start", stream_id=STREAM), *middle, frame(last, "done", done=True)]


def reader(
    origin: Creation | Cursor = CREATION,
    *,
    clock: ManualClock | None = None,
    random: Callable[[], float] = lambda: 1.0,
    patience: Patience | None = None,
    notify: Callable[[Lost | Resumed], None] | None = None,
) -> Reader:
    return Reader(origin, clock=clock or ManualClock(0.0), random=random, patience=patience, notify=notify)


def request(machine: Reader) -> Request:
    step = machine.step()
    assert isinstance(step, Connect)
    return step.request


def connect(machine: Reader, data: bytes = b"") -> Request:
    asked = request(machine)
    machine.answered(OPENED)
    machine.received(data)
    return asked


def take(machine: Reader) -> int:
    """The seq of the record that is handed out now."""
    step = machine.step()
    assert isinstance(step, Record)
    return step.seq


def seconds(machine: Reader) -> float:
    step = machine.step()
    assert isinstance(step, Wait)
    return step.seconds


def after(asked: Request) -> int:
    """The position that a GET resumes from."""
    assert asked.method == "GET"
    (token,) = parse_qs(urlsplit(asked.path).query)["cursor"]
    assert urlsplit(asked.path).path == f"/v1/stream/{STREAM}"
    cursor = decode(token)
    assert cursor.stream_id == STREAM
    return cursor.seq


# --- requests ---------------------------------------------------------------------------------------------------------


def test_until_the_first_record_the_same_post_is_repeated_under_the_same_key() -> None:
    clock = ManualClock(0.0)
    machine = reader(clock=clock)
    first = connect(machine, b"retry: 2000\n: ping\n")
    machine.lost("reset")
    clock.advance(60)
    second = connect(machine, frame(1, "start", stream_id=STREAM))
    assert (second.method, second.path, second.body) == ("POST", "/v1/stream", CREATION.body)
    assert second.headers["idempotency-key"] == "key-1"
    assert first == second


def test_a_record_that_arrived_and_was_not_taken_is_asked_for_again_by_get_from_zero() -> None:
    machine = reader()
    connect(machine, frame(1, "start", stream_id=STREAM))
    machine.left()
    asked = request(machine)
    assert after(asked) == 0
    assert "idempotency-key" not in asked.headers
    assert asked.body is None


def test_a_repeated_post_may_be_given_another_stream_as_long_as_nothing_was_seen() -> None:
    clock = ManualClock(0.0)
    machine = reader(clock=clock)
    connect(machine)
    machine.lost("reset")
    clock.advance(60)
    request(machine)
    machine.answered(Answer(200, {**OPENED.headers, "midstream-stream-id": "other"}))
    assert machine.position == Cursor("other", 0)


def test_a_stream_id_goes_into_the_path_escaped() -> None:
    assert request(reader(Cursor("a/../b?c", 3))).path.startswith("/v1/stream/a%2F..%2Fb%3Fc?cursor=")


def test_the_stream_is_named_by_its_first_record_where_a_proxy_took_the_header_away() -> None:
    machine = reader()
    request(machine)
    machine.answered(Answer(200, {"content-type": "text/event-stream"}))
    assert machine.position is None
    machine.received(frame(1, "start", stream_id=STREAM))
    assert machine.position == Cursor(STREAM, 0)


def test_a_stream_that_nobody_names_is_an_error() -> None:
    machine = reader()
    request(machine)
    machine.answered(Answer(200, {"content-type": "text/event-stream"}))
    machine.received(frame(1, "start"))
    with pytest.raises(UnexpectedAnswer, match="name the stream"):
        machine.step()


def test_an_interrupted_attempt_is_made_again() -> None:
    machine = reader(Cursor(STREAM, 4))
    assert request(machine) == request(machine)


# --- position ---------------------------------------------------------------------------------------------------------


def test_the_position_moves_when_a_record_is_dispatched_not_when_it_is_received() -> None:
    machine = reader()
    connect(machine, b"".join(frames(9)[:5]))
    assert machine.waiting == 5
    assert machine.position == Cursor(STREAM, 0)
    assert [take(machine), take(machine)] == [1, 2]
    assert machine.position == Cursor(STREAM, 2)
    machine.left()
    assert after(request(machine)) == 2


@pytest.mark.parametrize(
    "talk",
    [
        b": ping\n",
        b"retry: 2000\n",
        b'event: note\ndata: {"seq":9}\n\n',
        b'id:\ndata: {"seq":9}\n\n',
        b"id: 9\n\n",
    ],
)
def test_what_has_no_id_or_no_data_never_moves_the_position(talk: bytes) -> None:
    clock = ManualClock(0.0)
    machine = reader(Cursor(STREAM, 4), clock=clock)
    for _ in range(2):
        connect(machine, frame(5, delta="a") + talk if machine.position == Cursor(STREAM, 4) else talk)
        while isinstance(machine.step(), Record):
            pass
        machine.lost("reset")
        clock.advance(60)
    assert after(request(machine)) == 5


def test_what_is_repeated_is_dropped() -> None:
    machine = reader(Cursor(STREAM, 4))
    connect(machine, frame(4, delta="x") + frame(5, delta="a") + frame(5, delta="a") + frame(6, delta="b"))
    assert [take(machine), take(machine)] == [5, 6]
    assert isinstance(machine.step(), Read)


def test_a_gap_is_an_error_after_what_came_before_it() -> None:
    machine = reader(Cursor(STREAM, 4))
    connect(machine, frame(5, delta="a") + frame(7, delta="c"))
    assert take(machine) == 5
    with pytest.raises(UnexpectedAnswer, match="seq 7 came where 6 was due"):
        machine.step()
    assert machine.state is State.FAILED


@pytest.mark.parametrize(
    "record",
    [
        b'id: 5\nevent: token\ndata: {"seq":6}\n\n',
        b'id: 5\nevent: token\ndata: {"seq":true}\n\n',
        b"id: 5\nevent: token\ndata: {}\n\n",
        b'id: 05\nevent: token\ndata: {"seq":5}\n\n',
        b"id: 5\nevent: token\ndata: 5\n\n",
        b"id: 5\nevent: token\ndata: {\n\n",
    ],
)
def test_a_record_whose_number_does_not_stand_twice_is_an_error(record: bytes) -> None:
    machine = reader(Cursor(STREAM, 4))
    connect(machine, record)
    with pytest.raises(UnexpectedAnswer):
        machine.step()


def test_a_record_beyond_all_bounds_is_an_error_after_what_came_before_it() -> None:
    machine = reader(Cursor(STREAM, 4))
    connect(machine, frame(5, delta="a"))
    machine.received(frame(6, delta="b") + b"data: " + b"x" * (17 * 2**20))
    assert [take(machine), take(machine)] == [5, 6]
    with pytest.raises(UnexpectedAnswer, match="over"):
        machine.step()


def test_a_saved_position_goes_on_in_another_process() -> None:
    machine = reader()
    connect(machine, b"".join(frames(9)[:3]))
    assert [take(machine) for _ in range(3)] == [1, 2, 3]
    assert machine.position is not None
    saved = machine.position.encode()
    assert after(request(reader(decode(saved)))) == 3


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", ["done", "failed", "cancelled"])
def test_the_terminal_record_is_the_end(event: str) -> None:
    machine = reader(Cursor(STREAM, 4))
    connect(machine, frame(5, event, done=True))
    assert machine.outcome is None
    step = machine.step()
    assert isinstance(step, Record)
    assert step.terminal
    assert machine.outcome == step
    assert (machine.step(), machine.state) == (None, State.ENDED)


def test_a_terminal_record_that_was_not_taken_is_no_end() -> None:
    machine = reader(Cursor(STREAM, 4))
    connect(machine, frame(5, "done", done=True))
    machine.left()
    assert after(request(machine)) == 4


def test_a_clean_end_without_a_terminal_record_is_a_drop() -> None:
    clock = ManualClock(0.0)
    machine = reader(clock=clock)
    connect(machine, b"".join(frames(9)[:5]))
    assert [take(machine) for _ in range(5)] == [1, 2, 3, 4, 5]
    machine.lost("the connection ended")
    clock.advance(60)
    assert after(connect(machine, b"".join(frames(9)[5:]))) == 5
    assert [take(machine) for _ in range(4)] == [6, 7, 8, 9]
    assert machine.step() is None


def test_204_before_a_terminal_record_was_dispatched_is_an_error() -> None:
    clock = ManualClock(0.0)
    machine = reader(Cursor(STREAM, 4), clock=clock)
    connect(machine, frame(5, delta="a"))
    assert take(machine) == 5
    machine.lost("reset")
    clock.advance(60)
    request(machine)
    machine.answered(Answer(204))
    with pytest.raises(UnexpectedAnswer, match="no terminal record"):
        machine.step()


def test_204_to_a_position_that_was_handed_in_is_the_end() -> None:
    machine = reader(Cursor(STREAM, 9))
    request(machine)
    machine.answered(Answer(204))
    assert (machine.step(), machine.outcome) == (None, None)


def test_204_to_a_post_is_an_error() -> None:
    machine = reader()
    request(machine)
    machine.answered(Answer(204))
    with pytest.raises(UnexpectedAnswer):
        machine.step()


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, b'{"error":"bad_cursor","detail":"version must be 1"}', BadCursor),
        (401, b'{"error":"unauthorized"}', Unauthorized),
        (403, b'{"error":"wrong_stream"}', WrongStream),
        (404, b'{"error":"unknown_stream"}', UnknownStream),
        (404, b'{"error":"unknown_model","detail":"no upstream serves m"}', UnknownModel),
        (409, b'{"error":"cursor_expired","oldest_available":812,"action":"restart"}', CursorExpired),
        (409, b'{"error":"cursor_expired","oldest_available":null,"action":"restart"}', CursorExpired),
        (409, b'{"error":"cursor_ahead","highest_seq":640,"action":"restart"}', CursorAhead),
        (422, b'{"error":"idempotency_mismatch","detail":"use a new key"}', IdempotencyMismatch),
        (404, b"<html>nginx</html>", UnexpectedAnswer),
        (307, b"", UnexpectedAnswer),
        (200, b"<html>sign in to the wifi</html>", UnexpectedAnswer),
    ],
)
def test_a_refusal_is_raised_at_once_and_ends_the_reader(status: int, body: bytes, kind: type[MidstreamError]) -> None:
    machine = reader(Cursor(STREAM, 4))
    request(machine)
    machine.answered(Answer(status, {"content-type": "text/html"}, body))
    for _ in range(2):
        with pytest.raises(kind):
            machine.step()
    assert machine.state is State.FAILED
    assert machine.position == Cursor(STREAM, 4)


@pytest.mark.parametrize("code", sorted(FAILURES.keys() - STATUS.keys()))
def test_what_became_of_the_request_at_its_upstream_is_raised_at_once(code: str) -> None:
    """The gateway could be asked; to ask it again would ask the upstream again, for minutes."""
    machine = reader()
    request(machine)
    machine.answered(Answer(502, {}, orjson.dumps({"error": code, "detail": "it is not there"})))
    with pytest.raises(ProducerFailed, match="it is not there") as caught:
        machine.step()
    assert caught.value.failure == code


def test_a_position_error_names_what_is_available() -> None:
    machine = reader(Cursor(STREAM, 4))
    request(machine)
    machine.answered(Answer(409, {}, b'{"error":"cursor_expired","oldest_available":812,"action":"restart"}'))
    with pytest.raises(CursorExpired) as caught:
        machine.step()
    assert (caught.value.oldest_available, caught.value.action) == (812, "restart")


def test_a_reader_that_was_overtaken_gets_what_came_before_and_then_the_position_error() -> None:
    machine = reader(Cursor(STREAM, 4))
    expired = b'event: expired\ndata: {"error":"cursor_expired","oldest_available":90,"action":"restart"}\n\n'
    connect(machine, frame(5, delta="a") + expired)
    assert take(machine) == 5
    with pytest.raises(CursorExpired) as caught:
        machine.step()
    assert caught.value.oldest_available == 90


def test_an_answer_for_another_stream_is_refused() -> None:
    machine = reader(Cursor(STREAM, 4))
    request(machine)
    machine.answered(Answer(200, {**OPENED.headers, "midstream-stream-id": "other"}))
    with pytest.raises(UnexpectedAnswer, match="other"):
        machine.step()


# --- patience ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 599])
def test_what_may_pass_is_tried_again_from_the_same_position(status: int) -> None:
    clock = ManualClock(0.0)
    machine = reader(Cursor(STREAM, 4), clock=clock)
    request(machine)
    machine.answered(Answer(status, {}, b"busy"))
    clock.advance(seconds(machine))
    assert after(request(machine)) == 4


def test_waits_double_up_to_the_cap_and_start_again_after_progress_only() -> None:
    clock = ManualClock(0.0)
    machine = reader(Cursor(STREAM, 4), clock=clock, patience=Patience(base=1.0, cap=10.0, attempts=100))
    waits = []
    for _ in range(6):
        connect(machine, b": ping\n")
        machine.lost("reset")
        waits.append(seconds(machine))
        clock.advance(waits[-1])
    assert waits == [1, 2, 4, 8, 10, 10]
    connect(machine, frame(5, delta="a"))
    assert take(machine) == 5
    machine.lost("reset")
    assert seconds(machine) == 1


def test_a_record_that_was_received_and_not_taken_is_no_progress() -> None:
    clock = ManualClock(0.0)
    machine = reader(Cursor(STREAM, 4), clock=clock, patience=Patience(base=1.0))
    connect(machine)
    machine.lost("reset")
    clock.advance(seconds(machine))
    connect(machine, frame(5, delta="a"))
    machine.left()
    connect(machine)
    machine.lost("reset")
    assert seconds(machine) == 2


def test_a_gateway_that_takes_every_connection_and_says_nothing_is_given_up_with_growing_waits() -> None:
    clock = ManualClock(0.0)
    machine = reader(Cursor(STREAM, 4), clock=clock, patience=Patience(base=0.25, cap=30.0, attempts=100))
    waits = []
    for _ in range(99):
        connect(machine, b": ping\n")
        machine.lost("the connection ended")
        waits.append(seconds(machine))
        clock.advance(waits[-1])
    connect(machine, b": ping\n")
    machine.lost("the connection ended")
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (0.25, 30.0)
    with pytest.raises(GaveUp, match="gave up after 100 attempts without progress: the connection ended") as caught:
        machine.step()
    assert caught.value.cursor == Cursor(STREAM, 4).encode()


def test_a_gateway_that_gives_one_record_per_connection_is_never_given_up() -> None:
    clock = ManualClock(0.0)
    machine = reader(clock=clock, patience=Patience(base=1.0, attempts=3))
    whole = frames(100)
    for seq in range(1, 101):
        connect(machine, whole[seq - 1])
        assert take(machine) == seq
        if seq < 100:
            machine.lost("reset")
            assert seconds(machine) == 1.0
            clock.advance(1.0)
    assert machine.step() is None


def test_a_gateway_that_never_answered_is_given_up_sooner() -> None:
    clock = ManualClock(0.0)
    machine = reader(clock=clock, patience=Patience(unreached=3))
    for _ in range(3):
        request(machine)
        machine.lost("connection refused")
        clock.advance(60)
    with pytest.raises(GaveUp, match="3 attempts") as caught:
        machine.step()
    assert caught.value.cursor is None


@pytest.mark.parametrize(
    ("headers", "wait"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0"}, 1.0),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:09 GMT", "date": "Wed, 21 Oct 2026 07:28:00 GMT"}, 9.0),
        ({"retry-after": "Wed, 21 Oct 2026 07:27:00 GMT", "date": "Wed, 21 Oct 2026 07:28:00 GMT"}, 1.0),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:09 GMT"}, 1.0),
        ({"retry-after": "soon"}, 1.0),
        ({}, 1.0),
    ],
)
def test_the_wait_is_never_shorter_than_retry_after(headers: dict[str, str], wait: float) -> None:
    machine = reader(random=lambda: 1.0, patience=Patience(base=1.0))
    request(machine)
    machine.answered(Answer(503, headers))
    assert seconds(machine) == pytest.approx(wait * (1.1 if wait > 1 else 1.0))


def test_retry_after_beyond_all_patience_is_given_up_at_once() -> None:
    machine = reader(patience=Patience(longest=60.0))
    request(machine)
    machine.answered(Answer(429, {"retry-after": "3600"}, b'{"error":"too_many_streams","detail":"limit"}'))
    with pytest.raises(GaveUp, match=r"limit \(asks for 3600 s of patience\)"):
        machine.step()


@given(st.integers(1, 5000), st.floats(0, 1, exclude_max=True), st.floats(0, 600))
def test_every_wait_is_jittered_within_its_bounds(failures: int, chance: float, told: float) -> None:
    patience = Patience(base=0.25, cap=30.0)
    wait = patience.wait(failures, lambda: chance, told)
    full = min(30.0, 0.25 * 2.0 ** min(failures - 1, 40))
    assert max(full / 2, told) <= wait <= max(full, told * 1.1)


def test_silence_is_three_of_the_gateways_heartbeats() -> None:
    machine = reader()
    connect(machine)
    assert machine.step() == Read(15.0)


def test_a_wait_that_was_cut_short_is_finished_also_by_a_reader_who_left() -> None:
    clock = ManualClock(0.0)
    machine = reader(clock=clock, patience=Patience(base=8.0))
    connect(machine)
    machine.lost("reset")
    clock.advance(5)
    machine.left()
    assert seconds(machine) == 3.0


def test_losses_and_the_return_are_told() -> None:
    clock, told = ManualClock(0.0), list[Lost | Resumed]()
    machine = reader(Cursor(STREAM, 4), clock=clock, patience=Patience(base=1.0), notify=told.append)
    connect(machine)
    machine.lost("reset")
    clock.advance(1.0)
    request(machine)
    machine.lost("connection refused")
    clock.advance(2.0)
    connect(machine, frame(5, delta="a"))
    clock.advance(0.5)
    assert take(machine) == 5
    assert told == [
        Lost("reset", Cursor(STREAM, 4), 1, 1.0),
        Lost("connection refused", Cursor(STREAM, 4), 2, 2.0),
        Resumed(3.5, Cursor(STREAM, 5), 2),
    ]


def test_a_shell_that_tells_what_cannot_be_is_stopped() -> None:
    machine = reader()
    with pytest.raises(RuntimeError, match="idle cannot become backing off"):
        machine.lost("reset")


def test_nothing_follows_the_two_last_states() -> None:
    assert {state for state, then in TRANSITIONS.items() if not then} == {State.ENDED, State.FAILED}
    assert set(TRANSITIONS) == set(State)


# --- any weather ------------------------------------------------------------------------------------------------------


class Weather:
    """A gateway with a whole stream, and a line to it that fails as drawn: then all goes well."""

    def __init__(self, last: int, draw: st.DataObject) -> None:
        self.whole = frames(last)
        self.given: list[int] = []
        self._draw = draw
        self._faults = draw.draw(st.integers(0, 12), label="faults")
        self._keys = set[str]()
        self._arrived = False

    def fault(self, kinds: list[str]) -> str:
        if self._faults == 0:
            return "none"
        kind = self._draw.draw(st.sampled_from(["none", *kinds]))
        self._faults -= kind != "none"
        return kind

    def run(self, machine: Reader, clock: ManualClock) -> None:
        while (step := machine.step()) is not None:
            match step:
                case Record(seq):
                    self.given.append(seq)
                    assert machine.position == Cursor(STREAM, seq)
                    if self.fault(["leaves"]) == "leaves":
                        machine.left()
                case Wait(wait):
                    clock.advance(wait)
                case Connect(asked):
                    self._answer(machine, asked)
                case Read():
                    self._send(machine)

    def _answer(self, machine: Reader, asked: Request) -> None:
        match self.fault(["refused", "503", "interrupted"]):
            case "refused":
                machine.lost("connection refused")
                return
            case "503":
                machine.answered(Answer(503, {"retry-after": "2"}))
                return
            case "interrupted":
                machine.left()
                return
        if asked.method == "POST":
            self._keys.add(asked.headers["idempotency-key"])
            assert len(self._keys) == 1
            assert not self._arrived
            position = 0
        else:
            position = after(asked)
        assert position == (self.given[-1] if self.given else 0)
        self._left = b"".join(self.whole[position:])
        machine.answered(OPENED)

    def _send(self, machine: Reader) -> None:
        match self.fault(["reset", "ping", "partial"]):
            case "reset":
                machine.lost("reset")
            case "ping":
                machine.received(b": ping\n") if self._left in self._tails() else None
            case "partial":
                size = self._draw.draw(st.integers(1, max(1, len(self._left))))
                self._pass(machine, size)
            case _:
                self._pass(machine, len(self._left))

    def _tails(self) -> list[bytes]:
        """What may be left between two frames, where alone there is connection talk."""
        return [b"".join(self.whole[at:]) for at in range(len(self.whole))]

    def _pass(self, machine: Reader, size: int) -> None:
        data, self._left = self._left[:size], self._left[size:]
        if not data:
            machine.lost("the connection ended")
            return
        machine.received(data)
        self._arrived = self._arrived or machine.waiting > 0


@given(st.integers(2, 30), st.data())
def test_whatever_the_weather_every_record_is_dispatched_exactly_once_in_order(last: int, draw: st.DataObject) -> None:
    """I3, from the client's side."""
    clock = ManualClock(0.0)
    machine = reader(clock=clock, random=lambda: 0.5, patience=Patience(attempts=50, unreached=50))
    weather = Weather(last, draw)
    weather.run(machine, clock)
    assert weather.given == list(range(1, last + 1))
    assert machine.state is State.ENDED
