"""What the tape says: the syncer's durable state as a function of its records.

The leader applies a record after the tape has taken it; a restart applies the same records to a
restored snapshot. There is no other way to change this state (ARCHITECTURE.md, A round: the
commit).
"""

import math
from collections import Counter, deque
from typing import Any, Self

from diloco_shared.protocol.checkpoints import parse_reference
from diloco_shared.protocol.messages import (
    LastMerged,
    Restored,
    Stamp,
    TapeCheckpoint,
    TapeEnd,
    TapeEpoch,
    TapeInit,
    TapeRebirth,
    TapeRecord,
    TapeRestore,
    TapeRound,
    TapeSetting,
    TapeSnapshot,
    TapeTerm,
    TensorSpec,
)
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.quorum import Quorum, policy
from diloco_shared.spec.run import RunSpec, config_hash
from diloco_syncer.history.ledger import Ledger, RecentMerges, of_run, without
from diloco_syncer.rounds.norms import Norm, NormHistory

# --------------------------------------------------------------------------------------------------
# How far a run is once a round is closed: by steps, tokens or seconds. What depends on it stands in
# docs/explanation/algorithm.md, The end of a run.


def stamp_after(
    spec: RunSpec, round_: int, at: float, *, tokens: int, started: float, least: float
) -> Stamp:
    """The progress after `round_` at wall time `at`.

    `tokens` are processed by then, the run `started` then, and it was at `least` so far before.
    """
    steps_per_round = spec.algorithm.steps_per_round
    steps, budget = (round_ + 1) * steps_per_round, spec.budget
    if budget.steps is not None:
        rounds = math.ceil(budget.steps / steps_per_round)
        fraction = min((round_ + 1) / rounds, 1.0)
        return Stamp(
            round=round_,
            steps=steps,
            fraction=fraction,
            fraction_per_step=1 / (rounds * steps_per_round),
        )
    if budget.tokens is not None:
        used = tokens / budget.tokens
    else:
        assert budget.seconds is not None
        used = max(at - started, 0.0) / budget.seconds
    fraction = min(max(used, least), 1.0)
    return Stamp(round=round_, steps=steps, fraction=fraction, fraction_per_step=fraction / steps)


# Kind and wall time of a record.
Identity = tuple[str, float]

# So many epochs of before a history knows, the newest ones. Whoever leads reads the status that the
# last leader showed, and shows its own within a second: between these two a few begin at most.
EPOCHS_BEFORE_MAX = 16

NOT_STARTED = Stamp(round=-1, steps=0, fraction=0.0, fraction_per_step=0.0)


class TapeFault(ValueError):
    """The tape holds a record that cannot follow the ones before it."""


def identity(record: TapeRecord) -> Identity:
    """What tells a record from any other that the tape may hold at its place."""
    return record.kind, record.at


def is_of(meta: dict[str, Any], record: TapeRecord) -> bool:
    """Whether a state goes on after this very record, which the tape holds at its place.

    `meta`: of `History.meta`. A tape that lost its last records goes on with others, and a state of
    those that are lost leads nowhere.
    """
    tail = meta.get("tail")  # snapshots of older versions do not say
    return tail is None or tuple(tail) == identity(record)


