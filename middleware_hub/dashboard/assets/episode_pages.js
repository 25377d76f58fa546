// The filtered episodes, loaded page by page from the router, newest first, as far as the user scrolls. Each refresh
// reloads the visible rows, and one page of the others in turn.

import {pathOf, readJson} from "./router_client.js";

const PAGE = 200, MOST = 50_000;

/** Return true if a row comes after a place in the list. A place is a row's sort key, or null for the start. */
function isBehind({started_at: began, id}, place) {
  return place === null || began < place.started_at || (began === place.started_at && id < place.id);
}

/** The loaded rows of `GET /router/episodes` with these filters. */
export class EpisodePages {
  constructor(filters) {
    this.filters = filters;
    this.text = true;
    this.rows = [];
    this._marks = [{after: null, place: null}]; // cursors, each with the place after which it continues; in order
    this._end = this._marks[0]; // the mark after which nothing is loaded; null if everything is
    this._round = null; // the place up to which this round has reloaded invisible rows
    this._queue = Promise.resolve();
  }

  /** Whether loading is complete: all episodes are loaded, or as many as are kept. */
  get whole() {
    return this._end === null || this.rows.length >= MOST;
  }

  /** Whether all episodes are loaded. */
  get ends() {
    return this._end === null;
  }

  /** Load the page after the last row. */
  more(signal) {
    return this._inTurn(async () => {
      if (!this.whole) await this._renew(this._end, signal);
    });
  }

  /** Load new episodes at the start, and reload the rows `seen` (in order) and one page of the others. */
  again(seen, signal) {
    return this._inTurn(async () => {
      let read = await this._renew(this._marks[0], signal);
      for (const row of seen) while (read !== null && isBehind(row, read)) read = await this._renew(this._before(row), signal);
      const next = this._marks.find((mark) => mark !== this._end && mark.place !== null && isBehind(mark.place, this._round));
      this._round = next?.place ?? null;
      if (next !== undefined) await this._renew(next, signal);
    });
  }

  /** Reload the page after a mark, and further pages until they join rows loaded before. Return the last place loaded, or
   * null at the end of the list. */
  async _renew(mark, signal) {
    for (let at = mark, joins = false; ;) {
      const page = await readJson(pathOf("router/episodes", {...this.filters, limit: PAGE, after: at.after}), signal);
      this.text = page.text;
      ({behind: at, joins} = this._replace(at, page));
      if (at === null || joins) return at?.place ?? null;
    }
  }

  /** Replace the rows between a mark and the page's last row by the page. `joins` is true if there can be no unknown rows
   * between the page and the rows after it. */
  _replace(mark, {episodes, next}) {
    const last = episodes.at(-1), behind = next === null ? null : {after: next, place: {started_at: last.started_at, id: last.id}};
    const begin = this._at(mark.place), end = behind === null ? this.rows.length : this._at(behind.place);
    const reaches = end === this.rows.length;
    this.rows.splice(begin, end - begin, ...episodes);
    const before = this._marks.filter(({place}) => place === null || !isBehind(place, mark.place));
    const others = reaches ? [] : this._marks.filter(({place}) => place !== null && isBehind(place, behind.place));
    // Keep marks about a page apart.
    if (others.length > 1 && this._at(others[1].place) - this._at(behind.place) <= PAGE) others.shift();
    this._marks = [...before, ...(behind === null ? [] : [behind]), ...others];
    if (reaches) this._end = behind;
    this._cut();
    return {behind, joins: reaches || end > begin};
  }

  /** Drop rows beyond the maximum, rounded up to a page. */
  _cut() {
    const at = this.rows.length > MOST ? this._marks.findIndex(({place}) => this._at(place) >= MOST) : -1;
    if (at < 0) return;
    this._end = this._marks[at];
    this._marks = this._marks.slice(0, at + 1);
    this.rows.splice(this._at(this._end.place));
  }

  /** Return the index of the first row after a place. */
  _at(place) {
    let low = 0, high = this.rows.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (isBehind(this.rows[middle], place)) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  /** Return the last mark before a row. */
  _before(row) {
    return this._marks.findLast(({place}) => isBehind(row, place));
  }

  /** Run loads one at a time. */
  _inTurn(work) {
    const done = this._queue.then(work);
    this._queue = done.catch(() => {});
    return done;
  }
}
