"""The relay: from a request's progress entries and its reply to its stream.  Pure: no clock, no I/O.

A worker's *entries* are numbered from 1 per generation.  The first entry with seq 1 **pins** its generation.  Each
chunk says where it came from, `src: [generation, worker seq]`, and the first one that is handed over is the
**exposure**: from then on only this generation may go on, since text of two never meets in one stream (I8).

What comes, and what it does in each state.  *Next* is the pinned generation's entry with the seq that is due; *first*
is seq 1 of another generation; *stray* is anything else: a wrong seq, another generation's, an `ended` marker.

    state      next     first         stray          its reply               another's reply    taken
    ---------  -------  ------------  -------------  ----------------------  -----------------  -------
    waiting    -        pinned, keep  -              completed, whole        completed, whole   -
    pinned     keep     pinned anew   waiting, drop  completed, whole        completed, whole   exposed
    exposed    keep     diverged      diverged       completed, the rest *   diverged           -
    completed  -        -             -              -                       -                  -
    diverged   -        -             -              -                       -                  -

The pinned generation's newest entry once more, word for word, changes nothing: a store that was replaced by one that
lacks it takes the repeated post for new.
`keep` makes a chunk that `take` hands over; `drop` forgets what was kept; `-` changes nothing.  (*) only if the reply
is what was relayed, see `rest_of`; otherwise `diverged`.
What was kept before a divergence is still handed over: it belongs to the generation that was pinned.  Text out of a
reply has `src: [generation, 0]`.

A replica that takes over begins `exposed` at the last `src` of the journal (`resume`), and reads the entries from their
beginning: all that came before that entry was seen to by the process before.  If that `src` is a reply's, no entry
counts any more, only the reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from midstream.codec.text import whole
from midstream.pool.shapes import Entry, Reply
from midstream.records import Chunk, Finish

State = Literal["waiting", "pinned", "exposed", "completed", "diverged"]


class Relay:
    """One request's relay.  `stop` are the request's stop strings, which workers may trim from a reply."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self.state: State = "waiting"
        self.pinned: str | None = None
        self.finish: Finish | None = None
        self.why = ""
        self._stop = tuple(stop)
        self._kept: list[Chunk] = []
        self._due = 1
        self._newest: Entry | None = None
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._called = False
        self._skipping = False
        self._halves = ("", "")

    def resume(self, generation: str, seq: int, text: str, reasoning: str, *, called: bool = False) -> None:
        """Go on after the entry `seq` of a generation, or in its reply (0), with what its stream says so far."""
        self.state, self.pinned, self._due, self._skipping = "exposed", generation, seq + 1, True
        self._text, self._reasoning, self._called = [text], [reasoning], called

    @property
    def ended(self) -> bool:
        """Whether nothing can change any more."""
        return self.state in ("completed", "diverged")

    def feed(self, entry: Entry) -> None:
        """Take the next entry of the request's progress."""
        if self.ended or (self._skipping and self._seen(entry)) or entry == self._newest:
            return
        own = entry.generation == self.pinned
        if own and not entry.ended and entry.seq == self._due:
            self._keep(entry)
        elif self.state == "exposed":
            self._diverge(_stray(entry, own, self._due))
        else:
            self._unpin()
            if entry.seq == 1 and not entry.ended:
                self.state, self.pinned = "pinned", entry.generation
                self._keep(entry)

    def lost(self, generation: str) -> None:
        """The generation is over without a reply: what its `ended` marker says, where that did not come."""
        self.feed(Entry(generation, 0, "", "", "", "", ended=True))

    def take(self) -> list[Chunk]:
        """Hand over what was kept.  The caller journals it: this is the exposure."""
        kept, self._kept = self._kept, []
        if kept and self.state == "pinned":
            self.state = "exposed"
        return kept

    def reply(self, generation: str, reply: Reply) -> None:
        """The request's reply, once every entry before it has been fed: `completed` with its `finish`, or `diverged`.

        What the reply says beyond what was relayed is kept, for `take`.
        """
        if self.ended:
            return
        if self.state != "exposed":
            self._unpin()
            self.pinned = generation
        elif self.pinned != generation:
            self._diverge("the reply is another generation's")
            return
        self._reconcile(generation, reply)

    # --- steps ------------------------------------------------------------------------------------------------------

    def _seen(self, entry: Entry) -> bool:
        """Whether the entry stands before the point where this relay began, or is that point."""
        if entry.generation != self.pinned or self._due == 1:
            return True
        self._skipping = not entry.ended and entry.seq < self._due - 1
        if entry.ended or entry.seq >= self._due:
            return False
        if not self._skipping:
            self._newest = entry
            # Half a pair at its end was not journaled yet: it waited for its other half.
            self._halves = _half(entry.content), _half(entry.reasoning)
        return True

    def _keep(self, entry: Entry) -> None:
        self._due, self._newest = entry.seq + 1, entry
        content, reasoning = self._halves[0] + entry.content, self._halves[1] + entry.reasoning
        self._halves = ("", "")
        self._add(content, reasoning, entry.generation, entry.seq)

    def _add(self, content: str, reasoning: str, generation: str, seq: int, **more: Any) -> None:
        if not (content or reasoning or more):
            return
        self._text.append(content)
        self._reasoning.append(reasoning)
        if reasoning:
            more["reasoning"] = reasoning
        self._kept.append(Chunk(content, more | {"src": [generation, seq]}))

    def _unpin(self) -> None:
        self.state, self.pinned, self._due, self._newest = "waiting", None, 1, None
        self._kept, self._text, self._reasoning = [], [], []

    def _diverge(self, why: str) -> None:
        self.state, self.why = "diverged", why

    def _reconcile(self, generation: str, reply: Reply) -> None:
        relayed, thought = "".join(self._text), "".join(self._reasoning)
        text = rest_of(reply.content or "", relayed, self._stop)
        # A reply that repeats no reasoning at all takes none of it back.
        reasoning = rest_of(reply.reasoning, thought) if reply.reasoning else ""
        if text is None or reasoning is None:
            self._diverge("the reply is not what was relayed")
            return
        calls = [] if self._called else [_call(at, call) for at, call in enumerate(reply.tool_calls or ())]
        self._add(text, reasoning, generation, 0, **({"tool_calls": calls} if calls else {}))
        reason = reply.finish_reason or ("tool_calls" if reply.tool_calls else "stop")
        self.finish = Finish(reason, reply.usage)
        self.state = "completed"


