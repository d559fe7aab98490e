"""Somebody who takes weights out of a world's run: asks, looks, removes; and keeps account.

An export that was accepted ends, as ready or as failed with a reason, within a stated time. A ready
one stays as it is until somebody removes it or a limit does, whatever becomes of the coordinator,
and is whole. What a deleted run had is gone. The dice are their own.
"""

import asyncio
import hashlib
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from diloco_coordinator.exports.exports import CUT_OFF, CUT_OFF_MAX
from diloco_shared.spec.run import RunSpec
from diloco_simulator.checkers.exports import beside, not_whole
from diloco_simulator.people.rest import NoAnswer
from diloco_simulator.people.sampling import Sampling
from diloco_simulator.people.user import OVER
from diloco_simulator.worlds.exporting import VirtualExporter
from diloco_simulator.worlds.processes import CoordinatorApp
from diloco_simulator.worlds.watched_run import WatchedRun

if TYPE_CHECKING:
    from diloco_simulator.worlds.world import World

# How often a run exports by itself; after how many rounds, and how many of those are kept.
BY_ITSELF, EVERY, KEPT = 0.5, (2, 3, 5), (1, 2)
# What the coordinator keeps of all runs.
KEPT_MAX = (2, 3, 8)
# How often somebody asks again at once, removes one, and asks just before the run is deleted.
TWICE, REMOVES, LATE = 0.3, 0.4, 0.4
# How often the coordinator dies once more when all is well: what is ready must still be there.
DIES_AGAIN, AWAY_S = 0.4, 1.0
# Between two looks, in virtual seconds.
LOOK_S, OFTEN_S = 8.0, 1.0
# Within this time an export that was accepted has ended once all is well, in virtual seconds: a
# program that hears nothing gives up after five minutes.
ENDS_S = 330.0
# Within this time nothing is left of a deleted run's exports, and of what is half, in virtual
# seconds: the coordinator looks every second, and a process of it may just begin.
LEFT_S = 30.0
View = dict[str, Any]


def by_itself(spec: RunSpec, seed: int) -> RunSpec:
    """Perhaps with exports that it makes by itself."""
    dice = Random(f"exports by itself {seed}")
    if dice.random() >= BY_ITSELF:
        return spec
    own = {"export_every_rounds": dice.choice(EVERY), "exports": dice.choice(KEPT)}
    return spec.model_copy(update={"keeping": spec.keeping.model_copy(update=own)})


