"""What a process that follows makes of orders that it cannot carry out, and of a run it may not."""

from pathlib import Path
from typing import Any

import pytest

from diloco_learner.hosts import following_io, plan
from diloco_learner.hosts.computing_io import OnHosts, programs
from diloco_learner.hosts.following_io import Leader
from diloco_learner.hosts.hand import Hand
from diloco_learner.hosts.place import HostPlace
from diloco_learner.hosts.sharded import Promised, Told
from diloco_learner.training import platforms
from diloco_learner.training.mesh import of_all
from diloco_shared.reach.local import OutOfReach, Reach
from diloco_shared.spec.mesh import MeshSizes, WrongMesh
from diloco_shared.spec.run import RunSpec


def refuses(order: plan.Prepare) -> None:
    raise ModuleNotFoundError("mine")


def test_orders_come_after_a_run_was_prepared() -> None:
    hand = Hand(refuses)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="before a run was prepared"):
        hand.carry_out(plan.Begin(), b"")
    with pytest.raises(ModuleNotFoundError):
        hand.carry_out(plan.Prepare("{}", "fsdp=2", -1), b"")
    assert hand.carry_out(plan.Leave(), b"") is None
    assert hand.carry_out(plan.Bye(), b"") is None


def test_a_model_that_this_host_may_not_import_is_refused_here(tmp_path: Path) -> None:
    spec = RunSpec.model_validate(
        {
            "name": "r",
            "model": {"factory": "mine:model"},
            "budget": {"steps": 10},
        }
    )
    order = plan.Prepare(spec.model_dump_json(), "fsdp=2", -1)
    with pytest.raises(OutOfReach, match="mine"):
        programs(Reach(tmp_path), order)


def test_a_host_without_the_devices_that_it_was_told_to_use_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would compute on its processor, and hold up all others."""

    class Without(Exception):
        pass

    def check() -> None:
        raise Without

    monkeypatch.setattr(platforms, "check", check)
    spec = RunSpec.model_validate({"name": "r", "budget": {"steps": 10}})
    with pytest.raises(Without):
        programs(Reach(tmp_path), plan.Prepare(spec.model_dump_json(), "fsdp=2", -1))


def test_an_island_computes_on_the_devices_of_all_its_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jax.devices", lambda: ["here", "there"])
    island: Any = object()
    assert OnHosts.there(island) == ["here", "there"]


def test_every_process_has_a_part_of_the_mesh() -> None:
    sizes = MeshSizes(fsdp=4, tensor=2)
    assert of_all(sizes, 8, 4) is sizes
    with pytest.raises(WrongMesh, match=r"takes 4 of the 6 devices .*inner.batch_sequences \(it"):
        of_all(MeshSizes(fsdp=4), 6, 8)


def test_a_host_that_cannot_fetch_what_it_gives_says_so_and_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its thread would end alone, and all others wait a quarter of an hour for what it gives."""
    said: list[tuple[Any, ...]] = []

    def lost() -> Told:
        raise RuntimeError("a device is lost")

    def ends(why: str, status: int) -> None:
        said.append(("ends", why, status))

    leader = Leader(HostPlace(2, 1, "node0", 8470))
    monkeypatch.setattr(leader, "_say", lambda *values: said.append(values))
    monkeypatch.setattr(following_io, "end", ends)
    leader.give(7, Promised(lost))
    leader._give()
    why = "RuntimeError: a device is lost"
    assert said == [("failed", why), ("ends", why, 1)]
