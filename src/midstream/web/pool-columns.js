// @ts-check
/**
 * What the page says about each row of `GET /v1/pool`.
 *
 * @typedef {Record<string, any>} Row
 * @typedef {import("./pool-table.js").Column<Row>} Column
 */
import { count, size } from "./wording.js";

const LEASE_TERM = 150;
const CHARS_PER_TOKEN = 4;

/** A time that has passed, in its largest unit. @param {number} seconds */
export function age(seconds) {
  const passed = Math.max(0, seconds);
  if (passed < 60) return `${Math.floor(passed)} s`;
  if (passed < 3_600) return `${Math.floor(passed / 60)} min`;
  return passed < 86_400 ? `${Math.floor(passed / 3_600)} h` : `${Math.floor(passed / 86_400)} d`;
}

export const number = (/** @type {number} */ value) => value.toLocaleString("en").replace("-", "−");

function models(/** @type {Row} */ { models, more_models }) {
  if (models.length === 0) return "any";
  return more_models > 0 ? `${models.join(", ")} and ${number(more_models)} more` : models.join(", ");
}

/** @type {Column[]} */
const WORKERS = [
  {
    title: "Worker",
    kind: "main",
    cell: ({ name, owner, here, running }) => ({ text: name, note: owner, tone: running.length ? "live" : here ? "good" : "off" }),
  },
  { title: "Does", cell: (row, now) => (row.here ? working(row) : { text: "gone", note: `for ${age(now - row.seen_at)}` }) },
  { title: "Offers", kind: "wide", cell: models },
  { title: "Seen", kind: "number", cell: ({ seen_at }, now) => `${age(now - seen_at)} ago` },
  { title: "Done", kind: "number", cell: ({ finished }) => number(finished) },
  { title: "Lost", kind: "number", cell: ({ lost }) => number(lost) },
  { title: "Earned", kind: "number", cell: ({ earned }) => number(earned) },
];

/** @param {Row} row */
function working({ running, threads }) {
  const of = threads > 1 ? `${running.length} of ${number(threads)} threads` : "";
  if (running.length === 0) return { text: "waits", note: of };
  return { text: [...new Set(running.map((/** @type {Row} */ it) => it.model))].join(", "), note: of };
}

/** @type {Column[]} */
const LEASES = [
  { title: "Job", kind: "main", cell: ({ model, generation }) => ({ text: model, note: generation }) },
  { title: "Worker", cell: ({ worker, payer }) => ({ text: worker, note: payer === null ? "" : `for ${payer}` }) },
  { title: "Runs", kind: "number", cell: ({ began_at }, now) => (began_at === null ? "–" : age(now - began_at)) },
  { title: "Output", kind: "wide", cell: output },
  { title: "Posts", kind: "number", cell: ({ posts, bytes }) => (posts === null ? "–" : { text: number(posts), note: size(bytes) }) },
  {
    title: "Lease",
    kind: "lease",
    cell: ({ seconds_left, cancelled }) =>
      cancelled
        ? { text: "cancelled", tone: "warn" }
        : { text: `${Math.round(seconds_left)} s left`, part: seconds_left / LEASE_TERM },
  },
];

/** As many tokens as are paid for. @param {Row} row */
function output({ streams, chars, max_length }) {
  if (chars === null) return { text: streams ? "not known here" : "comes whole" };
  const tokens = Math.min(max_length ?? Infinity, Math.ceil(chars / CHARS_PER_TOKEN));
  if (max_length === null) return { text: count(tokens, "token") };
  return { text: `${number(tokens)} of ${count(max_length, "token")}`, part: tokens / max_length };
}

/** @type {Column[]} */
const QUEUE = [
  { title: "Place", kind: "number rank", cell: ({ position }) => number(position + 1) },
  { title: "Model", kind: "main", cell: (row) => ({ text: models(row), note: row.request }) },
  { title: "Asked by", cell: ({ owner }) => owner },
  { title: "Tokens", kind: "number", cell: ({ max_length }) => number(max_length) },
  {
    title: "Waits",
    kind: "number",
    cell: ({ created_at, waiting }, now) => ({ text: age(now - created_at), note: waiting > 1 ? `${number(waiting)} times` : "" }),
  },
  { title: "Lost", kind: "number", cell: ({ faults }) => ({ text: number(faults), tone: faults ? "warn" : "" }) },
];

/** @type {Column[]} */
const TRANSFERS = [
  { title: "From", kind: "main", cell: ({ payer }) => payer },
  { title: "To", cell: ({ payee, worker }) => ({ text: payee, note: worker === payee ? "" : worker }) },
  { title: "Units", kind: "number", cell: ({ units }) => number(units) },
  { title: "For", kind: "wide", cell: ({ model, generation }) => ({ text: model, note: generation }) },
  { title: "When", kind: "number", cell: ({ at }, now) => `${age(now - at)} ago` },
];

/** @type {Column[]} */
const BALANCES = [
  { title: "Owner", kind: "main", cell: ({ owner }) => owner },
  { title: "Units", kind: "number", cell: ({ units }) => number(units) },
];

/**
 * Each part of the page: its columns, what a row is told by, and what is said where there are none.
 * @type {Record<string, {columns: Column[], key: (row: Row) => string, empty: string}>}
 */
export const PARTS = {
  workers: { columns: WORKERS, key: ({ name }) => name, empty: "None was seen in the last day." },
  leases: { columns: LEASES, key: ({ generation }) => generation, empty: "Nothing runs." },
  queue: { columns: QUEUE, key: ({ request }) => request, empty: "Nothing waits." },
  transfers: { columns: TRANSFERS, key: ({ generation }) => generation, empty: "Nothing has been paid yet." },
  balances: { columns: BALANCES, key: ({ owner }) => owner, empty: "Nobody has an account yet." },
};
