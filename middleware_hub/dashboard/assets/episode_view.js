// The page of one episode: its facts, its turns, and its tokens in the token view, refreshed live.

import {counted, element, putInto} from "../view/elements.js";
import {Pieces} from "../view/pieces.js";
import {SampleView} from "../view/sample_view.js";
import {Sheet} from "../view/sheet.js";
import {visibleJson} from "../view/visible.js";
import {STATES, groupAddress, reasonsOf} from "./episodes_view.js";
import {readLine} from "./line.js";
import {pathOf, readJson} from "./router_client.js";
import {section, stateChip} from "./tables.js";
import {WindowedTable} from "./windowed_table.js";
import {ago, clock, duration, hostOf} from "./words.js";

const ROW = 32, MOST_ROWS = 8, MOST_REWARDS = 8;
const HIDDEN = "Texts, token ids and bytes are hidden: the router runs with --dashboard-text off.";

const COLUMNS = [
  {title: "Turn", kind: "number-cell", cell: (turn) => String(turn.turn)},
  {title: "After", kind: "number-cell", cell: (turn) => (turn.parent === null ? "–" : String(turn.parent))},
  {title: "Reason", kind: "wide-cell", cell: remarksOn},
  {title: "Prompt", kind: "number-cell", cell: (turn) => counted(turn.prompt_tokens)},
  {title: "Cached", kind: "number-cell spare", cell: (turn) => (turn.cached_tokens === null ? "?" : counted(turn.cached_tokens))},
  {title: "Sampled", kind: "number-cell", cell: (turn) => counted(turn.end - turn.start)},
  {title: "Waited", kind: "number-cell spare", cell: (turn) => duration(turn.waited_s)},
  {title: "Took", kind: "number-cell spare", cell: tookOf},
  {title: "Versions", kind: "short spare", cell: (turn) => namesOf(turn.spans, "version")},
  {title: "Rewards", kind: "wide-cell spare", cell: rewardsOf},
  {title: "Worker", kind: "spare", cell: (turn) => hostOf(turn.worker ?? "")},
  {title: "Finish", kind: "short", cell: (turn) => turn.finish_reason ?? ""},
  {title: "At", kind: "number-cell spare", cell: (turn) => (turn.answered_at === null ? "" : clock(turn.answered_at))},
];

function remarksOn({reason, side_call: aside, parsed}) {
  return [reason, aside && "(side call)", Array.isArray(parsed) && `(${parsed.join(", ")})`].filter(Boolean).join(" ");
}

function tookOf({asked_at: asked, answered_at: answered}) {
  return asked === null || answered === null ? "?" : duration(answered - asked);
}

/** Return the rewards of a turn in a line; a text that is hidden has no value. */
function rewardsOf({rewards}) {
  const each = ({segment, span, name, value}) => [
    segment === undefined ? name : `segment ${name}`,
    span === undefined ? "" : `[${span.join(":")}]`,
    value === null ? "" : ` ${visibleJson(JSON.stringify(value))}`,
  ].join("");
  return rewards.slice(0, MOST_REWARDS).map(each).join(", ") + (rewards.length > MOST_REWARDS ? ", …" : "");
}

function namesOf(spans, name) {
  return [...new Set(spans.map((span) => span[name] ?? "unknown"))].join(", ");
}

function pairsOf(episode) {
  const {tokens} = episode, group = episode.group;
  return [
    ["state", stateChip(episode.state, STATES)],
    ["kind", episode.kind],
    ["group", group === null ? "none" : element("a", {href: groupAddress(group)}, group)],
    ["label", episode.label ?? "none"],
    ["model", episode.model ?? "unknown"],
    ["turns", counted(episode.turns.length) + (episode.under_way ? `, ${counted(episode.under_way)} running` : "")],
    ["segments, leaves", `${counted(episode.segments)}, ${counted(episode.leaves)}`],
    ["tokens", counted(tokens.all)],
    ["sampled", counted(tokens.sampled)],
    ["trained", tokens.trained === null ? "unknown" : counted(tokens.trained)],
    ["waited", duration(episode.waited_s)],
    ["forks", reasonsOf(episode.reasons) || "none"],
    ["versions", episode.weight_versions.join(", ") || "none"],
    ["workers", episode.workers.join(" ") || "none"],
    ["ended", episode.end_reason ?? "no"],
    ["not recorded", counted(episode.untraced)],
    ["began", episode.started_at === null ? "unknown" : ago(episode.started_at)],
    ["last used", ago(episode.last_used_at)],
  ];
}

/** Return the leaf that continues a turn: the turn itself, or the last leaf below it. */
function leafBehind(turns, leaves, turn) {
  const parents = new Map(turns.map((each) => [each.turn, each.parent]));
  const goesThrough = (leaf) => {
    for (let at = leaf; at !== null && at !== undefined; at = parents.get(at)) if (at === turn) return true;
    return false;
  };
  return leaves.includes(turn) ? turn : leaves.filter(goesThrough).at(-1) ?? leaves.at(-1) ?? null;
}

