"""A rule that the product does not have, to show what it avoids: merge whoever is ready.

The product's rounds ask every live learner for what it has done, however little. Here a round asks
only those that have taken its H/P steps since they were last asked (a plain reading of the paper's
Algorithm 2); the publication then overwrites what the others did.
"""

from diloco_syncer.machine import Machine
from diloco_syncer.members.roster import Member
from diloco_syncer.rounds.rounds import Rounds


class ReadyOnly(Rounds):
    """Rounds of one leader's term under that rule."""

    asked: dict[tuple[str, int], int]  # (learner, incarnation) -> its step when last asked

    @classmethod
    def put_into(cls, machine: Machine) -> None:
        """Replace the rounds of a machine that has opened none."""
        assert not machine.rounds.open, "a round is open already"
        rounds = cls(machine.history, machine.roster)
        rounds.asked = {}
        machine.rounds = machine.announcer.rounds = rounds

    def _ineligible(self, m: Member, fragment: int) -> str:
        why = super()._ineligible(m, fragment)
        done = m.step - self.asked.get((m.learner, m.incarnation), 0)
        if not why and done < self.steps_needed:
            why = f"has {done} of {self.steps_needed} steps"
        if not why:
            self.asked[(m.learner, m.incarnation)] = m.step
        return why
