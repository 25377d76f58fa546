// The colourings of tokens. Hues are Okabe and Ito's, which colour-blind people can distinguish; scales vary in
// lightness. Colour is never the only information: details have it as text, and sampled tokens are underlined.

import {counted} from "./elements.js";

const HUES = 8, STEPS = 6, NAMED = 3;
const NONE = "none";
const PROBABILITIES = [0.9, 0.5, 0.1, 0.01, 0.001];

function hue(place) {
  return `hue-${place % HUES}`;
}

function names(list) {
  const first = list.slice(0, NAMED).join(", ");
  return list.length > NAMED ? `${first} and ${counted(list.length - NAMED)} more` : first;
}

/** Return legend entries for values in order of appearance. Values with the same colour share an entry. */
function byHue(values, title) {
  const entries = [];
  for (let colour = 0; colour < Math.min(HUES, values.length); colour++) {
    const sharing = values.filter((_, place) => place % HUES === colour);
    entries.push({colour: hue(colour), text: `${title} ${names(sharing)}`});
  }
  return entries;
}

function named(values, title, at, rest) {
  const places = new Map(values.map((value, place) => [value, place]));
  return {
    legend: [...byHue(values, title), {colour: NONE, text: rest}],
    at: (position) => (places.has(at(position)) ? hue(places.get(at(position))) : NONE),
  };
}

function distinct(list) {
  return [...new Set(list.filter((value) => value !== null && value !== undefined))];
}

function byMask(sheet) {
  const kind = (position) => (sheet.lossMask[position] ? "trained" : sheet.isSampled(position) ? "untrained" : NONE);
  const counts = {trained: 0, untrained: 0, [NONE]: 0};
  for (let position = 0; position < sheet.length; position++) counts[kind(position)] += 1;
  return {
    legend: [
      {colour: "trained", text: `sampled, in the loss: ${counted(counts.trained)}`},
      {colour: "untrained", text: `sampled, not in the loss: ${counted(counts.untrained)}`},
      {colour: NONE, text: `not sampled: ${counted(counts[NONE])}`},
    ],
    at: kind,
  };
}

function byLogprob(sheet) {
  const bounds = PROBABILITIES.map(Math.log);
  const texts = PROBABILITIES.map((probability) => `p ≥ ${probability}`);
  return {
    legend: [
      ...[...texts, `p < ${PROBABILITIES.at(-1)}`].map((text, step) => ({colour: `step-${step}`, text})),
      {colour: NONE, text: "not sampled"},
    ],
    at: (position) => {
      const logprob = sheet.logprob(position);
      if (logprob === null) return NONE;
      const step = bounds.findIndex((bound) => logprob >= bound);
      return `step-${step < 0 ? STEPS - 1 : step}`;
    },
  };
}

function byEntropy(sheet) {
  const least = sheet.entropy.reduce((a, b) => Math.min(a, b), Infinity);
  const most = sheet.entropy.reduce((a, b) => Math.max(a, b), -Infinity);
  const size = (most - least) / STEPS || 1;
  const legend = [];
  for (let step = 0; step < STEPS; step++) {
    legend.push({colour: `step-${step}`, text: `from ${(least + step * size).toFixed(2)} bits`});
  }
  return {
    legend: [...legend, {colour: NONE, text: "experts unknown"}],
    at: (position) => {
      const entropy = sheet.entropyAt(position);
      return entropy === null ? NONE : `step-${Math.min(STEPS - 1, Math.floor((entropy - least) / size))}`;
    },
  };
}

function byTurn(sheet) {
  const values = sheet.turns.map((turn) => turn.turn);
  const sampled = named(values, "turn", (position) => sheet.turn(position)?.turn, "not sampled, after the last turn");
  return {
    legend: [...sampled.legend.slice(0, -1), {colour: "given", text: "prompt, with a line in the colour of its turn"}],
    at: (position) => {
      if (sheet.turn(position) !== null) return sampled.at(position);
      const place = sheet.turns.indexOf(sheet.promptOf(position));
      return place < 0 ? NONE : `given ${hue(place)}`;
    },
  };
}

function byVersion(sheet) {
  const known = distinct([...sheet.versions.map((run) => run.version), ...sheet.facts.version_names]);
  return named(known, "version", (position) => sheet.version(position), "not sampled, or version unknown");
}

function byWorker(sheet) {
  const known = distinct(sheet.turns.map((turn) => turn.worker));
  return named(known, "", (position) => sheet.worker(position), "not sampled, or worker unknown");
}

/** All colourings. `fits` returns whether a sheet has the data, `of` returns a legend and the class of each position. */
export const COLOURINGS = [
  {name: "mask", title: "loss mask", fits: (sheet) => sheet.lossMask !== null, of: byMask},
  {name: "logprob", title: "logprob", fits: (sheet) => sheet.logprobs !== null, of: byLogprob},
  {
    name: "version",
    title: "weight version",
    fits: (sheet) => sheet.versions.length > 0 || (sheet.sampled !== null && sheet.facts.version_names.length === 1),
    of: byVersion,
  },
  {name: "turn", title: "turn", fits: (sheet) => sheet.turns.length > 0, of: byTurn},
  {name: "worker", title: "worker", fits: (sheet) => sheet.turns.some((turn) => turn.worker), of: byWorker},
  {name: "entropy", title: "expert entropy", fits: (sheet) => (sheet.entropy?.length ?? 0) > 0, of: byEntropy},
];

/** No colours, for sheets without any of these data. */
export const PLAIN = {legend: [{colour: NONE, text: "the file has no data to colour these tokens by"}], at: () => NONE};
