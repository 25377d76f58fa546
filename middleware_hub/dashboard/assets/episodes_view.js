// The list of episodes with search and filters, refreshed live, and the episodes of one group side by side.

import {counted, element, putInto, several} from "../view/elements.js";
import {EpisodePages} from "./episode_pages.js";
import {groupTable} from "./group_table.js";
import {refill, stateChip} from "./tables.js";
import {WindowedTable} from "./windowed_table.js";
import {ago, duration, hostOf} from "./words.js";

export const STATES = ["running", "waiting", "idle", "ended"];
const KINDS = ["session", "text"];
const REASONS = [
  "retry", "choice", "parallel", "edited_history", "compaction", "sub_agent", "changed_tools", "text_prompt", "batch",
  "branch", "other",
];
const FILTERS = ["state", "kind", "group", "reason", "worker"];
const ROW = 40, MOST_ROWS = 14, NEAR = 40;

export const addressOf = (id) => `#/episodes/${encodeURIComponent(id)}`;
export const groupAddress = (group) => `#/episodes?${new URLSearchParams({group})}`;

/** Format reasons with their counts. */
export function reasonsOf(counts) {
  return Object.entries(counts).map(([reason, count]) => (count === 1 ? reason : `${reason} ×${count}`)).join(", ");
}

function link(href, text) {
  return element("a", {href, tabindex: "-1"}, text);
}

function nameOf(row) {
  const label = row.label === null ? [] : [" ", element("span", {class: "soft"}, row.label)];
  return element("span", {}, link(addressOf(row.id), row.id), ...label);
}

const COLUMNS = [
  {title: "Episode", kind: "wide-cell", cell: nameOf},
  {title: "State", kind: "short", cell: (row) => stateChip(row.state, STATES)},
  {title: "Group", kind: "spare", cell: (row) => (row.group === null ? "" : link(groupAddress(row.group), row.group))},
  {title: "Turns", kind: "number-cell", cell: (row) => counted(row.turns) + (row.under_way ? ` +${row.under_way}` : "")},
  {title: "Sampled", kind: "number-cell", cell: (row) => counted(row.tokens.sampled)},
  {title: "Trained", kind: "number-cell", cell: (row) => (row.tokens.trained === null ? "?" : counted(row.tokens.trained))},
  {title: "Tokens", kind: "number-cell spare", cell: (row) => counted(row.tokens.all)},
  {title: "Waited", kind: "number-cell spare", cell: (row) => duration(row.waited_s)},
  {title: "Forks", kind: "spare", cell: (row) => reasonsOf(row.reasons)},
  {title: "Weights", kind: "spare", cell: (row) => row.weight_versions.join(", ")},
  {title: "Workers", kind: "spare", cell: (row) => row.workers.map(hostOf).join(", ")},
  {title: "Finish", kind: "spare", cell: (row) => row.end_reason ?? row.finish_reason ?? ""},
  {title: "Last used", kind: "number-cell", cell: (row) => ago(row.last_used_at)},
];

function textOf(row) {
  const names = [row.id, row.group, row.label, row.model, row.state, row.end_reason, ...row.workers];
  return [...names, ...Object.keys(row.reasons)].filter(Boolean).join(" ").toLowerCase();
}

/** The view of the list. `open` reads the filters from the address, `refresh` reloads the visible rows. */
export class EpisodesView {
  constructor() {
    this.title = "Episodes";
    this._pages = new EpisodePages({});
    this._failure = null; // the error of the last background load
    this._build();
    this._table.onScroll(() => {
      if (this._table.seen[1] + NEAR > this._shown.length && !this._pages.whole) this._readOn();
    });
  }

  _build() {
    this._search = element("input", {id: "search", type: "search", spellcheck: "false", autocomplete: "off"});
    this._search.addEventListener("input", () => this._found());
    this._fields = {
      state: this._selection("state", STATES),
      kind: this._selection("kind", KINDS),
      group: element("input", {id: "group", spellcheck: "false", autocomplete: "off"}),
      reason: this._selection("reason", REASONS),
      worker: this._selection("worker", []),
    };
    const labelled = (name, field) => element("label", {for: name}, element("span", {}, name), field);
    const form = element("form", {class: "controls filters", role: "search"},
      labelled("search", this._search), ...FILTERS.map((name) => labelled(name, this._fields[name])));
    form.addEventListener("submit", (event) => event.preventDefault());
    for (const name of FILTERS) this._fields[name].addEventListener("change", () => this._filter());
    this._count = element("p", {class: "count", role: "status", id: "count"});
    this._hidden = element("p", {class: "notice", id: "hidden-text", hidden: true},
      "Labels are hidden: the router runs with --dashboard-text off.");
    this._group = element("section", {class: "card", "aria-label": "Side by side", hidden: true});
    this._shown = [];
    this._table = new WindowedTable({
      id: "episodes", label: "Episodes", columns: COLUMNS, rowHeight: ROW, mostRows: MOST_ROWS, keyOf: (row) => row.id,
      choose: (row) => {
        location.hash = addressOf(row.id);
      },
    });
    const list = element("section", {class: "card", "aria-label": "Episodes"},
      form, this._hidden, this._count, this._table.element);
    this.element = element("div", {}, list, this._group);
  }