class History:
    """Durable state of one syncer shard. Mutated only through `apply` and `resume`.

    Lists of P have an entry for every fragment of the run; what another shard owns is never
    initialised here (version -1) and has no size.
    """

    def __init__(self, spec: RunSpec, shard: int = 0) -> None:
        fragments = spec.algorithm.fragments
        self.spec = spec
        self.shard = shard
        self.owned = spec.algorithm.owned(shard)
        self.config_hash = config_hash(spec)
        self.seq = 0  # tape sequence of the newest record
        self.tail: Identity | None = None  # which record that is; None: not known
        self.epoch = 0
        # That the tape had before this one, since the newest restore. A status may be of one.
        self.epochs_before: list[int] = []
        self.term = 0
        self.leader = ""
        self.layout: tuple[TensorSpec, ...] = ()
        self.sizes_P: list[int] = [0] * fragments
        self.versions: list[int] = [-1] * fragments
        # The version that each began with: nothing measured against an older one is merged.
        self.began_P: list[int] = [0] * fragments
        self.anchor_digests: list[str] = [""] * fragments
        self.last_merged: list[dict[str, LastMerged]] = [{} for _ in range(fragments)]
        self.next_round = 0
        self.finishing_from = -1  # first of the last F rounds, -1: not yet
        self.paused = False
        self.stopping = False
        self.quorum = spec.algorithm.quorum  # K; what it means: `enough`
        self.stamp = NOT_STARTED
        # On the clock of whoever leads: every term moves it (`_another_clock`). 0.0: no round yet.
        self.first_round_at = 0.0
        self.committed = 0
        self.skipped = 0
        self.skips_in_a_row = 0
        self.merged_total = 0
        self.refused: Counter[str] = Counter()
        self.ledger = Ledger.empty(fragments, spec.data.virtual_shards, tuple(self.owned))
        a = spec.algorithm
        self.norms = NormHistory(
            samples_min=a.outlier_samples_min, z_max=a.outlier_z_max, keeps=a.alpha > 0
        )
        self.merges = RecentMerges([[] for _ in range(fragments)])
        # Who was merged in the newest H rounds: "participating".
        self.recent: deque[tuple[str, ...]] = deque(maxlen=spec.algorithm.sync_every_steps)
        self.snapshot_covers = 0
        self.snapshot_round = -1
        self.checkpoint = 0  # newest mark
        self.checkpoint_open = False  # nothing is on the tape about its end
        self.checkpoint_outcome, self.checkpoint_reason = "", ""
        self.checkpoint_at, self.checkpoint_steps = 0.0, 0  # of the mark
        self.restores = 0  # serial of the newest wish fulfilled
        self.restored: Restored | None = None
        # Record of a restore, by checkpoint: of those that no snapshot covers yet.
        self.sources: dict[str, int] = {}
        self.outcome, self.ended_in = "", -1  # the epoch of its end

    @property
    def enough(self) -> Quorum:
        """The policy by which learners are enough for a merge."""
        return policy(self.quorum)

    # --- read ----------------------------------------------------------------------------------

    @property
    def fragments(self) -> int:
        return len(self.versions)

    @property
    def initialised(self) -> bool:
        return bool(self.layout)

    @property
    def participating(self) -> tuple[str, ...]:
        """Learners merged within the last H rounds."""
        return tuple(sorted({learner for merged in self.recent for learner in merged}))

    @property
    def finished_rounds(self) -> bool:
        """The last round of every fragment is on the tape."""
        return self.finishing_from >= 0 and (
            self.next_round >= self.finishing_from + len(self.owned)
        )

    @property
    def tokens_useful(self) -> int:
        return of_run(self.ledger.tokens_P(), self.sizes_P).merged

    def stamp_after(self, round_: int, at: float, processed: int | None = None) -> Stamp:
        """The run's progress once `round_` is closed at wall time `at`.

        `processed`: tokens known by then, if more than the tape says.
        """
        tokens = self.ledger.processed if processed is None else processed
        started, least = self.first_round_at or at, self.stamp.fraction
        return stamp_after(self.spec, round_, at, tokens=tokens, started=started, least=least)

    # --- write ---------------------------------------------------------------------------------

    def check(self, record: TapeRecord) -> None:
        """Raise TapeFault when `record` cannot follow what there is. Changes nothing.

        Whoever writes the tape asks before: a record that cannot follow ends all who read it.
        """
        # Another shard may begin an epoch later, and its learners need this one's fragments in it.
        if self.outcome and not isinstance(record, TapeEpoch | TapeRestore):
            raise TapeFault(f"{record.kind} follows the end of the run")
        match record:
            case TapeInit():
                self._check_init(record)
            case TapeTerm():
                if record.term <= self.term:
                    raise TapeFault(f"term {record.term} after {self.term}")
            case TapeRebirth():
                self._check_rebirth(record)
            case TapeEpoch() | TapeRestore():
                if record.epoch <= self.epoch:
                    raise TapeFault(f"{record.kind}: epoch {record.epoch} after {self.epoch}")
            case TapeRound():
                self._check_round(record)
            case TapeCheckpoint():
                if record.outcome == "begun" and record.number <= self.checkpoint:
                    raise TapeFault(f"checkpoint {record.number} after {self.checkpoint}")

    def _check_next(self, record: TapeRecord, seq: int) -> None:
        if seq <= self.seq:
            raise TapeFault(f"record {seq} after {self.seq}")
        self.check(record)

    def apply(self, record: TapeRecord, seq: int) -> None:
        """Advance by one record of sequence `seq`; raises TapeFault when it cannot follow."""
        self._check_next(record, seq)
        match record:
            case TapeInit():
                self._apply_init(record)
            case TapeTerm():
                self._another_clock(record.at)
                self.term, self.leader = record.term, record.leader
                self._begin_epoch(record.epoch)
            case TapeRebirth():
                self._another_clock(record.at)
                self._apply_rebirth(record)
            case TapeEpoch():
                # Who was merged stays: learners that have not heard yet are told by the keyframes.
                self._begin_epoch(record.epoch)
                # A hub that was put back says from where on nobody has seen a term.
                if record.term > self.term:
                    self._another_clock(record.at)  # of whoever put it back, perhaps days later
                self.term = max(self.term, record.term)
            case TapeRound():
                self._apply_round(record)
            case TapeSnapshot():
                self._apply_snapshot(record)
            case TapeCheckpoint():
                self._apply_checkpoint(record)
            case TapeRestore():
                raise TapeFault(f"record {seq} needs the state of {record.source}: see `resume`")
            case TapeSetting():
                self._apply_setting(record)
            case TapeEnd():
                self.outcome, self.ended_in = record.outcome, self.epoch
                self.ledger.end(record)
        self.seq, self.tail = seq, identity(record)

    def _begin_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epochs_before = [*self.epochs_before, self.epoch][-EPOCHS_BEFORE_MAX:]
        self.epoch = epoch

    def _another_clock(self, at: float) -> None:
        """A term begins at `at`, by a clock that may be hours off the one of the term before.

        What was used of the time is what the terms before lasted, from their first record to their
        last one: wall times of two machines are never subtracted from each other. What passes while
        nobody leads is not counted.
        """
        if not self.first_round_at:
            return
        used, budget = 0.0, self.spec.budget
        if self.tail is not None:
            used = max(self.tail[1] - self.first_round_at, 0.0)
        if budget.seconds is not None:
            # Leaders of older versions subtracted them, and what is recorded stands.
            used = max(used, self.stamp.fraction * budget.seconds)
        self.first_round_at = at - used

    def _check_init(self, record: TapeInit) -> None:
        if self.initialised:
            raise TapeFault("a second init record")
        if record.config_hash != self.config_hash:
            raise TapeFault("the tape's configuration is not this run's")
        try:
            Layout.build(record.layout, self.fragments)
        except ValueError as error:
            raise TapeFault(f"an init record whose tensors cannot be cut: {error}") from None

    def _apply_init(self, record: TapeInit) -> None:
        self.layout = record.layout
        sizes = Layout.build(record.layout, self.fragments).sizes
        for p in self.owned:
            self.sizes_P[p], self.versions[p] = sizes[p], 0
            self.anchor_digests[p] = record.anchor_digests[p]

    def _check_rebirth(self, record: TapeRebirth) -> None:
        if not self.initialised or record.term <= self.term or record.epoch <= self.epoch:
            raise TapeFault(f"epoch {record.epoch} of term {record.term} cannot begin again here")

    def _apply_rebirth(self, record: TapeRebirth) -> None:
        self.term, self.leader = record.term, record.leader
        self._begin_epoch(record.epoch)
        for p in self.owned:
            rounds, tokens = self.merges.undo(p, record.versions[p])
            self.ledger.undo(p, tokens)
            self.last_merged[p] = without(rounds, self.last_merged[p])
            self.versions[p] = self.began_P[p] = record.versions[p]
            self.anchor_digests[p] = record.anchor_digests[p]

    def _check_round(self, record: TapeRound) -> None:
        if record.round != self.next_round:
            raise TapeFault(f"round {record.round} where {self.next_round} was due")
        if (record.epoch, record.term) != (self.epoch, self.term):
            raise TapeFault(
                f"round {record.round} of epoch {record.epoch}, term {record.term} in epoch "
                f"{self.epoch}, term {self.term}"
            )
        p = record.fragment
        if not (self.initialised and p in self.owned):
            raise TapeFault(f"a round of fragment {p}, which there is not in shard {self.shard}")
        if record.version != self.versions[p] + (record.outcome == "committed"):
            raise TapeFault(f"version {record.version} of {p} after {self.versions[p]}")

    def _apply_round(self, record: TapeRound) -> None:
        p, committed = record.fragment, record.outcome == "committed"
        merged = [v for v in record.verdicts if v.outcome == "merged"]
        for v in record.verdicts:
            if v.norm > 0 and v.step_to > v.step_from:
                self.norms.record(p, Norm(v.norm, v.step_to - v.step_from))
            if v.outcome == "refused":
                self.refused[v.reason.split(":")[0]] += 1
        if committed:
            self.versions[p], self.anchor_digests[p] = record.version, record.anchor_digest
            for v in merged:
                life, before, _ = self.last_merged[p].get(v.learner, (-1, -1, -1))
                before = before if life == v.incarnation else -1
                self.last_merged[p][v.learner] = (v.incarnation, record.round, before)
            self.committed += 1
            self.merged_total += len(merged)
            self.skips_in_a_row = 0
            self.recent.append(tuple(v.learner for v in merged))
        else:
            self.skipped += 1
            self.skips_in_a_row += 1
            self.recent.append(())
        had = self.ledger.merged_P[p]
        self.ledger.round(record)
        # Whoever has no life left asks for nothing: manifests name who still may.
        there, named = self.ledger.lives, self.last_merged[p]
        self.last_merged[p] = {m: last for m, last in named.items() if m in there}
        if committed:
            self.merges.add(p, record.version, record.round, self.ledger.merged_P[p] - had)
        self.first_round_at = self.first_round_at or record.at
        self.next_round = record.round + 1
        self.stamp = record.stamp
        if record.stamp.fraction >= 1.0:
            self._finish()

    def _apply_snapshot(self, record: TapeSnapshot) -> None:
        # Not of before a restore, where rounds were counted otherwise: see `covering`.
        if record.covers >= self.snapshot_covers:
            self.snapshot_covers, self.snapshot_round = record.covers, record.round
        self.sources = {s: seq for s, seq in self.sources.items() if seq > record.covers}

    def _apply_setting(self, record: TapeSetting) -> None:
        if record.name == "paused":
            self.paused = bool(record.value)
        elif record.name == "quorum":
            self.quorum = record.value
        else:
            self.stopping = True
            self._finish()

    def _apply_checkpoint(self, record: TapeCheckpoint) -> None:
        self.checkpoint_open = record.outcome == "begun"
        self.checkpoint_outcome, self.checkpoint_reason = record.outcome, record.reason
        if not self.checkpoint_open:
            return
        self.checkpoint, self.checkpoint_at = record.number, record.at
        self.checkpoint_steps = max(self.stamp.steps, 0)

    # What a restore leaves as it is: who leads, what the user wants, and where the tape stands.
    STAYS = (
        "term",
        "leader",
        "paused",
        "stopping",
        "quorum",
        "checkpoint",
        "checkpoint_open",
        "checkpoint_outcome",
        "checkpoint_reason",
        "sources",
    )

    def resume(self, meta: dict[str, Any], record: TapeRestore, seq: int) -> None:
        """Apply a restore: the state `meta` of a checkpoint, of this run or of another one.

        Its stamp is laid against this run's budget, of which the time it had used is used. Raises
        TapeFault when it is not the state that the record speaks of.
        """
        self._check_next(record, seq)
        digests = tuple(meta["anchor_digests"])
        if (tuple(meta["versions"]), digests) != (record.versions, record.anchor_digests):
            raise TapeFault(f"record {seq}: the state of {record.source} is another one by now")
        stays, present = {name: getattr(self, name) for name in self.STAYS}, self.ledger
        self.load(meta)
        _, folder, number = parse_reference(record.source)
        own = folder == self.spec.folder
        self.ledger.resume(present, own=own)
        for name, value in stays.items():
            setattr(self, name, value)
        if own:
            # Its mark may be among records that were lost: nobody may write over what is there.
            self.checkpoint = max(self.checkpoint, number)
        self.seq, self.epoch, self.tail = seq, record.epoch, identity(record)
        self.epochs_before = []  # a status of these knows no wish that was made since
        self.restores = record.serial
        self.sources = {**self.sources, record.source: seq}
        self.restored = Restored(epoch=record.epoch, serial=record.serial, source=record.source)
        self.last_merged = [{} for _ in self.versions]
        self.recent.clear()
        self.finishing_from, self.outcome = -1, ""
        self.snapshot_covers, self.snapshot_round = seq, self.next_round - 1
        self.checkpoint_steps = max(self.stamp.steps, 0)
        if self.first_round_at:
            # A shard that was over by then has no mark of it on its tape, and says when it was.
            self.first_round_at += record.at - meta.get("mark_at", meta["checkpoint_at"])
        self.stamp = NOT_STARTED
        if self.next_round:
            self.stamp = self.stamp_after(self.next_round - 1, record.at)
        if self.stopping or self.stamp.fraction >= 1.0:
            self._finish()

    def _finish(self) -> None:
        if self.finishing_from < 0:
            self.finishing_from = self.next_round

    # --- snapshots -----------------------------------------------------------------------------

    PLAIN = (
        "seq",
        "epoch",
        "term",
        "leader",
        "sizes_P",
        "versions",
        "anchor_digests",
        "next_round",
        "finishing_from",
        "paused",
        "stopping",
        "quorum",
        "first_round_at",
        "committed",
        "skipped",
        "skips_in_a_row",
        "merged_total",
        "snapshot_covers",
        "snapshot_round",
        "checkpoint",
        "checkpoint_open",
        "checkpoint_outcome",
        "checkpoint_reason",
        "checkpoint_at",
        "checkpoint_steps",
        "restores",
        "outcome",
        "ended_in",
    )

    def meta(self) -> dict[str, Any]:
        """Everything but the spec, as JSON-ready values; `restore` is the inverse."""
        plain = {name: getattr(self, name) for name in self.PLAIN}
        return {
            **{k: list(v) if isinstance(v, list) else v for k, v in plain.items()},
            "shard": self.shard,
            "config_hash": self.config_hash,
            "layout": [t.model_dump() for t in self.layout],
            "last_merged": [{k: list(v) for k, v in m.items()} for m in self.last_merged],
            "stamp": self.stamp.model_dump(),
            "restored": self.restored.model_dump() if self.restored else None,
            "tail": list(self.tail) if self.tail else None,
            "sources": dict(self.sources),
            "refused": dict(self.refused),
            "ledger": self.ledger.meta(),
            **self.norms.to_lists(),
            **({"began": list(self.began_P)} if any(self.began_P) else {}),
            **({"epochs_before": list(self.epochs_before)} if self.epochs_before else {}),
            "recent": [list(merged) for merged in self.recent],
            "merges": [[list(m) for m in merges] for merges in self.merges.merges_P],
        }

    @classmethod
    def restore(cls, spec: RunSpec, meta: dict[str, Any]) -> Self:
        """Rebuild from `meta`; raises TapeFault when it belongs to another configuration."""
        self = cls(spec, meta["shard"])
        if meta["config_hash"] != self.config_hash:
            raise TapeFault("the snapshot was made under another configuration")
        self.load(meta)
        return self

    def load(self, meta: dict[str, Any]) -> None:
        """Take over all that `meta` says, of whatever run it is."""
        for name in self.PLAIN:
            value = meta[name]
            setattr(self, name, list(value) if isinstance(value, list) else value)
        self.layout = tuple(
            TensorSpec(name=t["name"], shape=tuple(t["shape"]), embedding=t["embedding"])
            for t in meta["layout"]
        )
        # Older versions let a snapshot of before a restore count after it.
        self.snapshot_round = min(self.snapshot_round, self.next_round - 1)
        self.epochs_before = list(meta.get("epochs_before") or [])
        # Left out where all began with 0. Older versions never say: the store alone knows it then.
        self.began_P = list(meta.get("began") or [0] * len(self.versions))
        last_merged = meta["last_merged"]
        self.last_merged = [{k: (v[0], v[1], v[2]) for k, v in m.items()} for m in last_merged]
        self.stamp = Stamp(**meta["stamp"])
        self.restored = Restored(**meta["restored"]) if meta["restored"] else None
        tail = meta.get("tail")
        self.tail = (tail[0], tail[1]) if tail else None
        self.sources = dict(meta["sources"])
        self.refused = Counter(meta["refused"])
        self.ledger = Ledger.restore(meta["ledger"])
        a = self.spec.algorithm
        self.norms = NormHistory.from_lists(
            meta,
            samples_min=a.outlier_samples_min,
            z_max=a.outlier_z_max,
            keeps=a.alpha > 0,
        )
        self.merges = RecentMerges.of(meta.get("merges") or [[]] * len(self.versions))
        self.recent.clear()
        self.recent.extend(tuple(merged) for merged in meta["recent"])
