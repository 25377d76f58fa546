// The dashboard: navigation between views, the administration key, and one timer for all live data.

import {entitle, putInto} from "../view/elements.js";
import {EpisodeView} from "./episode_view.js";
import {EpisodesView} from "./episodes_view.js";
import {FleetMemory} from "./fleet_memory.js";
import {FleetView} from "./fleet_view.js";
import {KeyNeeded, keepKey, readJson} from "./router_client.js";
import {RunView} from "./run_view.js";
import {ago, clock, keepTime} from "./words.js";

// After a refresh that took t, wait 9 t, so that the page costs the router little. At most a minute: the machine may
// have slept during the refresh.
const BEAT_MS = 2000, REST = 9, MOST_REST_MS = 60_000;
const $ = (id) => document.getElementById(id);

const memory = new FleetMemory();
const shared = {memory, lookAgain: () => beat()};
const makers = {
  fleet: () => new FleetView(shared),
  episodes: () => new EpisodesView(),
  episode: () => new EpisodeView(shared),
  run: () => new RunView(),
};
const views = new Map();
let view = null, asking = null, timer = 0, lastSeen = null;

/** Parse an address such as `#/episodes/<id>?turn=3` into the view's name, the id and the parameters. */
function addressed() {
  const [path, ...rest] = location.hash.slice(1).split("?");
  const [name, ...more] = path.split("/").filter(Boolean);
  const parameters = new URLSearchParams(rest.join("?"));
  if (name === "episodes" && more.length) {
    try {
      return {name: "episode", id: decodeURIComponent(more.join("/")), parameters};
    } catch {
      return {name: "episodes", id: null, parameters};
    }
  }
  return {name: Object.hasOwn(makers, name) && name !== "episode" ? name : "fleet", id: null, parameters};
}

function turn() {
  const {name, id, parameters} = addressed(), before = view;
  if (!views.has(name)) views.set(name, makers[name]());
  view = views.get(name);
  view.open?.(id, parameters);
  if (view !== before) {
    $("view").replaceChildren(view.element);
    view.back?.();
    if (before !== null) $("main").focus({preventScroll: true});
  }
  for (const link of document.querySelectorAll("nav a")) {
    const here = link.dataset.view === name || (name === "episode" && link.dataset.view === "episodes");
    if (here) link.setAttribute("aria-current", link.dataset.view === name ? "page" : "true");
    else link.removeAttribute("aria-current");
  }
  entitle(`${view.title} – miles-router`);
  beat();
}

/** Refresh the visible view, and set the timer for the next refresh unless the page is hidden. */
async function beat() {
  clearTimeout(timer);
  asking?.abort();
  const mine = asking = new AbortController(), {signal} = mine, shown = view, {hash} = location, began = performance.now();
  try {
    const info = await readJson("router/info", signal);
    keepTime(info.now);
    memory.take(info);
    lastSeen = info.now;
    showState(info);
    await shown.refresh({info, signal});
    if (!signal.aborted) live(hash);
  } catch (error) {
    if (!signal.aborted) failed(error);
  } finally {
    if (mine === asking && !document.hidden) timer = setTimeout(beat, restAfter(performance.now() - began));
  }
}

function restAfter(took) {
  return Math.min(MOST_REST_MS, Math.max(BEAT_MS, REST * took));
}

function live(hash) {
  if ($("login").contains(document.activeElement)) $("main").focus({preventScroll: true}); // before the form is hidden
  $("login").hidden = true;
  problem("");
  $("view").hidden = false;
  $("view").dataset.shown = hash;
  $("live").dataset.live = "yes";
  putInto($("live"), "live");
}

function showState({version, gate}) {
  putInto($("version"), version);
  const text = gateText(gate);
  putInto($("gate"), text);
  $("gate").hidden = !text;
}

/** Describe why, since when and how many requests wait; empty if the gate is open. */
function gateText(gate) {
  if (!gate.closed) return "";
  const reasons = [];
  if (gate.paused_since !== null) reasons.push(`The fleet was paused (${gate.mode}) at ${clock(gate.paused_since)}`);
  if (gate.asleep_since !== null) reasons.push(`The fleet was put to sleep at ${clock(gate.asleep_since)}`);
  if (gate.workers_paused_since !== null) {
    reasons.push(`Another program paused every worker, seen at ${clock(gate.workers_paused_since)}`);
  }
  return `${reasons.join(". ")}. ${gate.held} ${gate.held === 1 ? "request waits" : "requests wait"}.`;
}

function problem(text) {
  putInto($("problem"), text);
  $("problem").hidden = !text;
  $("view").classList.toggle("old", Boolean(text));
}

function failed(error) {
  memory.interrupt();
  $("live").dataset.live = "no";
  putInto($("live"), lastSeen === null ? "not connected" : `last seen ${ago(lastSeen)}`);
  if (error instanceof KeyNeeded) keyNeeded(error.message);
  else if (error.name === "TimeoutError" || error instanceof TypeError) {
    problem(`The router cannot be reached (${error.message}). Retrying.`);
  } else problem(error.message);
}

function keyNeeded(text) {
  $("view").hidden = $("gate").hidden = true;
  putInto($("live"), "key needed");
  if (text || $("login").hidden) problem(text);
  if ($("login").hidden) {
    $("login").hidden = false;
    $("key").focus();
  }
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey($("key").value.trim());
  $("key").value = "";
  problem("");
  beat();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // `#main` is not the address of a view
  $("main").focus();
});
addEventListener("hashchange", turn);
document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  asking?.abort();
  if (document.hidden) return;
  memory.interrupt();
  beat();
});
turn();
