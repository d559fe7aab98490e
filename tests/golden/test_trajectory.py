"""Twenty rounds of merges give the same bits as ever, on every machine.

A change of the expected digests is a change of numbers: runs recorded before it cannot be
replayed after it. Rewrite them knowingly: DILOCO_REWRITE_GOLDEN=1.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_shared.numerics import codec
from diloco_shared.protocol.messages import TensorSpec
from diloco_shared.spec.algorithm import Algorithm
from diloco_shared.spec.fragmentation import Layout
from diloco_syncer.merging.store import Contribution, FragmentStore

GOLDEN = Path(__file__).with_name("trajectory.json")
ROUNDS = 20
LEARNERS = 4
TENSORS = [
    TensorSpec(name="embedding/tokens_VxD", shape=(256, 16), embedding=True),
    TensorSpec(name="layer_00/attention/query_DxHK", shape=(16, 16), embedding=False),
    TensorSpec(name="layer_00/mlp/up_DxF", shape=(16, 40), embedding=False),
    TensorSpec(name="layer_00/mlp/norm_D", shape=(16,), embedding=False),
    TensorSpec(name="output/head_DxV", shape=(16, 256), embedding=False),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "long": {"fragments": 3},
    "short": {"fragments": 3, "preset": "short"},
    "int4": {"fragments": 3, "codec_up": "int4", "codec_down": "int4"},
    "mixed": {"fragments": 3, "codec_up": "e3m0", "codec_down": "int8", "preset": "short"},
    "fp32": {"fragments": 3, "codec_up": "fp32", "codec_down": "fp32", "keyframe_codec": "bf16"},
}


def bits(rng: np.random.Generator, size: int, scale_bits: int) -> np.ndarray:
    """Whole numbers over a power of two: no library's transcendental functions in the inputs."""
    return (rng.integers(-(2**20), 2**20, size) / 2**scale_bits).astype(np.float32)


def trajectory(settings: dict[str, Any]) -> list[str]:
    """Per round: digests of master, anchor and publication."""
    algorithm, rng = Algorithm.model_validate(settings), np.random.default_rng(2024)
    layout = Layout.build(TENSORS, algorithm.fragments)
    store = FragmentStore.init(layout, algorithm, [bits(rng, n, 22) for n in layout.sizes])
    lines = []
    for n in range(ROUNDS):
        p = n % algorithm.fragments
        contributions = []
        for m in range(LEARNERS):
            payload = codec.encode(algorithm.codec_up, bits(rng, layout.sizes[p], 26 + m))
            # One learner is slow: it measures against the anchor before the present one.
            base = max(store.version(p) - (m == 3), 0)
            weight = float(rng.integers(1, 1000)) if n % 5 or m else 0.0
            contributions.append(Contribution(f"l{m}", weight, base, payload, algorithm.codec_up))
        staged = store.stage(p, contributions, keyframe=n >= 3 and n % 7 == 0)
        store.install(p, staged)
        lines.append(
            f"{n} {p} {staged.master_digest} {staged.anchor_digest} {staged.payload_digest}"
        )
    return lines


def test_golden_trajectories() -> None:
    seen = {name: trajectory(settings) for name, settings in SETTINGS.items()}
    if os.environ.get("DILOCO_REWRITE_GOLDEN") == "1":
        GOLDEN.write_text(json.dumps(seen, indent=1) + "\n", encoding="utf-8")
        pytest.skip(f"{GOLDEN.name} was rewritten")
    expected = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert seen.keys() == expected.keys()
    for name, lines in seen.items():
        for ours, theirs in zip(lines, expected[name], strict=True):
            assert ours == theirs, f"{name}: the first round whose bits changed"


def test_a_trajectory_repeats_within_a_process() -> None:
    settings = SETTINGS["long"]
    assert trajectory(settings) == trajectory(settings)
