// @ts-check
/**
 * Connect with JSON (connectrpc.com/docs/protocol): `inference.InferenceService/Generate` by a streaming POST.
 *
 * It carries the text of an answer and how it ended, and nothing else of its records: a request is a prompt and maybe a
 * model, and what is told here as a record is put together from that.
 *
 * @typedef {import("./midstream.js").Transport} Transport
 * @typedef {import("./midstream.js").SseEvent} SseEvent
 * @typedef {{token?: string, tokenIndex?: number, isFinal?: boolean}} Generated
 */
import { MidstreamError, refusalOf } from "./wire.js";

const PATH = "inference.InferenceService/Generate";
const END = 2;
const HEAD_BYTES = 5;
const ERROR_INFO = "google.rpc.ErrorInfo";
/** For what has no status of its own over HTTP; by these a client decides whether to come back. */
const STATUSES = /** @type {Record<string, number>} */ ({
  invalid_argument: 400,
  unauthenticated: 401,
  permission_denied: 403,
  not_found: 404,
  already_exists: 409,
  failed_precondition: 403,
  out_of_range: 409,
  resource_exhausted: 429,
  unavailable: 503,
});

/** @type {Transport} */
export const connectTransport = {
  async connect(client, { unopened, position, signal }) {
    const request = /** @type {{prompt?: string, model?: string}} */ (unopened?.request ?? {});
    if (unopened && typeof request.prompt !== "string") {
      throw new MidstreamError("bad_request", "Over Connect a request is a prompt.", { status: 400 });
    }
    const seq = position?.seq ?? 0;
    /** @type {Record<string, string>} */
    const headers = { "Content-Type": "application/connect+json", "Connect-Protocol-Version": "1" };
    // Another stream behind the name is refused, not read.
    if (position) headers["Midstream-Stream-Id"] = position.streamId;
    const asked = unopened
      ? { prompt: request.prompt, model: request.model ?? "", sessionId: unopened.idempotencyKey }
      : { sessionId: position?.streamId, resumeFromToken: Math.max(0, seq - 1) };
    const response = await client.request("POST", PATH, { body: enveloped(asked), headers, signal });
    const envelopes = readEnvelopes(response);
    const streamId = response.headers.get("Midstream-Stream-Id");
    // A refusal has no stream to name, and comes in place of the first message.
    if (!streamId) for await (const several of envelopes) several.forEach(({ told }) => end(told));
    return { streamId, heartbeatMs: Infinity, nothingLeft: false, batches: events(envelopes, streamId ?? "", seq) };
  },
};

/** @param {object} message */
function enveloped(message) {
  const data = new TextEncoder().encode(JSON.stringify(message));
  const bytes = new Uint8Array(HEAD_BYTES + data.length);
  new DataView(bytes.buffer).setUint32(1, data.length);
  bytes.set(data, HEAD_BYTES);
  return bytes;
}

