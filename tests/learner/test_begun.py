"""A run that is further than the weights it began from: its learners do without them."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from learner.contexts import learner
from waiting import until

from diloco_learner.hosts import plan
from diloco_learner.hosts.computing_io import OnHosts, programs
from diloco_learner.training.computing_io import OnThisMachine
from diloco_learner.training.trainer import Program, Trainer, Unread
from diloco_learner.work_io import merged
from diloco_shared.corpora.tokenizers import ByteTokenizer
from diloco_shared.hf import resolving
from diloco_shared.hf.resolving import resolved
from diloco_shared.hf.tokenizer import files_of
from diloco_shared.hf.weights import HfWeights, WrongCheckpoint
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Stamp
from diloco_shared.protocol.records import RunStatus
from diloco_shared.protocol.wire import encode
from diloco_shared.reach.local import Reach
from diloco_shared.spec.mesh import MeshSizes
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker

GOLDEN = Path(__file__).parents[1] / "interop" / "golden"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the weights are, and a corpus of as many tokens as they know."""
    shutil.copytree(GOLDEN / "llama", tmp_path / "root" / "llama")
    tokens = np.random.default_rng(0).integers(0, 48, 20_000)
    tokens.astype(np.uint16).tofile(tmp_path / "root" / "tokens.bin")
    (tmp_path / "root" / "tokens.json").write_text('{"vocabulary": 48}')
    return tmp_path / "root"


