// What the tests of the browser client stand on: a `fetch` whose every answer a test has told.
const asked = [];

const frame = (seq, event = "token", data = {}) =>
  `id: ${seq}\nevent: ${event}\ndata: ${JSON.stringify({ seq, ...data })}\n\n`;
const START = frame(1, "start", { stream_id: "s" });
const END = (seq) => frame(seq, "done", { done: true });

/** A 200 stream. `hang`: stays open until the client leaves. `dies`: breaks instead of ending. */
const streamed = (text, { hang = false, dies = false, headers = {} } = {}) => (signal) => {
  const body = new ReadableStream({
    start(controller) {
      if (text) controller.enqueue(new TextEncoder().encode(text));
      signal.addEventListener("abort", () => hang && controller.error(signal.reason));
      if (!hang && !dies) controller.close();
    },
    pull(controller) {
      if (dies) controller.error(new TypeError("network error"));
    },
  });
  const said = { "Content-Type": "text/event-stream", "Midstream-Stream-Id": "s", "Midstream-Heartbeat": "15" };
  return new Response(body, { headers: { ...said, ...headers } });
};

const answered = (status, body = {}, headers = {}) => () =>
  new Response(status === 204 ? null : JSON.stringify(body), { status, headers });

const unreachable = () => {
  throw new TypeError("Failed to fetch");
};

/** Answers in turn; the last one is given again and again. */
const told = (...answers) => async (url, { method, headers, body, signal }) => {
  const cursor = url.searchParams.get("cursor");
  asked.push({
    method,
    path: url.pathname,
    seq: cursor && JSON.parse(atob(cursor.replaceAll("-", "+").replaceAll("_", "/"))).l,
    key: headers["Idempotency-Key"],
    authorization: headers.Authorization,
    body,
  });
  return (answers.length > 1 ? answers.shift() : answers[0])(signal);
};

const client = (answers, options = {}) =>
  new midstream.Client({ baseUrl: "http://gateway.test/", fetch: told(...answers), ...options });
const AFTER = (seq) => ({ streamId: "s", seq, ended: false });

/** Does not make a test wait: milliseconds instead of seconds, and their number is what counts. */
const impatient = (attempts = 4) => ({ backoff: new midstream.Backoff({ baseMs: 1, capMs: 1, attempts }) });

/** Everything that a stream hands over, and what it ends with. */
async function read(stream) {
  const seqs = [];
  try {
    for await (const record of stream) seqs.push(record.seq);
    return { seqs, asked, position: stream.save() };
  } catch (error) {
    const { code, status, body, cause } = error;
    return { seqs, asked, position: stream.save(), error: { code, status, body, cause: cause?.code } };
  }
}
