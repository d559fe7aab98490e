"""`diloco sim train`: real machines and real numbers on a virtual clock, the same every time."""

from pathlib import Path

import pytest

from diloco_shared.config import RunSpec
from diloco_simulator.train import Fleet, Setting

pytestmark = pytest.mark.whole


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
            "evaluation": {"every_steps": 30, "sequences": 16},
            "budget": {"steps": 60},
        }
    )


def test_a_seed_gives_the_same_digest_twice_and_the_loss_falls(tmp_path: Path) -> None:
    told: list[tuple[int, float]] = []
    run = spec(tmp_path)
    first = Fleet(run, Setting(2), told=lambda step, loss: told.append((step, loss))).run()
    assert told and first["val_loss"] < told[0][1]
    assert first["rounds"] >= 60 // 6 * 3 and not first["rounds_skipped"]
    assert 0 < first["tokens_useful"] <= first["tokens"]
    assert Fleet(run, Setting(2)).run() == first
    other = RunSpec.model_validate(run.model_dump() | {"seed": 1})
    assert Fleet(other, Setting(2)).run()["digest"] != first["digest"]


def test_four_bits_and_learners_of_two_speeds_get_to_the_end(tmp_path: Path) -> None:
    run = spec(tmp_path, codec_up="int4", codec_down="int4")
    result = Fleet(run, Setting(3, speeds=(1.0, 0.5))).run()
    assert result["val_loss"] < 5.0
    assert result["virtual_s"] >= 60
