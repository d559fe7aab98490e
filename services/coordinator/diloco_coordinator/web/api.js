/* Asks the coordinator; the token lives in this tab only and never in an address. */

const KEPT = "diloco-token";

/* `diloco up` opens /#token=…: a fragment is never sent to a server. It leaves the bar at once. */
export function takeTokenFromAddress() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem(KEPT, given);
    history.replaceState(null, "", location.pathname);
  }
}

export const hasToken = () => Boolean(sessionStorage.getItem(KEPT));
export const keepToken = (token) => sessionStorage.setItem(KEPT, token);
export const dropToken = () => sessionStorage.removeItem(KEPT);

/* What is no fault of this page; its message is for people. */
export class Trouble extends Error {}

/* The server's own words, with the paths of faults if there are any. */
export class Refusal extends Trouble {
  constructor(status, problem) {
    const faults = (problem.errors || []).map((e) => `${e.path}: ${e.message}`);
    super([problem.detail || problem.title || `status ${status}`, ...faults].join("; "));
    this.status = status;
  }
}

/* No answer, or none that came to its end: the coordinator is away, or the way to it. */
export class Unreachable extends Trouble {
  constructor(cause) {
    super("the coordinator does not answer", { cause });
  }
}

/* A proxy's page in place of an answer, say. */
export class Unreadable extends Trouble {
  constructor(cause) {
    super(`this page cannot show what was answered: ${cause.message}`, { cause });
  }
}

/* What went wrong, for people. Whatever is no Trouble is a fault of this page: the console says where,
   since somebody may have to mend it. */
export function explained(error) {
  if (error instanceof Trouble) return error.message;
  console.error(error);
  return `this page has made a mistake, and the browser's console says where: ${error.message}`;
}

/* The same of a request that changes something: where no answer came that can be read, it may have been
   carried out. */
export function explainedChange(error) {
  const open = error instanceof Unreachable || error instanceof Unreadable;
  return explained(error) + (open ? ": what was asked for may have been done all the same, so look before you ask again" : "");
}

/* A browser throws a TypeError both for a lost link and for a mistake: only here it is the link. */
async function reached(doing) {
  try {
    return await doing;
  } catch (error) {
    throw new Unreachable(error);
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Unreadable(error);
  }
}

const PATIENCE_MS = 10_000;

/* Server-sent events of an answer, as they come: `heard` gets the JSON of each, and says whether it was
   the last. Whether the last one came. `stop` is an AbortSignal, and whoever gives it bounds the time: a
   link that dies silently ends nothing. */
export async function stream(path, body, heard, stop) {
  const response = await reached(fetch(path, {
    method: "POST",
    headers: { Authorization: `Bearer ${sessionStorage.getItem(KEPT)}`, "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal: stop,
  }));
  if (!response.ok) throw new Refusal(response.status, await response.json().catch(() => ({})));
  const reader = response.body.getReader(), decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reached(reader.read());
    if (done) return false;
    const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ") && heard(parsed(part.slice(6)))) return true;
  }
}

export async function call(method, path, body, headers = {}) {
  const response = await reached(fetch(path, {
    method,
    headers: {
      Authorization: `Bearer ${sessionStorage.getItem(KEPT)}`,
      ...(body ? { "Content-Type": "application/json" } : {}),
      ...headers,
    },
    body: body ? JSON.stringify(body) : undefined,
    signal: AbortSignal.timeout(PATIENCE_MS),
  }));
  if (response.ok) return response.status === 204 ? null : parsed(await reached(response.text()));
  const problem = await response.json().catch(() => ({}));
  throw new Refusal(response.status, problem);
}

export const get = (path) => call("GET", path);
export const runPath = (name) => `/v1/runs/${encodeURIComponent(name)}`;
/* One that was deleted and submitted again under its name is another one. Null: none. */
export const sameRun = (a, b) => a?.name === b?.name && a?.created_at === b?.created_at;
export const memberPath = (name) => `/v1/members/${encodeURIComponent(name)}`;
