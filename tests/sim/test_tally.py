"""Useful tokens are counted per learner and over time as the tape books them."""

from typing import Any

import pytest

from diloco_shared.protocol.messages import Cursor, Stamp, TapeRound, Verdict
from diloco_simulator.experiments.tally import Tally, reached_s

STAMP = Stamp(round=0, steps=4, fraction=0.0, fraction_per_step=0.0)


def a_round(fragment: int, new: dict[str, int], **changes: Any) -> TapeRound:
    verdicts = tuple(
        Verdict(
            learner=learner,
            incarnation=0,
            outcome="merged",
            reason="in time",
            tokens_new=tokens,
            cursor=Cursor(shard=1, sequences=tokens),
        )
        for learner, tokens in new.items()
    )
    body: dict[str, Any] = dict.fromkeys(("quorum_s", "grace_s", "sync_s", "at"), 0.0)
    body |= dict.fromkeys(("epoch", "term", "round"), 0) | {"quorum": 1, "version": 1}
    body |= dict.fromkeys(("quorum_reason", "anchor_digest", "master_digest", "payload_digest"), "")
    body |= {"reason": "merged", "outcome": "committed", "keyframe": False, "stamp": STAMP}
    return TapeRound(fragment=fragment, verdicts=verdicts, **(body | changes))


def test_a_fragment_counts_by_its_size() -> None:
    tally = Tally([30, 10])
    tally.record(a_round(0, {"a": 100, "b": 60}), 5.0)
    tally.record(a_round(1, {"a": 100}), 6.0)
    assert tally.useful == {"a": 100.0, "b": 45.0}
    assert tally.timeline == [(5.0, 120.0), (6.0, 145.0)]
    assert tally.merged_per_round == 1.5
    assert tally.cursors["b"].sequences == 60


def test_a_round_that_was_skipped_counts_for_nothing() -> None:
    tally = Tally([1])
    tally.record(a_round(0, {"a": 100}, outcome="skipped"), 5.0)
    assert not tally.useful and not tally.timeline and tally.merged_per_round == 0.0


def test_goodput_is_time_whose_tokens_were_merged_over_time_allocated() -> None:
    tally = Tally([1])
    for _ in range(8):
        tally.stepped("fast")
    for _ in range(5):
        tally.stepped("slow")
    tally.record(a_round(0, {"fast": 60, "slow": 50}), 9.0)
    goodput, stepping = tally.shares(
        ["fast", "slow"],
        step_s=lambda m: (1.0, 2.0)[m],
        allocated_s=lambda m: 10.0,
        tokens_per_step=10,
    )
    assert goodput == pytest.approx((6 * 1 + 5 * 2) / 20)
    assert stepping == pytest.approx((8 * 1 + 5 * 2) / 20)


def test_when_tokens_were_reached_is_interpolated_between_rounds() -> None:
    timeline = [[4.0, 100.0], [8.0, 300.0], [9.0, 300.0]]
    assert reached_s(timeline, 50) == 2.0
    assert reached_s(timeline, 200) == 6.0
    assert reached_s(timeline, 300) == 8.0
    assert reached_s(timeline, 301) == float("inf")
