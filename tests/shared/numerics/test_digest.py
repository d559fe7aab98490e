"""Digests: equal exactly for equal bits."""

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from diloco_shared.numerics.arrays import digest_array
from diloco_shared.protocol.chunks import digest_bytes


def test_xxh3_of_the_little_endian_bytes() -> None:
    values = np.array([1.0, -2.0], np.float32)
    raw = bytes.fromhex("0000803f000000c0")
    assert digest_array(values) == digest_bytes(raw)
    # The published test vector of XXH3-128 for no bytes and seed 0.
    assert digest_bytes(b"") == "99aa06d3014798d86001c324468d497f"
    assert digest_bytes(memoryview(raw)) == digest_bytes(bytearray(raw)) == digest_bytes(raw)


@examples(50)
@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20),
    st.integers(0, 19),
    st.integers(0, 31),
)
def test_any_bit_matters(raw: list[int], place: int, bit: int) -> None:
    bits = np.array(raw, np.uint32)
    digest = digest_array(bits.view(np.float32))
    assert digest_array(bits.copy().view(np.float32)) == digest
    bits[place % len(bits)] ^= np.uint32(1 << bit)
    assert digest_array(bits.view(np.float32)) != digest


def test_zeros_of_either_sign_differ() -> None:
    assert digest_array(np.zeros(1, np.float32)) != digest_array(-np.zeros(1, np.float32))


def test_a_view_digests_like_its_copy() -> None:
    view = np.arange(20, dtype=np.float32)[::3]
    assert digest_array(view) == digest_array(view.copy())


def test_only_fp32_has_a_digest() -> None:
    with pytest.raises(AssertionError, match="float64"):
        digest_array(np.zeros(2))  # type: ignore[arg-type]