/** The view of one episode. `open` sets its id, `refresh` loads the episode, and its tokens if they have changed. */
export class EpisodeView {
  constructor({lookAgain}) {
    this.title = "Episode";
    this._lookAgain = lookAgain;
    this._id = this._leaf = this._episode = null;
    this._drawn = ""; // identifies the leaf and the state whose tokens are shown
    this._from = null; // the turn to begin at
    this._heading = element("h2", {id: "episode-id"});
    this._facts = element("dl", {class: "details", id: "facts"});
    this._about = element("pre", {tabindex: "0", id: "about", role: "region", "aria-label": "Metadata and contract"});
    this._hidden = element("p", {class: "notice", id: "hidden-text", hidden: true}, HIDDEN);
    this._empty = element("p", {class: "soft", id: "no-turns", hidden: true}, "No turn is recorded yet.");
    this._turns = new WindowedTable({
      id: "turns", label: "Turns", columns: COLUMNS, rowHeight: ROW, mostRows: MOST_ROWS, keyOf: ({turn}) => turn,
      choose: ({turn}) => this._choose(leafBehind(this._episode.turns, this._episode.leaf_turns, turn), turn),
    });
    this._sample = new SampleView((leaf, turn) => this._choose(leaf, turn));
    const head = element("section", {class: "card", "aria-label": "Episode"},
      element("p", {}, element("a", {href: "#/episodes"}, "← Episodes")), this._heading, this._hidden, this._facts,
      element("details", {}, element("summary", {}, "Metadata and contract"), this._about));
    this._tokens = element("div", {id: "tokens-of"}, this._sample.element);
    this.element = element("div", {}, head, section("Turns", this._empty, this._turns.element), this._tokens);
  }

  open(id, parameters) {
    const turn = parameters.get("turn");
    if (id === this._id && turn === null) return;
    this._id = id;
    this.title = id;
    this._leaf = this._episode = null;
    this._from = turn === null ? null : Number(turn);
    this._drawn = "";
    putInto(this._heading, id);
    this._tokens.hidden = true;
    this._facts.replaceChildren(); // else another episode's facts would be shown under this id until its own are loaded
    putInto(this._about, "");
    this._turns.rewind();
    this._turns.show([]);
  }

  async refresh({signal}) {
    const id = this._id, episode = await this._read(id, signal);
    if (id !== this._id) return;
    this._episode = episode;
    this._describe(episode);
    this._turns.show(episode.turns);
    this._leaf = leafBehind(episode.turns, episode.leaf_turns, this._leaf ?? this._from ?? episode.leaf_turns.at(-1));
    this._empty.hidden = episode.turns.length > 0;
    this._tokens.hidden = this._leaf === null;
    if (this._leaf !== null) await this._drawLeaf(signal);
  }

  async _read(id, signal) {
    const at = `router/episodes/${encodeURIComponent(id)}`, episode = await readJson(at, signal);
    for (let next = episode.next_turn; next !== null;) {
      const more = await readJson(pathOf(at, {turn: next}), signal);
      episode.turns.push(...more.turns);
      next = more.next_turn;
    }
    return episode;
  }

  _describe(episode) {
    this._hidden.hidden = episode.text;
    const pairs = pairsOf(episode);
    if (!this._facts.children.length) {
      this._facts.append(...pairs.map(([title]) =>
        element("div", {}, element("dt", {}, title), element("dd", {"data-fact": title}))));
    }
    pairs.forEach(([, value], place) => putInto(this._facts.children[place].lastChild, value));
    putInto(this._about, visibleJson(JSON.stringify({metadata: episode.metadata, contract: episode.contract}, null, 2)));
  }

  _choose(leaf, turn) {
    this._leaf = leaf;
    this._from = turn;
    this._drawn = "";
    this._lookAgain();
  }

  /** Load and show the tokens up to the chosen leaf, if they differ from those shown. */
  async _drawLeaf(signal) {
    const {tree, leaf_turns: leaves, turns, tokens, started_at: began} = this._episode, leaf = this._leaf;
    const state = JSON.stringify([this._id, began, leaf, leaves, turns.length, tokens]);
    if (state === this._drawn) return;
    const line = await readLine(this._id, leaf, signal), sheet = new Sheet(line);
    const pieces = new Pieces(line.vocabulary, {hidden: !line.facts.text});
    const grown = this._drawn !== "" && this._from === null;
    this._sample.show(sheet, pieces, {
      tree: tree.length > 1 ? {session_id: this._id, lines: tree} : null,
      sample: leaf,
      turn: this._from,
      grown,
    });
    this._from = null;
    this._drawn = state;
    this._tokens.dataset.leaf = String(leaf);
  }
}
