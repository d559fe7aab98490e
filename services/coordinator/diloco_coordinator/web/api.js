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

/* The server's own words, with the paths of faults if there are any. */
export class Refusal extends Error {
  constructor(status, problem) {
    const faults = (problem.errors || []).map((e) => `${e.path}: ${e.message}`);
    super([problem.detail || problem.title || `status ${status}`, ...faults].join("; "));
    this.status = status;
  }
}

const PATIENCE_MS = 10_000;

/* Server-sent events of an answer, as they come: `heard` gets the JSON of each. There is no bound in
   time here, since the server ends what takes too long. `stop` is an AbortSignal. */
export async function stream(path, body, heard, stop) {
  const response = await fetch(path, {
    method: "POST",
    headers: { Authorization: `Bearer ${sessionStorage.getItem(KEPT)}`, "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal: stop,
  });
  if (!response.ok) throw new Refusal(response.status, await response.json().catch(() => ({})));
  const reader = response.body.getReader(), decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) heard(JSON.parse(part.slice(6)));
  }
}

export async function call(method, path, body) {
  const response = await fetch(path, {
    method,
    headers: {
      Authorization: `Bearer ${sessionStorage.getItem(KEPT)}`,
      ...(body ? { "Content-Type": "application/json" } : {}),
    },
    body: body ? JSON.stringify(body) : undefined,
    signal: AbortSignal.timeout(PATIENCE_MS),
  });
  if (response.ok) return response.status === 204 ? null : response.json();
  const problem = await response.json().catch(() => ({}));
  throw new Refusal(response.status, problem);
}

export const get = (path) => call("GET", path);
export const runPath = (name) => `/v1/runs/${encodeURIComponent(name)}`;
export const memberPath = (name) => `/v1/members/${encodeURIComponent(name)}`;
