"""What processes decide and hold is looked at in whole worlds: a broken rule of each kind is seen.

The product is broken in one place, a calm world is played, and the promise must be named.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from diloco_learner.events import Unmerged
from diloco_learner.exchange import anchors, exchange
from diloco_learner.exchange.counters import Undecided
from diloco_learner.exchange.exchange import Exchange
from diloco_learner.recovery import recoverer_io as recoverer
from diloco_shared.protocol.messages import LifeCount
from diloco_simulator.inside import losses
from diloco_simulator.troubles.troubles import Troubles
from diloco_simulator.worlds import watched_run
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.world import WorldResult, played
from diloco_syncer.checkpoints import checkpointing_io as checkpointing
from diloco_syncer.events import SendBeat, Tell
from diloco_syncer.history.ledger import Ledger
from diloco_syncer.leadership.lease import Lease
from diloco_syncer.members.claims import Telling
from diloco_syncer.members.roster import Roster
from diloco_syncer.merging.payloads_io import Payloads
from diloco_syncer.status.announce import Announcer
from diloco_syncer.status.watchdog import Watchdog
from diloco_syncer.streams.room import Horizon

CALM = Options.calm(
    learners=2, quorum=1, steps=36, safety_s=20.0, snapshot_every_rounds=2, keyframe_every=2
)
# It goes back to a checkpoint, once.
BACK = {"checkpoint_every_steps": 6, "restores": 1}


def calm(**changes: Any) -> WorldResult:
    return played(Case(1, CALM.changed(**changes)))


def test_a_calm_world_breaks_nothing_and_every_promise_is_looked_at() -> None:
    found = calm(syncers=2, **BACK)
    assert found.violations == []
    for promise in ("I5", "I6", "I7", "I8", "I9", "I10", "I12", "liveness"):
        assert found.looks[promise], promise
    assert found.counts["restored"] == 1 and found.counts["moments of its own part"]
    assert found.counts["restore in force"] and found.counts["told: restored"]


def of_double_merges(patch: pytest.MonkeyPatch) -> None:
    merge = Ledger._merge

    def twice(self: Ledger, p: int, v: Any) -> None:
        merge(self, p, v)
        self.merged_P[p] += 1

    patch.setattr(Ledger, "_merge", twice)


def of_more_than_was_done(patch: pytest.MonkeyPatch) -> None:
    saw = Ledger.saw

    def more(self: Ledger, count: LifeCount) -> None:
        saw(self, count.model_copy(update={"tokens": 10 * count.tokens}))

    patch.setattr(Ledger, "saw", more)


def of_claims(patch: pytest.MonkeyPatch) -> None:
    contribute = Exchange._contribute

    def more(self: Exchange, now: float) -> list[Any]:
        self.counters.step += 1  # of so many tokens at most, or the syncer would refuse it
        self.counters.tokens += 1
        return contribute(self, now)

    patch.setattr(Exchange, "_contribute", more)


def of_reports(**more: int) -> Callable[[pytest.MonkeyPatch], None]:
    """Learners tell of more steps than they took: in all, or since an adoption."""
    progress = Exchange.progress

    def other(self: Exchange) -> Any:
        said = progress(self)
        changed: dict[str, Any] = {"step": said.step + more.get("step", 0)}
        for name in ("c_steps", "adopted_at"):
            changed[name] = tuple(n + more.get(name, 0) for n in getattr(said, name))
        return said.model_copy(update=changed)

    return lambda patch: patch.setattr(Exchange, "progress", other)


def of_leases(patch: pytest.MonkeyPatch) -> None:
    written = Lease._written

    def longer(self: Lease, event: Any, now: float) -> None:
        written(self, event, now)
        self.until += 1.0

    patch.setattr(Lease, "_written", longer)


def of_rests(patch: pytest.MonkeyPatch) -> None:
    may_step = Exchange.may_step.fget  # type: ignore[attr-defined]
    patch.setattr(
        Exchange, "may_step", property(lambda self: may_step(self) and self.counters.step % 5 != 4)
    )


def of_payloads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Payloads, "drop", lambda self, key: None)


def of_purges(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Horizon, "below", lambda self, last_round, up_seq: 1)


def of_too_much(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Horizon, "below", lambda self, last_round, up_seq: up_seq + 100)


def of_heads(patch: pytest.MonkeyPatch) -> None:
    beat = Announcer.beat

    def back(self: Announcer, now: float) -> list[Any]:
        old = [max(v - self.history.seq % 2, -1) for v in self.history.versions]
        said = beat(self, now)
        return [SendBeat(e.beat.model_copy(update={"versions": tuple(old)})) for e in said]

    patch.setattr(Announcer, "beat", back)


def of_silence(patch: pytest.MonkeyPatch) -> None:
    """And somebody dies."""
    of = Roster.of.__func__  # type: ignore[attr-defined]

    def patient(cls: type[Roster], spec: Any, history: Any) -> Roster:
        roster: Roster = of(cls, spec, history)
        roster.lease_s = 60.0
        return roster

    def plan(self: Troubles) -> None:
        self.loop.call_later(5.0, self.world.lose, self.world.learners[0])

    patch.setattr(Roster, "of", classmethod(patient))
    patch.setattr(Troubles, "plan", plan)


def of_losses(patch: pytest.MonkeyPatch) -> None:
    """Somebody dies, and what is decided to be told of it is left out for good."""
    take = Telling.take

    def quiet(self: Telling, tell: Tell, now: float) -> Tell | None:
        return None if tell.kind == "learner-lost" else take(self, tell, now)

    def plan(self: Troubles) -> None:
        self.loop.call_later(5.0, self.world.lose, self.world.learners[0])

    patch.setattr(losses, "TOLD_AGAIN_S", 1.0)
    patch.setattr(Telling, "take", quiet)
    patch.setattr(Troubles, "plan", plan)


def of_standstills(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Watchdog, "stuck", lambda self, now: "nobody knows")


def of_states(patch: pytest.MonkeyPatch) -> None:
    load = checkpointing.load

    def other(*args: Any, **kwargs: Any) -> Any:
        state = load(*args, **kwargs)
        fragment = state.store.fragments[0]  # its arrays may lie on a disk, to be read alone
        state.store.fragments[0] = replace(fragment, master=fragment.master + 1.0)
        return state

    patch.setattr(checkpointing, "load", other)


def of_moments(patch: pytest.MonkeyPatch) -> None:
    read = recoverer.read_part  # type: ignore[attr-defined]

    def other(*args: Any) -> Any:
        found, faults = read(*args)
        return {"moments": found["moments"] + 1}, faults

    patch.setattr(recoverer, "read_part", other)


def of_last_versions(patch: pytest.MonkeyPatch) -> None:
    take = Exchange._anchor

    def none(self: Exchange, anchor: Any) -> list[Any]:
        return [] if self.counters.step > 25 else take(self, anchor)

    patch.setattr(Exchange, "_anchor", none)
    patch.setattr(exchange, "FINISH_S_MAX", 5.0)


def of_residuals(patch: pytest.MonkeyPatch) -> None:
    decide = Undecided.decide

    def none(self: Undecided, anchor: Any) -> list[Any]:
        return [Unmerged(fate.fragment, fate.round) for fate in decide(self, anchor)]

    patch.setattr(Undecided, "decide", none)


def of_anchors(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(anchors, "KEPT_MAX", 9)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, dict[str, Any]]] = {
    "merges that count twice": (of_double_merges, "I5", {}),
    "tokens that nobody did": (of_more_than_was_done, "I5", {}),
    "claims of work that was not done": (of_claims, "I5", {}),
    "reports of steps that nobody took": (of_reports(step=3), "I5", {}),
    "reports of more steps since an adoption": (of_reports(c_steps=1), "I5", {}),
    "reports of another adoption": (of_reports(c_steps=-1, adopted_at=1), "I5", {}),
    "leases that are trusted too long": (of_leases, "I7", {"syncers": 2}),
    "rests without a reason": (of_rests, "I8", {}),
    "payloads that nobody lets go": (of_payloads, "I12", {}),
    "contributions that stay for ever": (of_purges, "I12", {}),
    "purges of what is needed": (of_too_much, "I12", {}),
    "heads that go back": (of_heads, "I1", {}),
    "losses that nobody tells": (of_losses, "I10", {"steps": 360}),
    "the dead, who are asked": (of_silence, "I10", {}),
    "a standstill without a reason": (of_standstills, "liveness", {}),
    "another state than was kept": (of_states, "I6", BACK),
    "other moments than were kept": (of_moments, "I6", BACK),
    "an end without the last versions": (of_last_versions, "I6", {}),
    "residuals of what was merged": (of_residuals, "I9", {}),
    "anchors that nobody lets go": (of_anchors, "I12", {}),
}


# One of each promise every time; the others with `make test-long`.
EVERY_TIME = {promise: fault for fault, (_, promise, _) in FAULTS.items()}.values()


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=[] if f in EVERY_TIME else [pytest.mark.long]) for f in FAULTS],
)
def test_a_broken_rule_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks, promise, changes = FAULTS[fault]
    monkeypatch.setattr(watched_run, "LIVENESS_S", 120.0)
    breaks(monkeypatch)
    violations = calm(**changes).violations
    assert any(v.startswith(f"{promise} at ") for v in violations), violations[:5]
