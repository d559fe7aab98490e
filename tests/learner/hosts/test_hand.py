"""What a process that follows makes of orders that it cannot carry out, and of a run it may not."""

from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from diloco_learner.hosts import following_io, plan, trainer
from diloco_learner.hosts.computing_io import OnHosts, programs
from diloco_learner.hosts.following_io import EvaluationFailed, LeadingHost
from diloco_learner.hosts.hand import Beside, Hand, NoGift
from diloco_learner.hosts.link_io import head_of
from diloco_learner.hosts.place import HostPlace
from diloco_learner.hosts.sharded import Promised, Told
from diloco_learner.hosts.trainer import HostsTrainer
from diloco_learner.hosts.whole import HostLost, Over
from diloco_learner.training import platforms
from diloco_learner.training.mesh import of_all
from diloco_learner.training.trainer import Trainer
from diloco_shared.hf.resolving import resolved
from diloco_shared.reach.local import OutOfReach, Reach
from diloco_shared.spec.mesh import MeshSizes, WrongMesh
from diloco_shared.spec.run import RunSpec

GOLDEN = Path(__file__).parents[2] / "interop" / "golden"


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


def test_a_host_tells_that_it_reads_the_weights_that_a_run_begins_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is busy with that order as long as it takes, and gives nothing meanwhile."""
    moved: list[int] = []
    model = resolved({"weights": "llama", "context_tokens": 8}, GOLDEN)
    spec = RunSpec.model_validate({"name": "r", "budget": {"steps": 10}, "model": model})
    order = plan.Prepare(spec.model_dump_json(), "fsdp=1", -1)
    hand = Hand(partial(programs, Reach(GOLDEN), moved=lambda: moved.append(1)))
    hand.carry_out(order, b"")
    assert moved, "for its digest"
    assert hand.program is not None and hand.program.weights is not None
    for name in ("final_norm/scale_D", "embedding/tokens_VxD"):
        before = len(moved)
        hand.program.weights.read(name)
        assert len(moved) > before, "and tensor by tensor, as it begins"


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

    leader = LeadingHost(HostPlace(2, 1, "node0", 8470))
    monkeypatch.setattr(leader, "_say", lambda *values: said.append(values))
    monkeypatch.setattr(following_io, "end", ends)
    leader.give(7, Promised(lost))
    leader._give()
    why = "RuntimeError: a device is lost"
    assert said == [("failed", why), ("ends", why, 1)]


class Full(Hand):
    """One without memory for anything."""

    def __init__(self) -> None:
        super().__init__(refuses)  # type: ignore[arg-type]

    def carry_out(self, order: plan.Order, data: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED")


def test_a_host_without_room_for_an_evaluation_says_so_and_follows_on() -> None:
    """Before anything that all compute together."""
    leader = LeadingHost(HostPlace(2, 1, "node0", 8470))
    following_io._carry_out(leader, Full(), 7, plan.Assemble(), b"")
    assert leader.given.get(timeout=9) == (7, NoGift("RuntimeError: RESOURCE_EXHAUSTED"))


class Compiles(Hand):
    """One that is told to compile while orders go on, and takes until it is let."""

    def __init__(self, fails: bool) -> None:
        super().__init__(refuses)  # type: ignore[arg-type]
        self.fails, self.let = fails, Event()

    def carry_out(self, order: plan.Order, data: Any) -> Any:
        return Beside(self._compile)

    def _compile(self) -> None:
        assert self.let.wait(9)
        if self.fails:
            raise MemoryError("3 GB")


@pytest.mark.parametrize(("fails", "given"), [(False, []), (True, NoGift("MemoryError: 3 GB"))])
def test_orders_go_on_while_a_host_compiles_an_evaluation(fails: bool, given: Any) -> None:
    """A large model's takes minutes, and the steps of all hosts would wait for it."""
    leader, hand = LeadingHost(HostPlace(2, 1, "node0", 8470)), Compiles(fails)
    following_io._carry_out(leader, hand, 7, plan.Compile(17, (5,)), b"")
    assert leader.given.empty(), "the next order is taken up before that is done"
    hand.let.set()
    assert leader.given.get(timeout=9) == (7, given)


