"""The lease contract, part 1: what becomes of a post.  The order of the checks is PROTOCOL.md's."""

from __future__ import annotations

import asyncio

import pytest

from midstream.pool.errors import NoLease, ProgressOutOfSequence, ProgressTooLarge, WrongKey
from midstream.pool.leases import Leases, Terms
from midstream.pool.shapes import Entry
from midstream.testing.lease_worker import OTHER_KEY, Clock, MakeLeases, Worker, new_id, posted, texts

# Text that stores are known to spoil: NUL, line ends, what looks like JSON or Lua, and halves of surrogate pairs.
ODD = ["\0a\0", "a\r\nb\rc\n", '"}\\u0000{"%s', "\ud83d", "\ude00\ud800", "\udfff", "é漢😀\u2028", " "]


class PostingLaws:
    """One atomic step per post."""

    async def test_batches_become_entries_in_order(self, leases: Leases) -> None:
        """Each with the worker and the model of the lease."""
        worker = await Worker.begin(leases)
        for seq, (content, reasoning) in enumerate([("", "thinks"), ("The", " on"), (" end", "")], start=1):
            answer = await worker.post(seq, content, reasoning)
            assert not answer.cancelled
        lease = worker.lease
        assert await posted(leases, worker.request) == [
            Entry(lease.generation, 1, "", "thinks", lease.worker, lease.model),
            Entry(lease.generation, 2, "The", " on", lease.worker, lease.model),
            Entry(lease.generation, 3, " end", "", lease.worker, lease.model),
        ]

    async def test_text_comes_back_as_it_was_posted(self, leases: Leases) -> None:
        worker = await Worker.begin(leases)
        for seq, text in enumerate(ODD, start=1):
            await worker.post(seq, text, text[::-1])
            await worker.post(seq, text, text[::-1])  # its digest knows it again
        entries = await posted(leases, worker.request)
        assert [entry.content for entry in entries] == ODD
        assert [entry.reasoning for entry in entries] == [text[::-1] for text in ODD]

    @pytest.mark.parametrize("generation", ["", "no-such", "\0", "{0}", "\ud800", "x" * 100_000])
    async def test_post_without_a_lease_is_refused(self, leases: Leases, generation: str) -> None:
        with pytest.raises(NoLease):
            await leases.post(generation, OTHER_KEY, 1, "text", "")

    async def test_post_with_another_key_is_refused(self, leases: Leases) -> None:
        """Whatever else is wrong with it, and nothing changes."""
        worker = await Worker.begin(leases)
        await worker.say("a")
        for seq in (0, 1, 2, 7):
            with pytest.raises(WrongKey):
                await worker.post(seq, "a", key=OTHER_KEY)
        await leases.flag(worker.request)
        with pytest.raises(WrongKey):
            await worker.post(2, "b", key=OTHER_KEY)
        assert await texts(leases, worker.request) == ["a"]

    async def test_cancelled_comes_before_everything_but_the_key(self, leases: Leases) -> None:
        """A gap, a repeat or too much text: a worker that is to stop is told so and nothing else."""
        worker = await Worker.begin(leases)
        await worker.say("a")
        await leases.flag(worker.request)
        for seq, content in ((2, "b"), (1, "a"), (1, "other"), (9, "gap"), (0, ""), (2, "x" * 100_000)):
            answer = await worker.post(seq, content)
            assert answer.cancelled
            assert not answer.renew
        assert await texts(leases, worker.request) == ["a"]

    async def test_sign_of_life_appends_nothing(self, leases: Leases) -> None:
        """Seq 0 without text, before the first batch and between any two; with text it is out of sequence."""
        worker = await Worker.begin(leases)
        assert not (await worker.live()).cancelled
        await worker.say("a")
        await worker.live()
        await worker.say("b")
        for content, reasoning in (("c", ""), ("", "c")):
            with pytest.raises(ProgressOutOfSequence) as refused:
                await worker.post(0, content, reasoning)
            assert refused.value.expected == 3
        assert await texts(leases, worker.request) == ["a", "b"]

    async def test_repeat_of_the_last_batch_is_taken_once(self, leases: Leases) -> None:
        """Its answer may have been lost."""
        worker = await Worker.begin(leases)
        await worker.say("a", "b")
        for _ in range(3):
            assert not (await worker.post(2, "b")).cancelled
        await worker.say("c")
        assert await texts(leases, worker.request) == ["a", "b", "c"]

    @pytest.mark.parametrize(
        ("seq", "content", "reasoning"),
        [
            (2, "B", ""),
            (2, "", "b"),
            (2, "b", " "),
            (1, "a", ""),
            (4, "d", ""),
            (0, "b", ""),
            (-1, "", ""),
            (10**30, "", ""),
        ],
    )
    async def test_what_is_not_next_is_refused_and_named(
        self, leases: Leases, seq: int, content: str, reasoning: str
    ) -> None:
        """The last number with other text, an older one, a gap, nonsense: nothing is added, and the next is taken."""
        worker = await Worker.begin(leases)
        await worker.say("a", "b")
        with pytest.raises(ProgressOutOfSequence) as refused:
            await worker.post(seq, content, reasoning)
        assert refused.value.expected == 3
        await worker.say("c")
        assert await texts(leases, worker.request) == ["a", "b", "c"]

    async def test_first_batch_has_number_one(self, leases: Leases) -> None:
        worker = await Worker.begin(leases)
        with pytest.raises(ProgressOutOfSequence) as refused:
            await worker.post(2, "b")
        assert refused.value.expected == 1

    async def test_empty_batch_is_a_batch(self, leases: Leases) -> None:
        worker = await Worker.begin(leases)
        await worker.say("", "")
        assert await texts(leases, worker.request) == ["", ""]

    async def test_bytes_are_bounded(self, leases: Leases) -> None:
        """Those of UTF-8, of content and reasoning together, over all batches; what just fits is taken."""
        worker = await Worker.begin(leases, max_bytes=10)
        await worker.post(1, "é", "漢")
        for content, reasoning in (("x" * 6, ""), ("", "x" * 6), ("xxx", "é" + "x")):
            with pytest.raises(ProgressTooLarge):
                await worker.post(2, content, reasoning)
        await worker.post(2, "xx", "漢")
        assert not (await worker.post(2, "xx", "漢")).cancelled
        with pytest.raises(ProgressTooLarge):
            await worker.post(3, "x")
        await worker.post(3, "")
        assert len(await posted(leases, worker.request)) == 3

    async def test_batches_are_bounded(self, make_leases: MakeLeases) -> None:
        """After the last one its repeat is still known, and a sign of life still taken."""
        leases = await make_leases(Terms(batches=3))
        worker = await Worker.begin(leases)
        await worker.say("a", "b", "c")
        with pytest.raises(ProgressTooLarge):
            await worker.post(4, "d")
        await worker.post(3, "c")
        await worker.live()
        with pytest.raises(ProgressOutOfSequence):
            await worker.post(5, "e")
        assert await texts(leases, worker.request) == ["a", "b", "c"]

    async def test_posts_of_one_number_at_once_add_one_entry(self, leases: Leases) -> None:
        """The same text is taken from all, different texts from one."""
        worker = await Worker.begin(leases)
        same = await asyncio.gather(*(worker.post(1, "a") for _ in range(20)))
        assert not any(answer.cancelled for answer in same)
        different = await asyncio.gather(*(worker.post(2, str(n)) for n in range(20)), return_exceptions=True)
        assert sum(isinstance(answer, ProgressOutOfSequence) for answer in different) == 19
        assert len(await posted(leases, worker.request)) == 2

    async def test_renewal_is_due_once_in_a_third_of_a_term(self, leases: Leases, clock: Clock) -> None:
        """Whatever kind of post it is, and whichever gateway is told."""
        third = Terms().third
        worker = await Worker.begin(leases)
        assert not (await worker.post(1, "a")).renew
        for post in (worker.live, lambda: worker.post(1, "a"), lambda: worker.post(2, "b")):
            clock.advance(third + 1)
            assert (await post()).renew
            assert not (await post()).renew
            clock.advance(third / 2)
            assert not (await worker.live()).renew

    async def test_a_generation_does_not_touch_another(self, leases: Leases) -> None:
        """Of the same request: a late post of the old one after the new one has begun is refused, and adds nothing."""
        request = new_id()
        old = await Worker.begin(leases, request)
        await old.say("The ca")
        await leases.end(old.generation, marker=True)
        new = await Worker.begin(leases, request)
        await new.say("The dog")
        with pytest.raises(NoLease):
            await old.post(2, "t")
        await new.say(" barks")
        entries = await posted(leases, request)
        assert [(entry.generation, entry.content, entry.ended) for entry in entries] == [
            (old.generation, "The ca", False),
            (old.generation, "", True),
            (new.generation, "The dog", False),
            (new.generation, " barks", False),
        ]