/** @param {Response} response @returns {AsyncGenerator<{flags: number, told: any}[]>} what came whole with each read */
async function* readEnvelopes(response) {
  if (!response.body) return;
  const reader = response.body.getReader();
  let left = new Uint8Array();
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((cause) => {
        throw new MidstreamError("interrupted", "The connection was lost.", { cause });
      });
      if (done) return;
      const joined = new Uint8Array(left.length + value.length);
      joined.set(left);
      joined.set(value, left.length);
      const whole = [];
      let at = 0;
      for (let size; (size = sizeAt(joined, at)) !== null; at += size) {
        const data = joined.subarray(at + HEAD_BYTES, at + size);
        whole.push({ flags: joined[at], told: JSON.parse(new TextDecoder().decode(data)) });
      }
      left = joined.slice(at);
      yield whole;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Bytes of the envelope that begins here; null while it is not whole. @param {Uint8Array} bytes @param {number} at */
function sizeAt(bytes, at) {
  if (bytes.length - at < HEAD_BYTES) return null;
  const size = HEAD_BYTES + new DataView(bytes.buffer, bytes.byteOffset + at).getUint32(1);
  return bytes.length - at < size ? null : size;
}

/**
 * @param {AsyncIterable<{flags: number, told: any}[]>} envelopes @param {string} streamId @param {number} seq
 * @returns {AsyncGenerator<SseEvent[]>}
 */
async function* events(envelopes, streamId, seq) {
  if (seq === 0) yield [record("start", { seq: 1, stream_id: streamId, model: "" })];
  for await (const several of envelopes) {
    const last = several.find(({ flags }) => flags & END);
    yield several.filter((it) => it !== last).map(({ told }) => recordOf(told));
    if (last) yield end(last.told);
  }
}

/** A message as the record it stands for; the first token is record 2. @param {Generated} told */
function recordOf({ token = "", tokenIndex = 0, isFinal = false }) {
  const seq = tokenIndex + 2;
  return isFinal
    ? record("done", { seq, done: true, finish_reason: null })
    : record("token", { seq, delta: token, done: false });
}

/** @param {string} event @param {{seq: number} & Record<string, any>} data @returns {SseEvent} */
function record(event, data) {
  return { event, id: String(data.seq), data };
}

/**
 * The end of a stream: of an answer that is complete nothing more, of one that is not its last record. Throws a refusal.
 * @param {{error?: any}} told @returns {SseEvent[]}
 */
function end({ error }) {
  if (!error) return [];
  const { reason = error.code, metadata = {} } = errorInfo(error) ?? {};
  const code = reason.toLowerCase();
  if ("token_index" in metadata) {
    const last = Number(metadata.token_index) + 2;
    if (code === "cancelled") return [record("cancelled", { seq: last, done: true, reason: metadata.reason })];
    const failure = { code, message: error.message, retryable: metadata.retryable === "true" };
    return [record("failed", { seq: last, done: true, error: failure })];
  }
  const facts = Object.fromEntries(Object.entries(metadata).map(([name, value]) => [name, numberIn(value)]));
  throw refusalOf({ ...facts, error: code, detail: error.message }, STATUSES[error.code] ?? 500);
}

/** @param {string} value */
function numberIn(value) {
  return /^\d+$/.test(value) ? Number(value) : value;
}

/**
 * The google.rpc.ErrorInfo of an error: reason is field 1, metadata field 3, a map of texts.
 * @param {{details?: {type: string, value: string}[]}} error
 * @returns {{reason: string, metadata: Record<string, string>} | null}
 */
function errorInfo({ details = [] }) {
  const detail = details.find(({ type }) => type === ERROR_INFO);
  if (!detail) return null;
  const bytes = Uint8Array.from(atob(detail.value.replaceAll("-", "+").replaceAll("_", "/")), (c) => c.charCodeAt(0));
  /** @type {Record<string, string>} */
  const metadata = {};
  let reason = "";
  for (const [field, value] of fields(bytes)) {
    if (field === 1) reason = text(value);
    if (field === 3) {
      const entry = new Map(fields(value));
      metadata[text(entry.get(1))] = text(entry.get(2));
    }
  }
  return { reason, metadata };
}

/** Fields of a protobuf message that has only such as know their length. @param {Uint8Array} bytes */
function* fields(bytes) {
  for (let at = 0; at < bytes.length; ) {
    const [tag, afterTag] = varint(bytes, at);
    const [size, begin] = varint(bytes, afterTag);
    at = begin + size;
    yield /** @type {[number, Uint8Array]} */ ([tag >> 3, bytes.subarray(begin, at)]);
  }
}

/** @param {Uint8Array} bytes @param {number} at @returns {[number, number]} the number, and where it ends */
function varint(bytes, at) {
  let value = 0;
  for (let shift = 0; ; shift += 7) {
    const byte = bytes[at++] ?? 0;
    value |= (byte & 0x7f) << shift;
    if (byte < 0x80) return [value, at];
  }
}

function text(/** @type {Uint8Array | undefined} */ bytes) {
  return bytes ? new TextDecoder().decode(bytes) : "";
}
