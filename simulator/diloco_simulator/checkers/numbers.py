"""What the bytes of a run must be, computed again from the paper's formulas (I9).

In double precision and in plain numpy, from nothing but what learners uploaded and what the tape
says was merged. The product's own re-execution compares digests, so that it would repeat a fault
of the formulas; this one would not.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco_shared.checkpoints.checkpoints_io import CheckpointError
from diloco_shared.numerics import codec
from diloco_shared.numerics.arrays import digest_array
from diloco_shared.protocol.messages import (
    Blob,
    PublicationManifest,
    TapeEpoch,
    TapeInit,
    TapeRebirth,
    TapeRecord,
    TapeRestore,
    TapeRound,
)
from diloco_shared.spec.codecs import facts
from diloco_shared.spec.fragmentation import Layout, Piece
from diloco_shared.spec.merge_rules import named
from diloco_shared.spec.run import RunSpec
from diloco_simulator.checkers.promises import Mark, Report
from diloco_syncer.checkpoints.parts_io import load_recorded
from diloco_syncer.history.history import History
from diloco_syncer.history.replay import RestoredState as Back
from diloco_syncer.history.replay import payloads_needed, replay
from diloco_syncer.leadership.rebirth import reborn_store
from diloco_syncer.merging.store import FragmentStore, Values

Doubles = NDArray[np.float64]
# One master and one momentum per fragment, after a record of the tape.
State = list[tuple[Doubles, Doubles]]
# Told of every record that is executed: by whom, the record, and what came of it.
Executed = Callable[[str, TapeRecord, History, FragmentStore | None], None]

# What the product's fp32 arithmetic adds to a codec's error, as a share of the largest parameter:
# over the rounds it adds up, and directions that nearly cancel magnify it. A fragment of a world
# has fewer than 256 values: it is one block.
ROUNDING = 3e-5
# Directions that cancel to less than this are a matter of rounding: a sum of fp32 vectors is off by
# some 1e-7 of their lengths, and what is left of them is magnified to their length.
CANCELLED = 5e-3
# And to less than this they cancel for certain, which the product sees too: it is within 1e-6.
GONE = 1e-7
# As is a delta of which less than this is left of what it was moved by.
VANISHED = 1e-4
# Under a robust rule nobody weighs more than so many medians: stated once more, on purpose.
HEAVIEST = 2.0


def vanishes(delta_F: Doubles, moved_F: Doubles) -> bool:
    """Whether next to nothing is left of what was moved: its direction is a matter of rounding.

    A learner that took over a head, and trained no step on it, is away from an older one by that.
    """
    by = float(np.linalg.norm(moved_F))
    return by > 0 and float(np.linalg.norm(delta_F)) < VANISHED * by


def weighted(deltas: Sequence[Doubles], weights: Sequence[float]) -> Doubles:
    """Mean of deltas (section 3.5, for embeddings)."""
    total: Doubles = sum(
        (w * d for w, d in zip(weights, deltas, strict=True)), start=np.zeros_like(deltas[0])
    )
    return total / sum(weights)


def radial(deltas: Sequence[Doubles], weights: Sequence[float], settled: float) -> Doubles | None:
    """Radial-directional average (section 3.5); None where it is a matter of rounding.

    The more it has settled, the less of the length is made up for that the mean direction lost.
    """
    if len(deltas) == 1:
        return deltas[0]
    direction = mean_direction(deltas, weights)
    length = float(np.linalg.norm(direction))
    if length < CANCELLED:
        return None
    radius = sum(w * n for w, n in zip(weights, norms_of(deltas), strict=True)) / sum(weights)
    return direction * (radius / length) * (1 - settled) + direction * radius * settled


def norms_of(deltas: Sequence[Doubles]) -> list[float]:
    """Their lengths."""
    return [float(np.linalg.norm(d)) for d in deltas]


def mean_direction(deltas: Sequence[Doubles], weights: Sequence[float]) -> Doubles:
    """Mean of deltas that are all of length 1; what has no length has no direction."""
    directions = [d / n if n > 0 else d for d, n in zip(deltas, norms_of(deltas), strict=True)]
    return weighted(directions, weights)


def clipped(
    deltas: Sequence[Doubles], weights: Sequence[float], settled: float, *, embedding: bool
) -> Doubles | None:
    """The radial average of deltas of which none is longer than the median one; for embeddings,
    and where directions cancel, their mean. None where it is a matter of rounding."""
    norms = norms_of(deltas)
    most = float(np.median(norms))
    short = [d * (most / n) if n > most else d for d, n in zip(deltas, norms, strict=True)]
    if embedding or np.linalg.norm(mean_direction(short, weights)) < GONE:
        return weighted(short, weights)
    return radial(short, weights, settled)


# By rule, how many values it leaves out at each end, of so many learners.
ROBUST: dict[str, Callable[[int], int]] = {
    "clipped": lambda learners: 0,
    "trimmed": lambda learners: max(learners // 5, 1) if learners > 2 else 0,
    "median": lambda learners: (learners - 1) // 2,
}


def trimmed(deltas: Sequence[Doubles], weights: Sequence[float], left_out: int) -> Doubles:
    """Each coordinate's mean without so many of its largest and its smallest values."""
    values_MxF = np.stack(deltas)
    weights_MxF = np.broadcast_to(np.array(weights)[:, None], values_MxF.shape)
    inner = np.lexsort((weights_MxF, values_MxF), axis=0)[left_out : len(deltas) - left_out]
    kept, parts = (np.take_along_axis(x, inner, 0) for x in (values_MxF, weights_MxF))
    mean: Doubles = (kept * parts).sum(0) / parts.sum(0)
    return mean


