"""An export from a run's publications, over a bus in memory: whole and checked, or not there."""

import asyncio
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
from learner.exporting.publishing import Publisher, Tensors, spec
from live.small_disk import MIB, fill, small_disk
from safetensors.numpy import load_file
from settled import FAILS, UNKNOWN, Settled, settles_no_names
from waiting import until

from diloco_learner.exporting import making_io, observing_io, writing_io
from diloco_learner.exporting.__main__ import spec_of
from diloco_learner.exporting.choosing import NotPublished
from diloco_learner.exporting.making_io import BytesMoved, Companions, Order, make
from diloco_learner.exporting.observing_io import PublishedView, UnreadableRun
from diloco_learner.exporting.writing_io import CannotWrite, appearing
from diloco_shared import ambient
from diloco_shared.bus import blobs
from diloco_shared.numerics.arrays import flatten
from diloco_shared.protocol import subjects
from diloco_shared.protocol.exports import ExportManifest, ExportMoved
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus


class Rig:
    """A run that publishes, and who takes its model out."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.broker = MemoryBroker()
        self.spec = spec(**more)
        self.syncer = Publisher(self.broker, self.spec)
        self.to = folder / "out"
        self.told: list[ExportMoved] = []

    def source(self, progress: BytesMoved, version: int | None = None) -> PublishedView:
        found = PublishedView(MemoryBus(self.broker, "x"), self.spec, version, progress.fetching)
        found.wait_s, found.stall_s = 0.0, 0.5
        return found

    async def export(self, version: int | None = None, **order: Any) -> ExportManifest:
        progress = BytesMoved(self.told.append)
        return await make(self.source(progress, version), Order(self.to, **order), progress)

    def nothing_left(self) -> bool:
        return not any(self.to.parent.iterdir())


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def same(found: dict[str, Any], made: Tensors) -> None:
    assert found.keys() == made.keys()
    for name, array in made.items():
        assert found[name].tobytes() == array.tobytes(), name


async def test_what_is_published_is_what_is_written(rig: Rig) -> None:
    await rig.syncer.prepare()
    made = await rig.syncer.everything(1)
    manifest = await rig.export()
    same(load_file(rig.to / "model.safetensors"), made)
    kept = json.loads((rig.to / "diloco.json").read_text("utf-8"))
    assert kept == manifest.model_dump(mode="json")
    assert (kept["run"], kept["run_id"], kept["epoch"], kept["steps"]) == ("r", "abc123", 0, 0)
    assert kept["parameters"] == sum(a.size for a in made.values())
    for file in kept["files"]:
        data = (rig.to / file["name"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file["bytes"], file["sha256"])
    assert {f["name"] for f in kept["files"]} | {"diloco.json"} == set(os.listdir(rig.to))
    assert rig.told[-1].done == rig.told[-1].total
    assert [m.done for m in rig.told] == sorted(m.done for m in rig.told)
    assert {m.stage for m in rig.told} == {"fetching", "writing"}


async def test_deltas_are_added_as_learners_add_them(rig: Rig) -> None:
    await rig.syncer.prepare()
    await rig.syncer.everything(1)
    for n, p in enumerate([0, 0, 1, 2, 0]):
        await rig.syncer.delta(p, n, ("int8", "int4", "bf16")[n % 3])
    manifest = await rig.export()
    assert [f.version for f in manifest.fragments] == [3, 1, 1]
    assert manifest.steps == 24
    found, layout = load_file(rig.to / "model.safetensors"), rig.syncer.layout
    for p, anchor_F in rig.syncer.anchors.items():
        assert flatten(layout, p, found).tobytes() == anchor_F.tobytes()


async def test_a_given_version_is_that_one(rig: Rig) -> None:
    await rig.syncer.prepare()
    made = await rig.syncer.everything(1)
    for p in range(3):
        await rig.syncer.delta(p, p)
    manifest = await rig.export(version=0)
    same(load_file(rig.to / "model.safetensors"), made)
    assert {f.version for f in manifest.fragments} == {0}


async def test_a_keyframe_that_comes_meanwhile_is_taken_instead(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observing_io, "LOOK_S", 0.01)
    await rig.syncer.prepare()
    await rig.syncer.everything(1)
    await rig.syncer.delta(1, 5)
    progress = BytesMoved(rig.told.append)
    source = rig.source(progress)
    await source.begin()
    later = await rig.syncer.everything(2)  # and what was there before goes
    for p in range(3):
        for version in range(rig.syncer.versions[p]):
            await rig.syncer.purge(p, version)
    manifest = await make(_Begun(source), Order(rig.to), progress)
    same(load_file(rig.to / "model.safetensors"), later)
    assert [f.version for f in manifest.fragments] == [1, 2, 1]
    assert rig.told[-1].done == rig.told[-1].total


class _Begun:
    """A source whose view was chosen a while ago."""

    def __init__(self, source: PublishedView) -> None:
        self._source = source

    async def begin(self) -> None:
        """It has."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


