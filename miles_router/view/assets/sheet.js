// A sample, token by token: what a position is, in every respect that the view knows.

/** Which of `runs`, in order and each with `start` and `end`, each of `length` positions is in; -1 for none. */
function owners(runs, length) {
  const found = new Int32Array(length).fill(-1);
  runs.forEach(({start, end}, place) => found.fill(place, start, end));
  return found;
}

/** Which turn's prompt each position is part of that no turn sampled; -1 behind the last. */
function prompts(turns, length) {
  const found = new Int32Array(length).fill(-1);
  let before = 0;
  turns.forEach(({start, end}, place) => {
    found.fill(place, before, start);
    before = end;
  });
  return found;
}

/** One sample as the token view reads it: `tensors` as in `TokenSheet`, with what is not known left out. */
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

  /** Its id, or null where it is hidden. */
  id(position) {
    return this.tokens === null ? null : this.tokens[position];
  }

  /** Whether the engine sampled it; null where nobody says. */
  isSampled(position) {
    return this.sampled === null ? null : this.sampled[position] === 1;
  }

  /** Of a sampled token; else null. Where nobody says what was sampled, of those of the response. */
  logprob(position) {
    const sampled = this.isSampled(position) ?? position >= this.length - this.facts.response_length;
    return this.logprobs !== null && sampled ? this.logprobs[position] : null;
  }

  /** Bits; null where no experts are known. */
  entropyAt(position) {
    return this.entropy !== null && position < this.entropy.length ? this.entropy[position] : null;
  }

  /** The place of its run among `versions`, or -1. */
  versionRun(position) {
    return this._version[position];
  }

  /** The name of the weights that sampled it, or null. */
  version(position) {
    const run = this.versions[this._version[position]];
    if (run !== undefined) return run.version;
    // Who names one version says nothing of positions, and need not.
    return this.isSampled(position) && this.facts.version_names.length === 1 ? this.facts.version_names[0] : null;
  }

  /** The turn that sampled it, or null. */
  turn(position) {
    return this.turns[this._turn[position]] ?? null;
  }

  /** The turn whose prompt it was given in, or null. */
  promptOf(position) {
    return this.turns[this._prompt[position]] ?? null;
  }

  /** The worker that sampled it, or null. */
  worker(position) {
    return this.turn(position)?.worker ?? null;
  }
}

/** A logprob in as few digits as say which number of its type it is. */
export function exactly(value, array) {
  if (!(array instanceof Float32Array)) return String(value);
  for (let digits = 1; digits <= 9; digits++) {
    const text = value.toPrecision(digits);
    if (Math.fround(Number(text)) === value) return String(Number(text));
  }
  return String(value);
}
