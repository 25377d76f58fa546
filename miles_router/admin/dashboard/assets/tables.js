// Cards and tables that all views use.

import {element} from "../view/elements.js";

/** A card with one number under its name; `id` finds it. */
export function numberCard(id, title) {
  return element("div", {class: "card"}, element("h3", {}, title), element("p", {class: "number", id}));
}

/** A section with a heading and what stands in it. */
export function section(title, ...children) {
  return element("section", {class: "card", "aria-label": title}, element("h3", {}, title), ...children);
}

/** A table of texts or elements; it scrolls sideways by itself. */
export function table(titles, rows, attributes = {}) {
  const head = element("tr", {}, ...titles.map((title) => element("th", {scope: "col"}, title)));
  const body = rows.map((cells) => element("tr", {}, ...cells.map((cell) => element("td", {}, cell))));
  const made = element("table", attributes, element("thead", {}, head), element("tbody", {}, ...body));
  return element("div", {class: "wide", tabindex: "0", role: "group"}, made);
}

/** A bar as long as its share of the most, with its number in front. */
export function bar(value, most, text, colour = null) {
  const fill = element("i"), track = element("span", {class: "track", "aria-hidden": "true"}, fill);
  fill.style.width = `${most > 0 ? 100 * value / most : 0}%`;
  if (colour !== null) fill.style.background = colour;
  return element("span", {class: "load"}, element("b", {}, text), track);
}

/** Content in the place of another, unless it reads the same: what a finger is on stays there. */
export function putInto(place, content) {
  const made = content instanceof Element ? content : document.createTextNode(content);
  if (place.textContent !== made.textContent) place.replaceChildren(made);
}

/** A state as a word with a colour; what is no known state is a word alone. */
export function stateChip(state, known) {
  return element("span", {class: known.includes(state) ? `state ${state}` : "state"}, state);
}
