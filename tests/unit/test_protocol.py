"""PROTOCOL.md and the code say the same, and what PROTOCOL.md claims to be tested is."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from midstream import cursor, errors, rules, wire
from midstream.codec import native
from midstream.codec.pb import inference_pb2 as pb
from midstream.errors import CursorAhead, CursorExpired, MidstreamError
from midstream.records import FRAME_OVERHEAD, Chunk, Page
from midstream.server.settings import Settings, flag_name, shown
from midstream.transports.grpc import _OPTIONS
from midstream.transports.http import error_body
from midstream.transports.messages import Envelope
from midstream.transports.sse import location, stream_headers
from tests.docs.markdown import ROOT, name, pages, plain, section, table

TEXT = (ROOT / "PROTOCOL.md").read_text(encoding="utf-8")


def kinds(kind: type[MidstreamError] = MidstreamError) -> Iterator[type[MidstreamError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from kinds(child)


# --- errors and failures ---------------------------------------------------------------------------------------------


def test_errors_have_the_statuses_of_the_code() -> None:
    """Every code with its status, and no other."""
    rows = table(section(TEXT, "10. Errors"))
    assert {plain(code): int(status) for code, status, *_ in rows} == wire.HTTP_STATUS
    assert {plain(code): status for code, _, status, *_ in rows} == wire.GRPC_STATUS


def test_errors_advise_what_the_code_advises() -> None:
    """The last column is the error's `action`."""
    advice = {plain(code): do for code, *_, do in table(section(TEXT, "10. Errors"))}
    actions = {kind.code: kind.action for kind in kinds() if kind.code in advice}
    assert advice == actions


def test_failures_are_those_of_the_code() -> None:
    """Every reason a generation may fail, and whether to try again."""
    rows = table(section(TEXT, "11. Why a generation fails"))
    told = {plain(code): retryable for code, retryable, _ in rows}
    assert told.pop("upstream_error") == "by its status"
    known = {code: str(retryable).lower() for code, retryable in wire.FAILURES.items() if code != "upstream_error"}
    assert told == known
    assert {408, 429, 500, 599} <= wire.UPSTREAM_RETRYABLE
    assert not {400, 401, 404, 600} & wire.UPSTREAM_RETRYABLE


def test_the_table_of_checks_shows_the_bodies_that_are_sent() -> None:
    """Character for character, apart from the `detail` for people."""
    shown_bodies = {
        int(answer[:3]): json.loads(body[1])
        for _, _, answer in table(section(TEXT, "7. Resuming"))
        if (body := re.search(r"`(\{.*\})`", answer)) and "cursor_ahead" not in answer
    }
    assert shown_bodies == {
        401: error_body(errors.Unauthorized()),
        400: error_body(errors.BadCursor("…")),
        403: error_body(errors.WrongStream()),
        404: error_body(errors.UnknownStream()),
        409: error_body(CursorExpired(812)),
    }
    assert json.dumps(error_body(CursorAhead(640)), separators=(",", ":")) in TEXT
    assert json.dumps(error_body(CursorExpired(812)), separators=(",", ":")) in section(TEXT, "5. Server-sent events")


# --- records and wire ------------------------------------------------------------------------------------------------


def test_events_are_those_of_the_code() -> None:
    """The events a record can have, in the order of a stream."""
    rows = table(section(TEXT, "4. Records"))
    assert [plain(row[0]) for row in rows] == [wire.START, wire.TOKEN, wire.DONE, wire.FAILED, wire.CANCELLED]
    assert {wire.DONE, wire.FAILED, wire.CANCELLED} == wire.TERMINAL


def test_the_frame_in_the_text_is_the_frame_on_the_wire() -> None:
    """Byte for byte."""
    frame = native.token(151, Chunk(" production")).decode()
    assert f"```text\n{frame}```" in section(TEXT, "5. Server-sent events")


def test_the_cursor_in_the_text_decodes() -> None:
    """And encodes to the same token again."""
    shown_json = re.search(r"```json\n(\{.*\})\n```", section(TEXT, "6. The cursor"))
    assert shown_json is not None
    told = json.loads(shown_json[1])
    made = cursor.Cursor(told["s"], told["l"])
    assert cursor.decode(made.encode()) == made
    assert told["v"] == wire.CURSOR_VERSION
    assert wire.MAX_SEQ == 2**53 - 1


def test_headers_of_a_stream_are_those_that_are_sent() -> None:
    """Names and values; the id and the heartbeat are the stream's and the setting's."""
    told = {plain(name).lower(): plain(value) for name, value in table(section(TEXT, "5. Server-sent events"))}
    sent = {name.decode(): value.decode() for name, value in stream_headers("{id}", 15.0, location({}, "{id}"))}
    assert told.keys() == sent.keys()
    for header in ("content-type", "cache-control", "x-accel-buffering", "location"):
        assert told[header] == sent[header]


