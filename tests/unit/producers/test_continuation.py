"""Going on after a break: what is asked again, what is shown of it, and what cannot be continued."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.codec.openai import Route
from midstream.errors import ProducerFailed
from midstream.producers.continuation import (
    Continuation,
    Continued,
    Stops,
    Written,
    can_continue,
    continuation,
    written_of,
)
from midstream.producers.upstream import Direct
from midstream.records import Choice, Chunk, Finish, Fold, Part, Producer

ASKED = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
CUT = ProducerFailed("upstream_truncated", "cut")


class Breaking(Direct):
    """An upstream that plays one list of batches per request, and raises what stands at its end."""

    def __init__(self, *runs: list[Any]) -> None:
        self.runs = list(runs)
        self.asked: list[Mapping[str, Any]] = []

    async def generate(
        self, body: Mapping[str, Any], route: Route, headers: Mapping[str, str] | None = None
    ) -> Producer:
        self.asked.append(body)
        for step in self.runs.pop(0):
            if isinstance(step, ProducerFailed):
                raise step
            yield step


def said(*texts: str) -> list[Chunk]:
    return [Chunk(text) for text in texts]


async def told(generation: Producer) -> tuple[str, list[Chunk], Finish | None]:
    """All text, the chunks that carry a seam, and how it finished."""
    text, seams, finish = "", [], None
    async for batch in generation:
        if isinstance(batch, Finish):
            finish = batch
        else:
            text += "".join(chunk.delta for chunk in batch)
            seams += [chunk for chunk in batch if chunk.more and "seam" in chunk.more]
    return text, seams, finish


async def test_the_answer_so_far_is_the_assistants_last_message() -> None:
    """And the first record after the break says so, once."""
    upstream = Breaking([said("one", " two"), CUT], [said(" three", " four"), Finish("stop")])
    text, seams, finish = await told(Continued(upstream, "prefill").generate(ASKED, "chat"))
    assert (text, finish) == ("one two three four", Finish("stop"))
    assert [(seam.delta, seam.more) for seam in seams] == [(" three", {"seam": "upstream_lost"})]
    assert upstream.asked[1]["messages"] == [*ASKED["messages"], {"role": "assistant", "content": "one two"}]


async def test_an_echo_is_taken_away_wherever_it_is_cut() -> None:
    """The upstream repeats what it was given, in chunks of its own."""
    whole = "one two three"
    for cut in range(1, len("one two") + 1):
        echoed = said(whole[:cut], whole[cut:])
        upstream = Breaking([said("one", " two"), CUT], [echoed, Finish("stop")])
        text, seams, _ = await told(Continued(upstream, "prefill-echo").generate(ASKED, "chat"))
        assert text == whole
        assert len(seams) == 1


async def test_another_echo_fails_instead_of_joining_two_answers() -> None:
    """I8: text of two generations never meets."""
    upstream = Breaking([said("one", " two"), CUT], [said("one ten"), Finish("stop")])
    with pytest.raises(ProducerFailed, match="did not repeat") as failed:
        await told(Continued(upstream, "prefill-echo").generate(ASKED, "chat"))
    assert failed.value.failure == "upstream_lost"


async def test_tokens_already_written_count_against_the_limit() -> None:
    """What is left is asked for; where nothing is left the answer is at its length."""
    upstream = Breaking([said("a", "b", "c"), CUT], [said("d"), Finish("length")])
    await told(Continued(upstream, "prefill").generate({**ASKED, "max_tokens": 4}, "chat"))
    assert upstream.asked[1]["max_tokens"] == 1
    full = Breaking([said("a", "b", "c"), CUT])
    _, _, finish = await told(Continued(full, "prefill").generate({**ASKED, "max_tokens": 3}, "chat"))
    assert finish == Finish("length")
    assert len(full.asked) == 1


@pytest.mark.parametrize(
    "more",
    [{"tools": [{}]}, {"response_format": {"type": "json_object"}}, {"logprobs": True}, {"n": 2}],
    ids=lambda more: next(iter(more)),
)
async def test_what_cannot_be_joined_is_lost_by_name(more: dict[str, Any]) -> None:
    """Configured but not possible: `upstream_lost`, and the upstream is not asked again."""
    upstream = Breaking([said("one"), CUT])
    with pytest.raises(ProducerFailed) as failed:
        await told(Continued(upstream, "prefill").generate({**ASKED, **more}, "chat"))
    assert (failed.value.failure, len(upstream.asked)) == ("upstream_lost", 1)


async def test_an_answer_with_more_than_text_is_not_continued() -> None:
    """Reasoning cannot be prefilled."""
    upstream = Breaking([[Chunk("", {"reasoning": "hm"})], CUT])
    with pytest.raises(ProducerFailed) as failed:
        await told(Continued(upstream, "prefill").generate(ASKED, "chat"))
    assert failed.value.failure == "upstream_lost"


async def test_a_request_that_breaks_every_run_is_given_up() -> None:
    """Two breaks are gone over, the third ends the stream."""
    upstream = Breaking([said("a"), CUT], [said("b"), CUT], [said("c"), CUT])
    with pytest.raises(ProducerFailed, match="too often") as failed:
        await told(Continued(upstream, "prefill").generate(ASKED, "chat"))
    assert (failed.value.failure, len(upstream.asked)) == ("upstream_lost", 3)


async def test_other_failures_are_the_upstreams_own_word() -> None:
    """An error it reports is no break."""
    upstream = Breaking([said("a"), ProducerFailed("upstream_error", "quota")])
    with pytest.raises(ProducerFailed, match="quota"):
        await told(Continued(upstream, "prefill").generate(ASKED, "chat"))


async def test_a_lost_writers_answer_is_gone_on_with() -> None:
    """The seam names the reason."""
    upstream = Breaking([said(" three"), Finish("stop")])
    fold = Fold(choices={0: Choice(text=bytearray(b"one two"))}, parts=[Part("text", 2, 7)])
    rest = await Continued(upstream, "prefill").proceed("ada", ASKED, "chat", "a" * 32, fold)
    assert rest is not None
    text, seams, _ = await told(rest)
    assert text == " three"
    assert seams[0].more == {"seam": "writer_lost"}


async def test_a_lost_writers_answer_that_cannot_be_joined_is_not_gone_on_with() -> None:
    """And nothing is asked of the upstream; nor is it where continuing is off."""
    upstream, whole = Breaking([Finish("stop")]), Fold()
    several = {**ASKED, "n": 2}
    continued = Continued(upstream, "prefill")
    assert await continued.proceed("ada", ASKED, "chat", "a" * 32, Fold(complete=False)) is None
    assert await continued.proceed("ada", several, "chat", "a" * 32, whole) is None
    assert not upstream.continues
    assert await upstream.proceed("ada", ASKED, "chat", "a" * 32, whole) is None
    assert upstream.asked == []


def test_only_a_whole_answer_of_text_alone_is_read_out_of_the_journal() -> None:
    """Anything else is not continued."""
    text = Choice(text=bytearray(b"one two"))
    assert written_of(Fold(choices={0: text}, parts=[Part("text", 2, 7)])) == Written(["one two"], 2)
    assert written_of(Fold()) == Written([""], 0)
    assert written_of(Fold(complete=False, choices={0: text})) is None
    assert written_of(Fold(choices={0: text, 1: Choice()})) is None
    assert written_of(Fold(choices={0: Choice(reasoning=bytearray(b"hm"))})) is None
    assert written_of(Fold(choices={0: Choice(finish_reason="stop")})) is None
    assert can_continue(ASKED, Written())


async def test_a_stop_string_across_the_seam_ends_the_answer() -> None:
    """The upstream cannot see it: its beginning is in what was written before."""
    upstream = Breaking([said("say EN"), CUT], [said("D", " more"), Finish("stop")])
    text, _, finish = await told(Continued(upstream, "prefill").generate({**ASKED, "stop": "END"}, "chat"))
    assert (text, finish) == ("say EN", Finish("stop"))


async def test_what_only_began_like_a_stop_string_is_shown() -> None:
    """Held back for as long as it may be one, and no longer."""
    upstream = Breaking([said("say E"), CUT], [said("N", "T", "ER"), Finish("stop")])
    text, seams, _ = await told(Continued(upstream, "prefill").generate({**ASKED, "stop": ["END"]}, "chat"))
    assert text == "say ENTER"
    assert len(seams) == 1


async def test_what_is_held_at_the_end_is_shown() -> None:
    """The answer ended in the middle of what might have been a stop string."""
    upstream = Breaking([said("say E"), CUT], [said("N"), Finish("stop")])
    text, seams, _ = await told(Continued(upstream, "prefill").generate({**ASKED, "stop": "END"}, "chat"))
    assert (text, len(seams)) == ("say EN", 1)


@given(
    before=st.text("abE", max_size=8),
    pieces=st.lists(st.text("abE", min_size=1, max_size=3), max_size=6),
    stop=st.text("abE", min_size=1, max_size=4),
)
def test_stops_show_all_but_what_begins_before_the_seam(before: str, pieces: list[str], stop: str) -> None:
    """Against the naive way: look at the whole text."""
    stops, shown = Stops(before, stop), ""
    for piece in pieces:
        shown += stops.take(Chunk(piece)).delta
        if stops.hit:
            break
    shown += stops.rest()
    whole = before + "".join(pieces)
    spanning = [at for at in range(len(before)) if whole.startswith(stop, at) and at + len(stop) > len(before)]
    assert stops.hit == bool(spanning)
    assert shown == ("" if spanning else "".join(pieces))


def test_modes_are_read_with_and_without_a_pattern() -> None:
    """And another word is refused, naming those there are."""
    assert continuation("prefill") == Continuation("*", "prefill")
    assert continuation("smol*=prefill-echo") == Continuation("smol*", "prefill-echo")
    with pytest.raises(ValueError, match="prefill-echo"):
        continuation("always")
