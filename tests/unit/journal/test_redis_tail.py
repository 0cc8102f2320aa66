"""What a process keeps of a stream: the newest records without a hole, within bounds, and only what the store said."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from midstream.codec import native
from midstream.errors import StoreLost
from midstream.journal import redis_tail
from midstream.journal.redis_keys import Numbers, Space, decode_meta, encode_meta
from midstream.journal.redis_reading import unpacked
from midstream.journal.redis_tail import LEAST_BYTES, MOST_BYTES, Tail, Tails
from midstream.journal.redis_url import Terms
from midstream.journal.redis_writing import entries
from midstream.records import Finish, Frame, Page, StreamMeta
from midstream.rules import weight
from midstream.testing.journal_writer import seqs, tokens
from midstream.wire import SLICE_BYTES, SLICE_FRAMES


def frames_to(last: int) -> list[Frame]:
    return tokens(1, ["x"] * last)


def made(stream_id: str = "s", **fields: Any) -> Tail:
    told: dict[str, Any] = {"owner": "ada", "model": "m", "created_at": 1.5, "retain": 9.0, **fields}
    return Tail(StreamMeta(stream_id=stream_id, **told), (), Space("p"), Terms())


def told(**numbers: Any) -> Numbers:
    default: dict[str, Any] = dict.fromkeys(("acked", "trimmed", "held", "fold"), 0)
    default |= {"status": "open", "epoch": 1, "highest": 0, "oldest": 1, "access": 1.0, "ended": None}
    default |= {"writer": "w", "run": "r", **numbers}
    return Numbers(**default)


def page_of(tail: Tail) -> Page:
    page = tail.page(tail.highest, 1, 1)
    assert page is not None
    return page


def entry_log(triples: list[Any]) -> list[Any]:
    """Entries as the store tells them, of last seq, first seq and the records."""
    return [(b"%d-0" % last, [b"first", b"%d" % first, b"data", data]) for last, first, data in triples]


async def test_records_join_or_begin_anew() -> None:
    """What goes on is added, what overlaps is taken once, what leaves a hole replaces what was there."""
    tail, frames = made(), frames_to(30)
    tail.extend(1, frames[:5])
    tail.extend(4, frames[3:9])
    tail.extend(2, frames[1:4])
    assert (tail.first, tail.highest) == (1, 9)
    assert tail.records(1, 9) == frames[:9]
    assert tail.held == weight(frames[:9])
    tail.extend(20, frames[19:25])
    assert (tail.first, tail.highest) == (20, 25)
    assert tail.records(20, 25) == frames[19:25]
    assert tail.records(9, 20) is None
    tail.prepend(15, frames[14:22])
    assert tail.records(15, 25) == frames[14:25]
    tail.prepend(5, frames[4:8])
    assert tail.first == 15
    assert tail.held == weight(frames[14:25])


async def test_page_is_given_only_where_all_of_it_is_here() -> None:
    """Before the first record here the store must be asked; below the oldest and at the end there is nothing."""
    tail, frames = made(), frames_to(20)
    tail.extend(11, frames[10:])
    tail.let_go(5)
    assert tail.page(7, 100, SLICE_BYTES) is None
    page = tail.page(10, 4, SLICE_BYTES)
    assert page is not None
    assert (seqs(page.frames), page.last_seq, page.highest_seq, page.oldest_retained_seq) == (
        [11, 12, 13, 14],
        14,
        20,
        5,
    )
    empty, below = tail.page(20, 4, SLICE_BYTES), tail.page(3, 4, SLICE_BYTES)
    assert empty is not None
    assert below is not None
    assert (empty.frames, empty.last_seq, below.frames, below.oldest_retained_seq) == ([], 20, [], 5)
    tail.let_go(13)
    assert (tail.first, tail.records(12, 14)) == (13, None)


async def test_older_word_of_the_store_is_not_taken() -> None:
    """Replies of two connections may overtake each other."""
    tail = made()
    tail.extend(1, frames_to(9))
    tail.learn(told(highest=9, epoch=2, oldest=4), 1.0)
    tail.fresh = True
    tail.learn(told(highest=8, epoch=2, oldest=1), 2.0)
    tail.learn(told(highest=9, epoch=1, oldest=5), 3.0)
    assert (tail.oldest, tail.epoch, tail.seen, tail.fresh) == (4, 2, 1.0, True)
    tail.learn(told(highest=10, epoch=2), 4.0)
    assert not tail.fresh


async def test_end_is_known_with_its_record() -> None:
    """A status of which the terminal record is not here yet is not told: records and status belong together."""
    tail = made()
    tail.extend(1, frames_to(3))
    tail.learn(told(highest=4, status="done"), 1.0)
    assert page_of(tail).status == "open"
    tail.extend(4, [native.done(4, Finish())])
    assert page_of(tail).status == "done"


async def test_bound_of_one_stream_is_kept_and_the_newest_stays() -> None:
    """Records go from the front, however often, and one larger than the bound is kept alone."""
    tail, frames = made(), frames_to(500)
    for at in range(0, 500, 10):
        tail.extend(at + 1, frames[at : at + 10])
        tail.shrink(2000)
        assert tail.held <= 2000
        assert tail.records(tail.first, tail.highest) == frames[tail.first - 1 : at + 10]
    assert len(tail.frames) < 200
    tail.extend(501, tokens(501, ["y" * 5000]))
    tail.shrink(2000)
    assert (tail.first, tail.highest) == (501, 501)


async def test_bound_of_all_streams_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many streams each keeps its share; who waits for nobody goes first, whom somebody waits for stays."""
    monkeypatch.setattr(redis_tail, "TAILS_BYTES", 40 * LEAST_BYTES)
    tails = Tails()
    waited, ours = tails.add(made("waited")), tails.add(made("ours"))
    waited.waiters.append(lambda: None)
    ours.mine = 1
    assert tails.allowed == min(MOST_BYTES, 20 * LEAST_BYTES)
    for at in range(100):
        tail = tails.add(made(f"s{at}"))
        tail.extend(1, frames_to(200))
    tails.tidy()
    kept = list(tails)
    assert waited in kept
    assert ours in kept
    assert tails.get("s99") in kept
    assert tails.get("s0") is None
    assert sum(tail.held for tail in kept) <= 40 * LEAST_BYTES


