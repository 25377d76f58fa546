// Elements whose texts are texts, all of which is seen: nothing here, and nothing that uses it, makes markup out of a
// string. Nobody else writes a text into a page.

import {visible} from "./visible.js";

const READ = new Set(["title", "aria-label"]);

/** An element with attributes (null and false are left out) and children, which are elements or texts. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    made.setAttribute(name, value === true ? "" : READ.has(name) ? visible(value) : value);
  }
  made.append(...children.map(child));
  return made;
}

function child(content) {
  return content instanceof Element ? content : visible(String(content));
}

/** Content in the place of another, unless it reads the same: what a finger is on stays there, and nothing is read out
 * again. */
export function putInto(place, content) {
  const made = child(content);
  if (place.textContent !== (made.textContent ?? made)) place.replaceChildren(made);
}

/** These children and no others. Those that stay are not touched: they keep the focus, and where they are scrolled to. */
export function haveInside(place, children) {
  for (const each of [...place.children]) if (!children.includes(each)) each.remove();
  children.forEach((each, at) => {
    if (place.children[at] !== each) place.insertBefore(each, place.children[at] ?? null);
  });
}

/** The title of the page. */
export function entitle(title) {
  document.title = visible(title);
}

/** A number as people read it. */
export function counted(number) {
  return number.toLocaleString("en-US");
}

/** So many things of a kind. */
export function several(number, one) {
  return `${counted(number)} ${one}${number === 1 ? "" : "s"}`;
}
