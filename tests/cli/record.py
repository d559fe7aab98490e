"""Records what a coordinator answers, for the golden screens of `test_screens.py`.

    python tests/cli/record.py

Starts a cluster on this machine and trains one small run. It kills a learner and the leading
syncer meanwhile, asks for everything in the middle of the run, has the run stopped, and asks again.
Writes two files into tests/cli/screens: answers.json, of the middle, and ended.json, of the end. It
takes some minutes. Then `UPDATE_SCREENS=1 pytest tests/cli/test_screens.py` writes the screens
anew: look at every one of them.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from diloco_cli.api import connect
from diloco_cli.cluster import Where, endpoint_of
from diloco_cli.demo import spec_of
from diloco_client import ApiError, Client, Unreachable

sys.path.insert(0, str(Path(__file__).parents[1]))
from waiting import wait_until

SCREENS = Path(__file__).parent / "screens"
RUN = "break"
# As long as leaves some of it where it is stopped.
STEPS = 144
# Steps at which what happens to the run. It is looked at after the last: by then at most 30 rounds
# have closed, which is what the live page shows, and its tests see all of them.
KILL_STEP, LEADER_STEP, CHECKPOINT_STEP = 30, 64, 92
# The run takes two minutes on two idle cores, and ten times as long on very busy ones.
PATIENCE_S = 1200.0
# More than the audit log lists of the refused at once: it counts the others in its next row.
REFUSALS = 90
# Of the points of a curve, which are told every second and are on no screen.
HISTORY = 12
# More than a person reads: a sign that the cluster lives much longer than meant.
EVENTS_MAX = 100
# The longest that a token may be good for: on the screens none has come to its end.
FAR_S = 3650 * 86_400.0
# All that is recorded happens on one machine. These stand for others, of examples' networks, and
# are as long as such addresses are.
ADDRESSES = {"anna": "10.0.0.7", "": "2001:db8::17"}


def recorded(client: Client, run: str) -> dict[str, Any]:
    """Answers by method and path."""
    one, events, metrics = client.run(run), client.events(run), client.metrics(run)
    assert len(events) <= EVENTS_MAX
    found: dict[str, Any] = {
        "GET /v1/runs": {"runs": [one], "next": None},
        f"GET /v1/runs/{run}": one,
        f"GET /v1/runs/{run}/rounds": {"rounds": client.rounds(run), "next": None},
        f"GET /v1/runs/{run}/metrics": metrics | {"history": metrics["history"][-HISTORY:]},
        f"GET /v1/runs/{run}/recoveries": {"recoveries": client.recoveries(run)},
        "GET /v1/events": {"events": events, "next": 1 << 40},
        "GET /v1/members": client.all_members(),
        "GET /v1/chaos": {"faults": client.faults()},
        "GET /v1/tokens": {"tokens": _for_years(client.tokens())},
        "GET /v1/access": client.access(),
        "GET /v1/audit": {"rows": _elsewhere(client.audit())},
        f"GET /v1/runs/{run}/checkpoints": {"checkpoints": client.checkpoints(run)},
    }
    for ref in client.checkpoints(run):
        place = f"GET /v1/runs/{run}/checkpoints/{ref['number']}"
        found[place] = client.show_checkpoint(run, ref["number"])
    return found


def _for_years(tokens: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A token that was replaced is good for days at most, and screens are looked at for longer."""
    return [
        {**token, "previous_until": token["previous_until"] and token["expires_at"]}
        for token in tokens
    ]


