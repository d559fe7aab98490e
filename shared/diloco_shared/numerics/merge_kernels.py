"""The passes of a merge over memory, compiled: contributions are decoded where they are used.

    squares   reads the contributions           norms, for radial-directional averaging
    direct    reads the contributions           sum of phi(delta_m), written; its norm
    trim      reads the contributions           mean without the outermost values, written
    finish    reads that sum and the fragment   outer step, publication, new anchor, written

Each works on strides of STRIDE values that stay in the second-level cache, and may be called for
disjoint ranges by several threads, each with ROOM values of its own to work in. Contributions are
added up in fp32, in the order of learners, each product and each sum rounded; squares in double
precision.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diloco_shared.numerics.addresses import bytes_at, fence, store
from diloco_shared.numerics.codec.kernels import (
    START,
    add,
    decode,
    encode,
    settle,
)
from diloco_shared.numerics.compiled import kernel
from diloco_shared.numerics.elementwise import (
    accelerate,
    add_four_bf16,
    add_one,
    add_to,
    add_weighted,
    copy,
    descend,
    divide_within,
    fill,
    multiply,
    order,
    rebase,
    subtract,
    to_bf16,
)
from diloco_shared.numerics.sums import STRIDE, WIDTH, Doubles, Segments, Values, add_squares, fold
from diloco_shared.spec.codecs import BF16, BLOCK, FP32

assert STRIDE % BLOCK == 0  # no block of a codec lies in two strides

GROUP = 4  # contributions read at the same time
ROOM = 4 * STRIDE  # fp32 values that a call of a pass works in

ZERO = np.float32(0)

Bytes = NDArray[np.uint8]
Flags = NDArray[np.bool_]


class Reading(NamedTuple):
    """M encoded pseudo-gradients of a fragment of F values. The arrays of bytes must outlive it."""

    codec_M: NDArray[np.int64]
    address_M: NDArray[np.uint64]  # of the payload's first byte
    bytes_M: NDArray[np.int64]
    behind_M: Flags  # measured against `previous_F`: to be measured again against `anchor_F`
    previous_F: Values  # empty when none is behind
    anchor_F: Values
    values: int  # F


class Rule(NamedTuple):
    """How a fragment of P pieces is averaged."""

    radial_P: Flags  # the direction is there: it is only scaled
    scale_P: Doubles  # radius / length of the direction
    share_M: Values  # what the mean of all other pieces weighs


class Share(NamedTuple):
    """Ranges [first, last) of a fragment: what one call of a pass works on."""

    first: int
    last: int


class OuterStep(NamedTuple):
    """What `finish` does beyond averaging."""

    steps: bool  # Nesterov SGD
    publishes: bool
    descent: np.float32  # minus the rate
    momentum: np.float32
    codec: int  # of the publication
    keyframe: bool  # publishes the master, not its distance from the anchor


class MergeState(NamedTuple):
    """A fragment in force; not written to."""

    master_F: Values
    momentum_F: Values  # empty where none is kept
    anchor_F: Values


class Outcome(NamedTuple):
    """What becomes of it. On the way master_F holds the direction, anchor_F what is published."""

    master_F: Values
    momentum_F: Values
    anchor_F: Values
    payload: Bytes


# --- strides -----------------------------------------------------------------------------------


@kernel
def _load(r: Reading, m: int, at: int, out_S: Values) -> None:
    """The stride at `at` of contribution m, zeros after its end."""
    stop = min(at + STRIDE, r.values)
    data = bytes_at(r.address_M[m], r.bytes_M[m])
    decode(r.codec_M[m], data, r.values, at, stop, out_S)
    fill(ZERO, out_S[stop - at :])
    if r.behind_M[m]:
        rebase(r.anchor_F[at:stop], r.previous_F[at:stop], out_S)


@kernel
def _four(r: Reading, factor_M: Values, m: int) -> bool:
    """Whether contribution m and the three after it can be added together."""
    if m + GROUP > factor_M.size:
        return False
    together = True
    for k in range(m, m + GROUP):
        together &= factor_M[k] != 0 and r.codec_M[k] == BF16 and not r.behind_M[k]
    return together


@kernel
def _combine(r: Reading, factor_M: Values, at: int, part_S: Values, sum_S: Values) -> None:
    """sum factor_m delta_m over one stride; what has factor 0 is not read.

    -0 is what a sum begins with: 0 would turn the -0 of a single contribution into 0. Of bf16 four
    are read at a time: the processor looks ahead in all of them while it adds.
    """
    stop = min(at + STRIDE, r.values)
    size = 2 * (stop - at)
    fill(np.float32(-0.0), sum_S)
    m = 0
    while m < factor_M.size:
        if _four(r, factor_M, m):
            where = START + 2 * at
            add_four_bf16(
                bytes_at(r.address_M[m] + where, size).view(np.uint16),
                bytes_at(r.address_M[m + 1] + where, size).view(np.uint16),
                bytes_at(r.address_M[m + 2] + where, size).view(np.uint16),
                bytes_at(r.address_M[m + 3] + where, size).view(np.uint16),
                factor_M[m:],
                sum_S,
            )
            m += GROUP
            continue
        if factor_M[m] != 0 and r.behind_M[m]:
            _load(r, m, at, part_S)
            add_one(part_S[: stop - at], factor_M[m], sum_S)
        elif factor_M[m] != 0:
            data = bytes_at(r.address_M[m], r.bytes_M[m])
            add(r.codec_M[m], data, r.values, at, stop, factor_M[m], sum_S)
        m += 1


# --- passes ------------------------------------------------------------------------------------


@kernel
def squares(
    r: Reading, cut: Segments, radial_P: Flags, share: Share, room: Values, out_SxM: Doubles
) -> None:
    """Sums of squares of every contribution over the segments of a share of ranges."""
    part_S, lanes_W = room[:STRIDE], room[STRIDE : STRIDE + 2 * WIDTH].view(np.float64)
    for s in range(cut.first_R[share.first], cut.first_R[share.last]):
        if not radial_P[cut.piece_S[s]]:
            continue
        start, stop = cut.start_S[s], cut.stop_S[s]
        for m in range(out_SxM.shape[1]):
            lanes_W[:] = 0.0
            for at in range(start // STRIDE * STRIDE, stop, STRIDE):
                _load(r, m, at, part_S)
                fill(ZERO, part_S[: max(start - at, 0)])
                fill(ZERO, part_S[min(stop - at, STRIDE) :])
                add_squares(part_S, lanes_W)
            out_SxM[s, m] = fold(lanes_W)


@kernel
def direct(
    r: Reading,
    cut: Segments,
    radial_P: Flags,
    factor_PxM: Values,
    share: Share,
    room: Values,
    out_F: Values,
    squares_S: Doubles,
) -> None:
    """Directions of the radial pieces into `out_F`, and their sums of squares."""
    part_S, sum_S = room[:STRIDE], room[STRIDE : 2 * STRIDE]
    lanes_W = room[2 * STRIDE : 2 * STRIDE + 2 * WIDTH].view(np.float64)
    for s in range(cut.first_R[share.first], cut.first_R[share.last]):
        p = cut.piece_S[s]
        if not radial_P[p]:
            continue
        start, stop = cut.start_S[s], cut.stop_S[s]
        lanes_W[:] = 0.0
        for at in range(start // STRIDE * STRIDE, stop, STRIDE):
            _combine(r, factor_PxM[p], at, part_S, sum_S)
            a, b = max(start - at, 0), min(stop - at, STRIDE)
            fill(ZERO, sum_S[:a])
            fill(ZERO, sum_S[b:])
            add_squares(sum_S, lanes_W)
            store(sum_S[a:b], out_F[at + a : at + b])
        squares_S[s] = fold(lanes_W)
    fence()


@kernel
def _sort(learners: int, value_MxS: Values, share_MxS: Values) -> None:
    """Ascending over learners in every place, shares with their values, by a network of exchanges.

    Batcher's merge exchange (Knuth, The Art of Computer Programming, 5.2.2 M): which places are
    compared depends on nothing but their number, so each comparison is a loop over a stride.
    """
    top = 1
    while 2 * top < learners:
        top *= 2
    p = top
    while p > 0:
        q, r, d = top, 0, p
        while d > 0:
            for i in range(learners - d):
                if i & p == r:
                    order(value_MxS[i], value_MxS[i + d], share_MxS[i], share_MxS[i + d])
            q, r, d = q // 2, p, q - p
        p //= 2


@kernel
def trim(
    r: Reading,
    cut: Segments,
    share_M: Values,
    left_out: int,
    share: Share,
    value_MxS: Values,
    share_MxS: Values,
    room: Values,
    out_F: Values,
) -> None:
    """Weighted mean of every coordinate without its `left_out` largest and smallest values.

    It is kept within the values that it is made of, whatever was rounded. All contributions of one
    stride are at hand at a time: `value_MxS` and `share_MxS`, 16 KB for each learner.
    """
    learners, sum_S, total_S = share_M.size, room[:STRIDE], room[STRIDE : 2 * STRIDE]
    low, high = left_out, learners - left_out
    first = cut.start_S[cut.first_R[share.first]]
    end = cut.stop_S[cut.first_R[share.last] - 1]
    for at in range(first, end, STRIDE):
        for m in range(learners):
            _load(r, m, at, value_MxS[m])
            fill(share_M[m], share_MxS[m])
        _sort(learners, value_MxS, share_MxS)
        fill(np.float32(-0.0), sum_S)
        fill(ZERO, total_S)
        for m in range(low, high):
            add_weighted(value_MxS[m], share_MxS[m], sum_S, total_S)
        divide_within(value_MxS[low], value_MxS[high - 1], total_S, sum_S)
        stop = min(at + STRIDE, end)
        store(sum_S[: stop - at], out_F[at:stop])
    fence()


@kernel
def finish(
    r: Reading,
    cut: Segments,
    rule: Rule,
    step: OuterStep,
    f: MergeState,
    share: Share,
    room: Values,
    out: Outcome,
) -> None:
    """Average, outer step, publication and new anchor of a share of ranges."""
    part_S, sum_S = room[:STRIDE], room[STRIDE : 2 * STRIDE]
    trace_S, rest_S = room[2 * STRIDE : 3 * STRIDE], room[3 * STRIDE :]
    s = cut.first_R[share.first]
    end = cut.stop_S[cut.first_R[share.last] - 1]
    for at in range(cut.start_S[s], end, STRIDE):
        stop = min(at + STRIDE, end)
        while True:  # the segments that reach into this stride
            a, b = max(cut.start_S[s], at), min(cut.stop_S[s], stop)
            p = cut.piece_S[s]
            trace_B, rest_B = trace_S[a - at :], rest_S[a - at :]
            if rule.radial_P[p]:
                _outer(step, f, a, rule.scale_P[p], out.master_F[a:b], trace_B, rest_B)
            elif rule.share_M.size:
                _combine(r, rule.share_M, at, part_S, sum_S)
                _outer(step, f, a, 1.0, sum_S[a - at : b - at], trace_B, rest_B)
                store(sum_S[a - at : b - at], out.master_F[a:b])
            if cut.stop_S[s] > stop or s + 1 == cut.stop_S.size:
                break
            s += 1
            if cut.start_S[s] >= stop:
                break
        if step.steps and f.momentum_F.size:
            store(trace_S[: stop - at], out.momentum_F[at:stop])
        if step.publishes:
            _publish(step, f, at, stop, rest_S[: stop - at], sum_S, out)
    fence()


@kernel
def _outer(
    step: OuterStep,
    f: MergeState,
    a: int,
    scale: float,
    new_B: Values,
    trace_B: Values,
    rest_B: Values,
) -> None:
    """The outer step from value `a` on. `new_B` holds the average but for its scale, then what
    becomes of it; values times 1 are themselves.

    optax.sgd(rate, momentum, nesterov=True), with its roundings; without momentum plain SGD.
    """
    b = a + new_B.size
    if not step.steps:
        multiply(new_B, scale)
    elif not f.momentum_F.size:
        descend(step.descent, scale, f.master_F[a:b], f.anchor_F[a:b], new_B, rest_B)
    else:
        accelerate(
            (step.descent, step.momentum),
            scale,
            f.master_F[a:b],
            f.momentum_F[a:b],
            f.anchor_F[a:b],
            new_B,
            trace_B,
            rest_B,
        )


@kernel
def _publish(
    step: OuterStep, f: MergeState, at: int, stop: int, rest_B: Values, room_S: Values, out: Outcome
) -> None:
    """The payload and the anchor that everyone makes of it.

    `rest_B` is what the new parameters are from the anchor, if a step was made.
    """
    if step.keyframe:
        copy(out.master_F[at:stop], rest_B)
    elif not step.steps:
        subtract(out.master_F[at:stop], f.anchor_F[at:stop], rest_B)
    if step.codec == FP32:
        store(rest_B, out.payload[START + 4 * at : START + 4 * stop].view(np.float32))
    elif step.codec == BF16:
        half_B = room_S.view(np.uint16)[: stop - at]
        to_bf16(rest_B, half_B)
        store(half_B, out.payload[START + 2 * at : START + 2 * stop].view(np.uint16))
    else:
        values = out.anchor_F.size
        encode(step.codec, rest_B, at // BLOCK, values, out.payload, room_S)
        settle(step.codec, rest_B, at // BLOCK, values, out.payload)
    if not step.keyframe:
        add_to(f.anchor_F[at:stop], rest_B)
    store(rest_B, out.anchor_F[at:stop])
