"""What is full, how soon it is named, whether training goes on, and how soon all is as before.

    python bench/full_disks.py [--repeats 3] [--json FILE]      # as root: it mounts small disks

`diloco up` with two learners and two syncers, whose data folders, and the message server's, are
small file systems in memory. In turn each of these is filled, in mid-run, and emptied after a
while: the stream of publications, the hub's disk, the disk of the leading syncer, of the standby,
of a learner. Seconds, the longest of the repeats:

named_s: from full to the run's reason and, of a member, its record saying so, over the REST API.
again_s: from room to the next committed round and, of a member, the next snapshot or checkpoint
written and the reason gone. Meanwhile: rounds committed, and inner steps of the learners.

Exit status 1 if the ledger does not balance in the end, or the tape has a fault.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent))

from runs import keep, surroundings
from storms.disks import MIB, fill, small_disk
from storms.stack import Stack, until

from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import StreamFull
from diloco_shared.protocol import subjects

RUN = "full"
LEARNERS, SYNCERS = 2, 2
# Of a member: some times what it keeps of the nano model. Of the hub: its streams, many times.
MEMBER_DISK, HUB_DISK = 64 * MIB, 512 * MIB
# With less than this, none of the model's contributions is stored.
ROOM_BYTES = 64 << 10
# For so many seconds a place stays full once it is named: several intervals of what is kept.
FULL_S = 12.0
# Between two looks, in seconds: what the figures may be off by.
LOOK_S = 0.05
PLACES = ("stream", "hub", "leader", "standby", "learner")
SPEC: dict[str, Any] = {
    "name": RUN,
    "algorithm": {"fragments": 6, "quorum": 1, "overlap_steps": 8},
    "membership": {"learners_min": LEARNERS, "syncers": SYNCERS},
    "evaluation": {"every_steps": 100_000, "sequences": 8},
    "keeping": {"snapshot_every_rounds": 12, "checkpoint_every_steps": 40},
    "budget": {"steps": 1_000_000},
}


@dataclass
class Filled:
    """One place that was full once; seconds."""

    place: str
    named_s: float
    again_s: float
    rounds: int  # committed while it was full
    steps: int  # that learners took meanwhile
    reason: str


class Bench:
    """A cluster with a run on it."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.client = stack.client
        self.learners: list[str] = []  # where they tell of themselves; nobody joins or leaves

    def one(self, place: str) -> Filled:
        """Fill a place, look, and make room again."""
        member = self._member(place)
        make_room = self._fill(place, member)
        full_at, before = time.monotonic(), self._steps()

        def named() -> str:
            nonlocal full_at
            if place == "hub" and self._topped_up():
                full_at = time.monotonic()
            return self._named(place, member)

        reason = self._soon(f"{place} is named", named)
        named_s, rounds = time.monotonic() - full_at, self.committed()
        kept = self._kept(member)
        time.sleep(FULL_S)
        rounds, steps = self.committed() - rounds, self._steps() - before
        make_room()
        room_at, committed = time.monotonic(), self.committed()

        def as_before() -> bool:
            on = self.committed() > committed and not self._named(place, member)
            return on and (not member or bool(self._kept(member) - kept))

        self._soon(f"{place} is as before", as_before)
        again_s = time.monotonic() - room_at
        return Filled(place, named_s, again_s, rounds, steps, self._without_paths(reason))

    def _soon(self, what: str, condition: Callable[[], Any]) -> Any:
        return until(what, condition, look_s=LOOK_S)

    def _without_paths(self, reason: str) -> str:
        return reason.replace(str(self.stack.folder), "DATA")

    # --- filling -------------------------------------------------------------------------------

    def _member(self, place: str) -> str:
        """Whose disk it is; "" of the hub."""
        duty = {"leader": "leading", "standby": "standby"}.get(place)
        if duty:
            found: str = until(f"a {place}", lambda: self._on_duty(duty))
            return found
        return "learner-1" if place == "learner" else ""

    def _on_duty(self, duty: str) -> str:
        syncers = self.client.run(RUN)["syncers"]
        return next((s["id"] for s in syncers if s["state"] == duty), "")

    def _fill(self, place: str, member: str) -> Callable[[], object]:
        """Fill it; what makes room again."""
        if place == "stream":
            asyncio.run(self._on_bus(_fill_stream))
            return lambda: asyncio.run(self._on_bus(_empty_stream))
        return fill(self.stack.folder / (member or "nats")).unlink

    def _topped_up(self) -> bool:
        """Whether the message server had made room, by removing what is not needed any more."""
        folder = self.stack.folder / "nats"
        before = (folder / "filler").stat().st_size
        return fill(folder).stat().st_size - before > ROOM_BYTES

    async def _on_bus(self, work: Callable[[NatsBus], Any]) -> None:
        bus = await self.stack.bus()
        try:
            await work(bus)
        finally:
            await bus.close()

    # --- looking -------------------------------------------------------------------------------

    def _named(self, place: str, member: str) -> str:
        """What the API says of it; "" while it says nothing."""
        reason = str(self.client.run(RUN)["reason"])
        if member:
            shown = str(self.client.member(member)["full"])
            return shown if f"the disk of {member} is full" in reason else ""
        wanted = "DN is full" if place == "stream" else "the hub's disk is full"
        return reason if wanted in reason else ""

    def committed(self) -> int:
        return int(self.client.run(RUN)["status"]["rounds_committed"])

    def _steps(self) -> int:
        """Of both learners, as they say themselves: what a leader hears may not be written."""
        if not self.learners:
            members = self.client.members()
            self.learners = [m["address"] for m in members if m["role"] == "learner"]
        return sum(_gauge(address, "diloco_step") for address in self.learners)

    def _kept(self, member: str) -> set[Path]:
        """Complete snapshots or checkpoints of a member."""
        files = (self.stack.folder / member).glob("*/*/*") if member else ()
        return {f for f in files if f.name.startswith("snapshot-") or f.suffix == ".safetensors"}


