"""An export from a run-wide checkpoint, as syncers write them: the anchors, checked."""

import os
from pathlib import Path
from typing import Any

import pytest
from learner.exporting.publishing import drawn, spec
from safetensors.numpy import load_file

from diloco_learner.exporting.checkpoint_io import Checkpointed
from diloco_learner.exporting.making_io import Order, Progress, make
from diloco_learner.exporting.observing_io import Unreadable
from diloco_shared.checkpoints.checkpoints_io import RunCheckpoints
from diloco_shared.numerics.arrays import Layout, digest_array, flatten
from diloco_shared.protocol.checkpoints import CheckpointManifest, Object, reference
from diloco_shared.protocol.messages import Stamp
from diloco_shared.spec.run import RunSpec
from diloco_shared.spec.shapes import shape_of, tensors
from diloco_syncer.checkpoints.parts_io import write_part
from diloco_syncer.merging.store import FragmentStore

SPEC = spec(4)
REF = reference(SPEC.folder, 1)


def kept(root: Path, of: RunSpec, shards: int = 1, *, lie: int = -1) -> dict[str, Any]:
    """A checkpoint of so many syncer shards; the tensors in it. `lie`: a digest that is wrong."""
    layout = Layout.build(tensors(shape_of(of.model)), of.algorithm.fragments)
    made, parts = drawn(layout, 1), list[Object]()
    for shard in range(shards):
        owned = range(shard, of.algorithm.fragments, shards)
        anchors = {p: flatten(layout, p, made) for p in owned}
        values = [anchors.get(p) for p in range(of.algorithm.fragments)]
        store = FragmentStore.init(layout, of.algorithm, values)
        digests = [digest_array(anchors[p]) if p in anchors else "" for p in range(len(values))]
        if lie in anchors:
            digests[lie] = "a" * 32
        history = {"anchor_digests": digests}
        arrays = store.state_arrays()
        parts.append(write_part(of, shard, str(root), 1, history, store.meta(), arrays))
    manifest = CheckpointManifest(
        run=of.name,
        run_id=of.id,
        number=1,
        reason="as the user asked",
        at=1.0,
        epoch=2,
        stamp=Stamp(round=9, steps=80, fraction=0.5, fraction_per_step=0.1),
        versions=(0,) * of.algorithm.fragments,
        parameters=sum(layout.sizes),
        spec=of.model_dump(mode="json"),
        shards=tuple(parts),
        learners={},
        missing={},
        leases=(),
        incarnations={},
        bytes=1,
    )
    RunCheckpoints(str(root)).seal(REF, manifest)
    return made


async def export(root: Path, to: Path, source: str = REF) -> Any:
    progress = Progress(lambda line: None)
    asked = Checkpointed(source, str(root), progress.fetching)
    return await make(asked, Order(to, checkpoint=source), progress), progress


@pytest.mark.parametrize("shards", [1, 2])
async def test_a_checkpoint_is_written_as_what_is_published(tmp_path: Path, shards: int) -> None:
    made = kept(tmp_path / "root", SPEC, shards)
    manifest, progress = await export(tmp_path / "root", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == made.keys()
    assert all(found[name].tobytes() == array.tobytes() for name, array in made.items())
    assert (manifest.checkpoint, manifest.epoch, manifest.steps) == (REF, 2, 80)
    assert [f.fragment for f in manifest.fragments] == [0, 1, 2, 3]
    assert progress.fetched == progress.to_fetch > 0


async def test_a_checkpoint_may_be_elsewhere(tmp_path: Path) -> None:
    kept(tmp_path / "far", SPEC)
    manifest, _ = await export(tmp_path / "root", tmp_path / "out", f"{tmp_path}/far/{REF}")
    assert manifest.run == "r"


async def test_one_that_is_not_there_is_named(tmp_path: Path) -> None:
    kept(tmp_path / "root", SPEC)
    with pytest.raises(Unreadable, match=rf"there is no checkpoint .*000007 .*known: {REF}"):
        await export(tmp_path / "root", tmp_path / "out", reference(SPEC.folder, 7))
    with pytest.raises(Unreadable, match="names no checkpoint"):
        await export(tmp_path / "root", tmp_path / "out", "the newest")


async def test_a_damaged_one_leaves_nothing(tmp_path: Path) -> None:
    kept(tmp_path / "root", SPEC, lie=2)
    with pytest.raises(Unreadable, match=r"fragment 2 has digest .*, and was recorded as aaaa"):
        await export(tmp_path / "root", tmp_path / "out")
    assert os.listdir(tmp_path) == ["root"]
    largest = max((tmp_path / "root").rglob("*.safetensors"), key=lambda p: p.stat().st_size)
    largest.write_bytes(b"x" + largest.read_bytes()[1:])
    with pytest.raises(Unreadable, match="it is damaged"):
        await export(tmp_path / "root", tmp_path / "out")
