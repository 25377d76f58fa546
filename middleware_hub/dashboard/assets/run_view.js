// The run: tokens sampled and trained, forks, staleness, and time spent waiting.

import {counted, element, putInto} from "../view/elements.js";
import {TimeChart} from "./chart.js";
import {readJson} from "./router_client.js";
import {Seconds, added, bandsOf, recentRate, total} from "./run_numbers.js";
import {bar, numberCard, refill, section, table} from "./tables.js";
import {ago, duration, percent} from "./words.js";

const SPANS = [[600, "10 minutes"], [3600, "hour"], [21600, "6 hours"], [86400, "day"]];
const RATE_S = 60;
const REWARDS = "Mean reward by weight version", EVALUATIONS = "Mean reward of evaluations by weight version";
const TITLES = [
  "Version", "Since", "Sampled", "Trained", "Share", "New prompt", "Reused prompt", "Cached", "Turns", "Forks",
  "Waited",
];

function rowOf(version, most) {
  return [
    version.weight_version ?? "unknown",
    ago(version.since),
    bar(version.sampled, most, counted(version.sampled)),
    bar(version.trained, most, counted(version.trained)),
    percent(version.trained, version.sampled),
    counted(version.given),
    counted(version.reused),
    percent(version.cached, version.prompt),
    counted(version.turns),
    counted(total(version.forks)),
    duration(version.waited_s),
  ];
}

/** Return a table of counts with bars, sorted by `order`. */
function barList(id, label, titles, counts, order) {
  const entries = [...counts].sort(order), most = Math.max(0, ...entries.map(([, count]) => count));
  if (!entries.length) return element("p", {class: "soft", id}, "None.");
  return table(label, titles, entries.map(([name, count]) => [name, bar(count, most, counted(count))]), {id});
}

/** Return a table of the mean reward of each weight version, newest first. */
function rewardTable(rewards, id, label) {
  if (!rewards.length) return element("p", {class: "soft", id}, "No sample with a reward was read.");
  const means = rewards.map(({sum, count}) => sum / count), most = Math.max(0, ...means);
  const rows = rewards.map(({weight_version: version, count}, at) => [
    version ?? "unknown",
    bar(Math.max(0, means[at]), most, means[at].toFixed(3)),
    counted(count),
  ]);
  return table(label, ["Version", "Mean reward", "Samples"], rows.reverse(), {id});
}

function inWords(rate) {
  return rate === null ? "unknown" : rate.toFixed(1);
}

const mostFirst = ([, a], [, b]) => b - a;
// "unknown" is not a number and comes last.
const byNumber = ([a], [b]) => (Number.isNaN(Number(a)) ? 1 : Number.isNaN(Number(b)) ? -1 : Number(a) - Number(b));

/** The view of the run. `refresh` loads `GET /router/run`. */
export class RunView {
  constructor() {
    this.title = "Run";
    this._span = SPANS[0][0];
    this._rates = new TimeChart("Tokens per second");
    this._waits = new TimeChart("Waiting generations, mean", {least: 1});
    this._staleness = element("div");
    this._forks = element("div");
    this._versions = element("div");
    this._rewards = element("div");
    this._evaluations = element("div");
    const choice = element("select", {id: "span"}, ...SPANS.map(([value, title]) => element("option", {value}, title)));
    choice.addEventListener("change", () => {
      this._span = Number(choice.value);
      this._draw();
    });
    const chooser = element("form", {class: "controls"}, element("label", {for: "span"}, "The last "), choice);
    chooser.addEventListener("submit", (event) => event.preventDefault());
    this._numbers = element(
      "div",
      {class: "cards"},
      numberCard("rate", "Tokens sampled per second, last minute"),
      numberCard("sampled", "Tokens sampled"),
      numberCard("trained", "Sampled tokens in the loss"),
      numberCard("reused", "Prompt tokens reused as recorded"),
      numberCard("cached", "Prompt tokens from the prefix cache"),
      numberCard("forks-total", "Forks"),
      numberCard("waited", "Time spent waiting"),
    );
    this.element = element(
      "div",
      {},
      this._numbers,
      section("Over time", chooser, this._rates.element, this._waits.element),
      element("div", {class: "split"},
        section("Staleness of trained tokens, in versions", this._staleness), section("Forks by reason", this._forks)),
      section("By weight version", this._versions),
      section(REWARDS, this._rewards),
      section(EVALUATIONS, this._evaluations),
    );
  }

  async refresh({signal}) {
    this._run = await readJson("router/run", signal);
    this._cards();
    const {versions} = this._run, most = Math.max(0, ...versions.map(({sampled}) => sampled));
    const newest = [...versions].reverse();
    refill(this._versions, table("By weight version", TITLES, newest.map((each) => rowOf(each, most)), {id: "versions"}));
    refill(this._rewards, rewardTable(this._run.rewards, "rewards", REWARDS));
    refill(this._evaluations, rewardTable(this._run.evaluations, "evaluations", EVALUATIONS));
    refill(this._forks, barList("forks", "Forks by reason", ["Reason", "Turns"], added(versions, "forks"), mostFirst));
    this._draw();
  }

  _cards() {
    const {versions} = this._run, rate = recentRate(this._run, RATE_S);
    const sum = (name) => versions.reduce((so, each) => so + each[name], 0);
    const set = (id, text) => {
      putInto(this._numbers.querySelector(`#${id}`), text);
    };
    set("rate", rate >= 10 ? counted(Math.round(rate)) : rate.toFixed(1));
    set("sampled", counted(sum("sampled")));
    set("trained", `${counted(sum("trained"))} (${percent(sum("trained"), sum("sampled"))})`);
    set("reused", `${counted(sum("reused"))} (${percent(sum("reused"), sum("reused") + sum("given"))})`);
    set("cached", percent(sum("cached"), sum("prompt")));
    set("forks-total", counted([...added(versions, "forks").values()].reduce((so, count) => so + count, 0)));
    set("waited", `${duration(sum("waited_s"))}, ${counted(sum("waits"))} waits`);
  }

  _draw() {
    if (this._run === undefined) return;
    const seconds = new Seconds(this._run, this._span), bands = bandsOf(this._run);
    const sampled = seconds.rate(({sampled: each}) => total(each)), trained = seconds.rate(({trained: each}) => total(each));
    const waiting = seconds.rate(({waited_s: each}) => each);
    const times = [...seconds.times, this._run.now]; // the current interval is incomplete: it shows bands but no rate
    const line = (name, values) => ({name, values: [...values, null]});
    this._rates.draw(times, [line("sampled", sampled), line("trained", trained)], bands,
      `last ten seconds: ${inWords(sampled.at(-1))} sampled, ${inWords(trained.at(-1))} trained`);
    this._waits.draw(times, [line("waiting", waiting)], bands);
    const stale = added(seconds.intervals, "staleness");
    refill(this._staleness, barList("staleness", "Staleness of trained tokens", ["Behind", "Tokens"], stale, byNumber));
  }
}
