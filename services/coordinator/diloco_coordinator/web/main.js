/* Asks once a second what is new, shows it, and carries out what buttons say. */

import { Refusal, Trouble, Unreachable, call, dropToken, explained, explainedChange, get, hasToken, keepToken, memberPath, runPath, sameRun, takeTokenFromAddress } from "./api.js";
import { $, itIs, make, reconcile, say } from "./dom.js";
import { offerPlans } from "./plan.js";
import { lookForExports, offerSamples } from "./sample.js";
import { Thinned, evaluationsOf, showEvents, showLearners, showLosses, showRounds, showRun, showServices } from "./views.js";

const EVERY_MS = 1000;
/* Shown at once: what a person may scroll through; the command line shows all. */
const ROUNDS_SHOWN = 30, EVENTS_SHOWN = 100;
/* Points of the curve: more than it has pixels. A tab may be open for weeks. */
const POINTS_MAX = 2000;

/* Of the run, as told so far. `closed`: its status when the rounds were read last; `after`: number of the
   newest event that was read; `mark`: what tells it from another one that gets its number;
   `drawn`: how many evaluations had come when the curve was drawn. */
const nothing = () => ({ rounds: [], closed: null, after: 0, mark: "", events: [], evaluations: new Thinned(POINTS_MAX), drawn: 0 });

/* `cutOff`: why what is shown may be old, else empty. `run`: whose rounds and events these are, { name, created_at }; null for none. */
const seen = { access: null, cutOff: "", run: null, ...nothing() };

let wanted = ""; // the run that was just chosen

function forgetRounds() {
  Object.assign(seen, { rounds: [], closed: null });
  showRounds([]);
  say($("unread"), "");
}

/* Nothing of it stays on the page either: what comes now may have the same numbers. */
function forgetTold() {
  Object.assign(seen, nothing());
  forgetRounds();
  showEvents([]);
  showLosses([]);
}

function forgetRun() {
  seen.run = null;
  forgetTold();
}

/* Look at this run from now on. What was seen stays only while it is the same one: of another one of its
   name, say, the rounds begin anew. */
function turnTo(run) {
  if (sameRun(run, seen.run)) return;
  forgetRun();
  seen.run = run && { name: run.name, created_at: run.created_at };
}

/* What the token in use may change, as the coordinator decides it: a limit closes what it does not name. */
const named = (patterns, name) =>
  patterns.some((p) => (p.endsWith("*") ? name.startsWith(p.slice(0, -1)) : name === p));
const has = (scope) => seen.access.scopes.includes(scope);
const limited = () => seen.access.runs.length + seen.access.sites.length > 0;
const mayChangeRun = (run) => has("operate") && (!limited() || named(seen.access.runs, run));
function mayChangeMember(member) {
  const { runs, sites } = seen.access;
  const its = !member.assigned || !runs.length || named(runs, member.assigned);
  const here = !limited() || (named(sites, member.id) && its);
  return { operate: has("operate") && here, chaos: has("fault") && here && seen.access.chaos };
}

/* --- looking ------------------------------------------------------------------------------ */

/* One look after the other, whoever asks: two at once would note the same events twice. */
let looking = Promise.resolve();
const look = () => (looking = looking.catch(() => {}).then(lookOnce));

async function lookOnce() {
  if (!seen.access) {
    forgetRun(); // another token may see other events
    seen.access = await get("/v1/access");
  }
  const [runs, { members, cut_off, now }] = await Promise.all([get("/v1/runs?brief=true&limit=1000"), get("/v1/members")]);
  seen.cutOff = cut_off ?? "";
  itIs(now);
  chooseRun(runs.runs);
  // Whoever is alive there was so when the coordinator heard of it last.
  for (const table of [$("learners"), $("services")]) table.className = seen.cutOff ? "folding old" : "folding";
  showLearners(members, mayChangeMember, ask);
  showServices(members, mayChangeMember, ask);
  $("login").hidden = true;
  $("run").hidden = false;
  const run = seen.run ? await get(runPath(seen.run.name)) : null;
  turnTo(run); // it may have become another one since they were listed
  $("empty").hidden = Boolean(run);
  $("overview").hidden = !run;
  await lookForEvents();
  if (run) {
    showRun(run, seen.evaluations.newest);
    $("verbs").hidden = !mayChangeRun(run.name);
    say($("unread"), await unread("The rounds", lookForRounds(run)));
  }
  const why = await unread("The exports", lookForExports(run && mayChangeRun(run.name) ? seen.run : null));
  if (why) say($("sampled"), why);
}

/* That these could not be looked at, and why; "" where they were. Rounds and exports lie in places of their own. One of these may
   be away, or damaged (409, which does not pass), while the coordinator tells all else: what is told is
   shown all the same. */
async function unread(these, looking) {
  try {
    await looking;
    return "";
  } catch (error) {
    if (!(error instanceof Trouble) || error.status === 401) throw error;
    return `${these} cannot be read${error.status === 409 ? "" : " now"}: ${explained(error)}`;
  }
}

function chooseRun(runs) {
  runs.sort((a, b) => b.created_at - a.created_at);
  const select = $("runs");
  const option = (r) => make("option", { value: r.name });
  reconcile(select, runs, (r) => r.name, option, (node, r) => say(node, `${r.name} (${r.state})`));
  select.parentElement.hidden = runs.length === 0;
  const called = (name) => runs.find((r) => r.name === name);
  // What people mean: the newest one that is at work, else the newest.
  const busy = runs.find((r) => !["queued", "finished", "stopped"].includes(r.state));
  turnTo(called(wanted) ?? called(seen.run?.name) ?? busy ?? runs[0] ?? null);
  wanted = "";
  const shown = seen.run?.name ?? "";
  if (select.value !== shown && document.activeElement !== select) select.value = shown;
}

