// @ts-check
/**
 * One reader of a stream as the page knows it: its text, its position, and each connection it has had.
 * It draws nothing; whoever shows it listens.
 *
 * @typedef {import("./midstream.js").Client} Client
 * @typedef {import("./midstream.js").Position} Position
 * @typedef {import("./midstream.js").Unopened} Unopened
 * @typedef {import("./midstream.js").JournalRecord} JournalRecord
 *
 * @typedef {object} ConnectionNote What is told about one connection, once its first record is here.
 * @property {"open" | "cut" | "lost" | "reload" | "snapshot" | "switch"} kind how it came about
 * @property {string} [over] the transport, where it is not the usual one
 * @property {number} after the position it started from
 * @property {number} chars length of the text at that moment, in UTF-16 units
 * @property {number | null} firstTokenMs from the request to its first token; null while there is none
 *
 * @typedef {"connecting" | "live" | "waiting" | "done" | "failed" | "cancelled" | "refused"} PhaseName
 * @typedef {object} Phase
 * @property {PhaseName} name
 * @property {number} [delayMs] with `waiting`; 0: it is being tried now
 * @property {boolean} [onPurpose] with `waiting`: the cut button, not a fault
 * @property {string} [code] with `waiting`, `failed` and `refused`
 * @property {string} [message] with `failed` and `refused`, and with `waiting` where the gateway gave a reason
 * @property {boolean} [retryable] with `failed`
 *
 * @typedef {object} SavedReader
 * @property {Position | Unopened} position
 * @property {number} chars
 * @property {number} reasoningChars
 * @property {ConnectionNote[]} connections
 * @property {Phase} phase
 * @property {number} tokens
 *
 * @typedef {object} Listener
 * @property {(reader: Reader) => void} rewritten the whole text is another one
 * @property {(reader: Reader, record: JournalRecord) => void} received
 * @property {(reader: Reader, note: ConnectionNote) => void} connected before its first record
 * @property {(reader: Reader) => void} noted a connection's facts have changed
 * @property {(reader: Reader) => void} turned the phase is another one
 */
import { MidstreamError, TERMINAL_EVENTS } from "./midstream.js";

export class Reader {
  text = "";
  reasoning = "";
  tokens = 0;
  /** @type {ConnectionNote[]} */
  connections = [];
  /** @type {Phase} */
  phase = { name: "connecting" };
  /** Text of the records this page has seen, by seq. @type {Map<number, string>} */
  seen = new Map();
  /** What its next connection goes over, where that is not the usual transport. @type {string | undefined} */
  over;
  /** Goes on from where the last attempt failed. */
  retry = () => {};

  #client;
  #listener;
  /** @type {import("./midstream.js").Stream | null} */
  #stream = null;
  /** @type {SavedReader | null} */
  #unrestored = null;
  /** @type {ConnectionNote["kind"]} */
  #nextKind = "open";
  #cutting = false;
  #switching = false;
  #connectingSince = 0;
  #firstIsDue = true;

  /** @param {Client} client @param {number} number @param {Listener} listener */
  constructor(client, number, listener) {
    this.#client = client;
    this.number = number;
    this.#listener = listener;
  }

