"""What a run has left is audited in every world, also where the hub has lost some of it."""

from dataclasses import replace
from typing import Any

import pytest

from diloco_shared.protocol.messages import TapeRecord, TapeRound
from diloco_simulator.checkers import numbers
from diloco_simulator.troubles.troubles import Troubles
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.world import WorldResult, played
from diloco_syncer.history import audit_io as audit
from diloco_syncer.status.watchdog import Watchdog

CALM = Options.calm(learners=2, quorum=1, steps=36, snapshot_every_rounds=2)


def without_tails(patch: pytest.MonkeyPatch, **changes: Any) -> WorldResult:
    """A world whose hub loses the newest of UP, DN and STATE."""

    def plan(troubles: Troubles) -> None:
        troubles.loop.call_later(9.0, troubles.lose_tails, troubles.rng)

    patch.setattr(Troubles, "plan", plan)
    found = played(Case(1, CALM.changed(**changes)))
    assert found.counts["tails lost"] == 1
    return found


def test_what_the_hub_has_lost_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    found = without_tails(monkeypatch)
    assert (
        found.violations == [] and found.counts["audits"] and found.counts["merges executed again"]
    )


def test_other_damage_is_a_fault_although_the_hub_has_lost_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contribution = audit._contribution

    async def damaged(run: str, data: Any, record: TapeRecord, subject: str) -> Any:
        payload, why, purged = await contribution(run, data, record, subject)
        return payload, why or f"{subject} is damaged", purged

    monkeypatch.setattr(audit, "_contribution", damaged)
    violations = without_tails(monkeypatch).violations
    assert any(v.startswith("audit at ") and "is damaged" in v for v in violations), violations


def test_what_is_purged_without_need_is_a_fault_although_the_tape_has_lost_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A snapshot whose record is lost excuses what it covered, and nothing behind that."""
    verify = audit.verify

    async def planted(*of: Any) -> audit.Verified:
        found = await verify(*of)
        fault = audit.TapeDifference(found.records, "up", "it was purged", purged=True)
        return replace(found, faults=(*found.faults, fault))

    def plan(troubles: Troubles) -> None:
        for at in range(14, 24):  # there is not always one that no snapshot covers
            troubles.loop.call_later(at, lose, troubles)

    def lose(troubles: Troubles) -> None:
        if not troubles.counts["power cuts"]:
            troubles._lose_records()

    monkeypatch.setattr(Troubles, "plan", plan)
    found = played(Case(1, CALM))
    assert found.violations == [] and found.counts["power cuts"]
    monkeypatch.setattr(audit, "verify", planted)
    (said,) = played(Case(1, CALM)).violations
    assert said.startswith("audit at ") and "it was purged" in said


def test_a_leader_that_is_stuck_long_after_the_hub_lost_something_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may wait for what is lost until the deadline of the rounds that were open then."""
    monkeypatch.setattr(Watchdog, "stuck", lambda self, now: "nobody knows why")
    violations = without_tails(monkeypatch, safety_s=20.0).violations
    assert any("is stuck although all is well" in said for said in violations), violations


def test_the_whole_tape_is_executed_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what snapshots cover, and nobody else could execute any more."""
    replay = numbers.replay

    def other(history: Any, store: Any, record: TapeRecord, *rest: Any) -> Any:
        if isinstance(record, TapeRound) and record.round == 0:
            raise ValueError("it makes something else")
        return replay(history, store, record, *rest)

    monkeypatch.setattr(numbers, "replay", other)
    (said,) = played(Case(1, CALM)).violations
    assert said.startswith("I9 at ") and "it makes something else" in said
