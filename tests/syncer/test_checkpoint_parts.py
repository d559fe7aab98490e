"""How long a checkpoint waits for learners' parts of it."""

from typing import Any

import pytest
from syncer.test_checkpoints import of, wanted

from diloco_shared.protocol.messages import TensorSpec
from diloco_shared.protocol.pace import stored_within_s
from diloco_shared.spec.optimizers import STATE_EXTRA
from diloco_syncer.checkpoints.parts_io import furthest
from diloco_syncer.events import Kept, Seal


class Compared(int):
    """A data shard's number that counts how often it is compared."""

    times = 0

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return int(self) == other

    __hash__ = int.__hash__


def test_each_place_is_looked_at_once_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There may be 65,536 for each shard of the syncer, and a leader writes nothing meanwhile."""
    monkeypatch.setattr(Compared, "times", 0)
    count = 64
    each = [{Compared(n): (shard, n) for n in range(count)} for shard in (1, 3, 2)]
    assert furthest(each) == {n: (3, n) for n in range(count)}
    assert Compared.times < 16 * count
    assert furthest([]) == {}


@pytest.mark.parametrize(("optimizer", "per_value"), [("adamw", 8), ("adan", 16), ("sgd", 0)])
def test_parts_are_waited_for_as_long_as_a_place_may_take_to_store_them(
    running: Any, optimizer: str, per_value: int
) -> None:
    """Nobody may begin another checkpoint meanwhile. Parts go to a place, and not over the slowest
    link that is worth using: for a model of a billion parameters that had made 22 hours."""
    values = 10**9
    checkpoints = running.machine.user_requests.checkpoints
    checkpoints.optimizer = optimizer
    running.machine.history.layout = (TensorSpec(name="w", shape=(values,), embedding=False),)
    running.give(wanted(checkpoint=1))
    until = checkpoints.deadline
    assert until == running.now + stored_within_s(per_value * values + STATE_EXTRA)
    running.give(Kept(1))
    sealed: list[Any] = []
    while running.now < until:
        assert not sealed
        running.now = min(running.now + 4.0, until)  # within a lease
        sealed += of([*running.step("a", 0, checkpoint=1), *running.step("b", 0)], Seal)
    (seal,) = sealed
    assert seal.late == {"b": f"nothing came within {600 + per_value * 100} s"}
