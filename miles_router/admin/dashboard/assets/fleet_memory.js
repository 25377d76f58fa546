// What the fleet was while this page looked: loads, pauses, changes of state. The router keeps no history of them.

const KEPT_S = 300, MOST_CHANGES = 50;

/** Takes what `GET /router/info` says, time after time. */
export class FleetMemory {
  constructor() {
    this._seen = []; // {at, workers: Map of url -> worker}, oldest first
    this.pauses = []; // {start, end, text}; of one that lasts, the end is when it was seen last
    this.changes = []; // {at, url, before, after, reason}, newest first
  }

  take(info, at = Date.now() / 1000) {
    const workers = new Map(info.workers.map((worker) => [worker.url, worker]));
    const before = this._seen.at(-1)?.workers;
    if (before !== undefined) this._compare(before, workers, at);
    this._seen.push({at, workers});
    while (this._seen[0].at < at - KEPT_S) this._seen.shift();
    this._pause(info.gate, at);
  }

  /** Nothing is known of the time up to now: lines break here. */
  interrupt() {
    if (this._seen.length) this._seen.push({at: this._seen.at(-1).at + 0.001, workers: new Map()});
  }

  get times() {
    return this._seen.map(({at}) => at);
  }

  /** A line for each worker that was there, null where it was not. */
  lines(field) {
    const urls = new Set(this._seen.flatMap(({workers}) => [...workers.keys()]));
    return [...urls].map((url) => ({
      name: url, values: this._seen.map(({workers}) => workers.get(url)?.[field] ?? null),
    }));
  }

  _compare(before, workers, at) {
    const changes = [];
    for (const url of new Set([...before.keys(), ...workers.keys()])) {
      const was = before.get(url)?.state ?? "absent", is = workers.get(url)?.state ?? "removed";
      if (was !== is && before.size) changes.push({at, url, before: was, after: is, reason: workers.get(url)?.reason ?? ""});
    }
    this.changes = [...changes, ...this.changes].slice(0, MOST_CHANGES);
  }

  _pause(gate, at) {
    const since = [gate.paused_since, gate.asleep_since, gate.workers_paused_since].filter((time) => time !== null);
    this.pauses = this.pauses.filter(({end}) => end > at - KEPT_S);
    if (!since.length) return;
    const start = Math.min(...since), last = this.pauses.at(-1);
    const text = gate.asleep_since !== null ? "asleep" : gate.paused_since !== null ? "paused" : "paused by others";
    if (last?.start === start && last.text === text) last.end = at;
    else this.pauses.push({start, end: at, text});
  }
}
