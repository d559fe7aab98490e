"""Contributions encoded where they arise: the bytes of numerics/codec, by jitted array code.

Only what is sent leaves the device. Every operation is an integer one or a multiplication rounded
once, so a CPU and a GPU give the same bytes as the compiled encoder (tested): no division, whose
rounding differs between devices, and no number below the normal ones, which some flush to zero.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from diloco_shared.memory.pages import joined
from diloco_shared.numerics import codec
from diloco_shared.numerics.codec import kernels
from diloco_shared.spec.codecs import BLOCK, CODECS, E3M0, INT4, INT8, blocks_of, facts, find

# 1 / (1 + k / 128) for the 7 stored bits k of a bf16 significand, as bits of fp32.
_INVERSE = (np.float32(1) / (1 + np.arange(128, dtype=np.float32) / 128)).view(np.int32)

Parts = tuple[jax.Array, ...]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Handle of an encoded fragment: what follows its header, on the device."""

    codec: str
    values: int
    parts: Parts  # perhaps longer than it takes: devices have equal parts of them

    def fetch(self) -> memoryview:
        """The payload (call it off the train thread: it waits for the device)."""
        header, sizes = codec.header(self.codec, self.values), sizes_of(self.codec, self.values)
        pairs = zip(self.parts, sizes, strict=True)
        return joined([header, *(np.asarray(p)[:n].view(np.uint8).data for p, n in pairs)])


def sizes_of(name: str, values: int) -> tuple[int, ...]:
    """Elements of each part that follows the header."""
    codec = facts(name)
    return (blocks_of(values), codec.data_bytes(values)) if codec.scaled else (values,)


def feeds_back(name: str) -> bool:
    """Whether the error of the codec is worth carrying into the next contribution."""
    return facts(name).scaled


def encode(name: str, values_F: jax.Array) -> tuple[Parts, jax.Array]:
    """(what follows the header, the error values - decoded); traceable, shapes are static.

    The error is exact in fp32, but for numbers below the normal ones.
    """
    if name == "fp32":
        return (values_F,), jnp.zeros_like(values_F)
    if name == "bf16":
        rounded_F = values_F.astype(jnp.bfloat16)
        return (rounded_F,), values_F - rounded_F.astype(jnp.float32)
    F = values_F.size
    padded = jnp.pad(values_F, (0, blocks_of(F) * BLOCK - F))
    scales_N, quanta, decoded = _BLOCK_CODECS[find(name)](padded)
    error_F = (padded - decoded)[:F]
    if facts(name).bits == 4:
        pairs = quanta.reshape(-1, 2) & 15
        quanta = (pairs[:, 0] | (pairs[:, 1] << 4)).astype(jnp.uint8)
    return (scales_N.astype(jnp.uint16), quanta[: sizes_of(name, F)[1]]), error_F


