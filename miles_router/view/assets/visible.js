// Texts of others as one can see all of them. What is not seen, turns the writing's direction, looks like a space and is
// none, or has no glyph is shown by its number; line breaks and tabs do what they are for.

const UNSEEN = /[[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}\p{Zs}\p{Default_Ignorable_Code_Point}\u2800]--[ ]]/gv;
// Marks upon one letter: more of them reach over what stands around, and thousands stop a browser.
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

/** A text to read. `element` shows every text so. */
export function visible(text) {
  return unpiled(text.replace(UNSEEN, (each) => (KEPT.has(each) ? each : mark(each))));
}

/** The same with marks for line breaks and tabs too. */
export function marked(text) {
  return unpiled(text.replace(UNSEEN, mark));
}

function unpiled(text) {
  return text.replace(PILED, (_, first, more) => `${first}⟨${[...more].length} more marks⟩`);
}

/** JSON, which stays JSON of the same. */
export function visibleJson(json) {
  return json.replace(UNSEEN, (each) => (KEPT.has(each) ? each : escaped(each)));
}
