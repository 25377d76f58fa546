// The episodes of one group side by side: one column for each, one row for each fact.

import {counted, element} from "../view/elements.js";
import {bar, scroller, stateChip} from "./tables.js";
import {duration} from "./words.js";

const MOST = 64;

function facts(rows) {
  const most = Math.max(...rows.map((row) => row.tokens.sampled));
  return [
    ["state", (row) => stateChip(row.state, ["running", "waiting", "idle", "ended"])],
    ["turns", (row) => counted(row.turns)],
    ["segments", (row) => counted(row.segments)],
    ["leaves", (row) => counted(row.leaves)],
    ["sampled", (row) => bar(row.tokens.sampled, most, counted(row.tokens.sampled))],
    ["trained", (row) => (row.tokens.trained === null ? "?" : bar(row.tokens.trained, most, counted(row.tokens.trained)))],
    ["waited", (row) => duration(row.waited_s)],
    ["lasted", (row) => duration(Math.max(0, row.last_used_at - row.started_at))],
    ["forks", (row) => Object.entries(row.reasons).map(([reason, count]) => `${reason} ×${count}`).join(", ")],
    ["versions", (row) => row.weight_versions.join(", ")],
    ["workers", (row) => row.workers.join(", ")],
    ["finish", (row) => row.finish_reason ?? ""],
    ["ended", (row) => row.end_reason ?? ""],
  ];
}

/** Return a heading and a table of the first `MOST` rows. */
export function groupTable(rows) {
  const some = rows.slice(0, MOST);
  if (!some.length) return [element("p", {class: "soft"}, "The router holds no episode of this group.")];
  const head = element("tr", {}, element("td"), ...some.map((row) =>
    element("th", {scope: "col"}, element("a", {href: `#/episodes/${encodeURIComponent(row.id)}`}, row.id))));
  const lines = facts(some).map(([title, cell]) =>
    element("tr", {}, element("th", {scope: "row"}, title), ...some.map((row) => element("td", {}, cell(row)))));
  const made = element("table", {id: "side-by-side"}, element("thead", {}, head), element("tbody", {}, ...lines));
  return [element("h3", {}, "Side by side"), scroller("Episodes side by side", made)];
}
