"""The relay: what a reply may lack, whole replies, and taking over (its table is held by the property test)."""

from __future__ import annotations

from typing import Any

import pytest

from midstream.pool.relay import Relay, rest_of
from midstream.pool.shapes import Entry, Reply
from midstream.records import Chunk


def entry(generation: str, seq: int, content: str = "", reasoning: str = "") -> Entry:
    """A worker's batch."""
    return Entry(generation, seq, content, reasoning, "w", "m")


def relayed(*texts: str, stop: tuple[str, ...] = ()) -> Relay:
    """A relay that has handed these batches of generation a over."""
    relay = Relay(stop)
    for seq, text in enumerate(texts, 1):
        relay.feed(entry("a", seq, text))
    relay.take()
    return relay


def taken_over(seq: int, text: str, **more: Any) -> Relay:
    """A relay that goes on after batch `seq` of generation a."""
    relay = Relay()
    relay.resume("a", seq, text, "", **more)
    return relay


@pytest.mark.parametrize(
    ("reply", "relayed", "rest"),
    [
        ("The cat", "The cat", ""),
        ("The cat sat", "The ca", "t sat"),
        ("The cat", "", "The cat"),
        ("The cat", "The cat \n\n", ""),
        ("The cat\n", "The cat\n \n", ""),
        ("The cat", "The cat###", ""),
        ("The cat", "The cat ###\n", ""),
        ("a\nb and c", "a\r\nb", " and c"),
        ("a\r\nb", "a\nb\n", ""),
        ("nul \ufffd here", "nul \0", " here"),
        ("\U0001f600!", "\ud83d\ude00", "!"),
        ("a \U0001f600!", "a \ud83d", "\ude00!"),
        ("a\n\U0001f600", "a\r\n\ud83d", "\ude00"),
        ("a \ufffd!", "a \ud83d", "!"),
        ("", " \n", ""),
    ],
)
def test_reply_may_go_on_or_lack_what_workers_trim(reply: str, relayed: str, rest: str) -> None:
    """White space and the request's stop string at the end; both sides in the form that stores keep."""
    assert rest_of(reply, relayed, ["###"]) == rest


@pytest.mark.parametrize(
    ("reply", "relayed"),
    [
        ("The dog", "The ca"),
        ("The ca", "The cat"),
        ("The cat", "The cat, and"),
        ("The cat", "The cat### and"),
        ("The cat", "The cat##"),
        ("The cat", " The cat"),
        ("a \U0001f6ff", "a \ud83e"),
        ("a !", "a \ud83d"),
        ("the cat", "The cat"),
        ("", "The cat"),
    ],
)
def test_another_text_is_no_reply_to_what_was_relayed(reply: str, relayed: str) -> None:
    """What readers have seen is never taken back, nor gone over in silence (I8)."""
    assert rest_of(reply, relayed, ["###"]) is None


def test_stop_strings_are_the_request_s_own() -> None:
    """A tail that one request may lose is another text in the next."""
    assert rest_of("a", "a###", ["END"]) is None
    assert rest_of("a", "a###", [""]) is None


def test_each_chunk_says_whose_it_is_and_which_batch() -> None:
    """`src` is how a replica knows where to go on."""
    relay = Relay()
    relay.feed(entry("a", 1, "The", "hm"))
    relay.feed(entry("a", 2, " cat"))
    before = relay.state
    assert relay.take() == [
        Chunk("The", {"reasoning": "hm", "src": ["a", 1]}),
        Chunk(" cat", {"src": ["a", 2]}),
    ]
    assert (before, relay.state) == ("pinned", "exposed")
    relay.reply("a", Reply("The cat sat", "hmm", finish_reason="length", usage={"completion_tokens": 3}))
    assert relay.take() == [Chunk(" sat", {"reasoning": "m", "src": ["a", 0]})]
    assert relay.finish is not None
    assert (relay.finish.finish_reason, relay.finish.usage) == ("length", {"completion_tokens": 3})


def test_reply_comes_whole_before_anything_was_shown() -> None:
    """Tool calls too, each as the one delta that brings it."""
    relay = Relay()
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    relay.reply("a", Reply(None, "hm", tool_calls=[call]))
    assert relay.take() == [
        Chunk("", {"tool_calls": [{"index": 0, **call}], "reasoning": "hm", "src": ["a", 0]}),
    ]
    assert relay.finish is not None
    assert relay.finish.finish_reason == "tool_calls"


def test_two_calls_of_one_number_stay_two() -> None:
    """Some servers give every call the index 0: by its place each is a call of its own, arguments and all."""
    relay = Relay()
    calls = [{"index": 0, "id": name, "function": {"name": name, "arguments": "{}"}} for name in ("f", "g")]
    relay.reply("a", Reply(None, tool_calls=calls))
    [chunk] = relay.take()
    assert chunk.more is not None
    assert [(call["index"], call["id"]) for call in chunk.more["tool_calls"]] == [(0, "f"), (1, "g")]


