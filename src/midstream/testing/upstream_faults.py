"""A catalogue of what real OpenAI-compatible servers, and the networks before them, have been seen to do.

Every script answers a chat request with `stream: true`. They are ordered by what an honest reader makes of
them: first whole answers in odd clothes, then endings that are not answers, then silence. Pauses are a few
hundredths of a second, so that a test over the whole catalogue stays quick.
"""

from __future__ import annotations

import json

from midstream.testing.upstream_script import (
    BOM,
    DONE,
    ROLE,
    CloseClean,
    CloseDirty,
    Comment,
    Event,
    Head,
    Pause,
    Reset,
    Script,
    Send,
    Stall,
    Status,
    Step,
    chat_answer,
    chat_event,
    error_body,
    json_event,
    redirect,
)

MULTIBYTE = "né✅你🚀"
_BREATH = Pause(0.02)
_KEPT_ALIVE: list[Step] = [Comment(), Pause(0.01)] * 5
_PINGED: list[Step] = [Comment(" ping"), Pause(0.05)] * 2_000
_STOP = chat_event(finish_reason="stop")
_ABC: list[Step] = [ROLE, chat_event("a"), chat_event("b"), chat_event("c")]
_USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
_QUOTA = {"error": {"message": "quota", "type": "insufficient_quota", "code": 429}}
_EMOJI_EVENT = chat_event(MULTIBYTE).encode()
_CUT = _EMOJI_EVENT.index("🚀".encode()) + 2  # two of its four bytes


