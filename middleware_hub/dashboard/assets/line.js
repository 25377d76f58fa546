// Load the tokens of an episode up to a leaf in slices, and join them.

import {readTensors} from "../view/tensors.js";
import {pathOf, readBytes} from "./router_client.js";

function joined(parts, name) {
  const arrays = parts.map(({tensors}) => tensors[name]).filter((array) => array !== undefined);
  if (arrays.length < 2) return arrays[0];
  const whole = new arrays[0].constructor(arrays.reduce((sum, {length}) => sum + length, 0));
  let at = 0;
  for (const array of arrays) {
    whole.set(array, at);
    at += array.length;
  }
  return whole;
}

/** Join the vocabularies of all slices; ids may repeat. Return null if the bytes are unknown. */
function vocabularyOf(parts) {
  if (parts.some(({tensors}) => tensors.ids === undefined)) return null;
  let behind = 0;
  const ends = parts.map(({tensors}) => {
    const found = tensors.ends.map((end) => end + behind);
    behind += tensors.bytes.length;
    return found;
  });
  const places = ends.map((array) => ({tensors: {ends: array}}));
  return {ids: joined(parts, "ids"), ends: joined(places, "ends"), bytes: joined(parts, "bytes")};
}

/** Return `tensors` and `facts` for a `Sheet`, and the `vocabulary` for `Pieces`. */
export async function readLine(id, leaf, signal) {
  const parts = [], at = `router/episodes/${encodeURIComponent(id)}/tokens`;
  let start = 0, length = 0;
  do {
    const part = readTensors(await readBytes(pathOf(at, {leaf, start}), signal));
    parts.push(part);
    ({stop: start, length} = part.facts);
  } while (start < length && parts.at(-1).facts.stop > parts.at(-1).facts.start);
  const names = ["tokens", "loss_mask", "sampled", "logprobs", "expert_entropy"];
  const tensors = Object.fromEntries(names.map((name) => [name, joined(parts, name)]));
  return {tensors, facts: parts.at(-1).facts, vocabulary: vocabularyOf(parts)};
}
