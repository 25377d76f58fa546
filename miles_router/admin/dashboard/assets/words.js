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

let ahead = 0; // seconds that the router's clock is ahead of this machine's

/** What the router's clock says now. */
export function keepTime(now) {
  ahead = now - Date.now() / 1000;
}

/** Unix time by the router's clock, by which all of its times are. */
export function routerTime() {
  return Date.now() / 1000 + ahead;
}

/** How long ago a Unix time is. */
export function ago(time) {
  return time === null || time === undefined ? "never" : `${duration(Math.round(routerTime() - time))} ago`;
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
