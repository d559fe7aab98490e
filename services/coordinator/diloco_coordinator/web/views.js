/* What the page shows of a run, its members, rounds and events. */

import { $, ago, bytes, count, isNumber, loss, make, moment, percent, reconcile, say, seconds } from "./dom.js";
import { lineChart } from "./chart.js";

const GOOD = new Set(["running", "stepping", "finished", "committed", "alive", "finishing", "leading", "working"]);
const BAD = new Set(["down", "starved", "full", "stuck", "unfit", "skipped", "gone"]);
const IDLE = new Set(["idle", "stopped", "queued"]);

function tone(state) {
  if (GOOD.has(state)) return "good";
  if (BAD.has(state)) return "bad";
  return IDLE.has(state) ? "" : "warn";
}

function mark(node, state) {
  say(node, state);
  node.className = `badge ${tone(state)}`;
}

/* --- the run ------------------------------------------------------------------------------ */

export function showRun(run, newest) {
  say($("name"), run.name);
  mark($("state"), run.state);
  const waiting = run.waiting && run.waiting !== run.reason ? ` · ${run.waiting}` : "";
  say($("reason"), run.reason + waiting);
  const over = run.state === "finished" || run.state === "stopped";
  const may = { pause: run.desired === "running", resume: run.desired === "paused", stop: run.desired !== "stopped" };
  for (const button of $("verbs").children) {
    const verb = button.dataset.verb;
    button.disabled = over || !may[verb];
    button.setAttribute("aria-label", `${button.textContent} run ${run.name}`);
  }
  const s = run.status;
  $("progress").value = s ? s.stamp.fraction : 0;
  say($("progressed"), s ? `${percent(s.stamp.fraction)} of the budget, ${count(s.stamp.steps)} steps` : "not begun");
  reconcile($("figures"), s ? figures(run, s, newest) : [], (f) => f[0], newFigure, fillFigure);
}

function figures(run, s, newest) {
  const known = Object.keys(s.learners).length;
  const refused = Object.entries(s.refused).map(([why, n]) => `${why} ${n}`);
  return [
    ["Alive", `${s.alive.length} of ${known}`, "heartbeats seen"],
    ["Participating", `${s.participating.length} of ${known}`, "merged in one of the newest rounds"],
    ["Useful", s.tokens_processed ? percent(s.tokens_useful / s.tokens_processed) : "–",
      `${count(s.tokens_useful)} of ${count(s.tokens_processed)} tokens merged`],
    ["In flight", count(s.tokens.in_flight), "tokens whose fate is open"],
    ["Not merged", count(s.tokens.refused + s.tokens.overwritten + s.tokens.lost),
      `refused ${count(s.tokens.refused)}, overwritten ${count(s.tokens.overwritten)}, lost ${count(s.tokens.lost)}`],
    ["Validation loss", loss(newest?.val_loss), ["nats per token, newest", perCorpus(newest?.each)].filter(Boolean).join("; ")],
    ["Rounds committed", count(s.rounds_committed), `${count(s.rounds_skipped)} skipped`],
    ["Quorum", count(s.quorum), `epoch ${s.epoch}`],
    ["Syncer", ...leadership(s, run.syncers)],
    ["Uploaded", bytes(s.bytes_up), "contributions"],
    ["Downloaded", bytes(s.bytes_down), "publications, by every reader"],
    ["Refused", count(Object.values(s.refused).reduce((a, b) => a + b, 0)), refused.join(", ") || "nothing so far"],
    ["Parameters", count(s.parameters), `${s.versions.length} fragments`],
  ];
}

/* The status is its leader's word: when a leader dies, it names the dead one until another leads. */
function leadership(s, syncers) {
  const known = syncers.find((x) => x.id === s.leader);
  if (known?.state === "gone") {
    const next = syncers.find((x) => x.state === "leading");
    return [next ? next.id : "–", `${next ? "takes over; " : ""}${s.leader} led in term ${s.term} and is gone; ${standby(syncers)}`];
  }
  return [s.leader || "–", `term ${s.term}; ${standby(syncers)}`];
}

function standby(syncers) {
  const able = syncers.filter((x) => x.state === "standby" && !x.reason).length;
  return able ? `${able} standing by` : "nobody stands by";
}