class Exporting:
    """Of one world, whose coordinators make exports by `exporter`."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.rng = Random(f"exports of somebody {world.seed}")
        self.counts = world.found.counts
        self.exporter = VirtualExporter(world)
        self.sampling = Sampling(world)
        self.kept_max = Random(f"exports kept {world.seed}").choice(KEPT_MAX)
        self.seen: dict[str, View] = {}  # by id, as shown last
        self.since: dict[str, float] = {}  # when each was first seen
        self.removed: set[str] = set()  # somebody asked for it
        self.gone_for_good: set[str] = set()  # and was told that it is so
        self.wiped = 0  # disks of the coordinator that are empty since

    @property
    def path(self) -> str:
        return f"/runs/{self.world.spec.name}/exports"

    # --- before the world is healed --------------------------------------------------------------

    def plan(self) -> None:
        """Draw who comes when."""
        safety_s, rng = self.world.options.safety_s, self.rng
        for _ in range(rng.choice([1, 2, 2, 3])):
            self.world.loop.call_later(rng.uniform(2.0, safety_s), self._come, True)
        if rng.random() < REMOVES:
            self.world.loop.call_later(rng.uniform(8.0, safety_s), self._come, False)
        self.world.visitors.begin(self._look_again_and_again())
        self.sampling.plan()

    def _come(self, asks: bool) -> None:
        if self.world.scene.faulty:
            self.world.visitors.begin(self.asks() if asks else self.removes())

    async def _look_again_and_again(self) -> None:
        while self.world.scene.faulty:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def asks(self) -> None:
        """For what is newest, a version, another type, or a checkpoint."""
        body: View = {}
        match self.rng.choice(["newest", "newest", "half", "version", "checkpoint"]):
            case "half":
                body = {"dtype": "bf16"}
            case "version":
                body = {"version": self.rng.randint(0, 4)}
            case "checkpoint":
                body = {"checkpoint": str(self.rng.randint(1, 2))}
        await self._ask(body)
        if self.rng.random() < TWICE:
            await self._ask(body)

    async def _ask(self, body: View) -> str:
        """The id of what was accepted, or nothing."""
        status, said = await self.world.visitors.ask("POST", self.path, body, may=(202, 404, 409))
        self.counts[f"exports answered with {status}"] += 1
        if status != 202:
            return ""
        if said["id"] not in self.seen:  # else it shows what was, and came behind a look
            self._note(said)
        return str(said["id"])

    async def removes(self) -> None:
        """One, finished or not."""
        if not self.seen:
            return
        chosen = self.rng.choice(sorted(self.seen))
        self.removed.add(chosen)
        self.counts[f"exports removed while {self.seen[chosen]['state']}"] += 1
        path = f"{self.path}/{chosen}"
        status, _ = await self.world.visitors.ask("DELETE", path, may=(204, 404))
        if status == 204:
            self.gone_for_good.add(chosen)

    # --- account ---------------------------------------------------------------------------------

    async def look(self) -> list[View] | None:
        """All that are shown, compared with what was; None where nobody answers."""
        there = set(self.seen)
        status, said = await self.world.visitors.ask("GET", self.path, may=(200, 404))
        if status != 200:
            return None
        shown: list[View] = said["exports"]
        self._empty_disk()
        for view in shown:
            self._note(view)
        for lost in sorted(there & self.seen.keys() - {view["id"] for view in shown}):
            self._missed(self.seen.pop(lost))
        self._limits(shown)
        return shown

    def _empty_disk(self) -> None:
        """What was on a disk that is lost is nobody's fault."""
        if self.wiped != self.world.coordinator.wiped:
            self.wiped = self.world.coordinator.wiped
            self.seen.clear()

    def _note(self, view: View) -> None:
        before, name = self.seen.get(view["id"]), view["id"]
        self.seen[name] = view
        self.since.setdefault(name, self.world.loop.now)
        if before is not None and before["state"] != "running":
            self.looked()
            if before != view and not self._unwritten(before, view):
                self.broken(f"export {name} was {before['state']}, and changed to {view}")
            return
        if name in self.gone_for_good and not self._brought_back():
            self.broken(f"export {name} was removed, and is there again")
        if view["state"] == "complete":
            self.counts["exports ready"] += 1
            if view["automatic"]:
                self.counts["exports made by themselves"] += 1
        elif view["state"] == "failed":
            self.counts["exports failed"] += 1
            if view["reason"] == CUT_OFF:
                self.counts["exports cut off by the coordinator's end"] += 1
            if not view["reason"]:
                self.broken(f"export {name} failed without a reason")
        else:
            self._overdue(view)

    def _brought_back(self) -> bool:
        """Whether a power cut may have: of a file system that settles no names."""
        options = self.world.options
        return options.no_names and options.power_losses > 0

    def _unwritten(self, before: View, view: View) -> bool:
        """Whether a process died before its disk took that the export had failed."""
        dead = [app for app in self.world.coordinator.apps if isinstance(app, CoordinatorApp)]
        unknown = any(view["id"] in app.coordinator.exports.unwritten for app in dead)
        return unknown and (before["state"], view["reason"]) == ("failed", CUT_OFF)

    def _overdue(self, view: View) -> None:
        since = max(self.since[view["id"]], self.world.healed_at)
        if self.world.loop.now - since > ENDS_S:
            self.broken(f"export {view['id']} does not end: {view['progress']}")

    def _missed(self, view: View) -> None:
        """It was there, and is not any more."""
        name, made = view["id"], self.exporter.made
        others = [r for r in made if r.id != name]
        alike = [r for r in others if r.automatic and r.run_id == view["run_id"]]
        most = self.world.spec.keeping.exports
        pushed_out = len(others) >= self.kept_max or (view["automatic"] and len(alike) >= most)
        if name not in self.removed and not pushed_out:
            self.broken(f"export {name} was {view['state']}, and is gone")

    def _limits(self, shown: list[View]) -> None:
        ready = [view for view in shown if view["state"] == "complete"]
        own = [view for view in ready if view["automatic"]]
        most = self.world.spec.keeping.exports
        if len(ready) > self.kept_max or len(own) > most:
            self.broken(
                f"{len(ready)} exports are kept of {self.kept_max}, {len(own)} of them made by "
                f"themselves of {most}"
            )

    def looked(self) -> None:
        """At one of them, with something to compare it with."""
        self.world.found.looks["exports"] += 1

    def broken(self, text: str) -> None:
        self.world.broken("exports", text)

    # --- once all is well ------------------------------------------------------------------------

    async def settled(self, run: WatchedRun) -> None:
        """The run is over: what was begun ends in time, and all that is ready is whole."""
        asked = await self._ask({})
        shown = await self._ended(run)
        if asked and (view := self.seen.get(asked)) is not None and view["state"] == "failed":
            self.counts["exports failed though all is well"] += 1
        if self.rng.random() < DIES_AGAIN:
            self.world.crash(self.world.coordinator, AWAY_S)
            shown = await self._ended(run)
        _, said = await self.world.visitors.until("GET", f"/runs/{run.spec.name}", may=(200,))
        root = self.root / RunSpec.model_validate(said["spec"]).folder
        for view in shown:
            if view["state"] == "complete":
                self.counts["exports looked at"] += 1
                self.looked()
                await self._downloaded(view)
                if wrong := not_whole(root / view["id"], view, run.observer.watch):
                    self.broken(f"export {view['id']}: {wrong}")
        for text in await self._beside(run, root, shown):
            self.broken(f"on the disk {text}")
        await self.sampling.well(exported=any(view["state"] == "complete" for view in shown))
        if self.rng.random() < LATE:
            await self._ask({})  # which is being made when the run is deleted

    async def _beside(self, run: WatchedRun, root: Path, shown: list[View]) -> set[str]:
        """What lies on the disk and should not. One may have been begun since it was asked."""
        found = set(beside(root, {view["id"]: view["state"] for view in shown}))
        if found:
            shown = await self._ended(run)
            found &= set(beside(root, {view["id"]: view["state"] for view in shown}))
        return found

    async def _downloaded(self, view: View) -> None:
        """Whoever takes it home has what is shown, file by file; and nothing else is given away."""
        path = f"{self.path}/{view['id']}/files"
        for name in ["../record.json", *(file["name"] for file in view["files"])]:
            sha256 = next((f["sha256"] for f in view["files"] if f["name"] == name), "")
            try:
                status, body = await self.world.visitors.rest.fetch(f"{path}/{name}")
            except NoAnswer:
                continue
            if status not in (200 if sha256 else 404, 503):
                self.broken(f"{name} of export {view['id']} is answered with {status}")
            elif status == 200 and hashlib.sha256(body).hexdigest() != sha256:
                self.broken(f"{name} of export {view['id']} comes as something else")
            self.counts["files of exports taken home"] += status == 200

    async def _ended(self, run: WatchedRun) -> list[View]:
        """All, once none is being made any more and the last one by itself was. One may follow
        another, and each has its time."""
        until, before = self.world.loop.now + ENDS_S, list[str]()
        while True:
            shown = await self.look()
            if shown is not None:
                running = [view["id"] for view in shown if view["state"] == "running"]
                lacking = await self._lacks_the_last(run, shown)
                if not running and not lacking:
                    return shown
                if running and running != before:
                    until, before = self.world.loop.now + ENDS_S, running
                if self.world.loop.now > until:
                    text = f"running {running}" + (", and none of the end" if lacking else "")
                    self.broken(f"after {ENDS_S:.0f} s exports are not over: {text}")
                    return []
            await asyncio.sleep(OFTEN_S)

    async def _lacks_the_last(self, run: WatchedRun, shown: list[View]) -> bool:
        """Whether the run is to export what it ended with, and has not yet."""
        if self.world.spec.keeping.export_every_rounds is None or self.removed:
            return False
        view = await run.user.view()
        status = (view or {}).get("status")
        if status is None or status["state"] not in OVER or not status["rounds_committed"]:
            return False
        made = [*shown, *(r.model_dump() for r in self.exporter.made if r.run == run.spec.name)]
        cut_off = [view["id"] for view in shown if view["reason"] == CUT_OFF]
        # What was cut off is made again, unless that may be what ends the coordinator.
        none = cut_off if len(cut_off) < CUT_OFF_MAX else []
        newest = [e for e in made if not e["asked"]["checkpoint"] and e["id"] not in none]
        # One that was begun after the last round, a moment before the end, has its parameters.
        return not any(e["final"] or e["rounds"] >= status["rounds_committed"] for e in newest)

    @property
    def root(self) -> Any:
        return self.world.folder / self.world.coordinator.name / "exports"

    async def nothing_left(self) -> None:
        """Soon no file is left of exports, but for those of a run that still is: one that somebody
        asked for without ever hearing an answer may have begun after everybody looked."""
        await self.sampling.nothing_left()
        _, said = await self.world.visitors.until("GET", "/runs", may=(200,))
        there = {run["name"] for run in said["runs"]}
        until = self.world.loop.now + LEFT_S
        while left := [
            path
            for path in self.root.glob("*/*")
            if path.is_dir() and path.parent.name.rpartition(".")[0] not in there
        ]:
            if self.world.loop.now > until:
                self.broken(f"of deleted runs there is still {[path.name for path in left]}")
                return
            await asyncio.sleep(OFTEN_S)
        if self.exporter.begun:
            self.counts["exports gone with their runs"] += 1
