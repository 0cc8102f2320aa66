"""The relay against a naive model: every order of entries, ended markers, replies and take-overs."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.pool.relay import Relay
from midstream.pool.shapes import Entry, Reply
from midstream.records import Chunk

GENERATIONS = ("a", "b", "c")
TEXTS = ("x", "yz", " ", "", "\n", "é")


def entry(generation: str, seq: int, content: str = "", reasoning: str = "") -> Entry:
    """A worker's batch."""
    return Entry(generation, seq, content, reasoning, f"worker of {generation}", "m")


def ended(generation: str) -> Entry:
    """A generation's end without a reply."""
    return Entry(generation, 0, "", "", f"worker of {generation}", "m", ended=True)


Step = tuple[Any, ...]

entries = st.builds(
    lambda g, s, c, r: ("entry", entry(g, s, c, r)),
    st.sampled_from(GENERATIONS),
    st.integers(1, 4),
    st.sampled_from(TEXTS),
    st.sampled_from(("", "", "t")),
)
markers = st.builds(lambda g: ("entry", ended(g)), st.sampled_from(GENERATIONS))
# The next batch of whoever is being listened to, which blind choice would seldom hit.
following = st.builds(lambda c, r: ("next", c, r), st.sampled_from(TEXTS), st.sampled_from(("", "", "t")))
replies = st.builds(
    lambda g, how, c: ("reply", g, how, c),
    st.sampled_from((*GENERATIONS, "pinned", "pinned")),
    st.sampled_from(("same", "more", "trimmed", "stopped", "other", "no reasoning")),
    st.sampled_from(TEXTS),
)
anything = st.one_of(
    following, following, following, entries, markers, replies,
    st.sampled_from([("take",), ("take",), ("takeover",), ("lost",), ("repeat",)]),
)  # fmt: skip
# Chance alone seldom gets as far as an exposure.
begun = [("next", "x", ""), ("take",), ("next", "", "t"), ("next", " ", ""), ("take",), ("next", "yz", "")]
steps = st.builds(lambda upto, rest: begun[:upto] + rest, st.integers(0, len(begun)), st.lists(anything, max_size=8))

# One of each kind of step, for every order of them.
KINDS: list[Step] = [
    ("next", "y", ""),
    ("next", "", "t"),
    ("next", "", ""),
    ("repeat",),
    ("entry", entry("b", 1, "z")),
    ("entry", entry("b", 2, "z")),
    ("entry", entry("a", 4, "z")),
    ("entry", ended("a")),
    ("entry", ended("b")),
    ("take",),
    ("takeover",),
    ("reply", "pinned", "more", "z"),
    ("reply", "pinned", "trimmed", ""),
    ("reply", "pinned", "other", ""),
    ("reply", "b", "same", ""),
]


@dataclass
class Model:
    """What the head of relay.py says, by way of lists that are searched from their beginning each time."""

    log: list[Entry] = field(default_factory=list)
    shown: list[tuple[str, int, str, str]] = field(default_factory=list)
    kept: list[tuple[str, int, str, str]] = field(default_factory=list)
    state: str = "waiting"
    pinned: str | None = None
    seqs: list[int] = field(default_factory=list)
    newest: Entry | None = None

    def entry(self, entry: Entry) -> None:
        self.log.append(entry)
        if self.state in ("completed", "diverged") or (self.pinned and entry == self.newest):
            return
        follows = entry.generation == self.pinned and not entry.ended and entry.seq == len(self.seqs) + 1
        if self.state == "exposed" and not follows:
            self.state = "diverged"
        elif follows:
            self._keep(entry)
        else:
            self.state, self.pinned, self.seqs, self.kept = "waiting", None, [], []
            if entry.seq == 1 and not entry.ended:
                self.state, self.pinned = "pinned", entry.generation
                self._keep(entry)

    def _keep(self, entry: Entry) -> None:
        self.seqs.append(entry.seq)
        self.newest = entry
        if entry.content or entry.reasoning:
            self.kept.append((entry.generation, entry.seq, entry.content, entry.reasoning))

    def take(self) -> list[tuple[str, int, str, str]]:
        taken, self.kept = self.kept, []
        self.shown += taken
        if taken and self.state == "pinned":
            self.state = "exposed"
        return taken

    @property
    def text(self) -> str:
        return "".join(text for _, _, text, _ in self.shown + self.kept)

    @property
    def reasoning(self) -> str:
        return "".join(text for _, _, _, text in self.shown + self.kept)


