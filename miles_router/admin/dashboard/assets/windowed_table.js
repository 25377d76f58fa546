// A table of any length, of which only those rows are drawn that are seen; gone through by keys.

import {element, putInto} from "../view/elements.js";
import {VirtualRows} from "../view/virtual_rows.js";

/** Columns are `{title, kind, cell}`: `cell(row)` gives an element or a text, `kind` is a class of the style sheet.
 * `keyOf(row)` names a row for good, `choose(row)` opens one. */
export class WindowedTable {
  constructor({id, label, columns, rowHeight, mostRows, keyOf, choose = null}) {
    this._id = id;
    this._columns = columns;
    this._height = rowHeight;
    this._mostRows = mostRows;
    this._keyOf = keyOf;
    this._choose = choose;
    this._data = [];
    this._current = null;
    this._top = 0; // how far it is scrolled
    const head = element("div", {role: "row", class: "head", "aria-rowindex": 1}, ...columns.map(({title, kind}) =>
      element("span", {role: "columnheader", class: kind}, title)));
    this._box = element("div", {class: "rows", role: "rowgroup"});
    this.element = element(
      "div",
      {id, class: `grid ${id}`, role: "grid", tabindex: "0", "aria-label": label, "aria-colcount": columns.length},
      element("div", {role: "rowgroup"}, head),
      this._box,
    );
    this._rows = new VirtualRows(this._box, rowHeight, (index) => this._row(index));
    this.element.addEventListener("keydown", (event) => this._key(event));
    this._box.addEventListener("click", (event) => this._click(event));
    this.onScroll(() => {
      this._top = this._box.scrollTop;
    });
  }

  /** First and last place that is seen. */
  get seen() {
    const first = Math.floor(this._box.scrollTop / this._height);
    return [first, first + this._rows.fitting];
  }

  /** When rows are scrolled. */
  onScroll(act) {
    this._box.addEventListener("scroll", act, {passive: true});
  }

  /** To the first row. */
  rewind() {
    this._box.scrollTop = this._top = 0;
    this._current = null;
  }

  /** To where it was: what has left the page and is back in it is scrolled to its beginning. */
  back() {
    this._box.scrollTop = this._top;
    this._rows.update();
  }

  /** Other rows, or the same with other values; what is seen stays where it is. */
  show(data) {
    const top = this._box.scrollTop, moved = top > 0 ? this._moved(data) : 0;
    this._data = data;
    this.element.setAttribute("aria-rowcount", String(data.length + 1));
    this._box.style.height = `${Math.max(1, Math.min(data.length, this._mostRows)) * this._height + 2}px`;
    this._rows.resize(data.length);
    if (moved !== 0) {
      this._box.scrollTop = top + moved * this._height;
      this._rows.update();
    }
    this._renew();
    this._mark();
  }

  /** By how many places other rows have moved the first of those that are seen and still there. */
  _moved(data) {
    const [first, last] = this.seen;
    for (const [place, row] of this._data.slice(first, last + 1).entries()) {
      const key = this._keyOf(row), now = data.findIndex((each) => this._keyOf(each) === key);
      if (now >= 0) return now - first - place;
    }
    return 0;
  }

  /** Draws anew what reads otherwise, cell by cell: what is clicked on meanwhile stays there. */
  _renew() {
    for (const row of [...this._box.querySelectorAll("[data-place]")]) {
      const index = Number(row.dataset.place), data = this._data[index];
      if (row.dataset.key !== String(this._keyOf(data))) this._rows.renew(index);
      else this._columns.forEach(({cell}, place) => fill(row.children[place], cell(data)));
    }
  }

  _row(index) {
    const data = this._data[index], key = this._keyOf(data), cells = this._columns.map(({kind, cell}) => {
      const made = element("span", {role: "gridcell", class: kind});
      fill(made, cell(data));
      return made;
    });
    const row = element("div", {
      role: "row", id: `${this._id}-${index}`, "data-key": key, "data-place": index, "aria-rowindex": index + 2,
      "aria-selected": key === this._current ? "true" : "false",
    }, ...cells);
    row.classList.toggle("odd", index % 2 === 1);
    return row;
  }

  _mark() {
    this._box.querySelector("[aria-selected=true]")?.setAttribute("aria-selected", "false");
    const row = [...this._box.querySelectorAll("[data-key]")].find((each) => each.dataset.key === String(this._current));
    row?.setAttribute("aria-selected", "true");
    if (row) this.element.setAttribute("aria-activedescendant", row.id);
    else this.element.removeAttribute("aria-activedescendant");
  }

  _click(event) {
    const row = event.target.closest("[data-place]");
    if (row === null || event.target.closest("a") !== null) return;
    this._go(Number(row.dataset.place));
    this._choose?.(this._data[this._place()]);
  }

  _place() {
    return this._data.findIndex((row) => String(this._keyOf(row)) === String(this._current));
  }

  _go(place) {
    const to = Math.max(0, Math.min(this._data.length - 1, place));
    this._current = this._keyOf(this._data[to]);
    this._rows.reveal(to);
    this._mark();
  }

  _key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || !this._data.length || event.target !== this.element) return;
    const at = this._place(), page = this._rows.fitting;
    if (event.key === "Enter" && at >= 0) {
      event.preventDefault();
      this._choose?.(this._data[at]);
    }
    const moves = {
      ArrowUp: at - 1, ArrowDown: at + 1, Home: 0, End: this._data.length - 1, PageUp: at - page, PageDown: at + page,
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    this._go(moves[event.key]);
  }
}

function fill(cell, content) {
  putInto(cell, content);
  cell.title = cell.textContent; // what is cut off
}
