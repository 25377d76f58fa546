// The token view: the tokens of one sample with a choice of colourings, and details by pointer and keyboard.

import {COLOURINGS, PLAIN} from "./colourings.js";
import {detailsOf, spoken} from "./details.js";
import {element, putInto} from "./elements.js";
import {Widths, rowAt, rowsOf} from "./layout.js";
import {VirtualRows} from "./virtual_rows.js";
import {visibleJson} from "./visible.js";

const ROW = 28;

/** The view of a sheet, in `element`, and of one token's details, in `details`. `show` sets the sheet. */
export class TokenView {
  constructor() {
    this._sheet = this._pieces = this._widths = null;
    this._starts = Int32Array.of(0);
    this._room = 0;
    this._current = this._told = 0;
    this._wanted = "mask";
    this._build();
    this._rows = new VirtualRows(this._box, ROW, (index) => this._row(index));
    this._listen();
  }

  _build() {
    this._select = element("select", {id: "colour"});
    this._select.append(...COLOURINGS.map(({name, title}) => element("option", {value: name}, title)));
    this._goto = element("input", {id: "goto", type: "number", min: "0", step: "1", inputmode: "numeric"});
    this._legend = element("ul", {class: "legend", "aria-label": "Legend"});
    this._box = element("div", {class: "tokens", role: "listbox", tabindex: "0", "aria-label": "Tokens"});
    this._details = element("dl", {class: "details"});
    this.details = element("section", {class: "card", "aria-label": "Details of the token"}, this._details);
    this._live = element("p", {class: "unseen", role: "status", "aria-live": "polite"});
    this.element = element(
      "section",
      {class: "token-view", "aria-label": "Tokens of the sample"},
      element(
        "form",
        {class: "controls"},
        element("label", {for: "colour"}, "Colours by "), this._select,
        element("label", {for: "goto"}, "Position "), this._goto,
      ),
      this._legend,
      this._box,
      this._live,
    );
  }

  _listen() {
    this.element.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
    this._select.addEventListener("change", () => this.colour(this._select.value));
    this._goto.addEventListener("change", () => {
      const position = this._goto.valueAsNumber;
      if (Number.isInteger(position)) this.go(position);
    });
    this._box.addEventListener("keydown", (event) => this._key(event));
    this._box.addEventListener("click", (event) => {
      const position = this._positionOf(event.target);
      if (position !== null) this.go(position);
    });
    this._box.addEventListener("pointerover", (event) => {
      const position = this._positionOf(event.target);
      if (position !== null) this._describe(position);
    });
    this._box.addEventListener("pointerleave", () => this._describe(this._current));
    new ResizeObserver(() => this._arrange()).observe(this._box);
  }

  /** Show another sheet at a position. */
  show(sheet, pieces, position = 0) {
    this._take(sheet, pieces, position);
    this._arrange();
    this._goto.value = String(this._current);
    this._describe(this._current);
  }

  /** Show the same sheet after it has grown. The scroll position and the described token stay. */
  grow(sheet, pieces) {
    this._take(sheet, pieces, this._current);
    this._arrange({reveal: false});
    this._describe(this._told);
  }

  _take(sheet, pieces, position) {
    this._sheet = sheet;
    this._pieces = pieces;
    this._current = Math.max(0, Math.min(position, sheet.length - 1));
    this._goto.max = String(Math.max(0, sheet.length - 1));
    this._room = 0;
    for (const option of this._select.options) {
      option.disabled = !COLOURINGS.find(({name}) => name === option.value).fits(sheet);
    }
    this._paint();
  }

  /** Choose another colouring. */
  colour(name) {
    this._wanted = name;
    this._paint();
    this._rows.redraw();
  }

  /** Set the current token and announce it to screen readers. */
  go(position) {
    if (!this._sheet?.length) return;
    this._current = Math.max(0, Math.min(position, this._sheet.length - 1));
    this._rows.reveal(rowAt(this._starts, this._current));
    this._mark();
    this._goto.value = String(this._current);
    putInto(this._live, spoken(this._describe(this._current)));
  }