def _bits(values: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(values, jnp.int32)


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _scales(values: jax.Array, number: int) -> jax.Array:
    """bf16 patterns of the blocks' scales, int32, as `kernels.block_scale`."""
    size = _bits(values) & kernels.MAGNITUDE
    # Rows of a block against each other first: that goes in vectors.
    top_N = size.reshape(-1, 8, BLOCK // 8).max(axis=1).max(axis=1)
    bits_N = _bits(_float(top_N) * kernels.SHARE_C[number])
    nearest_N = (bits_N + 0x7FFF + ((bits_N >> 16) & 1)) >> 16
    scales_N = jnp.minimum(nearest_N, kernels.SCALE_MAX_C[number])
    scales_N = jnp.where(scales_N < kernels.SCALE_MIN_C[number], 0, scales_N)
    scales_N = jnp.where(top_N >= kernels.INF, kernels.SCALE_NAN, scales_N)
    return _once(scales_N)


def _once(x: jax.Array) -> jax.Array:
    """Asks XLA to keep it: fused into each of its uses it would be computed again there."""
    kept: jax.Array = lax.optimization_barrier(x)
    return kept


def _usable(scales_N: jax.Array) -> jax.Array:
    return ((scales_N != 0) & (scales_N != kernels.SCALE_NAN))[:, None]


def _integers(number: int) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
    """int8 or int4 of whole blocks: (scales_N, quanta as int8, decoded)."""

    def quantise(values: jax.Array) -> tuple[jax.Array, ...]:
        scales_N = _scales(values, number)
        # A reciprocal by table and exponent: rounded as a division that rounds once.
        table = jnp.asarray(_INVERSE)[scales_N & 127]
        inverse_N = _float(table + ((127 - (scales_N >> 7)) << 23))
        near_NxK = jnp.round(values.reshape(-1, BLOCK) * inverse_N[:, None])
        quanta_NxK = _once(jnp.where(_usable(scales_N), near_NxK, 0).astype(jnp.int8))
        decoded_NxK = quanta_NxK.astype(jnp.float32) * _float(scales_N << 16)[:, None]
        return scales_N, quanta_NxK.reshape(-1), decoded_NxK.reshape(-1)

    return quantise


def _powers(values: jax.Array) -> tuple[jax.Array, ...]:
    """e3m0 of whole blocks: (scales_N, nibbles as int8, decoded); `kernels._power_nearest`."""
    scales_N = _scales(values, E3M0)
    scale_Nx1 = _float(scales_N << 16)[:, None]
    bits_NxK = _bits(values).reshape(-1, BLOCK)
    size_NxK = bits_NxK & kernels.MAGNITUDE
    middle_Nx1, least_Nx1 = _bits(scale_Nx1 * 0.75), _bits(scale_Nx1 * 2.0**-7)
    m_NxK = jnp.clip(((size_NxK - middle_Nx1) >> 23) + 7, 1, 7) | ((bits_NxK >> 28) & 8)
    some_NxK = (size_NxK >= least_Nx1) & _usable(scales_N)
    nibbles_NxK = _once(jnp.where(some_NxK, m_NxK, 0).astype(jnp.int8))
    wide_NxK = nibbles_NxK.astype(jnp.int32)
    power_NxK = ((wide_NxK & 7) + kernels.POWER_ZERO) << 23 | ((wide_NxK & 8) << 28)
    decoded_NxK = _float(jnp.where(wide_NxK > 0, power_NxK, 0)) * scale_Nx1
    return scales_N, nibbles_NxK.reshape(-1), decoded_NxK.reshape(-1)


def _levels(number: int) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
    """A codec with levels, of whole blocks: (scales_N, nibbles as int8, decoded)."""
    midpoints_7 = kernels.MIDPOINTS_Cx7[number]
    # From one level to the next in the bits of fp32: sums of integers are exact.
    steps_7 = np.diff(kernels.LEVELS_Cx8[number].view(np.int32)).tolist()

    def quantise(values: jax.Array) -> tuple[jax.Array, ...]:
        scales_N = _scales(values, number)
        scale_Nx1 = _float(scales_N << 16)[:, None]
        bits_NxK = _bits(values).reshape(-1, BLOCK)
        size_NxK = bits_NxK & kernels.MAGNITUDE
        # As `kernels._level_nearest`: how many midpoints a magnitude reaches.
        reached = (size_NxK >= _bits(scale_Nx1 * middle) for middle in midpoints_7)
        m_NxK = sum(more.astype(jnp.int32) for more in reached)
        some_NxK = (m_NxK > 0) & _usable(scales_N)
        nibbles_NxK = jnp.where(some_NxK, m_NxK | ((bits_NxK >> 28) & 8), 0).astype(jnp.int8)
        nibbles_NxK = _once(nibbles_NxK)
        wide_NxK = nibbles_NxK.astype(jnp.int32)
        m_NxK = wide_NxK & 7
        level_NxK = sum(jnp.where(m_NxK > k, step, 0) for k, step in enumerate(steps_7))
        decoded_NxK = _float(level_NxK | ((wide_NxK & 8) << 28)) * scale_Nx1
        return scales_N, nibbles_NxK.reshape(-1), decoded_NxK.reshape(-1)

    return quantise


_BLOCK_CODECS: dict[int, Callable[[jax.Array], tuple[Any, ...]]] = {
    INT8: _integers(INT8),
    INT4: _integers(INT4),
    E3M0: _powers,
} | {number: _levels(number) for number, row in enumerate(CODECS) if row.levels}


# --------------------------------------------------------------------------------------------------
# Error feedback (docs/explanation/algorithm.md, What is sent): what quantisation withheld is given
# later.
#
# The residual of a fragment is what its merged contributions still owe. A contribution encodes
# pseudo-gradient + residual; the error of that is *pending* until a publication tells whether the
# contribution was merged. Merged: the error is the new residual. Not merged: nothing was given, the
# residual stays, and the error is forgotten, since the next contribution measures the pseudo-
# gradient anew. Adoption overwrites the parameters but not the residual: it belongs to merged work.
#
# So at any time   sum of merged decoded contributions + residual = sum of their pseudo-gradients,
# to the rounding of one addition per value and round. A new incarnation begins with a residual of
# zero: the old one dies with its process.

Array = Any  # fp32 of shape (F,), of numpy or on a device

# Pending contributions per fragment. Two rounds of a fragment are H steps apart, so a third is
# pending only while publications are skipped or late by more than a whole turn; the oldest then
# counts as not merged. Each costs 8 bytes per value on the device.
PENDING_MAX = 2


@dataclass(frozen=True, slots=True)
class PendingEncoding:
    """An undecided contribution: the residual that went into it, and the error it left."""

    given: Array
    error: Array


@dataclass(slots=True)
class Feedback:
    """Residual of one fragment, and the errors that may replace it."""

    residual: Array
    pending: dict[int, PendingEncoding] = field(default_factory=dict)  # by round

    def sent(self, round_: int, error: Array) -> None:
        """A contribution to that round went out; a later term's to the same round replaces it."""
        self.pending[round_] = PendingEncoding(self.residual, error)
        if len(self.pending) > PENDING_MAX:
            del self.pending[min(self.pending)]

    def decided(self, round_: int, merged: bool) -> None:
        """A publication told what became of the contribution to that round."""
        was = self.pending.pop(round_, None)
        if was is None or not merged:
            return
        if was.given is self.residual:
            self.residual = was.error
        else:
            # An earlier contribution was merged meanwhile: what went in is not owed twice.
            self.residual = self.residual - was.given + was.error
