// The difference of two texts.

const MOST = 400;

/** Return runs `[kind, text]`: "same", "held" (only in the first text) and "sent" (only in the second). */
export function difference(held, sent) {
  const first = [...held], second = [...sent];
  let begin = 0, end = 0;
  while (begin < Math.min(first.length, second.length) && first[begin] === second[begin]) begin++;
  const room = Math.min(first.length, second.length) - begin;
  while (end < room && first.at(-1 - end) === second.at(-1 - end)) end++;
  const middle = between(first.slice(begin, first.length - end), second.slice(begin, second.length - end));
  const ends = end ? first.slice(-end) : [];
  return joined([...first.slice(0, begin).map(same), ...middle, ...ends.map(same)]);
}

function same(character) {
  return ["same", character];
}

/** Compare by the longest common subsequence, if the texts are short enough. */
function between(first, second) {
  const whole = [...first.map((each) => ["held", each]), ...second.map((each) => ["sent", each])];
  if (first.length > MOST || second.length > MOST) return whole;
  const width = second.length + 1, lengths = new Uint16Array((first.length + 1) * width);
  for (let i = first.length - 1; i >= 0; i--) {
    for (let j = second.length - 1; j >= 0; j--) {
      lengths[i * width + j] = first[i] === second[j]
        ? lengths[(i + 1) * width + j + 1] + 1
        : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
    }
  }
  const found = [];
  let i = 0, j = 0;
  while (i < first.length || j < second.length) {
    if (i < first.length && j < second.length && first[i] === second[j]) {
      found.push(same(first[i]));
      i++;
      j++;
    } else if (j >= second.length || (i < first.length && lengths[(i + 1) * width + j] >= lengths[i * width + j + 1])) {
      found.push(["held", first[i++]]);
    } else found.push(["sent", second[j++]]);
  }
  return found;
}

function joined(runs) {
  const found = [];
  for (const [kind, text] of runs) {
    const last = found.at(-1);
    if (last !== undefined && last[0] === kind) last[1] += text;
    else found.push([kind, text]);
  }
  return found;
}
