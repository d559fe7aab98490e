"""How a run begins: with the first complete set of initial parameters that a learner sends.

Pure. Answers with effects, and with the record that the machine appends.
"""

from collections.abc import Collection

from diloco_shared.protocol.messages import TapeInit, TapeRecord, TapeRestore
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import RunSpec
from diloco_syncer.events import Drop, Effect, InitSeen
from diloco_syncer.history.history import History
from diloco_syncer.members.layouts import known_layout
from diloco_syncer.members.roster import Roster
from diloco_syncer.rounds.gate import Refusals


class Bootstrap:
    """Decides which initial parameters begin the run; of one leader's term."""

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
        if why := self._fault(event):
            what = f"initial parameters of {event.learner} were refused: {why}"
            return [*self.refused.tell("init", what), *drops]
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

    def _fault(self, event: InitSeen) -> str:
        """Why a run cannot begin with them, or "". What is on the tape binds every leader."""
        if event.config_hash != self.history.config_hash:
            return "of another configuration"
        if not event.finite:
            return "not finite"
        if event.incarnation < self.roster.newest(event.learner):
            return "of an earlier life"
        try:
            layout = Layout.build(event.layout, self.history.fragments)
        except ValueError as error:
            return str(error)[:200]
        expected = known_layout(self.spec)
        if expected is not None and layout.digest() != expected.digest():
            return "not the tensors of this model"
        wrong = [p for p in self.history.owned if event.sizes[p] != layout.sizes[p]]
        return f"fragment {wrong[0]} is of another size than its tensors" if wrong else ""

    def leads(self, wall: float, pending: Collection[TapeRecord]) -> list[Effect | TapeRecord]:
        """The term is on the tape: what came before it counts now."""
        early, self.early = self.early, None
        return [] if early is None else self.seen(early, wall, pending, leading=True)


def told(record: TapeInit) -> str:
    """For people."""
    return f"{record.learner} sent the first parameters, and the run begins with them"