async def test_requests_count_in_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream's request is kept with it, and may be the largest part."""
    monkeypatch.setattr(redis_tail, "TAILS_BYTES", 1_000_000)
    tails = Tails()
    for at in range(20):
        tails.add(made(f"s{at}", request=b"x" * 100_000))
    tails.tidy()
    assert 1 <= len(list(tails)) <= 10


async def test_who_is_forgotten_is_woken() -> None:
    """A reader of a stream that is known no longer asks the store."""
    tails = Tails()
    tail = tails.add(made())
    tail.extend(1, frames_to(2))
    waiting = asyncio.create_task(tail.wait(2))
    await asyncio.sleep(0)
    tails.pop("s")
    await asyncio.wait_for(waiting, 1)
    assert not tail.fresh


def test_batches_become_entries_within_bounds() -> None:
    """At most 512 records and 256 KiB each; a record over that alone; and they come back as they were."""
    batches = [frames_to(1), frames_to(SLICE_FRAMES), frames_to(2 * SLICE_FRAMES + 1)]
    batches.append(tokens(1, ["x" * 100_000] * 6 + ["y" * 300_000, "z"]))
    for frames in batches:
        told: list[Any] = list(entries(1, frames))
        triples = list(zip(told[::3], told[1::3], told[2::3], strict=True))
        assert all(last - first < SLICE_FRAMES for last, first, _ in triples)
        assert all(len(data) <= SLICE_BYTES or last == first for last, first, data in triples)
        log = entry_log(triples)
        for after in (0, 1, len(frames) // 2, len(frames)):
            assert unpacked("s", log, after) == frames[after:]


@pytest.mark.parametrize("missing", range(4))
def test_hole_between_entries_is_a_loss(missing: int) -> None:
    """Whichever entry is gone, the records behind it are not given as if they came next."""
    frames = frames_to(8)
    log = entry_log([(at + 2, at + 1, b"".join(frames[at : at + 2])) for at in (0, 2, 4, 6)])
    del log[missing]
    if missing == 3:
        assert unpacked("s", log, 0) == frames[:6]
        return
    with pytest.raises(StoreLost, match=f"lost record {missing * 2 + 1} of s"):
        unpacked("s", log, 0)
    assert unpacked("s", log, missing * 2 + 2) == frames[missing * 2 + 2 :]


def test_entry_that_is_no_entry_is_a_loss() -> None:
    """Fields of another kind, or fewer records than its numbers say."""
    for entry in [
        (b"2-0", [b"first", b"1", b"data", frames_to(1)[0]]),
        (b"x-0", [b"first", b"1", b"data", b""]),
        (b"1-0", [b"a", b"b"]),
    ]:
        with pytest.raises(StoreLost):
            unpacked("s", [entry], 0)


def test_meta_comes_back_as_it_was() -> None:
    """Owner, model, times to the last digit, names, and the request as bytes."""
    meta = StreamMeta("s", "büro", "m/ü", 1700000000.123456, 12.5, None, b'{"x":"\xc3\xbc"}')
    names = ("büro/idem/K", "büro/session/{S}")
    assert decode_meta("s", encode_meta(meta, names), meta.request) == (meta, names)
    for broken in (None, b"", b"{}", b"[]", b'{"names":1}'):
        with pytest.raises(StoreLost):
            decode_meta("s", broken, b"{}")
