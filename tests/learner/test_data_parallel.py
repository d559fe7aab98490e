"""The reference: one optimizer over the batches of all learners."""

from pathlib import Path

import numpy as np
import pytest
from shared.corpora.texts import folder_of, prepared

from diloco_learner.data.shards import ShardCut, ShardReader
from diloco_learner.training.data_parallel import LearnerStream, train_data_parallel
from diloco_shared.corpora.sources import find
from diloco_shared.corpora.training import train_tokenizer
from diloco_shared.spec.run import RunSpec

CUT = ShardCut(np.arange(7 * 3 * 8 + 1), shards=7, context=8, seed=0)  # three sequences each


def test_learners_share_out_the_shards() -> None:
    shards = [LearnerStream(CUT, m, 3).shards for m in range(3)]
    assert sorted(s for mine in shards for s in mine) == list(range(7))
    with pytest.raises(ValueError, match="7 data shards are too few for 8 learners"):
        LearnerStream(CUT, 7, 8)


def test_a_stream_reads_its_shards_in_turn_and_then_again_in_another_order() -> None:
    stream = LearnerStream(CUT, 1, 3)  # shards 1 and 4
    rows = np.concatenate([stream.take(4) for _ in range(3)])
    expected = [ShardReader(CUT, s, passes=n).take(3) for n in (0, 1) for s in (1, 4)]
    np.testing.assert_array_equal(rows, np.concatenate(expected))


@pytest.mark.parametrize("taken", [2, 3, 5, 9])
def test_a_stream_goes_on_from_a_cursor(taken: int) -> None:
    whole, resumed = LearnerStream(CUT, 1, 3), LearnerStream(CUT, 1, 3)
    whole.take(taken)
    resumed.resume(whole.reader.cursor)
    np.testing.assert_array_equal(resumed.take(7), whole.take(7))


@pytest.mark.whole
def test_training_lowers_the_loss_of_what_is_held_out(spec: RunSpec) -> None:
    run = RunSpec.model_validate({**spec.model_dump(), "budget": {"steps": 40}})
    told: list[tuple[int, float]] = []
    result = train_data_parallel(run, 2, progress=lambda step, loss: told.append((step, loss)))
    assert [step for step, _ in told] == [0]
    assert result["val_loss"] < told[0][1] - 1.0
    assert result["steps"] == 40 and result["tokens"] == 40 * 2 * run.tokens_per_step
    assert result["inner_rate"] == run.inner.learning_rate


@pytest.mark.whole
def test_training_on_tokens_of_two_corpora_lowers_the_loss(
    spec: RunSpec, corpus: Path, tmp_path: Path
) -> None:
    """From text to a trained model, by a tokenizer of one's own and a mixture."""
    bpe = train_tokenizer(find(str(corpus)), 300, tmp_path / "bpe")
    other = folder_of(tmp_path / "other text", 60, words=40)
    parts = []
    for text, name, weight in ((corpus, "one", 0.75), (other, "two", 0.25)):
        found = prepared(text, tmp_path / name, with_=bpe)
        parts.append({"source": str(tmp_path / name), "weight": weight, "digest": found.digest})
    body = spec.model_dump() | {"budget": {"steps": 40}}
    body["data"] |= {"mixture": parts, "tokenizer": str(tmp_path / "bpe")}
    with pytest.raises(ValueError, match=r"vocabulary \(256\) is too small .* has \d+ different"):
        train_data_parallel(RunSpec.model_validate(body), 2)
    body["model"]["overrides"] |= {"vocabulary": bpe.vocabulary}
    told: list[float] = []
    result = train_data_parallel(
        RunSpec.model_validate(body), 2, progress=lambda step, loss: told.append(loss)
    )
    assert abs(told[0] - np.log(bpe.vocabulary)) < 1.0, "at first it knows nothing"
    assert result["val_loss"] < told[0] - 1.0


def test_a_budget_in_steps_is_needed(spec: RunSpec) -> None:
    run = RunSpec.model_validate({**spec.model_dump(), "budget": {"seconds": 1.0}})
    with pytest.raises(ValueError, match=r"needs budget.steps"):
        train_data_parallel(run, 1)
