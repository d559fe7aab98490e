/* A sample of what the run's model writes: of its newest export, piece by piece. */

import { call, get, runPath, stream } from "./api.js";
import { $, ago, make, percent, say } from "./dom.js";

/* A number of its own for every sample, so that no two of a prompt are the same. */
const SEEDS = 2 ** 32;

let run = ""; // whose exports were looked at; "" for none
let stop = null; // ends the sample that is being written

function told(exports) {
  const complete = exports.filter((x) => x.state === "complete").at(-1);
  const making = exports.find((x) => x.state === "running");
  const last = exports.at(-1);
  const share = making?.progress?.bytes_total ? `, ${percent(making.progress.bytes_done / making.progress.bytes_total)}` : "";
  const going = making ? ` An export is being made${share}.` : "";
  const failed = last?.state === "failed" ? ` The last export failed: ${last.reason}` : "";
  $("sample-go").disabled = !complete || stop !== null;
  $("sample-export").disabled = Boolean(making);
  const which = complete ? `Of the export at step ${complete.steps}, made ${ago(complete.ended_at)} ago.` : "There is no export yet: export the newest weights first.";
  return which + going + failed;
}

function forget() {
  stop?.abort();
  say($("unsampled"), "");
  $("written").replaceChildren();
}

/* Once a second for a run that may be sampled, while the form is open; "" hides it. */
export async function lookForExports(name) {
  if (name !== run) forget();
  run = name;
  $("sample").hidden = !run;
  if (run && $("sample").open) say($("sampled"), told((await get(`${runPath(run)}/exports`)).exports));
}

const number = (name) => {
  const text = $(name).value.trim();
  // What is no number goes as it is: the server says what is wrong with it.
  return text === "" || Number.isNaN(Number(text)) ? text : Number(text);
};

async function write(of) {
  const prompt = $("sample-prompt").value, chat = $("sample-chat").value === "chat";
  const wish = { prompt, chat, temperature: number("sample-temperature"), tokens: number("sample-tokens"), seed: Math.floor(Math.random() * SEEDS) };
  const text = make("span");
  await stream(`${runPath(of)}/samples`, wish, (event) => {
    if (event.begun) $("written").replaceChildren(make("span", { className: "soft" }, chat ? "" : prompt), text);
    if (event.text) say(text, text.textContent + event.text);
    if (event.failed) say($("unsampled"), event.failed);
  }, stop.signal);
}

export function offerSamples() {
  $("sampling").addEventListener("submit", async (event) => {
    event.preventDefault();
    if (stop !== null) return;
    forget();
    const mine = (stop = new AbortController());
    $("sample-go").disabled = true;
    say($("sample-go"), "Writing …");
    try {
      await write(run);
    } catch (error) {
      if (!mine.signal.aborted) say($("unsampled"), String(error.message));
    } finally {
      stop = null;
      $("sample-go").disabled = false;
      say($("sample-go"), "Sample");
    }
  });
  $("sample-export").addEventListener("click", async () => {
    say($("unsampled"), "");
    try {
      await call("POST", `${runPath(run)}/exports`, {});
      $("sample-export").disabled = true;
    } catch (error) {
      say($("unsampled"), String(error.message));
    }
  });
}
