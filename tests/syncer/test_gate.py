"""The gate (I11): each fault alone refuses a contribution, under its own kind."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_shared.protocol.messages import COUNT_MAX, Blob, ContributionManifest, Cursor
from diloco_syncer.events import ContributionSeen
from diloco_syncer.rounds.gate import PASSES_MAX, Refusal, impossible, judge
from diloco_syncer.rounds.round import Phase, Round

HASH = "a" * 32


def history(*, settled_to: int = 0, began: int = 0, head: int = 10) -> Any:
    """What the gate looks at: the head of fragment 4."""
    algorithm = SimpleNamespace(codec_up="bf16", staleness_max=1)
    return SimpleNamespace(
        config_hash=HASH,
        epoch=1,
        term=2,
        versions=[-1, -1, -1, -1, head],
        began_P=[-1, -1, -1, -1, began],
        sizes_P=[0, 0, 0, 0, 100],
        spec=SimpleNamespace(algorithm=algorithm, tokens_per_step=64),
        ledger=SimpleNamespace(settled_to=lambda *life: settled_to if life == ("a", 3, 4) else 0),
    )


ROUND = Round(50, 4, 0.0, {}, participants={"a": 3})


def judged(
    m: ContributionManifest,
    *,
    finite: bool = True,
    norm: float = 1.0,
    step_max: int = COUNT_MAX,
    **known: int,
) -> Refusal | None:
    """Of a contribution to the round."""
    seen = ContributionSeen(m, finite, norm)
    return judge(seen, ROUND, history(**known), step_max)


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
    assert judged(manifest()) is None
    # A zero pseudo-gradient is strange, not wrong; so is a base one behind.
    assert judged(manifest(base=9), norm=0.0) is None
    # Fewer tokens than declared: a learner may take smaller batches.
    assert judged(manifest(tokens_to=321)) is None
    # A single step is enough.
    assert judged(manifest(step_to=6, tokens_to=384)) is None


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
    refusal = judged(manifest(**changed))
    assert refusal is not None
    assert refusal.kind == kind
    assert words in refusal.reason


def test_what_is_based_on_the_head_begins_behind_all_that_is_merged_in_it() -> None:
    refusal = judged(manifest(), settled_to=321)
    assert refusal is not None and refusal.kind == "counters"
    assert "begins at token 320, though 321 of its life are settled" in refusal.reason
    assert judged(manifest(), settled_to=320) is None
    # One that has not adopted the newest version yet holds some of it still.
    assert judged(manifest(base=9), settled_to=321) is None


@pytest.mark.parametrize("began", [0, 7])
def test_nothing_is_measured_against_what_was_before_the_first_version(began: int) -> None:
    """Of a new run, or of one that began again: one behind by number, and nobody has it."""
    assert judged(manifest(base=began), began=began, head=began) is None
    assert judged(manifest(base=began), began=began, head=began + 1) is None
    refusal = judged(manifest(base=began - 1), began=began, head=began)
    assert refusal is not None and refusal.kind == "stale"
    assert refusal.reason == f"based on version {began - 1}, though the first one is {began}"


def test_nobody_contributes_steps_beyond_what_it_reports() -> None:
    assert judged(manifest(), step_max=8) is None
    refusal = judged(manifest(), step_max=7)
    assert refusal is not None and refusal.kind == "counters"
    assert "ends at step 8, though by its own reports it is at 7 at most" in refusal.reason


@pytest.mark.parametrize(("finite", "norm"), [(False, 0.0), (True, math.nan), (True, -1.0)])
def test_values_that_are_not_finite_are_refused(finite: bool, norm: float) -> None:
    refusal = judged(manifest(), finite=finite, norm=norm)
    assert refusal is not None and refusal.kind == "non-finite"


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"adopted": (0,) * 3}, "another layout"),
        ({"c_steps": (0, 6)}, "more steps than it has taken"),
        ({"c_tokens": (0, 10**9)}, "more tokens than it has done"),
        ({"tokens": COUNT_MAX}, f"{COUNT_MAX} tokens in a life of 5 steps"),
        ({"step_s": 1e308}, "steps of 1e+308 s"),  # four of them are no time that a pull can name
    ],
)
def test_no_report_says_what_cannot_be(running: Any, over: dict[str, Any], words: str) -> None:
    per_step = running.spec.tokens_per_step
    assert impossible(running.progress("a", 5), 2, per_step) == ""
    assert words in impossible(running.progress("a", 5, **over), 2, per_step)


def test_a_round_becomes_nothing_that_nothing_leads_to() -> None:
    """By an error of its own, which `python -O` leaves in."""
    opened = Round(50, 4, 0.0, {})
    with pytest.raises(RuntimeError, match="round 50 is COLLECTING and cannot be PUBLISHING"):
        opened.becomes(Phase.PUBLISHING)
    assert opened.phase is Phase.COLLECTING
