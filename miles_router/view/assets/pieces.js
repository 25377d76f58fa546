// What tokens spell, and how that is shown: text as text, what is no whole character as bytes.

import {marked} from "./visible.js";

function hex(bytes, between) {
  return Array.from(bytes, (byte) => byte.toString(16).toUpperCase().padStart(2, "0")).join(between);
}

/** Each token's bytes, by id. `vocabulary` is null where nobody knows them: ids are shown then, but where these are
 * hidden too. */
export class Pieces {
  constructor(vocabulary, {hidden = false} = {}) {
    this.hidden = hidden;
    this._known = new Map();
    this._shown = new Map();
    this.spelled = vocabulary !== null;
    if (vocabulary === null) return;
    const {ids, ends, bytes} = vocabulary;
    ids.forEach((id, place) => this._known.set(id, bytes.subarray(place ? ends[place - 1] : 0, ends[place])));
  }

  /** `text`: what it spells, null where that is no whole text; `bytes`: as hexadecimal, null where not known; `shown`:
   * what stands in the view; `kind`: "text", "bytes", "empty", "id" or "hidden"; `breaks`: whether a line ends with it. */
  of(id) {
    let found = this._shown.get(id);
    if (found === undefined) {
      found = this._made(id);
      this._shown.set(id, found);
    }
    return found;
  }

  _made(id) {
    if (id === null) return {text: null, bytes: null, shown: "▪", kind: "hidden", breaks: false};
    const known = this._known.get(id);
    if (known === undefined) return {text: null, bytes: null, shown: String(id), kind: "id", breaks: false};
    const bytes = hex(known, " ");
    if (!known.length) return {text: "", bytes, shown: "∅", kind: "empty", breaks: false};
    let text = null;
    try {
      text = new TextDecoder("utf-8", {fatal: true, ignoreBOM: true}).decode(known);
    } catch {
      return {text, bytes, shown: hex(known, "·"), kind: "bytes", breaks: false};
    }
    return {text, bytes, shown: marked(text), kind: "text", breaks: text.includes("\n")};
  }
}
