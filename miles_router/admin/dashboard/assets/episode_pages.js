// The episodes that filters leave, page by page as the router gives them: newest first, read on as far as one looks.
// What is seen is read anew each time, and of the rest a page each time, in turn.

import {pathOf, readJson} from "./router_client.js";

const PAGE = 200, MOST = 50_000;

/** Whether a row stands behind a place in the order of all; a place is null, which is in front of all, or a row's. */
function isBehind({started_at: began, id}, place) {
  return place === null || began < place.started_at || (began === place.started_at && id < place.id);
}

/** Rows of `GET /router/episodes` with these filters. */
export class EpisodePages {
  constructor(filters) {
    this.filters = filters;
    this.text = true;
    this.rows = [];
    this._marks = [{after: null, place: null}]; // cursors, and the place that each leads behind; in order
    this._end = this._marks[0]; // where what was never read begins; null: all is read
    this._round = null; // the place up to which this round has read anew what nobody sees
    this._queue = Promise.resolve();
  }

  /** Whether there is nothing to read behind the rows: all are read, or as many as are kept. */
  get whole() {
    return this._end === null || this.rows.length >= MOST;
  }

  /** Whether no episode stands behind the rows. */
  get ends() {
    return this._end === null;
  }

  /** Reads on, behind the last row. */
  more(signal) {
    return this._inTurn(async () => {
      if (!this.whole) await this._renew(this._end, signal);
    });
  }

  /** Reads anew what is new in front of all, these rows (in order), and a page of the others. */
  again(seen, signal) {
    return this._inTurn(async () => {
      let read = await this._renew(this._marks[0], signal);
      for (const row of seen) while (read !== null && isBehind(row, read)) read = await this._renew(this._before(row), signal);
      const next = this._marks.find((mark) => mark !== this._end && mark.place !== null && isBehind(mark.place, this._round));
      this._round = next?.place ?? null;
      if (next !== undefined) await this._renew(next, signal);
    });
  }

  /** Reads the page behind a mark, and on until it joins what was read before. Gives the last place of it, or null where
   * nothing stands behind it. */
  async _renew(mark, signal) {
    for (let at = mark, joins = false; ;) {
      const page = await readJson(pathOf("router/episodes", {...this.filters, limit: PAGE, after: at.after}), signal);
      this.text = page.text;
      ({behind: at, joins} = this._replace(at, page));
      if (at === null || joins) return at?.place ?? null;
    }
  }

  /** A page takes the place of all that stood between a mark and its last row. `joins`: nothing that is not known may
   * stand between it and the rows behind it. */
  _replace(mark, {episodes, next}) {
    const last = episodes.at(-1), behind = next === null ? null : {after: next, place: {started_at: last.started_at, id: last.id}};
    const begin = this._at(mark.place), end = behind === null ? this.rows.length : this._at(behind.place);
    const reaches = end === this.rows.length;
    this.rows.splice(begin, end - begin, ...episodes);
    const before = this._marks.filter(({place}) => place === null || !isBehind(place, mark.place));
    const others = reaches ? [] : this._marks.filter(({place}) => place !== null && isBehind(place, behind.place));
    // Marks about a page apart are enough.
    if (others.length > 1 && this._at(others[1].place) - this._at(behind.place) <= PAGE) others.shift();
    this._marks = [...before, ...(behind === null ? [] : [behind]), ...others];
    if (reaches) this._end = behind;
    this._cut();
    return {behind, joins: reaches || end > begin};
  }

  /** No more rows than are kept, and a page. */
  _cut() {
    const at = this.rows.length > MOST ? this._marks.findIndex(({place}) => this._at(place) >= MOST) : -1;
    if (at < 0) return;
    this._end = this._marks[at];
    this._marks = this._marks.slice(0, at + 1);
    this.rows.splice(this._at(this._end.place));
  }

  /** The first row behind a place. */
  _at(place) {
    let low = 0, high = this.rows.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (isBehind(this.rows[middle], place)) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  /** The last mark in front of a row. */
  _before(row) {
    return this._marks.findLast(({place}) => isBehind(row, place));
  }

  /** One reading at a time. */
  _inTurn(work) {
    const done = this._queue.then(work);
    this._queue = done.catch(() => {});
    return done;
  }
}
