"""The browser client by itself, in a real Chromium: what it asks for, and when, whatever a gateway does to it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from midstream import cursor
from midstream.wire import FAILURES, STATUS
from tests.e2e.conftest import Run

pytestmark = pytest.mark.browser

# --- the decoder ------------------------------------------------------------------------------------------------------

EVENTS = (
    "\ufeff: hello\r\nid: 7\r\nevent: token\r\ndata: né✅你🚀\r\n\r\n"
    ":\n\nretry: 5\n: ping\nid: 8\n\n"  # no data: nothing is dispatched
    "data:no space\rdata:  two\rdata\r\r"
    "id: 9\nid: a\0b\nfoo: bar\ndata: {}\n\n"
    "data: never ended"
)
DECODED = [
    {"event": "token", "id": "7", "data": "né✅你🚀"},
    {"event": "message", "id": None, "data": "no space\n two\n"},
    {"event": "message", "id": "9", "data": "{}"},
]


def test_every_split_of_a_stream_decodes_to_the_same_events(run: Run) -> None:
    """CR, LF and CRLF, a byte order mark, comments, a block without data and characters of several bytes."""
    script = """
        const bytes = new TextEncoder().encode(argument);
        const decode = (cuts) => {
          const decoder = new midstream.SseDecoder();
          const edges = [0, ...cuts, bytes.length];
          return cuts.concat(0).flatMap((_, i) => decoder.push(bytes.slice(edges[i], edges[i + 1])));
        };
        const results = new Set([JSON.stringify(decode(Array.from(bytes.keys()).slice(1)))]);
        for (let cut = 0; cut <= bytes.length; cut++) results.add(JSON.stringify(decode([cut])));
        return [...results];
    """
    (result,) = run(script, EVENTS)
    assert json.loads(result) == DECODED


def test_a_line_of_six_megabytes_in_small_pieces_is_decoded_in_linear_time(run: Run) -> None:
    script = """
        const decoder = new midstream.SseDecoder();
        const piece = new TextEncoder().encode("x".repeat(1024));
        const events = decoder.push(new TextEncoder().encode("data: "));
        const since = performance.now();
        for (let i = 0; i < 6 * 1024; i++) events.push(...decoder.push(piece));
        events.push(...decoder.push(new TextEncoder().encode("\\n\\n")));
        return [events.length, events[0].data.length, performance.now() - since];
    """
    count, length, took = run(script)
    assert (count, length) == (1, 6 * 1024 * 1024)
    assert took < 3000  # a decoder that looks again at what it has takes minutes


def test_cursor_is_the_one_that_the_gateway_reads(run: Run) -> None:
    for stream_id, seq in [("a9116ce4", 0), ("s/ü?🚀", 151), ("x", 2**53 - 1)]:
        token = run("return midstream.encodeCursor(...argument)", [stream_id, seq])
        assert cursor.decode(token) == cursor.Cursor(stream_id, seq)


# --- resuming ---------------------------------------------------------------------------------------------------------


def test_a_drop_is_followed_by_the_cursor_of_the_last_record(run: Run) -> None:
    """Whether the connection ends cleanly or breaks: without a terminal record it was interrupted."""
    script = """
        const first = streamed(START + frame(2));
        const second = streamed(": ping\\n" + frame(3), { dies: true });
        return read(client([first, second, streamed(END(4))]).open({ prompt: "p" }, impatient()));
    """
    result = run(script)
    assert result["seqs"] == [1, 2, 3, 4]
    assert [(it["method"], it["seq"]) for it in result["asked"]] == [("POST", None), ("GET", 2), ("GET", 3)]
    assert result["position"] == {"streamId": "s", "seq": 4, "ended": True}


def test_a_drop_before_the_first_record_repeats_the_post_under_one_key(run: Run) -> None:
    script = """
        const answers = [unreachable, streamed(""), streamed(START + END(2))];
        return read(client(answers).open({ prompt: "p" }, impatient()));
    """
    result = run(script)
    assert result["seqs"] == [1, 2]
    assert [it["method"] for it in result["asked"]] == ["POST"] * 3
    assert len({(it["key"], it["body"]) for it in result["asked"]}) == 1
    assert len(result["asked"][0]["key"]) >= 32
    assert json.loads(result["asked"][0]["body"]) == {"prompt": "p", "stream": True}


def test_position_is_that_of_the_record_handed_over_not_of_the_bytes_received(run: Run) -> None:
    """A consumer that stops in the middle of a batch goes on strictly after what it took."""
    script = """
        const gateway = client([streamed(START + frame(2) + frame(3) + frame(4)), streamed(frame(3) + END(4))]);
        const stream = gateway.open({ prompt: "p" });
        for await (const record of stream) if (record.seq === 2) break;
        const saved = JSON.parse(JSON.stringify(stream.save()));
        return { saved, ...(await read(gateway.reopen(saved))) };
    """
    result = run(script)
    assert result["saved"] == {"streamId": "s", "seq": 2, "ended": False}
    assert result["seqs"] == [3, 4]
    assert result["asked"][1]["seq"] == 2


def test_an_ended_stream_is_reopened_without_a_request(run: Run) -> None:
    result = run("return read(client([unreachable]).reopen({ streamId: 's', seq: 9, ended: true }))")
    assert (result["seqs"], result["asked"]) == ([], [])


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_passing_refusal_is_tried_again_with_the_same_cursor(run: Run, status: int) -> None:
    script = """
        const answers = [answered(argument), streamed(END(6))];
        return read(client(answers).reopen(AFTER(5), impatient()));
    """
    result = run(script, status)
    assert result["seqs"] == [6]
    assert [it["seq"] for it in result["asked"]] == [5, 5]


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "bad_cursor"),
        (401, "unauthorized"),
        (403, "wrong_stream"),
        (404, "unknown_stream"),
        (409, "cursor_expired"),
        (409, "cursor_ahead"),
        (422, "idempotency_mismatch"),
    ],
)
def test_a_lasting_refusal_is_raised_at_once_with_its_facts(run: Run, status: int, code: str) -> None:
    body = {"error": code, "oldest_available": 812}
    script = "return read(client([answered(...argument)]).reopen(AFTER(5), impatient()))"
    result = run(script, [status, body])
    assert result["error"] == {"code": code, "status": status, "body": body, "cause": None}
    assert len(result["asked"]) == 1


# What a store's own error says of itself is another thing: the gateway cannot be asked now, and can be later.
@pytest.mark.parametrize("code", sorted(FAILURES.keys() - STATUS.keys()))
def test_what_became_of_the_request_at_its_upstream_is_raised_at_once(run: Run, code: str) -> None:
    """The gateway could be asked; to ask it again would ask the upstream again, for minutes."""
    body = {"error": code, "detail": "the upstream is not there"}
    result = run("return read(client([answered(502, argument)]).open({ prompt: 'p' }, impatient()))", body)
    assert result["error"] == {"code": code, "status": 502, "body": body, "cause": None}
    assert len(result["asked"]) == 1


@pytest.mark.parametrize("body", [{}, {"error": "bad gateway"}, {"error": {"code": "upstream_error"}}], ids=str)
def test_a_502_of_a_proxys_is_tried_again(run: Run, body: dict[str, Any]) -> None:
    """It says that the gateway could not be asked."""
    script = (
        "return read(client([answered(502, argument), streamed(START + END(2))]).open({ prompt: 'p' }, impatient()))"
    )
    result = run(script, body)
    assert result["seqs"] == [1, 2]
    assert [it["method"] for it in result["asked"]] == ["POST", "POST"]


def test_nothing_left_before_a_terminal_record_is_an_error_and_no_end(run: Run) -> None:
    result = run("return read(client([answered(204)]).reopen(AFTER(5), impatient()))")
    assert result["error"]["code"] == "ended_early"
    assert len(result["asked"]) == 1


def test_an_overtaken_reader_is_told_what_a_409_would_have_told(run: Run) -> None:
    script = """
        const body = { error: "cursor_expired", oldest_available: 40, action: "restart" };
        const expired = `event: expired\\ndata: ${JSON.stringify(body)}\\n\\n`;
        return read(client([streamed(frame(6) + expired)]).reopen(AFTER(5), impatient()));
    """
    result = run(script)
    assert result["seqs"] == [6]
    assert result["error"]["code"] == "cursor_expired"
    assert result["error"]["body"]["oldest_available"] == 40


@pytest.mark.parametrize("seq", [5, 7], ids=["repeat", "gap"])
def test_a_record_out_of_turn_is_raised_and_not_shown(run: Run, seq: int) -> None:
    result = run("return read(client([streamed(frame(argument))]).reopen(AFTER(5), impatient()))", seq)
    assert (result["seqs"], result["error"]["code"]) == ([], "broken_stream")


def test_an_event_without_an_id_moves_no_position(run: Run) -> None:
    script = """
        const talk = 'event: news\\ndata: {"seq": 99}\\n\\n: ping\\n';
        const answers = [streamed(frame(6) + talk), streamed(talk + END(7))];
        return read(client(answers).reopen(AFTER(5), impatient()));
    """
    result = run(script)
    assert result["seqs"] == [6, 7]
    assert [it["seq"] for it in result["asked"]] == [5, 6]


# --- patience ---------------------------------------------------------------------------------------------------------


def test_backoff_grows_to_its_cap_is_jittered_and_gives_up(run: Run) -> None:
    script = """
        const delays = (random) => {
          const backoff = new midstream.Backoff({ baseMs: 100, capMs: 1000, attempts: 6, random: () => random });
          return Array.from({ length: 7 }, () => backoff.next());
        };
        return [delays(0), delays(1)];
    """
    low, high = run(script)
    assert low == [50, 100, 200, 400, 500, 500, None]
    assert high == [100, 200, 400, 800, 1000, 1000, None]


def test_retry_after_is_the_least_that_is_waited(run: Run) -> None:
    """In seconds or as a date, and with jitter on top, so that those who were sent away do not return as one."""
    script = """
        const dated = new Date(Date.now() + 30_000).toUTCString();
        const waits = [];
        for (const value of ["7", dated, "soon"]) {
          const stream = client([answered(503, {}, { "Retry-After": value })]).reopen(AFTER(5), {
            backoff: new midstream.Backoff({ baseMs: 100, random: () => 1 }),
            onStatus: ({ phase, delayMs }) => phase === "waiting" && (waits.push(delayMs), stream.close()),
          });
          await read(stream);
        }
        return waits;
    """
    seconds, date, nonsense = run(script)
    assert seconds == 7100
    assert 25_000 < date <= 30_100
    assert nonsense == 100


def test_connections_without_progress_come_to_an_end(run: Run) -> None:
    """A gateway that accepts every resume, says one ping and closes, is not one that works."""
    result = run("return read(client([streamed(': ping\\n')]).reopen(AFTER(5), impatient(4)))")
    assert result["error"] == {"code": "gave_up", "status": 0, "body": {}, "cause": "interrupted"}
    assert len(result["asked"]) == 5


def test_one_record_a_connection_is_progress_enough(run: Run) -> None:
    script = """
        const answers = Array.from({ length: 20 }, (_, i) => streamed(frame(6 + i)));
        return read(client([...answers, streamed(END(26))]).reopen(AFTER(5), impatient(2)));
    """
    assert run(script)["seqs"] == list(range(6, 27))


def test_silence_past_three_heartbeats_is_a_drop(run: Run) -> None:
    script = """
        const causes = [];
        const silent = streamed(frame(6), { hang: true, headers: { "Midstream-Heartbeat": "0.02" } });
        const result = await read(client([silent, streamed(END(7))]).reopen(AFTER(5), {
          ...impatient(),
          onStatus: ({ cause }) => cause && causes.push(cause.code),
        }));
        return { ...result, causes };
    """
    result = run(script)
    assert result["seqs"] == [6, 7]
    assert result["causes"] == ["silent"]


def test_a_page_instead_of_a_stream_is_not_taken_for_one(run: Run) -> None:
    """A captive portal answers 200 and HTML to everything."""
    script = """
        const portal = answered(200, "<html>", { "Content-Type": "text/html" });
        return read(client([portal, streamed(END(6))]).reopen(AFTER(5), impatient()));
    """
    assert run(script)["seqs"] == [6]


# --- control ----------------------------------------------------------------------------------------------------------


def test_key_is_asked_for_at_every_attempt(run: Run) -> None:
    script = """
        const keys = ["old", "new"];
        const gateway = client([streamed(frame(6)), streamed(END(7))], { key: async () => keys.shift() });
        return read(gateway.reopen(AFTER(5), impatient()));
    """
    result = run(script)
    assert [it["authorization"] for it in result["asked"]] == ["Bearer old", "Bearer new"]


def test_cancel_before_the_id_is_known_is_sent_once_it_is(run: Run) -> None:
    script = """
        const gateway = client([streamed(START, { hang: true }), answered(200, { status: "cancelled" })]);
        const stream = gateway.open({ prompt: "p" });
        const cancelled = stream.cancel();
        const reading = read(stream);
        await cancelled;
        stream.close();
        return reading;
    """
    result = run(script)
    assert [(it["method"], it["path"]) for it in result["asked"]] == [
        ("POST", "/v1/stream"),
        ("POST", "/v1/stream/s/cancel"),
    ]


def test_a_cut_on_purpose_waits_as_told_and_counts_as_no_failure(run: Run) -> None:
    script = """
        const waits = [];
        const stream = client([streamed(frame(6), { hang: true }), streamed(END(7))]).reopen(AFTER(5), {
          ...impatient(0),
          onStatus: ({ phase, delayMs }) => phase === "waiting" && (waits.push(delayMs), stream.reconnectNow()),
        });
        const seqs = [];
        for await (const { seq } of stream) seqs.push(seq) && seq === 6 && stream.drop(60_000);
        return { seqs, waits };
    """
    assert run(script) == {"seqs": [6, 7], "waits": [60_000]}
