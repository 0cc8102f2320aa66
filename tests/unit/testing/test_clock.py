import pytest

from midstream.testing.clock import ManualClock


def test_time_stands_still_until_it_is_advanced() -> None:
    clock = ManualClock(100.0)
    assert (clock(), clock()) == (100.0, 100.0)
    clock.advance(2.5)
    assert clock() == 102.5


def test_a_jump_backwards_must_be_asked_for_by_name() -> None:
    clock = ManualClock(100.0)
    with pytest.raises(ValueError, match="forwards"):
        clock.advance(-1)
    clock.set(40.0)
    assert clock() == 40.0
