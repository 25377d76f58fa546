// The list of a file's samples with search and filters.

import {counted, element, putInto, several} from "./elements.js";
import {VirtualRows} from "./virtual_rows.js";

const ROW = 44, MOST_ROWS = 6;

/** Return the two texts of a sample's line. */
function lineOf(sample, place) {
  const trained = sample.trained === null ? "" : `, ${counted(sample.trained)} in the loss`;
  const turns = sample.turns ? `, ${several(sample.turns, "turn")}` : "";
  const tokens = several(sample.tokens, "token");
  const reward = sample.reward === null ? "no reward" : `reward ${sample.reward}`;
  return [`sample ${place}`, `${sample.status}, ${reward}, ${tokens}${trained}${turns}`];
}

/** The list of samples from the page's index. `choose(place)` opens one. */
export class SampleList {
  constructor(samples, choose) {
    this._samples = samples;
    this._choose = choose;
    this._chosen = 0;
    this._texts = samples.map(({session_id: session, status, reasons, searched}, place) =>
      [`sample ${place}`, session ?? "", status, ...reasons, searched].join(" ").toLowerCase());
    this._matches = samples.map((_, place) => place);
    this._build();
    this._rows = new VirtualRows(this._box, ROW, (index) => this._row(index));
    this._filter();
  }

  _build() {
    this._search = element("input", {id: "search", type: "search", spellcheck: "false", autocomplete: "off"});
    this._status = this._selection("status", "any status", this._samples.map((sample) => sample.status));
    this._reason = this._selection("reason", "any reason", this._samples.flatMap((sample) => sample.reasons));
    this._count = element("p", {class: "count", role: "status"});
    this._box = element("div", {class: "list", role: "listbox", tabindex: "0", "aria-label": "Samples"});
    this.element = element(
      "section",
      {class: "card", "aria-label": "Samples of the file"},
      element(
        "form",
        {class: "controls", role: "search"},
        element("label", {for: "search"}, "Search "), this._search,
        element("label", {for: "status"}, "Status "), this._status,
        element("label", {for: "reason"}, "Reason "), this._reason,
      ),
      this._count,
      this._box,
    );
    this.element.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
    for (const input of [this._search, this._status, this._reason]) {
      input.addEventListener("input", () => this._filter());
    }
    this._box.addEventListener("click", (event) => {
      const row = event.target.closest("[data-sample]");
      if (row !== null) this._choose(Number(row.dataset.sample));
    });
    this._box.addEventListener("keydown", (event) => this._key(event));
  }

  _selection(id, any, values) {
    const known = [...new Set(values)].sort();
    const made = element("select", {id}, element("option", {value: ""}, any));
    // The prefix distinguishes an empty value from "any".
    made.append(...known.map((value) => element("option", {value: `=${value}`}, value)));
    return made;
  }

  /** Mark the open sample. */
  mark(place) {
    this._chosen = place;
    const index = this._matches.indexOf(place);
    this._rows.redraw();
    if (index >= 0) {
      this._rows.reveal(index);
      this._box.setAttribute("aria-activedescendant", `sample-line-${place}`);
    } else this._box.removeAttribute("aria-activedescendant");
  }

  _filter() {
    const words = this._search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const status = this._status.value, reason = this._reason.value;
    this._matches = [];
    this._samples.forEach((sample, place) => {
      const fits = (!status || status === `=${sample.status}`) && (!reason || sample.reasons.includes(reason.slice(1)));
      if (fits && words.every((word) => this._texts[place].includes(word))) this._matches.push(place);
    });
    putInto(this._count, `${counted(this._matches.length)} of ${several(this._samples.length, "sample")}`);
    this._box.style.height = `${Math.max(1, Math.min(this._samples.length, MOST_ROWS)) * ROW + 2}px`;
    this._rows.reset(this._matches.length);
  }

  _row(index) {
    const place = this._matches[index], sample = this._samples[place];
    const [name, text] = lineOf(sample, place);
    const session = sample.session_id === null ? [] : [" of ", element("code", {}, sample.session_id)];
    return element(
      "div",
      {
        id: `sample-line-${place}`,
        role: "option",
        "data-sample": place,
        "aria-selected": place === this._chosen ? "true" : "false",
        "aria-posinset": index + 1,
        "aria-setsize": this._matches.length,
      },
      element("span", {}, element("b", {}, name), ...session),
      element("span", {class: "soft"}, text),
    );
  }

  _key(event) {
    const at = this._matches.indexOf(this._chosen), last = this._matches.length - 1;
    const page = this._rows.fitting;
    const moves = {
      ArrowUp: at - 1, ArrowDown: at + 1, Home: 0, End: last, PageUp: at - page, PageDown: at + page,
    };
    if (!(event.key in moves) || last < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    this._choose(this._matches[Math.max(0, Math.min(last, moves[event.key]))]);
  }
}