def test_what_a_host_could_not_do_is_sent_by_the_thread_that_sends_its_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One thread sends all answers: two would mix up their frames."""
    sent: list[bytes] = []

    class Sent(Exception):
        pass

    def send(sock: Any, head: bytes, parts: Any) -> None:
        sent.append(head)
        raise Sent

    leader = LeadingHost(HostPlace(2, 1, "node0", 8470))
    leader.answering = None  # type: ignore[assignment]
    monkeypatch.setattr(following_io, "send", send)
    monkeypatch.setattr(leader, "failed", lambda why: None)
    monkeypatch.setattr(following_io, "end", lambda why, status: None)
    leader.give(7, NoGift("no room"))
    leader._give()
    assert sent == [head_of(7, "no room")]


@pytest.mark.parametrize("order", [plan.Assembled(0, 1), plan.Evaluate((5, 17), "int32")])
def test_a_host_that_fails_where_all_compute_says_in_what(order: plan.Order) -> None:
    """They wait for it there: the island ends, and this is why."""
    leader = LeadingHost(HostPlace(2, 1, "node0", 8470))
    with pytest.raises(EvaluationFailed, match="RuntimeError: RESOURCE_EXHAUSTED"):
        following_io._carry_out(leader, Full(), 7, order, b"")


class Turn:
    """Whether somebody has it."""

    held = False

    def __enter__(self) -> None:
        self.held = True

    def __exit__(self, *of_error: object) -> None:
        self.held = False


class Evaluating(HostsTrainer):
    """Process 0, of which only what it computes together with others is of interest."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.did: list[Any] = []  # orders that it told, their numbers as answers came, and the rest
        self.link: Any = SimpleNamespace(
            lose=self.lost.append, tell=self.told, answers=self.answers, turn=Turn()
        )
        evaluate = SimpleNamespace(shapes=lambda held: [(5, 17), (2, 17)])
        inner = SimpleNamespace(batch_sequences=4, accumulation=2)
        self.program: Any = SimpleNamespace(evaluate=evaluate, spec=SimpleNamespace(inner=inner))
        self.chunk_bytes, self.params, self.opt_state = 1, None, None

    def told(self, order: plan.Order, parts: Any = None) -> int:
        self.did.append(order)
        return len(self.did)

    def answers(self, number: int) -> dict[int, bytes]:
        self.did.append(self.did[number - 1].__class__)
        return {1: b""}

    def stored(self) -> Any:
        return {}

    def fragment(self, p: int) -> Any:
        self.did.append("read")


def test_nothing_is_computed_before_all_hosts_have_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever comes first to a program waits in it, and the libraries below do so for half a minute
    on processors."""
    island = Evaluating()
    monkeypatch.setattr(Trainer, "warm_up", lambda self, batch: self.did.append("compiled"))
    monkeypatch.setattr(trainer, "warm_rows", lambda *_: island.did.append("computed"))
    island._prepare()
    compiles, computes = [plan.WarmUp(8), "compiled", plan.WarmUp], [plan.WarmRows(), "computed"]
    assert island.did == [*compiles, *computes, plan.WarmRows, "read"]


def test_process_0_compiles_an_evaluation_without_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps wait for whoever has it."""
    island = Evaluating()

    def compiles(program: Any, order: Any) -> None:
        assert not island.link.turn.held
        island.did.append("compiled")

    def empty(program: Any) -> str:
        assert island.link.turn.held, "memory is taken at one place in the plan"
        return "zeros"

    monkeypatch.setattr(trainer, "compile_evaluation", compiles)
    monkeypatch.setattr(trainer, "empty", empty)
    held: Any = SimpleNamespace(sequences_SxL1=np.zeros((7, 17)))
    assert island._begun(held) == "zeros"
    compile = [plan.Compile(17, (5, 2)), "compiled", plan.Compile]
    assert island.did == [*compile, plan.Assemble(), plan.Assemble]


def test_process_0_ends_the_island_where_it_fails_alone_in_what_all_compute() -> None:
    """The others wait in that program: with the next step they would compute something else."""
    island = Evaluating()
    why = "process 0 failed in an evaluation: MemoryError: 3 GB"
    with pytest.raises(HostLost, match=why), island._in_step():
        raise MemoryError("3 GB")
    assert island.lost == [why]


def test_work_that_is_over_is_no_failure_of_an_evaluation() -> None:
    island = Evaluating()
    with pytest.raises(Over), island._in_step():
        raise Over("the work for this run is over")
    assert island.lost == []
