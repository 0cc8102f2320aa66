"""The browser client over a WebSocket and over Connect, whatever a gateway does to it."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Run

pytestmark = pytest.mark.browser

# --- WebSocket -------------------------------------------------------------------------------------------------------


def test_a_drop_is_followed_by_the_cursor_of_the_last_record(run: Run) -> None:
    """A browser tells of one drop by `error` and by `close`: it is one reconnect."""
    script = """
        const play = (socket, { type, ref, cursor }) => {
            if (type === "generate") socket.says(begun(ref), record(ref, 2)), socket.breaks();
            else if (seqOf({ cursor }) === 2) socket.says(record(ref, 3)), socket.breaks(1001);
            else socket.says(ended(ref, 4), state(ref, "done"));
        };
        return { ...await read(socketClient(play).open({ prompt: "p" }, impatient())), asks: asks() };
    """
    result = run(script)
    assert result["seqs"] == [1, 2, 3, 4]
    assert result["asks"] == [["generate"], [2], [3]]
    assert result["position"] == {"streamId": "s", "seq": 4, "ended": True}


def test_a_drop_before_the_first_record_repeats_the_request_under_one_key(run: Run) -> None:
    script = """
        const play = (socket, { ref }) =>
            sockets.length < 3 ? socket.breaks() : socket.says(begun(ref), ended(ref, 2));
        const result = await read(socketClient(play).open({ prompt: "p", stream: true }, impatient()));
        return { ...result, said: sockets.map(({ said }) => said[0]) };
    """
    result = run(script)
    assert result["seqs"] == [1, 2]
    assert len({said["idempotency_key"] for said in result["said"]}) == 1
    assert [(said["type"], said["prompt"]) for said in result["said"]] == [("generate", "p")] * 3


def test_an_old_socket_is_heard_no_more_once_there_is_a_new_one(run: Run) -> None:
    """What it still delivers was resumed for already, and would be given twice."""
    script = """
        const play = (socket, { type, ref }) => {
            if (type !== "resume") return;
            if (sockets.length === 1) {
                socket.says(record(ref, 6));
                stream.drop();
                socket.late = () => socket.says(record(ref, 7), record(ref, 8), ended(ref, 9));
            } else {
                sockets[0].late();
                socket.says(record(ref, 7), ended(ref, 8));
                sockets[0].late();
            }
        };
        const gateway = socketClient(play, { key: () => `key-${sockets.length}` });
        const stream = gateway.reopen(AFTER(5), impatient());
        return { ...await read(stream), asks: asks() };
    """
    result = run(script)
    assert result["seqs"] == [6, 7, 8]
    assert result["asks"] == [[5, "leave"], [6]] or result["asks"] == [[5], [6]]


def test_nothing_is_opened_after_a_close(run: Run) -> None:
    """Also not by a wait that was running then."""
    script = """
        const stream = socketClient((socket) => socket.breaks()).reopen(AFTER(5), {
          backoff: new midstream.Backoff({ baseMs: 20, capMs: 20 }),
          onStatus: ({ phase }) => phase === "waiting" && setTimeout(() => stream.close()),
        });
        const result = await read(stream);
        const count = sockets.length;
        await new Promise((resolve) => setTimeout(resolve, 60));
        return { ...result, count, later: sockets.length };
    """
    result = run(script)
    assert (result["seqs"], result["count"], result["later"]) == ([], 1, 1)
    assert "error" not in result


def test_what_comes_many_at_once_or_for_nobody_is_sorted_out(run: Run) -> None:
    """Arrays, refs that are over, types of a later version."""
    script = """
        const play = (socket, { ref }) => socket.says(
            { type: "news", ref },
            [record("old", 9), record(ref, 6), { type: "heartbeat", ref, heartbeat: 15 }, record(ref, 7)],
            [],
            [ended(ref, 8), state(ref, "done")],
        );
        return read(socketClient(play).reopen(AFTER(5), impatient()));
    """
    assert run(script)["seqs"] == [6, 7, 8]


def test_streams_share_a_socket_and_not_their_fates(run: Run) -> None:
    script = """
        const play = (socket, { type, ref, prompt }) => {
            if (type !== "generate") return;
            if (prompt === "refused") socket.says(error(ref, "too_many_streams", 400));
            else socket.says(begun(ref), ended(ref, 2), state(ref, "done"));
        };
        const gateway = socketClient(play);
        const ask = (prompt) => read(gateway.open({ prompt }, impatient()));
        const [one, two, three] = await Promise.all([ask("one"), ask("refused"), ask("three")]);
        return { seqs: [one.seqs, two.seqs, three.seqs], code: two.error.code, count: sockets.length };
    """
    assert run(script) == {"seqs": [[1, 2], [], [1, 2]], "code": "too_many_streams", "count": 1}


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "bad_cursor"),
        (403, "wrong_stream"),
        (404, "unknown_stream"),
        (409, "cursor_expired"),
        (418, "news"),
        (502, "upstream_unreachable"),
    ],
)
def test_a_lasting_refusal_is_raised_at_once_with_its_facts(run: Run, status: int, code: str) -> None:
    script = """
        const play = (socket, { ref }) => socket.says(error(ref, argument[1], argument[0], { oldest_available: 812 }));
        return { ...await read(socketClient(play).reopen(AFTER(5), impatient())), asks: asks() };
    """
    result = run(script, [status, code])
    assert (result["error"]["code"], result["error"]["status"]) == (code, status)
    assert result["error"]["body"]["oldest_available"] == 812
    assert result["asks"] == [[5]]


def test_a_passing_refusal_is_tried_again_when_it_says(run: Run) -> None:
    script = """
        const waits = [];
        let times = 0;
        const play = (socket, { ref }) =>
            times++ ? socket.says(ended(ref, 6)) : socket.says(error(ref, "shutting_down", 503, { retry_after: 7 }));
        const stream = socketClient(play).reopen(AFTER(5), {
          backoff: new midstream.Backoff({ baseMs: 100, random: () => 1 }),
          onStatus: ({ phase, delayMs }) => phase === "waiting" && (waits.push(delayMs), stream.reconnectNow()),
        });
        return { ...await read(stream), waits, asks: asks() };
    """
    result = run(script)
    assert (result["seqs"], result["waits"]) == ([6], [7100])
    assert result["asks"] == [[5, 5]]


def test_an_overtaken_reader_has_what_came_before(run: Run) -> None:
    script = """
        const play = (socket, { ref }) =>
            socket.says(record(ref, 6), error(ref, "cursor_expired", 409, { oldest_available: 40 }));
        return read(socketClient(play).reopen(AFTER(5), impatient()));
    """
    result = run(script)
    assert (result["seqs"], result["error"]["code"]) == ([6], "cursor_expired")


def test_nothing_left_before_a_terminal_record_is_an_error_and_no_end(run: Run) -> None:
    script = """
        const play = (socket, { ref }) => socket.says(state(ref, "done"));
        return read(socketClient(play).reopen(AFTER(5), impatient()));
    """
    assert run(script)["error"]["code"] == "ended_early"


@pytest.mark.parametrize("told", ["not JSON", "[", '"text"'])
def test_a_socket_that_speaks_another_language_is_left(run: Run, told: str) -> None:
    script = """
        const play = (socket, { ref }) => socket.says(...(sockets.length < 2 ? [argument] : [ended(ref, 6)]));
        return { ...await read(socketClient(play).reopen(AFTER(5), impatient())), count: sockets.length };
    """
    if told == '"text"':  # JSON that is no message is passed over, like a type of a later version
        script = script.replace("[argument]", "[argument, ended(ref, 6)]")
    assert run(script, told)["seqs"] == [6]


def test_silence_past_three_heartbeats_is_a_drop_and_a_heartbeat_is_not(run: Run) -> None:
    script = """
        const causes = [];
        const play = async (socket, { type, ref, cursor }) => {
            if (type !== "resume") return;
            const alive = { type: "heartbeat", ref, stream_id: "s", heartbeat: 0.02 };
            if (seqOf({ cursor }) === 6) return socket.says(ended(ref, 7));
            for (let i = 0; i < 8; i++) {
                socket.says(alive);
                await new Promise((resolve) => setTimeout(resolve, 15));
            }
            socket.says(record(ref, 6));
        };
        const stream = socketClient(play).reopen(AFTER(5), {
          ...impatient(),
          onStatus: ({ cause }) => cause && causes.push(cause.code),
        });
        return { ...await read(stream), causes, asks: asks() };
    """
    result = run(script)
    assert (result["seqs"], result["causes"]) == ([6, 7], ["silent"])
    assert result["asks"] == [[5, "leave", 6]]


def test_a_reader_that_stops_leaves_and_one_that_has_all_does_not(run: Run) -> None:
    """The socket is for others, too."""
    script = """
        const play = (socket, { type, ref, prompt }) => {
            if (type === "generate") socket.says(begun(ref), prompt === "all" ? ended(ref, 2) : record(ref, 2));
        };
        const gateway = socketClient(play);
        await read(gateway.open({ prompt: "all" }));
        for await (const { seq } of gateway.open({ prompt: "some" })) if (seq === 2) break;
        return { asks: asks(), closed: sockets[0].closed };
    """
    assert run(script) == {"asks": [["generate", "generate", "leave"]], "closed": False}


def test_a_gateway_that_takes_no_sockets_is_given_up(run: Run) -> None:
    script = """
        const gateway = socketClient(() => {}, {}, (socket) => (socket.refused = true));
        return { ...await read(gateway.reopen(AFTER(5), impatient(3))), count: sockets.length };
    """
    result = run(script)
    assert (result["error"]["code"], result["error"]["cause"], result["count"]) == ("gave_up", "unreachable", 4)


def test_key_is_said_first_on_every_socket(run: Run) -> None:
    """And never in the address; a new one has a socket of its own."""
    script = """
        const keys = ["old", "new", "new"];
        const play = (socket, { type, ref }) => {
            if (type === "resume") socket.says(sockets.length < 2 ? record(ref, 6) : ended(ref, 7));
            if (sockets.length < 2) socket.breaks();
        };
        await read(socketClient(play, { key: async () => keys.shift() }).reopen(AFTER(5), impatient()));
        return sockets.map(({ url, said }) => [url, said.map(({ type, key }) => key ?? type)]);
    """
    address = "ws://gateway.test/v1/ws"
    assert run(script) == [[address, ["old", "resume"]], [address, ["new", "resume"]]]


def test_a_refused_key_is_raised_once(run: Run) -> None:
    script = """
        const play = (socket, { type }) =>
            type === "auth" && (socket.says(error(null, "unauthorized", 401)), socket.breaks(4401));
        return { ...await read(socketClient(play, { key: "wrong" }).reopen(AFTER(5), impatient())), asks: asks() };
    """
    result = run(script)
    assert (result["error"]["code"], result["error"]["status"]) == ("unauthorized", 401)
    assert len(result["asks"]) == 1


def test_acks_and_cancels_go_over_the_socket(run: Run) -> None:
    script = """
        const ahead = (ref) => error(ref, "cursor_ahead", 409, { highest_seq: 6 });
        const play = (socket, { type, ref, seq }) => socket.says(seq === 9 ? ahead(ref) : state(ref, type));
        const gateway = socketClient(play);
        const answers = [(await gateway.ack("s", 5)).status, (await gateway.cancel("s")).status];
        await gateway.ack("s", 9).catch(({ code, body }) => answers.push(code, body.highest_seq));
        return { answers, said: sockets[0].said.map(({ type, stream_id, seq }) => [type, stream_id, seq ?? null]) };
    """
    assert run(script) == {
        "answers": ["ack", "cancel", "cursor_ahead", 6],
        "said": [["ack", "s", 5], ["cancel", "s", None], ["ack", "s", 9]],
    }


# --- Connect ---------------------------------------------------------------------------------------------------------

CONNECT = "{ transport: midstream.connectTransport }"


def test_every_split_of_a_body_gives_the_same_records(run: Run) -> None:
    """Envelopes, lengths and characters cut anywhere."""
    script = f"""
        const body = joined(token(0, "né✅"), token(1, ""), token(2, "🚀 x"), final(3));
        const results = [];
        for (let pieces = 1; pieces <= body.length; pieces++) {{
          const heard = [];
          const stream = client([bodied(body, {{ pieces }})], {CONNECT}).open({{ prompt: "p" }});
          for await (const {{ seq, event, data }} of stream) heard.push([seq, event, data.delta ?? null]);
          results.push(JSON.stringify(heard));
        }}
        return [...new Set(results)].map((text) => JSON.parse(text));
    """
    (told,) = run(script)
    assert told == [
        [1, "start", None],
        [2, "token", "né✅"],
        [3, "token", ""],
        [4, "token", "🚀 x"],
        [5, "done", None],
    ]


def test_a_drop_is_followed_by_the_first_token_wanted(run: Run) -> None:
    """A body that ends without saying so was interrupted, wherever it ended."""
    script = f"""
        const answers = [
          bodied(joined(token(0, "a"), token(1, "b"))),
          bodied(joined(token(2, "c"), token(3, "d").slice(0, 9))),
          unreachable,
          bodied(joined(token(3, "d"), final(4))),
        ];
        const result = await read(client(answers, {CONNECT}).open({{ prompt: "p", model: "m" }}, impatient()));
        return {{ ...result, posted: posted() }};
    """
    result = run(script)
    assert result["seqs"] == [1, 2, 3, 4, 5, 6]
    path = "/inference.InferenceService/Generate"
    first, *others = result["posted"]
    assert (first["path"], first["prompt"], first["model"]) == (path, "p", "m")
    assert len(first["sessionId"]) >= 32
    assert others == [{"path": path, "sessionId": "s", "resumeFromToken": token} for token in (2, 3, 3)]


def test_a_drop_before_the_first_token_repeats_the_request_under_one_session(run: Run) -> None:
    script = f"""
        const answers = [unreachable, bodied(joined(token(0, "a"), final(1)))];
        const result = await read(client(answers, {CONNECT}).open({{ prompt: "p" }}, impatient()));
        return {{ ...result, sessions: posted().map(({{ sessionId }}) => sessionId) }};
    """
    result = run(script)
    assert result["seqs"] == [1, 2, 3]
    assert len(set(result["sessions"])) == 1


@pytest.mark.parametrize(
    ("status", "reason", "http"),
    [
        ("not_found", "UNKNOWN_STREAM", 404),
        ("failed_precondition", "WRONG_STREAM", 403),
        ("out_of_range", "CURSOR_EXPIRED", 409),
        ("unauthenticated", "UNAUTHORIZED", 401),
        ("invalid_argument", "BAD_CURSOR", 400),
        ("aborted", "UPSTREAM_UNREACHABLE", 500),
    ],
)
def test_a_lasting_refusal_over_connect_is_raised_at_once(run: Run, status: str, reason: str, http: int) -> None:
    """With the protocol's own code, and its facts as numbers."""
    script = f"""
        const refusal = failure(argument[0], argument[1], {{ oldest_available: "812" }}, "gone");
        return read(client([bodied(refusal, {{ headers: {{}} }})], {CONNECT}).reopen(AFTER(5), impatient()));
    """
    result = run(script, [status, reason])
    assert (result["error"]["code"], result["error"]["status"]) == (reason.lower(), http)
    assert result["error"]["body"]["oldest_available"] == 812
    assert len(result["asked"]) == 1


