/* The planner: a form made of what may be asked, and the answer with its reasons. */

import { call, explained, get } from "./api.js";
import { $, count, make, say } from "./dom.js";

/* Asked first; the rest has defaults that most people keep. */
const FIRST = ["params", "chips", "centers", "link_gbit_per_s", "tokens", "step_s", "goodput_min", "deadline_days"];
const SENSITIVE = ["days", "goodput", "gbit_per_s_link", "learners", "sync_every_steps", "codec_up", "syncer_shards"];

/* A name with its unit, for people: link_gbit_per_s is "link, Gbit/s". */
const UNITS = [[/^gbit_per_s(.*)$/, "$1, Gbit/s"], [/_gbit_per_s/, ", Gbit/s"], [/_gb_per_s/, ", GB/s"], [/_values_per_s/, ", values/s"], [/_gib$/, ", GiB"], [/_s(?= |$)/, ", s"], [/_s_min$/, " at least, s"], [/_min$/, " at least"]];
const words = (name) => UNITS.reduce((text, [unit, said]) => text.replace(unit, said), name).replaceAll("_", " ").trim();
const title = (name) => {
  const text = words(name);
  return text[0].toUpperCase() + text.slice(1);
};

function value(x) {
  if (typeof x !== "number") return x === undefined || x === null ? "–" : String(x);
  if (Number.isInteger(x) && Math.abs(x) < 1e15) return count(x);
  return Math.abs(x) >= 1e5 || Math.abs(x) < 1e-3 ? x.toExponential(2) : String(Number(x.toPrecision(4)));
}

function field(name, about, required) {
  const note = make("small", { id: `about-${name}` }, about.description);
  const given = about.default ?? "";
  const input = make("input", { id: `wish-${name}`, name, inputMode: "decimal", autocomplete: "off", required, value: required ? "" : given });
  input.setAttribute("aria-describedby", note.id);
  if (given === "" && !required) input.placeholder = "not given";
  return make("div", {}, make("label", { htmlFor: input.id }, title(name)), input, note);
}

/* Fields as the server describes them: this page knows no wish by itself. */
async function ask() {
  const schema = await get("/v1/plan");
  const names = Object.keys(schema.properties);
  const known = FIRST.filter((name) => names.includes(name));
  const show = (some) => some.map((name) => field(name, schema.properties[name], schema.required.includes(name)));
  $("wishes").replaceChildren(...show(known));
  $("more-wishes").replaceChildren(...show(names.filter((name) => !known.includes(name))));
}

function wishes(form) {
  const given = {};
  for (const input of form.elements) {
    const text = input.value?.trim();
    // What is no number goes as it is: the server says what is wrong with it.
    if (input.name && text) given[input.name] = Number.isNaN(Number(text)) ? text : Number(text);
  }
  return given;
}

const head = (...names) => make("thead", {}, make("tr", {}, ...names.map((n) => make("th", { scope: "col" }, n))));
const cell = (label, text) => {
  const node = make("td", {}, text);
  node.dataset.label = label;
  return node;
};

function table(columns, rows) {
  const lines = rows.map((row) => make("tr", {}, ...row.map((text, n) => cell(columns[n], text))));
  return make("table", { className: "folding words" }, head(...columns), make("tbody", {}, ...lines));
}

function figures(numbers) {
  const items = Object.entries(numbers).map(([name, x]) => make("div", {}, make("dt", {}, title(name)), make("dd", {}, value(x))));
  return make("dl", { className: "figures" }, ...items);
}

function show(found) {
  const chosen = Object.entries(found.settings).map(([name, x]) => [title(name), value(x), found.reasons[name]]);
  const instead = found.sensitivity.map((row) =>
    row.error ? [words(row.changed), row.error, ...SENSITIVE.slice(1).map(() => "")] : [words(row.changed), ...SENSITIVE.map((name) => value(row[name]))]);
  $("planned").replaceChildren(
    make("h3", {}, "Settings"), table(["Setting", "Value", "Why"], chosen),
    make("h3", {}, "To expect"), figures(found.predicted),
    make("h3", {}, "The hub"), figures(found.hub),
    make("h3", {}, "Streams, memory and disks, in GB"), figures(found.budget_gb),
    make("h3", {}, "In other circumstances"), table(["If instead", ...SENSITIVE.map(title)], instead),
    make("ul", {}, ...found.notes.map((note) => make("li", {}, note))),
  );
}

export function offerPlans() {
  let asked = null;
  $("plan").addEventListener("toggle", () => {
    if (!$("plan").open) return;
    asked ??= ask();
    asked.catch((error) => {
      asked = null; // again when it is next opened
      say($("unplanned"), explained(error));
    });
  });
  $("wish").addEventListener("submit", async (event) => {
    event.preventDefault();
    say($("unplanned"), "");
    try {
      show(await call("POST", "/v1/plan", wishes($("wish"))));
    } catch (error) {
      $("planned").replaceChildren();
      say($("unplanned"), explained(error));
    }
  });
}
