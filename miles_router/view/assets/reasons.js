// Why turns begin something new: the reason, and the two messages with their difference marked.

import {difference} from "./difference.js";
import {element, several} from "./elements.js";

const WORDS = new Map([
  ["retry", "the same messages were sent again"],
  ["choice", "one of several answers to one request"],
  ["parallel", "asked while another was under way behind the same turn"],
  ["edited_history", "messages behind an earlier turn, or from the beginning, are others now"],
  ["compaction", "a shorter history under the same first message"],
  ["sub_agent", "another first message"],
  ["changed_tools", "the same history with other tools or template settings"],
  ["text_prompt", "a text that goes on from a held one"],
  ["batch", "one of several prompts"],
]);
const MOST = 50;

/** One text, with what the other has not marked. */
function marked(runs, kind, title) {
  const text = element("p", {class: "message", dir: "auto"});
  for (const [each, part] of runs) {
    if (each === "same") text.append(part);
    else if (each === kind) text.append(element(kind === "held" ? "del" : "ins", {}, part));
  }
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
    held === null ? element("p", {}, "One more message was sent.") : marked(runs, "held", "held"),
    sent === null ? element("p", {}, "The message was left out.") : marked(runs, "sent", "sent"),
  );
}

/** The reasons of a sheet's turns; null where it has none. `go(position)` shows a place. */
export function reasonsOf(sheet, go) {
  const turns = sheet.turns.filter((turn) => turn.reason !== null && turn.reason !== undefined);
  if (!turns.length) return null;
  const list = element("ol", {class: "reasons"});
  const draw = (shown) => {
    for (const turn of shown) {
      const reason = String(turn.reason), begin = element("button", {type: "button"}, `turn ${turn.turn}`);
      begin.addEventListener("click", () => go(turn.start));
      const words = WORDS.get(reason);
      const line = element("p", {}, begin, " ", element("strong", {}, reason), words === undefined ? "" : `: ${words}`);
      list.append(element("li", {}, line, ...(turn.edit ? [editOf(turn.edit)] : [])));
    }
  };
  draw(turns.slice(0, MOST));
  const title = element("h3", {}, "Why it begins anew");
  const section = element("section", {class: "card", "aria-label": "Reasons"}, title, list);
  if (turns.length > MOST) {
    const rest = element("button", {type: "button"}, `Show ${several(turns.length - MOST, "more reason")}`);
    rest.addEventListener("click", () => {
      draw(turns.slice(MOST));
      rest.remove();
    });
    section.append(rest);
  }
  return section;
}