def test_a_passing_refusal_over_connect_is_tried_again(run: Run) -> None:
    script = f"""
        const answers = [
          bodied(failure("unavailable", "SHUTTING_DOWN"), {{ headers: {{}} }}),
          bodied(joined(token(4, "x"), failure("unavailable", "SHUTTING_DOWN"))),
          bodied(final(5)),
        ];
        return read(client(answers, {CONNECT}).reopen(AFTER(5), impatient()));
    """
    result = run(script)
    assert result["seqs"] == [6, 7]
    assert len(result["asked"]) == 3


def test_ends_that_are_not_well_are_records_too(run: Run) -> None:
    """As every other transport tells them."""
    script = f"""
        const last = async (end) => {{
          let told;
          for await (const record of client([bodied(joined(token(0, "a"), end))], {CONNECT}).open({{ prompt: "p" }}))
            told = record;
          return told;
        }};
        const facts = {{ token_index: "1", retryable: "true" }};
        return [
          await last(failure("aborted", "UPSTREAM_TIMEOUT", facts, "too slow")),
          await last(failure("canceled", "CANCELLED", {{ token_index: "1", reason: "client" }})),
        ];
    """
    failed, cancelled = run(script)
    error = {"code": "upstream_timeout", "message": "too slow", "retryable": True}
    assert failed == {"seq": 3, "event": "failed", "data": {"seq": 3, "done": True, "error": error}}
    assert cancelled == {"seq": 3, "event": "cancelled", "data": {"seq": 3, "done": True, "reason": "client"}}


def test_a_request_that_connect_cannot_carry_is_refused_here(run: Run) -> None:
    script = f"return read(client([unreachable], {CONNECT}).open({{ messages: [] }}, impatient()))"
    result = run(script)
    assert (result["error"]["code"], result["asked"]) == ("bad_request", [])
