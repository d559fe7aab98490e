"""Waits that are longer than any world: where they are shorter, worlds see what comes of them."""

import pytest

from diloco_shared.bus.port import Stored
from diloco_shared.protocol import subjects
from diloco_simulator.troubles.troubles import Troubles
from diloco_simulator.worlds import constants
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.world import WorldResult, played
from diloco_syncer.members import roster
from diloco_syncer.members.roster import Roster

SHORT = {d.path: d.others[0] for d in constants.WAITS}
CALM = Options.calm(learners=3, quorum=1, steps=100, safety_s=50.0)
# Longer than somebody may be silent who is not taken for gone.
STANDS_STILL_S = 40.0


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner stands still, and goes on when it is forgotten."""

    def plan(self: Troubles) -> None:
        machine = self.world.learners[0]
        self.loop.call_later(5.0, self._hang, machine, STANDS_STILL_S)

    monkeypatch.setattr(Troubles, "plan", plan)


def world(values: dict[str, float]) -> WorldResult:
    return played(Case(1, CALM, values))


def lives(found: WorldResult) -> int:
    return found.counts["told: join"]


@pytest.mark.whole
def test_who_is_silent_for_too_long_begins_a_new_life() -> None:
    """Where waits are the product's own, no world is long enough for that."""
    forgotten, known = world(SHORT), world({})
    assert forgotten.violations == known.violations == []
    assert lives(forgotten) == lives(known) + 1


@pytest.mark.whole
def test_a_life_that_is_taken_for_gone_too_soon_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anybody may be."""
    tidy = Roster.tidy

    def sooner(self: Roster, now: float) -> None:
        before, roster.GONE_S = roster.GONE_S, 8.0
        try:
            tidy(self, now)
        finally:
            roster.GONE_S = before

    monkeypatch.setattr(Roster, "tidy", sooner)
    violations = world(SHORT).violations
    assert any(v.startswith("I5 at ") for v in violations), violations[:5]


@pytest.mark.whole
def test_a_life_that_is_forgotten_and_not_told_so_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the tape says is over goes on in vain, since nobody tells it so."""

    def over(self: Roster, learner: str, incarnation: int) -> None:
        self.counts.over(learner, incarnation)

    monkeypatch.setattr(Roster, "_gone", over)
    violations = world(SHORT).violations
    assert any(v.startswith("I10 at ") and "was not merged in" in v for v in violations), violations


@pytest.mark.whole
@pytest.mark.parametrize("leader", ["is the same", "is another"])
def test_what_was_sent_to_a_learner_that_never_comes_back_is_removed(
    monkeypatch: pytest.MonkeyPatch, leader: str
) -> None:
    """It dies for good as soon as its state has come whole. The leader that asked for the state
    knows which it is; another knows only that nobody is there for whom it could be."""
    removed, left, theirs = list[str](), dict[str, int](), list[str]()

    def plan(self: Troubles) -> None:
        world, broker = self.world, self.world.broker
        machine, stream = world.learners[2], subjects.state_stream(world.spec.name)
        states = subjects.states_of(world.spec.name, machine.name)
        stored, purge = broker.on_store, broker.purge

        def strikes() -> None:
            world.lose(machine)
            if leader == "is another":
                world.crash(world.syncers[0], 1.0)

        def dies(of: str, message: Stored) -> None:
            stored(of, message)
            if of == stream and message.subject.endswith(".m"):
                broker.on_store = stored
                theirs[:] = [message.subject.removesuffix(".m"), states]
                self.loop.call_soon(strikes, context=world.net.outside)

        def purged(of: str, subject: str, below: int | None) -> int:
            count = purge(of, subject, below)
            if of == stream and count:
                removed.append(subject)
                left.update(now=len([*broker.select(stream, states, 1)]))
            return count

        monkeypatch.setattr(broker, "on_store", dies)
        monkeypatch.setattr(broker, "purge", purged)
        self.loop.call_later(8.0, self._replace, machine, False)

    monkeypatch.setattr(Troubles, "plan", plan)
    assert world(SHORT).violations == []
    place, states = theirs
    assert removed == ([states] if leader == "is another" else [place, f"{place}.>"])
    assert left == {"now": 0}
    removed.clear()
    assert world({}).violations == []
    assert removed == [], "where waits are the product's own, no world is long enough for that"