@pytest.fixture
def begun(spec: RunSpec, root: Path) -> RunSpec:
    """A run from those weights."""
    body = spec.model_dump(mode="json")
    model = resolved({"weights": "llama", "context_tokens": 8}, root)
    data = body["data"] | {"source": "tokens.bin"}
    return RunSpec.model_validate(body | {"model": model, "data": data})


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is read of weights."""
    found: list[str] = []
    plain, digest = HfWeights.read, resolving.digest_of

    def one(weights: HfWeights, name: str) -> Any:
        found.append(name)
        return plain(weights, name)

    def whole(weights: HfWeights) -> str:
        found.append("all of it")
        return digest(weights)

    monkeypatch.setattr(HfWeights, "read", one)
    monkeypatch.setattr(resolving, "digest_of", whole)
    return found


def status(*versions: int, **change: Any) -> RunStatus:
    shown = {
        "run": "r",
        "state": "running",
        "reason": "as planned",
        "leader": "syncer",
        "versions": versions,
        "stamp": Stamp(round=2, steps=3, fraction=0.1, fraction_per_step=0.01),
        "refused": {},
        "alive": (),
        "participating": (),
        "learners": {},
    }
    counts = dict.fromkeys(
        (name for name, field in RunStatus.model_fields.items() if field.is_required()), 0
    )
    return RunStatus.model_validate(counts | shown | change)


def test_nothing_of_them_is_read_and_parameters_are_zeros(
    begun: RunSpec, root: Path, read: list[str]
) -> None:
    shutil.rmtree(root / "llama")
    built = OnThisMachine(Reach(root)).build(begun, begun=True)
    trainer: Trainer = built.trainer
    assert trainer.program.unread and read == []
    fragments = range(begun.algorithm.fragments)
    assert not any(trainer.fragment(p).any() for p in fragments)
    rng = np.random.default_rng(0)
    for p in fragments:
        trainer.adopt(p, rng.standard_normal(trainer.fragment(p).size).astype(np.float32), 0.0)
        np.testing.assert_array_equal(trainer.fragment(p), trainer.anchors[p])
    with pytest.raises(ValueError, match="is further than the weights it began from"):
        Unread().read("embedding/tokens_VxD")


def test_the_folder_is_wanted_where_the_run_begins_with_it(
    begun: RunSpec, root: Path, read: list[str]
) -> None:
    program = OnThisMachine(Reach(root)).build(begun).trainer.program
    assert not program.unread and "all of it" in read and len(read) > 1
    shutil.rmtree(root / "llama")
    with pytest.raises(WrongCheckpoint, match="there is no such folder"):
        OnThisMachine(Reach(root)).build(begun)


def test_tokens_that_the_weights_do_not_know_are_refused_before_it_begins(
    begun: RunSpec, root: Path, read: list[str]
) -> None:
    (root / "llama" / "tokenizer.json").write_bytes(b"of somebody else")
    for name, content in files_of(ByteTokenizer()).items():
        (root / name).write_bytes(content)
    data = begun.data.model_copy(update={"tokenizer": "tokenizer.json"})
    other = begun.model_copy(update={"data": data})
    with pytest.raises(ValueError, match="come with another one"):
        OnThisMachine(Reach(root)).build(other)
    assert read == [], "for nothing"
    assert OnThisMachine(Reach(root)).build(other, begun=True).trainer.program.unread


def test_the_other_hosts_of_an_island_do_not_open_them_either(
    begun: RunSpec, root: Path, read: list[str]
) -> None:
    shutil.rmtree(root / "llama")
    told: list[plan.Order] = []
    link = SimpleNamespace(
        check=lambda: None, tell=told.append, answers=lambda number: {1: b"no devices"}
    )
    island: Any = SimpleNamespace(building=SimpleNamespace(work=link), _close=lambda: None)
    with pytest.raises(ValueError, match="no devices"):
        OnHosts.trainer(island, Program.build(begun, Unread()), MeshSizes(), None)
    (order,) = told
    assert isinstance(order, plan.Prepare) and order.begun
    assert plan.decode(plan.encode(0, order)) == (0, order)
    assert programs(Reach(root), order).unread and read == []
    with pytest.raises(WrongCheckpoint, match="there is no such folder"):
        programs(Reach(root), replace(order, begun=False))


def test_a_run_from_a_seed_makes_its_parameters_whatever_it_has_merged(spec: RunSpec) -> None:
    trainer: Trainer = OnThisMachine(Reach(Path("/"))).build(spec, begun=True).trainer
    assert not trainer.program.unread and trainer.fragment(0).any()


def test_versions_of_a_shards_own_fragments_count(spec: RunSpec) -> None:
    algorithm = spec.algorithm.model_copy(update={"shards": 2})
    both = spec.model_copy(update={"algorithm": algorithm})
    assert merged(status(1, 1, 2), spec, 0) and not merged(status(1, 0, 2), spec, 0)
    assert merged(status(1, -1, 2), both, 0) and not merged(status(1, -1, 2), both, 1)
    assert not merged(status(1, 1), spec, 0) and not merged(None, spec, 0)


@pytest.mark.whole
async def test_learners_join_a_run_whose_weights_were_moved_and_read_them_if_it_lost_all(
    begun: RunSpec,
    root: Path,
    syncer: Any,
    broker: MemoryBroker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("diloco_learner.app.UNFIT_RETRY_S", 0.02)
    (root / "llama").rename(tmp_path / "moved")
    syncer.spec, key = begun, subjects.status_key("r", 0)
    await syncer.prepare()
    await syncer.assign("a", "r")
    async with (
        syncer.serving(),
        learner(broker, tmp_path, "a", data_root=str(root)) as (app, task),
    ):
        await until(lambda: app.membership.record.state == "unfit", "for want of its weights")
        assert "there is no such folder" in app.membership.record.reason
        await syncer.bus.kv_put(subjects.STATUS, key, encode(status(1, 1, 1)))
        await until(lambda: bool(syncer.joins), "a join without them")
        assert app.membership.record.state == "working"
        syncer.state, syncer.fields = "bootstrapping", {"initializer": "a"}
        await until(lambda: app.membership.record.state == "unfit", "for want of them again")
        (tmp_path / "moved").rename(root / "llama")
        await syncer.bootstrap("a")
        assert all(np.abs(anchor_F).max() > 0 for anchor_F in syncer.anchors.values())
        await syncer.reported("a", lambda p: p.step > 0)
        assert not task.done()
