// @ts-check
/** The playground: puts the prompt box, the readers and the drawn journal together. */
import { Client, connectTransport, pageTransport, socketTransport } from "./midstream.js";
import { JournalPoll } from "./journal-poll.js";
import { JournalView } from "./journal-view.js";
import { Reader } from "./reader.js";
import { ReaderView } from "./reader-view.js";
import { loadKey, loadSession, loadTransport, saveKey, saveSession, saveTransport } from "./session-store.js";
import { size, stateText } from "./wording.js";

/** Long enough to see the journal run ahead of a reader that is away; `/?cut=20` makes it twenty seconds. */
const CUT_PAUSE_MS = 1000 * (Number(new URLSearchParams(location.search).get("cut")) || 1.8);
/** Small models may go round in circles until their context is full. */
const MAX_TOKENS = 400;
const SAVE_EVERY_MS = 200;
const MAX_READERS = 2;

/** @template {HTMLElement} [T=HTMLElement] @param {string} id @returns {T} */
const part = (id) => /** @type {T} */ (document.getElementById(id));
const prompt = /** @type {HTMLTextAreaElement} */ (part("prompt"));
const modelChoice = /** @type {HTMLSelectElement} */ (part("model"));

const transportChoice = /** @type {HTMLSelectElement} */ (part("transport"));
/** @type {Record<string, import("./midstream.js").Transport>} */
const TRANSPORTS = { sse: pageTransport, ws: socketTransport, connect: connectTransport };

let key = loadKey();
const client = new Client({ key: () => key });
const journal = new JournalView({
  drawing: part("journal-drawing"),
  legend: part("journal-legend"),
  readout: part("journal-readout"),
});

let asked = "";
let model = "";
/** @type {Map<Reader, ReaderView>} */
const readers = new Map();
/** @type {JournalPoll | null} */
let poll = null;
/** @type {string | null} */
let polled = null;
/** @type {ReturnType<typeof setTimeout> | undefined} */
let saveTimer;
/** Whose Stop is under way; the next question has a Stop of its own. @type {WeakSet<Reader>} */
const stopping = new WeakSet();

const first = () => [...readers.keys()][0];
const streamId = () => first()?.streamId ?? null;

/** A new question. The answer to the last one, if it is still being written, has no reader left: stopped. */
function ask(/** @type {string} */ text) {
  const last = first();
  if (last && !last.ended) last.stop().catch(() => {});
  begin(text, "");
  const chosen = modelChoice.value ? { model: modelChoice.value } : {};
  addReader().open({ prompt: text, max_tokens: MAX_TOKENS, ...chosen });
  changed();
}

/** @param {string} text @param {string} fromModel */
function begin(text, fromModel) {
  for (const reader of [...readers.keys()]) removeReader(reader);
  poll?.stop();
  poll = polled = null;
  asked = text;
  part("asked").textContent = text;
  model = fromModel;
  journal.clear();
  part("intro").hidden = true;
  part("session").hidden = false;
  part("composer").classList.add("compact");
}

function addReader() {
  const reader = new Reader(client, readers.size + 1, {
    rewritten: (it) => (readers.get(it)?.rewritten(it), changed()),
    connected: (it, note) => readers.get(it)?.connected(it, note),
    noted: (it) => readers.get(it)?.noted(it),
    received,
    turned,
  });
  reader.over = wire();
  const template = /** @type {HTMLTemplateElement} */ (part("reader-template"));
  const view = new ReaderView(template, reader, {
    cut: (it) => it.cut(CUT_PAUSE_MS),
    remove: removeReader,
    askAgain: () => ask(asked),
  });
  readers.set(reader, view);
  part("readers").append(view.element);
  return reader;
}

function removeReader(/** @type {Reader} */ reader) {
  reader.close();
  readers.get(reader)?.element.remove();
  readers.delete(reader);
  changed();
}

/** @param {Reader} reader @param {import("./midstream.js").JournalRecord} record */
function received(reader, record) {
  if (!readers.has(reader)) return;
  readers.get(reader)?.received(reader, record);
  if (record.event === "start") model = String(record.data.model ?? "");
  changed();
}

/** @param {Reader} reader */
function turned(reader) {
  const view = readers.get(reader);
  if (!view) return;
  view.turned(reader);
  announce(reader);
  if (reader.phase.code === "unauthorized") askForKey();
  if (reader.ended) poll?.refresh();
  changed();
}

/** Only changes of state are spoken; the text can be read in its region. */
function announce(/** @type {Reader} */ reader) {
  const { name } = reader.phase;
  if (name === "connecting") return;
  const words = `${readers.size > 1 ? `Reader ${reader.number}: ` : ""}${stateText(reader)}`;
  if (part("announcer").textContent !== words) part("announcer").textContent = words;
}

function changed() {
  show();
  saveTimer ??= setTimeout(save, SAVE_EVERY_MS);
}

