"""A run begins from the weights that it names, and from no others."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learner.exporting.publishing import kept
from learner.exporting.publishing import spec as published
from safetensors.numpy import load_file, save_file

from diloco_learner.training.trainer import Program, Trainer
from diloco_shared.checkpoints import parameters_io as parameters
from diloco_shared.checkpoints.checkpoints_io import CheckpointError, begun_from
from diloco_shared.checkpoints.parameters_io import KeptParameters, beginning_of
from diloco_shared.checkpoints.vault_io import Vault
from diloco_shared.hf.resolving import resolved, weights_of
from diloco_shared.hf.weights import WrongCheckpoint
from diloco_shared.numerics.arrays import flatten
from diloco_shared.protocol.checkpoints import reference
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import Model, RunSpec, config_hash

GOLDEN = Path(__file__).parents[2] / "interop" / "golden"


def spec(table: dict[str, Any]) -> RunSpec:
    algorithm = {"fragments": 3}
    tables = {"name": "own", "algorithm": algorithm, "model": table, "budget": {"steps": 4}}
    return RunSpec.model_validate(tables)


@pytest.mark.whole
def test_every_fragment_begins_with_the_weights() -> None:
    run = spec(resolved({"weights": "qwen3", "context_tokens": 8}, GOLDEN))
    weights = weights_of(run.model, GOLDEN)
    assert weights is not None
    trainer = Trainer(Program.build(run, weights))
    for p, pieces in enumerate(trainer.program.layout.fragments):
        wanted = [weights.read(piece.name)[piece.start : piece.stop].ravel() for piece in pieces]
        np.testing.assert_array_equal(trainer.fragment(p), np.concatenate(wanted))
    loss = trainer.step(np.zeros((8, 9), np.int32), 1e-3)
    assert np.isfinite(float(loss))


def test_who_reads_weights_is_told_of_it_and_may_end_it() -> None:
    """A run may be left while they are read, and other hosts may wait for it."""
    moved: list[int] = []
    model = Model.model_validate(resolved({"weights": "llama", "context_tokens": 8}, GOLDEN))
    weights = weights_of(model, GOLDEN, lambda: moved.append(1))
    assert weights is not None and moved, "for the digest"
    before = len(moved)
    for name in weights:
        weights.read(name)
    assert len(moved) >= before + len(list(weights)), "of every tensor"

    def ends() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        weights_of(model, GOLDEN, ends)


def test_without_weights_a_run_begins_from_its_seed() -> None:
    assert weights_of(Model(), GOLDEN) is None


def test_other_weights_of_the_same_shape_are_refused(tmp_path: Path) -> None:
    table = resolved({"weights": "llama"}, GOLDEN)
    shutil.copytree(GOLDEN / "llama", tmp_path / "llama")
    file = tmp_path / "llama" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, file)
    with pytest.raises(WrongCheckpoint, match=r"their digest is [0-9a-f]{32}, and model.weights"):
        weights_of(Model.model_validate(table), tmp_path)


def test_another_shape_is_refused_field_by_field(tmp_path: Path) -> None:
    table = resolved({"weights": "llama"}, GOLDEN)
    shutil.copytree(GOLDEN / "mistral", tmp_path / "llama")
    with pytest.raises(WrongCheckpoint, match="window is 5 there, and 0 in the run"):
        weights_of(Model.model_validate(table), tmp_path)


def test_learners_must_agree_on_the_weights_and_not_on_their_place() -> None:
    table = resolved({"weights": "llama"}, GOLDEN)
    moved = config_hash(spec({**table, "weights": "/elsewhere/llama"}))
    assert config_hash(spec(table)) == moved
    assert config_hash(spec({**table, "weights_digest": "0" * 32})) != moved


def test_the_hash_of_a_run_without_weights_is_what_it_was_in_version_0_2_0() -> None:
    """Learners of both versions work in one run."""
    run = RunSpec.model_validate({"name": "own", "budget": {"steps": 4}})
    assert config_hash(run) == "435b4d7213260e9d3f9dfaacc40c07c8"


# --- from a run-wide checkpoint ------------------------------------------------------------------

SOURCE = published(4)
REF = reference(SOURCE.folder, 1)


def begun(root: Path, **more: Any) -> dict[str, Any]:
    return begun_from({"weights": f"checkpoint:{REF}", "context_tokens": 8, **more}, str(root))


@pytest.mark.whole
@pytest.mark.parametrize("shards", [1, 2])
def test_every_fragment_begins_with_what_a_checkpoint_keeps(tmp_path: Path, shards: int) -> None:
    """Also where the new run is cut into another number of fragments."""
    made = kept(tmp_path, SOURCE, shards)
    run = spec(begun(tmp_path))
    program = Program.build(run, beginning_of(run.model, Path(), str(tmp_path)))
    for _ in range(2):  # as often as somebody begins
        trainer = Trainer(program)
        for p in range(3):
            np.testing.assert_array_equal(trainer.fragment(p), flatten(program.layout, p, made))


def test_a_table_gains_the_model_of_the_checkpoint_and_its_digest(tmp_path: Path) -> None:
    kept(tmp_path, SOURCE)
    table = begun(tmp_path, overrides={"remat": "layer"})
    wanted = {**SOURCE.model.overrides, "remat": "layer"}
    assert (table["preset"], table["overrides"]) == ("nano", wanted)
    assert len(table["weights_digest"]) == 32 and begun_from(table, "nowhere") == table
    assert begun_from({"weights": "folder"}, "nowhere") == {"weights": "folder"}
    (tmp_path / "far").mkdir()
    kept(tmp_path / "far", SOURCE)
    far = begun_from({"weights": f"checkpoint:{tmp_path}/far/{REF}"}, "nowhere", (str(tmp_path),))
    assert far["weights_digest"] == table["weights_digest"], "wherever it lies"
    with pytest.raises(CheckpointError, match=rf"no checkpoint .*000007 .*known: {REF}"):
        begun_from({"weights": f"checkpoint:{reference(SOURCE.folder, 7)}"}, str(tmp_path))
    with pytest.raises(CheckpointError, match="names no checkpoint"):
        begun_from({"weights": "checkpoint:7"}, str(tmp_path))


def test_a_checkpoint_keeps_the_context_for_which_its_model_was_made(tmp_path: Path) -> None:
    long = SOURCE.model.model_copy(update={"context_tokens": 32})
    longer = long.model_copy(update={"weights_context": 128})
    for number, (model, found) in enumerate(((SOURCE.model, None), (long, 32), (longer, 128))):
        root = tmp_path / str(number)
        root.mkdir()
        kept(root, SOURCE.model_copy(update={"model": model}))
        assert begun(root).get("weights_context") == found


def test_another_checkpoint_or_another_shape_is_refused(tmp_path: Path) -> None:
    kept(tmp_path, SOURCE)
    table = begun(tmp_path)
    other = Model.model_validate({**table, "weights_digest": "0" * 32})
    with pytest.raises(CheckpointError, match=r"its digest is [0-9a-f]{32}, and model.weights_d"):
        beginning_of(other, Path(), str(tmp_path))
    wide = Model.model_validate({**table, "overrides": {**table["overrides"], "hidden": 16}})
    with pytest.raises(CheckpointError, match="hidden is 8 there, and 16 in the run"):
        beginning_of(wide, Path(), str(tmp_path))


def test_the_shape_of_a_model_of_ones_own_is_not_that_of_a_preset(tmp_path: Path) -> None:
    """What it has is seen when it is built."""
    kept(tmp_path, SOURCE)
    table = begun(tmp_path)
    own = {"factory": "my_models:make", "weights": table["weights"]}
    model = Model.model_validate({**own, "weights_digest": table["weights_digest"]})
    assert beginning_of(model, Path(), str(tmp_path)) is not None


def test_who_reads_a_checkpoint_is_told_of_every_fragment(tmp_path: Path) -> None:
    kept(tmp_path, SOURCE)
    moved: list[int] = []
    model = Model.model_validate(begun(tmp_path))
    found = beginning_of(model, Path(), str(tmp_path), moved=lambda: moved.append(1))
    assert isinstance(found, KeptParameters) and moved == []
    found.read("final_norm/scale_D")
    assert len(moved) == len(found.layout.fragments)


def test_a_damaged_checkpoint_gives_no_tensor(tmp_path: Path) -> None:
    kept(tmp_path, SOURCE, lie=2)
    model = Model.model_validate(begun(tmp_path))
    found = beginning_of(model, Path(), str(tmp_path))
    assert found is not None
    with pytest.raises(CheckpointError, match="it is of another model"):
        found.read("no/such/tensor")
    with pytest.raises(CheckpointError, match=r"fragment 2 has digest .*, and was recorded as a"):
        found.read("final_norm/scale_D")


@pytest.mark.parametrize("shards", [1, 2])
def test_no_more_than_the_anchors_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    """A quarter of what a checkpoint keeps: there are also masters, momentum, anchors of before."""
    monkeypatch.setattr(parameters, "HEAD_BYTES", 64)  # less than any header
    made = kept(tmp_path, SOURCE, shards)
    read: list[int] = []
    pieces = Vault.pieces

    def counted(self: Vault, key: str, first: int, size: int) -> Iterator[bytes]:
        read.append(size)
        return pieces(self, key, first, size)

    monkeypatch.setattr(Vault, "pieces", counted)
    model = Model.model_validate(begun(tmp_path))
    found = beginning_of(model, Path(), str(tmp_path))
    assert isinstance(found, KeptParameters)
    read.clear()
    moved: list[int] = []
    anchors = {p: values_F for p, _, _, values_F in found.anchors(moved.append)}
    for p, values_F in anchors.items():
        np.testing.assert_array_equal(values_F, flatten(found.layout, p, made))
    size = 4 * sum(found.layout.sizes)
    heads = [n for n in read if n not in {4 * s for s in found.layout.sizes}]
    assert sum(read) - sum(heads) == size == found.bytes == moved[-1]
    assert max(heads) < 2000, "and the headers of objects"


def test_an_anchor_of_another_size_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(tmp_path, SOURCE)
    found = beginning_of(Model.model_validate(begun(tmp_path)), Path(), str(tmp_path))
    assert isinstance(found, KeptParameters)
    found.layout = Layout(found.layout.tensors, ((), *found.layout.fragments[1:]))
    with pytest.raises(CheckpointError, match="has no anchor of fragment 0 in it"):
        list(found.anchors())


def test_an_object_that_is_gone_is_named(tmp_path: Path) -> None:
    kept(tmp_path, SOURCE)
    found = beginning_of(Model.model_validate(begun(tmp_path)), Path(), str(tmp_path))
    assert isinstance(found, KeptParameters)
    for path in tmp_path.rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"safetensors is gone: the checkpoint is not whole"):
        list(found.anchors())


@pytest.mark.whole
def test_tensors_of_another_shape_are_named(tmp_path: Path) -> None:
    """As a model of one's own may have them, whose shape nobody knows before it is built."""
    kept(tmp_path, SOURCE)
    run = spec(begun(tmp_path))
    wider = spec({**run.model.model_dump(), "overrides": {**run.model.overrides, "hidden": 16}})
    program = Program.build(wider, beginning_of(run.model, Path(), str(tmp_path)))
    with pytest.raises(ValueError, match=r"mlp/\w+ has shape \(8, 8\) there, and \(16, 8\) in"):
        program.initial()
