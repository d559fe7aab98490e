"""What a syncer remembers of learners that come and go: ten thousand ids in an hour.

    python bench/churn.py [--ids 10000] [--hours 1] [--json FILE]

A leader's machine with its tape, roster and ledger, driven event by event on a virtual clock; what
it sends is encoded as it would travel. At any time some learners train; every few moments one
joins, steps, is merged and goes: every other one says so, the rest fall silent. Nobody comes back.

Shown at ten moments, each the most since the one before: bytes of the largest beat, publication
manifest, tape record and status, of the history in a snapshot, and of the process. The fleet is
complete, and the first of the silent ones are forgotten, after GONE_S seconds; from then on nothing
may grow, whatever the number of ids. The ledger's balance is checked at every moment.
"""

import argparse
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runs import keep, surroundings
from scaling.learners import DIGEST, VALUES, Voice

from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import (
    Blob,
    Message,
    PublicationManifest,
    Pull,
    TensorSpec,
)
from diloco_shared.protocol.wire import encode
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import RunSpec
from diloco_syncer.events import (
    Append,
    Appended,
    ContributionSeen,
    Effect,
    Event,
    InitSeen,
    JoinSeen,
    Led,
    ProgressSeen,
    Publish,
    Published,
    SendBeat,
    SendPull,
    Snapshot,
    SnapshotDone,
    Stage,
    Staged,
    TimePassed,
)
from diloco_syncer.history.history import History
from diloco_syncer.machine import Machine
from diloco_syncer.members.roster import GONE_S
from diloco_syncer.status.status import status

RUN = "churn"
FRAGMENTS = 4
TENSORS = tuple(
    TensorSpec(name=f"t{n}", shape=(VALUES,), embedding=False) for n in range(FRAGMENTS)
)
STEP_S = 1.0
MOMENTS = 10
# An id as long as ids may be: bytes are what is counted.
NAME = "learner-of-a-rather-long-name-{:08d}"


def specification() -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": RUN,
            "algorithm": {"fragments": FRAGMENTS, "sync_every_steps": 4 * FRAGMENTS, "quorum": 1},
            "model": {"factory": "churn:tensors"},
            "membership": {"learners_min": 1, "lease_s": 5.0},
            "budget": {"steps": 1_000_000_000},
        }
    )


@dataclass(slots=True)
class Life:
    """A learner: trains until it goes."""

    name: str
    steps: int = 0
    adopted_at: list[int] = field(default_factory=lambda: [0] * FRAGMENTS)
    versions: list[int] = field(default_factory=lambda: [-1] * FRAGMENTS)


