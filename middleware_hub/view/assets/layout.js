// The layout of tokens in rows: as many as fit, with a new row after a line break.

const PADDING = 6, GAP = 2, LEAST = 10;

/** The widths of tokens in pixels, in `font`. Each text is measured once. */
export class Widths {
  constructor(font) {
    this._pen = document.createElement("canvas").getContext("2d");
    this._pen.font = font;
    this._known = new Map();
  }

  /** Return the width of a token shown as this text. */
  of(shown) {
    let width = this._known.get(shown);
    if (width === undefined) {
      width = Math.max(LEAST, Math.ceil(this._pen.measureText(shown).width)) + PADDING;
      this._known.set(shown, width);
    }
    return width;
  }
}

/** Lay out rows of at most `room` pixels. Return the first position of each row, then the number of positions. */
export function rowsOf(sheet, pieces, widths, room) {
  const starts = [0];
  let used = 0;
  for (let position = 0; position < sheet.length; position++) {
    const piece = pieces.of(sheet.id(position));
    const width = Math.min(widths.of(piece.shown), room) + GAP;
    if (used > 0 && used + width > room + GAP) {
      starts.push(position);
      used = 0;
    }
    used += width;
    if (piece.breaks && position + 1 < sheet.length) {
      starts.push(position + 1);
      used = 0;
    }
  }
  if (sheet.length) starts.push(sheet.length);
  return Int32Array.from(starts);
}

/** Return the row of a position. */
export function rowAt(starts, position) {
  let low = 0, high = starts.length - 2;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (starts[middle] <= position) low = middle;
    else high = middle - 1;
  }
  return low;
}
