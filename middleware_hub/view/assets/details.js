// The details of one position as text.

import {counted} from "./elements.js";
import {exactly} from "./sheet.js";
import {visibleJson} from "./visible.js";

const UNKNOWN = "unknown", NONE = "none", HIDDEN = "hidden";

function maskText(sheet, position) {
  if (sheet.lossMask === null) return UNKNOWN;
  return sheet.lossMask[position] ? "1, in the loss" : "0, not in the loss";
}

function originText(sheet, position) {
  const sampled = sheet.isSampled(position);
  return sampled === null ? UNKNOWN : sampled ? "sampled" : "given";
}

function turnText(sheet, position) {
  const turn = sheet.turn(position);
  if (turn !== null) return `${turn.turn}, sampled`;
  const prompt = sheet.promptOf(position);
  return prompt === null ? UNKNOWN : `${prompt.turn}, in its prompt`;
}

function logprobText(sheet, position) {
  const logprob = sheet.logprob(position);
  return logprob === null ? (sheet.logprobs === null ? UNKNOWN : NONE) : exactly(logprob, sheet.logprobs);
}

function versionText(sheet, position) {
  const version = sheet.version(position);
  if (version !== null) return version;
  if (sheet.isSampled(position) === false) return NONE;
  return sheet.facts.version_names.length > 1 ? `one of ${sheet.facts.version_names.join(", ")}` : UNKNOWN;
}

function textOf({kind, text}) {
  if (kind === "hidden") return HIDDEN;
  if (kind === "bytes") return "part of a character";
  return kind === "id" ? UNKNOWN : visibleJson(JSON.stringify(text));
}

/** Return `[field, title, text]` of each detail. */
export function detailsOf(sheet, pieces, position) {
  const id = sheet.id(position), piece = pieces.of(id), logprob = sheet.logprob(position);
  const entropy = sheet.entropyAt(position);
  return [
    ["position", "position", `${position} of ${counted(sheet.length)}`],
    ["id", "token id", id === null ? HIDDEN : String(id)],
    ["text", "text", textOf(piece)],
    ["bytes", "bytes", piece.kind === "hidden" ? HIDDEN : piece.bytes ?? UNKNOWN],
    ["origin", "origin", originText(sheet, position)],
    ["mask", "loss mask", maskText(sheet, position)],
    ["logprob", "logprob", logprobText(sheet, position)],
    ["probability", "probability", logprob === null ? NONE : Math.min(1, Math.exp(logprob)).toPrecision(4)],
    ["version", "weight version", versionText(sheet, position)],
    ["turn", "turn", turnText(sheet, position)],
    ["worker", "worker", sheet.worker(position) ?? (sheet.isSampled(position) === false ? NONE : UNKNOWN)],
    ["entropy", "expert entropy", entropy === null ? UNKNOWN : `${entropy.toFixed(3)} bits`],
  ];
}

/** Join known details into one sentence for screen readers. */
export function spoken(details) {
  const known = details.filter(([, , text]) => text !== UNKNOWN && text !== NONE);
  return known.map(([, title, text]) => `${title} ${text}`).join("; ");
}
