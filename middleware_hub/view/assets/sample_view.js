// One sample: its tokens, the tree of its session, the reasons of its segments, and its metadata.

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

/** The view of a sample, in `element`. `choose(sample, turn)` opens another sample at a turn. */
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

  /** Show another sheet, at a turn or at its beginning. If the same sheet has `grown`, keep focus, scroll position and
   * what is open. `tree` is the session's tree, which contains this sheet as `sample`, or null. */
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
