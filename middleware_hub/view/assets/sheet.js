// A sample, token by token.

/** Return for each position the index of the run (`start` to `end`) that contains it; -1 if none does. */
function owners(runs, length) {
  const found = new Int32Array(length).fill(-1);
  runs.forEach(({start, end}, place) => found.fill(place, start, end));
  return found;
}

/** Return for each unsampled position the index of the turn whose prompt it belongs to; -1 after the last turn. */
function prompts(turns, length) {
  const found = new Int32Array(length).fill(-1);
  let before = 0;
  turns.forEach(({start, end}, place) => {
    found.fill(place, before, start);
    before = end;
  });
  return found;
}

/** One sample for the token view. `tensors` are those of `TokenSheet`; unknown ones are left out. */
export class Sheet {
  constructor({tensors, facts}) {
    this.tokens = tensors.tokens ?? null; // null: the ids are hidden
    this.lossMask = tensors.loss_mask ?? null;
    this.sampled = tensors.sampled ?? null;
    this.logprobs = tensors.logprobs ?? null;
    this.entropy = tensors.expert_entropy ?? null;
    this.facts = facts;
    this.length = this.tokens?.length ?? facts.length;
    this.turns = facts.turns;
    this.versions = facts.versions;
    this._version = owners(facts.versions, this.length);
    this._turn = owners(facts.turns, this.length);
    this._prompt = prompts(facts.turns, this.length);
  }

  /** Return the token id, or null if ids are hidden. */
  id(position) {
    return this.tokens === null ? null : this.tokens[position];
  }

  /** Return whether the engine sampled the token; null if unknown. */
  isSampled(position) {
    return this.sampled === null ? null : this.sampled[position] === 1;
  }

  /** Return the logprob of a sampled token, else null. If unknown what was sampled, use the whole response. */
  logprob(position) {
    const sampled = this.isSampled(position) ?? position >= this.length - this.facts.response_length;
    return this.logprobs !== null && sampled ? this.logprobs[position] : null;
  }

  /** Return the expert entropy in bits; null if unknown. */
  entropyAt(position) {
    return this.entropy !== null && position < this.entropy.length ? this.entropy[position] : null;
  }

  /** Return the index of the token's run in `versions`, or -1. */
  versionRun(position) {
    return this._version[position];
  }

  /** Return the weight version that sampled the token, or null. */
  version(position) {
    const run = this.versions[this._version[position]];
    if (run !== undefined) return run.version;
    // A file with a single version need not assign it to positions.
    return this.isSampled(position) && this.facts.version_names.length === 1 ? this.facts.version_names[0] : null;
  }

  /** Return the turn that sampled the token, or null. */
  turn(position) {
    return this.turns[this._turn[position]] ?? null;
  }

  /** Return the turn to whose prompt the token belongs, or null. */
  promptOf(position) {
    return this.turns[this._prompt[position]] ?? null;
  }

  /** Return the worker that sampled the token, or null. */
  worker(position) {
    return this.turn(position)?.worker ?? null;
  }
}

/** Format a logprob with the fewest digits that identify the number in its type. */
export function exactly(value, array) {
  if (!(array instanceof Float32Array)) return String(value);
  for (let digits = 1; digits <= 9; digits++) {
    const text = value.toPrecision(digits);
    if (Math.fround(Number(text)) === value) return String(Number(text));
  }
  return String(value);
}
