"""What a wall clock may be believed: time that passed, and not what it jumped over."""

from __future__ import annotations

import time

import pytest

from midstream.clock import Clock
from midstream.server.app import Gateway
from midstream.server.settings import Settings
from midstream.testing.clock import ManualClock

TERM = 150.0
HOUR = 3600.0


def left(clock: Clock, deadline: float) -> float:
    """Seconds that a deadline has still, which was set for a term."""
    return deadline - clock.believed(TERM)


def test_time_that_passes_is_believed() -> None:
    clock = ManualClock(1000.0)
    deadline = clock() + TERM
    for _ in range(5):
        clock.advance(TERM / 5)
        assert clock.believed(TERM) == clock()
    assert left(clock, deadline) == 0


@pytest.mark.parametrize("looks", [True, False], ids=["one who looks all the time", "one who looks at last"])
def test_a_jump_forward_takes_nothing_from_deadlines_before_it(looks: bool) -> None:
    """Each has what it had left, and not a second more."""
    clock = ManualClock(1000.0)
    deadline = clock() + TERM
    clock.advance(TERM / 2)
    clock.set(clock() + HOUR)
    if looks:
        assert left(clock, deadline) == TERM / 2
    clock.advance(TERM / 2 - 1)
    assert left(clock, deadline) == 1
    clock.advance(1)
    assert left(clock, deadline) == 0


def test_a_deadline_after_a_jump_is_over_on_time() -> None:
    """And not before; once the jump is a term old the wall clock is believed again."""
    clock = ManualClock(1000.0)
    clock.set(clock() + HOUR)
    clock.believed(TERM)
    clock.advance(10)
    deadline = clock() + TERM
    clock.advance(TERM - 1)
    assert left(clock, deadline) == 1
    assert clock.believed(TERM) == clock()
    clock.advance(1)
    assert left(clock, deadline) == 0


def test_jumps_add_up_and_one_back_undoes_one_forward() -> None:
    clock = ManualClock(1000.0)
    deadline = clock() + TERM
    for seconds in (HOUR, 2 * HOUR):
        clock.set(clock() + seconds)
        assert left(clock, deadline) == TERM
    clock.set(clock() - 3 * HOUR)
    assert clock.believed(TERM) == clock()
    assert left(clock, deadline) == TERM


def test_the_clock_is_never_ahead_of_the_wall() -> None:
    """Where it was set back, what had been set before is over later, and nothing sooner."""
    clock = ManualClock(10_000.0)
    clock.set(clock() - HOUR)
    assert clock.believed(TERM) == clock()


def test_a_clock_that_is_slewed_is_believed() -> None:
    """As it is by a time daemon, hour after hour."""
    clock = ManualClock(1000.0)
    for _ in range(1000):
        clock.advance(10)
        clock.set(clock() + 0.005)
        assert clock.believed(TERM) == clock()


def test_any_other_clock_counts_as_steady() -> None:
    now = [1000.0]
    clock = Clock.of(lambda: now[0])
    now[0] += HOUR
    assert clock.believed(TERM) == clock() == clock.steady() == now[0]
    assert Clock.of(clock) is clock


def test_a_gateway_tells_jumps_from_time_unless_it_is_given_a_clock() -> None:
    clock = Clock.of(Gateway(Settings(journal="memory:"), {}).clock)
    assert abs(clock() - time.time()) < 60
    assert abs(clock.steady() - time.monotonic()) < 60
