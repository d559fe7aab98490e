"""An export from a run-wide checkpoint, as syncers write them: the anchors, checked."""

import os
from pathlib import Path
from typing import Any

import pytest
from learner.exporting.publishing import kept, spec
from safetensors.numpy import load_file

from diloco_learner.exporting.checkpoint_io import Checkpointed
from diloco_learner.exporting.making_io import BytesMoved, Order, make
from diloco_learner.exporting.observing_io import UnreadableRun
from diloco_shared.protocol.checkpoints import reference

SPEC = spec(4)
REF = reference(SPEC.folder, 1)


async def export(root: Path, to: Path, source: str = REF, places: tuple[str, ...] = ()) -> Any:
    progress = BytesMoved(lambda line: None)
    asked = Checkpointed(source, str(root), progress.fetching, places)
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


async def test_a_checkpoint_may_be_elsewhere_where_the_settings_say_so(tmp_path: Path) -> None:
    kept(tmp_path / "far", SPEC)
    far, out = f"{tmp_path}/far/{REF}", tmp_path / "out"
    with pytest.raises(UnreadableRun, match="DILOCO_CHECKPOINT_ROOTS"):
        await export(tmp_path / "root", out, far)
    manifest, _ = await export(tmp_path / "root", out, far, (str(tmp_path),))
    assert manifest.run == "r"


async def test_one_that_is_not_there_is_named(tmp_path: Path) -> None:
    kept(tmp_path / "root", SPEC)
    with pytest.raises(UnreadableRun, match=rf"there is no checkpoint .*000007 .*known: {REF}"):
        await export(tmp_path / "root", tmp_path / "out", reference(SPEC.folder, 7))
    with pytest.raises(UnreadableRun, match="names no checkpoint"):
        await export(tmp_path / "root", tmp_path / "out", "the newest")


async def test_a_damaged_one_leaves_nothing(tmp_path: Path) -> None:
    kept(tmp_path / "root", SPEC, lie=2)
    with pytest.raises(UnreadableRun, match=r"fragment 2 has digest .*, and was recorded as aaaa"):
        await export(tmp_path / "root", tmp_path / "out")
    assert os.listdir(tmp_path) == ["root"]
    largest = max((tmp_path / "root").rglob("*.safetensors"), key=lambda p: p.stat().st_size)
    largest.write_bytes(b"x" + largest.read_bytes()[1:])
    with pytest.raises(UnreadableRun, match="it is damaged"):
        await export(tmp_path / "root", tmp_path / "out")
