"""Who is lost, who comes back under another name, and what users ask for meanwhile."""

from pathlib import Path

from diloco_simulator.options import Options
from diloco_simulator.orders import WITHIN_S
from diloco_simulator.scenario import Scenario

CALM = Options.calm(syncers=2, steps=60)


def test_a_learner_with_a_new_name_is_given_work_and_merged(tmp_path: Path) -> None:
    scenario = Scenario(1, CALM, tmp_path)
    scenario.world.at(15.0, lambda: scenario.fleet._recreate(scenario.fleet.members["l1"], True))
    verdict = scenario.run()
    assert verdict.violations == []
    assert scenario.fleet.members["l1"].gone
    new = scenario.learners[-1]
    assert new.name == "l-new1" and new.left == "finished"
    assert scenario.watch.of[0].members.merged_at[new.name] > 15.0


def test_a_standby_with_a_new_name_takes_over(tmp_path: Path) -> None:
    """It gets a snapshot of the leader, which is lost for good later."""
    scenario = Scenario(1, CALM, tmp_path)

    def lose_leader() -> None:
        leader = scenario.leader
        assert leader is not None
        scenario.fleet.lose(scenario.fleet.members[leader.process])

    def rename_standby() -> None:
        leader = scenario.leader
        assert leader is not None
        scenario.fleet._recreate(scenario.fleet.members[leader.others[0].process], True)

    scenario.world.at(10.0, rename_standby)
    scenario.world.at(35.0, lose_leader)
    verdict = scenario.run()
    assert verdict.violations == []
    assert verdict.counts["new names at work"] == 1
    leader = scenario.leader
    assert leader is not None and leader.process == "syncer-new1"


def test_with_fewer_learners_than_the_quorum_the_state_is_named_and_a_stop_ends_it(
    tmp_path: Path,
) -> None:
    """At a moment at which no round waits for them."""
    scenario = Scenario(1, Options.calm(quorum=3, jitter=0.0), tmp_path)
    scenario.world.at(1.0, lambda: scenario.fleet.lose(scenario.fleet.members["l2"]))
    verdict = scenario.run()
    assert verdict.counts["lacks learners"] == 1
    assert scenario.fleet.lacks() == "2 of 3 learners"
    assert verdict.violations == []
    assert verdict.counts["stop took effect"] == 1


def test_a_syncer_lost_before_the_run_begins_is_named_and_a_stop_ends_it(tmp_path: Path) -> None:
    scenario = Scenario(1, Options.calm(), tmp_path)
    scenario.world.at(0.1, lambda: scenario.fleet.lose(scenario.fleet.members["syncer"]))
    verdict = scenario.run()
    assert scenario.fleet.lacks() == "a syncer of shard 0"
    assert verdict.violations == []
    assert scenario.fleet.waiting == "syncer syncer is gone: the run goes on once it is back"


def test_one_shard_goes_on_with_its_rounds_while_another_lacks_its_syncer(tmp_path: Path) -> None:
    scenario = Scenario(1, Options.calm(shards=2, fragments=4, steps=200), tmp_path)
    scenario.world.at(15.0, lambda: scenario.fleet.lose(scenario.fleet.members["syncer-b"]))
    verdict = scenario.run()
    assert scenario.fleet.lacks() == "a syncer of shard 1"
    assert verdict.violations == []
    assert scenario.watch.of[0].round_at > 40.0


def test_a_learner_that_stands_still_beyond_the_end_is_freed_by_its_missing_assignment(
    tmp_path: Path,
) -> None:
    scenario = Scenario(1, Options.calm(syncers=2, steps=36), tmp_path)
    scenario.world.at(20.0, lambda: scenario.learners[1].hang(400.0))
    verdict = scenario.run()
    assert verdict.violations == []
    assert [node.left for node in scenario.learners] == ["finished", "freed", "finished"]


def test_an_order_without_effect_is_told_of(tmp_path: Path) -> None:
    """The check itself: a syncer that is deaf to its user."""
    scenario = Scenario(1, Options.calm(steps=200, safety_s=60.0), tmp_path)
    for syncer in scenario.syncers:
        syncer.wish = lambda wanted: None  # type: ignore[method-assign]
    scenario.world.at(10.0, lambda: scenario.user._tell(paused=True))
    scenario.run()
    told = [v for v in scenario.watch.violations if v.startswith("commands")]
    assert len(told) == 1 and f"after {WITHIN_S['pause'] + 1:.0f} s" in told[0]


def test_orders_in_a_calm_world_take_effect(tmp_path: Path) -> None:
    scenario = Scenario(1, CALM, tmp_path)
    user = scenario.user
    scenario.world.at(10.0, lambda: user._tell(paused=True))
    scenario.world.at(20.0, lambda: user._tell(paused=False, quorum=1))
    scenario.world.at(30.0, user.stop)
    verdict = scenario.run()
    assert verdict.violations == []
    counts = verdict.counts
    assert [counts[f"{kind} took effect"] for kind in ("pause", "quorum", "stop")] == [2, 2, 1]
