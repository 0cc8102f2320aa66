// @ts-check
/**
 * The journal, drawn: a tape with a cell per record (what is retained, what was dropped and why, the head,
 * the terminal record), and under it a lane per reader with its position and the seams of its connections.
 *
 * @typedef {import("./reader.js").Reader} Reader
 * @typedef {Record<string, any>} State
 */
import { connectionClass } from "./transcript.js";
import { count, size } from "./wording.js";

const TAPE_TOP = 24;
const TAPE_HEIGHT = 30;
const LANE_TOP = TAPE_TOP + TAPE_HEIGHT + 16;
const LANE_HEIGHT = 20;
const BADGE = 8;
const SMALLEST_CELL = 3.5;
const SMALLEST_MARK = 5;

/**
 * Where each record stands and what became of it, from the counters alone.
 * @param {State} state @param {number} head
 */
export function regions({ oldest_retained_seq: oldest, trimmed_seq: trimmed, status }, head) {
  const acked = Math.min(trimmed, oldest - 1);
  const terminal = status !== "open" && oldest <= head;
  return [
    { name: "acked", from: 1, to: acked },
    { name: "evicted", from: acked + 1, to: oldest - 1 },
    { name: "retained", from: oldest, to: terminal ? head - 1 : head },
    { name: `terminal ${status}`, from: head, to: terminal ? head : head - 1 },
  ].filter(({ from, to }) => to >= from);
}

export class JournalView {
  #legend;
  #readout;
  #svg;
  /** @type {State | null} */
  #state = null;
  /** @type {Reader[]} */
  #readers = [];
  #domain = 48;
  /** @type {number | null} */
  #inspected = null;
  #drawIsDue = false;