def _completion(content: str) -> bytes:
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return json.dumps({"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice]}).encode()


def _logprobs(value: float) -> dict[str, object]:
    return {"content": [{"token": "a", "logprob": value, "bytes": [97], "top_logprobs": []}]}


def _tool(index: int, arguments: str, **first: str) -> Event:
    function = {"arguments": arguments} | ({"name": first["name"]} if "name" in first else {})
    call: dict[str, object] = {"index": index, "function": function}
    if "id" in first:
        call |= {"id": first["id"], "type": "function"}
    return chat_event({"tool_calls": [call]})


_WHOLE: dict[str, Script] = {
    "polite": Script(chat_answer("Hello", ", ", "world")),
    "lines-end-in-cr": Script(chat_answer("a", "b"), newline="\r"),
    "lines-end-in-crlf": Script(chat_answer("a", "b"), newline="\r\n", split=1),
    "characters-cut-at-every-byte": Script(chat_answer(MULTIBYTE, "!"), split=1),
    "byte-order-mark": Script(chat_answer("a", "b", "\ufeffc"), bom=True),
    "byte-order-mark-in-pieces": Script([*(Send(bytes([byte])) for byte in BOM), *chat_answer("a", "\ufeffb")]),
    "comments-while-the-prompt-is-read": Script(
        [
            *_KEPT_ALIVE,
            Comment(" ping - 2026-01-01 00:00:00"),
            Event("", "ping"),
            Send(b"foo: bar\nretry: 10\nid: 7\n\n"),
            *chat_answer("a", "b"),
        ]
    ),
    "data-without-space": Script(chat_answer("a", " two"), space=False),
    "only-whitespace-tokens": Script(chat_answer(" ", "\n", "  two", "\t", "three ")),
    "data-in-several-lines": Script([Event(json.dumps(json.loads(chat_event("a").data), indent=1)), _STOP, DONE]),
    "line-of-six-mebibytes": Script(
        [
            ROLE,
            Send(b'data: {"choices":[{"index":0,"delta":{"content":"'),
            Send(b"x" * 1024, times=6 * 1024),
            Send(b'"},"finish_reason":null}]}\n\n'),
            _STOP,
            DONE,
        ]
    ),
    "unknown-finish-reason": Script(chat_answer("a", "b", finish_reason="insufficient_system_resource")),
    "finish-without-done": Script([*_ABC, _STOP, CloseClean()]),
    "done-then-silence": Script([*_ABC, _STOP, DONE, Stall()]),
    "done-then-reset": Script([*_ABC, _STOP, DONE, _BREATH, Reset()]),
    "empty-choices-and-null-content": Script(
        [
            chat_event(choices=[], prompt_filter_results=[{"prompt_index": 0}]),
            chat_event({"role": "assistant", "content": None}),
            chat_event(""),
            chat_event(" "),
            chat_event({}),
            _STOP,
            chat_event(choices=[], usage=_USAGE),
            DONE,
        ]
    ),
    "infinite-logprob": Script(
        [
            ROLE,
            chat_event("a", logprobs=_logprobs(float("-inf"))),
            chat_event("b", logprobs=_logprobs(float("nan"))),
            _STOP,
            DONE,
        ]
    ),
    "surrogate-pair-in-halves": Script(chat_answer("a\ud83d", "\ude80b", "lone \ud83d", "c")),
    "reasoning-then-text": Script(
        [ROLE, chat_event({"reasoning_content": "hm"}), chat_event("a"), _STOP, DONE],
    ),
    "parallel-tool-calls": Script(
        [
            ROLE,
            _tool(0, "", id="call_a", name="first"),
            _tool(0, '{"x":"\\u00'),
            _tool(0, 'e9"}'),
            _tool(1, '{"y":1', id="call_b", name="second"),
            _tool(1, "}"),
            chat_event(finish_reason="tool_calls"),
            DONE,
        ]
    ),
    "choices-interleaved": Script(
        [
            chat_event("A"),
            chat_event("X", choice=1),
            chat_event("B"),
            chat_event(choice=1, finish_reason="stop"),
            chat_event("C"),
            _STOP,
            chat_event(choices=[], usage=_USAGE),
            DONE,
        ]
    ),
    "json-instead-of-stream": Script([Send(_completion("Hello"))], content_type="application/json", framing="length"),
    "gzip-with-length": Script(chat_answer("Hello", ", ", "world"), gzip=True, framing="length"),
    "ended-by-the-close": Script(chat_answer("a", "b"), framing="close"),
}

_BROKEN: dict[str, Script] = {
    "cut-in-a-character": Script([ROLE, Send(_EMOJI_EVENT[:_CUT]), CloseDirty()]),
    "clean-end-in-a-character": Script([ROLE, Send(_EMOJI_EVENT[:_CUT]), CloseClean()]),
    "plain-text-events": Script([Send(b"data:  two\n\ndata:\n\ndata\n\ndata: trailing  \n\n")]),
    "line-without-end": Script([ROLE, Send(b"data: "), Send(b"x" * 65_536, times=512), Stall()]),
    "error-then-done": Script([json_event(_QUOTA), DONE]),
    "error-event": Script([json_event(_QUOTA, event="error")]),
    "error-after-three-tokens": Script([*_ABC, json_event(_QUOTA), DONE]),
    "clean-end-without-finish": Script([*_ABC, chat_event("d"), CloseClean()]),
    "cut-without-finish": Script([*_ABC, CloseDirty()]),
    "reset-without-finish": Script([*_ABC, _BREATH, Reset()]),
    "reset-before-headers": Script([Reset()]),
    "closed-before-headers": Script([CloseDirty()]),
    "shorter-than-its-length": Script(_ABC, framing="length", length_lie=100),
    "longer-than-its-length": Script(chat_answer("a", "b"), framing="length", length_lie=-60),
    "event-broken-in-the-middle": Script(
        [
            ROLE,
            *[chat_event(f" {n}") for n in range(10)],
            Send(b'data: {"choices":[{"del\n\n'),
            *[chat_event(f" {n}") for n in range(10, 20)],
            _STOP,
            DONE,
        ]
    ),
    "html-instead-of-stream": Script(
        [Send(b"<!doctype html><title>Sign in</title>")], content_type="text/html", framing="length"
    ),
    "empty-body": Script([], framing="length"),
    "empty-stream": Script([Head()]),
    "gzip-error": Script([Status(400, body=error_body("no such parameter: 'stop'"))], gzip=True),
    "gzip-bomb": Script([Head(400), Send(b" " * 65_536, times=1_024)], gzip=True, content_type="application/json"),
    "endless-error-body": Script([Head(500), Send(b"x" * 65_536, times=512), Stall()], content_type="text/plain"),
    "unauthorized": Script([Status(401, body=error_body("Incorrect API key provided"))]),
    "rate-limited": Script([Status(429, {"Retry-After": "7"}, error_body("slow down", "rate_limit_error"))]),
    "bad-gateway-page": Script([Status(502, {"Content-Type": "text/html"}, b"<h1>502 Bad Gateway</h1>")]),
    "redirect": redirect("/elsewhere/v1/chat/completions"),
}

_SILENT: dict[str, Script] = {
    "silent-before-headers": Script([Stall()]),
    "silent-before-first-token": Script([Head(), Stall()]),
    "comments-for-ever": Script([Head(), *_PINGED]),
    "silent-mid-stream": Script([*_ABC, Stall()]),
}

FAULTS: dict[str, Script] = _WHOLE | _BROKEN | _SILENT
"""Every script of the catalogue by name."""
