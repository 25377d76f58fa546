// A list of rows of equal height that draws only the visible rows and a few around them.

import {element} from "./elements.js";

const AROUND = 6;

/** A virtual list in the scrolling element `scroller`. `draw(index)` returns the element of a row. */
export class VirtualRows {
  constructor(scroller, rowHeight, draw) {
    this.scroller = scroller;
    this.rowHeight = rowHeight;
    this._draw = draw;
    this._count = 0;
    this._drawn = new Map();
    this._asked = false;
    this._space = element("div", {class: "space", role: "presentation"});
    scroller.replaceChildren(this._space);
    scroller.addEventListener("scroll", () => this._soon(), {passive: true});
    new ResizeObserver(() => this._soon()).observe(scroller);
  }

  /** Show other rows: redraw everything. */
  reset(count) {
    this._drawn.clear();
    this._space.replaceChildren();
    this.resize(count);
  }

  /** Change the number of rows. Rows already drawn stay. */
  resize(count) {
    this._count = count;
    this._space.style.height = `${count * this.rowHeight}px`;
    this.update();
  }

  /** The drawn rows as `[index, row]`. */
  get drawn() {
    return [...this._drawn];
  }

  /** Redraw all rows. */
  redraw() {
    this.reset(this._count);
  }

  /** Redraw one row that is drawn. */
  renew(index) {
    this._drawn.get(index).remove();
    this._drawn.delete(index);
    this._place(index);
  }

  /** How many rows fit the visible area. */
  get fitting() {
    return Math.max(1, Math.floor(this.scroller.clientHeight / this.rowHeight));
  }

  /** Scroll until a row is visible, and draw it. */
  reveal(index) {
    const top = index * this.rowHeight, {scrollTop, clientHeight} = this.scroller;
    if (top < scrollTop) this.scroller.scrollTop = top;
    else if (top + this.rowHeight > scrollTop + clientHeight) {
      this.scroller.scrollTop = top + this.rowHeight - clientHeight;
    }
    this.update();
  }

  /** Draw the rows that are visible now. */
  update() {
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / this.rowHeight) - AROUND);
    const last = Math.min(this._count, first + this.fitting + 2 * AROUND + 1);
    for (const [index, row] of this._drawn) {
      if (index < first || index >= last) {
        row.remove();
        this._drawn.delete(index);
      }
    }
    for (let index = first; index < last; index++) {
      if (!this._drawn.has(index)) this._place(index);
    }
  }

  _place(index) {
    const row = this._draw(index);
    row.classList.add("row");
    row.style.transform = `translateY(${index * this.rowHeight}px)`;
    let before = null; // keep document order equal to row order, for screen readers
    for (let next = index + 1; before === null && next <= index + this.fitting + 2 * AROUND + 1; next++) {
      before = this._drawn.get(next) ?? null;
    }
    this._space.insertBefore(row, before);
    this._drawn.set(index, row);
  }

  _soon() {
    if (this._asked) return;
    this._asked = true;
    requestAnimationFrame(() => {
      this._asked = false;
      this.update();
    });
  }
}
