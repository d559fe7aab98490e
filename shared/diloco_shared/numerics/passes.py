"""The passes of a merge over memory, compiled: contributions are decoded where they are used.

    squares   reads the contributions           norms, for radial-directional averaging
    direct    reads the contributions           sum of phi(delta_m), written; its norm
    finish    reads that sum and the fragment   outer step, publication, new anchor, written

Each works on strides of STRIDE values that stay in the second-level cache, and may be called for
disjoint ranges by several threads. Contributions are added up in fp32, in the order of learners,
each product and each sum rounded; squares in double precision.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from diloco_shared.numerics.codec.kernels import (
    INF,
    MAGNITUDE,
    START,
    as_bits,
    decode,
    encode,
    widen,
)
from diloco_shared.numerics.codec.layout import BF16, BLOCK, FP32
from diloco_shared.numerics.compiled import kernel
from diloco_shared.numerics.sums import STRIDE, WIDTH, Cut, Doubles, Values, add_squares, fold

assert STRIDE % BLOCK == 0  # no block of a codec lies in two strides

GROUP = 4  # contributions decoded before they are added up

# Of bf16 patterns, in 32 bits: mixed with Python's integers they would be worked on in 64.
HALF, ONE, TIE, SIGN, QUIET = (np.int32(x) for x in (16, 1, 0x7FFF, 0x8000, 0x7FC0))

Bytes = NDArray[np.uint8]
Halves = NDArray[np.uint16]
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


class Step(NamedTuple):
    """What `finish` does beyond averaging."""

    steps: bool  # Nesterov SGD
    publishes: bool
    descent: np.float32  # minus the rate
    momentum: np.float32  # 0: no momentum is kept
    codec: int  # of the publication
    keyframe: bool  # publishes the master, not its distance from the anchor


class State(NamedTuple):
    """A fragment in force; not written to."""

    master_F: Values
    momentum_F: Values  # empty without momentum
    anchor_F: Values


class Outcome(NamedTuple):
    """What becomes of it. On the way master_F holds the direction, anchor_F what is published."""

    master_F: Values
    momentum_F: Values
    anchor_F: Values
    payload: Bytes


def _typed_pointer(_context: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    pointer: Any = types.CPointer
    return pointer(types.uint8)(address), emit


_pointer: Any = intrinsic(_typed_pointer)  # to the byte at an address


def _typed_prefetch(_context: Any, address: Any) -> Any:
    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        takes = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], takes)
        # For reading, to the second-level cache, as data.
        builder.call(prefetch, [builder.inttoptr(args[0], byte), word(0), word(2), word(1)])
        return _context.get_dummy_value()

    return types.void(address), emit


# Asks for the cache line at an address, valid or not: processors themselves look ahead within a
# page of 4 KB only, and a stride of a contribution is seldom more.
_prefetch: Any = intrinsic(_typed_prefetch)
AHEAD = 4  # strides
LINE = 64  # bytes


# --- loops: each a kernel of its own, for there the compiler sees that it can vectorise them -----


@kernel
def _zero(out_B: Values) -> None:
    for i in range(out_B.size):
        out_B[i] = np.float32(0)


@kernel
def _copy(values_B: Values, out_B: Values) -> None:
    for i in range(values_B.size):
        out_B[i] = values_B[i]


@kernel
def _scale(values_B: Values, scale: float) -> None:
    for i in range(values_B.size):
        values_B[i] = np.float32(np.float64(values_B[i]) * scale)


@kernel
def _subtract(a_B: Values, b_B: Values, out_B: Values) -> None:
    for i in range(a_B.size):
        out_B[i] = a_B[i] - b_B[i]


@kernel
def _add(values_B: Values, out_B: Values) -> None:
    for i in range(values_B.size):
        out_B[i] = values_B[i] + out_B[i]


@kernel
def _rebase(now_B: Values, then_B: Values, out_B: Values) -> None:
    for i in range(now_B.size):
        out_B[i] += now_B[i] - then_B[i]


@kernel
def _add_one(part_S: Values, a: np.float32, sum_S: Values) -> None:
    for i in range(sum_S.size):
        sum_S[i] += part_S[i] * a


@kernel
def _add_four(parts: Values, factor_K: Values, sum_S: Values) -> None:
    """The same, four times: the sum is read and written once."""
    a_S, b_S = parts[:STRIDE], parts[STRIDE : 2 * STRIDE]
    c_S, d_S = parts[2 * STRIDE : 3 * STRIDE], parts[3 * STRIDE :]
    a, b, c, d = factor_K[0], factor_K[1], factor_K[2], factor_K[3]
    for i in range(sum_S.size):
        two = (sum_S[i] + a_S[i] * a) + b_S[i] * b
        sum_S[i] = (two + c_S[i] * c) + d_S[i] * d


@kernel
def _add_four_bf16(
    a_S: Halves, b_S: Halves, c_S: Halves, d_S: Halves, factor_K: Values, sum_S: Values
) -> None:
    """The same of bf16, without decoding it to memory first."""
    a, b, c, d = factor_K[0], factor_K[1], factor_K[2], factor_K[3]
    for i in range(sum_S.size):
        two = (sum_S[i] + widen(a_S[i]) * a) + widen(b_S[i]) * b
        sum_S[i] = (two + widen(c_S[i]) * c) + widen(d_S[i]) * d


@kernel
def _descend(master_B: Values, descent: np.float32, out_B: Values) -> None:
    """Plain SGD: `out_B` holds the gradient, then the new parameters."""
    for i in range(master_B.size):
        out_B[i] = master_B[i] + descent * out_B[i]


@kernel
def _accelerate(
    momentum: np.float32, descent: np.float32, trace_B: Values, out_B: Values, gradient_B: Values
) -> None:
    """The new trace, and -rate times the gradient looked ahead in place of the gradient."""
    for i in range(trace_B.size):
        trace = gradient_B[i] + momentum * trace_B[i]
        out_B[i] = trace
        gradient_B[i] = descent * (gradient_B[i] + momentum * trace)


@kernel
def _to_bf16(values_B: Values, out_B: Halves) -> None:
    """Patterns, to nearest, ties to even; NaN stays NaN."""
    for i in range(values_B.size):
        bits = as_bits(values_B[i])
        high = np.int32(bits >> HALF)
        nearest = np.int32(np.int32(np.int32(bits + TIE) + np.int32(high & ONE)) >> HALF)
        quiet = np.int32(np.int32(high & SIGN) | QUIET)
        out_B[i] = np.uint16(quiet if np.int32(bits & MAGNITUDE) > INF else nearest)


# --- strides -----------------------------------------------------------------------------------


@kernel
def _fetch(r: Reading, m: int, at: int) -> None:
    """Bring what contribution m has some strides after `at` nearer."""
    density = r.bytes_M[m] / r.values
    ahead = r.address_M[m] + np.uint64((at + AHEAD * STRIDE) * density)
    for k in range(0, int(STRIDE * density), LINE):
        _prefetch(ahead + np.uint64(k))


@kernel
def _load(r: Reading, m: int, at: int, out_S: Values) -> None:
    """The stride at `at` of contribution m, zeros after its end."""
    stop = min(at + STRIDE, r.values)
    _fetch(r, m, at)
    data = carray(_pointer(r.address_M[m]), (r.bytes_M[m],))
    decode(r.codec_M[m], data, r.values, at, stop, out_S)
    _zero(out_S[stop - at :])
    if r.behind_M[m]:
        _rebase(r.anchor_F[at:stop], r.previous_F[at:stop], out_S)


@kernel
def _halves(r: Reading, m: int, at: int) -> Halves:
    """The stride at `at` of a contribution in bf16."""
    stop = min(at + STRIDE, r.values)
    _fetch(r, m, at)
    data = carray(_pointer(r.address_M[m]), (r.bytes_M[m],))
    return data[START + 2 * at : START + 2 * stop].view(np.uint16)


@kernel
def _combine(r: Reading, factor_M: Values, at: int, parts: Values, sum_S: Values) -> None:
    """sum factor_m delta_m over one stride; what has factor 0 is not read.

    -0 is what a sum begins with: 0 would turn the -0 of a single contribution into 0.
    """
    factor_K, who_K = np.empty(GROUP, np.float32), np.empty(GROUP, np.int64)
    sum_S[:] = np.float32(-0.0)
    held, plain = 0, True
    for m in range(factor_M.size):
        if factor_M[m] != 0:
            factor_K[held], who_K[held] = factor_M[m], m
            plain = plain and r.codec_M[m] == BF16 and not r.behind_M[m]
            held += 1
        if held == GROUP and plain:
            a_S, b_S = _halves(r, who_K[0], at), _halves(r, who_K[1], at)
            c_S, d_S = _halves(r, who_K[2], at), _halves(r, who_K[3], at)
            _add_four_bf16(a_S, b_S, c_S, d_S, factor_K, sum_S[: a_S.size])
        elif held == GROUP or m == factor_M.size - 1:
            for k in range(held):
                _load(r, who_K[k], at, parts[k * STRIDE : (k + 1) * STRIDE])
            if held == GROUP:
                _add_four(parts, factor_K, sum_S)
            else:
                for k in range(held):
                    _add_one(parts[k * STRIDE :], factor_K[k], sum_S)
        if held == GROUP:
            held, plain = 0, True


# --- passes ------------------------------------------------------------------------------------


@kernel
def squares(r: Reading, cut: Cut, radial_P: Flags, first: int, last: int, out_SxM: Doubles) -> None:
    """Sums of squares of every contribution over the segments of ranges [first, last)."""
    part_S, lanes_W = np.empty(STRIDE, np.float32), np.empty(WIDTH, np.float64)
    for s in range(cut.first_R[first], cut.first_R[last]):
        if not radial_P[cut.piece_S[s]]:
            continue
        start, stop = cut.start_S[s], cut.stop_S[s]
        for m in range(out_SxM.shape[1]):
            lanes_W[:] = 0.0
            for at in range(start // STRIDE * STRIDE, stop, STRIDE):
                _load(r, m, at, part_S)
                _zero(part_S[: max(start - at, 0)])
                _zero(part_S[min(stop - at, STRIDE) :])
                add_squares(part_S, lanes_W)
            out_SxM[s, m] = fold(lanes_W)


@kernel
def direct(
    r: Reading,
    cut: Cut,
    radial_P: Flags,
    factor_PxM: Values,
    first: int,
    last: int,
    out_F: Values,
    squares_S: Doubles,
) -> None:
    """Directions of the radial pieces into `out_F`, and their sums of squares."""
    parts, sum_S = np.empty(GROUP * STRIDE, np.float32), np.empty(STRIDE, np.float32)
    lanes_W = np.empty(WIDTH, np.float64)
    for s in range(cut.first_R[first], cut.first_R[last]):
        p = cut.piece_S[s]
        if not radial_P[p]:
            continue
        start, stop = cut.start_S[s], cut.stop_S[s]
        lanes_W[:] = 0.0
        for at in range(start // STRIDE * STRIDE, stop, STRIDE):
            _combine(r, factor_PxM[p], at, parts, sum_S)
            a, b = max(start - at, 0), min(stop - at, STRIDE)
            _zero(sum_S[:a])
            _zero(sum_S[b:])
            add_squares(sum_S, lanes_W)
            _copy(sum_S[a:b], out_F[at + a : at + b])
        squares_S[s] = fold(lanes_W)


@kernel
def finish(
    r: Reading, cut: Cut, rule: Rule, step: Step, f: State, first: int, last: int, out: Outcome
) -> None:
    """Average, outer step, publication and new anchor of ranges [first, last)."""
    parts, sum_S = np.empty(GROUP * STRIDE, np.float32), np.empty(STRIDE, np.float32)
    s = cut.first_R[first]
    end = cut.stop_S[cut.first_R[last] - 1]
    for at in range(cut.start_S[s], end, STRIDE):
        stop = min(at + STRIDE, end)
        while True:  # the segments that reach into this stride
            a, b = max(cut.start_S[s], at), min(cut.stop_S[s], stop)
            p = cut.piece_S[s]
            if rule.radial_P[p]:
                _scale(out.master_F[a:b], rule.scale_P[p])
            elif rule.share_M.size:
                _combine(r, rule.share_M, at, parts, sum_S)
                _copy(sum_S[a - at : b - at], out.master_F[a:b])
            if cut.stop_S[s] > stop or s + 1 == cut.stop_S.size:
                break
            s += 1
            if cut.start_S[s] >= stop:
                break
        if step.steps:
            _nesterov(step, f, at, stop, out)
        if step.publishes:
            _publish(step, f, at, stop, out)


@kernel
def _nesterov(step: Step, f: State, at: int, stop: int, out: Outcome) -> None:
    """optax.sgd(rate, momentum, nesterov=True), with its roundings; no momentum: plain SGD."""
    new_S = out.master_F[at:stop]
    if step.momentum == 0:
        _descend(f.master_F[at:stop], step.descent, new_S)
    else:
        trace_S = f.momentum_F[at:stop]
        _accelerate(step.momentum, step.descent, trace_S, out.momentum_F[at:stop], new_S)
        _add(f.master_F[at:stop], new_S)


@kernel
def _publish(step: Step, f: State, at: int, stop: int, out: Outcome) -> None:
    """The payload and the anchor that everyone makes of it."""
    new_S = out.anchor_F[at:stop]
    if step.keyframe:
        _copy(out.master_F[at:stop], new_S)
    else:
        _subtract(out.master_F[at:stop], f.anchor_F[at:stop], new_S)
    if step.codec == FP32:
        _copy(new_S, out.payload[START + 4 * at : START + 4 * stop].view(np.float32))
    else:
        if step.codec == BF16:
            _to_bf16(new_S, out.payload[START + 2 * at : START + 2 * stop].view(np.uint16))
        else:
            encode(step.codec, out.anchor_F, at // BLOCK, (stop + BLOCK - 1) // BLOCK, out.payload)
        decode(step.codec, out.payload, out.anchor_F.size, at, stop, new_S)
    if not step.keyframe:
        _add(f.anchor_F[at:stop], new_S)
