// A sample with all that belongs to it: its tokens, the tree that it is a branch of, why its segments begin, its facts.

import {BranchTree} from "./branch_tree.js";
import {element} from "./elements.js";
import {reasonsOf} from "./reasons.js";
import {TokenView} from "./token_view.js";

function notesOf(sheet, pieces) {
  const notes = [...sheet.facts.notes];
  if (!pieces.spelled && !pieces.hidden) notes.push("Ids alone are shown: no tokenizer was given (--hf-checkpoint).");
  return notes.map((note) => element("p", {class: "notice"}, note));
}

function factsOf(sheet) {
  if (sheet.facts.about === null) return null;
  const summary = element("summary", {}, "Metadata");
  return element("details", {class: "card"}, summary, element("pre", {tabindex: "0"}, sheet.facts.about));
}

/** Draws into its `element`. `choose(sample, turn)` is asked for another sample, from where a turn begins. */
export class SampleView {
  constructor(choose) {
    this._choose = choose;
    this.tokens = new TokenView();
    this._notes = element("div", {class: "notes"});
    this._beside = element("div", {class: "beside"});
    this.element = element("div", {class: "sample-view"}, this._notes, this.tokens.element, this._beside);
  }

  /** Another sheet; `tree` is its session's, or null, in which it stands as `sample`. It begins at a turn, or else at a
   * position. */
  show(sheet, pieces, {tree = null, sample = 0, turn = null, position = 0} = {}) {
    const branches = tree === null ? null : new BranchTree(tree, sample, this._choose);
    const reasons = reasonsOf(sheet, (position) => this.tokens.go(position));
    this._notes.replaceChildren(...notesOf(sheet, pieces));
    this._beside.replaceChildren(...[this.tokens.details, branches?.element, reasons, factsOf(sheet)].filter(Boolean));
    branches?.reveal();
    this.tokens.show(sheet, pieces, sheet.turns.find((each) => each.turn === turn)?.start ?? position);
  }
}
