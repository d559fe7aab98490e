"""A world sees which training data are read: what is left out, read twice or taken from others.

The product is broken in one place, a world is played in which little else goes wrong, and the
promise `data` must be named, with what was seen.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from diloco_learner.data import leases, leasing_io
from diloco_learner.data.batches_io import Batches
from diloco_learner.data.leasing_io import Leases
from diloco_learner.data.shards import ShardReader
from diloco_shared.protocol.messages import Cursor
from diloco_simulator.checkers import data
from diloco_simulator.inside import learners
from diloco_simulator.troubles.troubles import Troubles
from diloco_simulator.worlds import computing
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.world import WorldResult, played
from diloco_syncer.checkpoints.checkpointing_io import Checkpointer
from diloco_syncer.history.ledger import Ledger
from diloco_syncer.messages import data_leases_io
from diloco_syncer.messages.merged_positions_io import MergedPositions

CALM = Options.calm(learners=2, quorum=1, steps=48, safety_s=30.0, data_shards=12)
Break = Callable[[pytest.MonkeyPatch], None]
# Learners ask the leader for leases.
NAMED = {"named": True}
# It goes back to a checkpoint, once.
BACK = {"checkpoint_every_steps": 12, "restores": 1, "steps": 60, "safety_s": 50.0}
SHORT = {"safety_s": 20.0}
# Nobody reads a shard to its end.
LONG = {"data_shards": 0, "steps": 90}


def calm(**changes: Any) -> WorldResult:
    return played(Case(1, CALM.changed(**changes)))


def in_the_midst(what: str, *, after_s: float = 16.0) -> Break:
    """A learner dies and comes back, or stands still for twenty seconds."""

    def plan(self: Troubles) -> None:
        def strikes() -> None:
            machine = self.world.learners[0]
            if what == "dies":
                self.world.crash(machine, 2.0)
            elif (process := machine.process) is not None:
                process.freeze()
                self.loop.call_later(20.0, self.goes_on, process)

        self.loop.call_later(after_s, strikes)

    return lambda patch: patch.setattr(Troubles, "plan", plan)


def of_takeovers(patch: pytest.MonkeyPatch) -> None:
    """Whoever looks for a shard takes everybody else for gone, and the leader agrees."""

    def alone(*args: Any, **kwargs: Any) -> int | None:
        return leases.choose(*args, **{**kwargs, "live": {kwargs["learner"]}})

    patch.setattr(leasing_io, "choose", alone)
    patch.setattr(data_leases_io, "why_not", lambda *args, **kwargs: "")


def of_lost_leases(patch: pytest.MonkeyPatch) -> None:
    """Whoever stood still reads on what another one reads by now."""
    in_the_midst("stands still", after_s=8.0)(patch)
    patch.setattr(Leases, "_lost", lambda self, shard: None)
    # It has much of its shard before it, which is the first one that the other learner looks at.
    patch.setattr(computing, "SEQUENCES_SOME", 160)
    patch.setattr(leasing_io, "order", lambda shards, learner, seed: list(range(shards)))
    for module in (data, learners):
        patch.setattr(module, "SEEN_S", 3.0)


def of_merged_places(patch: pytest.MonkeyPatch) -> None:
    """Nobody is told what is merged, and a learner dies."""

    async def nothing(self: MergedPositions) -> None:
        self.known = True

    in_the_midst("dies")(patch)
    patch.setattr(data, "TOLD_S", 15.0)  # the world is a short one
    patch.setattr(MergedPositions, "write", nothing)


def of_ledgers(patch: pytest.MonkeyPatch) -> None:
    """A step more is taken for merged than is, and a learner dies."""
    read = Ledger.read

    def more(self: Ledger, cursor: Cursor) -> None:
        read(self, cursor.model_copy(update={"sequences": cursor.sequences + 8}))

    in_the_midst("dies")(patch)
    patch.setattr(Ledger, "read", more)


def of_grants(patch: pytest.MonkeyPatch) -> None:
    """A learner that comes back begins each shard anew, whatever its lease says."""
    grant = Batches.grant

    def anew(self: Batches, shard: int, sequences: int, passes: int, **how: Any) -> None:
        grant(self, shard, 0, passes, **how)

    in_the_midst("dies")(patch)
    patch.setattr(Batches, "grant", anew)


def of_cursors(patch: pytest.MonkeyPatch) -> None:
    """A contribution says that a step more was read."""
    cursor = Batches.cursor.fget  # type: ignore[attr-defined]

    def more(self: Batches) -> Cursor | None:
        found: Cursor | None = cursor(self)
        return found and found.model_copy(update={"sequences": found.sequences + 8})

    patch.setattr(Batches, "cursor", property(more))


def of_ends(patch: pytest.MonkeyPatch) -> None:
    """A contribution says that the present shard was read to its end."""
    cursor = Batches.cursor.fget  # type: ignore[attr-defined]

    def all_of_it(self: Batches) -> Cursor | None:
        found: Cursor | None = cursor(self)
        return found and found.model_copy(update={"finished": ((found.shard, found.passes),)})

    patch.setattr(Batches, "cursor", property(all_of_it))


def of_readers(patch: pytest.MonkeyPatch) -> None:
    """After each read a sequence is left out."""
    take = ShardReader.take

    def less(self: ShardReader, *args: Any) -> Any:
        found = take(self, *args)
        self.consumed = min(self.consumed + 1, self.size)
        self._look_up(1)
        return found

    patch.setattr(ShardReader, "take", less)


def of_passes(patch: pytest.MonkeyPatch) -> None:
    """Nobody ever wants the first shard."""
    order = leases.order
    patch.setattr(leasing_io, "order", lambda *args: [s for s in order(*args) if s])


def of_given_back(patch: pytest.MonkeyPatch) -> None:
    """A shard that was read once counts as read twice."""
    back = leases.given_back
    patch.setattr(leasing_io, "given_back", lambda shard, passes: back(shard, passes + 1))


def of_restores(patch: pytest.MonkeyPatch) -> None:
    """A run goes back, and its data are read on as if it had not."""

    async def nothing(self: Any, *args: Any, **how: Any) -> None:
        pass

    patch.setattr(Checkpointer, "lease_from", nothing)


FAULTS: dict[str, tuple[Break, str, dict[str, Any]]] = {
    "two holders of one lease": (of_takeovers, "which lives", {}),
    "two holders, and the leader writes": (of_takeovers, "which lives", NAMED),
    "a lease that was lost": (
        of_lost_leases,
        "without a lease, and data shard",
        {"safety_s": 20.0},
    ),
    "a place that nobody is told": (of_merged_places, "again, which is merged", LONG),
    "a place beyond what is merged": (of_ledgers, "leaves out what nobody had merged", {}),
    "a place that is forgotten": (of_grants, "its lease begins at", LONG),
    "a cursor that says too much": (of_cursors, "says in round", {}),
    "an end that was not reached": (of_ends, "to its end", {}),
    "sequences that are left out": (of_readers, "its lease begins at", {}),
    "a shard that a pass leaves out": (of_passes, "data shard 0 was free", {"steps": 90}),
    "a pass that is left out": (of_given_back, "leaves out what nobody had merged", {}),
    "a restore that sets nothing back": (of_restores, "what comes before it is not", BACK),
}


@pytest.mark.parametrize(
    "changes", [{}, NAMED, LONG, BACK, {"hosts": (2,), "data_shards": 17}], ids=str
)
@pytest.mark.whole
def test_what_is_read_in_a_calm_world_is_looked_at(changes: dict[str, Any]) -> None:
    found = calm(**changes)
    assert found.violations == [] and found.looks["data"] > 100


@pytest.mark.whole
@pytest.mark.parametrize("what", ["dies", "stands still"])
def test_who_comes_back_reads_on_where_its_work_was_merged(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_midst(what)(monkeypatch)
    for changes in ({}, LONG):
        assert calm(**changes).violations == []


@pytest.mark.whole
def test_a_run_that_goes_back_leaves_nothing_out_where_writes_are_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Learners were back before the leader had written all places of the checkpoint."""
    put = MergedPositions._put

    async def late(self: MergedPositions, shard: int, value: bytes) -> None:
        await asyncio.sleep(1.5)
        await put(self, shard, value)

    monkeypatch.setattr(MergedPositions, "_put", late)
    found = calm(**BACK)
    assert found.violations == [] and found.counts["restored"] == 1


@pytest.mark.whole
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_read_wrongly_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks, says, changes = FAULTS[fault]
    breaks(monkeypatch)
    violations = calm(**changes).violations
    assert any(v.startswith("data at ") and says in v for v in violations), violations[:5]
