"""How a run begins: with the first complete set of initial parameters that a learner sends.

Pure. Answers with effects, and with the record that the machine appends.
"""

from collections.abc import Collection

from diloco_shared.protocol.messages import TapeInit, TapeRecord, TapeRestore
from diloco_shared.spec.run import RunSpec
from diloco_syncer.events import Drop, Effect, InitSeen
from diloco_syncer.history.history import History
from diloco_syncer.members.roster import Roster
from diloco_syncer.rounds.gate import Refusals


class Beginning:
    """Of one leader's term."""

    def __init__(self, spec: RunSpec, history: History, roster: Roster, refused: Refusals) -> None:
        self.spec = spec
        self.history = history
        self.roster = roster
        self.refused = refused
        # Came before the term was on the tape: they are not sent again for minutes.
        self.early: InitSeen | None = None

    def seen(
        self, event: InitSeen, wall: float, pending: Collection[TapeRecord], *, leading: bool
    ) -> list[Effect | TapeRecord]:
        """Initial parameters are here; `pending`: records on their way to the tape."""
        h = self.history
        begun = [r for r in pending if isinstance(r, TapeInit | TapeRestore)]
        used = {s for r in begun if isinstance(r, TapeInit) for s in r.subjects}
        drops: list[Effect | TapeRecord] = [Drop(s) for s in event.subjects if s not in used]
        if h.stopping:  # what is about to end begins no more
            return drops
        if h.initialised or begun:
            return drops
        if not leading:
            before, self.early = self.early, event
            kept = set(event.subjects)
            return [Drop(s) for s in before.subjects if s not in kept] if before else []
        known = self.roster.newest(event.learner)
        if event.config_hash != h.config_hash or not event.finite or event.incarnation < known:
            return [*self.refused.tell("init", event.learner, "initial parameters"), *drops]
        return [
            TapeInit(
                run=self.spec.name,
                config_hash=event.config_hash,
                layout=event.layout,
                anchor_digests=event.digests,
                subjects=event.subjects,
                learner=event.learner,
                incarnation=event.incarnation,
                at=wall,
            )
        ]

    def leads(self, wall: float, pending: Collection[TapeRecord]) -> list[Effect | TapeRecord]:
        """The term is on the tape: what came before it counts now."""
        early, self.early = self.early, None
        return [] if early is None else self.seen(early, wall, pending, leading=True)
