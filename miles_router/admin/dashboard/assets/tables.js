// Cards and tables that all views use.

import {element, haveInside} from "../view/elements.js";

/** A card with one number under its name; `id` finds it. */
export function numberCard(id, title) {
  return element("div", {class: "card"}, element("h3", {}, title), element("p", {class: "number", id}));
}

/** A section with a heading and what stands in it. */
export function section(title, ...children) {
  return element("section", {class: "card", "aria-label": title}, element("h3", {}, title), ...children);
}

/** What may be wider than the page: it scrolls sideways by itself, with keys too. */
export function scroller(label, wide) {
  return element("div", {class: "wide", tabindex: "0", role: "region", "aria-label": label}, wide);
}

/** A table of texts or elements under a name. */
export function table(label, titles, rows, attributes = {}) {
  const head = element("tr", {}, ...titles.map((title) => element("th", {scope: "col"}, title)));
  const body = rows.map((cells) => element("tr", {}, ...cells.map((cell) => element("td", {}, cell))));
  return scroller(label, element("table", attributes, element("thead", {}, head), element("tbody", {}, ...body)));
}

/** These in the place of others. A scroller of the same name stays, scrolled as it is, and with the focus: its own, or a
 * link's in it. */
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

/** A bar as long as its share of the most, with its number in front. */
export function bar(value, most, text, colour = null) {
  const fill = element("i"), track = element("span", {class: "track", "aria-hidden": "true"}, fill);
  fill.style.width = `${most > 0 ? 100 * value / most : 0}%`;
  if (colour !== null) fill.style.background = colour;
  return element("span", {class: "load"}, element("b", {}, text), track);
}

/** A state as a word with a colour; what is no known state is a word alone. */
export function stateChip(state, known) {
  return element("span", {class: known.includes(state) ? `state ${state}` : "state"}, state);
}
