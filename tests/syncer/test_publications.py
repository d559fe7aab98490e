"""Publications in every codec: all follow bit for bit, and no error grows."""

import numpy as np
import pytest

from diloco_shared.numerics import codec
from diloco_shared.numerics.arrays import digest_array
from diloco_shared.protocol.messages import TensorSpec
from diloco_shared.spec.algorithm import Algorithm
from diloco_shared.spec.fragmentation import Layout
from diloco_syncer.merging.store import Contribution, FragmentStore

F = 700  # two blocks and a part of one
LAYOUT = Layout.build([TensorSpec(name="w", shape=(F,), embedding=False)], 1)
f32 = np.float32


def store_of(down: str, keyframe: str) -> FragmentStore:
    algorithm = Algorithm.model_validate(
        {"fragments": 1, "codec_up": "fp32", "codec_down": down, "keyframe_codec": keyframe}
    )
    return FragmentStore.init(
        LAYOUT, algorithm, [np.random.default_rng(1).normal(size=F).astype(f32)]
    )


def contribution(store: FragmentStore, seed: int) -> Contribution:
    delta_F = np.random.default_rng(seed).normal(size=F).astype(f32) * f32(0.01)
    return Contribution("a", 1.0, store.version(0), codec.encode("fp32", delta_F), "fp32")


@pytest.mark.parametrize("down", codec.NAMES)
@pytest.mark.parametrize("keyframe", ["fp32", "bf16"])
def test_a_follower_holds_the_anchor_bit_for_bit(down: str, keyframe: str) -> None:
    """I4."""
    store = store_of(down, keyframe)
    theirs_F = store.anchor(0)
    for n in range(1, 9):
        due = n % 4 == 0
        staged = store.stage(0, [contribution(store, n)], keyframe=due)
        name = keyframe if due else down
        decoded_F = codec.decode(name, staged.payload, F)
        theirs_F = decoded_F if due else theirs_F + decoded_F
        assert digest_array(theirs_F) == staged.anchor_digest
        store.install(0, staged)
    exact = codec.decode("fp32", bytes(store.current_keyframe(0)), F)
    assert exact.tobytes() == theirs_F.tobytes(), "an on-demand keyframe carries the anchor exactly"


@pytest.mark.parametrize(
    ("down", "share"), [("fp32", 2.0**-20), ("bf16", 2.0**-8), ("int8", 0.004), ("int4", 0.073)]
)
def test_the_published_anchor_stays_near_the_master(down: str, share: float) -> None:
    """The error of one publication goes into the next: after 40 it is still that of one."""
    store = store_of(down, "fp32")
    for n in range(40):
        f = store.fragments[0]
        staged = store.stage(0, [contribution(store, n)], keyframe=False)
        meant_F = staged.fragment.master - f.anchor
        error_F = staged.fragment.master - staged.fragment.anchor
        assert np.abs(error_F).max() <= share * np.abs(meant_F).max() + 2.0**-22
        store.install(0, staged)
    assert np.abs(error_F).max() < 0.01


def test_e3m0_publications_follow_the_master_too() -> None:
    """Values are off by up to a third of each, yet every value catches up."""
    store = store_of("e3m0", "fp32")
    moved_F = store.anchor(0).copy()
    for n in range(40):
        store.install(0, store.stage(0, [contribution(store, n)], keyframe=False))
    f = store.fragments[0]
    assert np.abs(f.master - f.anchor).max() < np.abs(f.master - moved_F).max() / 4