function save() {
  clearTimeout(saveTimer);
  saveTimer = undefined;
  if (readers.size === 0) return;
  const saved = [...readers.keys()].flatMap((reader) => reader.save() ?? []);
  saveSession({ prompt: asked, model, streamId: streamId(), readers: saved });
}

function show() {
  const all = [...readers.keys()];
  showStop(all[0]);
  part("second").hidden = all.length >= MAX_READERS || !streamId();
  part("readers").classList.toggle("two", all.length > 1);
  part("simulation").hidden = !model.startsWith("scripted");
  /** @type {HTMLButtonElement} */ (part("ack")).disabled = !all[0] || all[0].seq === 0;
  showVerdict(all);
  watchJournal();
  journal.show(null, all);
}

function showStop(/** @type {Reader | undefined} */ reader) {
  const button = /** @type {HTMLButtonElement} */ (part("stop"));
  button.hidden = !reader || reader.ended || reader.phase.code === "unknown_stream";
  button.disabled = reader !== undefined && stopping.has(reader);
  button.textContent = button.disabled ? "Stopping" : "Stop";
}

function showVerdict(/** @type {Reader[]} */ all) {
  const verdict = part("verdict");
  verdict.hidden = all.length < 2 || !all.every((reader) => reader.ended);
  if (verdict.hidden) return;
  const same = all[0].text === all[1].text;
  verdict.className = `verdict ${same ? "same" : "different"}`;
  const bytes = size(new TextEncoder().encode(all[0].text).length);
  verdict.textContent = same ? `Identical, byte for byte (${bytes})` : "The two readers differ";
}

function watchJournal() {
  const id = streamId();
  if (!id || id === polled) return;
  poll?.stop();
  polled = id;
  poll = new JournalPoll(client, id, (state) => journal.show(state, [...readers.keys()]));
}

async function ack() {
  const reader = first();
  if (!reader?.streamId) return;
  try {
    journal.show(await client.ack(reader.streamId, reader.seq), [...readers.keys()]);
  } catch (error) {
    part("announcer").textContent = `Not acked: ${/** @type {Error} */ (error).message}`;
  }
}

async function stop() {
  const reader = first();
  if (!reader) return;
  stopping.add(reader);
  show();
  await reader.stop().catch((error) => (part("announcer").textContent = `Not stopped: ${error.message}`));
  stopping.delete(reader);
  show();
}

/** The chosen transport's name, where it is not the usual one. */
function wire() {
  return transportChoice.value === "sse" ? undefined : transportChoice.selectedOptions[0].text;
}

/** From now on over this one, in mid-answer too: the position is the same on all of them. */
function useTransport(/** @type {string} */ name) {
  transportChoice.value = name;
  saveTransport(name);
  client.transport = TRANSPORTS[name];
  for (const reader of readers.keys()) {
    reader.over = wire();
    reader.switchOver();
  }
}

function askForKey() {
  part("key-form").hidden = false;
}

async function fillModels() {
  try {
    const models = await client.models();
    modelChoice.replaceChildren(...models.map((name) => new Option(name, name)));
    part("model-field").hidden = models.length === 0;
  } catch (error) {
    if (/** @type {{status?: number}} */ (error).status === 401) askForKey();
  }
}

function useKey() {
  const field = /** @type {HTMLInputElement} */ (part("key"));
  key = field.value.trim();
  saveKey(key);
  field.value = "";
  part("key-form").hidden = true;
  fillModels();
  poll?.refresh();
  for (const reader of readers.keys()) if (reader.phase.code === "unauthorized") reader.retry();
}

function takeUp() {
  const saved = loadSession();
  if (!saved) return;
  begin(saved.prompt, saved.model);
  for (const reader of saved.readers) addReader().restore(reader);
  show();
}

part("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!prompt.value.trim()) return;
  ask(prompt.value);
  prompt.value = "";
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) /** @type {HTMLFormElement} */ (part("composer")).requestSubmit();
});
part("key-form").addEventListener("submit", (event) => (event.preventDefault(), useKey()));
transportChoice.addEventListener("change", () => useTransport(transportChoice.value));
part("stop").addEventListener("click", stop);
part("ack").addEventListener("click", ack);
part("reload").addEventListener("click", () => location.reload());
part("second").addEventListener("click", () => {
  const id = streamId();
  if (id) addReader().followFromStart(id);
  show();
});
for (const example of document.querySelectorAll(".example")) {
  example.addEventListener("click", () => ask(example.textContent ?? ""));
}
addEventListener("online", () => readers.forEach((_, reader) => reader.reconnectNow()));
addEventListener("pagehide", save);
document.addEventListener("visibilitychange", () => document.hidden && save());

useTransport(Object.keys(TRANSPORTS).find((name) => name === loadTransport()) ?? "sse");
fillModels();
takeUp();
