"""The checkers of one run, and what they report."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from diloco_shared.protocol.messages import Blob, PublicationManifest, TapeRecord, TapeRound
from diloco_shared.spec.run import RunSpec
from diloco_simulator.checkers.claims import Claims
from diloco_simulator.checkers.cuts import Parts
from diloco_simulator.checkers.data import DataRead, UnknownData
from diloco_simulator.checkers.limits import SILENT_S, LearnerLimits, StepPace
from diloco_simulator.checkers.promises import Anchors, KnownRefusals, Merges, Report
from diloco_simulator.checkers.rates import Rates
from diloco_simulator.checkers.stops import Stops
from diloco_simulator.checkers.watch_shard import OfShard
from diloco_simulator.coverage.reached import of_record
from diloco_simulator.worlds.computing import size_of
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.tiny import Values
from diloco_syncer.history.history import identity


class WatchedScene(Protocol):
    """What checkers ask of a world."""

    options: Options
    counts: Counter[str]
    faulty: bool

    @property
    def now(self) -> float: ...


@dataclass(frozen=True, slots=True)
class End:
    """How a learner left its run."""

    outcome: str
    adopted: tuple[int, ...]
    at: float
    dismissed: bool = False  # since the run was over for everybody else
    evaluates: bool = False  # the last evaluation was begun, and not over


class RunWatch:
    """All observations of one run."""

    def __init__(self, scene: WatchedScene, spec: RunSpec, *, numbers: bool = True) -> None:
        """`numbers`: compute every merge again, which keeps all that was ever uploaded; and look at
        which data are read."""
        self.scene = scene
        self.violations: list[str] = []
        self.report = report = Report(self.broken)
        self.anchors = Anchors(report)
        self.refusals = KnownRefusals(report)
        self.claims = Claims(report, self._merges_of)
        self.parts = Parts(report)
        self.pace = StepPace(report, spec, self.anchors)
        self.rates = Rates(report, spec)
        self.limits = LearnerLimits(report, spec)
        self.stops = Stops(report, spec.algorithm.shards)
        size = partial(size_of, spec.data.virtual_shards)
        data = DataRead if numbers else UnknownData  # experiments have other data
        self.data = data(report, spec, size, self.reached)
        self.spec = spec
        self.healed_at = math.inf
        self.ends: dict[str, End] = {}  # of each learner's newest life that left
        # Learners that were to leave, and not for the run's end; whether they may stay after all.
        # The life that was to leave may hear of both much later, and then it leaves.
        self.taken_back: dict[str, bool] = {}
        self.of = [
            OfShard(
                report,
                spec,
                shard,
                learners=scene.options.learners_ever,
                claims=self.claims,
                parts=self.parts,
                data=self.data.merged[shard],
                numbers=numbers,
            )
            for shard in range(spec.algorithm.shards)
        ]

    def broken(self, invariant: str, text: str) -> None:
        self.violations.append(f"{invariant} at {self.scene.now:.2f} s: {text}")

    def reached(self, *words: str) -> None:
        """A state that is worth counting."""
        self.scene.counts[" ".join(words)] += 1

    def _merges_of(self, fragment: int) -> Merges:
        return self.of[fragment % len(self.of)].merges

    @property
    def ended(self) -> str:
        """What became of the run, once every shard has said so."""
        outcomes = {shard.ended for shard in self.of}
        if "" in outcomes:
            return ""
        return "stopped" if "stopped" in outcomes else "finished"

    @property
    def rounds(self) -> int:
        return sum(shard.rounds for shard in self.of)

    def healed(self) -> None:
        """From now on nothing goes wrong."""
        self.healed_at = self.data.healed_at = self.scene.now
        for shard in self.of:
            shard.alive.record(self.scene.now)
            shard.alive.limit_s = SILENT_S * self.scene.options.step_s

    def forgives(self) -> None:
        """Somebody's clock stood still: by it, whoever was silent meanwhile was not."""
        for shard in self.of:
            shard.members.forgiven_at = self.scene.now

    def stored(self, blob: Blob, payload: bytes) -> None:
        """UP takes a contribution, or initial parameters."""
        for shard in self.of:
            if shard.numbers is not None:
                shard.numbers.stored(blob, payload)

    def record(self, shard: int, seq: int, record: TapeRecord) -> None:
        """Every record as its tape takes it, at a sequence of the stream that all shards share."""
        of = self.of[shard]
        of.seqs.append(seq)
        of.tails.append(identity(record))
        of_record(self, of, record)
        self.stops.record(shard, record, self.scene.now)
        of.record(record, self.scene.now, faulty=self.scene.faulty)
        if len({other.merges.epoch for other in self.of}) > 1:
            self.reached("shards in two epochs")
        if isinstance(record, TapeRound):
            self.scene.counts["refused"] += sum(v.outcome == "refused" for v in record.verdicts)
            self.refusals.round(record)

    def lost(self, shard: int, kept: Sequence[TapeRecord], gone: Sequence[TapeRecord]) -> None:
        """A tape lost its last records: they never were."""
        self.of[shard].lost(kept, gone)
        self.anchors.lost()
        # Learners kept parts of a mark that any shard had.
        mark = max(of.merges.lost.mark for of in self.of)
        for of in self.of:
            of.merges.lost.mark = mark

    def exact(self, fragment: int, digest: str) -> Values | None:
        """An anchor that was published, by its digest; None where nobody kept its values."""
        numbers = self.of[fragment % len(self.of)].numbers
        return None if numbers is None else numbers.exact.get(digest)

    def published(self, leader: str, m: PublicationManifest, payload: bytes) -> None:
        """A leader has published that payload of encoded values."""
        self.anchors.published(m.epoch, m.fragment, m.version, m.anchor_digest, leader)
        numbers = self.of[m.fragment % len(self.of)].numbers
        if numbers is not None:
            numbers.published(m, payload)
