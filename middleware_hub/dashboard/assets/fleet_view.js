// The fleet: the workers, their load, and why some are out of rotation.

import {counted, element, putInto, several} from "../view/elements.js";
import {TimeChart, colourOf} from "./chart.js";
import {readJson} from "./router_client.js";
import {bandsOf} from "./run_numbers.js";
import {bar, numberCard, refill, section, stateChip, table} from "./tables.js";
import {ago, clock, duration, percent} from "./words.js";

const STATES = ["ready", "quarantined", "outdated", "paused", "draining", "unreached"];
const TITLES = ["Worker", "State", "In flight", "Tokens", "Weights", "Failures", "Last check", "Reason"];
const LOADS = [["in_flight", "requests in flight"], ["tokens", "tokens"], ["sessions", "sessions at home"]];

function nameOf(worker) {
  const mark = element("span", {class: "swatch dot", "aria-hidden": "true"});
  mark.style.background = colourOf(worker.url);
  return element("span", {class: "url"}, mark, worker.url);
}

function tokensOf(worker) {
  if (!worker.capacity) return counted(worker.tokens);
  return bar(worker.tokens, worker.capacity, `${counted(worker.tokens)} of ${counted(worker.capacity)}`);
}

function rowOf(worker, most) {
  return [
    nameOf(worker),
    stateChip(worker.state, STATES),
    bar(worker.in_flight, most, String(worker.in_flight), colourOf(worker.url)),
    tokensOf(worker),
    worker.weight_version ?? "unknown",
    String(worker.failures),
    ago(worker.last_check),
    `${worker.reason}, ${ago(worker.since)}`,
  ];
}

/** Count the workers of each weight version, most first. */
function versionsOf(workers) {
  const counts = new Map();
  for (const {weight_version: version} of workers) {
    counts.set(version ?? "unknown", (counts.get(version ?? "unknown") ?? 0) + 1);
  }
  return [...counts].sort(([, a], [, b]) => b - a);
}

function stepsOf(layers) {
  const steps = layers.map((layer) => {
    const title = `${layer.path} ${JSON.stringify(layer.options)}`;
    return element("li", {}, element("span", {class: "chip", title}, layer.name));
  });
  return [...steps, element("li", {}, element("span", {class: "chip"}, "worker"))];
}

/** The view of the fleet, in `element`. `refresh` gets the answer of `GET /router/info`. */
export class FleetView {
  constructor({memory}) {
    this.title = "Fleet";
    this._memory = memory;
    this._load = "in_flight";
    this._bands = [];
    this._chart = new TimeChart("Load of each worker");
    this._workers = element("div");
    this._out = element("div", {id: "out-of-rotation"});
    this._versions = element("ul", {class: "legend"});
    this._stack = element("ol", {class: "stack", id: "stack"});
    this._pools = element("div");
    const choice = element("select", {id: "load"}, ...LOADS.map(([value, title]) => element("option", {value}, title)));
    choice.addEventListener("change", () => {
      this._load = choice.value;
      this._draw();
    });
    const chooser = element("form", {class: "controls"}, element("label", {for: "load"}, "Load in "), choice);
    chooser.addEventListener("submit", (event) => event.preventDefault());
    this._numbers = element(
      "div",
      {class: "cards"},
      numberCard("workers", "Routable workers"),
      numberCard("in-flight", "Requests in flight"),
      numberCard("tokens", "Load in tokens"),
      numberCard("hit-rate", "Prompt tokens from the prefix cache"),
      numberCard("weights", "Fleet weight version"),
      numberCard("uptime", "Uptime"),
    );
    this.element = element(
      "div",
      {},
      this._numbers,
      section("Workers", this._workers),
      section("Load over time", chooser, this._chart.element),
      section("Out of rotation", this._out),
      section("Weight versions", this._versions),
      this._pools,
      section("Middlewares, outermost first", this._stack),
    );
  }

  async refresh({info, signal}) {
    const run = await readJson("router/run", signal);
    this._bands = bandsOf(run);
    this._cards(info, run.versions);
    const {workers} = info, most = Math.max(0, ...workers.map((worker) => worker.in_flight));
    refill(this._workers, workers.length
      ? table("Workers", TITLES, workers.map((worker) => rowOf(worker, most)), {id: "workers-table"})
      : element("p", {class: "soft"},
        "No worker is registered. Register one with POST /add_worker?url=http://HOST:PORT"));
    this._versions.replaceChildren(...versionsOf(workers).map(([version, count]) =>
      element("li", {}, element("b", {}, version), `: ${several(count, "worker")}`)));
    this._stack.replaceChildren(...stepsOf(info.middlewares));
    this._outOfRotation(workers);
    this._draw();
  }

  _cards(info, versions) {
    const sum = (name) => versions.reduce((so, each) => so + each[name], 0);
    const set = (id, text) => {
      putInto(this._numbers.querySelector(`#${id}`), text);
    };
    set("workers", `${info.workers_routable} of ${info.workers_total}`);
    this._numbers.querySelector("#workers").classList.toggle("bad", info.workers_routable === 0);
    set("in-flight", counted(info.in_flight));
    set("tokens", counted(info.workers.reduce((sum, {tokens}) => sum + tokens, 0)));
    set("hit-rate", percent(sum("cached"), sum("prompt")));
    set("weights", info.weight_version ?? "unknown");
    set("uptime", duration(Math.floor(info.uptime_seconds)));
  }

  /** Show the workers out of rotation with their reasons, and the state changes while the page was open. */
  _outOfRotation(workers) {
    const out = workers.filter(({state}) => state !== "ready");
    const rows = out.map((each) => [nameOf(each), stateChip(each.state, STATES), ago(each.since), each.reason]);
    const changes = this._memory.changes.map(({at, url, before, after, reason}) =>
      [clock(at), url, `${before} → ${after}`, reason]);
    refill(
      this._out,
      rows.length ? table("Workers out of rotation", ["Worker", "State", "Since", "Reason"], rows, {id: "out"})
        : element("p", {class: "soft"}, "No worker is out of rotation."),
      ...(changes.length ? [element("h4", {}, "State changes while this page was open"),
        table("Changes of state", ["At", "Worker", "State", "Reason"], changes, {id: "changes"})] : []),
    );
  }

  _draw() {
    const lines = this._memory.lines(this._load), {times} = this._memory;
    const words = lines.length > 8 ? "" : lines.map(({name, values}) => `${name}: ${values.at(-1) ?? "gone"}`).join(", ");
    this._chart.draw(times, lines, this._bands, words);
  }
}
