// The history of loads and state changes while this page is open. The router keeps none.

const KEPT_S = 300, MOST_CHANGES = 50;

/** A history built from successive answers of `GET /router/info`. */
export class FleetMemory {
  constructor() {
    this._seen = []; // {at, workers: Map of url -> worker}, oldest first
    this.changes = []; // {at, url, before, after, reason}, newest first
  }

  take(info) {
    const at = info.now;
    if (at <= this._seen.at(-1)?.at) this._seen = []; // the router's clock was set back
    const workers = new Map(info.workers.map((worker) => [worker.url, worker]));
    const before = this._seen.at(-1)?.workers;
    if (before !== undefined) this._compare(before, workers, at);
    this._seen.push({at, workers});
    while (this._seen[0].at < at - KEPT_S) this._seen.shift();
  }

  /** Record a gap, so that the lines break here. */
  interrupt() {
    if (this._seen.at(-1)?.workers.size) this._seen.push({at: this._seen.at(-1).at + 0.001, workers: new Map()});
  }

  get times() {
    return this._seen.map(({at}) => at);
  }

  /** Return a line for each worker, with null while it was absent. */
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
}
