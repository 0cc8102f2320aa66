"""A producer without a model: deterministic text at a set rate, for tests, benchmarks and a demo on a bare machine.

It calls itself a simulation in its name and in its first sentence.  The model's name steers it:

    scripted               50 tokens a second, `max_tokens` of them (or 300)
    scripted-n400-r25      400 tokens, 25 a second
    scripted-n4000-r0      as fast as they are taken, in lists of at most 64
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from random import Random
from typing import Any, Final

from midstream.codec.openai import Route
from midstream.producers.upstream import Upstream
from midstream.records import Chunk, Finish, Producer

_NAME: Final = re.compile(
    r"scripted(?:-n(?P<tokens>[0-9]{1,9}))?(?:-r(?P<rate>[0-9]{1,9}(?:\.[0-9]{1,9})?))?", re.ASCII
)
_BURST: Final = 64
_OPENING: Final = ("This", " is", " a", " simulation", ":", " no", " model", " is", " running", ".")
# fmt: off
# Some have characters of more than one byte, as any model's text has.
_WORDS: Final = (
    "a", "the", "one", "this", "every", "some", "river", "lantern", "harbour", "café", "window", "letter",
    "garden", "bridge", "machine", "clock", "naïve", "paper", "signal", "cloud", "station", "morning",
    "keeps", "carries", "follows", "leaves", "finds", "opens", "crosses", "remembers", "turns", "waits",
    "writes", "slowly", "quietly", "again", "under", "over", "beside", "without", "between", "towards",
    "before", "after", "bright", "small", "quiet", "broken", "distant", "early", "green", "hollow", "patient",
    "silver", "über", "straße", "東京", "señor",
)
# fmt: on


class Scripted(Upstream):
    """An upstream for the models that `pattern` matches: none that does not call itself scripted, unless that is asked.

    `rate` is in tokens per second (0: as fast as they are taken); it and `tokens` hold where the model's name says
    nothing else.
    """

    name = "scripted"

    def __init__(self, pattern: str | None = None, *, rate: float = 50.0, tokens: int = 300) -> None:
        self.pattern = "scripted*" if pattern is None else pattern
        self._rate = rate
        self._tokens = tokens

    async def models(self) -> list[dict[str, Any]]:
        """One model, of a name that says what it is."""
        model = {"id": "scripted", "object": "model", "created": 0, "owned_by": "simulation"}
        return [model] if self.serves("scripted") else []

    async def generate(
        self, body: Mapping[str, Any], route: Route, headers: Mapping[str, str] | None = None
    ) -> Producer:
        """Yield an empty list, lists of chunks, then one Finish.

        The text is a function of prompt and `seed` alone (see `tokens`).  `max_tokens` is its length, or cuts the one
        that the name says: that is the finish_reason "length".
        """
        yield []
        named = _NAME.fullmatch(str(body.get("model", ""))) or _NAME.fullmatch("scripted")
        assert named is not None
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        limited = type(limit) is int and limit >= 0
        length = int(named["tokens"]) if named["tokens"] else limit if limited else self._tokens
        count = min(length, limit) if limited else length
        rate = float(named["rate"]) if named["rate"] else self._rate
        prompt = prompt_of(body)
        words = tokens(prompt, body.get("seed"))
        pace = _Pace(rate)
        left = count
        while left > 0:
            chunks = [Chunk(word) for word in islice(words, min(left, await pace.due()))]
            left -= len(chunks)
            yield chunks
        asked = len(prompt.split())
        usage = {"prompt_tokens": asked, "completion_tokens": count, "total_tokens": asked + count}
        yield Finish("length" if count < length else "stop", usage)


def tokens(prompt: str, seed: object = None) -> Iterator[str]:
    """The endless text for a prompt and a seed, token by token."""
    yield from _OPENING
    # Of all of `random`, only `random()` after a seed is the same in every version of Python.
    draw = Random(f"{seed}\0{prompt}").random
    sentence = 0
    while True:
        sentence += 1
        length = 5 + int(draw() * 9)
        for place in range(length):
            word = _WORDS[int(draw() * len(_WORDS))]
            if place == 0:
                yield ("\n\n" if sentence % 5 == 0 else " ") + word.capitalize()
            else:
                yield " " + word
        yield "."


def prompt_of(body: Mapping[str, Any]) -> str:
    """What the request asks: its prompt, or the text of its messages."""
    if "prompt" in body:
        return str(body["prompt"])
    messages = body.get("messages")
    said = [message.get("content") for message in messages or () if isinstance(message, dict)]
    return "\n".join(str(content) for content in said if content is not None)


class _Pace:
    """How many tokens are due: `rate` a second on average, so that what a late wake-up has missed comes with it."""

    def __init__(self, rate: float) -> None:
        self._now = asyncio.get_running_loop().time
        self._rate = rate
        self._started = self._now()
        self._sent = 0

    async def due(self) -> int:
        """Wait until there are some; at most 64."""
        if self._rate <= 0:
            await asyncio.sleep(0)  # others get their turn, however fast this is taken
            return _BURST
        await asyncio.sleep((self._sent + 1) / self._rate - (self._now() - self._started))
        due = min(max(1, int((self._now() - self._started) * self._rate) - self._sent), _BURST)
        self._sent += due
        return due
