// Cards and tables that all views use.

import {element, haveInside} from "../view/elements.js";

/** Return a card with a title and one number, whose element has this `id`. */
export function numberCard(id, title) {
  return element("div", {class: "card"}, element("h3", {}, title), element("p", {class: "number", id}));
}

/** Return a section with a heading. */
export function section(title, ...children) {
  return element("section", {class: "card", "aria-label": title}, element("h3", {}, title), ...children);
}

/** Wrap content that may be wider than the page, so that it scrolls sideways, by keyboard too. */
export function scroller(label, wide) {
  return element("div", {class: "wide", tabindex: "0", role: "region", "aria-label": label}, wide);
}

/** Return a table of texts or elements with an accessible name. */
export function table(label, titles, rows, attributes = {}) {
  const head = element("tr", {}, ...titles.map((title) => element("th", {scope: "col"}, title)));
  const body = rows.map((cells) => element("tr", {}, ...cells.map((cell) => element("td", {}, cell))));
  return scroller(label, element("table", attributes, element("thead", {}, head), element("tbody", {}, ...body)));
}

/** Replace the contents of `place`. A scroller with the same name keeps its scroll position and the focus, its own or
 * that of a link in it. */
export function refill(place, ...contents) {
  const nameOf = (each) => (each.matches(".wide") ? each.getAttribute("aria-label") : null);
  const before = new Map([...place.children].map((each) => [nameOf(each), each]));
  haveInside(place, contents.map((each) => {
    const stays = nameOf(each) === null ? undefined : before.get(nameOf(each));
    if (stays !== undefined && !stays.isEqualNode(each)) refillScroller(stays, each.children);
    return stays ?? each;
  }));
}

function refillScroller(scroller, contents) {
  const focused = scroller.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  scroller.replaceChildren(...contents);
  if (focused === null) return;
  const links = [...scroller.querySelectorAll("a")], link = links.find((each) => each.getAttribute("href") === focused);
  (link ?? scroller).focus({preventScroll: true});
}

/** Return a bar for `value` of `most`, with its number before it. */
export function bar(value, most, text, colour = null) {
  const fill = element("i"), track = element("span", {class: "track", "aria-hidden": "true"}, fill);
  fill.style.width = `${most > 0 ? 100 * value / most : 0}%`;
  if (colour !== null) fill.style.background = colour;
  return element("span", {class: "load"}, element("b", {}, text), track);
}

/** Return a state as a word, coloured if it is known. */
export function stateChip(state, known) {
  return element("span", {class: known.includes(state) ? `state ${state}` : "state"}, state);
}