def test_cors_headers_are_those_of_the_code() -> None:
    """A header that is missing here would be one that pages cannot use."""
    told = {plain(name): value for name, value in table(section(TEXT, "12. Keys, sessions and browsers"))}
    assert told["Access-Control-Expose-Headers"] == f"`{wire.CORS_EXPOSE}`"
    assert told["Access-Control-Allow-Methods"] == f"`{wire.CORS_METHODS}` (preflight)"
    assert told["Access-Control-Allow-Headers"] == f"`{wire.CORS_ALLOW}` (preflight)"


@pytest.mark.parametrize(
    "name",
    [
        wire.H_STREAM_ID,
        wire.H_HEARTBEAT,
        wire.H_IDEMPOTENCY,
        wire.H_LAST_EVENT_ID,
        wire.SESSION_COOKIE,
        f"?{wire.Q_CURSOR}=",
        f"?{wire.Q_FROM}={wire.FROM_START}",
        f"event: {wire.EXPIRED}",
    ],
)
def test_every_name_on_the_wire_is_told(name: str) -> None:
    """Outsiders have nothing but the page."""
    assert name in TEXT


def test_calls_are_told_as_they_are() -> None:
    """Names, ends and times of section 19."""
    calls = section(TEXT, "19. gRPC, Connect and gRPC-Web")
    assert f"`{wire.GRPC_SERVICE}`" in calls
    assert f"`domain` is `{wire.GRPC_DOMAIN}`" in calls
    assert f"at most {wire.MAX_SESSION_CHARS} printable characters" in calls
    for message in pb.DESCRIPTOR.message_types_by_name.values():
        assert all(f"`{field.name}`" in calls for field in message.fields), message.name
    for end, status in wire.GRPC_ENDS.items():
        assert re.search(rf"^\| `{end}` .*the status {status};", calls, re.MULTILINE)
    assert _OPTIONS["grpc.http2.min_ping_interval_without_data_ms"] == 10_000 / 2
    assert f"asks every {_OPTIONS['grpc.keepalive_time_ms'] / 1000:g} seconds" in calls
    assert f"does not answer within {_OPTIONS['grpc.keepalive_timeout_ms'] / 1000:g}" in calls
    assert f"takes none for {wire.SEND_STALL:g} seconds" in calls


# --- bounds ----------------------------------------------------------------------------------------------------------


def test_bounds_are_those_of_the_settings() -> None:
    """Each bound that a flag sets, with its default."""
    told = {}
    for _, bound, _ in table(section(TEXT, "13. Bounds and retention")):
        value, _, flag = bound.partition(", ")
        if flag:
            told[plain(flag)] = value.replace(" ", "").replace(",", "")
    defaults = {flag_name(setting): shown(setting.default) for setting in fields(Settings)}
    assert told == {flag: defaults[flag] for flag in told}
    assert len(told) == 7


def test_fixed_bounds_are_those_of_the_code() -> None:
    """Each bound that nothing sets."""
    told = {what: bound for what, bound, _ in table(section(TEXT, "13. Bounds and retention"))}
    assert told["one write to a reader"] == f"{wire.SLICE_FRAMES} frames and {wire.SLICE_BYTES} bytes"
    assert told["one text field of a record"] == f"{wire.MAX_FIELD_BYTES} bytes"
    assert told["a send without progress"] == f"{wire.SEND_STALL:g} seconds"
    assert told["a cursor"] == f"{wire.MAX_CURSOR_CHARS} characters"
    assert told["an Idempotency-Key"] == f"{wire.MAX_IDEMPOTENCY_CHARS} characters"


def test_bounds_of_a_connection_are_those_of_the_code() -> None:
    """What a connection may hold before anything is asked."""
    told = {what: bound for what, bound, _ in table(section(TEXT, "13. Bounds and retention"))}
    assert told["a request's line and headers"] == f"{wire.MAX_HEAD_BYTES} bytes"
    assert told["a request's trailers"] == f"{wire.MAX_HEAD_BYTES} bytes"
    assert told["requests that wait on one connection for those before them"] == str(wire.MAX_PIPELINED)


def test_bounds_of_a_socket_are_those_of_the_code() -> None:
    """And a message is bounded as a body is."""
    told = {what: bound for what, bound, _ in table(section(TEXT, "13. Bounds and retention"))}
    assert told["a message on a WebSocket"] == told["a request body"]
    assert told["streams that a WebSocket follows"] == str(wire.WS_STREAMS)
    assert told["a `ref`"] == f"{wire.MAX_REF_CHARS} characters"
    within = told["the key of a WebSocket, where the handshake brought none"]
    assert within == f"within {wire.AUTH_WITHIN:g} seconds"