  /** @param {{drawing: HTMLElement, legend: HTMLElement, readout: HTMLElement}} parts */
  constructor({ drawing, legend, readout }) {
    this.#legend = legend;
    this.#readout = readout;
    this.#svg = shape("svg", { class: "tape", role: "slider", tabindex: 0, "aria-label": "Journal, record by record" });
    drawing.append(this.#svg);
    new ResizeObserver(() => this.#draw()).observe(drawing);
    this.#svg.addEventListener("pointermove", (event) => this.#inspectAt(event.offsetX));
    this.#svg.addEventListener("pointerleave", () => this.#inspect(null));
    this.#svg.addEventListener("blur", () => this.#inspect(null));
    this.#svg.addEventListener("keydown", (event) => this.#step(event));
  }

  /** A new stream: nothing known yet. */
  clear() {
    this.#state = null;
    this.#domain = 48;
    this.show(null, []);
  }

  /** @param {State | null} state null: only the readers have moved @param {Reader[]} readers */
  show(state, readers) {
    this.#state = state ?? this.#state;
    this.#readers = readers;
    if (this.#drawIsDue) return;
    this.#drawIsDue = true;
    requestAnimationFrame(() => {
      this.#drawIsDue = false;
      this.#draw();
    });
  }

  /** Own readers may know more than the last look at the counters. */
  get #head() {
    return Math.max(this.#state?.highest_seq ?? 0, ...this.#readers.map((reader) => reader.seq));
  }

  get #width() {
    return this.#svg.parentElement?.clientWidth ?? 0;
  }

  /** @param {number} seq @returns {number} the right edge of its cell */
  #x(seq) {
    return (seq / this.#domain) * this.#width;
  }

  #draw() {
    if (this.#width === 0) return;
    const head = this.#head;
    const open = (this.#state?.status ?? "open") === "open";
    while (head > this.#domain * 0.94) this.#domain = Math.ceil(this.#domain * 1.5);
    if (!open && head > 0) this.#domain = Math.max(head, 12);
    const height = LANE_TOP + LANE_HEIGHT * Math.max(1, this.#readers.length);
    setAttributes(this.#svg, { width: this.#width, height, viewBox: `0 0 ${this.#width} ${height}` });
    this.#svg.replaceChildren(
      shape("defs", {}, [hatch("hatch-acked", 45), hatch("hatch-evicted", -45)]),
      shape("rect", { class: "track", y: TAPE_TOP, width: this.#width, height: TAPE_HEIGHT, rx: 4 }),
      ...this.#drawTape(head),
      ...this.#drawAck(),
      ...this.#drawHead(head, open),
      ...this.#readers.flatMap((reader, i) => this.#drawLane(reader, LANE_TOP + LANE_HEIGHT * i)),
      ...this.#drawInspected(),
    );
    this.#count(head);
    this.#describe(head, open);
  }

  /** @param {number} head */
  #drawTape(head) {
    if (!this.#state) return [];
    return regions(this.#state, head).map(({ name, from, to }) => {
      const path = name.startsWith("terminal") ? this.#terminalMark(to) : this.#cells(from, to);
      return shape("path", { class: `region ${name}`, d: path, "data-from": from, "data-to": to });
    });
  }

  /** A cell per record while these can be told apart, else per so many. @param {number} from @param {number} to */
  #cells(from, to) {
    const each = Math.ceil(SMALLEST_CELL / this.#x(1));
    const gap = this.#x(each) > 6 ? 1.5 : 0.75;
    let path = "";
    for (let seq = from, end; seq <= to; seq = end + 1) {
      end = Math.min(to, Math.ceil(seq / each) * each);
      const left = this.#x(seq - 1);
      path += box(left + gap / 2, Math.max(0.5, this.#x(end) - left - gap));
    }
    return path;
  }

  /** @param {number} seq */
  #terminalMark(seq) {
    const width = Math.max(SMALLEST_MARK, this.#x(1) - 1);
    return box(this.#x(seq) - width, width, TAPE_TOP - 4, TAPE_HEIGHT + 8);
  }

  /** What is confirmed but still kept, since a slower reader needs it. */
  #drawAck() {
    const { acked_seq: acked = 0, oldest_retained_seq: oldest = 1 } = this.#state ?? {};
    if (acked < oldest) return [];
    const y = TAPE_TOP + TAPE_HEIGHT + 4;
    return [shape("path", { class: "ack-line", d: `M${this.#x(oldest - 1)} ${y}H${this.#x(acked)}` })];
  }

  /** @param {number} head @param {boolean} open */
  #drawHead(head, open) {
    if (head === 0) return [];
    const x = this.#x(head);
    const before = x > 100;
    const label = { x: before ? x - 5 : x + 5, y: TAPE_TOP - 7, "text-anchor": before ? "end" : "start" };
    const words = open ? `head ${head.toLocaleString("en")}` : `${this.#state?.status} at ${head.toLocaleString("en")}`;
    const line = shape("path", { class: "head", d: `M${x} ${TAPE_TOP - 14}V${TAPE_TOP + TAPE_HEIGHT + 4}` });
    return [...(open ? [line] : []), shape("text", { class: "head-label", ...label }, words)];
  }

  /** @param {Reader} reader @param {number} y */
  #drawLane(reader, y) {
    const end = this.#x(reader.seq);
    const badgeX = Math.min(Math.max(end, BADGE + 1), this.#width - BADGE - 1);
    const last = connectionClass(Math.max(0, reader.connections.length - 1));
    const lines = reader.connections.map(({ after }, i) => {
      const to = reader.connections[i + 1]?.after ?? reader.seq;
      const tick = i > 0 ? `M${this.#x(after)} ${y - 6}v12` : "";
      return shape("path", { class: `lane ${connectionClass(i)}`, d: `M${this.#x(after)} ${y}H${this.#x(to)}${tick}` });
    });
    const gone = reader.connected || reader.ended ? "" : "away";
    const behind = this.#head - reader.seq;
    const label = { class: "behind", y: y + 4, x: badgeX + 14 };
    const fits = badgeX < this.#width - 90;
    const words = gone && behind > 0 && fits ? [shape("text", label, `${behind.toLocaleString("en")} behind`)] : [];
    const badge = { class: `badge ${last} ${gone}`, "data-reader": reader.number, "data-seq": reader.seq };
    return [
      shape("path", { class: "lane-rail", d: `M0 ${y}H${this.#width}` }),
      ...lines,
      shape("g", badge, [
        shape("circle", { cx: badgeX, cy: y, r: BADGE }),
        shape("text", { x: badgeX, y: y + 3.5, "text-anchor": "middle" }, String(reader.number)),
      ]),
      ...words,
    ];
  }

  #drawInspected() {
    if (this.#inspected === null) return [];
    const x = this.#x(this.#inspected) - this.#x(1) / 2;
    const bottom = LANE_TOP + LANE_HEIGHT * this.#readers.length - 8;
    return [shape("path", { class: "inspected", d: `M${x} ${TAPE_TOP - 3}V${bottom}` })];
  }

  /** @param {number} head */
  #count(head) {
    const counts = { acked: 0, evicted: 0, retained: 0 };
    const state = this.#state;
    for (const { name, from, to } of state ? regions(state, head) : []) {
      const kind = name.startsWith("terminal") ? "retained" : name;
      counts[/** @type {keyof typeof counts} */ (kind)] += to - from + 1;
    }
    const words = { ...counts, bytes: size(state?.retained_bytes ?? 0), readers: state?.readers ?? 0 };
    for (const [name, value] of Object.entries(words)) {
      const cell = this.#legend.querySelector(`[data-count=${name}]`);
      if (cell) cell.textContent = value.toLocaleString("en");
    }
  }

  /** @param {number} head @param {boolean} open */
  #describe(head, open) {
    const summary = head === 0 ? "" : `${count(head, "record")}, ${open ? "recording" : this.#state?.status}`;
    const text = this.#inspected === null ? summary : this.#recordText(this.#inspected, head);
    this.#readout.textContent = text;
    setAttributes(this.#svg, {
      "aria-valuemin": Math.min(1, head),
      "aria-valuemax": head,
      "aria-valuenow": this.#inspected ?? head,
      "aria-valuetext": text,
    });
  }

  /** @param {number} seq @param {number} head */
  #recordText(seq, head) {
    const region = this.#state && regions(this.#state, head).find(({ from, to }) => seq >= from && seq <= to);
    const content = this.#readers.map((reader) => reader.seen.get(seq)).find((text) => text !== undefined);
    const at = this.#readers.filter((reader) => reader.seq === seq).map((reader) => `reader ${reader.number} is here`);
    const quoted = content === undefined ? [] : [JSON.stringify(content)];
    const fate = region?.name === "acked" ? "acked and dropped" : region?.name.split(" ")[0];
    return [`Record ${seq.toLocaleString("en")}`, ...quoted, ...(fate ? [fate] : []), ...at].join(" · ");
  }

  /** @param {number} x */
  #inspectAt(x) {
    const seq = Math.floor((x / this.#width) * this.#domain) + 1;
    this.#inspect(seq >= 1 && seq <= this.#head ? seq : null);
  }

  /** @param {number | null} seq */
  #inspect(seq) {
    if (seq === this.#inspected) return;
    this.#inspected = seq;
    this.show(null, this.#readers);
  }

  /** @param {KeyboardEvent} event */
  #step(event) {
    const head = this.#head;
    const now = this.#inspected ?? head + 1;
    const steps = { ArrowLeft: now - 1, ArrowRight: now + 1, PageUp: now + 10, PageDown: now - 10, Home: 1, End: head };
    if (!(event.key in steps) || head === 0) return;
    event.preventDefault();
    const seq = steps[/** @type {keyof typeof steps} */ (event.key)];
    this.#inspect(Math.min(Math.max(seq, 1), head));
  }
}

/** @param {number} x @param {number} width */
function box(x, width, y = TAPE_TOP, height = TAPE_HEIGHT) {
  return `M${x.toFixed(2)} ${y}h${width.toFixed(2)}v${height}h${(-width).toFixed(2)}z`;
}

/** Dropped records differ from kept ones without colour too. @param {string} id @param {number} angle */
function hatch(id, angle) {
  const attributes = { id, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: `rotate(${angle})` };
  return shape("pattern", attributes, [shape("path", { class: id, d: "M0 0V5" })]);
}

/** @param {string} name @param {Record<string, string | number>} attributes @param {string | SVGElement[]} [content] */
function shape(name, attributes, content = []) {
  const made = /** @type {SVGElement} */ (document.createElementNS("http://www.w3.org/2000/svg", name));
  setAttributes(made, attributes);
  if (typeof content === "string") made.textContent = content;
  else made.append(...content);
  return made;
}

/** @param {Element} element @param {Record<string, string | number>} attributes */
function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
}
