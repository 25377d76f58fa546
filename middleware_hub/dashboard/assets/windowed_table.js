// A table of any length that draws only its visible rows and supports keyboard navigation.

import {element, putInto} from "../view/elements.js";
import {VirtualRows} from "../view/virtual_rows.js";

/** A windowed table. Columns are `{title, kind, cell}`: `cell(row)` returns an element or a text, `kind` is a CSS class.
 * `keyOf(row)` returns a row's permanent key, `choose(row)` opens a row. */
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
    this._top = 0; // last scroll position
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

  /** The indices of the first and last visible row. */
  get seen() {
    const first = Math.floor(this._box.scrollTop / this._height);
    return [first, first + this._rows.fitting];
  }

  /** Call `act` at every scroll. */
  onScroll(act) {
    this._box.addEventListener("scroll", act, {passive: true});
  }

  /** Scroll to the first row. */
  rewind() {
    this._box.scrollTop = this._top = 0;
    this._current = null;
  }

  /** Restore the scroll position, which an element loses when it leaves the page. */
  back() {
    this._box.scrollTop = this._top;
    this._rows.update();
  }

  /** Show new data. Visible rows keep their place on the screen. */
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

  /** Return by how many rows the first visible row that still exists has moved. */
  _moved(data) {
    const [first, last] = this.seen;
    for (const [place, row] of this._data.slice(first, last + 1).entries()) {
      const key = this._keyOf(row), now = data.findIndex((each) => this._keyOf(each) === key);
      if (now >= 0) return now - first - place;
    }
    return 0;
  }

  /** Redraw only cells whose text has changed, so that an element being clicked stays in place. */
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
  cell.title = cell.textContent; // shows text that is cut off
}
