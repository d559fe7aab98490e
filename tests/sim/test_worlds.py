"""Fifty seeded worlds of the real machines: nothing wrong is ever done, and every run ends well.

Checked in each: I1, I2, I3, I4, I6, I7, I9 (a restart re-executes the tape), I10 and I11.
`make sim SEEDS=2000` plays more; a failing seed is named with the command that plays it again.
"""

from collections import Counter

import pytest

from diloco_simulator.check import again, totals
from diloco_simulator.options import Options
from diloco_simulator.scenario import Verdict, play

SEEDS = 50
CHUNK = 10

verdicts: dict[int, Verdict] = {}


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_no_seed_breaks_a_promise(first: int) -> None:
    for seed in range(first, first + CHUNK):
        verdicts[seed] = play(seed)
    broken = [
        f"{violation}\n    {again(seed)}"
        for seed in range(first, first + CHUNK)
        for violation in verdicts[seed].violations
    ]
    assert not broken, "\n" + "\n".join(broken)


def test_the_worlds_met_every_kind_of_trouble() -> None:
    """Fifty calm worlds would prove nothing. Seeds that the test above played are not repeated."""
    played = [verdicts.get(seed) or play(seed) for seed in range(SEEDS)]
    counts: Counter[str] = Counter()
    for verdict in played:
        counts.update(verdict.counts)
    for trouble in (
        "lost",
        "duplicated",
        "put twice",
        "unknown",
        "partitions",
        "syncer crashes",
        "syncer hangs",
        "failovers",
        "deposed",
        "lapses",
        "purges waited",
        "snapshots fetched",
        "learner crashes",
        "learner hangs",
        "doubles",
        "power cuts",
        "wishes",
        "nan",
        "lies",
        "strangers",
        "from donor",
        "refused",
    ):
        assert counts[trouble] > 0, f"no {trouble} in {SEEDS} seeds"
    assert totals(played)["violations"] == 0


def test_the_same_seed_is_the_same_world() -> None:
    first, second = play(7), play(7)
    assert first == second
    assert play(8) != first


def test_without_faults_everybody_is_merged_in_every_round() -> None:
    verdict = play(1, Options.calm(jitter=0.0))
    assert verdict.violations == []
    assert verdict.counts == {"from fresh": 3, "recoveries": 3, "refused": 0}
    # 48 steps at one fragment of two every 3 steps, and a last round of each fragment.
    assert verdict.rounds == 48 // 3 + 2
