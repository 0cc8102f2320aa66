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
 * @typedef {{event: string, id: string | null, data: string}} SseEvent `id` is the one in this very event.
 *
 * @typedef {object} Connection What a transport hands back.
 * @property {string | null} streamId as the gateway named it, where the transport can tell
 * @property {number | null} heartbeatMs the longest silence of a healthy gateway
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

export const TERMINAL_EVENTS = new Set(["done", "failed", "cancelled"]);
const DEFAULT_HEARTBEAT_MS = 15_000;
const UNARY_TIMEOUT_MS = 10_000;

/**
 * Every failure this module throws. `code` is the gateway's own code where it sent one; else
 * `unreachable`, `interrupted`, `silent` or `not_a_stream` (these four are retried before they are thrown,
 * the last one of them as the `cause` of `gave_up`), `ended_early` (the gateway says that nothing is left,
 * but no terminal record was seen) or `broken_stream` (a gap, a repeat or an event that does not parse).
 */
export class MidstreamError extends Error {
  /**
   * @param {string} code
   * @param {string} message
   * @param {{status?: number, body?: Record<string, any>, retryAfterMs?: number, cause?: unknown}} [facts]
   */
  constructor(code, message, { status = 0, body = {}, retryAfterMs = 0, cause } = {}) {
    super(message, { cause });
    this.name = "MidstreamError";
    this.code = code;
    this.status = status;
    this.body = body;
    this.retryAfterMs = retryAfterMs;
  }

  /** Whether another connection with the same position may do better. */
  get retryable() {
    const transient = ["unreachable", "interrupted", "silent", "not_a_stream"].includes(this.code);
    return transient || this.status === 408 || this.status === 429 || this.status >= 500;
  }
}

/** The cursor that claims "everything up to `seq` of this stream was dispatched". */
export function encodeCursor(/** @type {string} */ streamId, /** @type {number} */ seq) {
  const bytes = new TextEncoder().encode(JSON.stringify({ v: 1, s: streamId, l: seq }));
  return btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

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
    this.#transport = transport ?? client.transport;
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
      const connection = await this.#transport.connect(this.#client, {
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
  #accept({ event, id, data: text }) {
    const data = parseObject(text);
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
   */
  constructor({ baseUrl = "./", key = "", transport = sseTransport, fetch = globalThis.fetch } = {}) {
    this.baseUrl = new URL(baseUrl, globalThis.location?.href);
    this.transport = transport;
    this.#key = key;
    this.fetch = fetch.bind(globalThis);
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
    return this.#json("POST", `${streamPath(streamId)}/ack`, { seq });
  }

  /** @param {string} streamId @returns {Promise<Record<string, any>>} */
  cancel(streamId) {
    return this.#json("POST", `${streamPath(streamId)}/cancel`, {});
  }

  /** @returns {Promise<string[]>} */
  async models() {
    const { data } = await this.#json("GET", "v1/models");
    return data.map((/** @type {{id: string}} */ model) => model.id);
  }

  /**
   * One HTTP exchange: a 2xx response, else a `MidstreamError`.
   * @param {string} method
   * @param {string} path relative to the gateway's address
   * @param {{body?: object, headers?: Record<string, string>, signal?: AbortSignal}} [options]
   */
  async request(method, path, { body, headers = {}, signal } = {}) {
    const key = typeof this.#key === "function" ? await this.#key() : this.#key;
    /** @type {Record<string, string>} */
    const sent = { ...headers };
    if (key) sent.Authorization = `Bearer ${key}`;
    if (body) sent["Content-Type"] = "application/json";
    const init = { method, headers: sent, body: body && JSON.stringify(body), signal };
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
  const code = typeof body?.error === "string" ? body.error : `http_${response.status}`;
  const retryAfterMs = parseRetryAfter(response.headers.get("Retry-After"));
  return new MidstreamError(code, messageFor(body, response.status), { status: response.status, body, retryAfterMs });
}

/** @param {Record<string, any>} body @param {number} status */
function messageFor(body, status) {
  if (typeof body?.detail === "string") return body.detail;
  if (body?.error === "cursor_expired") return `Records before ${body.oldest_available} are no longer kept.`;
  if (body?.error === "cursor_ahead") return `The stream ends at record ${body.highest_seq}, before this position.`;
  return `The gateway answered ${status}.`;
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
