// What the tests of the browser client's other transports stand on: a WebSocket whose gateway the test plays, and the
// envelopes of Connect.
const sockets = [];

/** `play(socket, message)` hears what the client says; `socket.refused` in `opening` keeps it from opening. */
const playing = (play, opening = () => {}) =>
  class {
    constructor(url) {
      Object.assign(this, { url: String(url), said: [], closed: false });
      sockets.push(this);
      opening(this);
      setTimeout(() => (this.refused ? this.breaks() : this.onopen?.()));
    }

    send(text) {
      const message = JSON.parse(text);
      this.said.push(message);
      setTimeout(() => play(this, message));
    }

    says(...messages) {
      for (const message of messages) {
        this.onmessage?.({ data: typeof message === "string" ? message : JSON.stringify(message) });
      }
    }

    /** One drop, of which a browser tells twice. */
    breaks(code = 1006) {
      this.closed = true;
      this.onerror?.({});
      this.onclose?.({ code });
    }

    close() {
      if (this.closed) return;
      this.closed = true;
      setTimeout(() => this.onclose?.({ code: 1000 }));
    }
  };

const record = (ref, seq, event = "token", data = {}) =>
  ({ type: "record", ref, stream_id: "s", event, data: { seq, ...data } });
const begun = (ref) => ({ ...record(ref, 1, "start", { stream_id: "s" }), heartbeat: 15 });
const ended = (ref, seq) => record(ref, seq, "done", { done: true });
const state = (ref, status = "open") => ({ type: "journal_state", ref, stream_id: "s", status });
const error = (ref, code, status, facts = {}) => ({ type: "error", ref, code, status, detail: code, ...facts });

const seqOf = ({ cursor }) => cursor && JSON.parse(atob(cursor.replaceAll("-", "+").replaceAll("_", "/"))).l;
/** What each socket was asked: `generate`, or the position of a resume. */
const asks = () =>
  sockets.map(({ said }) => said.filter(({ type }) => type !== "auth").map((it) => seqOf(it) ?? it.type));

/** A client over WebSockets alone; it may fetch nothing. */
const socketClient = (play, options = {}, opening) =>
  new midstream.Client({
    baseUrl: "http://gateway.test/",
    transport: midstream.socketTransport,
    fetch: unreachable,
    WebSocket: playing(play, opening),
    ...options,
  });

// --- Connect ---

const envelope = (message, flags = 0) => {
  const data = new TextEncoder().encode(JSON.stringify(message));
  const bytes = new Uint8Array(5 + data.length);
  bytes[0] = flags;
  new DataView(bytes.buffer).setUint32(1, data.length);
  bytes.set(data, 5);
  return bytes;
};
const joined = (...parts) => Uint8Array.from(parts.flatMap((part) => [...part]));
const token = (tokenIndex, text) => envelope({ ...(text && { token: text }), ...(tokenIndex && { tokenIndex }) });
const final = (tokenIndex) => joined(envelope({ tokenIndex, isFinal: true }), envelope({}, 2));

/** A google.rpc.ErrorInfo, as protobuf writes it. */
const field = (number, bytes) => [(number << 3) | 2, ...(bytes.length < 128 ? [bytes.length] : [bytes.length & 127 | 128, bytes.length >> 7]), ...bytes];
const utf8 = (text) => [...new TextEncoder().encode(text)];
const errorInfo = (reason, facts) => [
  ...field(1, utf8(reason)),
  ...field(2, utf8("midstream")),
  ...Object.entries(facts).flatMap(([name, value]) => field(3, [...field(1, utf8(name)), ...field(2, utf8(value))])),
];
const failure = (code, reason, facts = {}, message = "no") => {
  const value = btoa(String.fromCharCode(...errorInfo(reason, facts))).replaceAll("=", "");
  return envelope({ error: { code, message, details: [{ type: "google.rpc.ErrorInfo", value }] } }, 2);
};

/** A body that comes in pieces of so many bytes. */
const bodied = (bytes, { pieces = bytes.length || 1, headers = { "Midstream-Stream-Id": "s" } } = {}) => () => {
  const body = new ReadableStream({
    start(controller) {
      for (let at = 0; at < bytes.length; at += pieces) controller.enqueue(bytes.slice(at, at + pieces));
      controller.close();
    },
  });
  return new Response(body, { headers: { "Content-Type": "application/connect+json", ...headers } });
};

/** What was posted, its envelope taken off. */
const posted = () => asked.map(({ path, body }) => ({ path, ...JSON.parse(new TextDecoder().decode(body.slice(5))) }));
