// A sample with all that belongs to it: its tokens, the tree that it is a branch of, why its segments begin, its facts.

import {BranchTree} from "./branch_tree.js";
import {element, haveInside, putInto} from "./elements.js";
import {Reasons} from "./reasons.js";
import {TokenView} from "./token_view.js";
import {visibleJson} from "./visible.js";

function notesOf(sheet, pieces) {
  const notes = [...sheet.facts.notes];
  if (!pieces.spelled && !pieces.hidden) {
    notes.push("Only token ids are shown: no tokenizer was given (--hf-checkpoint).");
  }
  return notes.map((note) => element("p", {class: "notice"}, note));
}

/** Draws into its `element`. `choose(sample, turn)` is asked for another sample, from where a turn begins. */
export class SampleView {
  constructor(choose) {
    this.tokens = new TokenView();
    this._notes = element("div", {class: "notes"});
    this._branches = new BranchTree(choose);
    this._reasons = new Reasons((position) => this.tokens.go(position));
    this._about = element("pre", {tabindex: "0", role: "region", "aria-label": "Metadata"});
    this._facts = element("details", {class: "card"}, element("summary", {}, "Metadata"), this._about);
    this._beside = element("div", {class: "beside"});
    this.element = element("div", {class: "sample-view"}, this._notes, this.tokens.element, this._beside);
  }

  /** Another sheet, from a turn or else from its beginning; or the same one `grown`: what is open, has the focus or is
   * seen stays. `tree` is its session's, or null, in which it stands as `sample`. */
  show(sheet, pieces, {tree = null, sample = 0, turn = null, grown = false} = {}) {
    haveInside(this._notes, notesOf(sheet, pieces));
    if (tree !== null) this._branches.show(tree, sample);
    putInto(this._about, visibleJson(sheet.facts.about ?? ""));
    haveInside(this._beside, [
      this.tokens.details,
      ...(tree === null ? [] : [this._branches.element]),
      ...(this._reasons.show(sheet) ? [this._reasons.element] : []),
      ...(sheet.facts.about === null ? [] : [this._facts]),
    ]);
    if (tree !== null && !grown) this._branches.reveal();
    if (grown) this.tokens.grow(sheet, pieces);
    else this.tokens.show(sheet, pieces, sheet.turns.find((each) => each.turn === turn)?.start ?? 0);
  }
}
