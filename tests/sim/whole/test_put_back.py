"""A world's hub loses its disk and is put back from a backup: everybody goes on, from what it has.

Each rule by which they do is taken away once, and a world sees what follows.
"""

from typing import Any

import pytest

from diloco_learner.exchange.leaders import Leaders
from diloco_shared.process import hub_backup
from diloco_shared.protocol.messages import Beat
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.world import WorldResult, played
from diloco_syncer.history.follow_io import Follower
from diloco_syncer.history.history import History
from diloco_syncer.history.tape_io import Tape

pytestmark = pytest.mark.whole


def put_back(seed: int, **changes: Any) -> WorldResult:
    """The hub of a calm world."""
    options = Options.calm(steps=36, syncers=2, learners=2, hub_restores=1).changed(**changes)
    return played(Case(seed, options))


def drawn(seed: int) -> WorldResult:
    """That of a world of faults."""
    return played(Case(seed, Options.drawn(seed).changed(hub_restores=1, power_cuts=0)))


async def nothing(self: object) -> None: ...


@pytest.mark.parametrize("shards", [1, 2])
def test_everybody_goes_on_to_the_end_of_the_run(shards: int) -> None:
    found = put_back(3, shards=shards)
    assert found.violations == []
    assert found.counts["backups of the hub"] == found.counts["hubs restored"] == 1
    assert found.counts["told: end"] or found.counts["beats: finished"]


def test_what_the_tape_has_not_is_no_state_to_go_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tape that was put back has as many records as a syncer has executed."""
    assert drawn(204).violations == []
    monkeypatch.setattr(Follower, "_look_back", nothing)
    monkeypatch.setattr(Tape, "look_back", nothing)
    assert any("of epoch 0 is committed in 1000" in v for v in drawn(204).violations)


def test_a_leader_that_records_nothing_notices_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is paused when its hub is lost, and its tape has no records any more."""
    assert drawn(228).violations == []
    monkeypatch.setattr(Tape, "look_back", nothing)
    assert any("no end of sim" in v for v in drawn(228).violations)


def test_terms_go_on_above_those_that_were_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else learners would take the leaders of the new epoch for deposed ones."""
    beat = Leaders.beat

    def mixed(self: Leaders, heard: Beat) -> Beat | None:
        told = beat(self, heard)
        if told is None or self.shards == 1:
            return told
        terms = tuple(self.beats[shard].term for shard in range(self.shards))
        return told.model_copy(update={"term": sum(terms), "terms": terms})

    assert drawn(220).violations == []
    monkeypatch.setattr(Leaders, "beat", mixed)
    apply = History.apply

    def forgetful(self: History, record: Any, seq: int) -> None:
        term = self.term
        apply(self, record, seq)
        if record.kind == "epoch":
            self.term = term

    monkeypatch.setattr(History, "apply", forgetful)
    assert any("no end of sim" in v for v in drawn(220).violations)


def test_no_life_is_had_twice_by_who_came_after_the_backup(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn(313).violations == []
    monkeypatch.setattr(hub_backup, "_first_lives", lambda bus: nothing(bus))
    assert any("learner-1-new-1/1 claims" in v for v in drawn(313).violations)