def ruled(
    rule: str,
    embedding: bool,
    deltas: Sequence[Doubles],
    weights: Sequence[float],
    settled: float,
) -> Doubles | None:
    """By the rule of that name. Of one that nobody has written down here once more, its decisions
    are believed."""
    if rule == "mean" or len(deltas) == 1:
        return weighted(deltas, weights)
    if rule == "rda":
        return weighted(deltas, weights) if embedding else radial(deltas, weights, settled)
    if rule not in ROBUST:
        return believed(rule, embedding, deltas, weights, settled)
    weights = [min(w, HEAVIEST * float(np.median(weights))) for w in weights]
    if rule == "clipped":
        return clipped(deltas, weights, settled, embedding=embedding)
    return trimmed(deltas, weights, ROBUST[rule](len(deltas)))


def believed(
    rule: str,
    embedding: bool,
    deltas: Sequence[Doubles],
    weights: Sequence[float],
    settled: float,
) -> Doubles:
    """By what a rule of one's own decides: what is checked is that it is carried out."""
    chosen = named(rule)
    assert chosen is not None
    weights = chosen.weights(weights)
    if left_out := chosen.left_out(len(deltas)):
        return trimmed(deltas, weights, left_out)
    chosen, total = chosen.embeddings if embedding else chosen, sum(weights)
    if chosen is None:
        return weighted(deltas, weights)
    norms, shares = norms_of(deltas), [w / total for w in weights]
    factors = chosen.factors(shares, norms)
    if factors is None:
        return weighted(deltas, weights)
    merged = combined(deltas, factors)
    scale = chosen.scale(weights, norms, float(np.linalg.norm(merged)), settled)
    if scale is not None:
        return merged * scale
    factors = chosen.instead(shares, norms)
    return weighted(deltas, weights) if factors is None else combined(deltas, factors)


def combined(deltas: Sequence[Doubles], factors: Sequence[float]) -> Doubles:
    """Sum of deltas times their factors."""
    total: Doubles = np.sum([d * f for d, f in zip(deltas, factors, strict=True)], axis=0)
    return total


@dataclass(frozen=True, slots=True)
class Bound:
    """How long a clipped merge may be that cannot be computed here: a matter of rounding."""

    unknown_F: Doubles  # the master that stands for it
    momentum: float
    median_P: tuple[float, ...]  # the median length of what was merged, by piece


