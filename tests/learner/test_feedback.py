"""Error feedback: what was given and what is owed make up what was meant, exactly."""

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from diloco_learner.events import AnchorReady, Merged
from diloco_learner.exchange.counters import Undecided
from diloco_learner.exchange.encoding import PENDING_MAX, Feedback
from diloco_shared.numerics import codec
from diloco_shared.protocol.messages import Stamp
from diloco_shared.spec.codecs import CODECS

f32 = np.float32
SIZE = 6
BLOCKS = [row.name for row in CODECS if row.scaled]
STAMP = Stamp(round=0, steps=0, fraction=0, fraction_per_step=0)
# What becomes of a round: merged, committed without this learner, or skipped; and whether the
# learner sees its publication, or only a later one (it jumps to a keyframe).
OUTCOMES = st.tuples(st.sampled_from(["merged", "left out", "skipped"]), st.booleans())


class Island:
    """One fragment of one learner, the product's bookkeeping around numbers that add up exactly.

    Pseudo-gradients are multiples of 2^-10 around 1, so that every sum below fits in fp32.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.feedback = Feedback(np.zeros(SIZE, f32))
        self.undecided = Undecided("a", 1)
        self.theta, self.anchor = np.zeros(SIZE, f32), np.zeros(SIZE, f32)
        self.meant, self.given = np.zeros(SIZE), np.zeros(SIZE)  # of merged contributions
        self.version = 0
        self.last_merged = {"b": (1, 0, -1)}

    def contribute(self, round_: int) -> tuple[np.ndarray, np.ndarray]:
        """(pseudo-gradient, decoded contribution)."""
        delta_F = self.anchor - self.theta
        total_F = delta_F + self.feedback.residual
        payload = codec.encode(self.name, total_F)
        decoded_F = codec.decode(self.name, payload, SIZE)
        self.feedback.sent(round_, total_F - decoded_F)
        self.undecided.contributed(0, round_, 0, None)
        return delta_F, decoded_F

    def merged(self, round_: int, delta_F: np.ndarray, decoded_F: np.ndarray) -> None:
        """The syncer took it."""
        self.meant += delta_F
        self.given += decoded_F
        _, before, _ = self.last_merged.get("a", (1, -1, -1))
        self.last_merged["a"] = (1, round_, before)

    def publish(self, round_: int, anchor_F: np.ndarray) -> None:
        """A publication is seen: it decides, then theta is overwritten."""
        self.version += 1
        anchor = AnchorReady(0, 0, self.version, round_, STAMP, dict(self.last_merged))
        for fate in self.undecided.decide(anchor):
            self.feedback.decided(fate.round, isinstance(fate, Merged))
        self.anchor, self.theta = anchor_F.copy(), anchor_F.copy()


def step(island: Island, rng: np.random.Generator) -> None:
    """Training moves theta: the pseudo-gradient of some values is 1, of others less."""
    moved = rng.integers(-1024, 1025, SIZE) / 1024.0
    moved[0] = 1.0
    island.theta = (island.anchor - moved).astype(f32)


@examples(150)
@given(
    st.sampled_from(BLOCKS),
    st.lists(OUTCOMES, min_size=1, max_size=20),
    st.integers(0, 10**6),
)
def test_given_and_owed_are_what_was_meant(
    name: str, outcomes: list[tuple[str, bool]], seed: int
) -> None:
    island, rng = Island(name), np.random.default_rng(seed)
    jumped = False
    for n, (outcome, seen) in enumerate(outcomes):
        if not jumped:
            # Behind by a publication, it has nothing new to say until it has caught up.
            step(island, rng)
            sent = island.contribute(3 * n)
            if outcome == "merged":
                island.merged(3 * n, *sent)
        if outcome == "skipped":
            continue
        jumped = not seen
        if seen:
            island.publish(3 * n, rng.integers(-8, 9, SIZE).astype(f32))
    if jumped:
        island.publish(3 * len(outcomes), np.zeros(SIZE, f32))
    np.testing.assert_array_equal(island.given + island.feedback.residual, island.meant)
    top = np.abs(island.feedback.residual).max()
    assert top <= 2.0, "the residual is one round's error, not a growing sum"


@pytest.mark.parametrize("name", BLOCKS)
def test_two_pending_contributions_that_were_both_merged(name: str) -> None:
    """The publication of the first comes after the second was sent: a slow downlink."""
    island, rng = Island(name), np.random.default_rng(1)
    step(island, rng)
    island.merged(0, *island.contribute(0))
    island.publish(0, np.zeros(SIZE, f32))
    residual = island.feedback.residual
    assert residual.any()
    for n in (3, 6):
        step(island, rng)
        island.merged(n, *island.contribute(n))
    island.last_merged["a"] = (1, 3, 0)
    island.publish(3, np.zeros(SIZE, f32))
    assert island.feedback.residual is not residual
    island.last_merged["a"] = (1, 6, 3)
    island.publish(6, np.zeros(SIZE, f32))
    np.testing.assert_array_equal(island.given + island.feedback.residual, island.meant)


@pytest.mark.parametrize("name", BLOCKS)
def test_two_merged_contributions_of_which_one_publication_tells(name: str) -> None:
    """A keyframe overtook the publication of the first."""
    island, rng = Island(name), np.random.default_rng(1)
    for n in (3, 6):
        step(island, rng)
        island.merged(n, *island.contribute(n))
    island.publish(6, np.zeros(SIZE, f32))
    np.testing.assert_array_equal(island.given + island.feedback.residual, island.meant)


def test_adoption_leaves_the_residual_alone() -> None:
    """theta_m goes back to the anchor; what merged work still owes does not go with it."""
    island = Island("int4")
    step(island, np.random.default_rng(2))
    island.merged(0, *island.contribute(0))
    island.publish(0, np.ones(SIZE, f32))
    owed = island.feedback.residual.copy()
    island.publish(3, np.zeros(SIZE, f32))
    island.publish(6, np.ones(SIZE, f32))
    np.testing.assert_array_equal(island.feedback.residual, owed)
    # Without any training since, the next contribution gives what is owed, and nothing else.
    _, decoded_F = island.contribute(9)
    np.testing.assert_allclose(decoded_F, owed, atol=np.abs(owed).max() / 12)


def test_pending_contributions_are_bounded() -> None:
    """I12."""
    feedback = Feedback(np.zeros(2, f32))
    for n in range(10):
        feedback.sent(n, np.full(2, n, f32))
    assert sorted(feedback.pending) == list(range(10 - PENDING_MAX, 10))
    feedback.decided(0, merged=True)  # long forgotten
    assert not feedback.residual.any()
    feedback.decided(9, merged=True)
    np.testing.assert_array_equal(feedback.residual, [9, 9])


def test_a_later_terms_answer_to_the_same_round_replaces_the_earlier() -> None:
    feedback = Feedback(np.zeros(1, f32))
    feedback.sent(4, np.ones(1, f32))
    feedback.sent(4, np.full(1, 2, f32))
    feedback.decided(4, merged=True)
    assert feedback.residual == 2 and not feedback.pending
