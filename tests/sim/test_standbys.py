"""Worlds with a standby: it takes over in time, and whoever led before does no harm (I6, I7)."""

from collections.abc import Callable
from pathlib import Path

import pytest

from diloco_shared.protocol.messages import TapeRecord, TapeRound, TapeTerm
from diloco_simulator.options import Options
from diloco_simulator.scenario import Scenario, Verdict
from diloco_simulator.syncer_node import SyncerNode

# When trouble strikes, and how long after the lease the next leader may take: two looks at the
# lease, one at the tape, a few messages of 0.1 s each; then some steps of a second to a round.
STRIKE_S, TAKEOVER_S, ROUND_S = 20.0, 2.0, 6.0
FOR_GOOD_S = 1e6


def played(
    strike: Callable[[Scenario, SyncerNode, SyncerNode], None], seed: int, disks: Path
) -> tuple[Scenario, Verdict, list[tuple[float, TapeRecord]]]:
    """A calm world of two syncers in which only `strike(world, leader, standby)` happens."""
    scenario = Scenario(seed, Options.calm(syncers=2, steps=60), disks)
    seen: list[tuple[float, TapeRecord]] = []
    on_record = scenario.hub.on_record

    def record(shard: int, seq: int, r: TapeRecord) -> None:
        seen.append((scenario.world.now, r))
        on_record(shard, seq, r)

    def now() -> None:
        leader = scenario.leader
        assert leader is not None
        strike(scenario, leader, leader.others[0])

    scenario.hub.on_record = record
    scenario.world.at(STRIKE_S, now)
    return scenario, scenario.run(), seen


def terms(seen: list[tuple[float, TapeRecord]]) -> list[tuple[float, str]]:
    return [(at, r.leader) for at, r in seen if isinstance(r, TapeTerm)]


def cut(scenario: Scenario, node: SyncerNode, seconds: float) -> None:
    link = scenario.world.link(node.process)
    link.out = link.into = False

    def mend() -> None:
        link.out = link.into = True

    scenario.world.after(seconds, mend)


TROUBLES: dict[str, Callable[[Scenario, SyncerNode, SyncerNode], None]] = {
    "dies": lambda scenario, leader, standby: leader.crash(FOR_GOOD_S),
    "stands still": lambda scenario, leader, standby: leader.hang(12.0, replaced=False),
    "is cut off": lambda scenario, leader, standby: cut(scenario, leader, 12.0),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_standby_leads_within_a_lease_and_rounds_go_on(
    trouble: str, seed: int, tmp_path: Path
) -> None:
    scenario, verdict, seen = played(TROUBLES[trouble], seed, tmp_path)
    assert verdict.violations == []
    lease_s = scenario.spec.membership.leader_lease_s
    (_, first), (at, second) = terms(seen)
    assert first.rsplit("-", 1)[0] != second.rsplit("-", 1)[0]
    assert STRIKE_S < at < STRIKE_S + lease_s + TAKEOVER_S
    round_at = next(t for t, r in seen if t > at and isinstance(r, TapeRound))
    assert round_at < at + ROUND_S
    if trouble != "dies":
        assert verdict.counts["deposed"] == 1, "it came back, and stands by"


@pytest.mark.parametrize("seed", range(3))
def test_a_standby_that_dies_or_is_cut_off_disturbs_nobody(seed: int, tmp_path: Path) -> None:
    def strike(scenario: Scenario, leader: SyncerNode, standby: SyncerNode) -> None:
        standby.crash(1.0)
        scenario.world.after(6.0, lambda: cut(scenario, standby, 8.0))

    _, verdict, seen = played(strike, seed, tmp_path)
    assert verdict.violations == []
    assert len(terms(seen)) == 1, "nobody took over"


def test_a_fresh_standby_gets_a_snapshot_of_what_is_purged(tmp_path: Path) -> None:
    def strike(scenario: Scenario, leader: SyncerNode, standby: SyncerNode) -> None:
        standby.crash(8.0)
        standby.disk.wipe()
        scenario.world.after(14.0, lambda: leader.crash(FOR_GOOD_S))

    _, verdict, seen = played(strike, 1, tmp_path)
    assert verdict.violations == []
    assert verdict.counts["snapshots fetched"] == 1
    assert len(terms(seen)) == 2
