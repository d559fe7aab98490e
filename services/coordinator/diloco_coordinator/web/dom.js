/* Small pieces to build and update the page with. Text is always set as text, never as markup. */

export const $ = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((c) => c !== null && c !== undefined && c !== ""));
  return node;
}

/* Text of a node, written only when it differs: selections and screen readers stay undisturbed. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/* Children for `items`, matched by key: nodes stay, so that focus and scrolling do. Those of equal keys
   are matched in their order. */
export function reconcile(parent, items, keyOf, create, update) {
  const there = new Map();
  for (const node of parent.children) there.set(node.dataset.key, [...(there.get(node.dataset.key) ?? []), node]);
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let node = there.get(key)?.shift();
    if (!node) {
      node = create(item);
      node.dataset.key = key;
    }
    update?.(node, item);
    if (node === place) place = place.nextElementSibling;
    else parent.insertBefore(node, place);
  }
  for (const nodes of there.values()) for (const node of nodes) node.remove();
}

const missing = "–";
export const isNumber = (x) => typeof x === "number" && Number.isFinite(x);

export const count = (x) => (isNumber(x) ? Math.round(x).toLocaleString("en") : missing);
export const loss = (x) => (isNumber(x) ? x.toFixed(3) : missing);
export const seconds = (x) => (isNumber(x) ? `${x < 10 ? x.toFixed(2) : x.toFixed(0)} s` : missing);
export const percent = (x) => (isNumber(x) ? `${(100 * x).toFixed(1)} %` : missing);

export function bytes(x) {
  if (!isNumber(x)) return missing;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (x >= 1000 && unit < units.length - 1) {
    x /= 1000;
    unit += 1;
  }
  return `${x.toFixed(unit && x < 100 ? 1 : 0)} ${units[unit]}`;
}

/* A moment as local time of day; the full date on hover. */
export function moment(at) {
  const date = new Date(at * 1000);
  const time = date.toLocaleTimeString("en-GB");
  return make("time", { dateTime: date.toISOString(), title: date.toLocaleString() }, time);
}

/* By how many seconds the coordinator's clock is ahead of this browser's: what it tells of is by its own. */
let ahead = 0;
export function itIs(now) {
  ahead = isNumber(now) ? now - Date.now() / 1000 : 0;
}

export function ago(at) {
  const s = Math.max(0, Date.now() / 1000 + ahead - at);
  if (s < 90) return `${s.toFixed(0)} s`;
  if (s < 5400) return `${(s / 60).toFixed(0)} min`;
  return s < 129600 ? `${(s / 3600).toFixed(0)} h` : `${(s / 86400).toFixed(0)} d`;
}
