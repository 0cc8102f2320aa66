// @ts-check
/**
 * What the page says about a reader, in one place.
 *
 * @typedef {import("./reader.js").Reader} Reader
 * @typedef {import("./reader.js").ConnectionNote} ConnectionNote
 */

/** @param {number} n @param {string} noun */
export function count(n, noun) {
  return `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
}

/** @param {number} bytes */
export function size(bytes) {
  if (bytes < 1024) return `${bytes} B`;
  return bytes < 1024 ** 2 ? `${(bytes / 1024).toFixed(1)} KiB` : `${(bytes / 1024 ** 2).toFixed(1)} MiB`;
}

/** @param {number} ms */
function duration(ms) {
  return ms < 10 ? `${ms.toFixed(1)} ms` : ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

/** @param {string} text */
function sentence(text) {
  return `${text.charAt(0).toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;
}

/** The short words of a state. @param {Reader} reader */
export function stateText({ phase, connections, tokens }) {
  const last = connections.at(-1);
  switch (phase.name) {
    case "connecting":
      return connections.length > 0 ? "Reconnecting" : "Connecting";
    case "waiting":
      if (phase.onPurpose) return "Cut, reconnecting";
      if (phase.message) return "Gateway cannot answer";
      return phase.code === "unreachable" ? "Gateway unreachable" : "Connection lost";
    case "live":
      return last && connections.length > 1 ? `Resumed at ${(last.after + 1).toLocaleString("en")}` : "Live";
    case "done":
      return `Done, ${count(tokens, "token")}`;
    case "cancelled":
      return `Cancelled after ${count(tokens, "token")}`;
    case "failed":
      return "Failed";
    default:
      return REFUSALS[phase.code ?? ""]?.state ?? "Stopped";
  }
}

/** @type {Record<string, {state: string, text?: string}>} */
const REFUSALS = {
  cursor_expired: { state: "Position expired" },
  cursor_ahead: { state: "Position refused" },
  snapshot_incomplete: { state: "Beginning gone" },
  unknown_stream: { state: "Stream gone", text: "The gateway no longer has this stream." },
  unauthorized: { state: "Key needed", text: "Enter an API key above to go on." },
  gave_up: { state: "Gateway unreachable", text: "The gateway did not answer after several tries." },
  unreachable: { state: "Gateway unreachable", text: "The gateway does not answer." },
  upstream_unreachable: { state: "Upstream unreachable" },
};

/** A longer word about a state that calls for one, or null. @param {Reader} reader */
export function noticeText({ phase, seq }) {
  if (phase.name === "failed") return `${phase.message ?? "The generation failed."}`;
  if (phase.name === "waiting" && !phase.onPurpose) {
    const next = `Trying again ${phase.delayMs ? `in ${duration(phase.delayMs)}` : "now"}. This reader keeps its place.`;
    return phase.message ? `${sentence(phase.message)} ${next}` : next;
  }
  if (phase.name !== "refused") return null;
  if (phase.code === "cursor_expired" || phase.code === "cursor_ahead") {
    return `${phase.message} This reader is at ${seq}, and going on from elsewhere would be a gap.`;
  }
  return REFUSALS[phase.code ?? ""]?.text ?? (phase.message ? sentence(phase.message) : null);
}

const CAUSES = { open: "start", cut: "cut", lost: "loss", reload: "reload", snapshot: "snapshot", switch: "switch" };

/** @param {ConnectionNote} note @param {number} index from 0 */
export function connectionTitle(note, index) {
  if (index === 0) return note.kind === "snapshot" ? "Snapshot of the text so far" : "First connection";
  return `Connection ${index + 1}, after the ${CAUSES[note.kind]}`;
}

/** @param {ConnectionNote} note @returns {[string, string][]} */
export function connectionFacts(note) {
  const { after, firstTokenMs } = note;
  /** @type {[string, string][]} */
  const facts = [];
  if (note.over) facts.push(["over", note.over]);
  if (after > 0) facts.push(["goes on at", `record ${(after + 1).toLocaleString("en")}`]);
  if (firstTokenMs !== null) facts.push(["first token", `after ${duration(firstTokenMs)}`]);
  if (after > 0) facts.push(["not paid for again", count(after - 1, "token")]);
  return facts;
}
