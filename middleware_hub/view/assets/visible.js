// Make untrusted text fully visible. Characters that are invisible, change the writing direction, look like a space, or
// have no glyph are shown by their code point. Line breaks and tabs keep their function.

const UNSEEN = /[[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}\p{Zs}\p{Default_Ignorable_Code_Point}\u2800]--[ ]]/gv;
// Combining marks on one letter: many of them cover the text around, and thousands hang a browser.
const PILED = /(\p{M}{8})(\p{M}+)/gu;
const KEPT = new Set(["\n", "\t"]);
const MARKS = new Map([["\n", "↵"], ["\r", "␍"], ["\t", "⇥"]]);

function number(character) {
  return character.codePointAt(0).toString(16).padStart(4, "0");
}

function mark(character) {
  return MARKS.get(character) ?? `⟨U+${number(character).toUpperCase()}⟩`;
}

function escaped(character) {
  return Array.from({length: character.length}, (_, at) => `\\u${number(character[at])}`).join("");
}

/** Return a text with such characters made visible. `element` applies it to every text. */
export function visible(text) {
  return unpiled(text.replace(UNSEEN, (each) => (KEPT.has(each) ? each : mark(each))));
}

/** Do the same, and show signs for line breaks and tabs too. */
export function marked(text) {
  return unpiled(text.replace(UNSEEN, mark));
}

function unpiled(text) {
  return text.replace(PILED, (_, first, more) => `${first}⟨${[...more].length} more marks⟩`);
}

/** Escape such characters in JSON, which stays the same JSON value. */
export function visibleJson(json) {
  return json.replace(UNSEEN, (each) => (KEPT.has(each) ? each : escaped(each)));
}
