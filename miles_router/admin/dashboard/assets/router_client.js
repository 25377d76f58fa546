// The router's own routes, asked with the key that somebody has given.

const KEY = "miles-router-key", PATIENCE_MS = 10_000, WRITABLE = /^[\x21-\x7e]+$/;

/** The router wants a key, or another one. */
export class KeyNeeded extends Error {
  constructor(given) {
    super(given ? "The router did not accept this key." : "");
  }
}

/** What the router said in place of an answer. */
export class Refused extends Error {
  constructor(path, status, said) {
    super(`The router answered ${status} to GET /${path.split("?")[0]}${said ? `: ${said}` : "."}`);
    this.status = status;
  }
}

/** Keeps the key for as long as the tab is open. */
export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** A path with its parameters; those that are null, or "" are left out. */
export function pathOf(path, parameters) {
  const given = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

async function ask(path, signal, accept = "application/json") {
  const key = sessionStorage.getItem(KEY);
  if (key && !WRITABLE.test(key)) { // no header can have it, so that it is no key
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

/** The JSON at a path. */
export async function readJson(path, signal) {
  return (await ask(path, signal)).json();
}

/** The bytes at a path. */
export async function readBytes(path, signal) {
  return (await ask(path, signal, "application/octet-stream")).arrayBuffer();
}