  _selection(id, values) {
    return element("select", {id}, element("option", {value: ""}, "any"),
      ...values.map((value) => element("option", {value}, value)));
  }

  /** Set the filters from an address. */
  open(_, parameters) {
    const filters = Object.fromEntries(FILTERS.map((name) => [name, parameters.get(name) ?? ""]));
    for (const name of FILTERS) this._set(this._fields[name], filters[name]);
    if (JSON.stringify(filters) === JSON.stringify(this._pages.filters)) return;
    this._pages = new EpisodePages(filters);
    this._failure = null;
    this._shown = []; // rows of the old filters
    this._table.rewind();
    putInto(this._count, "");
    // Until the new rows are loaded, mark the old ones as outdated.
    this._table.element.classList.add("old");
    this._group.hidden = true;
    this._grouped = undefined;
  }

  /** Restore the state after the view is shown again. */
  back() {
    this._table.back();
  }

  /** Set a filter. An unknown value is kept, and the router's answer explains what is wrong. */
  _set(field, value) {
    const options = [...(field.options ?? [])];
    if (field.options && !options.some((option) => option.value === value)) field.append(element("option", {value}, value));
    if (field.value.trim() !== value) field.value = value;
  }

  _filter() {
    const given = FILTERS.map((name) => [name, this._fields[name].value.trim()]).filter(([, value]) => value);
    location.hash = given.length ? `#/episodes?${new URLSearchParams(given)}` : "#/episodes";
  }

  async refresh({info, signal}) {
    this._nameWorkers(info.workers);
    const pages = this._pages;
    const [first, last] = this._table.seen;
    await pages.again(this._shown.slice(first, last + 1), signal);
    if (pages !== this._pages) return;
    this._found();
    const failure = this._failure;
    this._failure = null;
    if (failure !== null) throw failure;
  }

  /** Load the next page; during a search, all pages. */
  async _readOn() {
    const pages = this._pages;
    if (this._reading === pages) return;
    this._reading = pages;
    try {
      do {
        await pages.more();
        if (pages === this._pages) this._found();
      } while (pages === this._pages && this._search.value.trim() && !pages.whole);
    } catch (error) {
      if (pages === this._pages) this._failure = error; // reported by the next refresh: each load may fail
    } finally {
      if (this._reading === pages) this._reading = null;
    }
  }

  /** Show the loaded rows that match the search. */
  _found() {
    const words = this._search.value.toLowerCase().split(/\s+/).filter(Boolean), {rows, whole, ends, text} = this._pages;
    const fits = (row) => words.every((word) => textOf(row).includes(word));
    this._shown = rows.filter(fits); // a new list: the table compares it with the previous one
    this._hidden.hidden = text;
    const read = ends ? several(rows.length, "episode") : `${counted(rows.length)} episodes loaded, more available`;
    putInto(this._count, words.length ? `${counted(this._shown.length)} of ${read}` : read);
    this._table.element.classList.remove("old");
    this._table.show(this._shown);
    this._showGroup();
    if (words.length && !whole) this._readOn();
  }

  /** Show the group side by side, redrawn only if one of its rows has changed. */
  _showGroup() {
    const rows = this._pages.filters.group ? this._shown : null, state = JSON.stringify(rows);
    if (state === this._grouped) return;
    this._grouped = state;
    this._group.hidden = rows === null;
    refill(this._group, ...(rows === null ? [] : groupTable(rows)));
  }

  _nameWorkers(workers) {
    const field = this._fields.worker, known = new Set([...field.options].map(({value}) => value));
    for (const {url} of workers) if (!known.has(url)) field.append(element("option", {value: url}, url));
  }
}
