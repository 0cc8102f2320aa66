// @ts-check
/**
 * Draws one reader: its state, its text with the seams, its connections, and what can be done now.
 *
 * @typedef {import("./reader.js").Reader} Reader
 * @typedef {import("./reader.js").ConnectionNote} ConnectionNote
 *
 * @typedef {object} Actions
 * @property {(reader: Reader) => void} cut
 * @property {(reader: Reader) => void} remove
 * @property {() => void} askAgain
 */
import { Transcript, connectionClass } from "./transcript.js";
import { connectionFacts, connectionTitle, noticeText, stateText } from "./wording.js";

export class ReaderView {
  #part;
  #transcript;
  #actions;

  /** @param {HTMLTemplateElement} template @param {Reader} reader @param {Actions} actions */
  constructor(template, reader, actions) {
    const copy = /** @type {DocumentFragment} */ (template.content.cloneNode(true));
    this.element = /** @type {HTMLElement} */ (copy.firstElementChild);
    this.#part = (/** @type {string} */ selector) =>
      /** @type {HTMLElement} */ (this.element.querySelector(selector));
    this.#actions = actions;
    this.#transcript = new Transcript(this.#part(".transcript"));
    this.element.dataset.reader = String(reader.number);
    this.#part(".reader-badge").textContent = String(reader.number);
    this.#part(".transcript").setAttribute("aria-label", `Answer, as reader ${reader.number} has it`);
    this.#wire("wire", () => (reader.phase.name === "waiting" ? reader.reconnectNow() : actions.cut(reader)));
    this.#wire("remove", () => actions.remove(reader), reader.number > 1);
    this.turned(reader);
  }

  /** @param {Reader} reader */
  rewritten(reader) {
    this.#transcript.rewrite(reader.text, reader.connections);
    this.#showReasoning(reader);
    this.noted(reader);
  }

  /** @param {Reader} reader */
  noted(reader) {
    this.#part(".connections").replaceChildren(...reader.connections.map(connectionItem));
  }

  /** @param {Reader} reader @param {import("./reader.js").JournalRecord} record */
  received(reader, record) {
    if (record.event !== "token" || record.data.choice) return;
    this.#transcript.append(record.data.delta ?? "");
    if (record.data.reasoning) this.#showReasoning(reader);
  }

  /** @param {Reader} reader @param {ConnectionNote} note */
  connected(reader, note) {
    this.#transcript.connected(note);
    this.noted(reader);
    this.turned(reader);
  }

  /** @param {Reader} reader */
  turned(reader) {
    const { phase } = reader;
    this.element.dataset.phase = phase.name;
    this.element.dataset.code = phase.code ?? "";
    this.element.style.setProperty("--pause", `${phase.delayMs ?? 0}ms`);
    this.#part(".state-text").textContent = stateText(reader);
    this.#part(".transcript").setAttribute("aria-busy", String(!reader.ended && phase.name !== "refused"));
    const wire = /** @type {HTMLButtonElement} */ (this.#part("[data-action=wire]"));
    wire.hidden = reader.ended || phase.name === "refused";
    wire.disabled = phase.name === "connecting" || phase.delayMs === 0;
    wire.textContent = phase.name === "waiting" ? "Reconnect now" : "Cut the connection";
    this.#showNotice(reader);
  }

  /** @param {Reader} reader */
  #showNotice(reader) {
    const text = noticeText(reader);
    const { code, name } = reader.phase;
    this.#part(".notice").hidden = text === null;
    this.#part(".notice-text").replaceChildren(...(code && name !== "waiting" ? [tag(code), " "] : []), text ?? "");
    this.#part(".notice-actions").replaceChildren(...this.#choices(reader));
  }

  /** @param {Reader} reader @returns {HTMLButtonElement[]} */
  #choices(reader) {
    const { name, code, retryable } = reader.phase;
    const askAgain = button("Start again", this.#actions.askAgain);
    if (name === "failed") return retryable ? [askAgain] : [];
    if (name !== "refused" || code === "unauthorized") return [];
    if (code === "cursor_expired" || code === "cursor_ahead") {
      return [button("Take the snapshot", () => reader.takeSnapshot(), "solid"), askAgain];
    }
    if (code === "gave_up" || code === "unreachable") return [button("Try again", () => reader.retry(), "solid")];
    return [askAgain];
  }

  /** @param {Reader} reader */
  #showReasoning({ reasoning }) {
    this.#part(".reasoning").hidden = reasoning === "";
    this.#part(".reasoning-text").textContent = reasoning;
  }

  /** @param {string} action @param {() => void} run @param {boolean} [shown] */
  #wire(action, run, shown = true) {
    const target = this.#part(`[data-action=${action}]`);
    target.hidden = !shown;
    target.addEventListener("click", run);
  }
}

/** @param {string} label @param {() => void} run @param {string} [kind] */
function button(label, run, kind = "") {
  const made = document.createElement("button");
  made.type = "button";
  made.className = `button small ${kind}`;
  made.textContent = label;
  made.addEventListener("click", run);
  return made;
}

/** @param {string} code */
function tag(code) {
  const made = document.createElement("code");
  made.textContent = code;
  return made;
}

/** @param {ConnectionNote} note @param {number} index */
function connectionItem(note, index) {
  const item = document.createElement("li");
  item.className = connectionClass(index);
  const title = document.createElement("span");
  title.className = "connection-title";
  title.textContent = connectionTitle(note, index);
  const facts = document.createElement("dl");
  for (const [term, value] of connectionFacts(note)) {
    const pair = facts.appendChild(document.createElement("div"));
    pair.appendChild(document.createElement("dt")).textContent = term;
    pair.appendChild(document.createElement("dd")).textContent = value;
  }
  item.append(title, facts);
  return item;
}
