/* A sample of what the run's model writes: of its newest export, piece by piece. */

import { Trouble, call, explained, explainedChange, get, runPath, sameRun, stream } from "./api.js";
import { $, ago, make, percent, say } from "./dom.js";

/* A number of its own for every sample, so that no two of a prompt are the same. */
const SEEDS = 2 ** 32;
/* The coordinator ends a sample after three minutes (sampling_io.py) and says so: whoever has heard no
   end by then hears none any more. */
const LONGEST_MS = 200_000;
/* It stops telling whoever asked with a token that is good no longer, and says nothing. */
const UNFINISHED = "the coordinator told no end of it: the token may be revoked or have expired, or the coordinator was stopped";

let run = null; // whose exports were looked at; null for none
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

/* Once a second for a run that may be sampled, while the form is open; null hides it. */
export async function lookForExports(of) {
  if (!sameRun(of, run)) forget();
  run = of;
  $("sample").hidden = !run;
  if (run && $("sample").open) say($("sampled"), told((await get(`${runPath(run.name)}/exports`)).exports));
}

const number = (name) => {
  const text = $(name).value.trim();
  // What is no number goes as it is: the server says what is wrong with it.
  return text === "" || Number.isNaN(Number(text)) ? text : Number(text);
};

/* Until its end was told; anything else is thrown. `givenUp`: an AbortSignal. */
async function write(of, givenUp) {
  const prompt = $("sample-prompt").value, chat = $("sample-chat").value === "chat";
  const wish = { prompt, chat, temperature: number("sample-temperature"), tokens: number("sample-tokens"), seed: Math.floor(Math.random() * SEEDS) };
  const text = make("span");
  const over = await stream(`${runPath(of.name)}/samples`, wish, (event) => {
    if (event.begun) $("written").replaceChildren(make("span", { className: "soft" }, chat ? "" : prompt), text);
    if (event.text) say(text, text.textContent + event.text);
    if (event.failed) say($("unsampled"), event.failed);
    return "done" in event || "failed" in event;
  }, givenUp);
  if (!over) throw new Trouble(UNFINISHED);
}

/* Why no more comes. Without it, what stands there would look complete. */
function why(error) {
  const begun = $("written").firstElementChild !== null;
  return explained(error) + (begun ? ". What is written here is not all of it." : "");
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
      await write(run, AbortSignal.any([mine.signal, AbortSignal.timeout(LONGEST_MS)]));
    } catch (error) {
      if (!mine.signal.aborted) say($("unsampled"), why(error));
    } finally {
      stop = null;
      $("sample-go").disabled = false;
      say($("sample-go"), "Sample");
    }
  });
  $("sample-export").addEventListener("click", async () => {
    say($("unsampled"), "");
    try {
      await call("POST", `${runPath(run.name)}/exports`, {});
      $("sample-export").disabled = true;
    } catch (error) {
      say($("unsampled"), explainedChange(error));
    }
  });
}