STOP = "##"


def reply_of(model: Model, how: str, extra: str) -> tuple[Reply, str | None]:
    """A reply in some relation to what was relayed, and what it adds to it (None: it is another text)."""
    text = model.text
    if how == "same":
        return Reply(text, model.reasoning), ""
    if how == "more":
        return Reply(text + extra, model.reasoning), extra
    if how == "trimmed":
        return Reply(text.rstrip(), model.reasoning), ""
    if how == "no reasoning":
        return Reply(text), ""
    if how == "stopped":  # more than it lacks: a stop string that was never relayed is nothing to trim
        return Reply(text + STOP, model.reasoning), STOP
    return Reply("another" + text, model.reasoning), None if text.strip() else "another" + text


def told(chunks: list[Chunk]) -> list[tuple[str, int, str, str]]:
    """Chunks as the model has them."""
    found = []
    for chunk in chunks:
        assert chunk.more is not None
        generation, seq = chunk.more["src"]
        found.append((generation, seq, chunk.delta, chunk.more.get("reasoning", "")))
    return found


@settings(max_examples=600)
@given(steps)
def test_relay_does_what_its_table_says(script: list[Step]) -> None:
    """Also across take-overs, and what readers have seen is of one generation, in order, without a gap (I8)."""
    run(script)


@pytest.mark.parametrize("upto", [0, 1, 2, 4])
def test_every_order_of_three_steps_is_as_the_table_says(upto: int) -> None:
    """From each state that a relay can be in before its end."""
    for script in product(KINDS, repeat=3):
        run([*begun[:upto], *script])


def run(script: list[Step]) -> None:
    """Play the script to both and compare them after each step, and at the end all that was relayed."""
    relay, model = Relay([STOP]), Model()
    for step in script:
        if step[0] == "takeover":
            relay = taken_over(model, relay)
        else:
            play(relay, model, step)
        assert relay.state == model.state, script
        assert_one_voice(model)
    assert told(relay.take()) == model.take(), script


def play(relay: Relay, model: Model, step: Step) -> None:
    """One step, of both."""
    match step:
        case ("next", content, reasoning):
            feed(relay, model, entry(model.pinned or "a", len(model.seqs) + 1, content, reasoning))
        case ("entry", what):
            feed(relay, model, what)
        case ("repeat",):
            if model.newest is not None:
                feed(relay, model, model.newest)
        case ("lost",):
            if model.pinned is not None:
                relay.lost(model.pinned)
                model.entry(ended(model.pinned))
        case ("take",):
            assert told(relay.take()) == model.take()
        case ("reply", generation, how, extra):
            play_reply(relay, model, generation, how, extra)


def feed(relay: Relay, model: Model, what: Entry) -> None:
    relay.feed(what)
    model.entry(what)


def play_reply(relay: Relay, model: Model, generation: str, how: str, extra: str) -> None:
    """A reply comes once: what follows it changes nothing, which the model is told by its state."""
    generation = (model.pinned or "a") if generation == "pinned" else generation
    reply, more = reply_of(model, how, extra)
    relay.reply(generation, reply)
    if model.state == "exposed":
        if generation != model.pinned or more is None:
            model.state = "diverged"
            return
        thought = ""
    elif model.state in ("waiting", "pinned"):
        more, thought, model.kept = reply.content or "", reply.reasoning, []
    else:
        return
    model.state, model.pinned = "completed", generation
    if more or thought:
        model.kept.append((generation, 0, more, thought))
    assert relay.finish is not None


def taken_over(model: Model, before: Relay) -> Relay:
    """The relay of a replica that has the journal, and reads the entries from their beginning."""
    if model.state not in ("waiting", "pinned", "exposed"):
        return before  # a stream that has ended is not taken over
    relay = Relay([STOP])
    if model.shown:
        generation, seq, _, _ = model.shown[-1]
        text = "".join(shown[2] for shown in model.shown)
        relay.resume(generation, seq, text, "".join(shown[3] for shown in model.shown))
    for what in model.log:
        relay.feed(what)
    return relay


def assert_one_voice(model: Model) -> None:
    """What was handed over is of one generation, its batches in order, the reply's text last."""
    assert len({generation for generation, _, _, _ in model.shown}) <= 1
    seqs = [seq or 99 for _, seq, _, _ in model.shown]
    assert seqs == sorted(seqs)
