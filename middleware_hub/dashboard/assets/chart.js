// Line charts over time, drawn by uPlot. Colours come from the style sheet, so that they follow the system theme.

import uPlot from "../uplot/uPlot.esm.js";
import {element, putInto, several} from "../view/elements.js";

const HEIGHT = 190, SLIM = 2, MOST_NAMED = 8, LEAST_S = 60;
// Time labels of the axis: the time of day, and the date where it changes.
const MARKS = [
  [86400, "{YYYY}-{MM}-{DD}", null, null, null, null, null, null, 1],
  [60, "{HH}:{mm}", "\n{YYYY}-{MM}-{DD}", null, "\n{YYYY}-{MM}-{DD}", null, null, null, 1],
  [1, "{HH}:{mm}:{ss}", "\n{YYYY}-{MM}-{DD}", null, "\n{YYYY}-{MM}-{DD}", null, null, null, 1],
];
const STEPS = [1, 5, 10, 15, 30, 60, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

/** Return a colour of the style sheet. */
export function styleOf(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name);
}

const hues = new Map();

/** Return the colour of a name, assigned in order of appearance. Steps of the golden angle keep hues distinct. */
export function colourOf(name) {
  if (!hues.has(name)) hues.set(name, (210 + hues.size * 137.508) % 360);
  return `hsl(${hues.get(name).toFixed(0)} 62% ${styleOf("--lightness")})`;
}

function axis(more) {
  const grid = {stroke: () => styleOf("--line"), width: 1};
  return {stroke: () => styleOf("--soft"), grid, ticks: grid, font: "11px system-ui, sans-serif", ...more};
}

function short(value) {
  return Intl.NumberFormat("en-US", {notation: "compact", maximumFractionDigits: 1}).format(value);
}

/** A chart in `element`, with a text alternative. */
export class TimeChart {
  constructor(title, {least = 4} = {}) {
    this._least = least; // minimum upper end of the axis
    this._names = null;
    this._plot = null;
    this._bands = [];
    this._box = element("div", {class: "plot", "aria-hidden": "true"});
    this._words = element("span", {class: "unseen"});
    this._key = element("ul", {class: "legend"});
    this.element = element("figure", {class: "chart", "aria-label": title}, element("figcaption", {}, title, " ", this._words), this._box, this._key);
    new ResizeObserver(() => this._resize()).observe(this._box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this._plot?.redraw());
  }

  /** `times` in Unix seconds; `lines` are `{name, values}`, null for a gap; `bands` are `{start, end, text}`. */
  draw(times, lines, bands = [], words = "") {
    const last = times.at(-1) ?? 0, first = Math.min(times[0] ?? 0, last - LEAST_S);
    this._bands = bands.filter(({start, end}) => end >= first && start <= last);
    const pauses = this._bands.length ? several(this._bands.length, "pause") : "";
    putInto(this._words, [words, pauses].filter(Boolean).join("; "));
    const names = JSON.stringify(lines.map(({name}) => name));
    if (names !== this._names) this._build(lines, names);
    this._shade(this._bands);
    this._plot.setData([times, ...lines.map(({values}) => values)]);
  }

  _build(lines, names) {
    this._names = names;
    this._plot?.destroy();
    const series = lines.map(({name}) => ({
      label: name, stroke: () => colourOf(name), width: 1.8, spanGaps: false, points: {show: false},
    }));
    this._plot = new uPlot({
      width: Math.max(100, this._box.clientWidth),
      height: HEIGHT,
      legend: {show: false},
      cursor: {show: false},
      scales: {x: {range: (_, first, last) => [Math.min(first, last - LEAST_S), last]}, y: {range: (_, least, most) => [Math.min(0, least ?? 0), Math.max(this._least, (most ?? 0) * 1.1)]}},
      axes: [axis({values: MARKS, incrs: STEPS}), axis({size: 48, values: (_, marks) => marks.map(short)})],
      series: [{}, ...series],
      hooks: {drawClear: [(plot) => this._drawBands(plot)]},
    }, [[], ...lines.map(() => [])], this._box);
    const named = lines.length <= MOST_NAMED ? lines : [];
    this._marks = named.map(({name}) => {
      const mark = element("span", {class: "swatch dot", "aria-hidden": "true"});
      mark.style.background = colourOf(name);
      return element("li", {}, mark, name);
    });
  }

  _shade(bands) {
    const texts = [...new Set(bands.map(({text}) => text))];
    this._key.replaceChildren(...this._marks, ...texts.map((text) =>
      element("li", {}, element("span", {class: "swatch dot band", "aria-hidden": "true"}), text)));
  }

  _drawBands(plot) {
    const {left, top, width, height} = plot.bbox;
    plot.ctx.fillStyle = styleOf("--band");
    for (const {start, end} of this._bands) {
      const from = Math.max(left, plot.valToPos(start, "x", true));
      const to = Math.min(left + width, plot.valToPos(end, "x", true));
      plot.ctx.fillRect(Math.min(from, left + width - SLIM), top, Math.max(SLIM, to - from), height);
    }
  }

  _resize() {
    if (this._box.clientWidth > 0) this._plot?.setSize({width: this._box.clientWidth, height: HEIGHT});
  }
}
