// @ts-check
/** What every transport of the browser client needs: its errors, and the cursor. */

/** What becomes of a request behind the gateway, which could be asked. Asked again it would ask there again. */
const FAILURES = new Set([
  "writer_lost",
  "upstream_unreachable",
  "upstream_timeout",
  "upstream_truncated",
  "upstream_lost",
  "upstream_malformed",
  "upstream_too_large",
  "upstream_error",
  "producer_error",
  "ChatStreamDiverged",
  "pool_faulted",
  "pool_expired",
  "pool_cancelled",
]);

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
    if (FAILURES.has(this.code)) return false;
    const transient = ["unreachable", "interrupted", "silent", "not_a_stream"].includes(this.code);
    return transient || this.status === 408 || this.status === 429 || this.status >= 500;
  }
}

/** The cursor that claims "everything up to `seq` of this stream was dispatched". */
export function encodeCursor(/** @type {string} */ streamId, /** @type {number} */ seq) {
  const bytes = new TextEncoder().encode(JSON.stringify({ v: 1, s: streamId, l: seq }));
  return btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

/** @param {Record<string, any>} body @param {number} status */
export function messageFor(body, status) {
  if (typeof body?.detail === "string") return body.detail;
  if (body?.error === "cursor_expired") return `Records before ${body.oldest_available} are no longer kept.`;
  if (body?.error === "cursor_ahead") return `The stream ends at record ${body.highest_seq}, before this position.`;
  return `The gateway answered ${status}.`;
}

/**
 * The error that a transport was told, whatever its wire is.
 * @param {Record<string, any>} body `error` and its facts, as HTTP has them
 * @param {number} status
 * @param {number} [retryAfterMs]
 */
export function refusalOf(body, status, retryAfterMs = 0) {
  const code = typeof body?.error === "string" ? body.error : `http_${status}`;
  return new MidstreamError(code, messageFor(body, status), { status, body, retryAfterMs });
}