function newFigure([name]) {
  return make("div", {}, make("dt", {}, name), make("dd", {}, make("span"), make("small")));
}

function fillFigure(node, [, value, note]) {
  say(node.querySelector("span"), value);
  say(node.querySelector("small"), note);
}

/* Of a mixture: what is lost on each of its corpora. */
function perCorpus(each) {
  const finite = Object.entries(each ?? {}).filter(([, x]) => isNumber(x));
  return finite.map(([name, x]) => `${name} ${x.toFixed(4)}`).join(", ");
}

/* What events tell of evaluations. A learner of another release may tell of one without its figures:
   there is nothing to show of that. */
export function evaluationsOf(events) {
  const told = events.filter((e) => e.kind === "evaluation" && isNumber(e.data.steps) && isNumber(e.data.val_loss));
  return told.map((e) => ({ ...e.data, seq: e.seq }));
}

/* At most `most` of what comes and the newest, evenly spread over it: `kept` is every `every`-th of `seen`. */
export class Thinned {
  constructor(most) {
    Object.assign(this, { most, every: 1, seen: 0, kept: [], newest: null });
  }
  add(one) {
    if (this.seen % this.every === 0) this.kept.push(one);
    this.seen += 1;
    this.newest = one;
    if (this.kept.length <= this.most) return;
    this.kept = this.kept.filter((_, n) => n % 2 === 0);
    this.every *= 2;
  }
  get all() {
    return this.seen === 0 || this.kept.at(-1) === this.newest ? this.kept : [...this.kept, this.newest];
  }
}

export function showLosses(evaluations) {
  const points = evaluations.map((e) => ({ seq: e.seq, x: e.steps, y: e.val_loss, each: perCorpus(e.each), versions: [e.versions].flat().filter(isNumber) }));
  points.sort((a, b) => a.x - b.x);
  const row = (p) => make("tr", {}, make("td", {}, count(p.x)), make("td", {}, p.y.toFixed(4), p.each && ` (${p.each})`), make("td", {}, p.versions.join(" ") || "–"));
  reconcile($("values").querySelector("tbody"), [...points].reverse(), (p) => p.seq, row);
  $("losses").hidden = points.length === 0;
  if (!points.length) return $("chart").replaceChildren();
  const first = points[0], last = points[points.length - 1];
  const describe = `Validation loss from ${loss(first.y)} at ${count(first.x)} steps to ${loss(last.y)} at ${count(last.x)} steps`;
  lineChart($("chart"), points, { xLabel: "steps", describe });
}

/* --- members ------------------------------------------------------------------------------ */

function cell(label, ...children) {
  return make("td", { "data-label": label }, ...children);
}

function actions(member, may, ask) {
  const button = (text, act, extra = {}) =>
    make("button", { type: "button", "aria-label": `${text} ${member.id}`, onclick: () => act(member.id), ...extra }, text);
  const box = make("span", { className: "actions" });
  if (may.chaos && member.alive && member.role !== "supervisor") box.append(button("Kill", ask.kill, { className: "danger" }));
  if (may.operate && ["learner", "syncer"].includes(member.role) && member.alive)
    box.append(member.draining ? button("Undrain", ask.undrain) : button("Drain", ask.drain));
  if (may.operate && !member.alive) box.append(button("Forget", ask.forget));
  return box;
}

/* Buttons are made anew only when other ones are due: a focused one stays. */
function fillActions(node, member, mayChange, ask) {
  const may = mayChange(member);
  const due = JSON.stringify([member.alive, member.draining, member.role, may]);
  if (node.dataset.due === due) return;
  node.dataset.due = due;
  node.replaceChildren(actions(member, may, ask));
}

function stateOf(member) {
  if (!member.alive) return "gone";
  if (member.role !== "learner") return member.state && member.state !== "idle" ? member.state : "alive";
  return member.state === "unfit" ? "unfit" : member.learner?.state ?? "idle";
}

/* Of a syncer: records that it has yet to execute; none of interest while it leads. */
function behind(records) {
  return records ? `${count(records)} records behind` : "";
}

