"""Going on after a break by assistant prefill: the same request, with the answer so far as the assistant's own words.

Off unless configured per model, since only the operator knows whether a server continues the last assistant message or
answers it, and whether it repeats it first (`prefill-echo`).  Nothing is guessed: where the answer so far is not text
alone, or the request asks for what cannot be joined, the stream fails (I8).

What is checked here because no upstream can: `max_tokens` less what was written, stop strings that begin before the
seam and end behind it, and that an echo is the text it should be.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from midstream.codec.openai import Route
from midstream.codec.pieces import TEXT
from midstream.errors import ProducerFailed
from midstream.producers.upstream import Direct
from midstream.records import Choice, Chunk, Finish, Fold, Producer

Mode = Literal["off", "prefill", "prefill-echo"]
MODES: tuple[Mode, ...] = ("off", "prefill", "prefill-echo")

# Breaks of one generation that are gone over in one process; more say that the request itself breaks it.
_MOST = 2
# What a request may not ask for if its answer is to be continued.
_NOT_WITH = (
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "response_format",
    "logprobs",
    "audio",
    "modalities",
    "echo",
    "suffix",
    "best_of",
)


class Continuation(NamedTuple):
    """How the models that a pattern matches are continued."""

    pattern: str
    mode: Mode


def continuation(spec: str) -> Continuation:
    """Read one `[PATTERN=]MODE`.  Raises ValueError."""
    pattern, _, mode = spec.rpartition("=")
    if mode not in MODES:
        raise ValueError(f"write [PATTERN=]MODE, the mode being one of {', '.join(MODES)}")
    return Continuation(pattern or "*", mode)


@dataclass(slots=True)
class Written:
    """An answer so far: its text, and of how many chunks (tokens, as near as anyone can tell) it was made."""

    parts: list[str] = field(default_factory=list)
    chunks: int = 0
    only_text: bool = True

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def add(self, chunk: Chunk) -> None:
        self.parts.append(chunk.delta)
        self.chunks += 1
        # What else an upstream says beside the text (`upstream`) does not change what the text is.
        if chunk.more is not None and chunk.more.keys() - {"upstream", "seam"}:
            self.only_text = False


def written_of(fold: Fold) -> Written | None:
    """An answer out of the journal, if it is text alone and whole; None otherwise."""
    answer = fold.choices.get(0, Choice())
    other = fold.choices.keys() - {0} or answer.reasoning or answer.refusal or answer.tool_calls
    if not fold.complete or other or answer.finish_reason is not None:
        return None
    return Written([answer.text.decode()], sum(part.deltas for part in fold.parts if part.kind == TEXT))


def can_continue(body: Mapping[str, Any], written: Written) -> bool:
    """Whether this answer is one that prefill can go on with."""
    several = body.get("n") not in (None, 1) or not isinstance(body.get("prompt") or "", str)
    return written.only_text and not several and not any(body.get(name) for name in _NOT_WITH)


class Continued(Direct):
    """A source whose broken connections are gone over.  `mode` is never `off` here."""

    continues = True

    def __init__(self, source: Direct, mode: Mode) -> None:
        self._source = source
        self._echo = mode == "prefill-echo"

    async def generate(
        self, body: Mapping[str, Any], route: Route, headers: Mapping[str, str] | None = None
    ) -> Producer:
        """Run the request, and go on where its connection breaks.

        Raises ProducerFailed: `upstream_lost` for a break that cannot be gone over.
        """
        async for batch in self._run(self._source.generate(body, route, headers), Written(), body, route, headers, 0):
            yield batch

    async def proceed(
        self, owner: str, body: Mapping[str, Any], route: Route, stream_id: str, fold: Fold
    ) -> Producer | None:
        """Go on with an answer whose writer is gone; None where prefill cannot."""
        written = written_of(fold)
        if written is None or not can_continue(body, written):
            return None
        again = self._again(body, route, written, None, "writer_lost")
        return self._run(again, written, body, route, None, 1)

    async def _run(
        self,
        generation: Producer,
        written: Written,
        body: Mapping[str, Any],
        route: Route,
        headers: Mapping[str, str] | None,
        breaks: int,
    ) -> Producer:
        while True:
            try:
                async with aclosing(generation) as batches:
                    async for batch in batches:
                        if not isinstance(batch, Finish):
                            for chunk in batch:
                                written.add(chunk)
                        yield batch
                return
            except ProducerFailed as failure:
                if failure.failure != "upstream_truncated":
                    raise
                breaks += 1
                if breaks > _MOST or not can_continue(body, written):
                    why = "too often" if breaks > _MOST else "in an answer that cannot be continued"
                    raise ProducerFailed(
                        "upstream_lost", f"the upstream's connection broke {why}: {failure.detail}", retryable=True
                    ) from None
            generation = self._again(body, route, written, headers, "upstream_lost")

    async def _again(
        self, body: Mapping[str, Any], route: Route, written: Written, headers: Mapping[str, str] | None, reason: str
    ) -> Producer:
        """The rest of an answer, its first chunk marked as the seam."""
        left = _tokens_left(body, written)
        if left is not None and left <= 0:
            yield Finish("length")
            return
        echo = _Echo(written.text) if self._echo else None
        stops = Stops(written.text, body.get("stop"))
        generation = self._source.generate(_prefilled(body, route, written.text, left), route, headers)
        seam: str | None = reason
        async with aclosing(generation) as batches:
            async for batch in batches:
                if isinstance(batch, Finish):
                    if rest := stops.rest():
                        yield [_marked(Chunk(rest), seam)]
                    yield batch
                    return
                chunks = []
                for chunk in batch:
                    kept = stops.take(echo.strip(chunk) if echo is not None else chunk)
                    if kept.delta or kept.more:
                        chunks.append(_marked(kept, seam))
                        seam = None
                    if stops.hit:
                        break
                if chunks:
                    yield chunks
                if stops.hit:
                    yield Finish("stop")
                    return


def _marked(chunk: Chunk, seam: str | None) -> Chunk:
    return chunk if seam is None else Chunk(chunk.delta, {**(chunk.more or {}), "seam": seam})


def _tokens_left(body: Mapping[str, Any], written: Written) -> int | None:
    limits = [body[name] for name in ("max_tokens", "max_completion_tokens") if type(body.get(name)) is int]
    return min(limits) - written.chunks if limits else None


def _prefilled(body: Mapping[str, Any], route: Route, text: str, left: int | None) -> dict[str, Any]:
    asked = dict(body)
    for name in ("max_tokens", "max_completion_tokens"):
        if left is not None and name in asked:
            asked[name] = left
    if not text:
        return asked
    if route == "completions":
        asked["prompt"] = f"{asked.get('prompt', '')}{text}"
    else:
        asked["messages"] = [*asked["messages"], {"role": "assistant", "content": text}]
    return asked


class _Echo:
    """Takes away the repetition of what was said before.  One that differs fails: it would be another answer (I8)."""

    def __init__(self, text: str) -> None:
        self._due = text

    def strip(self, chunk: Chunk) -> Chunk:
        if not self._due:
            return chunk
        shared = min(len(self._due), len(chunk.delta))
        if chunk.delta[:shared] != self._due[:shared]:
            raise ProducerFailed(
                "upstream_lost", "the upstream did not repeat the answer so far as it was", retryable=True
            )
        self._due = self._due[shared:]
        return Chunk(chunk.delta[shared:], chunk.more)


class Stops:
    """Finds a stop string that begins before the seam: the upstream sees only its end, and would write on.

    `take` gives what may be shown of a chunk and holds back what may turn out to be the rest of a stop string.
    """

    def __init__(self, before: str, stop: Any) -> None:
        asked = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
        self._stops = [text for text in asked if isinstance(text, str) and text]
        longest = max(map(len, self._stops), default=0)
        self._before = before[-(longest - 1) :] if longest > 1 else ""
        self._held = ""
        self.hit = False

    def take(self, chunk: Chunk) -> Chunk:
        if not self._before:
            return chunk
        text = self._before + self._held + chunk.delta
        for stop in self._stops:
            at = text.find(stop)
            if 0 <= at < len(self._before):
                self.hit, self._held = True, ""
                return Chunk("", chunk.more)
        if any(self._pending(text, stop) for stop in self._stops):
            self._held += chunk.delta
            return Chunk("", chunk.more)
        shown, self._held, self._before = self._held + chunk.delta, "", ""
        return Chunk(shown, chunk.more)

    def _pending(self, text: str, stop: str) -> bool:
        """May a stop string that begins before the seam still come?"""
        return any(len(text) - at < len(stop) and stop.startswith(text[at:]) for at in range(len(self._before)))

    def rest(self) -> str:
        """What was held back, once nothing more comes."""
        held, self._held = self._held, ""
        return held
