// The episodes that filters leave, page by page as the router gives them: newest first, read on as far as one looks.

import {pathOf, readJson} from "./router_client.js";

const PAGE = 200, MOST = 50_000;

/** Rows of `GET /router/episodes` with these filters. */
export class EpisodePages {
  constructor(filters) {
    this.filters = filters;
    this.text = true;
    this.rows = [];
    this._next = undefined; // null: there are no more
    this._anchors = [{after: null, id: null}]; // where pages begin: the cursor in front of each, and its first row
    this._queue = Promise.resolve();
  }

  /** Whether there is nothing to read behind the rows: all are read, or as many as are kept. */
  get whole() {
    return this._next === null || this.rows.length >= MOST;
  }

  /** Reads on, behind the last row. */
  more(signal) {
    return this._inTurn(async () => {
      if (this.whole) return;
      const after = this._next ?? null, {episodes, next} = await this._read(after, signal);
      if (after !== null && episodes.length) this._anchors.push({after, id: episodes[0].id});
      this.rows.push(...episodes);
      this._next = next;
    });
  }

  /** Reads anew what stands between two places, and what is new in front of all. */
  again(first, last, signal) {
    return this._inTurn(async () => {
      const places = this._places(), begins = this._anchors.map((each) => (each.after === null ? 0 : places.get(each.id)));
      const isSeen = (place) => begins[place] <= last && (begins[place + 1] ?? this.rows.length) > first;
      for (const anchor of this._anchors.filter((_, place) => place === 0 || isSeen(place))) {
        this._replace(anchor, await this._read(anchor.after, signal));
      }
    });
  }

  /** A page takes the place of what it had, up to its last row. */
  _replace(anchor, {episodes, next}) {
    const places = this._places(), begin = anchor.after === null ? 0 : places.get(anchor.id);
    if (begin === undefined) {
      this._anchors = this._anchors.filter((each) => each !== anchor); // the row is gone: the page before reaches here
      return;
    }
    const end = next === null ? undefined : places.get(episodes.at(-1).id);
    if (end === undefined) { // nothing behind it is known, or there is nothing
      this.rows.splice(begin);
      this._anchors = this._anchors.slice(0, this._anchors.indexOf(anchor) + 1);
      this._next = next;
    }
    this.rows.splice(begin, end === undefined ? 0 : end + 1 - begin, ...episodes);
    anchor.id = episodes[0]?.id ?? null;
  }

  _places() {
    return new Map(this.rows.map(({id}, place) => [id, place]));
  }

  async _read(after, signal) {
    const page = await readJson(pathOf("router/episodes", {...this.filters, limit: PAGE, after}), signal);
    this.text = page.text;
    return page;
  }

  /** One reading at a time. */
  _inTurn(work) {
    const done = this._queue.then(work);
    this._queue = done.catch(() => {});
    return done;
  }
}