function noteOf(member) {
  if (!member.alive) return `for ${ago(member.gone_since)}`;
  const l = member.learner;
  if (member.draining) return member.stays ? `draining: ${member.stays}` : "draining";
  if (member.reason || member.full) return member.reason || member.full;
  if (member.role === "syncer") return behind(member.lag_records);
  if (!l) return "";
  if (!l.alive) return `silent for ${seconds(l.silent_s)}`;
  return l.participating ? "participating" : "not participating yet";
}

export function showLearners(members, may, ask) {
  const make_ = () => {
    const name = make("td", { "data-label": "Learner" });
    const state = cell("State", make("span"), make("small", { className: "soft" }));
    return make("tr", {}, name, state, cell("Step"), cell("Loss"), cell("Tokens/s"), cell("MFU"), cell("Data wait"),
      cell("Memory", make("span"), make("small", { className: "soft" })), cell("Merged last in"), cell("Works for"), make("td"));
  };
  const fill = (row, m) => {
    const [name, state, step, train, speed, mfu, wait, memory, merged, works, buttons] = row.children;
    const l = m.learner ?? {}, told = m.speed ?? {};
    say(name, m.id);
    mark(state.firstElementChild, stateOf(m));
    say(state.lastElementChild, noteOf(m));
    say(step, count(l.step));
    say(train, loss(l.loss));
    // Its own word is of its newest steps; without one there is what its syncer counts.
    say(speed, count(m.alive ? told.tokens_per_s ?? l.tokens_per_s : NaN));
    const about = told.flops_estimated && Number.isFinite(told.mfu) ? "~" : "";
    say(mfu, about + percent(told.mfu));
    say(wait, percent(told.data_wait_ratio));
    say(memory.firstElementChild, bytes(told.memory_bytes));
    say(memory.lastElementChild, told.device ? `${told.devices} × ${told.device}` : "");
    say(merged, l.merged_round >= 0 ? `round ${l.merged_round}` : "–");
    say(works, m.assigned || "–");
    fillActions(buttons, m, may, ask);
  };
  reconcile($("learners").tBodies[0], members.filter((m) => m.role === "learner"), (m) => m.id, make_, fill);
}

export function showServices(members, may, ask) {
  const make_ = () =>
    make("tr", {}, cell("Member"), cell("Role"), cell("State", make("span"), make("small", { className: "soft" })), cell("Works for"), cell("Host"), make("td"));
  const fill = (row, m) => {
    const [name, role, state, works, host, buttons] = row.children;
    say(name, m.id);
    say(role, m.role);
    mark(state.firstElementChild, stateOf(m));
    say(state.lastElementChild, noteOf(m));
    say(works, m.assigned || "–");
    say(host, `${m.host}, process ${m.pid}`);
    fillActions(buttons, m, may, ask);
  };
  reconcile($("services").tBodies[0], members.filter((m) => m.role !== "learner"), (m) => m.id, make_, fill);
}

/* --- rounds and events -------------------------------------------------------------------- */

export function showRounds(rounds) {
  const item = (r) => {
    const badge = make("span");
    mark(badge, r.outcome);
    const out = r.verdicts.filter((v) => v.outcome !== "merged");
    const merged = r.verdicts.filter((v) => v.outcome === "merged").map((v) => v.learner);
    const times = `quorum ${seconds(r.quorum_s)}, grace ${seconds(r.grace_s)}, sync ${seconds(r.sync_s)}`;
    return make("li", {},
      make("p", { className: "head" }, make("strong", {}, `Round ${r.round}`), `fragment ${r.fragment}`, badge, moment(r.at)),
      make("p", {}, merged.length ? `Merged: ${merged.join(", ")}` : "Merged: nobody"),
      ...out.map((v) => make("p", { className: v.outcome === "refused" ? "bad" : "soft" }, `${v.learner} ${v.outcome}: ${v.reason}`)),
      r.outcome === "skipped" ? make("p", { className: "bad" }, r.reason) : null,
      make("p", { className: "soft" }, `${r.quorum_reason}; ${times}`));
  };
  reconcile($("rounds"), [...rounds].reverse(), (r) => r.seq, item);
}

export function showEvents(events) {
  const item = (e) =>
    make("li", {}, make("p", { className: "head" }, moment(e.at), make("strong", {}, e.kind), make("span", { className: "soft" }, e.source)), make("p", {}, e.text));
  reconcile($("events"), [...events].reverse(), (e) => e.seq, item);
}
