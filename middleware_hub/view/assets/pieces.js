// The texts of tokens, and how they are shown: as text, or as bytes if they are not complete characters.

import {marked} from "./visible.js";

function hex(bytes, between) {
  return Array.from(bytes, (byte) => byte.toString(16).toUpperCase().padStart(2, "0")).join(between);
}

/** The bytes of tokens, by id. If `vocabulary` is null they are unknown, and ids are shown, unless hidden too. */
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

  /** Return `text`, null if not complete characters; `bytes` as hexadecimal, null if unknown; `shown`, the text in the
   * view; `kind`: "text", "bytes", "empty", "id" or "hidden"; `breaks`: whether the token contains a line break. */
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