def rest_of(reply: str, relayed: str, stop: Sequence[str] = ()) -> str | None:
    """What the reply says beyond what was relayed; None where it is another text.

    It may lack what workers trim from the end: white space, and one of the request's stop strings.  Both are compared
    as they are and, failing that, in the form that stores and transports keep: valid Unicode, no NUL, LF for CRLF.
    """
    if reply.startswith(relayed):
        return reply[len(relayed) :]
    if (half := _half(relayed)) and (rest := rest_of(reply, relayed[:-1])):
        # The worker cut inside a pair, and readers wait for its other half: that one comes first.
        first, second = _pair(rest[0])
        if first == half:
            return second + rest[1:]
    reply, relayed = _normal(reply), _normal(relayed)
    if reply.startswith(relayed):
        return reply[len(relayed) :]
    if relayed.startswith(reply):
        trimmed = relayed[len(reply) :]
        if not trimmed.strip() or any(_is_stop(trimmed, _normal(text)) for text in stop if text):
            return ""
    return None


def _is_stop(trimmed: str, stop: str) -> bool:
    """Whether this is the stop string, with nothing but white space around it."""
    before, found, after = trimmed.partition(stop)
    return bool(found) and not before.strip() and not after.strip()


def _normal(text: str) -> str:
    return whole(text).replace("\0", "\ufffd").replace("\r\n", "\n")


def _half(text: str) -> str:
    """The first half of a surrogate pair at the end of a text."""
    return text[-1:] if "\ud800" <= text[-1:] <= "\udbff" else ""


def _pair(char: str) -> tuple[str, str]:
    """The surrogate pair that a character beyond U+FFFF is in UTF-16; of any other, itself and nothing."""
    above = ord(char) - 0x10000
    return (chr(0xD800 + (above >> 10)), chr(0xDC00 + (above & 0x3FF))) if above >= 0 else (char, "")


def _call(at: int, call: dict[str, Any]) -> dict[str, Any]:
    """A whole tool call as the one delta that brings it.  Where it stands counts, and not what it says of that: calls
    of one number would be taken for one call.
    """
    return {**call, "index": at}


def _stray(entry: Entry, own: bool, due: int) -> str:
    if not own:
        return "another worker began the answer anew"
    return "the worker was lost" if entry.ended else f"the worker's batch {due} is missing: {entry.seq} came"
