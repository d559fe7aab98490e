"""The run as its syncer sees it, for the coordinator to show."""

from collections.abc import Iterable, Mapping
from typing import Any

from diloco_shared.budget import Size, rounds_at
from diloco_shared.protocol.messages import LifeCount
from diloco_shared.protocol.records import RunStatus, StreamUse
from diloco_shared.protocol.run_states import GONE_BEFORE, NEEDS
from diloco_shared.spec.algorithm import MEMBERS_MAX
from diloco_syncer.history.ledger import countable, of_run
from diloco_syncer.machine import Machine
from diloco_syncer.members.roster import LEFT_S, Member

# Versions that learners hold, of all of them together, are shown up to so many: they are the one
# part of a status that grows with learners times fragments, and take 9 bytes each at most. All else
# of 512 learners takes less than what is left of the 1 MiB that a message may have.
ADOPTED_MAX = 1 << 15
# What is shown of a learner that an earlier leader knew, and of which its goodbye alone is known.
# It stands among the others, since a status of this wire version has no field of its own for it.
GOODBYE = "goodbye"
NO_LEARNER = {
    "alive": False,
    "participating": False,
    "state": "down",
    "silent_s": LEFT_S,
    "merged_round": -1,
    GONE_BEFORE: True,
}
GONE = {**NO_LEARNER, GOODBYE: True}


def size(machine: Machine) -> Size:
    """The run as large as it is known to be."""
    h, spec = machine.history, machine.spec
    return Size(
        parameters=machine.admission.layouts.parameters(),
        learners=len(machine.announcer.alive),
        rounds=rounds_at(spec.budget.seconds, h.stamp.round + 1, h.stamp.fraction),
    )


def status(
    machine: Machine,
    now: float,
    wall: float,
    *,
    bytes_up: int,
    bytes_down: int,
    streams: Mapping[str, StreamUse] | None = None,
) -> RunStatus:
    """A snapshot of everything worth showing; alive, participating and useful kept apart."""
    h = machine.history
    state, reason = machine.announcer.state(now)
    unrecorded = machine.roster.counts.unrecorded(h.ledger)
    ledger = h.ledger.with_counts(unrecorded)

    def silent(learner: str, incarnation: int) -> bool:
        return machine.roster.silent(learner, incarnation, now)

    tokens_P = ledger.tokens_P(silent)
    tokens = of_run(tokens_P, h.sizes_P)
    checkpoint_state, checkpoint_reason = machine.user_requests.checkpoints.state()
    return RunStatus(
        run=machine.spec.name,
        run_id=machine.spec.id,
        state=state,
        reason=reason[:500],
        epoch=h.epoch,
        term=h.term,
        shard=h.shard,
        leader=h.leader,
        quorum=h.quorum,
        versions=tuple(h.versions),
        stamp=h.stamp,
        rounds_committed=h.committed,
        rounds_skipped=h.skipped,
        contributions_merged=h.merged_total,
        refused=dict(h.refused + machine.refused),
        alive=tuple(m.learner for m in machine.roster.live(now)),
        participating=h.participating,
        parameters=sum(h.sizes_P),
        tokens_per_step=machine.spec.tokens_per_step,
        tokens_processed=countable(ledger.processed),
        tokens_useful=tokens.merged,
        tokens=tokens,
        tokens_by_fragment=tokens_P,
        tokens_reread=countable(ledger.reread(silent)),
        bytes_up=countable(bytes_up),
        bytes_down=countable(bytes_down),
        streams=dict(streams or {}),
        recoveries=tuple(machine.roster.recoveries.shown.values()),
        checkpoint=h.checkpoint,
        checkpoint_state=checkpoint_state,
        checkpoint_reason=checkpoint_reason[:500],
        restores=max(h.restores, machine.user_requests.restoring.given_up),
        learners=_learners(machine, now, unrecorded),
        since_round_s=machine.announcer.watchdog.seconds_since_round(now),
        at=wall,
    )


def _learners(
    machine: Machine, now: float, unrecorded: Iterable[LifeCount]
) -> dict[str, dict[str, Any]]:
    """By name. Who has said goodbye, as the tape does not tell yet, the next leader reads here."""
    h, members = machine.history, machine.roster.members.values()
    versions = len(members) * h.fragments <= ADOPTED_MAX
    shown = {
        m.learner: _learner(m, now, machine, m.learner in h.participating, versions)
        for m in members
    }
    for learner, incarnation in machine.roster.goodbyes(unrecorded).items():
        if learner in shown:
            shown[learner][GOODBYE] = True
        elif len(shown) < MEMBERS_MAX:
            shown[learner] = {**GONE, "incarnation": incarnation}
    return shown | _needs(machine)


def _needs(machine: Machine) -> dict[str, dict[str, Any]]:
    """Which checkpoints nobody may remove, where one was ever to be gone back to: one text for each
    restore since the newest snapshot, and for the wish."""
    restoring = machine.user_requests.restoring
    needed = restoring.needed
    return {NEEDS: {**NO_LEARNER, NEEDS: needed}} if needed or restoring.wanted else {}


def goodbyes_in(shown: RunStatus) -> dict[str, int]:
    """Learner -> the life that has said goodbye, as the tape did not tell when this was shown."""
    said = ((m, of.get("incarnation")) for m, of in shown.learners.items() if of.get(GOODBYE))
    return {m: n for m, n in said if isinstance(n, int)}


def _learner(
    m: Member, now: float, machine: Machine, participating: bool, versions: bool
) -> dict[str, Any]:
    """`versions`: those that it holds are shown, too."""
    p = m.progress
    alive = machine.roster.alive(m, now)
    shown: dict[str, Any] = {
        "incarnation": m.incarnation,
        "alive": alive,
        "participating": participating,
        "state": "down" if not alive else (p.state if p else "joining"),
        "silent_s": round(now - m.seen_at, 3),
        "merged_round": m.merged_round,
    }
    if p is not None:
        # A NaN loss has no JSON; before the first step there is none.
        loss = p.loss if p.loss == p.loss else None
        shown |= {
            "step": p.step,
            "tokens": p.tokens,
            "loss": loss,
            "step_s": p.step_s,
            "wait_s": p.wait_s,
            "tokens_per_s": machine.spec.tokens_per_step / p.step_s if p.step_s > 0 else 0.0,
            "socket_bytes": p.sockets.model_dump(),
        }
        if versions:
            shown["adopted"] = list(p.adopted)
    return shown
