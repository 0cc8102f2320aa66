"""The lease contract, part 3: how relays read what was posted, and hear what became of a request."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

from midstream.pool.leases import Leases, Terms
from midstream.pool.shapes import Entry, SignalKind
from midstream.testing.lease_worker import Another, Clock, MakeLeases, Worker, new_id, posted, texts
from midstream.testing.patience import until


class Reader:
    """Reads a request as a relay does: what is new at each wake-up, from where it came to."""

    def __init__(self, leases: Leases, request: str) -> None:
        self._leases, self._request = leases, request
        self._news = asyncio.Event()
        self._position = ""
        self.read: list[Entry] = []
        self.stop: Callable[[], None] = leases.watch(request, self._news.set)

    async def until(self, count: int) -> list[str]:
        """The contents of all entries, once there are so many."""
        async with asyncio.timeout(10):
            while True:
                self._news.clear()
                for position, entry in await self._leases.entries(self._request, self._position):
                    self._position = position
                    self.read.append(entry)
                if len(self.read) >= count:
                    return [entry.content for entry in self.read]
                await self._news.wait()


class ReadingLaws:
    """Entries stay where they are; wake-ups say that there may be more."""

    async def test_entries_go_on_after_a_position(self, leases: Leases) -> None:
        """From every position on, also from one that was the newest when it was read."""
        worker = await Worker.begin(leases)
        assert await leases.entries(worker.request, "") == []
        await worker.say(*"abcdef")
        told = await leases.entries(worker.request, "")
        assert [entry.content for _, entry in told] == list("abcdef")
        for at, (position, _) in enumerate(told):
            assert await leases.entries(worker.request, position) == told[at + 1 :]
        await worker.say("g")
        assert [entry.content for _, entry in await leases.entries(worker.request, told[-1][0])] == ["g"]

    async def test_requests_do_not_mix(self, leases: Leases) -> None:
        workers = [await Worker.begin(leases) for _ in range(20)]
        for n, worker in enumerate(workers):
            await worker.say(*map(str, range(n)))
        for n, worker in enumerate(workers):
            assert await texts(leases, worker.request) == [str(m) for m in range(n)]

    async def test_entries_go_some_time_after_the_last_one(self, leases: Leases, clock: Clock) -> None:
        """Of an open request too; each append begins the time anew, and nothing old comes back with it."""
        retain = Terms().retain
        worker = await Worker.begin(leases)
        await worker.say("a")
        await pass_by(worker, clock, retain * 0.7)
        await worker.say("b")
        await pass_by(worker, clock, retain * 0.7)
        assert await texts(leases, worker.request) == ["a", "b"]
        await pass_by(worker, clock, retain * 0.4)
        assert await posted(leases, worker.request) == []
        await worker.say("c")
        assert await texts(leases, worker.request) == ["c"]

    async def test_about_so_many_entries_are_kept(self, make_leases: MakeLeases) -> None:
        """The newest, without a hole."""
        leases = await make_leases(Terms(entries=100))
        worker = await Worker.begin(leases, max_bytes=10_000)
        await worker.say(*map(str, range(1, 451)))
        numbers = [entry.seq for entry in await posted(leases, worker.request)]
        assert 100 <= len(numbers) <= 250
        assert numbers == list(range(451 - len(numbers), 451))

    async def test_append_wakes_who_watches(self, leases: Leases) -> None:
        """For each batch and for a marker."""
        worker = await Worker.begin(leases)
        reader = Reader(leases, worker.request)
        for n in range(5):
            await worker.say(str(n))
            assert len(await reader.until(n + 1)) == n + 1
        await leases.end(worker.generation, marker=True)
        await reader.until(6)
        assert reader.read[-1].ended

    async def test_watch_that_begins_late_misses_nothing(self, leases: Leases) -> None:
        """Before the first entry, after some, and again after it was given up."""
        worker = await Worker.begin(leases)
        await worker.say("a", "b")
        reader = Reader(leases, worker.request)
        assert await reader.until(2) == ["a", "b"]
        await worker.say("c")
        assert await reader.until(3) == ["a", "b", "c"]
        reader.stop()
        await worker.say("d")
        again = Reader(leases, worker.request)
        assert await again.until(4) == ["a", "b", "c", "d"]
        await worker.say("e")
        assert await again.until(5) == ["a", "b", "c", "d", "e"]

    async def test_several_read_one_request(self, leases: Leases) -> None:
        """Each from its own position, one of them far behind."""
        worker = await Worker.begin(leases)
        quick, slow = Reader(leases, worker.request), Reader(leases, worker.request)
        for n in range(10):
            await worker.say(str(n))
            await quick.until(n + 1)
        assert await slow.until(10) == [str(n) for n in range(10)]
        quick.stop()
        await worker.say("x")
        assert (await slow.until(11))[-1] == "x"

    async def test_many_are_watched_at_once(self, leases: Leases) -> None:
        """Begun one after the other while the others are being waited for, each is woken for its own."""
        workers = []
        for _ in range(40):
            worker = await Worker.begin(leases)
            workers.append((worker, Reader(leases, worker.request)))
            await worker.say("a")
        for worker, reader in workers:
            assert await reader.until(1) == ["a"]
            await worker.say("b")
        for _, reader in workers:
            assert await reader.until(2) == ["a", "b"]

    async def test_a_lot_at_once_is_read_whole(self, leases: Leases) -> None:
        """More than is kept for a reader that does not come."""
        worker = await Worker.begin(leases, max_bytes=2_000_000)
        reader = Reader(leases, worker.request)
        for n in range(20):
            await worker.say(str(n) * 30_000)
        assert await reader.until(20) == [str(n) * 30_000 for n in range(20)]
        await worker.say("end")
        assert (await reader.until(21))[-1] == "end"

    async def test_who_watches_no_more_is_not_woken(self, leases: Leases) -> None:
        """Ending it twice is harmless, and the others go on."""
        woken = 0

        def wake() -> None:
            nonlocal woken
            woken += 1

        worker = await Worker.begin(leases)
        stop = leases.watch(worker.request, wake)
        reader = Reader(leases, worker.request)
        await worker.say("a")
        await reader.until(1)
        await until(lambda: woken)
        stop()
        stop()
        before = woken
        await worker.say("b")
        await reader.until(2)
        assert woken == before

    async def test_callback_that_fails_does_not_cost_the_others_their_turn(self, leases: Leases) -> None:
        def fail() -> None:
            raise RuntimeError("a relay's own fault")

        worker = await Worker.begin(leases)
        leases.watch(worker.request, fail)
        reader = Reader(leases, worker.request)
        await worker.say("a")
        assert await reader.until(1) == ["a"]
        await worker.say("b")
        assert await reader.until(2) == ["a", "b"]

    async def test_another_gateway_reads_what_is_posted_here(self, leases: Leases, another: Another) -> None:
        """Where it is shared; from the beginning, and live."""
        other = await another(leases)
        worker = await Worker.begin(leases)
        await worker.say("a")
        if not leases.shared:
            assert await posted(other, worker.request) == []
            return
        reader = Reader(other, worker.request)
        assert await reader.until(1) == ["a"]
        await worker.say("b")
        assert await reader.until(2) == ["a", "b"]

    async def test_closing_twice_is_harmless(self, leases: Leases) -> None:
        worker = await Worker.begin(leases)
        reader = Reader(leases, worker.request)
        await worker.say("a")
        assert await reader.until(1) == ["a"]
        await leases.close()
        reader.stop()
        await leases.close()


class SignalLaws:
    """The completion channel carries no tokens, and progress says nothing on it."""

    async def test_signal_is_heard(self, leases: Leases) -> None:
        """Of every kind, by everybody who listens."""
        heard: dict[str, set[tuple[str, str]]] = {"one": set(), "two": set()}
        leases.listen(lambda request, kind: heard["one"].add((request, kind)))
        leases.listen(lambda request, kind: heard["two"].add((request, kind)))
        request = new_id()
        kinds: tuple[SignalKind, ...] = ("done", "failed", "cancelled")
        for kind in kinds:
            await leases.signal(request, kind)
        await until(lambda: all(len(told) == len(kinds) for told in heard.values()))
        assert heard["one"] == heard["two"] == {(request, kind) for kind in kinds}

    async def test_progress_raises_no_signal(self, leases: Leases, another: Another) -> None:
        """Nor does any other verb: what is heard of a request first is its signal."""
        heard = await listening(leases, await another(leases))
        worker = await Worker.begin(leases)
        reader = Reader(leases, worker.request)
        await worker.say("a", "b")
        await reader.until(2)
        await leases.flag(worker.request)
        await leases.end(worker.generation, marker=True)
        await reader.until(3)
        await leases.signal(worker.request, "cancelled")
        await until(lambda: worker.request in heard)
        assert heard[worker.request] == {"cancelled"}

    async def test_another_gateway_hears_it(self, leases: Leases, another: Another) -> None:
        """Where there is a shared store; else nothing is heard, as nobody is told."""
        other = await another(leases)
        theirs: set[str] = set()
        other.listen(lambda request, _: theirs.add(request))
        heard = await listening(leases, other)
        request = new_id()
        await leases.signal(request, "done")
        await until(lambda: request in heard)
        assert (request in theirs) == leases.shared


async def listening(leases: Leases, other: Leases) -> dict[str, set[str]]:
    """What is heard of each request from now on, by the other gateway where it hears anything."""
    heard: dict[str, set[str]] = defaultdict(set)
    (other if leases.shared else leases).listen(lambda request, kind: heard[request].add(kind))
    first = [new_id() for _ in range(100)]  # whatever channels there are
    async with asyncio.timeout(10):
        while not all(request in heard for request in first):
            for request in first:
                await leases.signal(request, "done")
    return heard


async def pass_by(worker: Worker, clock: Clock, seconds: float) -> None:
    """Let time pass in which the worker says nothing but that it lives."""
    step = Terms().term * 0.8
    while seconds > 0:
        clock.advance(min(step, seconds))
        seconds -= step
        await worker.live()
