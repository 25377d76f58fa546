// What the intervals of `GET /router/run` add up to.

/** Of an object of numbers. */
export function total(counts) {
  return Object.values(counts).reduce((sum, count) => sum + count, 0);
}

/** The sums of an object of numbers that each of `parts` has under `name`. */
export function added(parts, name) {
  const sums = new Map();
  for (const part of parts) {
    for (const [key, count] of Object.entries(part[name])) sums.set(key, (sums.get(key) ?? 0) + count);
  }
  return sums;
}

/** The intervals of the last `span` seconds that are over, those in which nothing happened among them. */
export class Seconds {
  constructor({now, since, interval_s: length, intervals}, span) {
    const last = Math.floor(now / length) * length - length, first = last - Math.floor(span / length) * length;
    this._length = length;
    this._since = since;
    this.intervals = intervals.filter(({start}) => start >= first);
    this.times = Array.from({length: (last - first) / length + 1}, (_, place) => first + place * length);
  }

  /** For each of `times` what the intervals that begin there have of something, a second; null where the router does
   * not know: before its start, and of what it has forgotten. */
  rate(of) {
    const sums = new Map(this.times.map((time) => [time, time < this._since ? null : 0]));
    for (const interval of this.intervals) {
      const {start} = interval;
      if (sums.has(start)) sums.set(start, sums.get(start) + of(interval) / this._length);
    }
    return this.times.map((time) => sums.get(time));
  }
}

const REASONS = {paused: "paused", asleep: "asleep", workers_paused: "paused by another program"};

/** Tokens sampled a second, of the whole intervals within the last `span` seconds and what has begun behind them. */
export function recentRate({now, interval_s: length, intervals}, span) {
  const first = Math.ceil((now - span) / length) * length;
  const tokens = intervals.filter(({start}) => start >= first).reduce((sum, {sampled}) => sum + total(sampled), 0);
  return tokens / (now - first);
}

/** When the fleet was paused or asleep, as charts shade it. */
export function bandsOf({now, pauses}) {
  return pauses.map(({start, end, reason, model_id: model}) => ({
    start, end: end ?? now, text: model === null ? REASONS[reason] : `${REASONS[reason]} (${model})`,
  }));
}
