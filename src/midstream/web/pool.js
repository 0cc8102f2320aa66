// @ts-check
/** The pool, live: asks the gateway each second what there is, and shows it. */
import { Client } from "./midstream.js";
import { PARTS, number } from "./pool-columns.js";
import { Table } from "./pool-table.js";
import { Poll } from "./poll.js";
import { loadKey, saveKey } from "./session-store.js";

const EVERY_MS = 1_000;
const AFTER_ERROR_MS = 2_000;

/** @template {HTMLElement} [T=HTMLElement] @param {string} id @returns {T} */
const part = (id) => /** @type {T} */ (document.getElementById(id));

let key = loadKey();
const client = new Client({ key: () => key });
/** @type {{at: number, posts: number} | null} */
let before = null;

const tables = Object.entries(PARTS).map(([name, { columns, key, empty }]) => {
  const section = /** @type {Element} */ (document.querySelector(`[data-part=${name}]`));
  const table = new Table(/** @type {Element} */ (section.querySelector(".scroller")), columns, key, empty);
  return { name, table, note: /** @type {Element} */ (section.querySelector(".part-note")) };
});

/** @returns {Promise<number | null>} when to look again; null: when asked */
async function look() {
  try {
    show(await client.pool());
    turn("live", "Live");
    return EVERY_MS;
  } catch (error) {
    return refused(/** @type {import("./midstream.js").MidstreamError} */ (error));
  }
}

/** @param {import("./midstream.js").MidstreamError} error */
function refused({ status, message }) {
  before = null;
  if (status === 401) return ask("Key needed", "This gateway asks for an admin's API key");
  if (status === 403) return ask("Key refused", "This key is not marked :admin; use one that is");
  if (status === 404) {
    part("pool").hidden = true;
    part("no-pool").hidden = false;
    turn("refused", "No pool");
    return null;
  }
  turn("waiting", status ? message : "Gateway unreachable, trying again");
  return AFTER_ERROR_MS;
}

/** Asks for a key, and shows nothing of what another key was shown. @param {string} state @param {string} words */
function ask(state, words) {
  part("pool").hidden = true;
  part("key-form").hidden = false;
  part("key-label").textContent = words;
  if (document.activeElement === document.body) part("key").focus();
  turn("refused", state);
  return null;
}

/** Only changes are written, since they are read aloud. @param {string} phase @param {string} words */
function turn(phase, words) {
  part("state").dataset.phase = phase;
  part("pool").dataset.phase = phase;
  if (part("state-text").textContent !== words) part("state-text").textContent = words;
}

/** @param {Record<string, any>} told */
function show(told) {
  const { totals, ledger } = told;
  for (const place of part("pool").querySelectorAll("[data-total]")) {
    const name = /** @type {HTMLElement} */ (place).dataset.total ?? "";
    const text = name === "rate" ? rate(told) : number(totals[name]);
    if (place.textContent !== text) place.textContent = text;
  }
  before = { at: told.at, posts: totals.posts };
  /** @type {Record<string, any[]>} */
  const rows = { ...told, transfers: ledger.transfers, balances: ledger.balances, workers: inOrder(told.workers) };
  /** @type {Record<string, number>} */
  const wholes = { leases: totals.running, queue: totals.waiting, balances: ledger.accounts };
  for (const { name, table, note } of tables) {
    table.show(rows[name], told.at);
    const whole = wholes[name];
    const words = name === "transfers" ? `Sum of all accounts: ${number(ledger.sum)}` : shownOf(rows[name].length, whole);
    if (note.textContent !== words) note.textContent = words;
  }
  part("recruit").hidden = totals.workers > 0 || told.workers.some((/** @type {any} */ worker) => worker.here);
  part("recruit-command").textContent = recruit();
  part("key-form").hidden = true;
  part("no-pool").hidden = true;
  part("pool").hidden = false;
}

/** By name, those that are here first: by when they were seen they would change places each second. @param {any[]} workers */
function inOrder(workers) {
  return [...workers].sort((a, b) => Number(b.here) - Number(a.here) || (a.name < b.name ? -1 : 1));
}

/** @param {number} shown @param {number | undefined} whole */
function shownOf(shown, whole) {
  return whole !== undefined && whole > shown && shown > 0 ? `${number(shown)} of ${number(whole)} are shown` : "";
}

/** Progress posts a second since the last look. @param {Record<string, any>} told */
function rate({ at, totals }) {
  if (!before || at <= before.at || totals.posts < before.posts) return "–";
  return number(Math.round((totals.posts - before.posts) / (at - before.at)));
}

/** How to start a worker for this gateway. */
function recruit() {
  const gateway = client.baseUrl.href.replace(/\/$/, "");
  return `${key ? "MIDSTREAM_KEY=… " : ""}midstream worker --gateway ${gateway} --upstream http://127.0.0.1:8080/v1`;
}

const poll = new Poll(look, EVERY_MS);

part("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = /** @type {HTMLInputElement} */ (part("key"));
  key = field.value.trim();
  saveKey(key);
  field.value = "";
  turn("connecting", "Connecting");
  poll.refresh();
});
document.addEventListener("visibilitychange", () => document.hidden || poll.refresh());