class CheckedNumbers:
    """Follows the tape; looks at every publication of a round."""

    def __init__(self, report: Report, spec: RunSpec, shard: int = 0) -> None:
        self.report = report
        self.spec = spec
        self.shard = shard
        self.archive: dict[tuple[str, str], bytes] = {}  # (subject, digest), never purged
        self.newest: dict[str, bytes] = {}  # by subject
        self.states: list[State] = []  # one per record
        self.versions: list[list[int]] = []  # likewise
        # By the record before which it began (0: none): an epoch, and the versions it began with.
        self.began: dict[int, tuple[int, list[int]]] = {0: (0, [0] * spec.algorithm.fragments)}
        self.pieces: list[list[Piece]] = []
        self.expected: dict[tuple[int, int, int], Doubles] = {}  # epoch, fragment, version
        self.anchors: dict[tuple[int, int, int], Doubles] = {}  # as published
        self.bits: dict[tuple[int, int, int], Values] = {}
        self.exact: dict[str, Values] = {}  # the same, bit for bit, by digest
        self.resumed = 0  # fragments that were taken from a leader
        self.bounds: dict[int, Bound] = {}  # by fragment
        self.loaded: dict[str, Back] = {}  # by the manifest's digest: what a leader went back to

    def stored(self, blob: Blob, payload: bytes) -> None:
        """UP takes a contribution, or initial parameters."""
        self.archive.setdefault((blob.subject, blob.digest), payload)
        self.newest.setdefault(blob.subject, payload)

    def lost(self, kept: int) -> None:
        """The tape lost all but its first records."""
        del self.states[kept:], self.versions[kept:]
        self.began = {n: begun for n, begun in self.began.items() if n <= kept}

    def record(self, record: TapeRecord, mark: Mark | None = None) -> None:
        """`mark`: what a restore goes back to."""
        state = self.state
        if isinstance(record, TapeRestore) and mark is not None:
            state = mark.numbers
        elif isinstance(record, TapeRebirth):
            state = self._reborn(record, list(state))
        elif isinstance(record, TapeInit) and not state:
            layout = Layout.build(record.layout, self.spec.algorithm.fragments)
            self.pieces = [list(pieces) for pieces in layout.fragments]
            for subject, size in zip(record.subjects, layout.sizes, strict=True):
                if not subject:  # another shard's
                    state = [*state, (np.zeros(0), np.zeros(0))]
                    continue
                initial_F = codec.decode("fp32", self.newest[subject], size).astype(np.float64)
                state = [*state, (initial_F, np.zeros(size))]
        elif isinstance(record, TapeRound) and record.outcome == "committed" and state:
            state = self._round(record, state)
        self._follow(record)
        self.states.append(state)

    def _follow(self, record: TapeRecord) -> None:
        """Which versions the fragments have after it, and in which epoch."""
        versions = list(self.versions[-1]) if self.versions else self.began[0][1]
        if isinstance(record, TapeRound) and record.outcome == "committed":
            versions[record.fragment] = record.version
        elif isinstance(record, TapeRebirth | TapeRestore):
            versions = list(record.versions)
        self.versions.append(versions)
        if isinstance(record, TapeEpoch | TapeRebirth | TapeRestore):
            self.began[len(self.versions)] = record.epoch, versions

    @property
    def state(self) -> State:
        """After the newest record."""
        return self.states[-1] if self.states else []

    def _reborn(self, record: TapeRebirth, state: State) -> State:
        """It goes on from what was published, and momentum from zero."""
        for p in self.spec.algorithm.owned(self.shard):
            anchor_F = self.exact.get(record.anchor_digests[p])
            if anchor_F is None:
                self.report("I4", f"epoch {record.epoch} begins with what was never published")
                continue
            state[p] = (anchor_F.astype(np.float64), np.zeros(anchor_F.size))
        return state

    def installed(self, p: int, master_F: NDArray[np.float32], outer: Sequence[Any]) -> None:
        """A leader has put a merge in force. Where directions cancelled it is believed, once: what
        follows is computed again from there."""
        if self.state and np.isnan(self.state[p][0]).any():
            state = list(self.state)
            self._bounded(p, state[p], np.asarray(outer[0], np.float64))
            state[p] = (master_F.astype(np.float64), np.asarray(outer[0], np.float64))
            self.states[-1] = state
            self.resumed += 1

    def _bounded(self, p: int, before: tuple[Doubles, Doubles], trace_F: Doubles) -> None:
        """Reports I9 for a clipped merge of which a piece is longer than the median one."""
        bound = self.bounds.pop(p, None)
        if bound is None or bound.unknown_F is not before[0]:
            return
        self.report.looked("I9")
        merged_F = trace_F - bound.momentum * before[1]
        allowed = ROUNDING * max(1.0, float(np.abs(before[1]).max()))
        for piece, most in zip(self.pieces[p], bound.median_P, strict=True):
            long = float(np.linalg.norm(merged_F[piece.offset : piece.offset + piece.size]))
            if not long <= most * (1 + CANCELLED) + allowed:
                text = f"a clipped merge of fragment {p} is {long:.2g} long, {most:.2g} at most"
                self.report("I9", text)

    def _bound(self, p: int, unknown_F: Doubles, momentum: float, deltas: list[Doubles]) -> None:
        """Of deltas that were merged into what is unknown now."""
        if self.spec.algorithm.merge != "clipped" or len(deltas) < 2:
            return
        cuts = [slice(piece.offset, piece.offset + piece.size) for piece in self.pieces[p]]
        medians = [float(np.median(norms_of([d[cut] for d in deltas]))) for cut in cuts]
        self.bounds[p] = Bound(unknown_F, momentum, tuple(medians))

    def _round(self, r: TapeRound, before: State) -> State:
        deltas, weights, moved = [], [], []
        for v in r.verdicts:
            if v.outcome != "merged":
                continue
            tokens, steps = v.tokens_to - v.tokens_from, v.step_to - v.step_from
            by_quality = tokens * tokens / max(steps, 1)
            rules = {"quality": by_quality, "tokens": tokens, "equal": 1.0}
            weight = rules[self.spec.algorithm.weighting]
            if abs(v.weight - weight) > 1e-9 * weight:
                self.report("I9", f"round {r.round}: {v.learner} weighs {v.weight}, not {weight}")
            name, size = self.spec.algorithm.codec_up, before[r.fragment][0].size
            try:
                payload = self.archive[(v.subject, v.digest)]
                delta_F = codec.decode(name, payload, size).astype(np.float64)
            except (KeyError, ValueError):
                self.report("I9", f"round {r.round} merges {v.subject}, which is not on UP")
                return before
            moved_F = np.zeros(size)
            if v.base < r.version - 1:
                moved_F = moved_F + self._moved(r, v.base)
            moved.append(moved_F)
            deltas.append(delta_F + moved_F)
            weights.append(weight)
        state, algorithm = list(before), self.spec.algorithm
        master_F, trace_F = state[r.fragment]
        begin, rate = algorithm.outer_settle_from, algorithm.outer_rate
        left = 1.0 if r.outer_fraction <= begin else (1 - r.outer_fraction) / (1 - begin)
        merged_F = self._merged(r.fragment, deltas, moved, weights, 1 - left)
        momentum, rate = algorithm.outer_momentum * left, 1 + (rate - 1) * left
        if merged_F is None:
            unknown_F = np.full_like(master_F, np.nan)
            state[r.fragment] = (unknown_F, trace_F)
            if not np.isnan(master_F).any():
                self._bound(r.fragment, unknown_F, momentum, deltas)
        else:
            trace_F = merged_F + momentum * trace_F
            state[r.fragment] = (master_F - rate * (merged_F + momentum * trace_F), trace_F)
        self.expected[(r.epoch, r.fragment, r.version)] = state[r.fragment][0]
        return state

    def _moved(self, r: TapeRound, base: int) -> Doubles | float:
        """How far the head is from a base behind it."""
        head_F, base_F = (self._anchor(r.fragment, v) for v in (r.version - 1, base))
        return np.nan if head_F is None or base_F is None else head_F - base_F

    def _anchor(self, p: int, version: int) -> Doubles | None:
        """As published in this epoch, or in the newest one before it whose version it is.

        None: it is of an epoch that has not published it yet. One that the tape has lost, or that
        history went back from, may have had another by that number.
        """
        for epoch, first in reversed(self.began.values()):
            anchor_F = self.anchors.get((epoch, p, version))
            if anchor_F is not None or version > first[p]:
                return anchor_F
        return None

    def _merged(
        self,
        p: int,
        deltas: list[Doubles],
        moved: list[Doubles],
        weights: list[float],
        settled: float,
    ) -> Doubles | None:
        """None where it is a matter of rounding. `moved`: what deltas were moved by."""
        if np.isnan(deltas).any():  # nobody has seen what one was moved by: to be left out it is
            return np.full_like(deltas[0], np.nan)  # not known well enough either
        parts = []
        for piece in self.pieces[p]:
            cut = slice(piece.offset, piece.offset + piece.size)
            mine = [delta_F[cut] for delta_F in deltas]
            if any(vanishes(d, by_F[cut]) for d, by_F in zip(mine, moved, strict=True)):
                return None
            part = ruled(self.spec.algorithm.merge, piece.embedding, mine, weights, settled)
            if part is None:
                return None
            parts.append(part)
        return np.concatenate(parts)

    def published(self, m: PublicationManifest, payload: bytes) -> None:
        """A publication goes out: it holds what the round made, but for the codec's error."""
        key = (m.epoch, m.fragment, m.version)
        self._keep_exact(m, payload)
        decoded_F = codec.decode(m.codec, payload, m.values).astype(np.float64)
        base_F: Doubles | float | None = 0.0
        if m.prev_version >= 0:
            base_F = self.anchors.get((m.epoch, m.fragment, m.prev_version))
        if base_F is None:
            return  # a delta onto what was never seen; its digest is looked at elsewhere
        self.anchors.setdefault(key, base_F + decoded_F)
        master_F = self.expected.get(key)
        # An exact copy of an anchor has the error of the deltas that made it.
        if m.round < 0 or master_F is None or np.isnan(master_F).any():
            return
        self.report.looked("I9")
        target_F = master_F - base_F
        largest = float(np.abs(target_F).max())
        allowed = facts(m.codec).error * largest + ROUNDING * max(
            1.0, float(np.abs(master_F).max())
        )
        off = float(np.abs(decoded_F - target_F).max())
        if off > allowed:
            self.report(
                "I9",
                f"version {m.version} of fragment {m.fragment} is off by {off:.2g} from what its "
                f"contributions make, {allowed:.2g} at most for {m.codec}",
            )

    def _keep_exact(self, m: PublicationManifest, payload: bytes) -> None:
        if m.prev_version >= 0:
            before = self.bits.get((m.epoch, m.fragment, m.prev_version))
            if before is None:
                return
            anchor_F = before + codec.decode(m.codec, payload, m.values)
        else:
            anchor_F = codec.decode(m.codec, payload, m.values)
        self.bits[m.epoch, m.fragment, m.version] = anchor_F
        self.exact[digest_array(anchor_F)] = anchor_F

    def goes_back(self, state: Back) -> None:
        """A leader puts in force what it has loaded, which may be removed later."""
        self.loaded.setdefault(state.digest, _copied(state))

    def execute(
        self, spec: RunSpec, tape: Sequence[TapeRecord], executed: Executed, vault: str
    ) -> bool:
        """The product executes the whole tape once more, and compares digests. `spec`: as the hub
        has it, with the run's id. False: it cannot go on behind an older restore, whose checkpoint
        was removed, and which nobody was seen to load."""
        history, store = History(spec, self.shard), None
        try:
            for n, record in enumerate(tape, 1):
                payloads = {s: self._payload(record, s) for s in payloads_needed(record)}
                back: Back | FragmentStore | None = None
                if isinstance(record, TapeRebirth):
                    owned = history.owned
                    anchors = {p: self.exact[record.anchor_digests[p]] for p in owned}
                    back = reborn_store(history, record.versions, anchors)
                if isinstance(record, TapeRestore):
                    try:
                        back = load_recorded(spec, self.shard, record, vault)
                    except CheckpointError:
                        if record is next(r for r in reversed(tape) if isinstance(r, TapeRestore)):
                            raise
                        # An older one was removed, as the user was told.
                        if (known := self.loaded.get(record.digest)) is None:
                            return False
                        back = _copied(known)
                store = replay(history, store, record, n, payloads, back)
                executed("a replay", record, history, store)
        except (ValueError, KeyError) as error:
            self.report("I9", f"the tape cannot be executed again: {error}")
        return True

    def _payload(self, record: Any, subject: str) -> bytes:
        if isinstance(record, TapeInit):
            return self.newest[subject]
        digest = next(v.digest for v in record.verdicts if v.subject == subject)
        return self.archive[(subject, digest)]


def _copied(state: Back) -> Back:
    """With a store of its own: whoever goes on from one changes it."""
    arrays = {name: np.array(values) for name, values in state.store.state_arrays().items()}
    store = FragmentStore.restore(state.store.meta(), arrays, state.store.algorithm)
    return replace(state, history=deepcopy(state.history), store=store)
