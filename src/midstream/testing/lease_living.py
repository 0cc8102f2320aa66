"""The lease contract, part 2: how leases begin, last and end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from midstream.pool.errors import NoLease, ProgressOutOfSequence, ProgressTooLarge, WrongKey
from midstream.pool.leases import Ended, Leases, Terms
from midstream.testing.lease_worker import OTHER_KEY, Another, Clock, Worker, new_id, posted, texts

TERM = Terms().term
Post = Callable[[Worker], Awaitable[Any]]


async def _too_large(worker: Worker) -> None:
    with pytest.raises(ProgressTooLarge):
        await worker.post(worker.seq + 1, "x" * 10_000)


async def _out_of_sequence(worker: Worker) -> None:
    with pytest.raises(ProgressOutOfSequence):
        await worker.post(worker.seq + 2, "x")


async def _wrong_key(worker: Worker) -> None:
    with pytest.raises(WrongKey):
        await worker.post(worker.seq + 1, "x", key=OTHER_KEY)


async def _flagged(worker: Worker) -> None:
    await worker.leases.flag(worker.request)
    assert (await worker.post(worker.seq + 1, "x")).cancelled


RENEWING: dict[str, Post] = {
    "a batch": lambda worker: worker.say("x"),
    "a repeat": lambda worker: worker.post(1, "a"),
    "a sign of life": lambda worker: worker.live(),
    "too large": _too_large,
    "cancelled": _flagged,
}
NOT_RENEWING: dict[str, Post] = {"out of sequence": _out_of_sequence, "another key": _wrong_key}


class LivingLaws:
    """A lease runs out a term after its worker's last post."""

    async def test_steady_batches_keep_a_lease(self, leases: Leases, clock: Clock) -> None:
        """A job of more than three terms is one job."""
        worker = await Worker.begin(leases)
        for n in range(5):
            clock.advance(TERM * 0.9)
            await worker.say(str(n))
            assert not await leases.lost(worker.generation)
        assert await texts(leases, worker.request) == list("01234")

    async def test_signs_of_life_keep_a_lease(self, leases: Leases, clock: Clock) -> None:
        """A prompt that is read for two terms and more."""
        worker = await Worker.begin(leases)
        for _ in range(4):
            clock.advance(TERM * 0.9)
            await worker.live()
        assert not await leases.lost(worker.generation)
        await worker.say("a")

    @pytest.mark.parametrize("kind", RENEWING)
    async def test_post_renews(self, leases: Leases, clock: Clock, kind: str) -> None:
        worker = await Worker.begin(leases)
        await worker.say("a")
        clock.advance(TERM * 0.7)
        await RENEWING[kind](worker)
        clock.advance(TERM * 0.7)
        assert not await leases.lost(worker.generation)
        clock.advance(TERM * 0.4)
        assert await leases.lost(worker.generation)

    @pytest.mark.parametrize("kind", NOT_RENEWING)
    async def test_refused_post_does_not_renew(self, leases: Leases, clock: Clock, kind: str) -> None:
        worker = await Worker.begin(leases)
        await worker.say("a")
        clock.advance(TERM * 0.7)
        await NOT_RENEWING[kind](worker)
        clock.advance(TERM * 0.4)
        assert await leases.lost(worker.generation)

    async def test_silent_worker_loses_its_lease(self, leases: Leases, clock: Clock) -> None:
        """Nothing it posts is taken any more, asked about or not."""
        worker = await Worker.begin(leases)
        await worker.say("a")
        clock.advance(TERM + 1)
        for seq, content in ((2, "b"), (1, "a"), (0, "")):
            with pytest.raises(NoLease):
                await worker.post(seq, content)
        assert await texts(leases, worker.request) == ["a"]

    async def test_lost_lease_is_removed_with_one_marker(self, leases: Leases, clock: Clock) -> None:
        """However many ask, at once or later."""
        worker = await Worker.begin(leases)
        await worker.say("a")
        assert not await leases.lost(worker.generation)
        clock.advance(TERM + 1)
        assert all(await asyncio.gather(*(leases.lost(worker.generation) for _ in range(10))))
        assert await leases.lost(worker.generation)
        assert await leases.end(worker.generation, marker=True) is Ended.NONE
        marks = [entry.ended for entry in await posted(leases, worker.request)]
        assert marks == [False, True]
        with pytest.raises(NoLease):
            await worker.live()

    async def test_what_never_had_a_lease_has_lost_it(self, leases: Leases) -> None:
        assert await leases.lost(new_id())
        assert not await leases.end(new_id(), marker=True)

    async def test_ended_without_a_marker(self, leases: Leases, clock: Clock) -> None:
        """As by a submit.  Who finds it lost afterwards adds no marker."""
        worker = await Worker.begin(leases)
        await worker.say("a")
        for marker in (False, True):
            assert await leases.end(worker.generation, marker=marker) is Ended.LIVE
        clock.advance(TERM + 1)
        assert await leases.lost(worker.generation)
        assert await texts(leases, worker.request) == ["a"]
        with pytest.raises(NoLease):
            await worker.post(2, "b")

    async def test_ended_with_a_marker(self, leases: Leases) -> None:
        """As by a fault: the entry names generation, worker and model, and holds no text."""
        worker = await Worker.begin(leases)
        await worker.say("a")
        for _ in range(2):
            assert await leases.end(worker.generation, marker=True) is Ended.LIVE
        _, mark = await posted(leases, worker.request)
        assert (mark.generation, mark.seq, mark.content, mark.reasoning) == (worker.generation, 0, "", "")
        assert (mark.worker, mark.model, mark.ended) == (worker.lease.worker, worker.lease.model, True)

    async def test_expired_lease_ends_with_its_marker(self, leases: Leases, clock: Clock) -> None:
        """A fault that comes too late: there was no live lease, but the relay is told once."""
        worker = await Worker.begin(leases)
        clock.advance(TERM + 1)
        for _ in range(2):
            assert await leases.end(worker.generation, marker=True) is Ended.NONE
        assert await leases.lost(worker.generation)
        assert [entry.ended for entry in await posted(leases, worker.request)] == [True]

    async def test_granted_again_it_stays_as_it_is(self, leases: Leases) -> None:
        """The answer to the first may have been lost; what was posted since counts."""
        worker = await Worker.begin(leases)
        await worker.say("a")
        assert await leases.grant(replace(worker.lease, key_digest=OTHER_KEY, max_bytes=1))
        await worker.say("b")
        assert await leases.end(worker.generation, marker=False)
        assert not await leases.grant(worker.lease)

    async def test_held_leases_are_told(self, leases: Leases, clock: Clock) -> None:
        """Those that live, with how far each has come."""
        begun = clock()
        workers = [await Worker.begin(leases) for _ in range(5)]
        first, second, third, fourth, _ = workers
        await first.post(1, "é", "漢😀")
        await leases.flag(second.request)
        await leases.end(third.generation, marker=True)
        clock.advance(TERM * 0.6)
        for worker in (first, second, fourth):
            await worker.live()
        clock.advance(TERM * 0.6)
        views = {view.generation: view for view in await leases.held()}
        assert set(views) == {first.generation, second.generation, fourth.generation}
        view = views[first.generation]
        lease = first.lease
        assert (view.request, view.worker, view.model, view.owner) == (
            lease.request,
            lease.worker,
            lease.model,
            lease.owner,
        )
        assert (view.seq, view.bytes, view.chars, view.cancelled) == (1, 9, 3, False)
        assert views[second.generation].cancelled
        assert TERM * 1.5 < view.expires_at - begun < TERM * 1.7

    async def test_another_gateway_has_the_same_leases(self, leases: Leases, another: Another) -> None:
        """Where they are shared.  Where they are not, it knows nothing of them."""
        other = await another(leases)
        worker = await Worker.begin(leases)
        await worker.say("a")
        worker.leases = other
        assert other.shared == leases.shared
        if not leases.shared:
            with pytest.raises(NoLease):
                await worker.post(2, "b")
            assert await other.held() == []
            return
        await worker.say("b")
        assert await texts(leases, worker.request) == ["a", "b"]
        assert await other.flag(worker.request) == {worker.generation: 2}
        assert (await worker.post(3, "c")).cancelled
        assert not await leases.grant(Worker(leases, worker.request, 100).lease)


