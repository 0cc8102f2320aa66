// @ts-check
/**
 * One WebSocket to a gateway, shared by every stream and every question that goes over it (PROTOCOL.md, "WebSocket").
 * Each has a `ref` of its own; what comes under one that is over is nobody's.
 *
 * @typedef {import("./midstream.js").Client} Client
 * @typedef {import("./midstream.js").Call} Call
 * @typedef {import("./midstream.js").Connection} Connection
 * @typedef {Record<string, any>} Message
 */
import { MidstreamError, encodeCursor, refusalOf } from "./wire.js";

const PATH = "v1/ws";
const OPEN_TIMEOUT_MS = 10_000;
const ASK_TIMEOUT_MS = 10_000;
/** A socket that nobody uses any more is closed after this long. */
const IDLE_MS = 5_000;

export class SharedSocket {
  #client;
  #WebSocket;
  /** @type {Link | null} */
  #link = null;
  #refs = 0;

  /** @param {Client} client @param {typeof globalThis.WebSocket} WebSocket */
  constructor(client, WebSocket) {
    this.#client = client;
    this.#WebSocket = WebSocket;
  }

  /** Opens `call.unopened`, or goes on after `call.position`. @param {Call} call @returns {Promise<Connection>} */
  async follow({ unopened, position, signal }) {
    const link = await this.#open(signal);
    const talk = link.say(
      unopened
        ? { ...unopened.request, type: "generate", idempotency_key: unopened.idempotencyKey }
        : { type: "resume", ...cursorOf(/** @type {import("./midstream.js").Position} */ (position)) },
      this.#nextRef(),
    );
    const leave = () => link.leave(talk, signal.reason);
    signal.addEventListener("abort", leave, { once: true });
    if (signal.aborted) leave();
    const first = await talk.next();
    const { stream_id: streamId = null, heartbeat } = first?.[0] ?? talk.state ?? {};
    return {
      streamId,
      heartbeatMs: heartbeat > 0 ? heartbeat * 1000 : null,
      nothingLeft: first === null,
      batches: batches(first, talk),
    };
  }

  /** What is answered with a stream's state: an ack, a cancel. @param {Message} message @returns {Promise<Message>} */
  async ask(message, timeoutMs = ASK_TIMEOUT_MS) {
    const late = AbortSignal.timeout(timeoutMs);
    const link = await this.#open(late);
    const talk = link.say(message, this.#nextRef());
    late.addEventListener("abort", () => talk.end(new MidstreamError("unreachable", "The gateway does not answer.")));
    await talk.next();
    return /** @type {Message} */ (talk.state);
  }

  #nextRef() {
    return `r${++this.#refs}`;
  }

  /** The socket, open; another one once the key is another. @param {AbortSignal} signal @returns {Promise<Link>} */
  async #open(signal) {
    const key = await this.#client.key();
    if (this.#link && (this.#link.over || this.#link.key !== key)) this.#link.close();
    if (!this.#link || this.#link.over) this.#link = new Link(this.#url(), key, this.#WebSocket);
    const link = this.#link;
    const gone = new Promise((_, reject) => {
      const stop = () => reject(failureOf(signal));
      signal.addEventListener("abort", stop, { once: true });
      if (signal.aborted) stop();
    });
    await Promise.race([link.opened, gone]);
    return link;
  }

  #url() {
    const url = new URL(PATH, this.#client.baseUrl);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    return url;
  }
}

/** One connection, from its opening to its end; another one is another object, and hears nothing of this one's. */
class Link {
  over = false;
  /** @type {Map<string | null, Talk>} */
  #talks = new Map();
  #socket;
  #isOpen = false;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #timer;

  /** @param {URL} url @param {string} key @param {typeof globalThis.WebSocket} WebSocket */
  constructor(url, key, WebSocket) {
    this.key = key;
    this.#socket = new WebSocket(url);
    /** @type {Promise<void>} */
    this.opened = new Promise((resolve, reject) => {
      this.#socket.onopen = () => {
        this.#isOpen = true;
        clearTimeout(this.#timer);
        if (key) this.#socket.send(JSON.stringify({ type: "auth", key }));
        resolve();
      };
      // An `error` comes with a `close`, which is enough for both.
      this.#socket.onclose = () => this.#end(reject);
    });
    this.opened.catch(() => {});
    this.#socket.onmessage = ({ data }) => this.#heard(data);
    this.#timer = setTimeout(() => this.close(), OPEN_TIMEOUT_MS);
  }

