"""A codec whose values are a table is one row: what a row must be, and that it is all there is."""

import os
import subprocess
import sys
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from diloco_shared.numerics import codec
from diloco_shared.spec.codecs import BLOCK, CODECS, CodecFacts, find

ROOT = Path(__file__).parents[3]
SOURCES = ("shared", "services", "simulator", "client", "cli", "bench")
ROWS = [row for row in CODECS if row.levels]
NAMES = [row.name for row in ROWS]
f32 = np.float32
of_every_row = pytest.mark.parametrize("row", ROWS, ids=NAMES)

# Played where no such codec is known: the row is put in, and nothing else is touched. Kernels run
# as plain Python, so that nothing is compiled for a codec that there is not.
PLAYED = """
import importlib.util, sys
from pathlib import Path

NAME = "diloco_shared.spec.codecs"
found = importlib.util.find_spec(NAME)
source = Path(found.origin).read_text("utf-8")
assert source.count(")\\nNAMES = ") == 1
row = 'CodecFacts("mine", 4, scaled=True, error=0.21, levels=(0, 1, 2, 4, 6, 8, 12, 20)),'
sys.modules[NAME] = module = importlib.util.module_from_spec(found)
exec(source.replace(")\\nNAMES = ", row + ")\\nNAMES = "), module.__dict__)

import jax
import numpy as np
from diloco_learner.exchange.encoding import Encoded, encode, feeds_back
from diloco_planner.bandwidth import CODEC_BITS
from diloco_shared.numerics import codec
from diloco_shared.spec.algorithm import Algorithm

values = np.array([20, -16, 15.5, 4.99, -0.5, 0.49], np.float32)
data = codec.encode("mine", values)
decoded = codec.decode("mine", data, 6)
np.testing.assert_array_equal(decoded, [20, -20, 12, 4, -1, 0])
parts, error = jax.jit(lambda x: encode("mine", x))(values)
assert Encoded("mine", 6, parts).fetch() == data
np.testing.assert_array_equal(np.asarray(error), values - decoded)
total, raw = np.ones(6, np.float32), np.frombuffer(data, np.uint8)
codec.kernels.add(codec.find("mine"), raw, 6, 0, 6, np.float32(2), total)
np.testing.assert_array_equal(total, 1 + 2 * decoded)
codec.kernels.settle(codec.find("mine"), values, 0, 6, raw)
np.testing.assert_array_equal(values, decoded)
assert Algorithm.model_validate({"codec_up": "mine", "codec_down": "mine"}).codec_up == "mine"
assert feeds_back("mine") and CODEC_BITS["mine"] == 4.0625
"""


def test_a_row_alone_makes_a_codec() -> None:
    """It encodes, on a processor and on a device, decodes, is merged, and is offered."""
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", PLAYED], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", NAMES)
def test_no_other_code_names_it(name: str) -> None:
    naming = {
        str(path.relative_to(ROOT))
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*.py")
        if f'"{name}"' in path.read_text("utf-8")
    }
    assert naming == {"shared/diloco_shared/spec/codecs.py"}


@of_every_row
def test_a_row_keeps_what_its_fields_promise(row: CodecFacts) -> None:
    levels = [Fraction(level) for level in row.levels]
    middles = [(a + b) / 2 for a, b in pairwise(levels)]
    assert row.bits == 4 and row.scaled
    assert len(levels) == 8 and levels[0] == 0 and all(a < b for a, b in pairwise(levels))
    for exact in levels + middles:
        digits = exact.numerator
        while digits and digits % 2 == 0:
            digits //= 2
        assert digits.bit_length() <= 16, "a product with a scale of 8 bits would be rounded"
    # Half of the widest gap; the scale is rounded up by 2^-8 of itself at most.
    widest = float(max(b - a for a, b in pairwise(levels)) / 2 / levels[-1]) * (1 + 2.0**-7)
    assert widest <= row.error <= 1.25 * widest


def payload(name: str, scale: int, nibbles: bytes) -> bytes:
    """One block of that bf16 pattern and those bytes."""
    return codec.header(name, 2 * len(nibbles)) + scale.to_bytes(2, "little") + nibbles


@of_every_row
@pytest.mark.parametrize("scale", [0x0400, 0x3F80, 0x4049, 0xC0FF])
def test_a_nibble_is_its_level_times_the_scale(row: CodecFacts, scale: int) -> None:
    every = bytes(n | (15 - n) << 4 for n in range(16)) * 8
    decoded = codec.decode(row.name, payload(row.name, scale, every), BLOCK)
    signed = np.array([*row.levels, *(-level for level in row.levels)])
    quanta = np.array([q for n in range(16) for q in (n, 15 - n)] * 8)
    expected = signed[quanta] * np.array(scale << 16, np.uint32).view(f32).astype(float)
    np.testing.assert_array_equal(decoded, expected)


@of_every_row
def test_values_beside_every_midpoint_go_to_the_nearest_level(row: CodecFacts) -> None:
    """For every scale that a payload may have, but for its sign."""
    middles = np.array([(a + b) / 2 for a, b in pairwise(row.levels)])
    number = find(row.name)
    least, most = codec.kernels.SCALE_MIN_C[number], codec.kernels.SCALE_MAX_C[number]
    scales_N = (np.arange(least, most + 1, dtype=np.int32) << 16).view(f32)
    top_N = (scales_N.astype(float) * row.levels[-1]).astype(f32)
    at_Nx7 = (scales_N[:, None].astype(float) * middles).astype(f32)
    below_Nx7 = (at_Nx7.view(np.int32) - 1).view(f32)
    assert at_Nx7.min() >= np.finfo(f32).tiny and np.isfinite(top_N).all()
    block_NxK = np.zeros((scales_N.size, BLOCK), f32)
    block_NxK[:, 0], block_NxK[:, 1:8], block_NxK[:, 8:15] = top_N, at_Nx7, -below_Nx7
    values_F = block_NxK.reshape(-1)
    decoded_F = codec.decode(row.name, codec.encode(row.name, values_F), values_F.size)
    quanta_NxK = decoded_F.reshape(-1, BLOCK) / scales_N[:, None]
    np.testing.assert_array_equal(quanta_NxK[:, 0], np.full(scales_N.size, row.levels[-1]))
    upper, lower = np.array(row.levels[1:]), np.array(row.levels[:-1])
    np.testing.assert_array_equal(quanta_NxK[:, 1:8], np.broadcast_to(upper, at_Nx7.shape))
    np.testing.assert_array_equal(quanta_NxK[:, 8:15], np.broadcast_to(-lower, at_Nx7.shape))
    assert not quanta_NxK[:, 15:].any()