def _elsewhere(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As if others had worked from other machines; of those without a name the newest row."""
    unnamed = [row["seq"] for row in rows if not row["actor"]][:-1]
    return [
        row | {"address": ADDRESSES.get(row["actor"], row["address"])}
        for row in rows
        if row["seq"] not in unnamed
    ]


class Recording:
    """One run, as its administrator and as anna, who may operate."""

    def __init__(self, admin: Client, anna: Client) -> None:
        self.admin = admin
        self.anna = anna
        self.answers: dict[str, Any] = {}

    def go(self) -> dict[str, Any]:
        """To the end of the run; what it was like then."""
        self.anna.create_run(spec_of(RUN, STEPS))
        with suppress(ApiError):
            self.anna.chaos("kill", "learner-2")
        self._until(lambda: self.step("learner-2") > 0, "the first step")
        self.admin.chaos("kill", "learner-2", at_step=KILL_STEP)
        self._until(lambda: self.step("learner-1") >= LEADER_STEP, "a step to kill the leader at")
        self.admin.chaos("kill", self.admin.run(RUN)["status"]["leader"])
        self._until(lambda: self.step("learner-1") >= CHECKPOINT_STEP, "a step to keep")
        self.anna.checkpoint(RUN)
        self._until(lambda: self.anna.checkpoints(RUN), "a checkpoint")
        self._refused()
        self.answers = recorded(self.admin, RUN)
        self._queued()
        self.anna.stop(RUN)
        self._until(self._has_ended, "the end of the run")
        return recorded(self.admin, RUN)

    def _until(self, holds: Callable[[], object], what: str) -> None:
        wait_until(holds, what, patience_s=PATIENCE_S, every_s=0.2, tolerated=(Unreachable,))

    def step(self, learner: str) -> int:
        """The newest step of a learner; 0 where nobody has told one."""
        status = self.admin.run(RUN)["status"] or {"learners": {}}
        return int(status["learners"].get(learner, {}).get("step", 0))

    def _has_ended(self) -> bool:
        """Its last parameters are evaluated too."""
        over = self.admin.run(RUN)["state"] == "stopped"
        return over and any(e["data"].get("final") for e in self.admin.events(RUN))

    def _refused(self) -> None:
        """As one without a token, very often, and by anna, who asks for what is not there."""
        with Client(self.admin.url, "nobody") as nobody:
            for _ in range(REFUSALS):
                with suppress(ApiError):
                    nobody.run(RUN)
            wait_until(partial(_listed_again, self.admin, nobody), "another row of nobody")
        with suppress(ApiError):
            self.anna.restore(RUN, 3, as_run="again")

    def _queued(self) -> None:
        """A run that finds every learner at work; it must not come next."""
        place = f"POST /v1/runs/{RUN}/checkpoints/1/restore"
        self.answers[place] = self.anna.restore(RUN, 1, as_run="again")
        self.answers["GET /v1/runs/again"] = self.anna.run("again")
        self.anna.stop("again")


def _listed_again(admin: Client, nobody: Client) -> bool:
    with suppress(ApiError):
        nobody.run(RUN)
    return any(row["left_out"] for row in admin.audit())


def diloco(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "diloco_cli", *words], check=True, timeout=PATIENCE_S)


def of_one_run(data: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """In its middle, and at its end."""
    diloco("up", "--detach", "--chaos", "--syncers=2", "--port=0", f"--data={data}")
    try:
        with connect(Where(data=data)) as admin:
            far = {"expires_in_s": FAR_S}
            everything, some = ["read", "operate", "fault"], ["learner-1", "paris-*"]
            admin.make_token("anna", ["read", "operate"], **far)
            admin.make_token("paris", everything, sites=some, **far)
            admin.make_token("watcher", ["read"], runs=["break*"], never=True)
            with Client(endpoint_of(data)["url"], admin.rotate_token("anna")) as anna:
                recording = Recording(admin, anna)
                ended = recording.go()
    finally:
        diloco("down", f"--data={data}")
    path = f"GET /v1/runs/{RUN}"
    of_the_end = ("GET /v1/runs", path, f"{path}/rounds", "GET /v1/events")
    return recording.answers, {name: ended[name] for name in of_the_end}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = of_one_run(Path(folder) / "diloco-data")
    for name, answers in zip(("answers", "ended"), found, strict=True):
        text = json.dumps(answers, indent=1) + "\n"
        (SCREENS / f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
