"""A pool takes a thousand posts for a job, and nothing may be lost for it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from midstream.wire import POOL_MAX_BATCHES
from midstream.worker.batching import FULL, Batch, Batcher
from midstream.worker.times import Times

GATHER = Times().gather


def test_a_token_is_posted_a_tenth_of_a_second_after_it_came() -> None:
    batcher = Batcher(100, GATHER)
    batcher.add("a", "", now=0.0)
    assert batcher.due(0.0) == GATHER
    assert batcher.due(GATHER) == 0.0


def test_what_gathers_meanwhile_goes_with_it() -> None:
    batcher = Batcher(100, GATHER)
    for at, text in enumerate("abc"):
        batcher.add(text, text.upper(), now=at / 100)
    assert batcher.take() == Batch(1, "abc", "ABC")
    assert batcher.due(9.0) is None


def test_a_full_batch_and_the_last_one_go_at_once() -> None:
    batcher = Batcher(100, GATHER)
    batcher.add("x" * FULL, "", now=0.0)
    assert batcher.due(0.0) == 0.0
    batcher.take()
    batcher.add("y", "", now=0.0)
    assert batcher.due(0.0) == GATHER
    assert batcher.due(0.0, last=True) == 0.0


def test_numbers_start_at_1_and_have_no_gap() -> None:
    batcher = Batcher(100, GATHER)
    numbers = []
    for _ in range(5):
        batcher.add("x", "", now=0.0)
        numbers.append(batcher.take().seq)
    assert numbers == [1, 2, 3, 4, 5]


@given(
    max_length=st.integers(1, 16_384),
    pace=st.floats(0.0, 0.3),
    said=st.floats(0.0, 1.0),
)
def test_an_answer_within_its_length_never_needs_more_posts_than_a_pool_takes(
    max_length: int, pace: float, said: float
) -> None:
    batcher = Batcher(max_length, GATHER)
    now, posts = 0.0, []
    for at in range(int(max_length * said)):
        now += pace
        batcher.add(f"{at} ", "", now)
        while batcher.due(now) == 0.0:
            posts.append(batcher.take())
    if batcher.due(now, last=True) == 0.0:
        posts.append(batcher.take())
    assert len(posts) <= POOL_MAX_BATCHES
    assert "".join(post.content for post in posts) == "".join(f"{at} " for at in range(int(max_length * said)))
    assert [post.seq for post in posts] == list(range(1, len(posts) + 1))
