// Creation of elements. Strings only ever become text, never markup, and invisible characters are made visible. All
// other modules write text into pages only by these functions.

import {visible} from "./visible.js";

const READ = new Set(["title", "aria-label"]);

/** Create an element. Attributes that are null or false are left out; children are elements or texts. */
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

/** Replace the content unless its text is the same, so that an element being touched stays and screen readers do not
 * repeat it. */
export function putInto(place, content) {
  const made = child(content);
  if (place.textContent !== (made.textContent ?? made)) place.replaceChildren(made);
}

/** Set the children. Children that remain are not touched, so they keep focus and scroll position. */
export function haveInside(place, children) {
  for (const each of [...place.children]) if (!children.includes(each)) each.remove();
  children.forEach((each, at) => {
    if (place.children[at] !== each) place.insertBefore(each, place.children[at] ?? null);
  });
}

/** Set the title of the page. */
export function entitle(title) {
  document.title = visible(title);
}

/** Format a number with thousands separators. */
export function counted(number) {
  return number.toLocaleString("en-US");
}

/** Format a number with a singular or plural noun. */
export function several(number, one) {
  return `${counted(number)} ${one}${number === 1 ? "" : "s"}`;
}
