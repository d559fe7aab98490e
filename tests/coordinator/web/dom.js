/* As much of a browser as the page needs: elements, listeners, a store, timers that a test fires. */

Array.prototype.at ??= function (n) { return this[n < 0 ? this.length + n : n]; };

class Text {
  constructor(text) { this.text = String(text); this.parentElement = null; }
  get textContent() { return this.text; }
}

class Element {
  constructor(tag, attributes = {}) {
    this.tagName = tag.toUpperCase();
    this.childNodes = [];
    this.parentElement = null;
    this.attributes = {};
    this.dataset = {};
    this.listeners = {};
    this.className = "";
    this.hidden = false;
    this.disabled = false;
    this.open = false;
    this.id = "";
    this.value = "";
    this.returnValue = "";
    this.title = "";
    this.name = "";
    this.onclick = null;
    for (const [name, value] of Object.entries(attributes)) this.setAttribute(name, value);
  }
  setAttribute(name, value) {
    this.attributes[name] = String(value);
    if (name.startsWith("data-")) this.dataset[name.slice(5)] = String(value);
    if (name === "id" || name === "value") this[name] = String(value);
    if (name === "class") this.className = String(value);
    if (name === "hidden") this.hidden = true;
  }
  get value() { return this.said; }
  set value(given) { this.said = String(given); }
  getAttribute(name) { return this.attributes[name] ?? null; }
  get children() { return this.childNodes.filter((n) => n instanceof Element); }
  get firstElementChild() { return this.children[0] ?? null; }
  get lastElementChild() { return this.children.at(-1) ?? null; }
  get nextElementSibling() {
    const all = this.parentElement.children;
    return all[all.indexOf(this) + 1] ?? null;
  }
  get tBodies() { return this.children.filter((n) => n.tagName === "TBODY"); }
  get elements() { return [...everything(this)].filter((n) => n.tagName === "INPUT"); }
  get textContent() { return this.childNodes.map((n) => n.textContent).join(""); }
  set textContent(text) { this.replaceChildren(text); }
  append(...nodes) { for (const node of nodes) this.insertBefore(node, null); }
  insertBefore(node, place) {
    const child = node instanceof Element || node instanceof Text ? node : new Text(node);
    child.parentElement?.without(child);
    const at = place === null ? this.childNodes.length : this.childNodes.indexOf(place);
    this.childNodes.splice(at, 0, child);
    child.parentElement = this;
  }
  without(node) { this.childNodes = this.childNodes.filter((n) => n !== node); node.parentElement = null; }
  remove() { this.parentElement?.without(this); }
  replaceChildren(...nodes) { for (const n of this.childNodes) n.parentElement = null; this.childNodes = []; this.append(...nodes); }
  querySelector(tag) { return [...everything(this)].find((n) => n !== this && n.tagName === tag.toUpperCase()) ?? null; }
  addEventListener(kind, act) { (this.listeners[kind] ??= []).push(act); }
  happens(kind, target = this) {
    const event = { target, preventDefault() {} };
    for (const act of this.listeners[kind] ?? []) act(event);
  }
  click() { this.onclick?.(); this.happens("click"); this.parentElement?.happens("click", this); }
  focus() { document.activeElement = this; }
  showModal() { this.open = true; }
  answered(value) { this.open = false; this.returnValue = value; this.happens("close"); }
}

function* everything(node) {
  yield node;
  for (const child of node.children) yield* everything(child);
}

function built([tag, attributes, children]) {
  const node = new Element(tag, attributes);
  node.append(...children.map((c) => (typeof c === "string" ? c : built(c))));
  return node;
}

const document = {
  root: built(PAGE),
  hidden: false,
  activeElement: null,
  listeners: {},
  getElementById(id) { return [...everything(this.root)].find((n) => n.id === id) ?? null; },
  createElement: (tag) => new Element(tag),
  createElementNS: (_, tag) => new Element(tag),
  addEventListener: (kind, act) => { (document.listeners[kind] ??= []).push(act); },
};

const sessionStorage = {
  kept: {},
  getItem: (key) => sessionStorage.kept[key] ?? null,
  setItem: (key, value) => { sessionStorage.kept[key] = value; },
  removeItem: (key) => { delete sessionStorage.kept[key]; },
};
const location = { hash: HASH, pathname: "/" };
const history = { replaceState: () => { location.hash = ""; } };
class URLSearchParams {
  constructor(text) { this.pairs = Object.fromEntries(text.split("&").map((pair) => pair.split("="))); }
  get(name) { return this.pairs[name] ?? null; }
}
class Signal {
  constructor() { this.aborted = false; this.acts = []; }
  end(name) {
    if (this.aborted) return;
    this.aborted = true;
    for (const act of this.acts) act(name);
  }
}
/* No clock runs: a test says how many milliseconds have passed for whatever has a limit. */
const limits = [];
const pass = (ms) => { for (const limit of limits) if (limit.ms <= ms) limit.signal.end("TimeoutError"); };
const AbortSignal = {
  timeout(ms) {
    limits.push({ ms, signal: new Signal() });
    return limits.at(-1).signal;
  },
  any(signals) {
    const either = new Signal();
    for (const signal of signals) signal.acts.push((name) => either.end(name));
    return either;
  },
};
class AbortController {
  constructor() { this.signal = new Signal(); }
  abort() { this.signal.end("AbortError"); }
}
class TextDecoder {
  decode(text) { return text; }
}