async def test_an_epoch_that_begins_meanwhile_ends_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observing_io, "LOOK_S", 0.01)
    await rig.syncer.prepare()
    made = await rig.syncer.everything(1)
    progress = BytesMoved(rig.told.append)
    source = rig.source(progress)
    await source.begin()
    for p in range(3):
        await rig.syncer.purge(p, 0)
        await rig.syncer.keyframe(p, flatten(rig.syncer.layout, p, made), epoch=1, term=2)
    with pytest.raises(UnreadableRun, match="began epoch 1 while epoch 0 was being read"):
        await make(_Begun(source), Order(rig.to), progress)
    assert rig.nothing_left()


def away(
    monkeypatch: pytest.MonkeyPatch, source: PublishedView, refuses: Callable[[str], bool]
) -> None:
    """The server does not answer what is asked of the subjects that `refuses` names."""
    asked = source.bus.fetch

    async def fetch(stream: str, subject: str, **more: Any) -> Any:
        if refuses(subject):
            raise observing_io.BusError("the server is away")
        return await asked(stream, subject, **more)

    monkeypatch.setattr(source.bus, "fetch", fetch)


async def test_what_was_lost_on_the_way_is_fetched_once_the_bus_is_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observing_io, "LOOK_S", 0.01)
    await rig.syncer.prepare()
    made = await rig.syncer.everything(1)
    progress = BytesMoved(rig.told.append)
    source = rig.source(progress)
    source.stall_s = 60.0
    refusals = iter([True, True, False, True, True])
    away(monkeypatch, source, lambda of: not of.endswith(".m") and next(refusals, False))
    await make(source, Order(rig.to), progress)
    same(load_file(rig.to / "model.safetensors"), made)
    assert next(refusals, None) is None, "it was away"


