"""The ledger's classes are counted apart from the product in whole worlds: each wrong one is named.

The ledger is broken in one place, and such that its classes still add up to what was processed. The
class that is wrong must be named.
"""

from collections.abc import Callable
from typing import Any

import pytest

from diloco_learner.exchange.exchange import Exchange
from diloco_shared.protocol.messages import LifeCount, Progress
from diloco_simulator.troubles.troubles import Troubles
from diloco_simulator.worlds import watched_run
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.world import played
from diloco_syncer.history.counts import Counts
from diloco_syncer.history.ledger import Ledger, Life
from diloco_syncer.members.roster import Roster

CALM = Options.calm(learners=2, quorum=1, steps=36, safety_s=20.0, snapshot_every_rounds=2)
POISONED = {"nan": 0.3}


def of_merged(patch: pytest.MonkeyPatch) -> None:
    """One token of each merge counts as lost."""
    merge = Ledger._merge

    def less(self: Ledger, p: int, v: Any) -> None:
        merge(self, p, v)
        self.merged_P[p] -= 1
        self.lost_P[p] += 1

    patch.setattr(Ledger, "_merge", less)


def of_refused(patch: pytest.MonkeyPatch) -> None:
    """What the gate refused is in flight as before."""
    patch.setattr(Life, "refuse", lambda self, p, start, stop: None)


def of_overwritten(patch: pytest.MonkeyPatch) -> None:
    """What was adopted over counts as lost for good."""
    settle = Ledger._settle

    def settled(self: Ledger, p: int, life: Life, until: int) -> None:
        had = self.overwritten_P[p]
        settle(self, p, life, until)
        self.lost_P[p] += self.overwritten_P[p] - had
        self.overwritten_P[p] = had

    patch.setattr(Ledger, "_settle", settled)


def of_adoptions(patch: pytest.MonkeyPatch) -> None:
    """Every report says that all of it is adopted over; so nothing is in flight."""
    saw = Counts.saw

    def all_of_it(self: Counts, p: Progress, *taped: int) -> None:
        saw(self, p.model_copy(update={"c_tokens": (0,) * len(p.c_tokens)}), *taped)

    patch.setattr(Counts, "saw", all_of_it)


def of_lost(patch: pytest.MonkeyPatch) -> None:
    """A life that a newer one has replaced still has its tokens in flight."""
    silent = Roster.silent

    def over(self: Ledger, learner: str, incarnation: int, life: Life) -> bool:
        return life.left or self.ended

    def only_newest(self: Roster, learner: str, incarnation: int, now: float) -> bool:
        return incarnation == self.newest(learner) and silent(self, learner, incarnation, now)

    patch.setattr(Ledger, "_over", over)
    patch.setattr(Roster, "silent", only_newest)
    somebody(patch, lambda self: self.world.crash(self.world.learners[0], 1.0))


def of_silence(patch: pytest.MonkeyPatch) -> None:
    """Nobody is silent."""
    patch.setattr(Roster, "silent", lambda self, learner, incarnation, now: False)
    somebody(patch, lambda self: self.world.lose(self.world.learners[0]))


def of_what_is_read_again(patch: pytest.MonkeyPatch) -> None:
    """Of a life that is settled for good nothing is read again."""
    forget = Ledger._end

    def forgets(self: Ledger, learner: str, incarnation: int) -> None:
        had = self.reread_before
        forget(self, learner, incarnation)
        self.reread_before = had

    patch.setattr(Ledger, "_end", forgets)
    somebody(patch, lambda self: self.world.crash(self.world.learners[0], 1.0))


def somebody(patch: pytest.MonkeyPatch, dies: Callable[[Troubles], None]) -> None:
    def plan(self: Troubles) -> None:
        self.loop.call_later(6.0, dies, self)

    patch.setattr(Troubles, "plan", plan)


def of_ends(patch: pytest.MonkeyPatch) -> None:
    """The end of the run leaves what was in flight as it was."""
    end = Ledger.end

    def goes_on(self: Ledger, record: Any) -> None:
        end(self, record)
        self.ended = False

    patch.setattr(Ledger, "end", goes_on)


def of_restores(patch: pytest.MonkeyPatch) -> None:
    """What a checkpoint had in flight is overwritten when the run goes back to it."""
    resume = Ledger.resume

    def resumed(self: Ledger, present: Ledger) -> None:
        for lives in self.lives.values():
            for life in lives.values():
                life.base_P = [life.tokens] * self.fragments
        resume(self, present)

    patch.setattr(Ledger, "resume", resumed)


def of_words(patch: pytest.MonkeyPatch) -> None:
    """Of what a life has told since the newest record, half is believed."""
    saw = Ledger.saw

    def half(self: Ledger, count: LifeCount) -> None:
        saw(self, count.model_copy(update={"tokens": count.tokens // 2}))

    patch.setattr(Ledger, "saw", half)


def of_reports(patch: pytest.MonkeyPatch) -> None:
    """Learners say that they have just adopted everything."""
    progress = Exchange.progress

    def new(self: Exchange) -> Progress:
        said = progress(self)
        return said.model_copy(update={"c_tokens": (0,) * len(said.c_tokens)})

    patch.setattr(Exchange, "progress", new)


def of_records(patch: pytest.MonkeyPatch) -> None:
    """Records repeat nothing of what lives have told."""
    patch.setattr(Counts, "to_record", lambda self, ledger: ())


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, dict[str, Any]]] = {
    "merged": (of_merged, "as merged", {}),
    "refused": (of_refused, "as refused", POISONED),
    "overwritten": (of_overwritten, "as overwritten", {}),
    "overwritten, of reports": (of_adoptions, "as overwritten", {}),
    "in flight": (of_adoptions, "as in_flight", {}),
    "in flight at the end": (of_ends, "as in_flight", {"steps": 30}),
    "lost, of the replaced": (of_lost, "as lost", {}),
    "lost, of the silent": (of_silence, "as lost", {}),
    "lost, of a restore": (of_restores, "as lost", {"checkpoint_every_steps": 6, "restores": 1}),
    "read again": (of_what_is_read_again, "as read again", {}),
    "processed": (of_words, "told of", {}),
    "reports": (of_reports, "that it adopted fragment", {}),
    "records": (of_records, "which has told", {}),
}


# One of each class every time; the others with `make test-long`.
OFTEN = {
    "merged",
    "refused",
    "overwritten",
    "in flight at the end",
    "lost, of the replaced",
    "read again",
}


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=[] if f in OFTEN else [pytest.mark.long]) for f in FAULTS]
)
def test_a_class_that_is_wrong_is_named(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks, named, changes = FAULTS[fault]
    monkeypatch.setattr(watched_run, "LIVENESS_S", 120.0)
    breaks(monkeypatch)
    violations = played(Case(1, CALM.changed(**changes))).violations
    found = [v for v in violations if v.startswith("I5 at ")]
    assert any(named in v for v in found), violations[:5]
    assert not [v for v in found if " are not " in v], "the classes still add up"


@pytest.mark.parametrize(
    "changes", [{}, POISONED, {"checkpoint_every_steps": 6, "restores": 1}], ids=str
)
def test_a_ledger_that_is_right_is_not_blamed(changes: dict[str, Any]) -> None:
    found = played(Case(1, CALM.changed(**changes)))
    assert found.violations == [] and found.looks["I5"]