/* Whether rounds that were read may be lost: the hub was put back, say, and the run went back with it. */
const wentBack = (before, now) => !now || now.epoch !== before.epoch || now.rounds_committed < before.rounds_committed;
const closedIn = (status) => status.rounds_committed + status.rounds_skipped;

async function lookForRounds({ name, status }) {
  if (seen.closed && wentBack(seen.closed, status)) forgetRounds();
  if (!status || (seen.closed && closedIn(seen.closed) === closedIn(status))) return;
  let page;
  do {
    const after = page?.next ?? seen.rounds.at(-1)?.seq ?? 0;
    page = await get(`${runPath(name)}/rounds?newest=${ROUNDS_SHOWN}&after=${after}`);
    seen.rounds = [...seen.rounds, ...page.rounds].slice(-ROUNDS_SHOWN);
    showRounds(seen.rounds);
  } while (page.next !== null);
  seen.closed = status;
}

/* `anew`: they are being asked for anew already. Of two coordinators behind one address each may say of the
   other's mark that it is not its own, for ever: one beginning is enough, and then no mark is sent. */
async function lookForEvents(anew = false) {
  const about = seen.run ? `&run=${encodeURIComponent(seen.run.name)}` : "";
  let page;
  do {
    const mark = anew ? "" : encodeURIComponent(seen.mark);
    page = await get(`/v1/events?limit=1000&after=${seen.after}&mark=${mark}${about}`);
    if (page.again && seen.after > 0) {
      // The hub lost its newest events, or was put back, and others may have their numbers: all are asked for anew.
      forgetTold();
      return lookForEvents(true);
    }
    seen.after = page.events.at(-1)?.seq ?? seen.after;
    seen.mark = page.mark ?? "";
    for (const evaluation of evaluationsOf(page.events)) seen.evaluations.add(evaluation);
    seen.events = [...seen.events, ...page.events].slice(-EVENTS_SHOWN);
  } while (page.events.length === 1000);
  showEvents(seen.events);
  if (seen.drawn === seen.evaluations.seen) return; // drawn anew, the curve would lose what is shown while one hovers
  seen.drawn = seen.evaluations.seen;
  showLosses(seen.evaluations.all);
}

/* --- doing -------------------------------------------------------------------------------- */

/* One question at a time: an older one still open counts as declined. */
let answer = () => {};

function sure(question, yes) {
  answer(false);
  say($("question"), question);
  say($("yes"), yes);
  const dialog = $("ask");
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    answer = resolve;
  });
}

$("ask").addEventListener("close", () => {
  answer($("ask").returnValue === "yes");
  answer = () => {};
});

function tell(text) {
  $("banner").hidden = !text;
  say($("banner"), text);
}

async function act(method, path, body, headers) {
  try {
    await call(method, path, body, headers);
  } catch (error) {
    return tell(explainedChange(error));
  }
  tell("");
  await look().catch(() => {}); // it is done all the same, and the loop tells what is wrong
}

/* A name of its own for what was confirmed once: whatever repeats the request on its way inflicts nothing
   twice. randomUUID is for pages alone that came by https. */
const once = () => ({ "Idempotency-Key": Array.from(crypto.getRandomValues(new Uint8Array(16)), (x) => x.toString(16).padStart(2, "0")).join("") });

const ask = {
  kill: async (id) => {
    if (await sure(`Kill ${id} with SIGKILL, now? What supervises it may start it again.`, "Kill"))
      await act("POST", "/v1/chaos", { kind: "kill", target: id }, once());
  },
  drain: (id) => act("POST", `${memberPath(id)}/drain`),
  undrain: (id) => act("DELETE", `${memberPath(id)}/drain`),
  forget: (id) => act("DELETE", memberPath(id)),
};

$("verbs").addEventListener("click", async (event) => {
  const verb = event.target.dataset.verb;
  if (!verb) return;
  const run = seen.run;
  if (verb === "stop" && !(await sure(`Stop ${run.name}? It cannot go on afterwards.`, "Stop"))) return;
  if (sameRun(run, seen.run)) await act("POST", `${runPath(run.name)}/${verb}`);
  else tell(`the run ${run.name} that was asked about is deleted: nothing was done`);
});

$("runs").addEventListener("change", () => {
  wanted = $("runs").value;
  look().catch(() => {}); // the loop tells what is wrong
});

/* --- the loop ----------------------------------------------------------------------------- */

function linked(up, text) {
  $("link").className = `link ${up ? "up" : "down"}`;
  say($("link"), text);
}

function askForToken(why) {
  $("login").hidden = false;
  $("run").hidden = true;
  say($("refused"), why);
  say($("link"), "");
  $("link").className = "link";
  $("token").focus();
}

let timer = 0;

async function loop() {
  clearTimeout(timer);
  if (!hasToken()) return askForToken("");
  try {
    if (!document.hidden) await look();
    linked(!seen.cutOff, seen.cutOff || "connected");
  } catch (error) {
    if (error instanceof Refusal && error.status === 401) {
      dropToken();
      return askForToken("This token is not accepted.");
    }
    // Whatever it is, it may be gone at the next look.
    const meanwhile = error instanceof Unreachable ? "; training goes on without it" : "";
    linked(false, explained(error) + meanwhile);
  }
  timer = setTimeout(loop, EVERY_MS);
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  keepToken($("token").value.trim());
  $("token").value = "";
  seen.access = null;
  loop();
});
document.addEventListener("visibilitychange", () => document.hidden || loop());

takeTokenFromAddress();
offerPlans();
offerSamples();
loop();
