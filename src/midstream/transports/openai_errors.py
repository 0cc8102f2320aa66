"""OpenAI's errors over HTTP: what every error is answered as on the routes that its clients know."""

from __future__ import annotations

from typing import Any, Final

from starlette.responses import Response

from midstream.codec.pieces import as_object
from midstream.codec.vendor import cancel_object, cancel_status, error_object, failure_object, failure_status
from midstream.errors import Busy, MidstreamError, ProducerFailed
from midstream.records import Record
from midstream.streams import Answer, Streams
from midstream.transports.http import json_response
from midstream.wire import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    FAILED,
    H_STREAM_ID,
    HTTP_STATUS,
    MODELS_PATH,
    RESPONSES_PATH,
    STATUS_PATIENCE,
)

_ROUTES: Final = (CHAT_PATH, COMPLETIONS_PATH, MODELS_PATH, RESPONSES_PATH)
# OpenAI's clients repeat a request by themselves after 408, 409, 429 and 5xx, unless this header says otherwise.
_SHOULD_RETRY: Final = "x-should-retry"


class Interrupted(MidstreamError):
    """This connection, and not the answer, has ended: the last words to a reader who may resume at once.

    Only these routes say so: their clients take a clean end for that of the answer.
    """

    code = "interrupted"


def speaks(path: str) -> bool:
    """Whether a path is one that OpenAI's clients ask."""
    return path.startswith(_ROUTES) and any(path == route or path.startswith(f"{route}/") for route in _ROUTES)


def vendor_response(error: MidstreamError) -> Response:
    """The answer to an error of ours, in the vendor's shape."""
    if isinstance(error, ProducerFailed):  # before there is a stream that could say so itself
        return _failure(error_object(error), {"code": error.failure, "retryable": error.retryable} | error.facts, {})
    headers = {"retry-after": str(error.retry_after)} if isinstance(error, Busy) else {}
    return json_response({"error": error_object(error)}, HTTP_STATUS.get(error.code, 500), headers)


async def failed_at_once(streams: Streams, stream_id: str, owner: str) -> Answer | None:
    """Wait for the upstream's status, STATUS_PATIENCE seconds at most; the answer if it has ended badly without a word.

    Only then can its client be told by a status of HTTP: a client takes the first byte of a 200 for a success.
    """
    state = await streams.owned(stream_id, owner)
    # Its client is here, though it reads nothing yet: the stream is not abandoned.
    if (present := await streams.follow(stream_id, owner, state.highest_seq)) is not None:
        try:
            await streams.heard(stream_id, STATUS_PATIENCE)
        finally:
            streams.leave(present)
        state = await streams.owned(stream_id, owner)
    if state.highest_seq != 2 or not state.ended or state.status == "done":
        return None
    return await streams.answer(stream_id, owner)


def failure_response(answer: Answer, *, keyed: bool = False) -> Response:
    """The answer to a request whose stream has ended `failed` or `cancelled`.

    `keyed`: under an Idempotency-Key, which stands for this very end: to repeat the request brings nothing else.
    """
    end = Record.of(answer.frames[-1])
    data = end.json()
    headers = {H_STREAM_ID: answer.state.meta.stream_id} | ({_SHOULD_RETRY: "false"} if keyed else {})
    if end.event == FAILED:
        error = as_object(data.get("error"))
        return _failure(failure_object(error), error, headers)
    reason = data.get("reason")
    if reason != "shutdown":
        headers[_SHOULD_RETRY] = "false"
    return json_response({"error": cancel_object(reason)}, cancel_status(reason), headers)


def _failure(body: dict[str, Any], error: dict[str, Any], headers: dict[str, str]) -> Response:
    if error.get("retryable") is False:
        headers.setdefault(_SHOULD_RETRY, "false")
    if type(wait := error.get("retry_after")) is int:
        headers["retry-after"] = str(wait)
    return json_response({"error": body}, failure_status(error), headers)
