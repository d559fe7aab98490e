"""`diloco sim train`: real machines and real numbers on a virtual clock, the same every time."""

from pathlib import Path

import pytest

from diloco_shared.spec.run import RunSpec
from diloco_simulator.experiments.setting import Interruptions, Loan
from diloco_simulator.experiments.train import Fleet, IdleFleet, Setting

pytestmark = pytest.mark.whole

STEPS = 24


def spec(folder: Path, **algorithm: object) -> RunSpec:
    """Words that repeat, and a model that can learn them in some dozen steps."""
    book = folder / "book.txt"
    book.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    shape = {"width": 16, "layers": 1, "heads": 2, "kv_heads": 2, "head_width": 8, "hidden": 16}
    return RunSpec.model_validate(
        {
            "name": "r",
            "algorithm": {"fragments": 3, "sync_every_steps": 6, **algorithm},
            "model": {"context_tokens": 16, "overrides": shape},
            "data": {"source": str(book), "virtual_shards": 8, "validation_fraction": 0.1},
            "inner": {"batch_sequences": 4, "warmup_steps": 0},
            "evaluation": {"every_steps": STEPS // 2, "sequences": 16},
            "budget": {"steps": STEPS},
        }
    )


def test_a_seed_gives_the_same_digest_twice_and_the_loss_falls(tmp_path: Path) -> None:
    told: list[tuple[int, float]] = []
    run = spec(tmp_path)
    first = Fleet(run, Setting(2), told=lambda step, loss: told.append((step, loss))).run()
    assert told and first["val_loss"] < told[0][1]
    assert first["rounds"] >= STEPS // 6 * 3 and not first["rounds_skipped"]
    assert 0 < first["tokens_useful"] <= first["tokens"]
    assert Fleet(run, Setting(2)).run() == first
    other = RunSpec.model_validate(run.model_dump() | {"seed": 1})
    assert Fleet(other, Setting(2)).run()["digest"] != first["digest"]


def test_four_bits_and_learners_of_two_speeds_get_to_the_end(tmp_path: Path) -> None:
    run = spec(tmp_path, codec_up="int4", codec_down="int4")
    result = Fleet(run, Setting(3, speeds=(1.0, 0.5))).run()
    assert result["val_loss"] < 5.0
    assert result["virtual_s"] >= STEPS


@pytest.mark.long
def test_learners_that_die_or_are_lent_train_on_and_a_seed_is_a_run(tmp_path: Path) -> None:
    run, dying = spec(tmp_path), Interruptions(mtbi_s=40.0, away_s=3.0)
    setting = Setting(2, interruptions=dying, loan=Loan(1, 15.0, 35.0), over_time=True)
    first = Fleet(run, setting).run()
    assert first["interruptions"] and first["recoveries_from_donors"]
    assert first["val_loss"] < first["losses_over_time"][0][2]
    assert Fleet(run, setting).run() == first
    # What is computed has no part in when things happen.
    idle = IdleFleet(run, setting).run()
    assert [s for s, _ in idle["useful_over_time"]] == [s for s, _ in first["useful_over_time"]]
    assert idle["tokens"] == first["tokens"]
