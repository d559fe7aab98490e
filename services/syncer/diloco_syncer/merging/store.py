"""The syncer's numbers: master, published anchor and outer state of every fragment.

Memory per fragment of F values: master, anchor and momentum (3 * 4 * F bytes). The anchor of the
version before, which few rounds read, goes where the injected `Shelf` puts it: in a syncer a file.
A round of M contributions holds their M payloads as they came. While it is staged, its outcome
comes to that: master, anchor and momentum (3 * 4 * F bytes) and the payload of the publication,
whatever M is, for contributions are decoded as the merge reads them; the memory of the three
arrays that a committed round replaces, and of the payload once it is sent, is kept for the next
outcome. Only an outer optimizer of optax takes copies of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from diloco_shared.memory.pages import Recycled
from diloco_shared.numerics import codec
from diloco_shared.numerics.arrays import digest_array
from diloco_shared.numerics.compiled import cores
from diloco_shared.numerics.merge import (
    Delta,
    Nesterov,
    Publishing,
    merge,
    merge_and_step,
    publish,
)
from diloco_shared.numerics.merge_kernels import MergeState, Outcome
from diloco_shared.numerics.outer import Outer
from diloco_shared.protocol.chunks import Headed, digest_bytes
from diloco_shared.protocol.messages import TensorSpec
from diloco_shared.spec.algorithm import Algorithm
from diloco_shared.spec.fragmentation import Layout

Values = NDArray[np.float32]

EMPTY = np.empty(0, np.float32)
# How the array of a previous anchor is called after its fragment.
PREVIOUS = "previous"

# Puts an array away and returns one of the same bits, which is only read.
Shelf = Callable[[Values], Values]


def in_memory(values_F: Values) -> Values:
    """The shelf of those who have no disk, or little to keep."""
    return values_F


class Unmergeable(ValueError):
    """A contribution that cannot be merged into its fragment; the text says why."""

    def __init__(self, learner: str, why: str) -> None:
        super().__init__(why)
        self.learner = learner


@dataclass(frozen=True, slots=True)
class Contribution:
    """One encoded pseudo-gradient and what it is measured against."""

    learner: str
    weight: float
    base: int
    payload: bytes
    codec: str
    norms_P: NDArray[np.float64] | None = None  # of its pieces, as `merge.norms` gives them


@dataclass(frozen=True, slots=True)
class Fragment:
    """One fragment in force. Arrays are fp32 of shape (F,) and never written to."""

    version: int
    master: Values
    anchor: Values
    previous: Values | None  # the anchor one version ago
    outer: tuple[Any, ...]  # leaves of the outer optimizer's state


@dataclass(frozen=True, slots=True)
class StagedMerge:
    """The outcome of a merge, not yet in force."""

    fragment: Fragment
    payload: bytes
    anchor_digest: str
    master_digest: str
    payload_digest: str


class FragmentStore:
    """All fragments of one shard. `stage` computes, `install` puts in force."""

    def __init__(
        self,
        layout: Layout,
        algorithm: Algorithm,
        fragments: dict[int, Fragment],
        shelf: Shelf = in_memory,
    ) -> None:
        self.layout = layout
        self.algorithm = algorithm
        self.outer = Outer(algorithm)
        self.fragments = fragments
        self.threads = cores()  # they change nothing but the time a merge takes
        self.memory = Recycled()
        self.shelf = shelf

    @classmethod
    def init(
        cls,
        layout: Layout,
        algorithm: Algorithm,
        fragments: Sequence[Values | None],
        shelf: Shelf = in_memory,
    ) -> Self:
        """Version 0: master and anchor are one array, the initial values; None: another shard's."""
        self = cls(layout, algorithm, {}, shelf)
        for p, (values_F, size) in enumerate(zip(fragments, layout.sizes, strict=True)):
            if values_F is None:
                continue
            if values_F.shape != (size,):
                raise ValueError(f"a fragment of {values_F.shape} values where {size} belong")
            outer = tuple(self.outer.init(values_F))
            self.fragments[p] = Fragment(0, values_F, values_F, None, outer)
        return self

    def stage(
        self,
        p: int,
        contributions: Sequence[Contribution],
        *,
        keyframe: bool,
        fraction: float = 0.0,
    ) -> StagedMerge:
        """Merge, outer step, publication: the same inputs give the same bytes; changes nothing.

        A keyframe publishes the master itself (rounded by its codec); a delta publishes
        Q(master - anchor), so that the error of Q is carried into the next one. `fraction` of the
        budget is used: where the outer schedule stands. Raises Unmergeable for a base that is
        neither the head nor one behind, and for what is not of its codec and of this size.
        """
        f, a = self.fragments[p], self.algorithm
        ordered = sorted(contributions, key=lambda c: c.learner)
        publishing = Publishing(a.keyframe_codec if keyframe else a.codec_down, keyframe)
        deltas = [self._delta(p, c) for c in ordered]
        outcome, outer = self._step(p, deltas, publishing, self.outer.nesterov(fraction))
        payload = outcome.payload.data
        return StagedMerge(
            Fragment(
                f.version + 1, outcome.master_F, outcome.anchor_F, self.shelf(f.anchor), outer
            ),
            payload,
            digest_array(outcome.anchor_F),
            digest_array(outcome.master_F),
            digest_bytes(payload),
        )

    def _step(
        self,
        p: int,
        deltas: Sequence[Delta],
        publishing: Publishing,
        nesterov: Nesterov | None,
    ) -> tuple[Outcome, tuple[Any, ...]]:
        """What follows from merging `deltas`, and the new state of the outer optimizer."""
        f, pieces, rule = self.fragments[p], self.layout.fragments[p], self.algorithm.merge
        previous_F = EMPTY if f.previous is None else f.previous
        if nesterov is not None:
            state = MergeState(f.master, f.outer[0] if f.outer else EMPTY, f.anchor)
            outcome = merge_and_step(
                deltas,
                pieces,
                rule,
                nesterov,
                publishing,
                state,
                previous_F=previous_F,
                threads=self.threads,
                memory=self.memory,
            )
            return outcome, (outcome.momentum_F,) if f.outer else ()
        delta_F = merge(
            deltas, pieces, rule, anchor_F=f.anchor, previous_F=previous_F, threads=self.threads
        )
        master_F, outer = self.outer.apply(f.master, list(f.outer), delta_F)
        return publish(master_F, f.anchor, publishing, threads=self.threads), tuple(outer)

    def _delta(self, p: int, c: Contribution) -> Delta:
        f = self.fragments[p]
        behind = c.base == f.version - 1 and f.previous is not None
        if c.base != f.version and not behind:
            why = f"base {c.base} of {c.learner} where the head is {f.version}"
            raise Unmergeable(c.learner, why)
        try:
            codec.check(c.codec, c.payload, self.layout.sizes[p])
        except ValueError as error:
            raise Unmergeable(c.learner, str(error)) from None
        norms_P = c.norms_P
        if norms_P is not None and norms_P.size != len(self.layout.fragments[p]):
            norms_P = None  # found before the layout was known
        return Delta(c.weight, c.codec, c.payload, behind, norms_P)

    def install(self, p: int, staged: StagedMerge) -> Fragment:
        """The round is committed; what was in force before."""
        replaced = self.fragments[p]
        assert staged.fragment.version == replaced.version + 1
        self.fragments[p] = staged.fragment
        return replaced

    @property
    def leaves(self) -> int:
        """Arrays of the outer optimizer's state per fragment."""
        return len(self.outer.init(np.zeros(1, np.float32)))

    def version(self, p: int) -> int:
        return self.fragments[p].version

    def anchor(self, p: int) -> Values:
        """What is published of fragment p, fp32 of shape (F,): not a copy, and only to be read."""
        return self.fragments[p].anchor

    def anchor_digest(self, p: int) -> str:
        return digest_array(self.fragments[p].anchor)

    def current_keyframe(self, p: int) -> Headed:
        """The current anchor exactly (fp32): a view, which stays what it is."""
        return Headed(*codec.frame(self.fragments[p].anchor))

    # --- snapshots -----------------------------------------------------------------------------

    def meta(self) -> dict[str, Any]:
        """What `restore` needs beside the arrays; JSON-ready."""
        return {
            "versions": {str(p): f.version for p, f in self.fragments.items()},
            "outer_leaves": self.leaves,
            "cut_into": len(self.layout.fragments),
            "layout": self.layout.digest(),
            "tensors": [t.model_dump() for t in self.layout.tensors],
        }

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Every array by name; references, since arrays are never written to."""
        arrays: dict[str, NDArray[Any]] = {}
        for p, f in self.fragments.items():
            arrays[f"{p}.master"], arrays[f"{p}.anchor"] = f.master, f.anchor
            if f.previous is not None:
                arrays[f"{p}.{PREVIOUS}"] = f.previous
            for k, leaf in enumerate(f.outer):
                arrays[f"{p}.outer.{k}"] = leaf
        return arrays

    @classmethod
    def restore(
        cls,
        meta: Mapping[str, Any],
        arrays: Mapping[str, NDArray[Any]],
        algorithm: Algorithm,
        shelf: Shelf = in_memory,
    ) -> Self:
        """Inverse of `meta` and `state_arrays`, bit for bit. `arrays` are taken as they are: what
        belongs on the shelf is there already.

        Raises ValueError when this program would cut the tensors otherwise: the values would end
        in the wrong places.
        """
        tensors = [
            TensorSpec(name=t["name"], shape=tuple(t["shape"]), embedding=t["embedding"])
            for t in meta["tensors"]
        ]
        layout = Layout.build(tensors, meta["cut_into"])
        stored = meta.get("layout", "(unnamed)")
        if stored != layout.digest():
            raise ValueError(
                f"the stored layout {stored} is not this program's {layout.digest()}: "
                "restore with the version that wrote it"
            )
        self = cls(layout, algorithm, {}, shelf)
        if meta["outer_leaves"] != self.leaves:
            raise ValueError(
                f"the stored outer optimizer has {meta['outer_leaves']} arrays per fragment, "
                f"{algorithm.outer_optimizer} has {self.leaves}: take the one it was stored with"
            )
        for p, version in meta["versions"].items():
            self.fragments[int(p)] = Fragment(
                version,
                arrays[f"{p}.master"],
                arrays[f"{p}.anchor"],
                arrays.get(f"{p}.{PREVIOUS}"),
                tuple(arrays[f"{p}.outer.{k}"] for k in range(self.leaves)),
            )
        return self
