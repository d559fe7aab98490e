"""What a run may open in a learner: with its default settings, what lies in its folder alone."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from learner.contexts import learner
from shared.corpora.texts import folder_of, prepared
from waiting import until

from diloco_learner.app import Learner
from diloco_learner.exporting.__main__ import of_tokenizer
from diloco_learner.recovery.checkpoint_io import read_part
from diloco_learner.settings import Settings
from diloco_learner.training.computing_io import OnThisMachine
from diloco_shared.checkpoints.checkpoints_io import RunCheckpoints
from diloco_shared.checkpoints.vault_io import Vault
from diloco_shared.process.membership import DataFolder
from diloco_shared.reach.local import OutOfReach
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus

GOLDEN = Path(__file__).parents[1] / "interop" / "golden"
DIGEST = "0" * 32


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a learner; what is private lies beside it."""
    folder_of(tmp_path / "here" / "text", 60)
    folder_of(tmp_path / "private" / "text", 60)
    prepared(tmp_path / "private" / "text", tmp_path / "private" / "corpus")
    shutil.copytree(GOLDEN / "qwen3", tmp_path / "private" / "weights")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("DILOCO_DATA_ROOT", raising=False)
    monkeypatch.delenv("DILOCO_FACTORIES", raising=False)
    return tmp_path / "here"


def deployed(here: Path, **more: Any) -> OnThisMachine:
    """What a learner process computes with, whose settings say nothing."""
    bus = MemoryBus(MemoryBroker(), "a")
    settings = Settings(id="a", data=here / "kept", **more)
    folder = DataFolder(here / "kept", "a")
    app = Learner(settings, bus, bus, folder)
    folder.release()
    assert isinstance(app.computing, OnThisMachine)
    return app.computing


def run_of(**tables: dict[str, Any]) -> RunSpec:
    """Of a text in the working directory, unless it says otherwise."""
    body: dict[str, Any] = {"name": "r", "id": "0f", "budget": {"steps": 9}}
    body["data"] = {"source": "text", "virtual_shards": 2} | tables.get("data", {})
    body["model"] = {"context_tokens": 8} | tables.get("model", {})
    return RunSpec.model_validate(body)


def named(private: Path) -> dict[str, dict[str, Any]]:
    """Every setting of a run that names a path."""
    text = {"source": str(private / "text")}
    return {
        "text": {"data": text},
        "a prepared corpus": {"data": {"source": str(private / "corpus")}},
        "a part of a mixture": {
            "data": {"mixture": [{**text, "weight": 1}, {"source": "stdlib", "weight": 1}]}
        },
        "a tokenizer": {"data": {"tokenizer": str(private / "weights" / "tokenizer.json")}},
        "weights": {"model": {"weights": str(private / "weights"), "weights_digest": DIGEST}},
        "up and out": {"data": {"source": "../private/text"}},
    }


@pytest.mark.parametrize("what", named(Path()))
def test_no_path_of_a_run_leads_a_learner_out_of_its_folder(what: str, here: Path) -> None:
    spec = run_of(**named(here.parent / "private")[what])
    with pytest.raises(OutOfReach, match="the path"):
        deployed(here).build(spec)


def test_a_link_in_the_folder_leads_nowhere_else(here: Path) -> None:
    (here / "leads").symlink_to(here.parent / "private" / "text")
    with pytest.raises(OutOfReach):
        deployed(here).build(run_of(data={"source": "leads"}))


def test_a_checkpoint_elsewhere_is_neither_opened_nor_listed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(Vault, "__init__", lambda vault, root: opened.append(root))
    for address in ("s3://evil/x", "/etc", f"{here}/kept/checkpoints-evil", "file:///etc"):
        model = {"weights": f"checkpoint:{address}/r.x/000001", "weights_digest": DIGEST}
        with pytest.raises(ValueError, match="DILOCO_CHECKPOINT_ROOTS"):
            deployed(here).build(run_of(model=model))
    assert not opened


def test_no_module_is_imported_unless_the_site_allows_it(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(here))
    (here / "curious.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    for factory in ("curious:make", "os:system", "subprocess:run"):
        with pytest.raises(OutOfReach, match="DILOCO_FACTORIES"):
            deployed(here).build(run_of(model={"factory": factory}))
    assert not (here / "imported").exists()
    assert sys.modules["os"] is os, "a refusal forgets nothing that this process runs on"
    with pytest.raises(ValueError, match="cannot be loaded"):
        deployed(here, factories="curious").build(run_of(model={"factory": "curious:make"}))
    assert (here / "imported").exists()


def test_an_export_takes_no_file_along_from_outside(here: Path) -> None:
    spec = run_of(data={"source": str(here.parent / "private" / "corpus")})
    reach = Settings(data=here / "kept").reach
    assert not of_tokenizer(spec, reach.data).contents
    allowed = Settings(data=here / "kept", data_root=str(here.parent)).reach
    assert of_tokenizer(spec, allowed.data).contents


@pytest.mark.whole
async def test_what_a_learner_may_not_open_is_the_runs_reason(
    broker: MemoryBroker, syncer: Any, tmp_path: Path
) -> None:
    """Of its folder too, as a member of the run: whose settings name no root for its corpus."""
    (tmp_path / "site").mkdir()
    await syncer.prepare()
    await syncer.assign("a", "r")
    site = str(tmp_path / "site")
    async with syncer.serving(), learner(broker, tmp_path, "a", data_root=site) as (app, _):
        await until(lambda: app.membership.record.state == "unfit")
        reason = app.membership.record.reason
        assert "outside the folders that runs may read" in reason and "DILOCO_DATA_ROOT" in reason
        assert site not in reason, "its folders are the site's own"
    keeping = syncer.spec.keeping.model_copy(update={"run_checkpoint_root": "s3://evil/x"})
    syncer.spec = syncer.spec.model_copy(update={"keeping": keeping})
    await syncer.prepare()
    async with syncer.serving(), learner(broker, tmp_path, "a") as (app, _):
        await until(lambda: app.membership.record.state == "unfit")
        assert app.membership.record.reason.startswith("keeping.run_checkpoint_root: 's3://evil/x'")


def test_a_preflight_refuses_what_a_learner_would(here: Path) -> None:
    body = run_of(
        model={"factory": "os:system"}, data={"source": str(here.parent / "private" / "text")}
    )
    done = subprocess.run(
        [sys.executable, "-m", "diloco_learner.preflight"],
        input=body.model_dump_json(),
        capture_output=True,
        text=True,
        check=False,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    by_name = {f["name"]: f for f in found if "name" in f}
    assert done.returncode == 1 and "DILOCO_FACTORIES" in by_name["model"]["text"]
    assert "DILOCO_DATA_ROOT" in by_name["corpus"]["text"] and by_name["corpus"]["remedy"]


def test_a_reference_on_the_bus_leads_no_learner_to_another_place(tmp_path: Path) -> None:
    """Of moments to go back to, that a beat names."""
    there = RunCheckpoints(str(tmp_path))
    moments, why = read_part(there.root, "s3://evil/x/r.x/000001", "a", lambda arrays: None)
    assert moments is None and "DILOCO_CHECKPOINT_ROOTS" in why[0]
