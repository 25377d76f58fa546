// Numbers and times as people read them.

/** So many seconds. */
export function duration(seconds) {
  if (seconds > 0 && seconds < 10 && !Number.isInteger(seconds)) return `${seconds.toFixed(seconds < 1 ? 2 : 1)} s`;
  const s = Math.max(0, Math.round(seconds)), days = Math.floor(s / 86400), hours = Math.floor(s / 3600) % 24;
  if (days) return `${days} d ${hours} h`;
  if (s >= 3600) return `${hours} h ${Math.floor(s / 60) % 60} min`;
  const minutes = s >= 60 ? `${Math.floor(s / 60)} min` : "";
  return s % 60 || !s ? `${minutes} ${s % 60} s`.trim() : minutes;
}

/** How long ago a Unix time is. */
export function ago(time) {
  return time === null || time === undefined ? "never" : `${duration(Math.round(Date.now() / 1000 - time))} ago`;
}

/** A Unix time as the clock shows it. */
export function clock(time) {
  return new Date(time * 1000).toLocaleTimeString("en-GB");
}

/** A URL without what all have. */
export function hostOf(url) {
  return url.replace(/^https?:\/\//, "");
}

/** A share of something, in percent; a dash where there is nothing to have a share of. */
export function percent(part, whole) {
  return whole > 0 ? `${(100 * part / whole).toFixed(part === whole || part === 0 ? 0 : 1)} %` : "–";
}