class Churn:
    """One leader and its fleet; `second` lets a second pass."""

    def __init__(self, seconds_per_id: float, lives_s: float) -> None:
        self.spec = specification()
        self.machine = Machine(self.spec, History(self.spec))
        self.seconds_per_id, self.lives_s = seconds_per_id, lives_s
        self.now, self.seq, self.ids = 0.0, 0, 0
        self.fleet: list[Life] = []
        self.most: dict[str, int] = {}
        self.voice = Voice(self.spec, Layout.build(TENSORS, FRAGMENTS).digest())
        self._give(Led("s", 1000.0, (-1,) * FRAGMENTS))
        self._join()
        keys = tuple(subjects.initial(RUN, self.fleet[0].name, 0, p) for p in range(FRAGMENTS))
        self._give(
            InitSeen(
                self.fleet[0].name,
                0,
                self.voice.hash,
                TENSORS,
                keys,
                (DIGEST,) * FRAGMENTS,
                (VALUES,) * FRAGMENTS,
                finite=True,
            )
        )

    # --- the leader ----------------------------------------------------------------------------

    def _give(self, event: Event) -> None:
        for effect in self.machine.handle(event, self.now):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Append():
                self.seq += 1
                self._size("record", effect.record)
                self._give(Appended(self.seq, 1000.0 + self.now))
            case Stage():
                self._give(Staged(effect.epoch, effect.round, DIGEST, DIGEST, DIGEST))
            case Publish():
                self._size("publication", self._manifest(effect))
                for life in self.fleet:
                    life.versions[effect.fragment] = effect.version
                    life.adopted_at[effect.fragment] = life.steps
                self._give(Published.of(effect))
            case Snapshot():
                self._give(SnapshotDone(effect.covers, effect.round, "here"))
            case SendBeat():
                self._size("beat", effect.beat)
            case SendPull():
                for life in list(self.fleet):
                    if life.name in effect.pull.participants and life.steps:
                        self._answer(effect.pull, life)

    def _size(self, what: str, message: Message) -> None:
        self.most[what] = max(self.most.get(what, 0), len(encode(message)))

    def _manifest(self, e: Publish) -> PublicationManifest:
        subject = subjects.publication(RUN, e.epoch, e.fragment, e.version, e.term)
        return PublicationManifest(
            run=RUN,
            epoch=e.epoch,
            term=e.term,
            round=e.round,
            fragment=e.fragment,
            version=e.version,
            prev_version=e.prev_version,
            codec="fp32",
            values=VALUES,
            anchor_digest=DIGEST,
            config_hash=self.voice.hash,
            participants=e.participants,
            last_merged=e.last_merged,
            stamp=e.stamp,
            blob=Blob(subject=subject, bytes=4000, chunk_bytes=4000, chunks=1, digest=DIGEST),
        )

    # --- learners ------------------------------------------------------------------------------

    def _join(self) -> None:
        life = Life(NAME.format(self.ids))
        life.versions = list(self.machine.history.versions)
        self.ids += 1
        self._give(JoinSeen(self.voice.join(life.name)))
        self.fleet.append(life)

    def _report(self, life: Life, state: str = "stepping") -> None:
        at = (life.steps, life.versions, life.adopted_at)
        epoch = self.machine.history.epoch
        self._give(ProgressSeen(self.voice.progress(life.name, epoch, *at, state=state)))

    def _answer(self, pull: Pull, life: Life) -> None:
        p, at = pull.fragment, life.adopted_at[pull.fragment]
        if life.steps > at:
            manifest = self.voice.contribution(pull, life.name, life.versions[p], at, life.steps)
            self._give(ContributionSeen(manifest, finite=True, norm=1.0))

    def second(self) -> None:
        """Learners step and report; some come, some go."""
        self.now += STEP_S
        for life in self.fleet:
            life.steps += 1
        for life in list(self.fleet):
            self._report(life)
        while self.ids * self.seconds_per_id <= self.now:
            self._join()
        while len(self.fleet) * self.seconds_per_id > self.lives_s:
            gone = self.fleet.pop(0)
            if int(gone.name[-8:]) % 2:
                self._report(gone, "finished")
        deadline = self.machine.deadline
        if deadline is not None and deadline <= self.now:
            self._give(TimePassed())

    # --- looking -------------------------------------------------------------------------------

    def look(self) -> dict[str, Any]:
        """The most since the last look, and what there is now. Ends if the ledger is wrong."""
        machine, history = self.machine, self.machine.history
        shown = status(machine, self.now, 1000.0 + self.now, bytes_up=0, bytes_down=0)
        self._size("status", shown)
        most, self.most = self.most, {}
        for of_fragment in history.ledger.tokens_P():
            if sum(of_fragment.model_dump().values()) != history.ledger.processed:
                raise SystemExit(f"the ledger does not balance: {of_fragment}")
        norms = dict.fromkeys(history.norms.to_lists())
        return {
            "hours": self.now / 3600,
            "ids": self.ids,
            "alive": len(machine.roster.live(self.now)),
            "members": len(machine.roster.members),
            "lives": len(history.ledger.lives),
            **{f"{name}_bytes": size for name, size in sorted(most.items())},
            # Without the last norms of each fragment, which are as many as ever fit their window.
            "snapshot_bytes": len(json.dumps({**history.meta(), **norms})),
            "counts": len(machine.roster.counts.heard),
            "merged": history.merged_total,
            "resident_bytes": resident(),
        }


def resident() -> int:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def churn(ids: int, seconds: float, lives_s: float, moments: int = MOMENTS) -> list[dict[str, Any]]:
    """What is remembered at each of so many moments."""
    world, found = Churn(seconds / ids, lives_s), []
    for n in range(1, moments + 1):
        while world.now < seconds * n / moments:
            world.second()
        found.append(world.look())
    return found


def growth(moments: list[dict[str, Any]], since_s: float) -> dict[str, float]:
    """Of each figure, the newest over the first taken after `since_s` seconds."""
    settled = [m for m in moments if m["hours"] * 3600 >= since_s]
    first, last = settled[0], settled[-1]
    names = [n for n in last if n.endswith("_bytes") or n in ("members", "lives", "counts")]
    return {name: last[name] / max(first[name], 1) for name in names}


COLUMNS = {
    "ids": 1,
    "alive": 1,
    "members": 1,
    "lives": 1,
    "beat_bytes": 1e3,
    "publication_bytes": 1e3,
    "record_bytes": 1e3,
    "status_bytes": 1e3,
    "snapshot_bytes": 1e3,
    "resident_bytes": 1e6,
}


def main() -> None:
    """Print a table; write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--ids", type=int, default=10_000)
    parser.add_argument("--hours", type=float, default=1.0, help="of virtual time")
    parser.add_argument("--lives-s", type=float, default=30.0, help="that a learner trains for")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    moments = churn(args.ids, args.hours * 3600, args.lives_s)
    names = {
        n: n.removesuffix("_bytes") + {1e3: " kB", 1e6: " MB"}.get(d, "")
        for n, d in COLUMNS.items()
    }
    print("".join(f"{name:>15}" for name in names.values()))
    for m in moments:
        print("".join(f"{m[name] / by:15,.0f}" for name, by in COLUMNS.items()))
    grown = growth(moments, 1.5 * GONE_S)
    print(
        "grown since a quarter of an hour: " + ", ".join(f"{n} {g:.2f}" for n, g in grown.items())
    )
    if args.json:
        body = {"moments": moments, "growth": grown, "seed": 0, **surroundings(__file__)}
        keep(args.json, body, indent=1)


if __name__ == "__main__":
    main()
