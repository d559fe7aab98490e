"""The gate (I11): each fault alone refuses a contribution, under its own kind."""

import math
from dataclasses import replace
from typing import Any

import pytest

from diloco_shared.protocol.messages import COUNT_MAX, Blob, ContributionManifest, Cursor
from diloco_syncer.rounds.gate import PASSES_MAX, Expected, impossible, judge

HASH = "a" * 32
EXPECTED = Expected(
    config_hash=HASH,
    epoch=1,
    term=2,
    incarnation=3,
    fragment=4,
    version=10,
    staleness_max=1,
    values=100,
    codec="bf16",
    tokens_per_step=64,
)


def manifest(**changed: Any) -> ContributionManifest:
    fields: dict[str, Any] = {
        "run": "r",
        "learner": "a",
        "incarnation": 3,
        "epoch": 1,
        "term": 2,
        "round": 50,
        "fragment": 4,
        "base": 10,
        "step_from": 5,
        "step_to": 8,
        "tokens_from": 320,
        "tokens_to": 512,
        "cursor": None,
        "codec": "bf16",
        "values": 100,
        "config_hash": HASH,
        "blob": Blob(subject="s", bytes=200, chunk_bytes=200, chunks=1, digest="0" * 32),
    }
    return ContributionManifest(**{**fields, **changed})


def test_a_sound_contribution_passes() -> None:
    assert judge(manifest(), EXPECTED, finite=True, norm=1.0) is None
    # A zero pseudo-gradient is strange, not wrong; so is a base one behind.
    assert judge(manifest(base=9), EXPECTED, finite=True, norm=0.0) is None
    # Fewer tokens than declared: a learner may take smaller batches.
    assert judge(manifest(tokens_to=321), EXPECTED, finite=True, norm=1.0) is None
    # A single step is enough.
    assert judge(manifest(step_to=6, tokens_to=384), EXPECTED, finite=True, norm=1.0) is None


@pytest.mark.parametrize(
    ("changed", "kind", "words"),
    [
        ({"config_hash": "b" * 32}, "config", "another configuration"),
        ({"epoch": 0}, "epoch", "of epoch 0, the run is in 1"),
        ({"term": 1}, "term", "of term 1, the leader's is 2"),
        ({"incarnation": 2}, "incarnation", "the newest is 3"),
        ({"incarnation": 4}, "incarnation", "the newest is 3"),
        ({"fragment": 3}, "malformed", "fragment 3 in a round of fragment 4"),
        ({"values": 99}, "malformed", "99 values"),
        ({"codec": "fp32"}, "malformed", "codec fp32"),
        ({"base": 11}, "ahead", "version 11, the head is 10"),
        ({"base": 8}, "stale", "2 behind"),
        ({"base": -1}, "stale", "11 behind"),
        ({"step_to": 5}, "malformed", "0 steps"),
        ({"step_to": 4}, "malformed", "-1 steps"),
        ({"tokens_to": 320}, "tokens", "claims 0 tokens"),
        ({"tokens_to": 513}, "tokens", "claims 193 tokens in 3 steps of at most 64"),
        (
            {"tokens_from": 384, "tokens_to": 520},
            "tokens",
            "claims 520 tokens in a life of 8 steps",
        ),
        (
            {"cursor": Cursor(shard=0, sequences=1, finished=((1, COUNT_MAX),))},
            "counters",
            f"read a data shard {COUNT_MAX} times",
        ),
        (
            {"cursor": Cursor(shard=0, sequences=1, passes=PASSES_MAX + 1)},
            "counters",
            f"{PASSES_MAX} is the most",
        ),
    ],
)
def test_every_fault_has_its_kind_and_words(changed: dict[str, Any], kind: str, words: str) -> None:
    refusal = judge(manifest(**changed), EXPECTED, finite=True, norm=1.0)
    assert refusal is not None
    assert refusal.kind == kind
    assert words in refusal.reason


def test_what_is_based_on_the_head_begins_behind_all_that_is_merged_in_it() -> None:
    merged = replace(EXPECTED, merged_to=321)
    refusal = judge(manifest(), merged, finite=True, norm=1.0)
    assert refusal is not None and refusal.kind == "counters"
    assert "begins at token 320, though 321 of its life are settled" in refusal.reason
    assert judge(manifest(), replace(EXPECTED, merged_to=320), finite=True, norm=1.0) is None
    # One that has not adopted the newest version yet holds some of it still.
    assert judge(manifest(base=9), merged, finite=True, norm=1.0) is None


def test_nobody_contributes_steps_beyond_what_it_reports() -> None:
    assert judge(manifest(), replace(EXPECTED, step_max=8), finite=True, norm=1.0) is None
    refusal = judge(manifest(), replace(EXPECTED, step_max=7), finite=True, norm=1.0)
    assert refusal is not None and refusal.kind == "counters"
    assert "ends at step 8, though by its own reports it is at 7 at most" in refusal.reason


@pytest.mark.parametrize(("finite", "norm"), [(False, 0.0), (True, math.nan), (True, -1.0)])
def test_values_that_are_not_finite_are_refused(finite: bool, norm: float) -> None:
    refusal = judge(manifest(), EXPECTED, finite=finite, norm=norm)
    assert refusal is not None and refusal.kind == "non-finite"


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"adopted": (0,) * 3}, "another layout"),
        ({"c_tokens": (0, 10**9)}, "more tokens than it has done"),
        ({"tokens": COUNT_MAX}, f"{COUNT_MAX} tokens in a life of 5 steps"),
    ],
)
def test_no_report_says_what_cannot_be(running: Any, over: dict[str, Any], words: str) -> None:
    per_step = running.spec.tokens_per_step
    assert impossible(running.progress("a", 5), 2, per_step) == ""
    assert words in impossible(running.progress("a", 5, **over), 2, per_step)