  /** Apply the chosen colouring, or the first that this sheet supports. */
  _paint() {
    const fitting = COLOURINGS.filter(({fits}) => fits(this._sheet));
    const chosen = fitting.find(({name}) => name === this._wanted) ?? fitting[0];
    if (chosen !== undefined) this._select.value = chosen.name;
    this._colours = chosen === undefined ? PLAIN : chosen.of(this._sheet);
    this._legend.replaceChildren(...this._colours.legend.map(({colour, text}) =>
      element("li", {}, element("span", {class: `swatch ${colour}`, "aria-hidden": "true"}, "a"), text.trim())));
  }

  /** Lay out the rows in the available width. */
  _arrange({reveal = true} = {}) {
    const room = this._box.clientWidth - 8;
    if (this._sheet === null || room <= 0 || room === this._room) return;
    this._widths ??= new Widths(getComputedStyle(this._box).font);
    this._room = room;
    this._starts = rowsOf(this._sheet, this._pieces, this._widths, room);
    this._rows.reset(Math.max(0, this._starts.length - 1));
    if (reveal) this._rows.reveal(rowAt(this._starts, this._current));
    this._mark();
  }

  _row(index) {
    const row = element("div", {role: "presentation"});
    for (let position = this._starts[index]; position < this._starts[index + 1]; position++) {
      row.append(this._token(position));
    }
    return row;
  }

  _token(position) {
    const id = this._sheet.id(position), piece = this._pieces.of(id);
    const token = element("span", {
      id: `token-${position}`,
      class: `token ${this._colours.at(position)} ${piece.kind}`,
      role: "option",
      "data-token-id": id,
      "data-position": position,
      "aria-posinset": position + 1,
      "aria-setsize": this._sheet.length,
      "aria-selected": position === this._current ? "true" : "false",
      "aria-label": piece.shown.trim() ? null : visibleJson(JSON.stringify(piece.text)),
    }, piece.shown);
    token.classList.toggle("sampled", this._sheet.isSampled(position) === true);
    token.style.width = `${Math.min(this._widths.of(piece.shown), this._room)}px`;
    return token;
  }

  _positionOf(target) {
    const token = target instanceof Element ? target.closest(".token") : null;
    return token === null ? null : Number(token.dataset.position);
  }

  _mark() {
    this._box.querySelector("[aria-selected=true]")?.setAttribute("aria-selected", "false");
    const token = document.getElementById(`token-${this._current}`);
    token?.setAttribute("aria-selected", "true");
    if (token) this._box.setAttribute("aria-activedescendant", token.id);
    else this._box.removeAttribute("aria-activedescendant");
  }

  _describe(position) {
    this._told = position;
    const details = position < (this._sheet?.length ?? 0) ? detailsOf(this._sheet, this._pieces, position) : [];
    this._details.replaceChildren(...details.map(([field, title, text]) =>
      element("div", {}, element("dt", {}, title), element("dd", {"data-field": field}, text))));
    return details;
  }

  _key(event) {
    if (event.altKey || event.metaKey || !this._sheet?.length) return;
    const row = rowAt(this._starts, this._current), page = this._rows.fitting;
    const moves = {
      ArrowLeft: () => this._current - 1,
      ArrowRight: () => this._current + 1,
      ArrowUp: () => this._beneath(row - 1),
      ArrowDown: () => this._beneath(row + 1),
      PageUp: () => this._beneath(Math.max(0, row - page)),
      PageDown: () => this._beneath(Math.min(this._starts.length - 2, row + page)),
      Home: () => (event.ctrlKey ? 0 : this._starts[row]),
      End: () => (event.ctrlKey ? this._sheet.length : this._starts[row + 1]) - 1,
    };
    const move = moves[event.key];
    if (move === undefined) return;
    event.preventDefault();
    this.go(move());
  }

  /** Return the position in another row that is horizontally nearest to the current one. */
  _beneath(row) {
    if (row < 0 || row > this._starts.length - 2) return this._current;
    const middle = this._left(this._current);
    let found = this._starts[row];
    for (let position = found; position < this._starts[row + 1] && this._left(position) <= middle; position++) {
      found = position;
    }
    return found;
  }

  /** Return the pixels before a position in its row. */
  _left(position) {
    let left = 0;
    for (let before = this._starts[rowAt(this._starts, position)]; before < position; before++) {
      left += this._widths.of(this._pieces.of(this._sheet.id(before)).shown);
    }
    return left;
  }
}
