// The reasons why turns begin branches or segments, with the two messages and their marked difference.

import {difference} from "./difference.js";
import {element, putInto, several} from "./elements.js";
import {marked} from "./visible.js";

const WORDS = new Map([
  ["retry", "the same messages were sent again"],
  ["choice", "one of several answers to one request"],
  ["parallel", "sent while another request after the same turn was running"],
  ["edited_history", "messages after an earlier turn, or from the beginning, have changed"],
  ["compaction", "a shorter history under the same first message"],
  ["sub_agent", "another first message"],
  ["changed_tools", "the same history with other tools or template settings"],
  ["text_prompt", "a text that continues a recorded one"],
  ["batch", "one of several prompts in one request"],
]);
const MOST = 50;

/** Show one text with the parts marked that the other lacks; there, line breaks and tabs are visible signs. */
function compared(runs, kind, title) {
  const tag = kind === "held" ? "del" : "ins", seen = (part) => marked(part).replaceAll("↵", "↵\n");
  const parts = runs.filter(([each]) => each === "same" || each === kind);
  const text = element("p", {class: "message", dir: "auto"}, ...parts.map(([each, part]) =>
    (each === "same" ? part : element(tag, {}, seen(part)))));
  return element("div", {class: kind}, element("h4", {}, title), text);
}

function editOf({message, field, held, sent}) {
  const where = Number.isInteger(message) ? `message ${message}, ${field}` : String(field);
  if (held === null && sent === null) return element("p", {class: "edit"}, `${where}: its texts are hidden.`);
  const runs = difference(String(held ?? ""), String(sent ?? ""));
  return element(
    "div",
    {class: "edit"},
    element("p", {}, where),
    held === null ? element("p", {}, "One more message was sent.") : compared(runs, "held", "recorded"),
    sent === null ? element("p", {}, "The message was left out.") : compared(runs, "sent", "sent"),
  );
}

function lineOf(turn, go) {
  const reason = String(turn.reason), words = WORDS.get(reason);
  const begin = element("button", {type: "button"}, `turn ${turn.turn}`);
  begin.addEventListener("click", () => go(turn.start));
  const line = element("p", {}, begin, " ", element("strong", {}, reason), words === undefined ? "" : `: ${words}`);
  return element("li", {}, line, ...(turn.edit ? [editOf(turn.edit)] : []));
}

/** The reasons of a sheet's turns, in `element`. `go(position)` scrolls to a position. */
export class Reasons {
  constructor(go) {
    this._go = go;
    this._turns = this._keys = [];
    this._most = MOST;
    this._list = element("ol", {class: "reasons"});
    this._rest = element("button", {type: "button"});
    this._rest.addEventListener("click", () => {
      const first = this._list.children.length;
      this._most = Infinity;
      this._draw();
      this._list.children[first].querySelector("button").focus(); // this button is hidden now
    });
    const title = element("h3", {}, "Why a branch or segment begins");
    this.element = element("section", {class: "card", "aria-label": "Reasons"}, title, this._list, this._rest);
  }

  /** Show the reasons of a sheet, keeping those already shown. Return whether there are any. */
  show(sheet) {
    const turns = sheet.turns.filter((turn) => turn.reason !== null && turn.reason !== undefined);
    const keys = turns.map((turn) => JSON.stringify([turn.turn, turn.start, turn.reason, turn.edit]));
    const others = this._keys.findIndex((key, place) => key !== keys[place]);
    if (others >= 0) for (const line of [...this._list.children].slice(others)) line.remove();
    if (others === 0) this._most = MOST;
    this._turns = turns;
    this._keys = keys;
    this._draw();
    return turns.length > 0;
  }

  _draw() {
    const shown = this._turns.slice(this._list.children.length, this._most);
    this._list.append(...shown.map((turn) => lineOf(turn, this._go)));
    this._rest.hidden = this._turns.length <= this._most;
    putInto(this._rest, `Show ${several(this._turns.length - this._most, "more reason")}`);
  }
}
