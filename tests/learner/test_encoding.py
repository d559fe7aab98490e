"""Encoding on the device: the compiled encoder's bytes, one program for every round."""

from functools import partial
from itertools import pairwise

import jax
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from diloco_learner.exchange.encoding import Encoded, encode, feeds_back
from diloco_shared.numerics import codec
from diloco_shared.spec.codecs import CODECS, CodecFacts

quick = examples(40)
f32 = np.float32
SIZE = 515  # two blocks and an odd rest: one compilation for all examples
BLOCKS = [row.name for row in CODECS if row.scaled]
ENCODERS = {name: jax.jit(partial(encode, name)) for name in codec.NAMES}


@st.composite
def values(draw: st.DrawFn) -> np.ndarray:
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    kind = draw(
        st.sampled_from(["normal", "bits", "coarse", "quarters", "tiny", "large", "sparse"])
    )
    if kind == "bits":
        return rng.integers(0, 2**32, SIZE, dtype=np.uint32).view(f32)
    x = rng.normal(size=SIZE) * 10.0 ** draw(st.integers(-30, 37))
    if kind == "coarse":
        x = rng.integers(-14, 15, SIZE) / 2.0
    elif kind == "quarters":
        x = rng.integers(-24, 25, SIZE) / 4.0 * 2.0 ** draw(st.integers(-124, 124))
    elif kind == "large":
        x = rng.uniform(-1, 1, SIZE) * np.finfo(f32).max
    elif kind == "tiny":  # around the least scale, and subnormal
        x = rng.normal(size=SIZE) * 2.0 ** draw(st.integers(-140, -112))
    elif kind == "sparse":
        x[rng.random(SIZE) < 0.9] = 0
    return x.astype(f32)


@quick
@given(values(), st.sampled_from(codec.NAMES))
def test_the_device_gives_the_bytes_of_the_compiled_encoder(x: np.ndarray, name: str) -> None:
    parts, _ = ENCODERS[name](x)
    with np.errstate(all="ignore"):
        assert Encoded(name, SIZE, parts).fetch() == codec.encode(name, x)


@quick
@given(values(), st.sampled_from(codec.NAMES))
def test_decoded_and_error_are_the_value(x: np.ndarray, name: str) -> None:
    """Exactly, but for errors that are subnormal: XLA on a CPU flushes them to zero."""
    with np.errstate(all="ignore"):
        parts, error = ENCODERS[name](x)
        decoded = codec.decode(name, Encoded(name, SIZE, parts).fetch(), SIZE)
        off = np.abs(decoded.astype(np.float64) + np.asarray(error) - x)
    assert (off[np.isfinite(decoded)] < 2.0**-126).all()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("size", [1, 256])
def test_sizes_at_the_edges(name: str, size: int) -> None:
    x = np.random.default_rng(size).normal(size=size).astype(f32)
    parts, error = ENCODERS[name](x)
    assert error.shape == (size,)
    assert Encoded(name, size, parts).fetch() == codec.encode(name, x)


def test_below_16_bits_errors_are_fed_back() -> None:
    below = [row.name for row in CODECS if row.bits < 16]
    assert [name for name in codec.NAMES if feeds_back(name)] == below


@pytest.mark.parametrize("row", [row for row in CODECS if row.levels], ids=lambda row: row.name)
def test_a_device_finds_the_levels_beside_every_midpoint(row: CodecFacts) -> None:
    """Of scales from the least to the largest."""
    number = codec.find(row.name)
    least, most = codec.kernels.SCALE_MIN_C[number], codec.kernels.SCALE_MAX_C[number]
    patterns = np.unique(np.append(np.arange(least, most, 61, dtype=np.int32), most))
    scales_N = (patterns << 16).view(f32).astype(float)
    middles = np.array([(a + b) / 2 for a, b in pairwise(row.levels)])
    at_Nx7 = (scales_N[:, None] * middles).astype(f32)
    values_NxK = np.zeros((scales_N.size, 256), f32)
    values_NxK[:, 0], values_NxK[:, 1:8] = scales_N * row.levels[-1], at_Nx7
    values_NxK[:, 8:15] = -(at_Nx7.view(np.int32) - 1).view(f32)
    x = values_NxK.reshape(-1)
    parts, error = jax.jit(partial(encode, row.name))(x)
    payload = codec.encode(row.name, x)
    assert Encoded(row.name, x.size, parts).fetch() == payload
    wanted = x - codec.decode(row.name, payload, x.size)
    normal = np.abs(wanted) >= np.finfo(f32).tiny
    np.testing.assert_array_equal(np.asarray(error)[normal], wanted[normal])
