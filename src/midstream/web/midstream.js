// @ts-check
/**
 * Midstream's client for browsers: one ES module, no dependency.
 *
 * ```js
 * const client = new Client({ baseUrl: "https://gateway.example/" });
 * const stream = client.open({ prompt: "Tell me a story" });
 * for await (const record of stream) {
 *   if (record.event === "token") show(record.data.delta);
 * }
 * ```
 *
 * The loop ends with the stream's terminal record (`done`, `failed` or `cancelled`). A connection that
 * drops before that is replaced by another one, which goes on strictly after the last record that was
 * handed over. What cannot be mended by connecting again is thrown as a `MidstreamError`.
 *
 * @typedef {{streamId: string, seq: number, ended: boolean}} Position Everything up to `seq` was handed over.
 * @typedef {{request: object, idempotencyKey: string}} Unopened A request of which no record has come yet.
 * @typedef {{seq: number, event: string, data: Record<string, any>}} JournalRecord
 * @typedef {{event: string, id: string | null, data: string | object}} SseEvent `id` is the one in this very event;
 *   `data` is text that is JSON, or what it says.
 *
 * @typedef {object} Connection What a transport hands back.
 * @property {string | null} streamId as the gateway named it, where the transport can tell
 * @property {number | null} heartbeatMs the longest silence of a healthy gateway; Infinity where the wire shows none
 * @property {boolean} nothingLeft the gateway says that nothing follows the position (HTTP 204)
 * @property {AsyncIterable<SseEvent[]>} batches one per read; an empty one is a sign of life
 *
 * @typedef {object} Call What a transport is asked: open `unopened`, or go on after `position`.
 * @property {Unopened | null} unopened
 * @property {Position | null} position
 * @property {AbortSignal} signal aborted when the connection has to go
 *
 * @typedef {object} Transport
 * @property {(client: Client, call: Call) => Promise<Connection>} connect
 * @property {(client: Client, streamId: string, seq: number) => Promise<Record<string, any>>} [ack] where it has its own
 *
 * @typedef {object} Status
 * @property {"connecting" | "open" | "waiting"} phase `waiting` is between two connections
 * @property {number} [delayMs] with `waiting`: until the next connection is tried
 * @property {MidstreamError} [cause] with `waiting`: why the last one is gone
 *
 * @typedef {object} StreamOptions
 * @property {(status: Status) => void} [onStatus]
 * @property {Backoff} [backoff]
 * @property {Transport} [transport]
 */

import { SharedSocket } from "./socket.js";
import { MidstreamError, encodeCursor, messageFor, refusalOf } from "./wire.js";

export { connectTransport } from "./connect.js";
export { MidstreamError, encodeCursor };

export const TERMINAL_EVENTS = new Set(["done", "failed", "cancelled"]);
const DEFAULT_HEARTBEAT_MS = 15_000;
const UNARY_TIMEOUT_MS = 10_000;
/** How long a cancel tries the shared socket before it goes over HTTP. */
const SOCKET_TIMEOUT_MS = 2_000;
/** Browsers allow six connections to an origin, over all tabs: a stream may not take the last ones. */
const SSE_PER_ORIGIN = 4;
/** Where tabs cannot tell each other how many they hold. */
const SSE_PER_TAB = 2;

/**
 * Incremental decoder of `text/event-stream` by the rules of WHATWG: a block without data dispatches
 * nothing, a comment never does, and what stands before the end of the input without its blank line is
 * dropped. Time is linear in the input however it is cut.
 */
export class SseDecoder {
  #utf8 = new TextDecoder();
  #line = "";
  #endedInCr = false;
  /** @type {string[]} */
  #data = [];
  #event = "";
  /** @type {string | null} */
  #id = null;

  /** @param {Uint8Array} bytes @returns {SseEvent[]} */
  push(bytes) {
    let text = this.#utf8.decode(bytes, { stream: true });
    if (text === "") return [];
    if (this.#endedInCr && text.startsWith("\n")) text = text.slice(1);
    this.#endedInCr = text === "" ? false : text.endsWith("\r");
    const lines = text.split(/\r\n|\r|\n/);
    /** @type {SseEvent[]} */
    const events = [];
    for (let i = 0; i < lines.length - 1; i++) {
      const line = this.#line + lines[i];
      this.#line = "";
      if (line !== "") this.#field(line);
      else this.#dispatch(events);
    }
    this.#line += lines[lines.length - 1];
    return events;
  }

  /** @param {string} line */
  #field(line) {
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    let value = colon < 0 ? "" : line.slice(colon + 1);
    if (value.startsWith(" ")) value = value.slice(1);
    if (name === "data") this.#data.push(value);
    else if (name === "event") this.#event = value;
    else if (name === "id" && !value.includes("\0")) this.#id = value;
  }

