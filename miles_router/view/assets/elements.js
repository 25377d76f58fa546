// Elements whose texts are texts: nothing here, and nothing that uses it, makes markup out of a string.

/** An element with attributes (null and false are left out) and children, which are elements or texts. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/** A number as people read it. */
export function counted(number) {
  return number.toLocaleString("en-US");
}

/** So many things of a kind. */
export function several(number, one) {
  return `${counted(number)} ${one}${number === 1 ? "" : "s"}`;
}
