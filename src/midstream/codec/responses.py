"""A stream as the events of OpenAI's Responses API: a pure function of fold, records and the kept request.

Events are numbered from 0 without a gap, and the numbers are the positions that clients resume from.  So they must be
the same for any split into batches, after acks and evictions, and on any replica:

    start                    response.created = 0, response.in_progress = 1
    a delta of another kind  closes the part that is open, and its item where the new kind cannot go into that,
                             then opens: output_item.added, content_part.added
    each delta               one event
    done                     closes what is open, then response.completed or response.incomplete
    failed, cancelled        response.failed, response.incomplete; what is open stays so: it is not whole

Text and refusals are parts of a message; reasoning is an item of its own (a summary where one was asked for: same
text, same number of events).  A function call is an item that stays open to the end, since servers interleave calls.
`Fold.parts` holds what is needed to go on after records that were dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import orjson

from midstream.codec.chat import plain_text
from midstream.codec.pieces import CALL, REASONING, REFUSAL, TEXT, Piece, choice_of, json_list, merge_call, pieces
from midstream.codec.responses_object import LOGPROBS, OPEN_ENDED, Ending, ResponseObject, ending
from midstream.codec.responses_parts import (
    FAMILIES,
    MESSAGE,
    SUMMARIES,
    Item,
    OpenPart,
    Shared,
    delta_template,
    entries_of,
    logprobs_json,
)
from midstream.records import Choice, Fold, Frame, Record, StreamMeta, ToolCall
from midstream.wire import START, TERMINAL, TOKEN

_dumps = orjson.dumps
# Above every number: nothing is shown.
_NOTHING: Final = 2**63
_IDS: Final = {MESSAGE: "msg", REASONING: "rs", CALL: "fc"}


class ResponseEvents:
    """The events of one response, record after record, beginning after those that are in `fold`.

    `number` is that of the next event.  Only events above `after` are shown.  `shared` is what it has in common with
    the other readers of the same response.
    """

    def __init__(
        self, meta: StreamMeta, fold: Fold | None = None, after: int = -1, shared: Shared | None = None
    ) -> None:
        self.number = 0
        self._shared = shared or Shared()
        self._stream_id = meta.stream_id
        self._object = self._shared.once("object", lambda: ResponseObject(meta))
        self._families = SUMMARIES if self._object.summary else FAMILIES
        self._output: list[bytes] = []  # of every item; b"" for those that are open
        self._item: Item | None = None
        self._part: OpenPart | None = None
        self._plain: OpenPart | None = None  # the open part, if it is text
        self._calls: list[ToolCall] = []
        self._calls_at: list[tuple[int, str]] = []  # where each is in the output, and what its call_id is there
        self._call_ids: set[str] = set()
        self._finish_reason: Any = None
        self._closed = 0  # bytes of JSON in `_output` and in the open item
        self._events: list[bytes] = []
        self._after = _NOTHING
        if fold is not None and fold.upto:
            self._restore(fold)
        self._after = after

    @property
    def held(self) -> int:
        """Bytes of the answer that it holds, since the last events tell all of it: about once what has come."""
        part = self._part
        return (
            self._closed
            + sum(len(call.arguments) for call in self._calls)
            + (part.text.size + part.logprobs.size if part is not None else 0)
        )

    # --- records ----------------------------------------------------------------------------------------------------

    def take(self, frames: Iterable[Frame]) -> list[bytes]:
        """The events of these records, each framed as a server-sent event."""
        after = self._after
        for frame in frames:
            part = self._plain
            if part is None or (text := plain_text(frame)) is None:
                self._take(Record.of(frame))
            elif text != b'""':
                part.text.add(text[1:-1])
                number = self.number
                self.number = number + 1
                if number > after:
                    self._events.append(part.delta % (number, text, b"[]"))
        told, self._events = self._events, []
        return told

    def _take(self, record: Record) -> None:
        if record.event == TOKEN:
            data = record.json()
            if choice_of(data) == 0:
                seam = data.get("seam")
                for piece in pieces(data):
                    self._say(piece, seam)
                    seam = None
                self._finish_reason = data.get("finish_reason") or self._finish_reason
        elif record.event == START:
            self._begin()
        elif record.event in TERMINAL:
            data = record.json()
            self._end(ending(record.event, data, data.get("finish_reason") or self._finish_reason))

    def _begin(self) -> None:
        for kind in ("response.created", "response.in_progress"):
            self._emit_once(kind, lambda: {"response": self._object.told(b"[]")})

    def _say(self, piece: Piece, seam: Any) -> None:
        if piece.kind == CALL:
            self._say_call(piece, {"seam": seam} if seam is not None else {})
            return
        part = self._opened(piece.kind)
        text = _dumps(piece.text)
        part.text.add(text[1:-1])
        logprobs = b""
        if self._object.logprobs and piece.logprobs:
            part.logprobs.add(logprobs := logprobs_json(piece.logprobs))
        if seam is not None:  # what comes now another generation has said (I8)
            told = {"logprobs": json_list(logprobs)} if piece.kind == TEXT else {}
            self._emit(f"{part.family.events}.delta", **part.where, delta=piece.text, **told, seam=seam)
        else:
            self._emit_delta(part.delta, (text, b"[%b]" % logprobs[1:]) if piece.kind == TEXT else (text,))

    def _say_call(self, piece: Piece, seam: dict[str, Any]) -> None:
        place = merge_call(self._calls, piece)
        if place == len(self._calls_at):
            self._open_call(self._calls[place], **({} if piece.text else seam))
        if piece.text:
            at, _ = self._calls_at[place]
            self._emit(
                "response.function_call_arguments.delta",
                item_id=self._id(CALL, at),
                output_index=at,
                delta=piece.text,
                **seam,
            )

    def _end(self, how: Ending) -> None:
        if how.status in ("completed", "incomplete"):
            self._close_item(how.item)
            for call, (at, call_id) in zip(self._calls, self._calls_at, strict=True):
                self._close_call(call, at, call_id, how.item)
        assert how.event is not None
        self._emit_once(how.event, lambda: {"response": self.response(how)})

    # --- opening and closing ----------------------------------------------------------------------------------------

    def _opened(self, kind: str) -> OpenPart:
        """The open part, which is of this kind now."""
        part = self._part
        if part is not None and part.kind == kind:
            return part
        family = self._families[kind]
        self._close_part()
        if self._item is None or self._item.kind != family.item:
            self._close_item("completed")
            self._item = self._open_item(family.item)
        item = self._item
        place = len(item.parts)
        where = {"item_id": item.id, "output_index": item.at, family.place: place}
        text, logprobs = self._shared.text((TEXT, item.at, place)), self._shared.text((LOGPROBS, item.at, place))
        self._part = part = OpenPart(kind, family, where, delta_template(kind, family, where), text, logprobs)
        self._plain = part if kind == TEXT else None
        self._emit(f"{family.parts}.added", **where, part=orjson.Fragment(part.json()))
        return part

    def _open_item(self, kind: str) -> Item:
        at = self._next_place()
        item = Item(kind, self._id(kind, at), at, self._families is SUMMARIES)
        self._emit("response.output_item.added", output_index=at, item=orjson.Fragment(item.json("in_progress")))
        return item

    def _open_call(self, call: ToolCall, **seam: Any) -> None:
        self._close_item("completed")
        at = self._next_place()
        # What is said of a call where it begins must stay, and be its own: an id that comes late is not taken up, nor
        # one that another call has.
        known = call.id and not call.late and call.id not in self._call_ids
        call_id = call.id if known else f"call_{self._stream_id}_{at}"
        self._call_ids.add(call_id)
        self._calls_at.append((at, call_id))
        item = orjson.Fragment(self._call_json(ToolCall(0, name=call.name), at, call_id, "in_progress"))
        self._emit("response.output_item.added", output_index=at, item=item, **seam)

    def _close_part(self) -> None:
        part, item = self._part, self._item
        if part is None or item is None:
            return
        family, whole = part.family, self._shared.once(("part", item.at, len(item.parts)), part.json)
        self._emit_once(f"{family.events}.done", lambda: {**part.where, **part.said()})
        self._emit_once(f"{family.parts}.done", lambda: {**part.where, "part": orjson.Fragment(whole)})
        item.parts.append(whole)
        self._closed += len(whole)
        self._part = self._plain = None

    def _close_item(self, status: str) -> None:
        self._close_part()
        if self._item is not None:
            item, self._item = self._item, None
            self._closed -= sum(map(len, item.parts))
            self._emit_item_done(item.at, self._shared.once(("item", item.at), lambda: item.json(status)))

    def _close_call(self, call: ToolCall, at: int, call_id: str, status: str) -> None:
        where = {"item_id": self._id(CALL, at), "output_index": at}
        arguments = call.arguments
        self._emit_once("response.function_call_arguments.done", lambda: {**where, "arguments": arguments.decode()})
        item = self._shared.once(("item", at), lambda: self._call_json(call, at, call_id, status))
        self._emit_item_done(at, item)

    def _next_place(self) -> int:
        self._output.append(b"")
        return len(self._output) - 1

    def _id(self, kind: str, at: int) -> str:
        return f"{_IDS[kind]}_{self._stream_id}_{at}"

    # --- what was dropped -------------------------------------------------------------------------------------------

    def _restore(self, fold: Fold) -> None:
        """Do again, unshown, what the dropped records did."""
        self._begin()
        choice = fold.choices.get(0, Choice())
        calls, read = iter(choice.tool_calls), {TEXT: 0, REASONING: 0, REFUSAL: 0}
        logprobs_read = 0
        for part in fold.parts:
            if part.kind == CALL:
                call = next(calls)
                self._calls.append(call)
                self._open_call(call)
                self.number += call.deltas
                continue
            opened, begin = self._opened(part.kind), read[part.kind]
            read[part.kind] = end = begin + part.size
            opened.text.add(_dumps(getattr(choice, part.kind)[begin:end].decode())[1:-1])
            if part.logprobs and self._object.logprobs:
                entries = choice.logprobs[logprobs_read : logprobs_read + part.logprobs]
                opened.logprobs.add(logprobs_json(entries_of(entries)))
            logprobs_read += part.logprobs
            self.number += part.deltas
        self._finish_reason = choice.finish_reason
        self._events.clear()

    # --- JSON -------------------------------------------------------------------------------------------------------

    def response(self, how: Ending = OPEN_ENDED) -> dict[str, Any]:
        """The whole response as it stands, for orjson; what is open has the status that `how` gives it."""
        output = list(self._output)
        if self._item is not None:
            output[self._item.at] = self._item.json(how.item, self._part)
        for call, (at, call_id) in zip(self._calls, self._calls_at, strict=True):
            output[at] = self._call_json(call, at, call_id, how.item)
        return self._object.told(b"[%b]" % b",".join(output), how)

    def _call_json(self, call: ToolCall, at: int, call_id: str, status: str) -> bytes:
        return _dumps(
            {
                "id": self._id(CALL, at),
                "type": "function_call",
                "status": status,
                "call_id": call_id,
                "name": call.name,
                "arguments": call.arguments.decode(),
            }
        )

    def _emit_item_done(self, at: int, item: bytes) -> None:
        self._output[at] = item
        self._closed += len(item)
        self._emit_once("response.output_item.done", lambda: {"output_index": at, "item": orjson.Fragment(item)})

    def _emit_delta(self, delta: bytes, said: tuple[bytes, ...]) -> None:
        if self.number > self._after:
            self._events.append(delta % (self.number, *said))
        self.number += 1

    def _emit(self, kind: str, **fields: Any) -> None:
        if self.number > self._after:
            self._events.append(_event(kind, self.number, fields))
        self.number += 1

    def _emit_once(self, kind: str, fields: Callable[[], dict[str, Any]]) -> None:
        """An event that tells all that was asked, or again what deltas have told: made once for all readers."""
        number = self.number
        if number > self._after:
            self._events.append(self._shared.once((kind, number), lambda: _event(kind, number, fields())))
        self.number = number + 1


def _event(kind: str, number: int, fields: dict[str, Any]) -> bytes:
    data = _dumps({"type": kind, "sequence_number": number, **fields})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def whole_response(meta: StreamMeta, fold: Fold, status: str) -> bytes:
    """The response as JSON, out of a fold of every record; `status` is the stream's."""
    events = ResponseEvents(meta, fold)
    how = OPEN_ENDED
    if status in TERMINAL:
        finish_reason = fold.choices.get(0, Choice()).finish_reason
        how = ending(status, {"usage": fold.usage, "error": fold.error}, finish_reason)
    return _dumps(events.response(how))