@pytest.mark.parametrize("before", [(), ("The ",)])
def test_batch_that_a_replaced_store_took_twice_is_shown_once(before: tuple[str, ...]) -> None:
    """It came again with its number and every word; with other words it is a divergence."""
    newest = entry("a", len(before) + 1, "cat")
    relay = relayed(*before, "cat")
    relay.feed(newest)
    relay.feed(entry("a", newest.seq + 1, " sat"))
    assert [chunk.delta for chunk in relay.take()] == [" sat"]
    relay.feed(entry("a", newest.seq, "cat"))
    assert relay.state == "diverged"


def test_batch_that_a_replaced_store_took_twice_is_passed_over_at_a_take_over() -> None:
    """Though the process before had journaled the first of the two."""
    relay = taken_over(2, "The cat")
    for what in (entry("a", 1, "The"), entry("a", 2, " cat"), entry("a", 2, " cat"), entry("a", 3, " sat")):
        relay.feed(what)
    assert [chunk.delta for chunk in relay.take()] == [" sat"]


def test_an_attempt_that_died_unseen_leaves_nothing_behind() -> None:
    """Its text was never handed over: the next worker's answer is all there is."""
    relay = Relay()
    relay.feed(entry("a", 1, "The ca"))
    relay.lost("a")
    relay.feed(entry("b", 1, "The dog"))
    assert relay.take() == [Chunk("The dog", {"src": ["b", 1]})]


@pytest.mark.parametrize("second", ["The dog", "The cat"])
def test_second_attempt_never_joins_a_first_that_was_shown(second: str) -> None:
    """Not even one that begins with the same text: only the pinned worker's reply is held against it."""
    relay = relayed("The ca")
    relay.feed(entry("b", 1, second))
    assert relay.state == "diverged"
    assert relay.why == "another worker began the answer anew"
    assert relay.take() == []
    relay = relayed("The ca")
    relay.reply("b", Reply(second))
    assert relay.state == "diverged"


@pytest.mark.parametrize(
    ("stray", "why"),
    [
        (Entry("a", 0, "", "", "w", "m", ended=True), "the worker was lost"),
        (entry("a", 3, "x"), "the worker's batch 2 is missing: 3 came"),
        (entry("a", 1, "y"), "the worker's batch 2 is missing: 1 came"),
    ],
)
def test_divergence_says_why(stray: Entry, why: str) -> None:
    """For the one who reads the failed record."""
    relay = relayed("x")
    relay.feed(stray)
    assert (relay.state, relay.why) == ("diverged", why)


def test_batches_before_a_divergence_are_still_handed_over() -> None:
    """They are the same worker's, in order."""
    relay = relayed("The")
    relay.feed(entry("a", 2, " cat"))
    relay.lost("a")
    assert relay.state == "diverged"
    assert relay.take() == [Chunk(" cat", {"src": ["a", 2]})]


def test_reply_without_reasoning_takes_none_back() -> None:
    """Some workers hand in the text alone; one that hands in other reasoning has thought otherwise."""
    for reasoning, state in (("", "completed"), ("hm", "completed"), ("no", "diverged")):
        relay = Relay()
        relay.feed(entry("a", 1, "x", "hm"))
        relay.take()
        relay.reply("a", Reply("x", reasoning))
        assert relay.state == state


# --- taking over ------------------------------------------------------------------------------------------------------


def test_take_over_goes_on_after_the_last_src() -> None:
    """What the process before has seen to is passed over, an attempt before included that nobody saw."""
    relay = taken_over(2, "The cat")
    before = [entry("z", 1, "No"), Entry("z", 0, "", "", "w", "m", ended=True), entry("a", 1, "The"), entry("a", 2)]
    for one in (*before, entry("a", 3, " sat")):
        relay.feed(one)
    assert relay.take() == [Chunk(" sat", {"src": ["a", 3]})]
    relay.feed(entry("z", 2, "x"))
    assert relay.state == "diverged"


@pytest.mark.parametrize("first", [2, 4, 5])
def test_take_over_copes_with_entries_that_are_gone(first: int) -> None:
    """A store that kept only the newest of them: the next one is gone on with, a gap is told."""
    relay = taken_over(3, "The cat")
    for seq in range(first, 6):
        relay.feed(entry("a", seq, "x"))
    assert relay.state == ("diverged" if first == 5 else "exposed")


def test_take_over_hears_that_the_worker_was_lost() -> None:
    """Also where nothing else is left of its progress."""
    relay = taken_over(3, "The cat")
    relay.lost("a")
    assert relay.state == "diverged"


def test_take_over_within_a_reply_waits_for_the_reply() -> None:
    """Entries count no more; what of it was journaled is not said again."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    relay = taken_over(0, "The cat", called=True)
    for seq in (1, 2):
        relay.feed(entry("a", seq, "The"))
    assert relay.take() == []
    relay.reply("a", Reply("The cat sat", tool_calls=[call]))
    assert relay.take() == [Chunk(" sat", {"src": ["a", 0]})]


def test_take_over_keeps_a_character_that_two_batches_share() -> None:
    """The first half was not journaled: it waited for the second."""
    relay = taken_over(1, "a")
    relay.feed(entry("a", 1, "a\ud83d"))
    relay.feed(entry("a", 2, "\ude00"))
    assert relay.take() == [Chunk("\ud83d\ude00", {"src": ["a", 2]})]
    relay.reply("a", Reply("a\U0001f600"))
    assert relay.state == "completed"