@pytest.mark.virtual
async def test_what_never_comes_is_given_up_with_its_reason(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.syncer.prepare()
    await rig.syncer.everything(1)
    source = rig.source(BytesMoved(rig.told.append))
    source.stall_s = 60.0
    away(monkeypatch, source, lambda of: not of.endswith(".m"))
    began = ambient.monotonic()
    with pytest.raises(UnreadableRun, match="nothing has arrived for 60 s: the server is away"):
        await make(source, Order(rig.to), BytesMoved(rig.told.append))
    assert 60.0 <= ambient.monotonic() - began < 70.0
    assert rig.nothing_left()


@pytest.mark.virtual
async def test_a_bus_that_does_not_say_what_is_published_is_waited_for_and_given_up(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.syncer.prepare()
    await rig.syncer.everything(1)
    source = rig.source(BytesMoved(rig.told.append))
    source.stall_s = 60.0
    left = [2]  # refusals to come

    def refuses(of: str) -> bool:
        left[0] -= 1
        return left[0] >= 0

    away(monkeypatch, source, refuses)
    await source.begin()
    assert source.fetch_bytes > 0 and left == [-1]
    left[0], began = 1000, ambient.monotonic()
    with pytest.raises(UnreadableRun, match="message server does not answer: the server is away"):
        await source.begin()
    assert 59.0 <= ambient.monotonic() - began <= 60.0


@pytest.mark.virtual
@pytest.mark.timeout(600)
async def test_what_stops_in_the_middle_is_given_up_but_not_for_a_machine_that_slept(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.syncer.prepare()
    await rig.syncer.everything(1)
    source = rig.source(BytesMoved(rig.told.append))
    source.stall_s = 60.0
    sleeps = [100.0, 200.0]  # seconds that one attempt takes

    async def fetching(*_: Any, into: Any, moved: Any) -> Any:
        moved(1)  # what is there already is told by each attempt
        await asyncio.sleep(sleeps.pop() if sleeps else 1.0)
        raise observing_io.BusError("the server is away")

    monkeypatch.setattr(observing_io, "get_blob", fetching)
    monkeypatch.setattr(observing_io, "ATTEMPT_S_MAX", 10.0)
    monkeypatch.setattr(source, "_there", AsyncMock(return_value=True))
    began = ambient.monotonic()
    with pytest.raises(UnreadableRun, match="nothing has arrived for 60 s: the server is away"):
        await make(source, Order(rig.to), BytesMoved(rig.told.append))
    assert not sleeps and 300.0 + 25.0 < ambient.monotonic() - began < 300.0 + 60.0


async def test_damage_is_named_and_leaves_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observing_io, "LOOK_S", 0.0)
    await rig.syncer.prepare()
    made = await rig.syncer.everything(1)
    values_F = flatten(rig.syncer.layout, 2, made)
    monkeypatch.setattr("learner.exporting.publishing.digest_array", lambda values: "a" * 32)
    await rig.syncer.keyframe(2, values_F)
    with pytest.raises(
        UnreadableRun, match=r"fragment 2 could not be read.*has digest .*, and was"
    ):
        await rig.export()
    assert rig.nothing_left()


async def test_chunks_that_are_gone_are_named(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing_io, "LOOK_S", 0.0)
    monkeypatch.setattr(observing_io, "ATTEMPTS_MAX", 2)
    monkeypatch.setattr(blobs, "silence_s", lambda size: 0.05)
    await rig.syncer.prepare()
    await rig.syncer.everything(1)
    await rig.syncer.bus.purge(subjects.dn_stream("r"), "dn.r.0.1.0.1")
    with pytest.raises(UnreadableRun, match=r"fragment 1 could not be read in 2 attempts.*no good"):
        await rig.export()
    assert rig.nothing_left()


async def test_a_run_without_publication_or_version_says_so(rig: Rig) -> None:
    await rig.syncer.prepare()
    with pytest.raises(NotPublished, match="has published nothing yet"):
        await rig.export()
    await rig.syncer.everything(1)
    with pytest.raises(NotPublished, match=r"version 4 .* is version 0 of every fragment"):
        await rig.export(version=4)
    assert rig.nothing_left()


async def test_a_run_that_begins_meanwhile_is_waited_for(rig: Rig) -> None:
    await rig.syncer.prepare()
    progress = BytesMoved(rig.told.append)
    source = rig.source(progress)
    source.wait_s = 60.0
    asking = asyncio.create_task(make(source, Order(rig.to), progress))
    await asyncio.sleep(0.05)
    assert not asking.done()
    made = await rig.syncer.everything(1)
    await until(asking.done)
    same(load_file(rig.to / "model.safetensors"), made)


async def test_an_unknown_run_is_named(rig: Rig) -> None:
    await rig.syncer.prepare()
    assert (await spec_of(rig.syncer.bus, "r", "abc123")).name == "r"
    for run, run_id in (("nobody", ""), ("r", "ffff")):
        with pytest.raises(UnreadableRun, match=f"there is no run '{run}'"):
            await spec_of(rig.syncer.bus, run, run_id)


# --- folders and disks ---------------------------------------------------------------------------


async def test_a_folder_with_something_in_it_is_refused(rig: Rig) -> None:
    await rig.syncer.prepare()
    await rig.syncer.everything(1)
    rig.to.mkdir()
    (rig.to / "thesis.txt").write_text("mine")
    with pytest.raises(CannotWrite, match="holds something already"):
        await rig.export()
    assert os.listdir(rig.to.parent) == ["out"] and os.listdir(rig.to) == ["thesis.txt"]
    (rig.to / "thesis.txt").unlink()
    await rig.export()  # an empty one will do
    assert (rig.to / "diloco.json").exists()
    rig.to = rig.to / "diloco.json"
    with pytest.raises(CannotWrite, match="is no folder"):
        await rig.export()


async def test_a_disk_without_room_is_named_before_anything_is_fetched(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.syncer.prepare()
    await rig.syncer.everything(1)
    monkeypatch.setattr(writing_io, "free_bytes", lambda folder: 1 << 20)
    with pytest.raises(CannotWrite, match=r"has .* MB free, and the export takes"):
        await rig.export()
    assert rig.told == [] and rig.nothing_left()


async def test_a_disk_that_fills_meanwhile_leaves_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.syncer.prepare()
    await rig.syncer.everything(1)

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing_io._Digested, "write", full)
    with pytest.raises(CannotWrite, match=r"the disk of .*out is full: free space"):
        await rig.export()
    assert rig.nothing_left()


@pytest.mark.parametrize("number", UNKNOWN)
def test_a_file_system_that_settles_no_names_takes_exports_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    settles_no_names(monkeypatch, number)
    with appearing(tmp_path / "out") as folder:
        (folder / "a").touch()
    assert os.listdir(tmp_path) == ["out"] and os.listdir(tmp_path / "out") == ["a"]


def test_an_export_is_on_the_disk_before_and_after_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = Settled(monkeypatch)
    with appearing(tmp_path / "out") as folder:
        (folder / "a").touch()
    assert settled.calls == [{"a"}, {"out"}]


def test_an_export_whose_name_the_disk_does_not_take_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else whoever tries again is told that something is there already."""

    def fails(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError(FAILS, "Input/output error")

    monkeypatch.setattr(writing_io, "settle_names", fails)
    with (
        pytest.raises(CannotWrite, match=r"out cannot be written: .*Input/output"),
        appearing(tmp_path / "out") as folder,
    ):
        (folder / "a").touch()
    assert os.listdir(tmp_path) == []


async def test_a_folder_that_somebody_else_fills_meanwhile_is_left_to_them(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.syncer.prepare()
    await rig.syncer.everything(1)
    written = making_io.write_json

    def write(folder: Path, name: str, content: Any) -> Any:
        rig.to.mkdir()
        (rig.to / "thesis.txt").write_text("mine")
        return written(folder, name, content)

    monkeypatch.setattr(making_io, "write_json", write)
    with pytest.raises(CannotWrite, match="was filled by somebody else meanwhile"):
        await rig.export()
    assert os.listdir(rig.to.parent) == ["out"] and os.listdir(rig.to) == ["thesis.txt"]


async def test_what_is_cut_off_looks_like_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before its last file, it has no folder of its name."""
    await rig.syncer.prepare()
    await rig.syncer.everything(1)

    class Killed(BaseException):
        pass

    def killed(*_: Any) -> Any:
        assert not rig.to.exists()
        assert any(p.name.endswith(".partial") for p in rig.to.parent.iterdir())
        raise Killed

    monkeypatch.setattr(making_io, "write_json", killed)
    with pytest.raises(Killed):
        await rig.export()
    assert not rig.to.exists()


async def test_other_files_are_copied_beside_and_described(rig: Rig, tmp_path: Path) -> None:
    await rig.syncer.prepare()
    await rig.syncer.everything(1)
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "tokenizer.json").write_text("{}")

    def beside(*names: str) -> Callable[[RunSpec], Companions]:
        files = tuple(other / name for name in names)
        return lambda spec: Companions(files) if spec.name == "r" else Companions()

    manifest = await rig.export(companions=beside("tokenizer.json"))
    assert (rig.to / "tokenizer.json").read_text() == "{}"
    described = {f.name: f for f in manifest.files}["tokenizer.json"]
    assert described.sha256 == hashlib.sha256(b"{}").hexdigest()
    rig.to = tmp_path / "second"
    (other / "model.safetensors").write_text("not ours")
    with pytest.raises(CannotWrite, match=r"two files .* 'model\.safetensors'"):
        await rig.export(companions=beside("model.safetensors"))
    twice = beside("tokenizer.json", "../elsewhere/tokenizer.json")
    with pytest.raises(CannotWrite, match=r"two files .* 'tokenizer\.json'"):
        await rig.export(companions=twice)


async def test_a_file_that_is_asked_for_takes_the_place_of_the_tokenizers(
    rig: Rig, tmp_path: Path
) -> None:
    await rig.syncer.prepare()
    await rig.syncer.everything(1)
    given = tmp_path / "elsewhere" / "tokenizer.json"
    given.parent.mkdir()
    given.write_text("given")
    contents = {"tokenizer.json": b"its own", "tokenizer_config.json": b"{}"}
    manifest = await rig.export(companions=lambda _: Companions((given,), contents))
    assert given.read_text() == (rig.to / "tokenizer.json").read_text()
    assert (rig.to / "tokenizer_config.json").read_text() == "{}"
    names = [f.name for f in manifest.files]
    assert names.count("tokenizer.json") == names.count("tokenizer_config.json") == 1


@pytest.mark.parametrize(("dtype", "named"), [("fp32", "float32"), ("bf16", "bfloat16")])
async def test_a_known_architecture_has_its_config(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, dtype: Any, named: str
) -> None:
    await rig.syncer.prepare()
    await rig.syncer.everything(1)
    asked: list[Any] = []

    def config(shape: Any, **tokens: Any) -> dict[str, Any]:
        asked.append((shape.width, tokens))
        return {"architectures": ["Known"]}

    monkeypatch.setattr("diloco_learner.exporting.files.hf_config", config)
    beside = Companions(tokens={"eos_token_id": 3})
    manifest = await rig.export(dtype=dtype, companions=lambda spec: beside)
    # Loaded in another than the files have, a model of bf16 takes twice the memory.
    assert asked == [(8, {"context": 8, "dtype": named, "eos_token_id": 3})]
    assert json.loads((rig.to / "config.json").read_text()) == {"architectures": ["Known"]}
    assert "config.json" in {f.name for f in manifest.files}


async def test_half_the_bytes_as_bf16(rig: Rig) -> None:
    await rig.syncer.prepare()
    made = await rig.syncer.everything(1)
    await rig.export(dtype="bf16")
    found = load_file(rig.to / "model.safetensors")
    for name, array in made.items():
        error = np.abs(found[name].astype(np.float32) - array)
        assert np.all(error <= 2.0**-8 * np.abs(array))


def nearly_fill(disk: Path, left: int) -> None:
    filler = fill(disk)
    os.truncate(filler, filler.stat().st_size - left)


@pytest.mark.live
async def test_a_real_disk_that_is_full_is_named_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen before anything is fetched; or, if others fill it meanwhile, when it takes no more."""
    with small_disk(tmp_path / "disk", MIB) as disk:
        rig = Rig(disk)
        await rig.syncer.prepare()
        await rig.syncer.everything(1)
        with pytest.raises(CannotWrite, match="free, and the export takes"):
            await rig.export()
        monkeypatch.setattr(making_io, "check_room", lambda folder, needed: None)
        nearly_fill(disk, 20_000)  # less than the weights take
        before = sorted(os.listdir(disk))
        with pytest.raises(CannotWrite, match=r"the disk of .*out is full: free space"):
            await rig.export()
        assert sorted(os.listdir(disk)) == before
