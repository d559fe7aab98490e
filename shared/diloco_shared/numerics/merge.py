"""Merging pseudo-gradients (paper section 3.5): radial-directional averaging, or the mean.

    RDA({delta_m, w_m}) = [sum w_m |delta_m| / sum w_m] * phi(sum w_m phi(delta_m) / sum w_m)

with phi(x) = x / |x|, phi(0) = 0, per tensor; embeddings use the weighted mean. Its norm does not
shrink as M grows, so one outer rate serves all M. Where directions cancel, the mean stands in, or
what else the rule has for that (`MergeRule.instead`). Of a tensor cut by rows each piece is merged
by itself: its rows lie in fragments of other rounds.

The length that directions lose when they are averaged is mostly noise of small batches. At the end
of a run, where noise is what is left to lose, a merge may settle (`Nesterov.settled`, from 0 to 1):
its length goes from the mean of the lengths to that times the length of the mean direction, which
for contributions of one length is the plain mean.

The same inputs give the same bits on any number of threads and any processor: contributions are
added in fp32 in a fixed order of learners, squares in double precision in fixed segments
(sums.py), and scalars by fsum, which rounds once; sum() of floats differs between Python versions.
The sum of M contributions is off by at most about M * 2^-24 of the sum of their magnitudes.
Lengths that leave fp32 no room for directions fall back to the mean too. Contributions are decoded
where they are used: twice under RDA, or once when their norms are known, and once more where
directions cancel. Beside its outcome a merge holds nothing of the fragment's size. A rule that
leaves out values of each coordinate (`trimmed`, `median`) has all contributions of 2048 coordinates
at hand at a time, which are sorted: 16 KB for each learner and thread, and no more than 64 MB in
all.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diloco_shared.memory.pages import Recycled
from diloco_shared.numerics import codec
from diloco_shared.numerics import merge_kernels as passes
from diloco_shared.numerics.compiled import parallel_for
from diloco_shared.numerics.merge_kernels import (
    MergeState,
    Outcome,
    OuterStep,
    Reading,
    Rule,
    Share,
)
from diloco_shared.numerics.sums import STRIDE, Doubles, Segments, Values, by_piece, cut
from diloco_shared.spec.algorithm import Weighting
from diloco_shared.spec.fragmentation import Piece
from diloco_shared.spec.merge_rules import MergeRule, named

Flags = NDArray[np.bool_]

EMPTY = np.empty(0, np.float32)
# Of learners times threads that leave out values: 64 MB, whatever the machine has of processors.
TRIMMING_MAX = 4096


@dataclass(frozen=True, slots=True)
class Delta:
    """One encoded pseudo-gradient of a fragment of P pieces."""

    weight: float
    codec: str
    payload: bytes
    behind: bool = False  # measured against the previous anchor
    norms_P: Doubles | None = None  # as `norms` gives them, if they are known already


@dataclass(frozen=True, slots=True)
class Publishing:
    """Q(master - anchor) for a delta, Q(master) for a keyframe."""

    codec: str
    keyframe: bool


@dataclass(frozen=True, slots=True)
class Nesterov:
    """Nesterov SGD (paper section 3.6); plain SGD where a state keeps no momentum."""

    rate: float
    momentum: float
    settled: float = 0.0  # how far lengths are, from RDA's at 0 to those of plain averages at 1


def merge(
    deltas: Sequence[Delta],
    pieces: Sequence[Piece],
    rule: str,
    *,
    anchor_F: Values = EMPTY,
    previous_F: Values = EMPTY,
    threads: int = 1,
) -> Values:
    """Merge M pseudo-gradients of one fragment to fp32 of shape (F,), piece by piece.

    The caller sorts contributions by learner; weights are non-negative with a positive sum. What
    weighs nothing is not read. A delta that is `behind` becomes delta + (anchor - previous).
    ValueError when a payload is not of its codec and of the fragment's size.
    """
    state = MergeState(EMPTY, EMPTY, anchor_F)
    out = Outcome(np.empty(_size(pieces), np.float32), EMPTY, EMPTY, _payload(0))
    _run(deltas, pieces, rule, None, None, state, previous_F, out, threads)
    return out.master_F


def merge_and_step(
    deltas: Sequence[Delta],
    pieces: Sequence[Piece],
    rule: str,
    outer: Nesterov,
    publishing: Publishing,
    state: MergeState,
    *,
    previous_F: Values = EMPTY,
    threads: int = 1,
    memory: Recycled | None = None,
) -> Outcome:
    """The same, the outer step, the publication and the anchor it makes, in the same passes.

    The outcome's arrays come from `memory`.
    """
    F = _size(pieces)
    memory = memory or Recycled()
    out = Outcome(
        memory.empty(F),
        memory.empty(F) if state.momentum_F.size else EMPTY,
        memory.empty(F),
        memory.payload(codec.bytes_of(publishing.codec, F), codec.kernels.START),
    )
    _run(deltas, pieces, rule, outer, publishing, state, previous_F, out, threads)
    return _headed(out, publishing.codec, F)


def publish(
    master_F: Values, anchor_F: Values, publishing: Publishing, *, threads: int = 1
) -> Outcome:
    """Publication of a master and the anchor it makes."""
    F = master_F.size
    master_F = np.require(master_F, np.float32, ["C", "A", "W"])  # jax gives out what is read-only
    whole = (Piece("", (F,), False, 0, F, 0, F),)
    out = Outcome(
        master_F, EMPTY, np.empty(F, np.float32), _payload(codec.bytes_of(publishing.codec, F))
    )
    rule = Rule(np.zeros(1, np.bool_), np.ones(1), EMPTY)
    _finish(
        _reading((), F, anchor_F, EMPTY),
        cut(whole),
        rule,
        _step(None, publishing),
        MergeState(EMPTY, EMPTY, anchor_F),
        out,
        threads,
    )
    return _headed(out, publishing.codec, F)


def norms(codec_name: str, payload: bytes, pieces: Sequence[Piece], threads: int = 1) -> Doubles:
    """Euclidean norm of every piece of one encoded fragment; inf or nan when a value is.

    ValueError when the payload is not of that codec and size.
    """
    codec.check(codec_name, payload, _size(pieces))
    reading = _reading((Delta(1.0, codec_name, payload),), _size(pieces), EMPTY, EMPTY)
    everywhere = np.ones(len(pieces), np.bool_)
    found: Doubles = _norms(reading, cut(pieces), everywhere, 1, threads)[:, 0]
    return found


def warm() -> None:
    """Compile all that a merge calls: seconds, the first time on a machine; else read from disk."""
    one = (Piece("", (1,), False, 0, 1, 0, 1),)
    value_F = np.zeros(1, np.float32)
    # Two contributions: one would need neither norms nor a direction.
    deltas = [Delta(1.0, "fp32", codec.encode("fp32", value_F))] * 2
    state = MergeState(value_F, value_F, value_F)
    merge_and_step(deltas, one, "rda", Nesterov(1.0, 0.5), Publishing("fp32", True), state)
    merge([*deltas, *deltas], one, "trimmed")


def _run(
    deltas: Sequence[Delta],
    pieces: Sequence[Piece],
    rule: str,
    outer: Nesterov | None,
    publishing: Publishing | None,
    state: MergeState,
    previous_F: Values,
    out: Outcome,
    threads: int,
) -> None:
    able = [d for d in deltas if d.weight > 0]
    assert able, "nothing has weight"
    for d in able:
        codec.check(d.codec, d.payload, out.master_F.size)
    reading = _reading(able, out.master_F.size, state.anchor_F, previous_F)
    segments = cut(pieces)
    # A single contribution is its own average: it is taken as it is.
    chosen = named(rule) if len(able) > 1 else None
    rules_P = [_of(chosen, piece) for piece in pieces]
    settled = outer.settled if outer else 0.0
    how = _averaged(able, reading, segments, chosen, rules_P, settled, out.master_F, threads)
    _finish(reading, segments, how, _step(outer, publishing), state, out, threads)


def _of(rule: MergeRule | None, piece: Piece) -> MergeRule | None:
    """By which a piece is merged; None: the weighted mean."""
    return rule.embeddings if rule is not None and piece.embedding else rule


def _averaged(
    deltas: Sequence[Delta],
    reading: Reading,
    segments: Segments,
    chosen: MergeRule | None,
    rules_P: Sequence[MergeRule | None],
    settled: float,
    out_F: Values,
    threads: int,
) -> Rule:
    """How every piece is averaged; the sum of what a rule scales comes into `out_F` at once."""
    claimed = [d.weight for d in deltas]
    weights = claimed if chosen is None else list(chosen.weights(claimed))
    total = math.fsum(weights)
    share_M = np.array([w / total for w in weights], np.float32)
    ruled_P = np.array([rule is not None for rule in rules_P], np.bool_)
    scale_P = np.ones(ruled_P.size)
    if chosen is not None and chosen.left_out(len(deltas)):
        _trimmed(reading, segments, share_M, chosen.left_out(len(deltas)), out_F, threads)
        return Rule(np.ones(ruled_P.size, np.bool_), scale_P, share_M)
    if not ruled_P.any():
        return Rule(ruled_P, scale_P, share_M)
    norms_PxM = _known_norms(deltas, reading, segments, ruled_P, threads)
    factor_PxM, ruled_P = np.zeros(norms_PxM.shape, np.float32), ruled_P.copy()
    shares: list[float] = share_M.tolist()
    for p in np.flatnonzero(ruled_P).tolist():
        factors = _there(rules_P[p]).factors(shares, norms_PxM[p].tolist())
        ruled_P[p] = factors is not None
        factor_PxM[p] = 0.0 if factors is None else factors
    length_P = _directed(reading, segments, ruled_P, factor_PxM, out_F, threads)
    again_P = np.zeros_like(ruled_P)
    for p in np.flatnonzero(ruled_P).tolist():
        rule, norms_M = _there(rules_P[p]), norms_PxM[p].tolist()
        scale = rule.scale(weights, norms_M, float(length_P[p]), settled)
        ruled_P[p] = scale is not None
        scale_P[p] = 1.0 if scale is None else scale
        if scale is None and (instead := rule.instead(shares, norms_M)) is not None:
            ruled_P[p] = again_P[p] = True
            factor_PxM[p] = instead
    if again_P.any():
        _directed(reading, segments, again_P, factor_PxM, out_F, threads)
    return Rule(ruled_P, scale_P, share_M)


def _directed(
    reading: Reading,
    segments: Segments,
    ruled_P: Flags,
    factor_PxM: Values,
    out_F: Values,
    threads: int,
) -> Doubles:
    """Sums of contributions times their factors, of pieces under a rule, into `out_F`; lengths."""
    squares_S = np.zeros(segments.piece_S.size)

    def work(first: int, last: int) -> None:
        passes.direct(
            reading, segments, ruled_P, factor_PxM, Share(first, last), _room(), out_F, squares_S
        )

    parallel_for(work, segments.ranges, threads)
    length_P: Doubles = np.sqrt(by_piece(squares_S, segments.piece_S, ruled_P.size))
    return length_P


def _there(rule: MergeRule | None) -> MergeRule:
    assert rule is not None, "a piece is ruled by nothing"
    return rule


def _trimmed(
    reading: Reading,
    segments: Segments,
    share_M: Values,
    left_out: int,
    out_F: Values,
    threads: int,
) -> None:
    """Every coordinate's mean without its outermost values, into `out_F`."""

    def work(first: int, last: int) -> None:
        values, shares = (np.empty((share_M.size, STRIDE), np.float32) for _ in range(2))
        passes.trim(
            reading,
            segments,
            share_M,
            left_out,
            Share(first, last),
            values,
            shares,
            _room(),
            out_F,
        )

    parallel_for(work, segments.ranges, max(1, min(threads, TRIMMING_MAX // share_M.size)))


def _known_norms(
    deltas: Sequence[Delta], reading: Reading, segments: Segments, radial_P: Flags, threads: int
) -> Doubles:
    """Norms of the pieces under a rule, shape (P, M): given ones, the others computed."""
    norms_PxM = np.zeros((radial_P.size, len(deltas)))
    # The norm of what is measured again is another.
    unknown = [m for m, d in enumerate(deltas) if d.behind or d.norms_P is None]
    for m, d in enumerate(deltas):
        if m not in unknown:
            norms_PxM[:, m] = d.norms_P
    if unknown:
        some = reading._replace(
            codec_M=reading.codec_M[unknown],
            address_M=reading.address_M[unknown],
            bytes_M=reading.bytes_M[unknown],
            behind_M=reading.behind_M[unknown],
        )
        norms_PxM[:, unknown] = _norms(some, segments, radial_P, len(unknown), threads)
    return norms_PxM


def _norms(
    reading: Reading, segments: Segments, radial_P: Flags, learners: int, threads: int
) -> Doubles:
    squares_SxM = np.zeros((segments.piece_S.size, learners))

    def work(first: int, last: int) -> None:
        passes.squares(reading, segments, radial_P, Share(first, last), _room(), squares_SxM)

    parallel_for(work, segments.ranges, threads)
    columns = [by_piece(squares_S, segments.piece_S, radial_P.size) for squares_S in squares_SxM.T]
    return np.sqrt(np.stack(columns, axis=1))


def _finish(
    reading: Reading,
    segments: Segments,
    how: Rule,
    step: OuterStep,
    state: MergeState,
    out: Outcome,
    threads: int,
) -> None:
    state = MergeState(*(_still(array_F) for array_F in state))

    def work(first: int, last: int) -> None:
        passes.finish(reading, segments, how, step, state, Share(first, last), _room(), out)

    parallel_for(work, segments.ranges, threads)


def _step(outer: Nesterov | None, publishing: Publishing | None) -> OuterStep:
    return OuterStep(
        outer is not None,
        publishing is not None,
        np.float32(-outer.rate if outer else 0),
        np.float32(outer.momentum if outer else 0),
        codec.find(publishing.codec) if publishing else 0,
        publishing is not None and publishing.keyframe,
    )


def _reading(deltas: Sequence[Delta], values: int, anchor_F: Values, previous_F: Values) -> Reading:
    payloads = [np.frombuffer(d.payload, np.uint8) for d in deltas]
    behind = np.array([d.behind for d in deltas], np.bool_)
    assert not behind.any() or previous_F.size == anchor_F.size == values
    return Reading(
        np.array([codec.find(d.codec) for d in deltas], np.int64),
        np.array([data.ctypes.data for data in payloads], np.uint64),
        np.array([data.size for data in payloads], np.int64),
        behind,
        _still(previous_F),
        _still(anchor_F),
        values,
    )


def _still(array_F: Values) -> Values:
    """A view of one kind, whoever made the array: one kernel is compiled for all."""
    view_F = np.require(array_F, np.float32, ["C", "A"]).view()
    view_F.flags.writeable = False
    return view_F


def _size(pieces: Sequence[Piece]) -> int:
    return sum(p.size for p in pieces)


def _payload(size: int) -> NDArray[np.uint8]:
    return np.empty(size, np.uint8)


def _room() -> Values:
    """What a call of a pass works in; kernels allocate nothing."""
    return np.empty(passes.ROOM, np.float32)


def _headed(out: Outcome, codec_name: str, values: int) -> Outcome:
    head = codec.header(codec_name, values)
    out.payload[: len(head)] = np.frombuffer(head, np.uint8)
    return out


# --------------------------------------------------------------------------------------------------
# How much a contribution counts (paper section 3.4): quantity times quality.


def weight(c_tokens: int, c_steps: int, weighting: Weighting = "quality") -> float:
    """By `quality`: c_tokens^2 / c_steps, tokens since adoption times tokens per step.

    By all three 0 if either is 0: who has done nothing is not merged.
    """
    if c_tokens <= 0 or c_steps <= 0:
        return 0.0
    if weighting == "quality":
        return c_tokens * c_tokens / c_steps
    return float(c_tokens) if weighting == "tokens" else 1.0
