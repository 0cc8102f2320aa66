// @ts-check
/**
 * The text of a reader, one segment per connection. A seam is drawn by CSS from its number, so that the
 * text content of the segments, and what a user copies, is the answer and nothing else.
 *
 * @typedef {import("./reader.js").ConnectionNote} ConnectionNote
 */

const SEAM_COLOURS = 5;

/** The CSS class of the n-th connection; the first one is plain ink. @param {number} index from 0 */
export function connectionClass(index) {
  return index === 0 ? "connection-0" : `connection-${1 + ((index - 1) % SEAM_COLOURS)}`;
}

export class Transcript {
  #box;
  /** @type {Text | null} */
  #tail = null;
  #connections = 0;
  #scrollIsDue = false;
  #atEnd = true;
  #lastTop = 0;

  /** @param {HTMLElement} box */
  constructor(box) {
    this.#box = box;
    box.addEventListener("scroll", () => this.#scrolled());
  }

  /** @param {string} text @param {ConnectionNote[]} connections */
  rewrite(text, connections) {
    this.#box.replaceChildren();
    this.#connections = 0;
    this.#lastTop = 0;
    const starts = connections.length > 0 ? connections : [{ after: 0, chars: 0 }];
    starts.forEach((note, i) => {
      this.#segment(note.after);
      this.append(text.slice(i === 0 ? 0 : note.chars, starts[i + 1]?.chars));
    });
    if (connections.length === 0) this.#connections = text === "" ? 0 : 1;
  }

  /** @param {ConnectionNote} note */
  connected(note) {
    if (this.#connections === 0) this.#box.replaceChildren();
    this.#segment(note.after);
  }

  /** @param {string} delta */
  append(delta) {
    if (delta === "") return;
    if (!this.#tail) this.#segment(0);
    this.#tail?.appendData(delta);
    this.#scroll();
  }

  /** @param {number} after */
  #segment(after) {
    const index = this.#connections++;
    if (index > 0) this.#box.append(seam(after, index));
    const segment = document.createElement("span");
    segment.className = `segment ${connectionClass(index)}`;
    this.#tail = segment.appendChild(document.createTextNode(""));
    this.#box.append(segment);
  }

  /** Only a move upwards is the user's: text that grows leaves the end behind too. */
  #scrolled() {
    const { scrollHeight, scrollTop, clientHeight } = this.#box;
    if (scrollHeight - scrollTop - clientHeight < 32) this.#atEnd = true;
    else if (scrollTop < this.#lastTop) this.#atEnd = false;
    this.#lastTop = scrollTop;
  }

  /** Stays at the end for a user who is there; one layout per frame, not per token. */
  #scroll() {
    if (this.#scrollIsDue) return;
    this.#scrollIsDue = true;
    requestAnimationFrame(() => {
      this.#scrollIsDue = false;
      if (this.#atEnd) this.#box.scrollTop = this.#box.scrollHeight;
    });
  }
}

/** @param {number} after @param {number} index */
function seam(after, index) {
  const mark = document.createElement("span");
  mark.className = `seam ${connectionClass(index)}`;
  mark.dataset.seq = String(after + 1);
  mark.setAttribute("role", "img");
  mark.setAttribute("aria-label", `Seam: connection ${index + 1} starts at record ${after + 1}`);
  mark.title = `Connection ${index + 1} goes on strictly after record ${after}`;
  return mark;
}