class FlagLaws:
    """Cancel: one atomic step per request, which returns what was posted."""

    async def test_flag_tells_what_was_posted(self, leases: Leases) -> None:
        """In characters, of content and reasoning, for every lease of the request and of no other."""
        request = new_id()
        silent, wordy = await Worker.begin(leases, request), await Worker.begin(leases, request)
        stranger = await Worker.begin(leases)
        await wordy.post(1, "é漢😀", "ab")
        await wordy.post(1, "é漢😀", "ab")
        await wordy.post(2, "\0\r\n", "")
        assert await leases.flag(request) == {silent.generation: 0, wordy.generation: 8}
        assert await leases.flag(request) == {silent.generation: 0, wordy.generation: 8}
        assert not (await stranger.post(1, "a")).cancelled

    async def test_flag_refuses_a_later_grant(self, leases: Leases) -> None:
        """A pop that raced with the cancel; also where nobody had a lease before."""
        request = new_id()
        assert await leases.flag(request) == {}
        late = Worker(leases, request, 100)
        assert not await leases.grant(late.lease)
        with pytest.raises(NoLease):
            await late.live()
        assert await leases.flag(request) == {}

    async def test_flag_leaves_no_marker(self, leases: Leases) -> None:
        """A marker means divergence to a relay, and this is none."""
        worker = await Worker.begin(leases)
        await worker.say("a")
        await leases.flag(worker.request)
        assert await texts(leases, worker.request) == ["a"]
        assert await leases.end(worker.generation, marker=False)

    async def test_flag_passes_over_what_is_gone(self, leases: Leases, clock: Clock) -> None:
        """A lease that a submit has ended is the submit's to settle, and one that ran out is nobody's."""
        request = new_id()
        ended, expired = await Worker.begin(leases, request), await Worker.begin(leases, request)
        await ended.say("a")
        await expired.say("b")
        await leases.end(ended.generation, marker=False)
        clock.advance(TERM + 1)
        assert await leases.flag(request) == {}
        assert await leases.lost(expired.generation)

    async def test_flag_tells_of_faults_that_came_before_it(self, leases: Leases, clock: Clock) -> None:
        """Also of a lease that had run out by then: the cancel may come to the database first."""
        request = new_id()
        live, late, silent = [await Worker.begin(leases, request) for _ in range(3)]
        for worker in (live, late, silent):
            await worker.say("abc")
        assert await leases.end(live.generation, marker=True) is Ended.LIVE
        clock.advance(TERM + 1)
        assert await leases.end(late.generation, marker=True) is Ended.NONE
        assert await leases.lost(silent.generation)
        for _ in range(2):
            told = await leases.flag(request)
            assert told == {live.generation: None, late.generation: None, silent.generation: None}
        with pytest.raises(NoLease):
            await live.live()

    @pytest.mark.parametrize("then", ["given back", "submitted", "run out", "run out and found so"])
    async def test_flag_tells_the_same_whatever_becomes_of_the_lease(
        self, leases: Leases, clock: Clock, then: str
    ) -> None:
        """The cancel was first: what was posted is paid, whoever takes it down."""
        worker = await Worker.begin(leases)
        await worker.say("abc")
        assert await leases.flag(worker.request) == {worker.generation: 3}
        if then.startswith("run out"):
            clock.advance(TERM + 1)
        if then.endswith("found so"):
            assert await leases.lost(worker.generation)
        assert await leases.flag(worker.request) == {worker.generation: 3}
        for _ in range(2):
            assert await leases.end(worker.generation, marker=then != "submitted") is Ended.CANCELLED
            assert await leases.flag(worker.request) == {worker.generation: 3}

    async def test_flag_counts_every_post_that_was_taken(self, leases: Leases) -> None:
        """None comes in between: what is answered 'not cancelled' has been counted."""
        for _ in range(5):
            worker = await Worker.begin(leases)
            posts = [asyncio.create_task(worker.post(seq, "x" * seq)) for seq in range(1, 8)]
            counted = await leases.flag(worker.request)
            answers = await asyncio.gather(*posts)
            taken = sum(seq for seq, answer in enumerate(answers, start=1) if not answer.cancelled)
            assert counted == {worker.generation: taken}
            assert sum(map(len, await texts(leases, worker.request))) == taken