  /** @param {Message} message @param {string} ref */
  say(message, ref) {
    clearTimeout(this.#timer);
    const talk = new Talk(ref);
    this.#talks.set(ref, talk);
    if (this.over) talk.end(lost());
    else this.#socket.send(JSON.stringify({ ...message, ref }));
    return talk;
  }

  /** Reads no more under this ref. @param {Talk} talk @param {unknown} reason */
  leave(talk, reason) {
    if (this.#talks.get(talk.ref) !== talk) return;
    if (!talk.complete && !this.over) this.#socket.send(JSON.stringify({ type: "leave", ref: talk.ref }));
    this.#finish(talk, reason instanceof MidstreamError ? reason : lost());
  }

  close() {
    this.#socket.close();
    this.#end(() => {});
  }

  /** @param {(failure: MidstreamError) => void} refuse */
  #end(refuse) {
    if (this.over) return;
    this.over = true;
    clearTimeout(this.#timer);
    const failure = this.#isOpen ? lost() : new MidstreamError("unreachable", "The gateway cannot be reached.");
    refuse(failure);
    for (const talk of [...this.#talks.values()]) this.#finish(talk, failure);
  }

  /** @param {string} data */
  #heard(data) {
    /** @type {Message[]} */
    let messages;
    try {
      messages = [JSON.parse(data)].flat();
    } catch {
      return this.close();
    }
    for (const message of messages) {
      if (message.type === "error" && (message.ref ?? null) === null) return this.#refused(message);
      const talk = this.#talks.get(message.ref ?? null);
      if (talk) this.#pass(message, talk);
    }
  }

  /** @param {Message} message @param {Talk} talk */
  #pass(message, talk) {
    if (message.type === "record" || message.type === "heartbeat") {
      talk.hear(message);
    } else if (message.type === "journal_state") {
      talk.state = message;
      this.#finish(talk, null);
    } else if (message.type === "error") {
      this.#finish(talk, errorOf(message));
    }
  }

  /** What is refused without a ref is the socket itself. @param {Message} message */
  #refused(message) {
    for (const talk of [...this.#talks.values()]) this.#finish(talk, errorOf(message));
    this.close();
  }

  /** @param {Talk} talk @param {MidstreamError | null} failure */
  #finish(talk, failure) {
    this.#talks.delete(talk.ref);
    talk.end(failure);
    if (this.#talks.size > 0 || this.over) return;
    this.#timer = setTimeout(() => this.close(), IDLE_MS);
  }
}

/** What is said under one ref. */
class Talk {
  /** The last word about the stream. @type {Message | null} */
  state = null;
  /** Whether the stream has ended: then there is nothing to leave. */
  complete = false;
  /** @type {Message[]} */
  #heard = [];
  /** @type {{failure: MidstreamError | null} | null} */
  #over = null;
  #wake = () => {};

  /** @param {string} ref */
  constructor(ref) {
    this.ref = ref;
  }

  /** @param {Message} message */
  hear(message) {
    if (message.data?.done && message.event !== "token") this.complete = true;
    this.#heard.push(message);
    this.#wake();
  }

  /** @param {MidstreamError | null} failure */
  end(failure) {
    this.#over ??= { failure };
    this.#wake();
  }

  /** All that was said since the last time; null at the end. Throws the failure after what came before it. */
  async next() {
    while (this.#heard.length === 0 && !this.#over) {
      await new Promise((/** @type {(value?: unknown) => void} */ resolve) => (this.#wake = resolve));
    }
    if (this.#heard.length > 0) return this.#heard.splice(0);
    if (this.#over?.failure) throw this.#over.failure;
    return null;
  }
}

/** @param {Message[] | null} first @param {Talk} talk */
async function* batches(first, talk) {
  for (let said = first; said; said = await talk.next()) {
    yield said
      .filter(({ type }) => type === "record")
      .map(({ event, data }) => ({ event, id: String(data.seq), data }));
  }
}

function cursorOf(/** @type {import("./midstream.js").Position} */ { streamId, seq }) {
  return { stream_id: streamId, cursor: encodeCursor(streamId, seq) };
}

/** @param {Message} message */
function errorOf({ code, status, retry_after: seconds = 0, type, ref, ...facts }) {
  return refusalOf({ ...facts, error: code }, status, seconds * 1000);
}

function lost() {
  return new MidstreamError("interrupted", "The connection was lost.");
}

/** @param {AbortSignal} signal */
function failureOf({ reason }) {
  return reason instanceof MidstreamError ? reason : new MidstreamError("unreachable", "The gateway does not answer.");
}
