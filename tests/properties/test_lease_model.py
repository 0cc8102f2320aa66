"""Leases against a naive model of them: lists, and PROTOCOL.md's order of checks read out word for word."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from midstream.pool.errors import PoolError, ProgressOutOfSequence
from midstream.pool.leases import Ended, Leases, Terms
from midstream.pool.shapes import Lease
from midstream.testing.lease_worker import KEY, OTHER_KEY, new_id
from tests.leases import BACK_ENDS, LeaseStore

# Bounds that a few dozen steps meet.  No sum of whole seconds comes near one of these times.
TERMS = Terms(term=31.5, batches=4, retain=100.5, linger=400.5)
MAX_BYTES = 12

REQUESTS = st.integers(0, 1)
GENERATIONS = st.integers(0, 3)
TEXTS = st.sampled_from(["", "a", "b", "ab", "é", "\0", "\r\n", "\ud83d", "漢字", "too much text"])


@dataclass
class Run:
    """A generation as the model has it.  `due` is when the SQL side is to be renewed next."""

    request: int
    expires: float
    due: float
    said: list[tuple[str, str]] = field(default_factory=list)
    ended: Ended | None = None
    lost: bool = False  # given back, or run out
    cancelled: bool = False

    def live(self, now: float) -> bool:
        return self.ended is None and now < self.expires

    @property
    def bytes(self) -> int:
        return sum(len(text.encode("utf-8", "surrogatepass")) for said in self.said for text in said)

    @property
    def chars(self) -> int:
        return sum(len(text) for said in self.said for text in said)


class Model:
    """All requests.  An entry is (generation, seq, content, reasoning); a marker has seq 0."""

    def __init__(self) -> None:
        self.now = 0.0
        self.runs: dict[int, Run] = {}
        self.flagged: set[int] = set()
        self.entries: dict[int, list[tuple[int, int, str, str]]] = {0: [], 1: []}
        self.appended = {0: 0.0, 1: 0.0}

    def grant(self, generation: int, request: int) -> bool:
        run = self.runs.get(generation)
        if request in self.flagged or (run is not None and run.ended is not None):
            return False
        if run is None or not run.live(self.now):
            self.runs[generation] = Run(request, self.now + TERMS.term, self.now + TERMS.third)
        return True

    def post(self, generation: int, good_key: bool, seq: int, content: str, reasoning: str) -> str:
        run = self.runs.get(generation)
        if run is None or not run.live(self.now):
            return "NoLease"
        if not good_key:
            return "WrongKey"
        if run.cancelled:
            return self._renew(run, "cancelled")
        expected = len(run.said) + 1
        if seq == 0 and content == reasoning == "":
            return self._renew(run, "ok")
        if seq == len(run.said) > 0 and run.said[-1] == (content, reasoning):
            return self._renew(run, "ok")
        if seq != expected:
            return f"ProgressOutOfSequence {expected}"
        size = len((content + reasoning).encode("utf-8", "surrogatepass"))
        if expected > TERMS.batches or run.bytes + size > MAX_BYTES:
            return self._renew(run, "ProgressTooLarge")
        run.said.append((content, reasoning))
        self._append(run.request, (generation, seq, content, reasoning))
        return self._renew(run, "ok")

    def _renew(self, run: Run, answer: str) -> str:
        run.expires = self.now + TERMS.term
        if answer == "ok" and self.now >= run.due:
            run.due = self.now + TERMS.third
            return "ok, renew"
        return answer

    def _append(self, request: int, entry: tuple[int, int, str, str]) -> None:
        self.entries[request] = [*self.kept(request), entry]
        self.appended[request] = self.now

    def kept(self, request: int) -> list[tuple[int, int, str, str]]:
        return self.entries[request] if self.now < self.appended[request] + TERMS.retain else []

    def flag(self, request: int) -> dict[int, int | None]:
        self.flagged.add(request)
        mine = {name: run for name, run in self.runs.items() if run.request == request}
        for run in mine.values():
            run.cancelled = run.cancelled or run.live(self.now)
        return {name: run.chars if run.cancelled else None for name, run in mine.items() if run.cancelled or run.lost}

    def end(self, generation: int, marker: bool) -> Ended:
        run = self.runs.get(generation)
        if run is None:
            return Ended.NONE
        if run.ended is None:
            run.ended = Ended.CANCELLED if run.cancelled else Ended.LIVE if run.live(self.now) else Ended.NONE
            run.lost = marker
            if marker:
                self._append(run.request, (generation, 0, "", ""))
        return run.ended

    def lost(self, generation: int) -> bool:
        run = self.runs.get(generation)
        if run is not None and run.live(self.now):
            return False
        if run is not None and run.ended is None:
            self.end(generation, marker=True)
        return True


class LeaseMachine(RuleBasedStateMachine):
    """A few generations of two requests.  `run` and `open` are set for a back end."""

    run: Callable[[Coroutine[Any, Any, Any]], Any]
    open: Callable[[], tuple[LeaseStore, Leases]]

    @initialize()
    def begin(self) -> None:
        self.store, self.leases = self.open()
        self.model = Model()
        self.requests = [new_id(), new_id()]
        self.generations = [new_id() for _ in range(4)]

    def request_of(self, generation: int) -> int:
        return generation % 2

    @rule(generation=GENERATIONS)
    def grant(self, generation: int) -> None:
        request = self.request_of(generation)
        lease = Lease(self.generations[generation], self.requests[request], "w", "m", "o", KEY, MAX_BYTES)
        assert self.run(self.leases.grant(lease)) == self.model.grant(generation, request)

    @rule(
        generation=GENERATIONS,
        key=st.sampled_from([KEY, KEY, KEY, KEY, OTHER_KEY]),
        ahead=st.sampled_from([1, 1, 1, 1, 0, -1, 2]),
        content=TEXTS,
        reasoning=TEXTS,
    )
    def post(self, generation: int, key: bytes, ahead: int, content: str, reasoning: str) -> None:
        """Mostly the next batch, else one before, the last one, or one too far."""
        run = self.model.runs.get(generation)
        seq = max(0, (len(run.said) if run else 0) + ahead)
        self.compare(generation, key, seq, content, reasoning)

    @rule(generation=GENERATIONS)
    def repeat(self, generation: int) -> None:
        """As when the answer was lost."""
        run = self.model.runs.get(generation)
        if run and run.said:
            self.compare(generation, KEY, len(run.said), *run.said[-1])

    @rule(generation=GENERATIONS)
    def live(self, generation: int) -> None:
        self.compare(generation, KEY, 0, "", "")

    def compare(self, generation: int, key: bytes, seq: int, content: str, reasoning: str) -> None:
        expected = self.model.post(generation, key == KEY, seq, content, reasoning)
        assert self.answer(generation, key, seq, content, reasoning) == expected

    def answer(self, generation: int, key: bytes, seq: int, content: str, reasoning: str) -> str:
        try:
            told = self.run(self.leases.post(self.generations[generation], key, seq, content, reasoning))
        except ProgressOutOfSequence as error:
            return f"ProgressOutOfSequence {error.expected}"
        except PoolError as error:
            return type(error).__name__
        assert not (told.cancelled and told.renew)
        return "cancelled" if told.cancelled else "ok, renew" if told.renew else "ok"

    @rule(request=REQUESTS)
    def flag(self, request: int) -> None:
        told = self.run(self.leases.flag(self.requests[request]))
        assert told == {self.generations[name]: chars for name, chars in self.model.flag(request).items()}

    @rule(generation=GENERATIONS, marker=st.booleans())
    def end(self, generation: int, marker: bool) -> None:
        told = self.run(self.leases.end(self.generations[generation], marker=marker))
        assert told == self.model.end(generation, marker)

    @rule(generation=GENERATIONS)
    def lost(self, generation: int) -> None:
        assert self.run(self.leases.lost(self.generations[generation])) == self.model.lost(generation)

    @rule(seconds=st.sampled_from([1, 9, 11, 25, 31]))
    def wait(self, seconds: int) -> None:
        """Never for as long that a request is forgotten: then a generation could begin anew, which none does."""
        if self.model.now + seconds < TERMS.linger:
            self.store.clock.advance(seconds)
            self.model.now += seconds

    @invariant()
    def entries_are_the_models(self) -> None:
        for at, request in enumerate(self.requests):
            told = [entry for _, entry in self.run(self.leases.entries(request, ""))]
            expected = self.model.kept(at)
            assert [(self.generations.index(e.generation), e.seq, e.content, e.reasoning) for e in told] == expected
            assert [entry.ended for entry in told] == [seq == 0 for _, seq, _, _ in expected]

    @invariant()
    def held_leases_are_the_models(self) -> None:
        told = {self.generations.index(view.generation): view for view in self.run(self.leases.held())}
        live = {name: run for name, run in self.model.runs.items() if run.live(self.model.now)}
        assert told.keys() == live.keys()
        for name, run in live.items():
            view = told[name]
            assert (view.seq, view.bytes, view.chars) == (len(run.said), run.bytes, run.chars)
            assert view.cancelled == run.cancelled

    def teardown(self) -> None:
        self.run(self.leases.close())


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_leases_do_what_a_naive_model_of_them_does(back_end: str) -> None:
    """Whatever is done in whatever order."""
    with asyncio.Runner() as runner:

        def opened() -> tuple[LeaseStore, Leases]:
            store = LeaseStore(back_end)
            return store, runner.run(store.open(TERMS))

        machine = type("Machine", (LeaseMachine,), {"run": staticmethod(runner.run), "open": staticmethod(opened)})
        examples = 80 if back_end == "memory" else 6
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=40 if back_end == "memory" else 30,
                deadline=None,
                database=None,
                phases=[Phase.generate, Phase.shrink] if back_end == "memory" else [Phase.generate],
            ),
        )
