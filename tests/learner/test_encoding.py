"""Encoding on the device: the compiled encoder's bytes, one program for every round."""

from functools import partial

import jax
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from diloco_learner.exchange.encoding import Encoded, encode, feeds_back
from diloco_shared.numerics import codec

quick = examples(40)
f32 = np.float32
SIZE = 515  # two blocks and an odd rest: one compilation for all examples
ENCODERS = {name: jax.jit(partial(encode, name)) for name in codec.NAMES}


@st.composite
def values(draw: st.DrawFn) -> np.ndarray:
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    kind = draw(st.sampled_from(["normal", "bits", "coarse", "tiny", "sparse"]))
    if kind == "bits":
        return rng.integers(0, 2**32, SIZE, dtype=np.uint32).view(f32)
    x = rng.normal(size=SIZE) * 10.0 ** draw(st.integers(-30, 37))
    if kind == "coarse":
        x = rng.integers(-14, 15, SIZE) / 2.0
    elif kind == "tiny":  # around the least scale, and subnormal
        x = rng.normal(size=SIZE) * 2.0 ** draw(st.integers(-140, -114))
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


@pytest.mark.parametrize("name", ["int8", "int4", "e3m0"])
@pytest.mark.parametrize("size", [1, 256])
def test_sizes_at_the_edges(name: str, size: int) -> None:
    x = np.random.default_rng(size).normal(size=size).astype(f32)
    parts, error = ENCODERS[name](x)
    assert error.shape == (size,)
    assert Encoded(name, size, parts).fetch() == codec.encode(name, x)


def test_below_16_bits_errors_are_fed_back() -> None:
    assert [name for name in codec.NAMES if feeds_back(name)] == ["int8", "int4", "e3m0"]