  /** @param {SseEvent[]} events */
  #dispatch(events) {
    if (this.#data.length > 0) {
      events.push({ event: this.#event || "message", id: this.#id, data: this.#data.join("\n") });
    }
    this.#data = [];
    this.#event = "";
    this.#id = null;
  }
}

/** Jittered and capped; only `progress` sets it back, since a connection alone proves nothing. */
export class Backoff {
  #failures = 0;

  constructor({ baseMs = 500, capMs = 15_000, attempts = 10, random = Math.random } = {}) {
    this.baseMs = baseMs;
    this.capMs = capMs;
    this.attempts = attempts;
    this.random = random;
  }

  progress() {
    this.#failures = 0;
  }

  /**
   * Milliseconds until the next try, at least what the gateway asked for; null when all tries are spent.
   * @param {number} [retryAfterMs]
   */
  next(retryAfterMs = 0) {
    if (this.#failures >= this.attempts) return null;
    const ceiling = Math.min(this.capMs, this.baseMs * 2 ** this.#failures++);
    return retryAfterMs + ceiling * (0.5 + this.random() / 2);
  }
}

/** Server-Sent Events by fetch: unlike EventSource it can send a key and read a status. @type {Transport} */
export const sseTransport = {
  async connect(client, { unopened, position, signal }) {
    const headers = { Accept: "text/event-stream" };
    const response = unopened
      ? await client.request("POST", "v1/stream", {
          body: { ...unopened.request, stream: true },
          headers: { ...headers, "Idempotency-Key": unopened.idempotencyKey },
          signal,
        })
      : await client.request("GET", resumePath(/** @type {Position} */ (position)), { headers, signal });
    const heartbeat = Number(response.headers.get("Midstream-Heartbeat"));
    const type = response.headers.get("Content-Type") ?? "";
    if (response.status !== 204 && !type.startsWith("text/event-stream")) {
      throw new MidstreamError("not_a_stream", `The gateway answered with "${type}" instead of a stream.`);
    }
    return {
      streamId: response.headers.get("Midstream-Stream-Id"),
      heartbeatMs: heartbeat > 0 ? heartbeat * 1000 : null,
      nothingLeft: response.status === 204,
      batches: readBatches(response),
    };
  },
};

/** Everything over one WebSocket, shared by the client's streams. @type {Transport} */
export const socketTransport = {
  connect: (client, call) => client.socket.follow(call),
  ack: (client, streamId, seq) => client.socket.ask({ type: "ack", stream_id: streamId, seq }),
};

/**
 * What a page uses unless it is told otherwise: server-sent events for as many streams as leave the browser
 * connections for other requests, the shared WebSocket for further ones. @type {Transport}
 */
export const pageTransport = {
  async connect(client, call) {
    const release = client.inPage ? await takeSlot(client.baseUrl.origin) : () => {};
    if (!release) return client.socket.follow(call);
    call.signal.addEventListener("abort", release, { once: true });
    if (call.signal.aborted) release();
    return sseTransport.connect(client, call);
  },
};

/** @type {Map<string, number>} */
const slotsTaken = new Map();

/** One of the connections that streams may hold to an origin; null when all are taken. */
async function takeSlot(/** @type {string} */ origin) {
  try {
    for (let i = 0; i < SSE_PER_ORIGIN; i++) {
      const release = await takeLock(`midstream ${origin} ${i}`);
      if (release) return release;
    }
    return null;
  } catch {
    return takeSlotOfTab(origin);
  }
}

/** The browser lets go of it also when the tab is gone. @returns {Promise<(() => void) | null>} */
function takeLock(/** @type {string} */ name) {
  return new Promise((resolve, reject) => {
    const held = (/** @type {unknown} */ lock) =>
      lock ? new Promise((/** @type {(value?: unknown) => void} */ release) => resolve(() => release())) : resolve(null);
    // No such thing outside secure contexts, nor in a frame that has no origin.
    navigator.locks.request(name, { ifAvailable: true }, held).catch(reject);
  });
}

function takeSlotOfTab(/** @type {string} */ origin) {
  const taken = slotsTaken.get(origin) ?? 0;
  if (taken >= SSE_PER_TAB) return null;
  slotsTaken.set(origin, taken + 1);
  return () => void slotsTaken.set(origin, (slotsTaken.get(origin) ?? 1) - 1);
}

function resumePath(/** @type {Position} */ { streamId, seq }) {
  return `v1/stream/${encodeURIComponent(streamId)}?cursor=${encodeCursor(streamId, seq)}`;
}

/** @param {Response} response @returns {AsyncGenerator<SseEvent[]>} */
async function* readBatches(response) {
  if (!response.body) return;
  const decoder = new SseDecoder();
  const reader = response.body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((cause) => {
        throw new MidstreamError("interrupted", "The connection was lost.", { cause });
      });
      if (done) return;
      yield decoder.push(value);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/**
 * One reader of one stream. Iterate it once; `position` moves when a record is handed over, never when its
 * bytes arrive, so what was saved is what was seen.
 */
export class Stream {
  #client;
  #transport;
  #backoff;
  #onStatus;
  /** @type {Unopened | null} */
  #unopened = null;
  /** @type {Position | null} */
  #position = null;
  /** @type {AbortController | null} */
  #connection = null;
  /** @type {string | null} */
  #streamId = null;
  /** @type {number | null} */
  #pauseMs = null;
  #closed = false;
  #wake = () => {};
  /** @type {(streamId: string | null) => void} */
  #identify = () => {};
  /** @type {Promise<string | null>} */
  #identified = new Promise((resolve) => (this.#identify = resolve));

  /**
   * @param {Client} client
   * @param {Position | Unopened} saved
   * @param {StreamOptions} options
   */
  constructor(client, saved, { onStatus = () => {}, backoff = new Backoff(), transport } = {}) {
    this.#client = client;
    this.#transport = transport;
    this.#backoff = backoff;
    this.#onStatus = onStatus;
    if ("request" in saved) this.#unopened = saved;
    else this.#position = { ...saved };
    this.#learnId(this.#position?.streamId);
  }

  /** The id, as soon as the gateway has told it. */
  get streamId() {
    return this.#streamId;
  }

  /** What `Client.reopen` takes, in this page or the next: plain data, fit for JSON. @returns {Position | Unopened} */
  save() {
    return this.#position ? { ...this.#position } : { .../** @type {Unopened} */ (this.#unopened) };
  }

  /** Ends the connection as a lost network would; the stream goes on after `pauseMs`. */
  drop(pauseMs = 0) {
    if (!this.#connection) return;
    this.#pauseMs = pauseMs;
    this.#connection.abort(new MidstreamError("interrupted", "The connection was cut on purpose."));
  }

  /** Ends a wait between two connections. */
  reconnectNow() {
    this.#wake();
  }

  /** Stops reading. The generation goes on, and `save` still tells where to continue. */
  close() {
    this.#closed = true;
    this.#connection?.abort();
    this.#wake();
  }

  /** Stops the generation, now or as soon as the stream's id is known. Its `cancelled` record still comes. */
  async cancel() {
    const streamId = await this.#identified;
    if (streamId) await this.#client.cancel(streamId);
  }

  /** @returns {AsyncGenerator<JournalRecord>} */
  async *[Symbol.asyncIterator]() {
    try {
      while (!this.#closed && !this.#position?.ended) {
        const failure = yield* this.#oneConnection();
        if (this.#closed || this.#position?.ended) return;
        if (!failure.retryable) throw failure;
        await this.#waitAfter(failure);
      }
    } finally {
      this.#identify(null);
    }
  }

  /** @returns {AsyncGenerator<JournalRecord, MidstreamError>} what ended the connection */
  async *#oneConnection() {
    const abort = new AbortController();
    this.#connection = abort;
    const silence = new Silence(abort);
    try {
      this.#onStatus({ phase: "connecting" });
      // Each connection may go over another wire: a position is one on all of them.
      const connection = await (this.#transport ?? this.#client.transport).connect(this.#client, {
        unopened: this.#position ? null : this.#unopened,
        position: this.#position,
        signal: abort.signal,
      });
      if (connection.nothingLeft) {
        return new MidstreamError("ended_early", "The gateway has nothing more, yet the stream has not ended.");
      }
      silence.allow(3 * (connection.heartbeatMs ?? DEFAULT_HEARTBEAT_MS));
      this.#learnId(connection.streamId);
      this.#onStatus({ phase: "open" });
      for await (const batch of connection.batches) {
        silence.heard();
        for (const event of batch) {
          const record = this.#accept(event);
          if (record) yield record;
          if (abort.signal.aborted || this.#position?.ended) return abort.signal.reason;
        }
      }
      return new MidstreamError("interrupted", "The connection ended before the stream did.");
    } catch (error) {
      if (abort.signal.aborted) return abort.signal.reason;
      if (error instanceof MidstreamError) return error;
      throw error;
    } finally {
      silence.end();
      abort.abort();
      this.#connection = null;
    }
  }

  /**
   * Checks an event against the position and moves the position onto it. Null for what is no record.
   * @param {SseEvent} event
   * @returns {JournalRecord | null}
   */
  #accept({ event, id, data: told }) {
    const data = typeof told === "string" ? parseObject(told) : /** @type {Record<string, any>} */ (told);
    if (event === "expired") {
      // The last word to a reader that was overtaken by eviction: a 409 that came too late for a status.
      throw new MidstreamError("cursor_expired", messageFor(data, 409), { status: 409, body: data });
    }
    if (id === null) return null;
    const due = (this.#position?.seq ?? 0) + 1;
    if (Number(id) !== due || data.seq !== due) {
      throw new MidstreamError("broken_stream", `Record ${id} came where ${due} was due.`);
    }
    if (event === "start") this.#learnId(data.stream_id);
    if (!this.#streamId) throw new MidstreamError("broken_stream", "The stream did not say its id.");
    this.#position = { streamId: this.#streamId, seq: due, ended: TERMINAL_EVENTS.has(event) };
    this.#backoff.progress();
    return { seq: due, event, data };
  }

  /** @param {string | null | undefined} streamId */
  #learnId(streamId) {
    if (!streamId) return;
    if (this.#streamId && this.#streamId !== streamId) {
      throw new MidstreamError("broken_stream", "Another stream answered.");
    }
    this.#streamId = streamId;
    this.#identify(streamId);
  }

  /** @param {MidstreamError} failure */
  async #waitAfter(failure) {
    const delayMs = this.#pauseMs ?? this.#backoff.next(failure.retryAfterMs);
    this.#pauseMs = null;
    if (delayMs === null) {
      throw new MidstreamError("gave_up", failure.message, { status: failure.status, cause: failure });
    }
    const over = new Promise((/** @type {(value?: unknown) => void} */ resolve) => {
      const timer = setTimeout(resolve, delayMs);
      this.#wake = () => (clearTimeout(timer), resolve());
    });
    this.#onStatus({ phase: "waiting", delayMs, cause: failure });
    await over;
    this.#wake = () => {};
  }
}

/** Aborts a connection that has been silent for too long, which is how a dead peer looks from here. */
class Silence {
  #abort;
  #limitMs = 3 * DEFAULT_HEARTBEAT_MS;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #timer;

  /** @param {AbortController} abort */
  constructor(abort) {
    this.#abort = abort;
    this.heard();
  }

  /** @param {number} limitMs */
  allow(limitMs) {
    this.#limitMs = limitMs;
    this.heard();
  }

  heard() {
    clearTimeout(this.#timer);
    if (this.#limitMs === Infinity) return;
    const silent = new MidstreamError("silent", `Nothing was heard for ${this.#limitMs / 1000} seconds.`);
    this.#timer = setTimeout(() => this.#abort.abort(silent), this.#limitMs);
  }

  end() {
    clearTimeout(this.#timer);
  }
}

/** A gateway, and the calls that need no stream of their own. */
export class Client {
  #key;

  /**
   * @param {object} [options]
   * @param {string | URL} [options.baseUrl] the gateway's address, ending in a slash; default: beside the page
   * @param {string | (() => string | null | Promise<string | null>)} [options.key] asked at every attempt,
   *   so that a key that was rotated meanwhile is used
   * @param {Transport} [options.transport]
   * @param {typeof globalThis.fetch} [options.fetch]
   * @param {typeof globalThis.WebSocket} [options.WebSocket]
   */
  constructor({ baseUrl = "./", key = "", transport = pageTransport, fetch = globalThis.fetch, WebSocket } = {}) {
    this.baseUrl = new URL(baseUrl, globalThis.location?.href);
    this.transport = transport;
    this.#key = key;
    /** Whether a browser counts this client's connections; not where they are made by something else. */
    this.inPage = Boolean(globalThis.location && (WebSocket || fetch === globalThis.fetch));
    this.fetch = fetch.bind(globalThis);
    this.socket = new SharedSocket(this, WebSocket ?? globalThis.WebSocket);
  }

  /** The caller's key as it is now; empty: none. */
  async key() {
    return (typeof this.#key === "function" ? await this.#key() : this.#key) || "";
  }

  /**
   * Asks for a generation. The request is the body of `POST /v1/stream`.
   * @param {object} request
   * @param {StreamOptions & {idempotencyKey?: string}} [options]
   */
  open(request, { idempotencyKey = randomKey(), ...options } = {}) {
    return new Stream(this, { request, idempotencyKey }, options);
  }

  /**
   * Goes on where `Stream.save` was taken; `{streamId, seq: 0, ended: false}` follows from the start.
   * @param {Position | Unopened} saved
   * @param {StreamOptions} [options]
   */
  reopen(saved, options = {}) {
    return new Stream(this, saved, options);
  }

  /** @param {string} streamId @returns {Promise<Record<string, any>>} */
  state(streamId) {
    return this.#json("GET", `${streamPath(streamId)}/state`);
  }

  /** @param {string} streamId @returns {Promise<Record<string, any>>} */
  snapshot(streamId) {
    return this.#json("GET", `${streamPath(streamId)}/snapshot`);
  }

  /** @param {string} streamId @param {number} seq @returns {Promise<Record<string, any>>} the state after it */
  ack(streamId, seq) {
    if (this.transport.ack) return this.transport.ack(this, streamId, seq);
    return this.#json("POST", `${streamPath(streamId)}/ack`, { seq });
  }

  /**
   * Over the shared WebSocket where there is one to be had: it is there when all connections are taken.
   * @param {string} streamId @returns {Promise<Record<string, any>>}
   */
  async cancel(streamId) {
    try {
      if (this.inPage) return await this.socket.ask({ type: "cancel", stream_id: streamId }, SOCKET_TIMEOUT_MS);
    } catch (error) {
      if (!(error instanceof MidstreamError && error.retryable)) throw error;
    }
    return this.#json("POST", `${streamPath(streamId)}/cancel`, {});
  }

  /** @returns {Promise<string[]>} */
  async models() {
    const { data } = await this.#json("GET", "v1/models");
    return data.map((/** @type {{id: string}} */ model) => model.id);
  }

  /** The worker pool: workers, queue, leases, ledger. For keys marked `:admin`. */
  pool() {
    return this.#json("GET", "v1/pool");
  }

  /**
   * One HTTP exchange: a 2xx response, else a `MidstreamError`.
   * @param {string} method
   * @param {string} path relative to the gateway's address
   * @param {{body?: object, headers?: Record<string, string>, signal?: AbortSignal}} [options] `body` goes as JSON,
   *   unless it is bytes
   */
  async request(method, path, { body, headers = {}, signal } = {}) {
    const key = await this.key();
    /** @type {Record<string, string>} */
    const sent = { ...headers };
    if (key) sent.Authorization = `Bearer ${key}`;
    const bytes = body instanceof Uint8Array;
    if (body && !bytes) sent["Content-Type"] = "application/json";
    const init = { method, headers: sent, body: bytes ? /** @type {any} */ (body) : body && JSON.stringify(body), signal };
    const response = await this.fetch(new URL(path, this.baseUrl), { ...init, cache: "no-store" }).catch((cause) => {
      throw new MidstreamError("unreachable", "The gateway cannot be reached.", { cause });
    });
    if (!response.ok) throw await refusal(response);
    return response;
  }

  /** @param {string} method @param {string} path @param {object} [body] */
  async #json(method, path, body) {
    const response = await this.request(method, path, { body, signal: AbortSignal.timeout(UNARY_TIMEOUT_MS) });
    return response.json().catch((cause) => {
      throw new MidstreamError("interrupted", "The answer was cut or is not JSON.", { cause });
    });
  }
}

function streamPath(/** @type {string} */ streamId) {
  return `v1/stream/${encodeURIComponent(streamId)}`;
}

/** `crypto.randomUUID` exists in secure contexts alone; a gateway on a home network is not one. */
function randomKey() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (b) => b.toString(16).padStart(2, "0")).join("");
}

/** @param {Response} response */
async function refusal(response) {
  const body = await response.json().catch(() => ({}));
  return refusalOf(body, response.status, parseRetryAfter(response.headers.get("Retry-After")));
}

/** Seconds or an HTTP date (RFC 9110, 10.2.3), as milliseconds from now. @param {string | null} value */
function parseRetryAfter(value) {
  if (!value) return 0;
  const ms = /^\d+$/.test(value.trim()) ? Number(value) * 1000 : Date.parse(value) - Date.now();
  return Number.isFinite(ms) ? Math.max(0, ms) : 0;
}

/** @param {string} text @returns {Record<string, any>} */
function parseObject(text) {
  try {
    const value = JSON.parse(text);
    if (value && typeof value === "object" && !Array.isArray(value)) return value;
  } catch {
    // reported below
  }
  throw new MidstreamError("broken_stream", "An event of the stream is not a JSON object.");
}