def test_messages_and_closes_of_a_socket_are_those_of_the_code() -> None:
    """Each `type` that is asked or told, and each close code with its reason."""
    asks, _, rest = section(TEXT, "20. WebSocket").partition("**The gateway says:**")
    tells, _, closes = rest.partition("**What is no message of these**")
    assert [plain(row[0]) for row in table(asks)] == [*wire.WS_ASKS]
    assert [plain(row[0]) for row in table(tells)] == [*wire.WS_TELLS]
    assert {plain(reason): int(code) for code, reason, _ in table(closes)} == wire.WS_CLOSE


def test_the_message_in_the_text_is_the_message_on_the_wire() -> None:
    """Byte for byte."""
    shown_json = re.search(r"```json\n(\{.*\})\n```", section(TEXT, "20. WebSocket"))
    assert shown_json is not None
    said = json.loads(shown_json[1])
    envelope = Envelope(said["ref"])
    envelope.address(said["stream_id"], 15.0)
    frames = [native.token(seq, Chunk(" production")) for seq in (150, 151)]
    _, message = envelope.messages(Page(frames, 151, 151, 1, "open"))
    assert message.decode() == shown_json[1]


def test_times_of_retention_are_those_of_the_code() -> None:
    """Grace, the pushes, the cap, the sweep, and the life of a cookie."""
    retention = section(TEXT, "13. Bounds and retention")
    defaults = {setting.name: setting.default for setting in fields(Settings)}
    assert f"({defaults['retain']:g} seconds, `--retain`)" in retention
    assert f"at most every {wire.TOUCH_EVERY:g} seconds" in retention
    assert f"{wire.RETAIN_CAP / 3600:g} hours after the terminal record" in retention
    assert f"looked for every {wire.SWEEP_EVERY:g} seconds" in retention
    assert f"for {wire.SESSION_TERM // 3600} hours" in TEXT
    assert f"`--drain` seconds ({defaults['drain']:g})" in TEXT


def test_the_arithmetic_of_a_token_is_right() -> None:
    """The frame, its memory, and how many fit into a stream."""
    assert len(native.token(1, Chunk(""))) == 58 + 2
    assert len(native.token(1000, Chunk(" word"))) == 71
    assert 71 + FRAME_OVERHEAD == 112
    held = rules.weight([native.token(seq, Chunk(" word")) for seq in range(2, 4002)])
    assert f"{held / 2**20:.2f} MiB" in TEXT
    bound, seq = rules.Bounds().max_stream_bytes, 2
    while bound > 0:
        bound -= len(native.token(seq, Chunk(" word"))) + FRAME_OVERHEAD
        seq += 1
    assert f"about {round(seq, -3):,}" in TEXT


# --- laws and promises -----------------------------------------------------------------------------------------------


def test_the_laws_are_numbered_alike_in_rules_and_in_the_text() -> None:
    """R1 to R10, each once in both."""
    in_text = re.findall(r"^- \*\*(R\d+)\*\* ", TEXT, re.MULTILINE)
    in_rules = re.findall(r"^(R\d+) ", rules.__doc__ or "", re.MULTILINE)
    assert in_text == in_rules == [f"R{number}" for number in range(1, 11)]


def test_the_promises_are_numbered() -> None:
    """I1 to I9, in order."""
    rows = table(section(TEXT, "2. What is promised"))
    assert [row[0] for row in rows] == [f"I{number}" for number in range(1, 10)]


def test_every_number_that_is_cited_exists() -> None:
    """A comment or a test that cites a law which is not there misleads."""
    known = {f"R{number}" for number in range(1, 11)} | {f"I{number}" for number in range(1, 10)}
    cited = re.compile(r"(?<![\w-])[RI]\d{1,2}(?![\w-])")
    for folder in ("src", "tests", "docs"):
        for path in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.md")]:
            unknown = set(cited.findall(path.read_text(encoding="utf-8"))) - known
            assert not unknown, f"{path} cites {unknown}"


# --- the checklists --------------------------------------------------------------------------------------------------

_NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")
_SUITES = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("src/midstream/testing/*.py")]


@cache
def functions(path: str) -> frozenset[str]:
    """The functions and methods of the files whose path ends like this."""
    found = [suite for suite in _SUITES if suite.as_posix().endswith(f"/{path}")]
    assert found, f"no file {path}"
    nodes = [node for suite in found for node in ast.walk(ast.parse(suite.read_text(encoding="utf-8")))]
    return frozenset(node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


@pytest.mark.parametrize(
    ("heading", "enough"), [("16. Checklist for server writers", 25), ("17. Checklist for client writers", 15)]
)
def test_each_line_of_a_checklist_names_a_test(heading: str, enough: int) -> None:
    """A promise without a test is a hope."""
    lines = [line for line in section(TEXT, heading).splitlines() if line.startswith("- ")]
    assert len(lines) >= enough
    for line in lines:
        assert _NAMED.search(line), f"names no test: {line}"


@pytest.mark.parametrize("page", pages(), ids=name)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    """Who wants to know how a promise is held finds out."""
    named = _NAMED.findall(page.read_text(encoding="utf-8"))
    assert [function for path, function in named if function not in functions(path)] == []
