"""Wire formats: exact or within their bound, and the same bytes from numpy and from jax."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from diloco_shared.numerics import codec

quick = examples(80)
SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)
BF16_MAX = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)

# Any bits at all: normal and subnormal numbers, infinities, NaNs.
bits = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40).map(
    lambda raw: np.array(raw, np.uint32).view(np.float32)
)
# Neither subnormal nor about to round to infinity.
normal = st.floats(
    min_value=SMALLEST_NORMAL, max_value=BF16_MAX, width=32, allow_nan=False
).flatmap(lambda x: st.sampled_from([x, -x]))
normals = st.lists(normal, min_size=1, max_size=40).map(lambda xs: np.array(xs, np.float32))


@quick
@given(bits)
def test_fp32_is_exact_to_the_bit(values: np.ndarray) -> None:
    data = codec.encode("fp32", values)
    assert codec.decode("fp32", data, len(values)).tobytes() == values.tobytes()


@quick
@given(normals)
def test_bf16_is_within_its_bound(values: np.ndarray) -> None:
    decoded = codec.decode("bf16", codec.encode("bf16", values), len(values))
    error = np.abs(values.astype(np.float64) - decoded)
    assert (error <= 2.0**-8 * np.abs(values.astype(np.float64))).all()


@quick
@given(normals)
def test_bf16_of_what_is_bf16_already_is_exact(values: np.ndarray) -> None:
    once = codec.decode("bf16", codec.encode("bf16", values), len(values))
    again = codec.decode("bf16", codec.encode("bf16", once), len(values))
    assert again.tobytes() == once.tobytes()


@quick
@given(normals)
def test_learners_encode_with_jax_to_the_same_bytes(values: np.ndarray) -> None:
    by_jax = np.asarray(jnp.asarray(values).astype(jnp.bfloat16)).tobytes()
    assert codec.encode("bf16", values)[8:] == by_jax


def test_ties_go_to_even() -> None:
    one, step = 1.0, 2.0**-7  # neighbouring bf16 values above 1 are a step apart
    values = np.array([one + step / 2, one + 3 * step / 2], np.float32)
    decoded = codec.decode("bf16", codec.encode("bf16", values), 2)
    np.testing.assert_array_equal(decoded, np.array([one, one + 2 * step], np.float32))


def test_bytes_are_little_endian() -> None:
    values = np.array([1.0], np.float32)
    assert codec.encode("fp32", values).hex() == "44460100010000000000803f"
    assert codec.encode("bf16", values).hex() == "4446010101000000803f"


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_what_is_not_finite_survives_so_that_the_gate_sees_it(name: str) -> None:
    values = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    decoded = codec.decode(name, codec.encode(name, values), 4)
    assert np.isnan(decoded[0])
    np.testing.assert_array_equal(decoded[1:], values[1:])


def test_bf16_rounds_beyond_its_range_to_infinity() -> None:
    values = np.array([np.finfo(np.float32).max], np.float32)
    assert np.isinf(codec.decode("bf16", codec.encode("bf16", values), 1))[0]


def test_sizes_and_headers_that_do_not_fit_are_refused() -> None:
    sizes = {"fp32": 1036, "bf16": 522, "int8": 269, "int4": 141, "e3m0": 141}
    assert {name: codec.bytes_of(name, 257) for name in sizes} == sizes
    data = codec.encode("bf16", np.zeros(2, np.float32))
    faults = {
        data[:5]: "5 bytes: shorter than a header of 8",
        b"PK" + data[2:]: "begins with 504b, not with 4446",
        data[:2] + b"\x02" + data[3:]: "format version 2, this side reads 1",
        data[:3] + b"\x00" + data[4:]: "a header of 2 values of fp32 where 2 of bf16",
        data[:3] + b"\x09" + data[4:]: r"an unknown codec \(9\) where",
        data[:4] + b"\x03" + data[5:]: "a header of 3 values of bf16 where 2",
        data + b"\x00": "13 bytes of bf16 for 2 values, not 12",
    }
    for bad, message in faults.items():
        with pytest.raises(ValueError, match=message):
            codec.decode("bf16", bad, 2)
    with pytest.raises(ValueError, match=r"unknown codec 'int3'.*fp32, bf16, int8, int4, e3m0"):
        codec.decode("int3", data, 2)
    with pytest.raises(ValueError, match="cut more fragments"):
        codec.header("fp32", 2**32)
    assert codec.count("bf16", data) == 2
