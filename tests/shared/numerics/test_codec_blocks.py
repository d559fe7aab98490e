"""Block codecs: the bytes against a plain reference, the promised bounds, nothing lost silently."""

import json
import struct
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from diloco_shared.numerics import codec
from diloco_shared.spec.codecs import CODECS, facts, find

GOLDEN = Path(__file__).parents[2] / "golden" / "codec.json"
NAMES = tuple(row.name for row in CODECS if row.scaled)
# Of those whose values are a table: its magnitudes, in units of the scale.
LEVELS = {"e3m0": (0, *(2.0**e for e in range(-6, 1)))} | {
    row.name: row.levels for row in CODECS if row.levels
}
LARGEST = {"int8": 127, "int4": 7} | {name: levels[-1] for name, levels in LEVELS.items()}
# Scales below become zero.
LEAST = dict.fromkeys(NAMES, 2.0**-125) | {
    name: 2.0**-125 / levels[1] for name, levels in LEVELS.items()
}
quick = examples(60)
f32 = np.float32

# Arrays of up to three blocks: any bits at all, or numbers over a wide range with a shared scale.
sizes = st.sampled_from([1, 2, 7, 255, 256, 257, 511, 512, 700])


@st.composite
def arrays(draw: st.DrawFn, *, finite: bool = False) -> np.ndarray:
    size, rng = draw(sizes), np.random.default_rng(draw(st.integers(0, 10**6)))
    kind = draw(st.sampled_from(["normal", "wide", "coarse", "quarters", "zero", "one"]))
    values = rng.normal(size=size) * 10.0 ** draw(st.integers(-36, 36))
    if kind == "wide":
        values = np.sign(values) * np.exp(rng.uniform(-80, 80, size))
    elif kind == "coarse":  # ties everywhere
        values = rng.integers(-14, 15, size) / 2.0
    elif kind == "quarters":
        values = rng.integers(-24, 25, size) / 4.0
    elif kind == "zero":
        values *= 0
    elif kind == "one":
        values[rng.integers(size, size=size // 2)] = 0
    array = values.astype(f32)
    if not finite and draw(st.booleans()):
        where = rng.integers(size, size=3)
        array[where] = rng.integers(0, 2**32, 3, dtype=np.uint32).view(f32)
    return array


def reference(name: str, values_F: np.ndarray) -> bytes:
    """The format as its description says it, value by value."""
    scales, quanta = [], []
    for at in range(0, len(values_F), 256):
        block = values_F[at : at + 256]
        scale = f32(0)
        if not np.isfinite(block).all():
            scale = f32(np.nan)
        else:
            scale = np.max(np.abs(block)) * f32(1 / LARGEST[name])
            scale = min(f32(scale.astype(ml_dtypes.bfloat16)), f32(2**127 * (2 - 2**-7)))
            if float(scale) * LARGEST[name] > np.finfo(f32).max:  # the next smaller bf16
                scale = (scale.view(np.uint32) - 0x10000).view(f32)
            scale = f32(0) if scale < LEAST[name] else scale
        scales.append(struct.pack("<H", np.float32(scale).view(np.uint32) >> 16))
        for x in block:
            if scale == 0 or np.isnan(scale):
                quanta.append(0)
            elif name in LEVELS:
                distances = [abs(abs(float(x)) - y * float(scale)) for y in LEVELS[name]]
                m = max(m for m in range(8) if distances[m] == min(distances))
                quanta.append(m | (8 if x < 0 and m else 0))
            else:
                quanta.append(int(np.rint(x * (f32(1) / scale))))
    if name == "int8":
        packed = bytes(q & 255 for q in quanta)
    else:
        quanta += [0] * (len(quanta) % 2)
        packed = bytes((a & 15) | (b & 15) << 4 for a, b in zip(*[iter(quanta)] * 2, strict=True))
    header = b"DF" + struct.pack("<BBI", 1, find(name), len(values_F))
    return header + b"".join(scales) + packed


@quick
@given(arrays(), st.sampled_from(NAMES))
def test_the_bytes_are_those_of_the_description(values: np.ndarray, name: str) -> None:
    with np.errstate(all="ignore"):
        expected = reference(name, values)
    assert codec.encode(name, values) == expected


def test_small_vectors_by_hand() -> None:
    values = np.array([7, -3.5, 2.5, -1.4, 0], f32)  # the scale of int4 is 1
    # 4,4 in two's complement: -3.5 -> -4 and 2.5 -> 2, ties to even.
    assert codec.encode("int4", values).hex() == "4446010305000000803fc7f200"
    np.testing.assert_array_equal(
        codec.decode("int4", codec.encode("int4", values), 5), [7, -4, 2, -1, 0]
    )
    values = np.array([127, -126.5, 0.5, 1.5], f32)
    assert codec.encode("int8", values).hex() == "4446010204000000803f7f820002"
    values = np.array([-4, 3, 1.5, 1.49, 2**-5], f32)  # the scale is 4: a tie goes outwards
    assert codec.encode("e3m0", values).hex() == "444601040500000080407f5601"
    np.testing.assert_array_equal(
        codec.decode("e3m0", codec.encode("e3m0", values), 5), [-4, 4, 2, 1, 2**-4]
    )
    values = np.array([6, -5, 3.49, -0.25, 0.24, 2.5], f32)  # the scale is 1: a tie goes outwards
    assert codec.encode("e2m1", values).hex() == "4446010506000000803ff79550"
    np.testing.assert_array_equal(
        codec.decode("e2m1", codec.encode("e2m1", values), 6), [6, -6, 3, -0.5, 0, 3]
    )


@quick
@given(arrays(finite=True), st.sampled_from(NAMES))
def test_errors_stay_within_their_bounds(values: np.ndarray, name: str) -> None:
    decoded = codec.decode(name, codec.encode(name, values), len(values)).astype(np.float64)
    for at in range(0, len(values), 256):
        x, y = values[at : at + 256].astype(np.float64), decoded[at : at + 256]
        top, error = np.max(np.abs(x)), np.abs(x - y)
        if not y.any():
            assert top < LARGEST[name] * 2 * LEAST[name]
            continue
        scale = top / LARGEST[name] * (1 + 2.0**-7)
        if name in LEVELS:  # half of a gap, as a share of x in its middle; or x, which became 0
            share = max((b - a) / (b + a) for a, b in pairwise(LEVELS[name][1:]))
            least = scale * LEVELS[name][1] / 2
            assert (error <= np.maximum(np.abs(x) * share, least)).all()
        else:
            assert (error <= scale * (0.5 + 2.0**-16)).all()
        assert error.max() <= facts(name).error * top
        assert top - np.max(np.abs(y)) <= top * 2.0**-8 * (1 + 2.0**-7), "clips too much"


@quick
@given(arrays(finite=True), st.sampled_from(NAMES))
def test_value_minus_decoded_loses_nothing(values: np.ndarray, name: str) -> None:
    """So that error feedback is exact."""
    decoded = codec.decode(name, codec.encode(name, values), len(values))
    left = (values - decoded).astype(np.float64)
    np.testing.assert_array_equal(left + decoded, values.astype(np.float64))


@quick
@given(arrays(finite=True), st.sampled_from(NAMES))
def test_what_was_decoded_encodes_to_the_same_values(values: np.ndarray, name: str) -> None:
    once = codec.decode(name, codec.encode(name, values), len(values))
    again = codec.decode(name, codec.encode(name, once), len(values))
    np.testing.assert_array_equal(again, once)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_with_a_value_that_is_not_finite_is_not_finite(name: str, bad: float) -> None:
    """The gate refuses it; the blocks beside it are whole."""
    values = np.linspace(-1, 1, 600, dtype=f32)
    values[300] = bad
    decoded = codec.decode(name, codec.encode(name, values), 600)
    assert np.isnan(decoded[256:512]).all()
    assert np.isfinite(decoded[:256]).all() and np.isfinite(decoded[512:]).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_numbers_stay_finite(name: str) -> None:
    values = np.full(3, np.finfo(f32).max, f32)
    decoded = codec.decode(name, codec.encode(name, values), 3)
    np.testing.assert_allclose(decoded, values, rtol=2.0**-8)


@pytest.mark.parametrize("name", NAMES)
def test_products_are_never_subnormal(name: str) -> None:
    for exponent in range(-149, -100):
        values = np.array([1, 0.3, 0.07, 0.016, -0.01], f32) * f32(2.0) ** exponent
        decoded = np.abs(codec.decode(name, codec.encode(name, values), 5))
        assert decoded[decoded > 0].min(initial=1.0) >= np.finfo(f32).tiny


@quick
@given(arrays(), st.sampled_from(codec.NAMES), st.data())
def test_a_part_decodes_to_the_bits_of_the_whole(
    values: np.ndarray, name: str, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(values)))
    stop = data.draw(st.integers(start, len(values)))
    with np.errstate(all="ignore"):
        payload = codec.encode(name, values)
    part = codec.decode_part(name, payload, len(values), start, stop)
    assert part.tobytes() == codec.decode(name, payload, len(values))[start:stop].tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_blocks_may_be_encoded_apart(name: str) -> None:
    values = np.random.default_rng(0).normal(size=1100).astype(f32)
    data = np.zeros(codec.bytes_of(name, 1100), np.uint8)
    data[:8] = np.frombuffer(codec.header(name, 1100), np.uint8)
    for first, last in ((3, 5), (0, 1), (1, 3)):
        part, spare = values[first * 256 : last * 256], np.empty(512, f32)
        codec.kernels.encode(codec.find(name), part, first, 1100, data, spare)
    assert data.tobytes() == codec.encode(name, values)


@quick
@given(arrays(), st.sampled_from(codec.NAMES), st.data())
def test_adding_is_decoding_a_product_and_a_sum(
    values: np.ndarray, name: str, data: st.DataObject
) -> None:
    blocks = -(-len(values) // 256)
    start = 256 * data.draw(st.integers(0, max(blocks - 1, 0)))
    stop = data.draw(st.integers(start, len(values)))
    factor, before = f32(0.3), np.linspace(-1, 1, stop - start, dtype=f32)
    with np.errstate(all="ignore"):
        payload = codec.encode(name, values)
        part = codec.decode_part(name, payload, len(values), start, stop)
        expected = before + part * factor
    total = before.copy()
    raw = np.frombuffer(payload, np.uint8)
    codec.kernels.add(codec.find(name), raw, len(values), start, stop, factor, total)
    np.testing.assert_array_equal(total, expected)
    assert (np.signbit(total) == np.signbit(expected))[~np.isnan(expected)].all()


@pytest.mark.parametrize("name", codec.NAMES)
def test_nothing_is_encoded_to_a_header(name: str) -> None:
    nothing = np.zeros(0, f32)
    assert codec.encode(name, nothing) == codec.header(name, 0)
    assert codec.decode(name, codec.encode(name, nothing), 0).size == 0


def test_int4_costs_little_more_than_4_bits() -> None:
    assert codec.bytes_of("int4", 2**20) * 8 / 2**20 < 4.07


def test_pinned_vectors() -> None:
    """The format of version 1: payloads of learners and syncers of other builds, byte for byte."""
    pinned = json.loads(GOLDEN.read_text("utf-8"))
    values = np.array([float.fromhex(x) for x in pinned["values"]], f32)
    assert pinned["encoded"].keys() == set(codec.NAMES), "the bytes of a new codec are pinned too"
    for name in codec.NAMES:
        assert codec.encode(name, values).hex() == pinned["encoded"][name], name
        decoded = codec.decode(name, bytes.fromhex(pinned["encoded"][name]), len(values))
        assert [float(x).hex() for x in decoded] == pinned["decoded"][name], name


@quick
@given(arrays(), st.sampled_from(NAMES))
def test_what_is_settled_is_what_is_decoded(values: np.ndarray, name: str) -> None:
    payload = codec.encode(name, values)
    settled = values.copy()
    data = np.frombuffer(payload, np.uint8)
    codec.kernels.settle(codec.find(name), settled, 0, values.size, data)
    expected = codec.decode(name, payload, values.size)
    np.testing.assert_array_equal(settled.view(np.uint32), expected.view(np.uint32))
