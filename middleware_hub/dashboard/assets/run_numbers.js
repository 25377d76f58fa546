// Sums and rates of the intervals of `GET /router/run`.

/** Sum the values of an object. */
export function total(counts) {
  return Object.values(counts).reduce((sum, count) => sum + count, 0);
}

/** Add up, key by key, the objects that the `parts` have under `name`. */
export function added(parts, name) {
  const sums = new Map();
  for (const part of parts) {
    for (const [key, count] of Object.entries(part[name])) sums.set(key, (sums.get(key) ?? 0) + count);
  }
  return sums;
}

/** The complete intervals of the last `span` seconds, including empty ones. */
export class Seconds {
  constructor({now, since, interval_s: length, intervals}, span) {
    const last = Math.floor(now / length) * length - length, first = last - Math.floor(span / length) * length;
    this._length = length;
    this._since = since;
    this.intervals = intervals.filter(({start}) => start >= first);
    this.times = Array.from({length: (last - first) / length + 1}, (_, place) => first + place * length);
  }

  /** Return the rate per second at each of `times`: the sum of `of(interval)` by the interval's length. Null before the
   * router's start, and for intervals that it has dropped. */
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

/** Return the tokens sampled per second in the last `span` seconds, which begin at the next interval boundary. */
export function recentRate({now, interval_s: length, intervals}, span) {
  const first = Math.ceil((now - span) / length) * length;
  const tokens = intervals.filter(({start}) => start >= first).reduce((sum, {sampled}) => sum + total(sampled), 0);
  return tokens / (now - first);
}

/** Return the pauses and sleeps of the fleet as bands for charts. */
export function bandsOf({now, pauses}) {
  return pauses.map(({start, end, reason, model_id: model}) => ({
    start, end: end ?? now, text: model === null ? REASONS[reason] : `${REASONS[reason]} (${model})`,
  }));
}
