// The turns of a session as a tree: a line for turns in a row, indented behind what they branch from.

import {element, several} from "./elements.js";
import {VirtualRows} from "./virtual_rows.js";

const ROW = 48, DEEPEST = 8, MOST_ROWS = 8;

/** The lines from the root to the one that ends with a sample. */
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

/** The first sample that goes through a line. */
function firstSample(lines, place) {
  for (let at = place; at < lines.length && (at === place || lines[at].depth > lines[place].depth); at++) {
    if (lines[at].samples.length) return lines[at].samples[0];
  }
  return null;
}

/** The tree of the session that `sample` is of. `choose(sample, turn)` shows another one from a turn on. */
export class BranchTree {
  constructor(tree, sample, choose) {
    this._lines = tree.lines;
    this._sample = sample;
    this._path = lineage(tree.lines, sample);
    this._choose = choose;
    const box = element("div", {class: "tree", role: "list", "aria-label": "Branches", tabindex: "0"});
    box.style.height = `${Math.min(tree.lines.length, MOST_ROWS) * ROW + 2}px`;
    const title = element("h3", {}, "Branches of ", element("code", {}, tree.session_id));
    this.element = element("section", {class: "card", "aria-label": "Branch tree"}, title, box);
    this._rows = new VirtualRows(box, ROW, (index) => this._row(index));
    this._rows.reset(tree.lines.length);
  }

  /** Once it is in the page: scrolls to where the sample ends. */
  reveal() {
    this._rows.reveal(Math.max(0, this._lines.findIndex((line) => line.samples.includes(this._sample))));
  }

  _row(index) {
    const line = this._lines[index];
    const turns = line.turns === 1 ? `turn ${line.first}` : `turns ${line.first} to ${line.last}`;
    const ends = line.samples.length ? ` · sample ${line.samples.join(", ")}` : "";
    const reason = line.reason === null ? "" : ` · ${line.reason}`;
    const button = element(
      "button",
      {type: "button", "aria-current": line.samples.includes(this._sample) ? "true" : null},
      element("span", {}, element("b", {}, turns), reason),
      element("span", {class: "soft"}, `${several(line.tokens, "token")} sampled${ends}`),
    );
    button.title = `${turns}${reason}`;
    button.addEventListener("click", () => {
      // Where the chosen sample goes through the line it stays.
      const sample = this._path.has(index) ? this._sample : firstSample(this._lines, index);
      if (sample !== null) this._choose(sample, line.first);
    });
    const row = element("div", {role: "listitem", "aria-level": line.depth + 1}, button);
    row.classList.add(`depth-${Math.min(line.depth, DEEPEST)}`);
    row.classList.toggle("on-path", this._path.has(index));
    return row;
  }
}
