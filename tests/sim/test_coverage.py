"""What worlds must reach, can be reached; and what is checked, is counted."""

from pathlib import Path

import numpy as np
import pytest

from diloco_shared.protocol.messages import TapeRecord, TapeRound
from diloco_simulator.check import small, totals
from diloco_simulator.checkers import Leases, Report
from diloco_simulator.checkers_numbers import Numbers
from diloco_simulator.coverage import STATES
from diloco_simulator.coverage_required import RARE, REQUIRED
from diloco_simulator.options import Options
from diloco_simulator.scenario import Scenario, Verdict, play, spec_of

PROMISES = [*(f"I{n}" for n in range(1, 13)), "liveness"]


def test_every_state_is_named_once_and_required_or_excused() -> None:
    assert len(set(STATES)) == len(STATES)
    assert set(STATES) >= RARE
    assert set(REQUIRED) == set(STATES) - RARE


@pytest.mark.parametrize(("syncers", "how"), [(1, "restart"), (2, "takeover")])
def test_a_leader_that_dies_between_a_record_and_its_publication(
    syncers: int, how: str, tmp_path: Path
) -> None:
    scenario = Scenario(1, Options.calm(syncers=syncers), tmp_path)
    on_record, struck = scenario.hub.on_record, list[int]()

    def record(shard: int, seq: int, r: TapeRecord) -> None:
        on_record(shard, seq, r)
        if isinstance(r, TapeRound) and r.round == 4 and not struck:
            struck.append(seq)
            assert scenario.leader is not None
            scenario.leader.crash(1.0 if syncers == 1 else 60.0)

    scenario.hub.on_record = record
    verdict = scenario.run()
    assert verdict.violations == []
    assert verdict.counts[f"{how} during publication"] == 1


def test_every_promise_is_checked_in_a_small_world() -> None:
    verdict = play(1, small())
    assert verdict.violations == []
    # Nobody sends anything bad there.
    unchecked = [promise for promise in PROMISES if not verdict.looks[promise]]
    assert unchecked == ["I11"]
    assert totals([verdict])["looks"]["I1"] == verdict.looks["I1"]


def test_states_of_places_to_die_count() -> None:
    state = "leader dies before Stage"
    died = Verdict(1, [], {state: 1})
    assert state in totals([])["missing"]
    assert state not in totals([], [died])["missing"]


def test_a_lease_is_not_trusted_for_longer_than_it_lasts() -> None:

    told: list[str] = []
    leases = Leases(Report(lambda invariant, text: told.append(text)), 3.0)
    leases.held("a", 1.0, 4.0, 1.5)
    assert told == []
    leases.held("a", 1.0, 4.5, 1.5)
    assert len(told) == 1


def test_after_directions_that_cancelled_merges_are_computed_again() -> None:
    """Of a leader's own arrays, once."""
    numbers = Numbers(Report(lambda invariant, text: None), spec_of(Options.calm(), 1))
    numbers.states.append([(np.full(2, np.nan), np.zeros(2)), (np.ones(2), np.zeros(2))])
    master_F, trace_F = np.array([1, 2], np.float32), np.array([3, 4], np.float32)
    numbers.installed(1, master_F, (trace_F,))
    assert numbers.resumed == 0, "it has computed that itself"
    numbers.installed(0, master_F, (trace_F,))
    assert numbers.resumed == 1
    assert [list(a) for a in numbers.state[0]] == [[1.0, 2.0], [3.0, 4.0]]