  get streamId() {
    const position = this.#unrestored?.position;
    return position && "seq" in position ? position.streamId : (this.#stream?.streamId ?? null);
  }

  get seq() {
    const position = this.#unrestored?.position ?? this.#stream?.save();
    return position && "seq" in position ? position.seq : 0;
  }

  get ended() {
    return TERMINAL_EVENTS.has(this.phase.name);
  }

  get connected() {
    return this.phase.name === "live";
  }

  /** @param {object} request */
  open(request) {
    this.#run(this.#client.open(request).save(), "open");
  }

  /** @param {string} streamId */
  followFromStart(streamId) {
    this.#run({ streamId, seq: 0, ended: false }, "open");
  }

  /**
   * Takes up what another page saved. The text comes back from the snapshot, cut to what that page had
   * seen; the records after it come from the journal, so that the seam is at the exact token.
   * @param {SavedReader} saved
   */
  async restore(saved) {
    if ("request" in saved.position) return this.#run(saved.position, "open");
    this.#unrestored = saved;
    this.#turn({ name: "connecting" });
    this.retry = () => this.restore(saved);
    try {
      const snapshot = await this.#wholeSnapshot(saved.position.streamId);
      if (this.#unrestored !== saved) return;
      this.#unrestored = null;
      this.text = snapshot.text.slice(0, saved.chars);
      this.reasoning = (snapshot.reasoning ?? "").slice(0, saved.reasoningChars);
      this.connections = saved.connections;
      this.tokens = saved.tokens;
      this.#listener.rewritten(this);
      this.#run(saved.position, "reload");
      if (saved.position.ended) this.#turn(saved.phase);
    } catch (error) {
      this.#refuse(error);
    }
  }

  /** After a position that can no longer be honoured: the whole text so far, then on from there. */
  async takeSnapshot() {
    const streamId = this.streamId;
    if (!streamId) return;
    try {
      const snapshot = await this.#wholeSnapshot(streamId);
      const ended = TERMINAL_EVENTS.has(snapshot.status);
      this.text = snapshot.text;
      this.reasoning = snapshot.reasoning ?? "";
      this.tokens = Math.max(0, snapshot.seq - (ended ? 2 : 1));
      this.connections = [{ kind: "snapshot", after: 0, chars: 0, firstTokenMs: null }];
      this.#listener.rewritten(this);
      this.#run({ streamId, seq: snapshot.seq, ended }, "snapshot");
      if (ended) this.#turn({ name: snapshot.status, ...snapshot.error });
    } catch (error) {
      this.#refuse(error);
    }
  }

  /** @param {string} streamId */
  async #wholeSnapshot(streamId) {
    const snapshot = await this.#client.snapshot(streamId);
    if (snapshot.complete) return snapshot;
    throw new MidstreamError("snapshot_incomplete", "The beginning of this answer is no longer kept.");
  }

  /** Drops the connection as a lost network would. @param {number} pauseMs until the next one */
  cut(pauseMs) {
    this.#cutting = true;
    this.#stream?.drop(pauseMs);
  }

  /** Goes on over another transport at once. */
  switchOver() {
    if (!this.connected) return;
    this.#switching = true;
    this.cut(0);
  }

  reconnectNow() {
    this.#stream?.reconnectNow();
  }

  async stop() {
    if (this.#stream) await this.#stream.cancel();
    else if (this.streamId) await this.#client.cancel(this.streamId);
  }

  close() {
    this.#unrestored = null;
    this.#stream?.close();
  }

  /** @returns {SavedReader | null} */
  save() {
    if (this.#unrestored) return this.#unrestored;
    if (!this.#stream) return null;
    return {
      position: this.#stream.save(),
      chars: this.text.length,
      reasoningChars: this.reasoning.length,
      connections: this.connections,
      phase: this.phase,
      tokens: this.tokens,
    };
  }

  /** @param {Position | Unopened} position @param {ConnectionNote["kind"]} kind */
  async #run(position, kind) {
    const stream = this.#client.reopen(position, { onStatus: (status) => this.#follow(stream, status) });
    this.#stream?.close();
    this.#stream = stream;
    this.#nextKind = kind;
    this.retry = () => this.#run(stream.save(), this.connections.length > 0 ? "lost" : "open");
    try {
      for await (const record of stream) {
        if (stream !== this.#stream) return;
        this.#take(record);
      }
    } catch (error) {
      if (stream === this.#stream) this.#refuse(error);
    }
  }

  /** @param {import("./midstream.js").Stream} stream @param {import("./midstream.js").Status} status */
  #follow(stream, { phase, delayMs, cause }) {
    if (stream !== this.#stream) return;
    if (phase === "connecting") {
      this.#connectingSince = performance.now();
      this.#firstIsDue = true;
      this.#turn(this.phase.name === "waiting" ? { ...this.phase, delayMs: 0 } : { name: "connecting" });
    } else if (phase === "waiting") {
      const onPurpose = this.#cutting;
      if (onPurpose) this.#nextKind = this.#switching ? "switch" : "cut";
      this.#cutting = this.#switching = false;
      // Where the gateway has answered it has said what is wrong, such as a store that is away.
      const message = cause?.status ? cause.message : undefined;
      this.#turn({ name: "waiting", delayMs, onPurpose, code: cause?.code, message });
    } else {
      this.#turn({ name: "live" });
    }
  }

  /** @param {JournalRecord} record */
  #take(record) {
    if (this.#firstIsDue) this.#noteConnection(record.seq - 1);
    if (record.event !== "start") this.#noteFirstToken();
    const { delta, reasoning } = record.data;
    if (record.event === "token" && !record.data.choice) {
      this.tokens++;
      this.text += delta ?? "";
      this.reasoning += reasoning ?? "";
    }
    this.seen.set(record.seq, record.event === "token" ? (delta || reasoning || "") : record.event);
    this.#listener.received(this, record);
    if (TERMINAL_EVENTS.has(record.event)) this.#end(record);
  }

  /** @param {number} after */
  #noteConnection(after) {
    const note = { kind: this.#nextKind, after, chars: this.text.length, firstTokenMs: null, over: this.over };
    this.#firstIsDue = false;
    this.#nextKind = "lost";
    this.connections.push(note);
    this.#listener.connected(this, note);
  }

  #noteFirstToken() {
    const note = this.connections.at(-1);
    if (!note || note.firstTokenMs !== null) return;
    note.firstTokenMs = performance.now() - this.#connectingSince;
    this.#listener.noted(this);
  }

  /** @param {JournalRecord} record */
  #end({ event, data }) {
    this.#turn({ name: /** @type {PhaseName} */ (event), ...data.error });
  }

  /** @param {unknown} error */
  #refuse(error) {
    if (!(error instanceof MidstreamError)) throw error;
    const code = error.status === 401 ? "unauthorized" : error.code;
    this.#turn({ name: "refused", code, message: error.message });
  }

  /** @param {Phase} phase */
  #turn(phase) {
    this.phase = phase;
    this.#listener.turned(this);
  }
}
