// The turns of a session as a tree: one line for consecutive turns, indented below the line they branch from.

import {element, putInto, several} from "./elements.js";
import {VirtualRows} from "./virtual_rows.js";

const ROW = 48, DEEPEST = 8, MOST_ROWS = 8;

/** Return the indices of the lines from the root to the line that ends with a sample. */
function lineage(lines, sample) {
  const found = new Set();
  let at = lines.findIndex((line) => line.samples.includes(sample));
  for (let depth = Infinity; at >= 0; at--) {
    if (lines[at].depth < depth) {
      found.add(at);
      depth = lines[at].depth;
    }
  }
  return found;
}

/** Return the first sample that goes through a line, or null. */
function firstSample(lines, place) {
  for (let at = place; at < lines.length && (at === place || lines[at].depth > lines[place].depth); at++) {
    if (lines[at].samples.length) return lines[at].samples[0];
  }
  return null;
}

/** The tree of a session, in `element`. `choose(sample, turn)` opens another sample at a turn. */
export class BranchTree {
  constructor(choose) {
    this._lines = [];
    this._keys = [];
    this._path = new Set();
    this._choose = choose;
    this._box = element("div", {class: "tree", role: "list", "aria-label": "Branches", tabindex: "0"});
    this._session = element("code");
    const title = element("h3", {}, "Branches of ", this._session);
    this.element = element("section", {class: "card", "aria-label": "Branch tree"}, title, this._box);
    this._rows = new VirtualRows(this._box, ROW, (index) => this._row(index));
  }

  /** Show the tree of `sample`. If the lines begin with the shown ones, those stay, with focus and pointer. */
  show({session_id: session, lines}, sample) {
    const keys = lines.map((line) => `${line.first} ${session}`), focused = this._focused();
    const stays = this._keys.every((key, place) => key === keys[place]);
    this._lines = lines;
    this._keys = keys;
    this._sample = sample;
    this._path = lineage(lines, sample);
    putInto(this._session, session);
    this._box.style.height = `${Math.min(lines.length, MOST_ROWS) * ROW + 2}px`;
    if (stays) {
      this._rows.resize(lines.length);
      for (const [index, row] of this._rows.drawn) this._fill(row, index);
    } else {
      this._rows.reset(lines.length);
      this._focus(keys.indexOf(focused));
    }
  }

  /** Scroll to the end of the sample. Call it once the element is in the page. */
  reveal() {
    this._rows.reveal(Math.max(0, this._lines.findIndex((line) => line.samples.includes(this._sample))));
  }

  _focused() {
    return this._keys[this._rows.drawn.find(([, row]) => row.contains(document.activeElement))?.[0]];
  }

  _focus(place) {
    if (place < 0) return;
    this._rows.reveal(place);
    this._rows.drawn.find(([index]) => index === place)[1].firstChild.focus({preventScroll: true});
  }

  _row(index) {
    const button = element("button", {type: "button"}, element("span"), element("span", {class: "soft"}));
    button.addEventListener("click", () => {
      // Keep the current sample if it goes through the line.
      const sample = this._path.has(index) ? this._sample : firstSample(this._lines, index);
      if (sample !== null) this._choose(sample, this._lines[index].first);
    });
    const row = element("div", {role: "listitem"}, button);
    this._fill(row, index);
    return row;
  }

  _fill(row, index) {
    const line = this._lines[index], button = row.firstChild, [names, sums] = button.children;
    const turns = line.turns === 1 ? `turn ${line.first}` : `turns ${line.first} to ${line.last}`;
    const ends = line.samples.length ? ` · sample ${line.samples.join(", ")}` : "";
    const reason = line.reason === null ? "" : ` · ${line.reason}`;
    putInto(names, element("span", {title: `${turns}${reason}`}, element("b", {}, turns), reason));
    putInto(sums, `${several(line.tokens, "token")} sampled${ends}`);
    if (line.samples.includes(this._sample)) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
    row.setAttribute("aria-level", line.depth + 1);
    row.dataset.depth = Math.min(line.depth, DEEPEST);
    row.classList.toggle("on-path", this._path.has(index));
  }
}
