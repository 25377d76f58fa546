// Formatting of numbers and times.

/** Format a duration in seconds. */
export function duration(seconds) {
  if (seconds > 0 && seconds < 10 && !Number.isInteger(seconds)) return `${seconds.toFixed(seconds < 1 ? 2 : 1)} s`;
  const s = Math.max(0, Math.round(seconds)), days = Math.floor(s / 86400), hours = Math.floor(s / 3600) % 24;
  if (days) return `${days} d ${hours} h`;
  if (s >= 3600) return `${hours} h ${Math.floor(s / 60) % 60} min`;
  const minutes = s >= 60 ? `${Math.floor(s / 60)} min` : "";
  return s % 60 || !s ? `${minutes} ${s % 60} s`.trim() : minutes;
}

let ahead = 0; // seconds that the router's clock is ahead of this machine's

/** Set the router's current time. */
export function keepTime(now) {
  ahead = now - Date.now() / 1000;
}

/** Return the Unix time of the router's clock, to which all its times refer. */
export function routerTime() {
  return Date.now() / 1000 + ahead;
}

/** Format how long ago a Unix time is. */
export function ago(time) {
  return time === null || time === undefined ? "never" : `${duration(Math.round(routerTime() - time))} ago`;
}

/** Format a Unix time as a time of day. */
export function clock(time) {
  return new Date(time * 1000).toLocaleTimeString("en-GB");
}

/** Return a URL without its scheme. */
export function hostOf(url) {
  return url.replace(/^https?:\/\//, "");
}

/** Format a share in percent; a dash if `whole` is 0. */
export function percent(part, whole) {
  return whole > 0 ? `${(100 * part / whole).toFixed(part === whole || part === 0 ? 0 : 1)} %` : "–";
}
