// @ts-check
/**
 * A table that is told anew each second: rows and cells that stay the same are left alone, so that nothing jumps, and
 * what a user has marked or focused stays so.
 *
 * @typedef {object} Cell
 * @property {string} text
 * @property {string} [note] less important, beneath
 * @property {number} [part] of a whole, 0 to 1, drawn as a gauge
 * @property {string} [tone] "good", "warn", "bad" or "live": a dot before the text
 */

/**
 * @template Row
 * @typedef {object} Column
 * @property {string} title
 * @property {string} [kind] "main", "number"
 * @property {(row: Row, now: number) => Cell | string} cell
 */

/** @template Row */
export class Table {
  #columns;
  #key;
  #empty;
  #body;
  /** @type {Map<string, HTMLTableRowElement>} */
  #rows = new Map();
  #shown = false;

  /**
   * @param {Element} place
   * @param {Column<Row>[]} columns
   * @param {(row: Row) => string} key what a row is told by from one time to the next
   * @param {string} empty said where there are no rows
   */
  constructor(place, columns, key, empty) {
    this.#columns = columns;
    this.#key = key;
    const table = element("table", { role: "table" });
    const head = element("tr", { role: "row" });
    for (const { title, kind = "" } of columns) {
      const cell = element("th", { scope: "col", role: "columnheader", class: kind });
      cell.textContent = title;
      head.append(cell);
    }
    const top = element("thead", { role: "rowgroup" });
    top.append(head);
    this.#body = element("tbody", { role: "rowgroup" });
    table.append(top, this.#body);
    this.#empty = element("p", { class: "empty hint" });
    this.#empty.textContent = empty;
    place.append(table, this.#empty);
  }

  /** @param {Row[]} rows @param {number} now */
  show(rows, now) {
    const gone = new Set(this.#rows.keys());
    rows.forEach((row, at) => {
      const key = this.#key(row);
      gone.delete(key);
      const line = this.#rows.get(key) ?? this.#added(key);
      this.#columns.forEach((column, i) => fill(line.children[i], column.cell(row, now)));
      if (this.#body.children[at] !== line) this.#body.insertBefore(line, this.#body.children[at] ?? null);
    });
    for (const key of gone) {
      this.#rows.get(key)?.remove();
      this.#rows.delete(key);
    }
    this.#empty.hidden = rows.length > 0;
    this.#shown = true;
  }

  #added(/** @type {string} */ key) {
    // What is there when the page opens is not news.
    const line = /** @type {HTMLTableRowElement} */ (element("tr", { role: "row", class: this.#shown ? "new" : "" }));
    for (const { title, kind = "" } of this.#columns) {
      line.append(element("td", { role: "cell", class: kind, "data-title": title }));
    }
    line.dataset.key = key;
    this.#rows.set(key, line);
    return line;
  }
}

/** @param {Element} place @param {Cell | string} cell */
function fill(place, cell) {
  const { text, note = "", part, tone = "" } = typeof cell === "string" ? { text: cell } : cell;
  set(place, "text", text);
  set(place, "note", note);
  if (place.getAttribute("data-tone") !== tone) place.setAttribute("data-tone", tone);
  const gauge = /** @type {HTMLElement | null} */ (child(place, "gauge", part !== undefined));
  gauge?.style.setProperty("--part", String(Math.min(1, Math.max(0, part ?? 0))));
}

/** @param {Element} place @param {string} name @param {string} text */
function set(place, name, text) {
  const inner = /** @type {HTMLElement | null} */ (child(place, name, text !== ""));
  // The title for what there is no room for.
  if (inner && inner.textContent !== text) inner.textContent = inner.title = text;
}

/**
 * The part of a cell by its name; made, or removed, as it is wanted.
 * @param {Element} place @param {string} name @param {boolean} wanted
 */
function child(place, name, wanted) {
  const found = place.querySelector(`.${name}`);
  if (wanted === (found !== null)) return found;
  if (found) return found.remove(), null;
  const made = element("span", { class: name });
  if (name === "gauge") made.setAttribute("aria-hidden", "true");
  place.append(made);
  return made;
}

/** @param {string} name @param {Record<string, string>} attributes */
function element(name, attributes) {
  const made = document.createElement(name);
  for (const [attribute, value] of Object.entries(attributes)) if (value) made.setAttribute(attribute, value);
  return made;
}