def _gauge(address: str, name: str) -> int:
    """A process's own figure."""
    lines = httpx.get(f"http://{address}/metrics").text.splitlines()
    return next(int(float(line.split()[1])) for line in lines if line.startswith(f"{name} "))


async def _fill_stream(bus: NatsBus) -> None:
    """Until DN has less room than any publication takes."""
    for size in (512 << 10, 4 << 10):
        try:
            while True:
                await bus.append(f"dn.{RUN}.filler", bytes(size))
        except StreamFull:
            pass


async def _empty_stream(bus: NatsBus) -> None:
    await bus.purge(subjects.dn_stream(RUN), f"dn.{RUN}.filler")


def measured(folder: Path, repeats: int) -> list[Filled]:
    """Every place so often. SystemExit for what never came, or what is lost."""
    with ExitStack() as opened:
        members = [f"learner-{n + 1}" for n in range(LEARNERS)]
        members += [f"syncer-{n + 1}" for n in range(SYNCERS)]
        for member in members:
            opened.enter_context(small_disk(folder / member, MEMBER_DISK))
        opened.enter_context(small_disk(folder / "nats", HUB_DISK))
        stack = opened.enter_context(Stack(folder, learners=LEARNERS, syncers=SYNCERS))
        stack.client.create_run(SPEC)
        bench, found = Bench(stack), []
        until("rounds", lambda: bench.committed() > 24)
        for _ in range(repeats):
            for place in PLACES:
                found.append(bench.one(place))
                print(json.dumps(asdict(found[-1])), flush=True)
        _check(stack)
    return found


def _check(stack: Stack) -> None:
    """Nothing is lost: the ledger balances, and the tape verifies."""
    stack.client.stop(RUN)
    until("the end", lambda: stack.client.run(RUN)["state"] == "stopped")
    status = stack.client.run(RUN)["status"]
    for of_fragment in status["tokens_by_fragment"]:
        if sum(of_fragment.values()) != status["tokens_processed"]:
            raise SystemExit(f"the ledger does not balance: {of_fragment}")
    if faults := stack.diloco("tape", "verify", RUN)["faults"]:
        raise SystemExit(f"the tape is not whole: {faults}")


def worst(found: list[Filled]) -> dict[str, dict[str, float]]:
    """By place: the longest seconds, and the fewest rounds and steps."""
    rows: dict[str, dict[str, float]] = {}
    for place in PLACES:
        of_it = [f for f in found if f.place == place]
        rows[place] = {
            "named_s": max(f.named_s for f in of_it),
            "again_s": max(f.again_s for f in of_it),
            "rounds_meanwhile": min(f.rounds for f in of_it),
            "steps_meanwhile": min(f.steps for f in of_it),
        }
    return rows


def main() -> None:
    """Print a table; write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = measured(Path(folder), args.repeats)
        except PermissionError as error:
            raise SystemExit(str(error)) from None
    rows = worst(found)
    print(f"{'':10}{'named_s':>10}{'again_s':>10}{'rounds':>10}{'steps':>10}")
    for place, row in rows.items():
        print(f"{place:10}" + "".join(f"{value:10.4g}" for value in row.values()))
    if args.json:
        body = {"figures": rows, "repeats": [asdict(f) for f in found], **surroundings(__file__)}
        keep(args.json, body, indent=1)


if __name__ == "__main__":
    main()