/* What only somebody who mends the page looks at. */
const console = { said: [], error: (error) => console.said.push(String(error)) };

const crypto = { getRandomValues: (bytes) => bytes.map(() => Math.floor(Math.random() * 256)) };

/* One timer at most waits: the page's loop. */
let due = null;
const setTimeout = (act) => { due = act; return 1; };
const clearTimeout = () => { due = null; };

/* Pieces of a stream, each at a test's word; a signal that ends breaks it off. */
let waiting = null;
const more = () => { const act = waiting; waiting = null; act?.(); };
async function piece(pieces, signal) {
  await new Promise((resolve, reject) => {
    waiting = resolve;
    signal.acts.push((name) => reject(Object.assign(new Error("ended"), { name })));
  });
  return pieces.length ? { done: false, value: pieces.shift() } : { done: true };
}

/* As the coordinator tells events: whoever has read beyond their end, or others, is told what came instead. */
/* Where coordinators differ, each answer is of another one, and has marks of its own. */
const markOf = (event) => `${event.at}+${event.text}${server.differ ? server.asked.length : ""}`;
function told(events, after, mark) {
  const there = events.find((e) => e.seq === after);
  const again = (events.length > 0 && after > events.at(-1).seq) || Boolean(mark && there && markOf(there) !== mark);
  const found = events.filter((e) => again || e.seq > after).slice(0, 1000);
  return { events: found, mark: found.length ? markOf(found.at(-1)) : again ? "" : mark, again };
}

/* What the coordinator answers: [status, body] by "METHOD path"; what was asked is kept. `away`: the
   link is lost before an answer comes, `torn`: while it comes. `differ`: coordinators do, of which so many
   answer. */
const server = { away: false, torn: false, differ: 0, answers: {}, asked: [] };
async function fetch(path, { method, headers, body, signal }) {
  const [place, query] = path.split("?");
  server.asked.push({ method, path, body: body ? JSON.parse(body) : null, token: headers.Authorization, key: headers["Idempotency-Key"] ?? null });
  if (server.differ && server.asked.length > server.differ) throw new TypeError("asked without end");
  if (server.away) throw new TypeError("network");
  const [status, found] = server.answers[`${method} ${place}`] ?? [404, { title: `no ${method} ${place}` }];
  const after = Number(/after=(\d+)/.exec(query)?.[1] ?? 0);
  // Of a stream: its pieces as they come, until a test says that more is there.
  if (found.pieces) return { ok: true, status, body: { getReader: () => ({ read: () => piece(found.pieces, signal) }) } };
  const answer = typeof found === "string" ? found : { ...found };
  if (Array.isArray(answer.rounds)) answer.rounds = answer.rounds.filter((x) => x.seq > after);
  if (Array.isArray(answer.events)) Object.assign(answer, told(answer.events, after, decodeURIComponent(/mark=([^&]*)/.exec(query)?.[1] ?? "")));
  // Not JSON, as a proxy between may answer, or what it is.
  const written = typeof found === "string" ? found : JSON.stringify(answer);
  const text = async () => {
    if (server.torn) throw new TypeError("network");
    return written;
  };
  return { ok: status < 400, status, text, json: async () => JSON.parse(await text()) };
}

/* For tests: what a person sees and does. */
const id = (name) => document.getElementById(name);
const visible = (node) => !node || (!node.hidden && visible(node.parentElement));
const seen = (name) => (visible(id(name)) ? id(name).textContent : null);
const lines = (body) => body.children.map((row) => row.children.map((c) => c.textContent));
const rows = (name) => lines(id(name).tBodies[0]);
const items = (name) => id(name).children.map((item) => item.textContent);
const buttons = (name) => [...everything(id(name))].filter((n) => n.tagName === "BUTTON" && !n.disabled && visible(n)).map((n) => n.getAttribute("aria-label") ?? n.textContent);
const press = (name, label) => [...everything(id(name))].find((n) => n.tagName === "BUTTON" && (n.getAttribute("aria-label") ?? n.textContent) === label).click();
const texts = () => [...everything(document.root)].flatMap((n) => n.childNodes.filter((c) => c instanceof Text).map((c) => c.text));
