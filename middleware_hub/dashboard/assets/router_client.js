// Requests to the router's own routes, with the key that the user entered.

const KEY = "miles-router-key", PATIENCE_MS = 10_000, WRITABLE = /^[\x21-\x7e]+$/;

/** The router requires a key, or rejected the given one. */
export class KeyNeeded extends Error {
  constructor(given) {
    super(given ? "The router did not accept this key." : "");
  }
}

/** The router answered with an error status. */
export class Refused extends Error {
  constructor(path, status, said) {
    super(`The router answered ${status} to GET /${path.split("?")[0]}${said ? `: ${said}` : "."}`);
    this.status = status;
  }
}

/** Store the key while the tab is open. */
export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** Return a path with query parameters. Null, undefined and "" are left out. */
export function pathOf(path, parameters) {
  const given = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

async function ask(path, signal, accept = "application/json") {
  const key = sessionStorage.getItem(KEY);
  if (key && !WRITABLE.test(key)) { // a header cannot contain it, so it is not a valid key
    sessionStorage.removeItem(KEY);
    throw new KeyNeeded(true);
  }
  const patience = AbortSignal.timeout(PATIENCE_MS);
  const answer = await fetch(path, {
    headers: {Accept: accept, ...(key ? {Authorization: `Bearer ${key}`} : {})},
    cache: "no-store",
    signal: signal ? AbortSignal.any([signal, patience]) : patience,
  });
  if (answer.status === 401) {
    sessionStorage.removeItem(KEY);
    throw new KeyNeeded(Boolean(key));
  }
  if (!answer.ok) throw new Refused(path, answer.status, await saidBy(answer));
  return answer;
}

async function saidBy(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return "";
  }
}

/** Request a path and parse the answer as JSON. */
export async function readJson(path, signal) {
  return (await ask(path, signal)).json();
}

/** Request a path and return the answer's bytes. */
export async function readBytes(path, signal) {
  return (await ask(path, signal, "application/octet-stream")).arrayBuffer();
}
